//! Everything that the documents mention exists: files, links, headings, tests, commands, options, variables.
//!
//! A guarantee names its test and a runbook names its command. Nobody notices when such a name goes stale, so these tests
//! read every Markdown file of the repository, and ask the binary itself which commands and options it has.
//! `scripts/check-docs` runs them on their own.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
    process::Command,
};

/// The first parts of paths that mean a file of this repository.
const TOP: [&str; 8] =
    ["crates/", "docs/", "scripts/", "infra/", "bench/", "examples/", ".ci/", "target/services"];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().expect("the repository's root")
}

/// All files below `dir`, relative to the root, without what git ignores or keeps for itself.
fn files(dir: &Path, root: &Path, found: &mut BTreeSet<String>) {
    for entry in fs::read_dir(dir).expect("a directory").map(|entry| entry.expect("an entry")) {
        let path = entry.path();
        let name = entry.file_name().to_string_lossy().into_owned();
        if path.is_dir() {
            if !matches!(name.as_str(), ".git" | "target" | "node_modules") {
                files(&path, root, found);
            }
        } else {
            found.insert(path.strip_prefix(root).expect("below the root").to_string_lossy().into_owned());
        }
    }
}

struct Tree {
    root: PathBuf,
    files: BTreeSet<String>,
}

impl Tree {
    fn read() -> Self {
        let root = root();
        let mut found = BTreeSet::new();
        files(&root, &root, &mut found);
        Self { root, files: found }
    }

    fn documents(&self) -> impl Iterator<Item = Document> {
        self.files.iter().filter(|file| file.ends_with(".md")).map(|file| Document {
            path: file.clone(),
            text: fs::read_to_string(self.root.join(file)).expect("a readable document"),
        })
    }

    /// Every file that ends in one of these, with its text.
    fn texts(&self, endings: &[&str]) -> Vec<(&str, String)> {
        let wanted = |file: &&String| endings.iter().any(|ending| file.ends_with(ending));
        self.files.iter().filter(wanted).map(|file| (file.as_str(), self.text(file))).collect()
    }

    fn text(&self, file: &str) -> String {
        fs::read_to_string(self.root.join(file)).unwrap_or_default()
    }

    fn has(&self, path: &str) -> bool {
        let path = path.trim_end_matches('/');
        self.root.join(path).exists()
    }
}

struct Document {
    path: String,
    text: String,
}

impl Document {
    /// The text outside fenced blocks, by line number.
    fn prose(&self) -> Vec<(usize, &str)> {
        let mut fenced = false;
        let mut lines = Vec::new();
        for (number, line) in self.text.lines().enumerate() {
            if line.trim_start().starts_with("```") {
                fenced = !fenced;
            } else if !fenced {
                lines.push((number + 1, line));
            }
        }
        lines
    }

    /// Lines of the shell in fenced blocks, joined where they go on after a backslash.
    fn shell(&self) -> Vec<(usize, String)> {
        let mut language = None;
        let mut lines: Vec<(usize, String)> = Vec::new();
        let mut open = false;
        for (number, line) in self.text.lines().enumerate() {
            let line = line.trim_start();
            if let Some(name) = line.strip_prefix("```") {
                language = if language.is_some() { None } else { Some(name.trim().to_owned()) };
            } else if language.as_deref().is_some_and(|name| matches!(name, "sh" | "bash" | "console")) {
                let text = line.trim_end_matches('\\');
                match lines.last_mut() {
                    Some((_, before)) if open => before.push_str(text),
                    _ => lines.push((number + 1, text.to_owned())),
                }
                open = line.ends_with('\\');
            }
        }
        lines
    }

    /// What stands between single backticks, by line number.
    fn code(&self) -> Vec<(usize, String)> {
        let mut found = Vec::new();
        let prose = self.prose();
        // Spans may run over a line's end, so the prose is read as one text.
        let mut text = String::new();
        let mut starts = Vec::new();
        for (number, line) in prose {
            starts.push((text.len(), number));
            text.push_str(line);
            text.push(' ');
        }
        let line_of = |at: usize| {
            starts.iter().take_while(|(start, _)| *start <= at).last().map_or(0, |(_, number)| *number)
        };
        let mut at = 0;
        for (index, part) in text.split('`').enumerate() {
            if index % 2 == 1 {
                found.push((line_of(at), part.split_whitespace().collect::<Vec<_>>().join(" ")));
            }
            at += part.len() + 1;
        }
        found
    }
}

/// A heading's anchor, as the usual renderers make it.
fn anchor(heading: &str) -> String {
    heading
        .trim_start_matches('#')
        .trim()
        .to_lowercase()
        .chars()
        .filter(|letter| letter.is_alphanumeric() || matches!(letter, ' ' | '-' | '_'))
        .map(|letter| if letter == ' ' { '-' } else { letter })
        .collect()
}

fn report(problems: Vec<String>) {
    assert!(problems.is_empty(), "{} mentioned and not there:\n  {}", problems.len(), problems.join("\n  "));
}

#[test]
fn links_lead_to_files_and_headings() {
    let tree = Tree::read();
    let mut problems = Vec::new();
    for document in tree.documents() {
        let folder = Path::new(&document.path).parent().expect("a folder").to_path_buf();
        for (line, text) in document.prose() {
            for part in text.split("](").skip(1) {
                let Some(target) = part.split(')').next() else { continue };
                if target.contains("://") || target.starts_with("mailto:") {
                    continue;
                }
                let (file, heading) = target.split_once('#').unwrap_or((target, ""));
                let path = if file.is_empty() { PathBuf::from(&document.path) } else { folder.join(file) };
                let place = format!("{}:{line}: {target}", document.path);
                let Ok(found) = tree.root.join(&path).canonicalize() else {
                    problems.push(place);
                    continue;
                };
                if !heading.is_empty() {
                    let text = fs::read_to_string(found).unwrap_or_default();
                    if !text.lines().any(|line| line.starts_with('#') && anchor(line) == heading) {
                        problems.push(format!("{place} (no such heading)"));
                    }
                }
            }
        }
    }
    report(problems);
}

#[test]
fn paths_and_tests_exist() {
    let tree = Tree::read();
    let mut problems = Vec::new();
    for document in tree.documents() {
        for (line, code) in document.code() {
            let (path, test) = code.split_once("::").map_or((code.as_str(), None), |(p, t)| (p, Some(t)));
            let pattern = path.contains("NAME")
                || path.contains(|letter: char| letter.is_whitespace() || "*{}<>$…".contains(letter));
            if pattern || path.is_empty() {
                continue;
            }
            let place = format!("{}:{line}: {code}", document.path);
            let below_top = TOP.iter().any(|top| path.starts_with(top));
            let source = [".rs", ".sql", ".md"].iter().any(|ending| path.ends_with(ending));
            // A path may leave out the folders that it is clear without.
            let ending = format!("/{path}");
            let meant: Vec<&String> =
                tree.files.iter().filter(|file| *file == path || file.ends_with(&ending)).collect();
            if below_top && !path.starts_with("target/") && !tree.has(path) || source && meant.is_empty() {
                problems.push(place);
                continue;
            }
            let Some(test) = test.filter(|_| path.ends_with(".rs")) else { continue };
            let name = test.rsplit("::").next().unwrap_or(test);
            if !meant.iter().any(|file| has_function(&tree.text(file), name)) {
                problems.push(format!("{place} (no such function)"));
            }
        }
    }
    report(problems);
}

fn has_function(text: &str, name: &str) -> bool {
    text.contains(&format!("fn {name}(")) || text.contains(&format!("fn {name}<"))
}

/// In a table's column "test" or "shown by", a bare name is the name of a test.
#[test]
fn bare_names_of_tests_exist() {
    let tree = Tree::read();
    let sources = tree.texts(&[".rs"]);
    let mut problems = Vec::new();
    for document in tree.documents() {
        let mut column = None;
        for (line, text) in document.prose() {
            let cells: Vec<&str> = text.trim().trim_matches('|').split(" | ").map(str::trim).collect();
            if !text.starts_with('|') {
                column = None;
            } else if column.is_none() {
                column = cells.iter().position(|cell| ["test", "tests", "shown by"].contains(cell));
            }
            let Some(cell) = column.and_then(|column| cells.get(column)) else { continue };
            for name in cell.split('`').skip(1).step_by(2) {
                let is_name = name.chars().all(|letter| letter.is_ascii_alphanumeric() || letter == '_');
                if is_name && !sources.iter().any(|(_, text)| has_function(text, name)) {
                    problems.push(format!("{}:{line}: {name} (no such test)", document.path));
                }
            }
        }
    }
    report(problems);
}

#[test]
fn environment_variables_exist() {
    let tree = Tree::read();
    let code: Vec<String> =
        tree.files.iter().filter(|file| !file.ends_with(".md")).map(|file| tree.text(file)).collect();
    let mut problems = Vec::new();
    for document in tree.documents() {
        for (number, line) in document.text.lines().enumerate() {
            let words = line.split(|letter: char| !letter.is_ascii_alphanumeric() && letter != '_');
            for name in words.filter(|word| word.starts_with("AIRTIGHT_") && !word.ends_with('_')) {
                if !code.iter().any(|text| text.contains(name)) {
                    problems.push(format!("{}:{}: {name}", document.path, number + 1));
                }
            }
        }
    }
    report(problems);
}

/// A message or comment that says `docs/cdc.md, "A lost slot"` or `"A lost slot" in docs/cdc.md` names a heading.
#[test]
fn headings_that_the_source_names_exist() {
    let tree = Tree::read();
    let mut problems = Vec::new();
    let mut seen = 0;
    for (file, text) in tree.texts(&[".rs", ".sql", ".toml", ".sh", ".yaml", ".yml"]) {
        // A message or comment may go on in the next line, and a message's quotes are escaped.
        let text = text.replace("\\\n", " ").replace("\\\"", "\"").replace("///", " ").replace("//", " ");
        let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
        for (at, _) in text.match_indices("docs/") {
            let rest = &text[at..];
            let Some(end) = rest.find(".md").map(|end| end + 3) else { continue };
            let path = &rest[..end];
            if path.contains(|letter: char| !(letter.is_ascii_alphanumeric() || "/-._".contains(letter))) {
                continue;
            }
            seen += 1;
            let place = format!("{file}: {path}");
            if !tree.has(path) {
                problems.push(place);
                continue;
            }
            let quoted_after = rest[end..].strip_prefix(", \"").and_then(|text| text.split_once('"'));
            let quoted_before = text[..at].strip_suffix("\" in ").and_then(|text| text.rsplit_once('"'));
            let headings =
                quoted_after.map(|(name, _)| name).into_iter().chain(quoted_before.map(|(_, name)| name));
            for name in headings {
                let is_heading =
                    |line: &str| line.starts_with('#') && line.trim_start_matches('#').trim() == name;
                if !tree.text(path).lines().any(is_heading) {
                    problems.push(format!("{place} (no heading {name:?})"));
                }
            }
        }
    }
    assert!(
        seen > 10,
        "only {seen} mentions of documents were found in the source: is this test reading it?"
    );
    report(problems);
}

/// Asks the binary for a command's help, once each. None: no such command.
#[derive(Default)]
struct Helps(BTreeMap<Vec<String>, Option<String>>);

impl Helps {
    fn of(&mut self, words: &[String]) -> Option<&str> {
        self.0
            .entry(words.to_vec())
            .or_insert_with(|| {
                let mut command = Command::new(env!("CARGO_BIN_EXE_airtight"));
                let output = command.args(words).arg("--help").output().expect("the binary runs");
                output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
            })
            .as_deref()
    }
}

/// The words after `airtight` that are commands, and the options among the rest.
fn command_of(line: &str) -> Option<(Vec<String>, Vec<String>)> {
    let line = line.split(" #").next().unwrap_or(line);
    let rest = line.split_once("airtight ").filter(|(before, _)| {
        before.is_empty() || before.ends_with([' ', '(', '"']) || before.ends_with("cargo run --release -- ")
    });
    let rest = match line.split_once("cargo run --release -- ") {
        Some((_, rest)) => rest,
        None => rest?.1,
    };
    let words: Vec<&str> = rest.split(['|', ';', '>', ')']).next()?.split_whitespace().collect();
    let is_command = |word: &&&str| {
        word.chars().all(|letter| letter.is_ascii_lowercase() || letter == '-') && !word.starts_with('-')
    };
    let commands: Vec<String> =
        words.iter().take_while(is_command).take(2).map(|word| (*word).to_owned()).collect();
    let options = words
        .iter()
        .filter(|word| word.starts_with("--") && word.len() > 2)
        .map(|word| word.split(['=', ',', '`']).next().unwrap_or(word).to_owned())
        .collect();
    Some((commands, options))
}

#[test]
fn commands_and_their_options_exist() {
    let tree = Tree::read();
    let mut helps = Helps::default();
    let mut problems = Vec::new();
    let mut seen = 0;
    let top = helps.of(&[]).expect("help").to_owned();
    let listed = |help: &str, name: &str| {
        help.lines().any(|line| line.starts_with("  ") && line.split_whitespace().next() == Some(name))
    };
    for document in tree.documents().filter(|document| !document.path.starts_with("docs/adr/")) {
        let spans = document.code().into_iter().filter(|(_, code)| code.starts_with("airtight "));
        for (line, text) in document.shell().into_iter().chain(spans) {
            let Some((commands, options)) = command_of(&text) else { continue };
            let Some(first) = commands.first() else { continue };
            seen += 1;
            let place = format!("{}:{line}: {text}", document.path);
            if !listed(&top, first) {
                problems.push(format!("{place} (no command {first})"));
                continue;
            }
            let mut words = vec![first.clone()];
            let help = helps.of(&words).expect("the help of a listed command").to_owned();
            if let Some(second) = commands.get(1).filter(|second| listed(&help, second)) {
                words.push(second.clone());
            } else if help.contains("<COMMAND>") && commands.len() > 1 {
                problems.push(format!("{place} (no command {first} {})", commands[1]));
                continue;
            }
            let help = helps.of(&words).expect("the help of a listed command");
            for option in options {
                let known = help.split(|letter: char| letter.is_whitespace() || ",[]".contains(letter));
                if !known
                    .into_iter()
                    .any(|word| word == option || word.split(['=', '.']).next() == Some(&option))
                {
                    problems.push(format!("{place} (no option {option})"));
                }
            }
        }
    }
    assert!(seen > 50, "only {seen} commands were found in the documents: is this test reading them?");
    report(problems);
}
