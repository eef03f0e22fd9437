//! Bad input: an error that says what to do, and nothing moves.

use super::{Log, keys};

#[tokio::test(flavor = "multi_thread")]
async fn what_makes_no_sense_moves_nothing() {
    let Some(log) = Log::create("cli_log_bad").await else { return };
    log.publish(&["a", "b"]);
    log.drain("billing", "null:");
    let before = log.consumer("billing");
    for (args, code, expected) in [
        (&["seek", "billing", "--to-seq", "-1"] as &[&str], 1, "seq -1 is negative; 0 is the beginning"),
        (&["seek", "billing", "--to-seq", "3"], 1, "seq 3 is in the future: the last event has seq 2"),
        (&["seek", "billing", "--to-seq", "two"], 2, "invalid value 'two'"),
        (&["seek", "billing", "--to-time", "yesterday"], 2, "like 2026-01-31T18:30:00Z"),
        (&["seek", "billing", "--to-time", "2026-01-31"], 2, "write a date, a time and a zone"),
        (&["seek", "billing"], 2, "required arguments were not provided"),
        (&["seek", "billing", "--earliest", "--latest"], 2, "cannot be used with"),
        (&["seek", "biling", "--earliest"], 1, "there is no consumer `biling`; there are: billing"),
        (&["show", "biling"], 1, "there is no consumer `biling`; there are: billing"),
        (&["lag", "biling"], 1, "there is no consumer `biling`; there are: billing"),
        (&["pause", "biling"], 1, "there is no consumer `biling`; there are: billing"),
        (&["resume", "biling"], 1, "there is no consumer `biling`; there are: billing"),
        (&["remove", "biling"], 1, "there is no consumer `biling`; there are: billing"),
        (&["parked", "biling"], 1, "there is no consumer `biling`; there are: billing"),
    ] {
        let error = log.run(&[&["consumers"], args].concat()).error(code);
        assert!(error.contains(expected) || code == 2, "{args:?}: {error}");
    }
    for (args, code, expected) in [
        (&["dead", "list", "--consumer", "biling"] as &[&str], 1, "there is no consumer `biling`"),
        (&["dead", "retry", "--all", "--consumer", "biling"], 1, "there is no consumer `biling`"),
        (&["dead", "retry", "1", "--consumer", "biling"], 1, "there is no consumer `biling`"),
        (&["dead", "list", "--newest"], 2, "page with --after SEQ"),
        (&["prune", "--older-than", "1d"], 2, "use --keep"),
        (&["prune", "--keep", "long"], 2, "--keep: `long` is not a duration"),
        (
            &["run", "--to", "null:", "--drain"],
            1,
            "the outbox is a log; follow it with `--read log --consumer NAME`",
        ),
        (&["run", "--read", "log", "--to", "null:"], 2, "--read log needs --consumer NAME"),
        (&["run", "--read", "wal", "--to", "null:"], 2, "allowed words are `queue`, `log` and `cdc`"),
        (&["run", "--read", "cdc", "--consumer", "x", "--to", "null:"], 2, "--consumer is for a log"),
        (&["run", "--slot", "x", "--to", "null:"], 2, "--slot is for the WAL"),
        (&["run", "--read", "queue", "--consumer", "x", "--to", "null:"], 2, "--consumer is for a log"),
        (&["run", "--start", "latest", "--to", "null:"], 2, "--start is for a log"),
        (
            &["run", "--read", "log", "--consumer", "x", "--keep-done", "1d", "--to", "null:"],
            2,
            "use --keep-log",
        ),
        (&["run", "--read", "log", "--consumer", "x", "--keep-log", "1", "--to", "null:"], 2, "or `forever`"),
    ] {
        let error = log.run(args).error(code);
        assert!(error.contains(expected), "{args:?}: {error}");
    }
    assert_eq!(log.consumer("billing"), before);
    assert_eq!(keys(&log.run(&["consumers", "list", "--json"]).json(), "name"), ["billing"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_queue_has_no_consumers() {
    let Some(log) = Log::empty("cli_log_queue").await else { return };
    log.run(&["migrate"]).ok();
    for (args, code, expected) in [
        (
            &["consumers", "list"] as &[&str],
            1,
            "airtight.outbox is a queue; create a log with `airtight migrate --shape log`",
        ),
        (&["consumers", "seek", "x", "--earliest"], 1, "airtight.outbox is a queue"),
        (
            &["run", "--read", "log", "--consumer", "x", "--to", "null:", "--drain"],
            1,
            "airtight.outbox is a queue",
        ),
        (&["dead", "list", "--consumer", "x"], 2, "--consumer is for a log, and this outbox is a queue"),
        (&["dead", "retry", "1", "--consumer", "x"], 2, "--consumer is for a log"),
        (&["dead", "discard", "--all", "--yes", "--consumer", "x"], 2, "--consumer is for a log"),
        (&["dead", "show", "1", "--consumer", "x"], 2, "--consumer is for a log"),
        (&["prune", "--keep", "1d"], 2, "use --older-than"),
        (&["prune", "--ignore-consumers"], 2, "use --older-than"),
        (&["migrate", "--shape", "log"], 1, "airtight.outbox is a queue already"),
    ] {
        let error = log.run(args).error(code);
        assert!(error.contains(expected), "{args:?}: {error}");
    }
    log.write("airtight.toml", "[pipelines.a]\nread = \"log\"\nto = \"null:\"\n");
    let ran = log.run(&["check", "-c", "airtight.toml"]);
    assert!(ran.code == Some(1) && ran.stdout.contains("pipelines.a: the outbox is a queue"), "{ran:?}");
}
