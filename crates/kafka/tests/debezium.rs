//! The real Debezium against the recorded messages that `airtight-core` compares its encoder with.
//!
//! `AIRTIGHT_BLESS=1 cargo test -p airtight-kafka --test debezium` records them anew.

#![allow(clippy::unwrap_used, reason = "a failing test should panic")]

#[path = "debezium/cases.rs"]
mod cases;
#[path = "debezium/golden.rs"]
mod golden;
#[path = "debezium/recorder.rs"]
mod recorder;

#[tokio::test(flavor = "multi_thread")]
async fn debezium_still_writes_what_was_recorded() {
    let Some(goldens) = recorder::record("debezium_still_writes_what_was_recorded").await else { return };
    let bless = std::env::var_os("AIRTIGHT_BLESS").is_some();
    std::fs::create_dir_all(golden::folder()).unwrap();
    for golden in goldens {
        if bless {
            std::fs::write(golden.path(), golden.text()).unwrap();
            continue;
        }
        let recorded = std::fs::read_to_string(golden.path()).unwrap_or_default();
        assert_eq!(golden.text(), recorded, "{} has changed", golden.case);
    }
}
