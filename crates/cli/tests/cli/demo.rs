//! `airtight demo`.

use crate::support::{Running, airtight, finish};

#[test]
fn nothing_is_lost_phantom_or_out_of_order() {
    let ran = finish(airtight(["demo", "--headless", "--json", "--events", "1500", "--seed", "7"]), "");
    assert_eq!(ran.stdout.lines().count(), 1, "one object and nothing else: {ran:?}");
    let audit = ran.json();
    let names: Vec<&str> = audit.as_object().unwrap().keys().map(String::as_str).collect();
    let mut expected = [
        "committed",
        "rolled_back",
        "delivered",
        "duplicates",
        "lost",
        "phantom",
        "dead",
        "out_of_order",
        "events_per_second",
    ];
    expected.sort_unstable();
    assert_eq!(names, expected);
    assert_eq!((&audit["committed"], &audit["delivered"]), (&1_500.into(), &1_500.into()));
    for name in ["lost", "phantom", "dead", "out_of_order"] {
        assert_eq!(audit[name], 0, "{audit}");
    }
    assert!(audit["duplicates"].as_u64() > Some(0), "an answer was lost: {audit}");
    assert!(audit["events_per_second"].as_f64() > Some(0.0), "{audit}");
}

/// All that the audit counts; how long it took is the machine's.
#[test]
fn a_seed_makes_the_same_demo_again() {
    let audit = |seed: &str| {
        let mut audit =
            finish(airtight(["demo", "--headless", "--json", "--events", "3000", "--seed", seed]), "").json();
        audit.as_object_mut().unwrap().remove("events_per_second");
        audit
    };
    let first = audit("7");
    assert!(first["rolled_back"].as_u64() > Some(0) && first["duplicates"].as_u64() > Some(0), "{first}");
    assert_eq!(audit("7"), first);
    assert_ne!(audit("8"), first, "another seed is another demo");
}

#[test]
fn it_stops_after_the_seconds_given_and_explains_itself() {
    let text = finish(airtight(["demo", "--headless", "--seconds", "1"]), "").ok();
    for words in ["committed", "rolled back", "phantom", "Try next:", "airtight migrate"] {
        assert!(text.contains(words), "{text}");
    }
}

#[cfg(unix)]
#[test]
fn an_interrupted_demo_delivers_what_was_committed_and_audits_it() {
    let demo = Running::start(airtight(["demo", "--headless", "--seconds", "600"]));
    demo.wait_for_log("committed");
    demo.signal("INT");
    let (status, text) = demo.wait();
    assert!(status.success(), "{status}: {text}");
    assert!(text.contains("The audit"), "{text}");
}

#[test]
fn it_leaves_nothing_behind() {
    let dir = tempfile::tempdir().unwrap();
    let mut command = airtight(["demo", "--headless", "--events", "50"]);
    command.env("TMPDIR", dir.path());
    finish(command, "").ok();
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}
