//! Help, completions, exit codes.

use std::process::Stdio;

use crate::support::{Shop, airtight, finish};

const COMMANDS: [&[&str]; 26] = [
    &["demo"],
    &["migrate"],
    &["check"],
    &["run"],
    &["publish"],
    &["status"],
    &["events", "list"],
    &["events", "show"],
    &["events", "retry"],
    &["events", "discard"],
    &["events", "blocked"],
    &["dead", "list"],
    &["dead", "show"],
    &["dead", "retry"],
    &["dead", "discard"],
    &["consumers", "list"],
    &["consumers", "show"],
    &["consumers", "seek"],
    &["consumers", "pause"],
    &["consumers", "resume"],
    &["consumers", "remove"],
    &["consumers", "lag"],
    &["consumers", "parked"],
    &["tail"],
    &["prune"],
    &["completions"],
];

#[test]
fn every_command_has_help_with_examples() {
    let top = finish(airtight(["--help"]), "").ok();
    for command in COMMANDS {
        assert!(top.contains(command[0]), "{command:?} in\n{top}");
        let args = command.iter().copied().chain(["--help"]);
        let help = finish(airtight(args), "").ok();
        assert!(help.contains("Usage: airtight"), "{help}");
        assert!(help.contains("Examples:"), "{command:?} has no example:\n{help}");
    }
}

#[test]
fn every_reading_command_takes_json() {
    for command in COMMANDS.iter().filter(|command| command[0] != "completions") {
        let help = finish(airtight(command.iter().copied().chain(["--help"])), "").ok();
        assert!(help.contains("--json"), "{command:?}");
    }
}

#[test]
fn completions_for_every_shell() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = finish(airtight(["completions", shell]), "").ok();
        assert!(script.contains("airtight") && script.len() > 1_000, "{shell}");
    }
}

#[test]
fn wrong_usage_is_exit_code_2() {
    for args in [
        &["frobnicate"] as &[&str],
        &["run"],
        &["run", "--to"],
        &["dead", "retry"],
        &["dead", "discard", "--all"],
        &["events", "list", "--state", "finished"],
        &["publish", "--stream", "s"],
    ] {
        let ran = finish(airtight(args), "");
        assert_eq!(ran.code, Some(2), "{args:?}: {ran:?}");
    }
}

/// What cannot be taken back asks, and where nobody can be asked it wants `--yes`: all of them alike.
#[test]
fn what_loses_something_wants_yes_where_nobody_can_be_asked() {
    let shop = Shop::new();
    let url = "sqlite:log.db";
    shop.run(&["migrate", "--url", url, "--shape", "log"]).ok();
    let event = "{\"stream\":\"s\",\"type\":\"T\",\"aggregateType\":\"A\",\"aggregateId\":\"1\"}\n";
    shop.run_with(&["publish", "--url", url], event).ok();
    let follow = ["run", "--from", url, "--read", "log", "--consumer", "c", "--to", "null:", "--drain"];
    shop.run(&follow).ok();
    let args =
        |words: &str| -> Vec<String> { words.split(' ').chain(["--url", url]).map(str::to_owned).collect() };
    let run = |words: &str| {
        let args = args(words);
        shop.run(&args.iter().map(String::as_str).collect::<Vec<_>>())
    };
    // Delivering again loses nothing.
    run("consumers seek c --earliest").ok();
    for words in ["consumers seek c --latest", "consumers remove c", "dead discard --all"] {
        let error = run(words).error(2);
        assert!(error.ends_with("nothing was changed: pass --yes"), "{words}: {error}");
    }
    assert_eq!(run("consumers lag c").ok(), "1\n", "nothing has moved");
    for words in ["consumers seek c --latest --yes", "dead discard --all --yes", "consumers remove c --yes"] {
        run(words).ok();
    }
}

#[test]
fn a_command_without_a_database_says_how_to_give_one() {
    assert_eq!(
        finish(airtight(["status"]), "").error(2),
        "error: no database given; pass --url sqlite:PATH or --url postgres://USER@HOST/DATABASE, or set DATABASE_URL"
    );
}

#[test]
fn a_reader_that_goes_away_is_no_failure() {
    let mut child = airtight(["completions", "bash"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("starts");
    drop(child.stdout.take());
    let output = child.wait_with_output().expect("ends");
    assert!(output.status.success(), "{output:?}");
    assert!(output.stderr.is_empty(), "{output:?}");
}

#[test]
fn a_file_that_is_not_there_is_not_created() {
    let shop = Shop::new();
    let error = shop.run(&["status", "--url", "sqlite:typo.db"]).error(1);
    assert!(error.contains("there is no file typo.db"), "{error}");
    assert!(error.contains("airtight migrate --url sqlite:typo.db"), "{error}");
    assert!(!shop.path("typo.db").exists());
}

#[test]
fn an_outbox_without_tables_says_what_to_do() {
    let shop = Shop::new();
    shop.write("empty.db", "");
    let error = shop.run(&["status", "--url", "sqlite:empty.db"]).error(1);
    assert!(error.contains("airtight migrate"), "{error}");
}
