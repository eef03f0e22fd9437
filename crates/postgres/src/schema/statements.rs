//! From a migration's text to its statements, and the object that each statement creates. `migrate` and `check` use it to look
//! for the objects instead of trusting the version number.

/// One statement, with its placeholders.
#[derive(Debug)]
pub(super) struct Statement<'a> {
    pub(super) text: &'a str,
    pub(super) makes: Makes<'a>,
    /// `CREATE OR REPLACE`: it replaces what an earlier statement created.
    pub(super) replaces: bool,
}

/// What a statement makes. Names are placeholders still.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Makes<'a> {
    Table(&'a str),
    Sequence(&'a str),
    Index(&'a str, On<'a>),
    Function(&'a str),
    Trigger(&'a str, On<'a>),
    Columns(On<'a>, Vec<&'a str>),
    /// The log's own row in `log`.
    Floor,
    /// Nothing: it removes something, once.
    Once,
    /// Nothing that would be missed by itself: it is run when the outbox is made. The first partition, which retention
    /// drops in its time, is one.
    Along,
}

/// The table that something belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct On<'a>(pub(super) &'a str);

/// The statements of a migration, without its comments.
pub(super) fn statements(migration: &str) -> impl Iterator<Item = Statement<'_>> {
    split(migration).into_iter().map(|text| {
        let (makes, replaces) = makes(text);
        Statement { text, makes, replaces }
    })
}

fn makes(text: &str) -> (Makes<'_>, bool) {
    let mut words = text
        .split(|letter: char| letter.is_whitespace() || letter == '(' || letter == ',')
        .filter(|word| !word.is_empty())
        .peekable();
    let mut next = || words.next().unwrap_or_default();
    let first = next();
    let mut kind = next();
    let mut replaces = false;
    if kind == "OR" {
        (kind, replaces) = (nth(&mut next, 1), true);
    }
    if kind == "UNIQUE" {
        kind = next();
    }
    let name = next();
    let makes = match (first, kind) {
        _ if name == "{outbox:first}" || name == "{index:first_id}" || name == "{index:default_id}" => {
            Makes::Along
        }
        ("CREATE", "TABLE") => Makes::Table(name),
        ("CREATE", "SEQUENCE") => Makes::Sequence(name),
        ("CREATE", "INDEX") => Makes::Index(name, On(nth(&mut next, 1))),
        ("CREATE", "FUNCTION") => Makes::Function(name),
        // CREATE TRIGGER name BEFORE INSERT ON table
        ("CREATE", "TRIGGER") => Makes::Trigger(name, On(nth(&mut next, 3))),
        ("ALTER", "TABLE") => {
            let mut columns = Vec::new();
            while let Some(word) = words.next() {
                if word == "COLUMN" {
                    columns.extend(words.next());
                }
            }
            Makes::Columns(On(name), columns)
        }
        ("INSERT", "INTO") => Makes::Floor,
        ("DROP", _) => Makes::Once,
        _ => Makes::Along,
    };
    (makes, replaces)
}

/// The word after so many others.
fn nth<'a>(next: &mut impl FnMut() -> &'a str, skip: usize) -> &'a str {
    for _ in 0..skip {
        next();
    }
    next()
}

/// Cuts at semicolons, but for those in comments, quotes and function bodies.
fn split(text: &str) -> Vec<&str> {
    let mut statements = Vec::new();
    let mut rest = text;
    let (mut start, mut at) = (0, 0);
    while !rest.is_empty() {
        let step = if rest.starts_with("--") {
            let end = rest.find('\n').map_or(rest.len(), |end| end + 1);
            // A comment before a statement is not part of it.
            if text[start..at].trim().is_empty() {
                start = at + end;
            }
            end
        } else if let Some(body) = rest.strip_prefix("$body$") {
            "$body$".len() + body.find("$body$").map_or(body.len(), |end| end + "$body$".len())
        } else if let Some(quoted) = rest.strip_prefix('\'') {
            1 + quoted.find('\'').map_or(quoted.len(), |end| end + 1)
        } else if rest.starts_with(';') {
            statements.push(text[start..at].trim());
            start = at + 1;
            1
        } else {
            rest.chars().next().map_or(1, char::len_utf8)
        };
        at += step;
        rest = text.get(at..).unwrap_or_default();
    }
    statements
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The object of an unknown kind of statement would never be found missing.
    #[test]
    fn every_statement_of_every_migration_is_understood() {
        for (version, _, _, text) in super::super::MIGRATIONS {
            let all: Vec<_> = statements(text).collect();
            assert!(!all.is_empty(), "{version}");
            for statement in &all {
                let known = match &statement.makes {
                    Makes::Along => {
                        statement.text.starts_with("ALTER SEQUENCE")
                            || statement.text.contains("{outbox:first}")
                            || statement.text.contains("{outbox:default} (id)")
                    }
                    Makes::Once => statement.text.starts_with("DROP INDEX IF EXISTS"),
                    Makes::Columns(_, columns) => !columns.is_empty(),
                    Makes::Trigger(name, On(table)) => {
                        name.starts_with("{trigger:") && *table == "{outbox}"
                            || table.starts_with("{schema}.")
                    }
                    Makes::Index(_, On(table)) => table.starts_with('{'),
                    Makes::Floor => statement.text.contains("{schema}.log"),
                    Makes::Table(name) | Makes::Sequence(name) | Makes::Function(name) => {
                        name.starts_with('{')
                    }
                };
                assert!(known, "{version}: {statement:?}");
            }
            let whole: String = text.lines().filter(|line| !line.trim_start().starts_with("--")).collect();
            let parts: usize = all.iter().map(|one| one.text.matches("CREATE ").count()).sum();
            assert_eq!(
                parts,
                whole.matches("CREATE ").count(),
                "{version}: nothing falls between two statements"
            );
        }
    }

    #[test]
    fn semicolons_in_bodies_quotes_and_comments_do_not_cut() {
        let text = "-- a; b\nCREATE FUNCTION {schema}.f() AS $body$ a; 'b'; $body$;\n-- c\nINSERT INTO {schema}.log VALUES (';');\n";
        let all: Vec<_> = statements(text).map(|one| one.text).collect();
        assert_eq!(
            all,
            [
                "CREATE FUNCTION {schema}.f() AS $body$ a; 'b'; $body$",
                "INSERT INTO {schema}.log VALUES (';')"
            ]
        );
    }
}
