//! Records which tests ran against a real server, and which were skipped.
//!
//! Each test appends a line to the file that `AIRTIGHT_TEST_LEDGER` names, so that `scripts/test` can report how many
//! tests ran against a real server, which did not, and which checks of a conformance suite a backend cannot run.

use std::{env, fs::OpenOptions, io::Write, path::Path};

const LEDGER: &str = "AIRTIGHT_TEST_LEDGER";

/// Records that a test runs against a real `server` (`postgres`, `kafka`, …).
pub fn met(server: &str, test_name: &str) {
    note(&format!("{server} {}", qualified(test_name)));
}

/// Records that a test is skipped because the variable `unset` is not set; `what` says what is missing.
///
/// # Panics
///
/// In CI, where no test is skipped.
pub fn skip(test_name: &str, what: &str, unset: &str) {
    skip_for(test_name, &format!("{what} ({unset} is not set; see scripts/services)"));
}

/// The same for any other reason.
///
/// # Panics
///
/// In CI, where no test is skipped.
pub fn skip_for(test_name: &str, reason: &str) {
    let test = qualified(test_name);
    assert!(!in_ci(), "{test}: {reason}, and in CI no test is skipped");
    eprintln!("\n######## SKIPPED {test}: {reason} ########\n");
    note(&format!("skipped {test}: {reason}"));
}

/// The same for a test that may be skipped in CI, too, because what it needs is not available everywhere.
pub fn leave_out(test_name: &str, what: &str, unset: &str) {
    let test = qualified(test_name);
    let reason = format!("{what} ({unset} is not set; see scripts/services)");
    eprintln!("\n######## LEFT OUT {test}: {reason} ########\n");
    note(&format!("left-out {test}: {reason}"));
}

/// Records that a backend cannot run a conformance check, or the rest of it, because it lacks the feature that the check
/// is about. `lacks` names the feature.
pub fn cannot(check: &str, lacks: &str) {
    let thread = std::thread::current();
    // libtest names a test's thread after the test, with its modules.
    let test = match thread.name() {
        Some(name) if name == check || name.ends_with(&format!("::{check}")) => name.to_owned(),
        Some(name) if name != "main" => format!("{name}, {check}"),
        _ => check.to_owned(),
    };
    note(&format!("cannot {}: lacks {lacks}", qualified(&test)));
}

/// Whether this is CI, where everything is required.
pub fn in_ci() -> bool {
    variable("CI").is_some_and(|value| value != "false" && value != "0")
}

/// The value of an environment variable, if it is not empty.
pub fn variable(name: &str) -> Option<String> {
    env::var(name).ok().filter(|value| !value.is_empty())
}

/// The test's name after that of its binary, because two crates may use the same test name.
fn qualified(test_name: &str) -> String {
    let binary = env::current_exe().ok();
    let stem = binary.as_deref().and_then(Path::file_stem).and_then(|stem| stem.to_str());
    // cargo appends a hash: airtight_postgres-0123456789abcdef
    match stem.and_then(|stem| stem.rsplit_once('-')) {
        Some((binary, _)) => format!("{binary}::{test_name}"),
        None => test_name.to_owned(),
    }
}

fn note(line: &str) {
    let Some(path) = variable(LEDGER) else { return };
    let written = OpenOptions::new()
        .append(true)
        .create(true)
        .open(&path)
        // In one write, since other test processes append to the file at the same time.
        .and_then(|mut file| file.write_all(format!("{line}\n").as_bytes()));
    if let Err(error) = written {
        eprintln!("cannot write to the test ledger {path}: {error}");
    }
}
