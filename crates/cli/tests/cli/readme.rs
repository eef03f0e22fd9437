//! The commands of README and docs/getting-started.md, run from top to bottom in an empty directory, as a new user would.

use std::{fs, os::unix::fs::PermissionsExt, path::Path, process::Command, time::Duration};

use airtight_testkit::{ledger, postgres::TestDb, wait::eventually};

const README: &str = include_str!("../../../../README.md");
const GETTING_STARTED: &str = include_str!("../../../../docs/getting-started.md");

/// What stands in for the rest of the machine. `cargo run --release --` is the binary under test; what builds, tests or
/// starts servers has tests of its own. `psql` is given the SQL that follows. A relay that would go on for ever drains.
const PRELUDE: &str = r#"
set -euo pipefail
cargo() {
    case "$1 $2" in
        "run --release") shift 3; airtight "$@" ;;
        "run -p" | "install --path") ;;
        *) echo "the documents ask for something new: cargo $*" >&2; return 1 ;;
    esac
}
airtight() {
    case " $* " in
        *" run "*" --drain "*) "$AIRTIGHT" "$@" ;;
        " run "*) "$AIRTIGHT" "$@" --drain ;;
        " demo ") "$AIRTIGHT" demo --headless --events 200 ;;
        *) "$AIRTIGHT" "$@" ;;
    esac
}
"#;

/// The blocks of both pages in order: what the shell is given, and what `psql` is.
fn script(database: &str, kafka: &str) -> String {
    let mut text = PRELUDE.to_owned();
    let mut language: Option<&str> = None;
    let mut asked = false;
    for line in README.lines().chain(GETTING_STARTED.lines()) {
        if let Some(name) = line.strip_prefix("```") {
            if language == Some("sql") && asked {
                text.push_str("SQL\n");
                asked = false;
            }
            language = if language.is_some() { None } else { Some(name.trim()) };
            continue;
        }
        match language {
            Some("sh") if line.starts_with("psql ") => {
                text.push_str(&format!("{line} --quiet --set ON_ERROR_STOP=1 > psql.out <<'SQL'\n"));
                asked = true;
            }
            Some("sh") => {
                // The line itself says where it stands when it fails.
                let shown = line.replace('\'', "'\\''");
                text.push_str(&format!("echo '$ {shown}' >&2\n{line}\n"));
            }
            Some("sql") if asked => text.push_str(&format!("{line}\n")),
            _ => {}
        }
    }
    for placeholder in ["postgres://app@localhost/shop", "postgres://relay@localhost/shop"] {
        text = text.replace(placeholder, database);
    }
    text.replace("broker:9092", kafka)
}

fn write_executable(path: &Path, text: &str) {
    fs::create_dir_all(path.parent().expect("a folder")).expect("made");
    fs::write(path, text).expect("written");
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).expect("set");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_commands_work_from_top_to_bottom() {
    const TEST: &str = "the_commands_work_from_top_to_bottom";
    let Some(db) = TestDb::create("readme").await else { return };
    let Some(kafka) = ledger::variable("AIRTIGHT_TEST_KAFKA") else {
        ledger::skip(TEST, "no kafka", "AIRTIGHT_TEST_KAFKA");
        return;
    };
    ledger::met("kafka", TEST);
    let pool = db.pool(1).await;
    // The reader's own table.
    sqlx::raw_sql("CREATE TABLE orders (id bigint PRIMARY KEY, total bigint)").execute(&pool).await.unwrap();

    let dir = tempfile::tempdir().unwrap();
    write_executable(
        &dir.path().join("scripts/services"),
        "#!/bin/sh\n[ \"$1\" != env ] || env | grep ^AIRTIGHT_TEST_\n",
    );
    write_executable(&dir.path().join("scripts/test"), "#!/bin/sh\n");
    let work = script(&db.url(), &kafka);
    for words in ["airtight consumers list", "--read cdc", "airtight.publish("] {
        assert!(work.contains(words), "the blocks of the documents are no longer found: {words}");
    }
    let mut shell = Command::new("bash");
    shell.args(["-c", &work]).current_dir(dir.path()).env("AIRTIGHT", env!("CARGO_BIN_EXE_airtight"));
    shell.env_remove("DATABASE_URL").env("AIRTIGHT_TEST_KAFKA", &kafka);
    let output = tokio::task::block_in_place(|| shell.output().expect("bash runs"));
    let (said, printed) = (String::from_utf8_lossy(&output.stderr), String::from_utf8_lossy(&output.stdout));
    assert!(output.status.success(), "{said}\n{printed}");
    // The slot outlives the database otherwise.
    let dropped = "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE database = current_database()";
    eventually(Duration::from_secs(30), "the slot to be let go of", async || {
        sqlx::query(dropped).execute(&pool).await.is_ok()
    })
    .await;
    for line in
        ["billing            1          0       1    0", "mail               1          0       1    0"]
    {
        assert!(printed.contains(line), "as getting-started.md shows it: {line}\n{printed}");
    }
    let table = fs::read_to_string(dir.path().join("psql.out")).unwrap();
    assert!(table.contains("| seq | is_new"), "{table}");
}
