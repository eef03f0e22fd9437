//! The list of codes and docs/errors.md say the same.

use std::path::Path;

use airtight_core::Code;

/// The cells of the table of codes: code, class, meaning, what to do.
fn documented() -> Vec<Vec<String>> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/errors.md");
    let text = std::fs::read_to_string(path).expect("docs/errors.md is there");
    let (_, table) =
        text.split_once("| code | usually | meaning | what to do |").expect("it has the table of codes");
    let rows = table.lines().skip(2).take_while(|line| line.starts_with('|'));
    rows.map(|row| row.trim_matches('|').split(" | ").map(|cell| cell.trim().to_owned()).collect()).collect()
}

#[test]
fn the_documented_codes_are_the_listed_ones() {
    let documented = documented();
    let codes = |rows: &[Vec<String>]| rows.iter().map(|row| row[0].clone()).collect::<Vec<_>>();
    let listed: Vec<String> = Code::ALL.iter().map(|known| format!("`{}`", known.code)).collect();
    assert_eq!(codes(&documented), listed);
    for (row, known) in documented.iter().zip(Code::ALL) {
        assert_eq!(row[1..3], [known.usually.as_str(), known.meaning], "{}", known.code);
        assert!(row.len() == 4 && !row[3].is_empty(), "{}: what to do?", known.code);
    }
}

#[test]
fn a_code_is_listed_once_and_is_one_word() {
    for pair in Code::ALL.windows(2) {
        assert!(pair[0].code < pair[1].code, "{} before {}", pair[0].code, pair[1].code);
    }
    for known in Code::ALL {
        assert!(known.code.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_'), "{}", known.code);
        assert!(known.meaning.ends_with('.'), "{}", known.code);
    }
}
