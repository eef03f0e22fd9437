//! What a relay waits for on a server, and that it says so in plain words: an open publisher, a predecessor's lease,
//! somebody's lock, a server that lets nobody else in, a connection that leads nowhere any more.

use std::{process::Command, time::Instant};

use airtight_testkit::{mute::MuteProxy, postgres::TestDb, wait::eventually};
use sqlx::{AssertSqlSafe, Connection, PgConnection};

use crate::support::{DEADLINE, Ran, Running, airtight, finish};

struct Server {
    db: TestDb,
    dir: tempfile::TempDir,
}

impl Server {
    async fn create(test: &str, shape: &str) -> Option<Self> {
        let db = TestDb::create(test).await?;
        let server = Self { db, dir: tempfile::tempdir().expect("a directory") };
        server.run(&["migrate", "--shape", shape]).ok();
        Some(server)
    }

    fn command(&self, url: &str, args: &[&str]) -> Command {
        let mut command = airtight(args);
        command.current_dir(self.dir.path()).env("DATABASE_URL", url);
        command
    }

    fn run(&self, args: &[&str]) -> Ran {
        let command = self.command(&self.db.url(), args);
        tokio::task::block_in_place(|| finish(command, ""))
    }

    fn start(&self, url: &str, args: &[&str]) -> Running {
        let relay = Running::start(self.command(url, args));
        relay.wait_for_log("relaying");
        relay
    }

    fn publish(&self, key: &str) {
        let args = ["publish", "--stream", "s", "--type", "T", "--aggregate-type", "A", "--key", key];
        self.run(&args).ok();
    }

    /// A session of somebody else's: its name and its pid.
    async fn session(&self, name: &str) -> (PgConnection, i32) {
        let options = self.db.connect_options().application_name(name);
        let mut session = PgConnection::connect_with(&options).await.expect("connected");
        let pid = sqlx::query_scalar("SELECT pg_backend_pid()").fetch_one(&mut session).await.expect("a pid");
        (session, pid)
    }
}

async fn execute(session: &mut PgConnection, sql: &str) {
    sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).execute(session).await.expect(sql);
}

const INSERT: &str = "INSERT INTO airtight.outbox (stream, event_type, aggregate_type, aggregate_id) \
     VALUES ('s', 'T', 'A', 'open')";

#[tokio::test(flavor = "multi_thread")]
async fn a_log_behind_an_open_publisher_says_whom_it_waits_for() {
    let Some(server) = Server::create("cli_waiting_publisher", "log").await else { return };
    server.publish("first");
    let relay = server.start(&server.db.url(), &["run", "--read", "log", "--consumer", "c", "--to", "null:"]);
    let (mut till, pid) = server.session("till").await;
    execute(&mut till, &format!("BEGIN; {INSERT}")).await;
    server.publish("behind");
    let said = relay.wait_for_log("a transaction has published and is still open");
    let who = format!("pid {pid} (till, idle in transaction), open for ");
    assert!(said.contains(&who) && said.contains("wait after seq 1"), "{said}");
    let shown = server.run(&["consumers", "show", "c"]).ok();
    assert!(shown.contains(&format!("waits for   {who}")), "{shown}");
    let status = server.run(&["status"]).ok();
    assert!(status.contains(&format!("waits for {who}")), "{status}");
    let checked = server.run(&["check"]);
    assert!(format!("{checked:?}").contains(&format!("still open: {who}")), "{checked:?}");
    let json = server.run(&["consumers", "show", "c", "--json"]).json();
    assert_eq!(json["waits_for"][0]["pid"], pid, "{json}");

    // One that nobody's process holds any more is known by its name.
    let name = format!("{}_2pc", server.db.name());
    execute(&mut till, &format!("PREPARE TRANSACTION '{name}'")).await;
    let shown = server.run(&["consumers", "show", "c"]).ok();
    assert!(shown.contains(&format!("waits for   prepared transaction `{name}`, open for ")), "{shown}");
    execute(&mut till, &format!("COMMIT PREPARED '{name}'")).await;
    relay.wait_for_log("the log continues");
    let shown = server.run(&["consumers", "show", "c"]).ok();
    assert!(!shown.contains("waits for"), "{shown}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_relay_behind_a_killed_one_says_how_long_it_waits() {
    for (shape, args) in [
        ("queue", &["run", "--to", "null:"] as &[&str]),
        ("log", &["run", "--read", "log", "--consumer", "c", "--to", "null:"]),
    ] {
        let Some(server) = Server::create(&format!("cli_waiting_lease_{shape}"), shape).await else { return };
        let first = server.start(&server.db.url(), args);
        let mut session = server.session("observer").await.0;
        eventually(DEADLINE, "it owns partitions", async || {
            let owned = "SELECT count(owner) FROM airtight.partition";
            sqlx::query_scalar::<_, i64>(owned).fetch_one(&mut session).await.expect("a count") > 0
        })
        .await;
        first.signal("KILL");
        first.wait();
        let second = server.start(&server.db.url(), args);
        let said = second.wait_for_log("has not renewed its lease");
        assert!(said.contains("partitions are taken over when the lease has run out, in "), "{said}");
        second.signal("TERM");
        let (_, rest) = second.wait();
        assert!(!rest.contains("has not renewed its lease"), "once is enough: {rest}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_relay_behind_a_lock_says_who_has_it_and_shows_no_sql() {
    let Some(server) = Server::create("cli_waiting_lock", "queue").await else { return };
    let relay = server.start(&server.db.url(), &["run", "--to", "stdout:"]);
    let (mut clerk, pid) = server.session("clerk").await;
    execute(&mut clerk, "BEGIN; LOCK TABLE airtight.outbox IN ACCESS EXCLUSIVE MODE").await;
    let said = relay.wait_for_log("is locked by");
    let who = format!("airtight.outbox is locked by pid {pid} (clerk, idle in transaction, open for ");
    assert!(said.contains(&who), "{said}");
    // One statement waits for longer than an answer may take, which is 10 s: the server is at work on it, so it is not given
    // up.
    let waits = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock' \
         AND clock_timestamp() - query_start > interval '11 s'";
    eventually(DEADLINE, "a statement that has waited for 11 s", async || {
        sqlx::query_scalar::<_, i64>(waits).fetch_one(&mut clerk).await.expect("a count") > 0
    })
    .await;
    execute(&mut clerk, "COMMIT").await;
    server.publish("k");
    relay.next_line();
    relay.signal("TERM");
    let (status, rest) = relay.wait();
    assert!(status.success(), "{rest}");
    for unwanted in ["SELECT", "UPDATE", "slow statement", "given up"] {
        assert!(!rest.contains(unwanted), "{rest}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_lets_nobody_in_is_named_as_the_cause() {
    let Some(server) = Server::create("cli_waiting_connections", "queue").await else { return };
    let (mut session, _) = server.session("admin").await;
    let role = server.db.name();
    execute(
        &mut session,
        &format!(
            "CREATE ROLE {role} LOGIN CONNECTION LIMIT 0; GRANT ALL ON SCHEMA airtight TO {role}; \
             GRANT ALL ON ALL TABLES IN SCHEMA airtight TO {role}; GRANT ALL ON ALL SEQUENCES IN SCHEMA airtight TO {role}"
        ),
    )
    .await;
    let mut url = url::Url::parse(&server.db.url()).expect("a URL");
    url.set_username(role).expect("a name");
    let relay = Running::start(server.command(url.as_str(), &["run", "--to", "stdout:"]));
    let said = relay.wait_for_log("too_many_connections");
    assert!(said.contains("too many connections for role") && said.contains("CONNECTION LIMIT"), "{said}");
    // The remedy that the message names.
    execute(&mut session, &format!("ALTER ROLE {role} CONNECTION LIMIT 10")).await;
    relay.wait_for_log("relaying");
    server.publish("k");
    relay.next_line();
    relay.signal("TERM");
    let (status, rest) = relay.wait();
    assert!(status.success(), "{rest}");
    execute(&mut session, &format!("DROP OWNED BY {role}; DROP ROLE {role}")).await;
}

/// The default grace is 10 s.
#[tokio::test(flavor = "multi_thread")]
async fn a_signal_ends_a_relay_whose_connections_are_mute() {
    for (shape, args) in [
        ("queue", &["run", "--to", "null:"] as &[&str]),
        ("log", &["run", "--read", "log", "--consumer", "c", "--to", "null:"]),
    ] {
        let Some(server) = Server::create(&format!("cli_waiting_mute_{shape}"), shape).await else { return };
        let proxy = MuteProxy::before(&server.db.url()).await;
        let relay = server.start(&proxy.through(&server.db.url()), args);
        proxy.mute();
        proxy.mute_new(true);
        proxy.has_swallowed(DEADLINE).await;
        let told = Instant::now();
        relay.signal("TERM");
        let (status, rest) = tokio::task::block_in_place(|| relay.wait());
        let took = told.elapsed();
        assert!(status.success(), "{rest}");
        assert!(took.as_secs_f64() < 13.0, "{took:?}: {rest}");
        println!("{shape}: ended {took:.1?} after SIGTERM");
    }
}
