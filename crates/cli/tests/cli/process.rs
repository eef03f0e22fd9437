//! How a process of several pipelines, a signal or a reader that goes away ends.

use std::{
    fs,
    io::{BufRead, BufReader, Read},
    process::{Child, Command, Stdio},
    sync::mpsc,
    time::{Duration, Instant},
};

use airtight_testkit::http::{HttpServer, Reply};
use serde_json::Value;

use crate::support::{DEADLINE, Ran, Running, Shop};

/// Two pipelines; `one` reads a stream that [`occupy`] has taken.
const TWO: &str = "[pipelines.one]\nstreams = [\"a\"]\nto = \"null:\"\n\
    [pipelines.two]\nstreams = [\"b\"]\npoll = \"20ms\"\nto = \"file:two.ndjson\"\n";

/// Asks until it is so.
#[track_caller]
fn until(what: &str, mut is: impl FnMut() -> bool) {
    let deadline = Instant::now() + DEADLINE;
    while !is() {
        assert!(Instant::now() < deadline, "not in time: {what}");
    }
}

fn relays(shop: &Shop) -> usize {
    shop.run(&["status", "--json"]).json()["relays"].as_array().map_or(0, Vec::len)
}

fn publish(shop: &Shop, stream: &str) {
    let line =
        format!("{{\"stream\":\"{stream}\",\"type\":\"T\",\"aggregateType\":\"A\",\"aggregateId\":\"1\"}}");
    shop.run_with(&["publish"], &line).ok();
}

fn lines(shop: &Shop, file: &str) -> usize {
    fs::read_to_string(shop.path(file)).unwrap_or_default().lines().count()
}

/// Reads `a` without order. A relay that keeps order on the same stream is refused while this one lives.
fn occupy(shop: &Shop) -> Running {
    let other = Running::start(shop.command(&["run", "--to", "null:", "--stream", "a", "--order", "none"]));
    until("it joins", || relays(shop) == 1);
    other
}

#[cfg(unix)]
#[test]
fn a_pipeline_that_ends_leaves_the_others_at_work() {
    let shop = Shop::new();
    let other = occupy(&shop);
    shop.write("airtight.toml", TWO);
    let relay = Running::start(shop.command(&["run", "-c", "airtight.toml"]));
    let said = relay.wait_for_log("the other pipelines continue");
    assert!(said.contains("ERROR") && said.contains("pipeline=\"one\""), "{said}");
    publish(&shop, "b");
    until("`two` delivers", || lines(&shop, "two.ndjson") == 1);
    let status = shop.run(&["status", "-c", "airtight.toml", "--json"]).json();
    let expected = serde_json::json!([{"name": "one", "running": false}, {"name": "two", "running": true}]);
    assert_eq!(status["pipelines"], expected, "{status}");
    let shown = shop.run(&["status", "-c", "airtight.toml"]).ok();
    assert!(shown.contains("pipeline `one` is in the config, but no relay runs it"), "{shown}");
    relay.signal("TERM");
    let (status, rest) = relay.wait();
    assert_eq!(status.code(), Some(1), "one of its pipelines failed: {rest}");
    let error = rest.lines().find(|line| line.starts_with("error: ")).unwrap_or_default();
    assert!(error.starts_with("error: pipeline `one`: "), "{rest}");
    assert!(error.ends_with("; these pipelines did not fail: `two`"), "{rest}");
    until("both have left", || relays(&shop) == 1);
    other.signal("TERM");
    assert!(other.wait().0.success());
}

#[cfg(unix)]
#[test]
fn all_stop_with_one_where_that_is_set() {
    let shop = Shop::new();
    let other = occupy(&shop);
    shop.write("airtight.toml", TWO);
    shop.write("stop.toml", &format!("{TWO}[run]\non_pipeline_end = \"stop\"\n"));
    for args in
        [&["run", "-c", "stop.toml"] as &[&str], &["run", "-c", "airtight.toml", "--on-pipeline-end", "stop"]]
    {
        let error = shop.run(args).error(1);
        assert!(error.starts_with("error: pipeline `one`: "), "{error}");
        assert_eq!(relays(&shop), 1, "`two` has left");
    }
    other.signal("TERM");
    assert!(other.wait().0.success());
}

#[cfg(unix)]
#[test]
fn a_drain_goes_on_without_the_pipeline_that_ended_and_names_it() {
    let shop = Shop::new();
    let other = occupy(&shop);
    publish(&shop, "b");
    shop.write("airtight.toml", TWO);
    let ran = shop.run(&["run", "-c", "airtight.toml", "--drain", "--json"]);
    let summary: Value = serde_json::from_str(&ran.stdout).unwrap_or_else(|error| panic!("{error}: {ran:?}"));
    assert_eq!((ran.code, &summary["delivered"]), (Some(1), &1.into()), "{ran:?}");
    let ended: Vec<(&str, bool)> = summary["pipelines"]
        .as_array()
        .unwrap()
        .iter()
        .map(|one| (one["name"].as_str().unwrap(), one["error"].is_object()))
        .collect();
    assert_eq!(ended, [("one", true), ("two", false)], "{summary}");
    let error = &summary["pipelines"][0]["error"];
    assert_eq!(
        (&error["code"], &error["class"], &error["scope"]),
        (&"overlap".into(), &"permanent".into(), &"event".into())
    );
    assert!(error["message"].is_string(), "{summary}");
    other.signal("TERM");
    assert!(other.wait().0.success());
}

#[cfg(unix)]
#[test]
fn the_process_ends_with_its_last_pipeline() {
    let shop = Shop::new();
    let other = occupy(&shop);
    shop.write("airtight.toml", "[pipelines.one]\nstreams = [\"a\"]\nto = \"null:\"\n");
    let error = shop.run(&["run", "-c", "airtight.toml"]).error(1);
    assert!(error.starts_with("error: pipeline `one`: "), "{error}");
    other.signal("TERM");
    assert!(other.wait().0.success());
}

/// The documented example: one consumer that halts, one that does not.
#[cfg(unix)]
#[tokio::test(flavor = "multi_thread")]
async fn a_consumer_that_halts_does_not_halt_the_others() {
    let server = HttpServer::start().await;
    server.rule(|_| Reply::status(422));
    let shop = Shop::new();
    let log = |args: &[&str], input: &str| -> Ran {
        let mut command = shop.command(args);
        command.env("DATABASE_URL", "sqlite:log.db");
        tokio::task::block_in_place(|| crate::support::finish(command, input))
    };
    log(&["migrate", "--shape", "log"], "").ok();
    let event = "{\"stream\":\"s\",\"type\":\"T\",\"aggregateType\":\"A\",\"aggregateId\":\"1\"}\n";
    log(&["publish"], event).ok();
    shop.write(
        "airtight.toml",
        &format!(
            "[database]\nurl = \"sqlite:log.db\"\nshape = \"log\"\n\
             [pipelines.billing]\npoll = \"20ms\"\nto = \"file:billing.ndjson\"\n\
             [pipelines.search]\non_failure = \"halt\"\nto = \"{}\"\n",
            server.url("/")
        ),
    );
    let relay = Running::start(shop.command(&["run", "-c", "airtight.toml"]));
    tokio::task::block_in_place(|| {
        let said = relay.wait_for_log("the other pipelines continue");
        assert!(said.contains("pipeline=\"search\""), "{said}");
        for _ in 0..3 {
            log(&["publish"], event).ok();
        }
        until("`billing` delivers", || lines(&shop, "billing.ndjson") == 4);
        relay.signal("TERM");
        let (status, rest) = relay.wait();
        assert_eq!(status.code(), Some(1), "{rest}");
        assert!(rest.contains("error: pipeline `search`: "), "{rest}");
    });
}

/// A relay whose only delivery hangs for as long as the receiver lives.
#[cfg(unix)]
fn hanging(shop: &Shop) -> (Running, std::net::TcpStream) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let to = format!("http://{}/", listener.local_addr().expect("an address"));
    shop.publish("1", "{}");
    shop.write("airtight.toml", &format!("[pipelines.one]\ngrace = \"1s\"\nto = \"{to}\"\n"));
    let relay = Running::start(shop.command(&["run", "-c", "airtight.toml"]));
    let (connection, _) = listener.accept().expect("a connection");
    (relay, connection)
}

/// As coreutils' `timeout` sends them: to the process, then to its group.
#[cfg(unix)]
#[test]
fn two_signals_at_once_are_one() {
    let shop = Shop::new();
    let (relay, connection) = hanging(&shop);
    let id = relay.id();
    let sent = Command::new("sh").args(["-c", &format!("kill -TERM {id}; kill -INT {id}")]).status().unwrap();
    assert!(sent.success());
    let (status, rest) = relay.wait();
    assert!(status.success(), "{status}: {rest}");
    assert_eq!(relays(&shop), 0, "it has left, and nobody waits for its lease");
    drop(connection);
}

#[cfg(unix)]
#[test]
fn a_relay_under_timeout_leaves() {
    let shop = Shop::new();
    let mut command = Command::new("timeout");
    command.args(["2", env!("CARGO_BIN_EXE_airtight"), "run", "--to", "null:"]);
    command.env("DATABASE_URL", shop.url()).stderr(Stdio::null());
    assert_eq!(command.status().unwrap().code(), Some(124), "it ran into its time");
    assert_eq!(relays(&shop), 0, "it has left");
}

#[cfg(unix)]
#[test]
fn a_second_signal_stops_at_once() {
    let shop = Shop::new();
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let to = format!("http://{}/", listener.local_addr().unwrap());
    shop.publish("1", "{}");
    let mut relay = Running::start(shop.command(&["run", "--to", &to]));
    // The receiver takes the connection and never answers, so a delivery is under way.
    let connection = listener.accept().unwrap();
    relay.signal("INT");
    relay.wait_for_log("a second signal stops at once");
    let first = Instant::now();
    // Right after the first it counts as the same one; a person sends another.
    while relay.is_running() {
        assert!(first.elapsed() < Duration::from_secs(5), "it waits for the delivery");
        relay.signal("INT");
    }
    let (status, rest) = relay.wait();
    assert_eq!(status.code(), Some(130), "{rest}");
    drop(connection);
}

#[cfg(unix)]
#[test]
fn a_hangup_without_a_terminal_is_refused_and_the_relay_goes_on() {
    let shop = Shop::new();
    let relay = Running::start(shop.command(&["run", "--to", "stdout:", "--poll", "20"]));
    relay.wait_for_log("relaying");
    until("it joins", || relays(&shop) == 1);
    relay.signal("HUP");
    let said = relay.wait_for_log("SIGHUP");
    assert!(said.contains("WARN") && said.contains("restart"), "{said}");
    shop.publish("later", "{}");
    let event: Value = serde_json::from_str(&relay.next_line()).unwrap();
    assert_eq!(event["aggregateId"], "later");
    relay.signal("TERM");
    let (status, rest) = relay.wait();
    assert!(status.success(), "{status}: {rest}");
    assert_eq!(relays(&shop), 0, "it has left");
}

#[cfg(target_os = "linux")]
#[test]
fn a_terminal_that_goes_away_ends_a_relay_cleanly() {
    let shop = Shop::new();
    // `script` is the terminal.
    let mut command = Command::new("script");
    let run = format!("echo $$ > pid; exec {} run --to null:; ", env!("CARGO_BIN_EXE_airtight"));
    command.args(["--quiet", "--return", "--command", &run, "/dev/null"]).current_dir(shop.path(""));
    command.env("DATABASE_URL", shop.url()).env("SHELL", "/bin/sh");
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let mut terminal = Guard(command.spawn().expect("script, of util-linux"));
    until("it joins", || relays(&shop) == 1);
    let id = fs::read_to_string(shop.path("pid")).unwrap();
    assert!(Command::new("kill").args(["-HUP", id.trim()]).status().unwrap().success());
    until("the relay ends", || terminal.0.try_wait().unwrap().is_some());
    assert_eq!(terminal.0.wait().unwrap().code(), Some(0), "a clean end");
    assert_eq!(relays(&shop), 0, "it has left");
}

/// Killed when the test ends, however it ends.
struct Guard(Child);

impl Drop for Guard {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn states(shop: &Shop) -> Vec<(String, u64)> {
    let rows = shop.run(&["events", "list", "--json"]).json();
    let of = |row: &Value| {
        (row["state"].as_str().expect("a word").to_owned(), row["attempts"].as_u64().expect("a number"))
    };
    rows.as_array().expect("an array").iter().map(of).collect()
}

/// Reads so many lines of a relay's output, goes away, and gives how the relay ended.
#[cfg(unix)]
fn read_and_leave(mut command: Command, lines: usize) -> (std::process::ExitStatus, String) {
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).stdin(Stdio::null());
    let mut relay = Guard(command.spawn().expect("the binary starts"));
    let mut reader = BufReader::new(relay.0.stdout.take().expect("piped"));
    for _ in 0..lines {
        let mut line = String::new();
        assert!(reader.read_line(&mut line).expect("a pipe") > 0, "a line");
    }
    drop(reader);
    let mut stderr = relay.0.stderr.take().expect("piped");
    let (sender, ended) = mpsc::channel();
    std::thread::spawn(move || {
        let mut said = String::new();
        let read = stderr.read_to_string(&mut said).map(|_| said);
        sender.send(read)
    });
    // It closes its standard error when it ends.
    let said = ended.recv_timeout(DEADLINE).expect("it ends").expect("UTF-8");
    (relay.0.wait().expect("it ended"), said)
}

/// `airtight run --to stdout: | head -1`, with more behind it than a pipe holds.
#[cfg(unix)]
#[test]
fn a_closed_pipe_is_the_end_and_nothing_unwritten_is_delivered() {
    for drain in [false, true] {
        let shop = Shop::new();
        let long = "x".repeat(200_000);
        let event = |key: &str| {
            format!(
                "{{\"stream\":\"s\",\"type\":\"T\",\"aggregateType\":\"A\",\"aggregateId\":\"{key}\",\"payload\":\"{long}\"}}\n"
            )
        };
        shop.run_with(&["publish"], &["1", "2", "3"].map(event).concat()).ok();
        let mut args = vec!["run", "--to", "stdout:", "--batch", "1"];
        args.extend(drain.then_some("--drain"));
        let (status, said) = read_and_leave(shop.command(&args), 1);
        assert!(status.success(), "{status}: {said}");
        assert!(said.contains("the reader of standard output has closed the pipe"), "{said}");
        let states = states(&shop);
        let done = states.iter().filter(|(state, _)| state == "done").count();
        assert!(done <= 1, "one line was read, the next does not fit into the pipe: {states:?}");
        for (state, attempts) in states.iter().filter(|(state, _)| state != "done") {
            assert_eq!((state.as_str(), *attempts), ("pending", 0), "given back at no cost: {states:?}");
        }
        assert_eq!(relays(&shop), 0, "it has left");
    }
}

/// The same with nothing behind it: there is no write that could fail.
#[cfg(target_os = "linux")]
#[test]
fn a_closed_pipe_is_noticed_while_nothing_is_written() {
    let shop = Shop::new();
    shop.publish("1", "{}");
    let (status, said) = read_and_leave(shop.command(&["run", "--to", "stdout:", "--poll", "20"]), 1);
    assert!(status.success(), "{status}: {said}");
    assert_eq!(relays(&shop), 0, "it has left");
}

/// A pipeline to standard output ends with its reader; the others of the process go on.
#[cfg(unix)]
#[test]
fn a_closed_pipe_ends_its_pipeline_only() {
    let shop = Shop::new();
    publish(&shop, "a");
    publish(&shop, "a");
    shop.write(
        "airtight.toml",
        "[pipelines.one]\nstreams = [\"a\"]\npoll = \"20ms\"\nto = \"stdout:\"\n\
         [pipelines.two]\nstreams = [\"b\"]\npoll = \"20ms\"\nto = \"file:two.ndjson\"\n",
    );
    let mut command = shop.command(&["run", "-c", "airtight.toml"]);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut relay = Guard(command.spawn().unwrap());
    drop(relay.0.stdout.take());
    until("`one` has ended", || {
        publish(&shop, "a");
        relays(&shop) == 1
    });
    publish(&shop, "b");
    until("`two` delivers", || lines(&shop, "two.ndjson") == 1);
    assert!(Command::new("kill").args(["-TERM", &relay.0.id().to_string()]).status().unwrap().success());
    assert!(relay.0.wait().unwrap().success(), "nothing has failed");
}

/// `/dev/full` refuses every write; the exit code is the command's all the same.
#[cfg(target_os = "linux")]
#[test]
fn a_standard_error_that_cannot_be_written_changes_no_exit_code() {
    let shop = Shop::new();
    let code = |args: &[&str]| {
        let full = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        let status = shop.command(args).stdin(Stdio::null()).stdout(Stdio::null()).stderr(full).status();
        status.unwrap().code()
    };
    shop.publish("1", "{}");
    assert_eq!(code(&["run", "--to", "stdout:", "--drain"]), Some(0));
    assert_eq!(code(&["status", "--url", "sqlite:typo.db"]), Some(1));
    assert_eq!(code(&["status", "--url", "nothing"]), Some(2));
    assert_eq!(code(&["events", "discard", "99"]), Some(1));
}

#[cfg(unix)]
#[test]
fn events_that_go_nowhere_are_not_lost_without_a_word() {
    let shop = Shop::new();
    for output in [">&-", "> /dev/null"] {
        shop.publish("1", "{}");
        let mut command = Command::new("sh");
        let run = format!("{} run --to stdout: --drain {output}", env!("CARGO_BIN_EXE_airtight"));
        command.args(["-c", &run]).env("DATABASE_URL", shop.url()).current_dir(shop.path(""));
        let said = String::from_utf8(command.output().unwrap().stderr).unwrap();
        assert!(said.contains("WARN standard output is closed, or is /dev/null"), "{output}: {said}");
    }
    shop.publish("1", "{}");
    let ran = shop.run(&["run", "--to", "stdout:", "--drain"]);
    assert!(!ran.stderr.contains("WARN"), "{ran:?}");
}
