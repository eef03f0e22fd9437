//! The log, driven by hand: order, offsets and their fences, parked events, partitions.

use std::time::Duration;

use airtight_core::{
    Capabilities, Code, Error, Order, Result,
    group::{GroupName, Member},
    log::{
        Changes, Due, Fate, LogAdmin, LogStore, Move, Park, ParkedFilter, Read, ReadRequest, SeekOptions,
        SeekTo, Standing, Start,
    },
    table::{Field, Shape, TableSpec},
};
use airtight_sqlite::{SqliteLog, SqliteOutbox};
use uuid::Uuid;

use crate::common::{Fixture, event};

pub(crate) fn consumer(name: &str, partitions: u16) -> Member {
    Member {
        id: Uuid::new_v4(),
        host: "test:1".into(),
        group: GroupName::log(name),
        streams: Vec::new(),
        order: Order::Key,
        block_on_dead: false,
        lease: Duration::from_secs(30),
        partitions,
    }
}

/// A consumer's relay, driven by hand.
pub(crate) struct Follower {
    pub(crate) store: SqliteLog,
    pub(crate) member: Member,
    pub(crate) owned: Vec<u16>,
    pub(crate) bytes: usize,
    pub(crate) max_payload: usize,
}

impl Follower {
    pub(crate) async fn try_join(outbox: &SqliteOutbox, member: Member) -> Result<Self> {
        let store = SqliteLog::new(outbox.clone());
        store.open(&Capabilities::default()).await?;
        store.attach(&member, Start::Earliest).await?;
        store.members().join(&member).await?;
        let wanted: Vec<u16> = (0..member.partitions).collect();
        let owned = store.members().take(&member, &wanted).await?;
        Ok(Self { store, member, owned, bytes: 1 << 20, max_payload: 1 << 20 })
    }

    pub(crate) async fn join(outbox: &SqliteOutbox, member: Member) -> Self {
        Self::try_join(outbox, member).await.unwrap()
    }

    fn request(&self, after: i64, events: usize) -> ReadRequest<'_> {
        ReadRequest {
            member: &self.member,
            partitions: &self.owned,
            after,
            events,
            bytes: self.bytes,
            max_payload: self.max_payload,
        }
    }

    pub(crate) async fn read(&self, after: i64, events: usize) -> Read {
        self.store.read(&self.request(after, events)).await.unwrap()
    }

    pub(crate) async fn due(&self, except: &[i64]) -> Due {
        self.store.due(&self.request(0, 100), except).await.unwrap()
    }

    pub(crate) async fn standing(&self, partition: u16) -> Standing {
        let all = self.store.positions(&self.member, &[partition]).await.unwrap();
        all.into_iter().next().expect("it is ours")
    }

    /// Settles in partition 0, from where it stands.
    pub(crate) async fn settle(&self, to: i64, park: Vec<(i64, Fate)>, parked: Vec<(i64, Fate)>) -> Vec<u16> {
        let standing = self.standing(0).await;
        let step = Move { partition: 0, epoch: standing.epoch, from: standing.offset, to };
        self.try_settle(step, park, parked).await.unwrap()
    }

    pub(crate) async fn try_settle(
        &self,
        step: Move,
        park: Vec<(i64, Fate)>,
        parked: Vec<(i64, Fate)>,
    ) -> Result<Vec<u16>> {
        let each = |list: Vec<(i64, Fate)>| {
            list.into_iter()
                .map(|(seq, fate)| {
                    let attempts = u32::from(!matches!(fate, Fate::Held));
                    Park { seq, partition: step.partition, attempts, fate }
                })
                .collect()
        };
        let changes = Changes { moves: vec![step], park: each(park), parked: each(parked) };
        self.store.settle(&self.member, &changes).await
    }
}

pub(crate) fn seqs(read: &Read) -> Vec<i64> {
    read.rows.iter().map(|row| row.seq).collect()
}

fn due_seqs(due: &Due) -> Vec<i64> {
    due.rows.iter().map(|row| row.row.seq).collect()
}

pub(crate) fn retry_in(seconds: u64) -> Fate {
    Fate::Retry { after: Duration::from_secs(seconds), error: Error::retryable(Code::TIMEOUT, "no answer") }
}

pub(crate) fn dead() -> Fate {
    Fate::Dead { error: Error::permanent(Code::custom("bad"), "never") }
}

fn unknown() -> Fate {
    Fate::Unknown { error: Error::retryable(Code::TIMEOUT, "who knows") }
}

/// Parked events as `seq state due|held|-`.
async fn parked(fixture: &Fixture) -> String {
    fixture
        .text(
            "SELECT group_concat(seq || ' ' || state || CASE WHEN state <> 'pending' THEN '' \
             WHEN next_retry_at IS NULL THEN ' held' ELSE ' due' END, ', ') \
             FROM (SELECT * FROM airtight_parked ORDER BY consumer, seq)",
        )
        .await
}

// --- shape ----------------------------------------------------------------------------------------------

#[tokio::test]
async fn a_file_has_one_shape_and_says_so() {
    use airtight_core::{admin::Admin, queue::QueueStore};
    let queue = Fixture::new().await;
    let log = Fixture::log().await;
    assert_eq!(log.outbox.table().status, None);

    let as_log = queue.second().await.shape(Shape::Log);
    let as_queue = log.second().await;
    let errors = [
        as_log.migrate().await.unwrap_err(),
        SqliteLog::new(as_log.clone()).open(&Capabilities::default()).await.unwrap_err(),
        SqliteLog::new(queue.outbox.clone()).open(&Capabilities::default()).await.unwrap_err(),
        as_queue.migrate().await.unwrap_err(),
        airtight_sqlite::SqliteQueue::new(as_queue.clone()).open().await.unwrap_err(),
        airtight_sqlite::SqliteQueue::new(log.outbox.clone()).open().await.unwrap_err(),
        // The handle does not know, but the file does.
        SqliteLog::new(as_queue.clone()).open(&Capabilities::default()).await.unwrap_err(),
        Admin::publish(&as_queue, &[event("a")]).await.unwrap_err(),
    ];
    for (at, error) in errors.iter().enumerate() {
        assert_eq!((error.code(), error.class()), ("wrong_shape", airtight_core::Class::Permanent), "{at}");
        let (is, not) = if at < 3 { ("a queue", "log") } else { ("a log", "queue") };
        assert!(error.message().contains(is), "{at}: {error}");
        assert!(error.message().contains(&format!("--shape {not}")), "{at}: {error}");
    }
    assert_eq!(log.second().await.detect().await.unwrap().table(), log.outbox.table());
    assert_eq!(queue.second().await.detect().await.unwrap().table(), queue.outbox.table());
    let fixture = Fixture::empty().await;
    let empty = fixture.outbox.clone().shape(Shape::Log);
    assert_eq!(empty.clone().detect().await.unwrap().table(), empty.table(), "nothing there to go by");
}

#[tokio::test]
async fn a_file_of_version_1_is_upgraded_and_keeps_its_events() {
    use airtight_core::{admin::Admin, queue::QueueStore};
    let fixture = Fixture::new().await;
    fixture.publish(&["a", "b"]).await;
    for table in ["consumer", "offset", "parked", "floor", "inbox"] {
        fixture.exec(&format!("DROP TABLE airtight_{table}")).await;
    }
    fixture.exec("UPDATE airtight_meta SET value = 1 WHERE name = 'schema'").await;
    let store = airtight_sqlite::SqliteQueue::new(fixture.outbox.clone());
    let error = store.open().await.unwrap_err();
    assert!(
        error.to_string().contains("version 1") && error.to_string().contains("airtight migrate"),
        "{error}"
    );
    let did = fixture.outbox.migrate().await.unwrap();
    assert_eq!(did, ["upgraded airtight's own tables from version 1 to 3"]);
    store.open().await.unwrap();
    assert_eq!(fixture.outbox.status().await.unwrap().streams[0].pending, 2);
    assert_eq!(fixture.text("SELECT count(*) FROM airtight_inbox").await, "0");
}

#[tokio::test]
async fn a_file_of_version_2_is_upgraded_and_keeps_its_consumers() {
    use airtight_core::admin::Admin;
    let fixture = Fixture::log().await;
    fixture.publish(&["a", "b"]).await;
    let relay = Follower::join(&fixture.outbox, consumer("c", 1)).await;
    relay.settle(2, Vec::new(), Vec::new()).await;
    for column in ["replay", "replay_after", "replay_through"] {
        fixture.exec(&format!("ALTER TABLE airtight_consumer DROP COLUMN {column}")).await;
    }
    fixture.exec("UPDATE airtight_meta SET value = 2 WHERE name = 'schema'").await;
    let error = SqliteLog::new(fixture.outbox.clone()).open(&Capabilities::default()).await.unwrap_err();
    assert!(
        error.to_string().contains("version 2") && error.to_string().contains("airtight migrate"),
        "{error}"
    );
    assert_eq!(
        fixture.outbox.migrate().await.unwrap(),
        ["upgraded airtight's own tables from version 2 to 3"]
    );
    assert_eq!(relay.standing(0).await.replay, None);
    fixture.outbox.seek("c", SeekTo::Earliest, SeekOptions::default()).await.unwrap();
    assert_eq!(
        fixture.text("SELECT replay_after || ',' || replay_through FROM airtight_consumer").await,
        "0,2"
    );
}

#[tokio::test]
async fn the_printed_sql_of_a_log_is_what_migrate_does() {
    use airtight_core::admin::Admin;
    let fixture = Fixture::log().await;
    let printed = Fixture::empty().await;
    let statements = SqliteOutbox::migration_sql(Shape::Log);
    sqlx::raw_sql(sqlx::AssertSqlSafe(statements)).execute(printed.outbox.pool()).await.unwrap();
    let printed = Fixture { outbox: printed.outbox.clone().shape(Shape::Log), dir: printed.dir };
    assert!(printed.outbox.migrate().await.unwrap().is_empty());
    let schema = "SELECT group_concat(sql, ';') FROM (SELECT sql FROM sqlite_schema ORDER BY name)";
    assert_eq!(printed.text(schema).await, fixture.text(schema).await);
}

#[tokio::test]
async fn a_repeated_id_is_one_event_and_a_rollback_leaves_no_hole() {
    use airtight_core::admin::Admin;
    let fixture = Fixture::log().await;
    let id = Uuid::now_v7();
    let first = Admin::publish(&fixture.outbox, &[event("a").id(id)]).await.unwrap();
    let mut tx = fixture.outbox.pool().begin_with("BEGIN IMMEDIATE").await.unwrap();
    fixture.outbox.publish(&mut tx, &event("b")).await.unwrap();
    tx.rollback().await.unwrap();
    assert_eq!(fixture.publish(&["c"]).await, [2], "seq is taken back with its transaction");
    let again = Admin::publish(&fixture.outbox, &[event("a").id(id)]).await.unwrap();
    assert_eq!((first[0].is_new, again[0].is_new), (true, false));
    assert_eq!(first[0].seq, again[0].seq);
    assert_eq!(fixture.text("SELECT count(*) FROM airtight_outbox").await, "2");
}

// --- reading --------------------------------------------------------------------------------------------

#[tokio::test]
async fn events_are_read_in_order_within_bounds() {
    let fixture = Fixture::log().await;
    fixture.publish(&["a", "b", "a", "c", "a"]).await;
    let mut one = Follower::join(&fixture.outbox, consumer("one", 1)).await;
    let read = one.read(0, 3).await;
    assert_eq!((seqs(&read), read.through, read.more, read.blocked), (vec![1, 2, 3], 3, true, false));
    let read = one.read(3, 10).await;
    assert_eq!((seqs(&read), read.through, read.more), (vec![4, 5], 5, false));
    let read = one.read(5, 10).await;
    assert_eq!((seqs(&read), read.through, read.more), (vec![], 5, false));

    one.bytes = 1;
    let read = one.read(0, 10).await;
    assert_eq!((seqs(&read), read.through, read.more), (vec![1], 1, true), "always at least one");
    let event = read.rows[0].event.as_ref().unwrap();
    one.bytes = event.size() * 2 + 10;
    assert_eq!(seqs(&one.read(0, 10).await), [1, 2]);

    let again = one.store.reread(&one.request(0, 10), &[4, 2]).await.unwrap();
    assert_eq!(again.iter().map(|row| row.seq).collect::<Vec<_>>(), [2, 4]);
    let gone = one.store.reread(&one.request(0, 10), &[2, 77]).await.unwrap_err();
    assert_eq!(gone.code(), "behind_retention");
}

#[tokio::test]
async fn other_streams_and_partitions_are_passed_but_not_read() {
    use airtight_core::admin::Admin;
    let fixture = Fixture::log().await;
    let mut other = event("x");
    other.stream = "other".into();
    Admin::publish(&fixture.outbox, &[event("a"), other, event("b")]).await.unwrap();
    let mut member = consumer("one", 1);
    member.streams = vec!["other".into()];
    let one = Follower::join(&fixture.outbox, member).await;
    let read = one.read(0, 10).await;
    assert_eq!((seqs(&read), read.through), (vec![2], 3));

    let keys: Vec<String> = (0..40).map(|n| format!("k{n}")).collect();
    fixture.publish(&keys.iter().map(String::as_str).collect::<Vec<_>>()).await;
    let mut eight = Follower::join(&fixture.outbox, consumer("eight", 8)).await;
    let all = eight.owned.clone();
    let mut found = Vec::new();
    for partition in all {
        eight.owned = vec![partition];
        let read = eight.read(0, 100).await;
        assert_eq!(read.through, 43);
        assert!(read.rows.iter().all(|row| row.partition == partition));
        assert!(seqs(&read).is_sorted());
        found.extend(seqs(&read));
    }
    found.sort_unstable();
    assert_eq!(found, (1..=43).collect::<Vec<i64>>(), "each in exactly one");
}

#[tokio::test]
async fn a_body_too_large_is_rejected_unread() {
    use airtight_core::admin::Admin;
    let fixture = Fixture::log().await;
    let large = event("a").json(&"x".repeat(2_000)).unwrap();
    Admin::publish(&fixture.outbox, &[large, event("b")]).await.unwrap();
    let mut one = Follower::join(&fixture.outbox, consumer("one", 1)).await;
    one.max_payload = 1_000;
    let read = one.read(0, 10).await;
    let bad = read.rows[0].event.as_ref().unwrap_err();
    assert_eq!((bad.error.code(), bad.key.as_deref()), ("too_large", Some("a")));
    assert!(read.rows[1].event.is_ok());
    // Parked, it is whole, but no more read than before.
    one.settle(1, vec![(1, retry_in(0))], vec![]).await;
    let due = one.due(&[]).await;
    assert_eq!(due.rows[0].row.event.as_ref().unwrap_err().error.code(), "too_large");
    assert_eq!(fixture.text("SELECT length(payload) FROM airtight_parked").await, "2002");
}

#[tokio::test]
async fn a_foreign_table_is_followed_and_parked_with_all_it_has() {
    let fixture = Fixture::new().await;
    fixture
        .exec(
            "CREATE TABLE facts (no INTEGER PRIMARY KEY AUTOINCREMENT, fact INTEGER, kind TEXT, about INTEGER, \
             body TEXT, at TEXT, reason TEXT);
             INSERT INTO facts (fact, kind, about, body, at, reason) VALUES \
             (77, 'Seen', 5, '{\"n\":1}', '2024-05-06 07:08:09', 'why not'), (78, 'Seen', 5, 'no json', '2024-05-06 07:08:10', NULL);",
        )
        .await;
    let spec = TableSpec {
        identity: "no".into(),
        id: "fact".into(),
        seq: Some("no".into()),
        created_at: Some("at".into()),
        stream: Field::Constant("facts".into()),
        event_type: Field::Column("kind".into()),
        aggregate_type: Field::Constant("Fact".into()),
        aggregate_id: Field::Column("about".into()),
        op: None,
        payload: "body".into(),
        payload_kind: airtight_core::table::PayloadKind::JsonText,
        payload_bytes: None,
        headers: None,
        occurred_at: None,
        schema_version: None,
        max_attempts: None,
        extra: vec![("because".into(), "reason".into())],
        ..TableSpec::canonical_log(None, "facts")
    };
    let outbox = fixture.outbox.clone().spec(spec.clone());
    let one = Follower::join(&outbox, consumer("one", 1)).await;
    let read = one.read(0, 10).await;
    let event = read.rows[0].event.as_ref().unwrap();
    assert_eq!((event.id.as_str(), event.aggregate_id.as_str()), ("77", "5"));
    assert_eq!(event.extra["because"], "why not");
    assert_eq!(read.rows[1].event.as_ref().unwrap_err().error.code(), "bad_payload");
    one.settle(2, vec![(1, retry_in(0)), (2, dead())], vec![]).await;
    let due = one.due(&[]).await;
    assert_eq!(due.rows[0].row.event.as_ref().unwrap(), event, "as it was in the log");
    assert_eq!(outbox.consumers().await.unwrap()[0].dead, 1);

    let lookup = TableSpec { log: TableSpec::relay_log().log, ..spec.clone() };
    let error =
        SqliteLog::new(fixture.outbox.clone().spec(lookup)).open(&Capabilities::default()).await.unwrap_err();
    assert!(error.message().contains("PostgreSQL"), "{error}");
    fixture.exec("CREATE TABLE again (no INTEGER PRIMARY KEY, fact, kind, about, body, at, reason)").await;
    let reused = TableSpec { table: "again".into(), ..spec };
    let error =
        SqliteLog::new(fixture.outbox.clone().spec(reused)).open(&Capabilities::default()).await.unwrap_err();
    assert!(error.message().contains("AUTOINCREMENT"), "{error}");
}

// --- fences ---------------------------------------------------------------------------------------------

#[tokio::test]
async fn a_settle_is_fenced_by_owner_epoch_and_offset() {
    let fixture = Fixture::log().await;
    fixture.publish(&["a", "b", "c", "d"]).await;
    let one = Follower::join(&fixture.outbox, consumer("one", 1)).await;
    let stale = one.standing(0).await;
    assert_eq!(one.settle(1, vec![], vec![]).await, Vec::<u16>::new());
    let step = |epoch, from, to| Move { partition: 0, epoch, from, to };

    // The answer was lost, and it tries again.
    assert!(one.try_settle(step(stale.epoch, 0, 1), vec![], vec![]).await.unwrap().is_empty());
    // Somebody has moved the offset.
    let parks = || vec![(2, retry_in(0))];
    assert_eq!(one.try_settle(step(stale.epoch, 0, 3), parks(), vec![]).await.unwrap(), [0]);
    // Another epoch of the same owner: given up and taken again, or sought.
    assert_eq!(one.try_settle(step(stale.epoch - 1, 1, 2), parks(), vec![]).await.unwrap(), [0]);
    one.store.members().give(&one.member, &[0]).await.unwrap();
    assert_eq!(one.store.members().take(&one.member, &[0]).await.unwrap(), [0]);
    assert!(one.standing(0).await.epoch > stale.epoch, "taking makes the epoch grow");
    assert_eq!(one.try_settle(step(stale.epoch, 1, 2), parks(), vec![]).await.unwrap(), [0]);

    // Another owner.
    one.store.members().give(&one.member, &[0]).await.unwrap();
    let two = Follower::join(&fixture.outbox, consumer("one", 1)).await;
    let epoch = two.standing(0).await.epoch;
    assert_eq!(one.try_settle(step(epoch, 1, 2), parks(), vec![]).await.unwrap(), [0]);
    assert_eq!(parked(&fixture).await, "NULL", "what was refused has left no trace");
    assert_eq!(two.standing(0).await.offset, 1);
    assert!(one.store.positions(&one.member, &[0]).await.unwrap().is_empty(), "not its own any more");
}

#[tokio::test]
async fn partitions_are_refused_one_by_one() {
    let fixture = Fixture::log().await;
    fixture.publish(&["a", "b", "c", "d"]).await;
    let two = Follower::join(&fixture.outbox, consumer("one", 2)).await;
    let (zero, one) = (two.standing(0).await, two.standing(1).await);
    let changes = Changes {
        moves: vec![
            Move { partition: 0, epoch: zero.epoch, from: 0, to: 4 },
            Move { partition: 1, epoch: one.epoch + 1, from: 0, to: 4 },
        ],
        ..Changes::default()
    };
    assert_eq!(two.store.settle(&two.member, &changes).await.unwrap(), [1]);
    assert_eq!((two.standing(0).await.offset, two.standing(1).await.offset), (4, 0));
}

#[tokio::test]
async fn a_seek_fences_what_is_under_way_and_drops_what_comes_again() {
    let fixture = Fixture::log().await;
    fixture.publish(&["a", "b", "a", "c"]).await;
    let one = Follower::join(&fixture.outbox, consumer("one", 1)).await;
    one.settle(3, vec![(1, retry_in(0)), (3, Fate::Held)], vec![]).await;
    let before = one.standing(0).await;
    let sought = fixture.outbox.seek("one", SeekTo::Seq(1), SeekOptions::default()).await.unwrap();
    assert_eq!(
        (sought.from, sought.to, sought.again, sought.skipped, sought.parked_dropped),
        (3, 1, 2, 0, 1)
    );
    assert_eq!(parked(&fixture).await, "1 pending due");
    let step = Move { partition: 0, epoch: before.epoch, from: 3, to: 4 };
    assert_eq!(one.try_settle(step, vec![], vec![(1, Fate::Delivered)]).await.unwrap(), [0]);
    // Even where the offset looks right.
    let step = Move { partition: 0, epoch: before.epoch, from: 1, to: 4 };
    assert_eq!(one.try_settle(step, vec![], vec![(1, Fate::Delivered)]).await.unwrap(), [0]);
    assert_eq!(parked(&fixture).await, "1 pending due");
    assert_eq!(
        one.store.members().take(&one.member, &[0]).await.unwrap(),
        [0],
        "nobody owns it after a seek"
    );
    assert_eq!(one.standing(0).await.offset, 1);
}

// --- parked events --------------------------------------------------------------------------------------

#[tokio::test]
async fn the_first_waiting_event_of_a_key_is_due_and_the_rest_are_held() {
    let fixture = Fixture::log().await;
    fixture.publish(&["a", "b", "a", "a", "b"]).await;
    let one = Follower::join(&fixture.outbox, consumer("one", 1)).await;
    one.settle(4, vec![(1, retry_in(0)), (3, Fate::Held), (4, Fate::Held)], vec![]).await;
    assert_eq!(parked(&fixture).await, "1 pending due, 3 pending held, 4 pending held");
    assert_eq!(one.standing(0).await.waiting, ["a", "a", "a"]);
    let due = one.due(&[]).await;
    assert_eq!(due_seqs(&due), [1, 3, 4], "with what is held behind it");
    assert_eq!(due.rows.iter().map(|row| row.attempts).collect::<Vec<_>>(), [1, 0, 0]);

    // While the first is out, nothing of its key is due; and nothing will be by itself.
    let due = one.due(&[1]).await;
    assert_eq!((due_seqs(&due), due.next_in), (vec![], None));

    one.settle(4, vec![], vec![(1, Fate::Delivered), (3, retry_in(3600))]).await;
    assert_eq!(parked(&fixture).await, "3 pending due, 4 pending held");
    let due = one.due(&[]).await;
    assert!(due.rows.is_empty());
    let wait = due.next_in.expect("the third is due some time");
    assert!((3_500..=3_600).contains(&wait.as_secs()), "{wait:?}");

    one.settle(4, vec![], vec![(3, dead())]).await;
    assert_eq!(parked(&fixture).await, "3 dead, 4 pending due", "its key goes on");
    assert_eq!(due_seqs(&one.due(&[]).await), [4]);
    one.settle(4, vec![], vec![(4, unknown())]).await;
    assert_eq!(parked(&fixture).await, "3 dead, 4 unknown");
    assert!(one.standing(0).await.waiting.is_empty());
    assert_eq!(one.store.backlog(&one.member).await.unwrap().unfinished, 1, "only the fifth is left");
}

#[tokio::test]
async fn nothing_behind_a_dead_event_that_blocks_is_due() {
    let fixture = Fixture::log().await;
    fixture.publish(&["a", "a", "a", "b"]).await;
    let mut member = consumer("one", 1);
    member.block_on_dead = true;
    let one = Follower::join(&fixture.outbox, member).await;
    one.settle(4, vec![(1, retry_in(0)), (2, Fate::Held), (4, retry_in(0))], vec![]).await;
    one.settle(4, vec![(3, Fate::Held)], vec![(1, dead())]).await;
    assert_eq!(parked(&fixture).await, "1 dead, 2 pending held, 3 pending held, 4 pending due");
    assert_eq!(due_seqs(&one.due(&[]).await), [4]);
    assert_eq!(one.standing(0).await.waiting, ["a", "a", "a", "b"], "the dead one keeps them waiting");
    let backlog = one.store.backlog(&one.member).await.unwrap();
    assert_eq!((backlog.unfinished, backlog.blocked), (3, 2));
    assert_eq!(one.store.unhold(&one.member, &[0]).await.unwrap(), 0);

    // The rule changes: now its key goes on.
    let mut lenient = one.member.clone();
    lenient.block_on_dead = false;
    assert_eq!(one.store.unhold(&lenient, &[0]).await.unwrap(), 1);
    assert_eq!(parked(&fixture).await, "1 dead, 2 pending due, 3 pending held, 4 pending due");
    // And back: what became due is held again.
    one.store.unhold(&one.member, &[0]).await.unwrap();
    assert_eq!(due_seqs(&one.due(&[]).await), [4]);

    // A person lets it go on.
    let filter = ParkedFilter { consumer: Some("one".into()), seqs: vec![1], ..ParkedFilter::default() };
    assert_eq!(fixture.outbox.discard_parked(&filter).await.unwrap(), 1);
    assert_eq!(parked(&fixture).await, "2 pending due, 3 pending held, 4 pending due");
}

#[tokio::test]
async fn without_order_nothing_is_held() {
    let fixture = Fixture::log().await;
    fixture.publish(&["a", "a"]).await;
    let one = Follower::join(&fixture.outbox, consumer("one", 1)).await;
    one.settle(2, vec![(1, retry_in(3600)), (2, Fate::Held)], vec![]).await;
    let mut free = consumer("one", 1);
    free.order = Order::None;
    one.store.members().leave(&one.member).await.unwrap();
    let free = Follower::join(&fixture.outbox, free).await;
    assert_eq!(due_seqs(&free.due(&[]).await), [2], "what an earlier order held back");
}

#[tokio::test]
async fn what_is_parked_is_not_read_again() {
    // The first is slow, the second failed: the offset stands before both, and the relay is killed.
    let fixture = Fixture::log().await;
    fixture.publish(&["a", "b", "c", "d"]).await;
    let one = Follower::join(&fixture.outbox, consumer("one", 1)).await;
    one.settle(0, vec![(2, retry_in(0)), (3, unknown())], vec![]).await;
    let read = one.read(0, 10).await;
    assert_eq!((seqs(&read), read.through), (vec![1, 4], 4), "an unknown one is not tried again by itself");
    assert_eq!(one.store.backlog(&one.member).await.unwrap().unfinished, 3);
}

#[tokio::test]
async fn parking_an_event_that_is_gone_is_an_error_and_moves_nothing() {
    let fixture = Fixture::log().await;
    fixture.publish(&["a", "b"]).await;
    let one = Follower::join(&fixture.outbox, consumer("one", 1)).await;
    fixture.exec("DELETE FROM airtight_outbox WHERE seq = 1").await;
    let epoch = one.standing(0).await.epoch;
    let step = Move { partition: 0, epoch, from: 0, to: 2 };
    let error = one.try_settle(step, vec![(2, retry_in(0)), (1, Fate::Held)], vec![]).await.unwrap_err();
    assert_eq!(error.code(), "behind_retention");
    assert_eq!((one.standing(0).await.offset, parked(&fixture).await.as_str()), (0, "NULL"));
}

// --- partitions and members -----------------------------------------------------------------------------

#[tokio::test]
async fn another_partition_count_restarts_from_the_smallest_offset() {
    let fixture = Fixture::log().await;
    let keys: Vec<String> = (0..30).map(|n| format!("k{n}")).collect();
    fixture.publish(&keys.iter().map(String::as_str).collect::<Vec<_>>()).await;
    let four = Follower::join(&fixture.outbox, consumer("one", 4)).await;
    let read = four.read(0, 100).await;
    let mut epochs = Vec::new();
    for partition in 0..4_u16 {
        let standing = four.standing(partition).await;
        epochs.push(standing.epoch);
        let step = Move { partition, epoch: standing.epoch, from: 0, to: 10 + i64::from(partition) };
        let first = read.rows.iter().find(|row| row.partition == partition && row.seq <= 10).unwrap().seq;
        assert!(four.try_settle(step, vec![(first, retry_in(0))], vec![]).await.unwrap().is_empty());
    }
    let error = Follower::try_join(&fixture.outbox, consumer("one", 8)).await.err().unwrap();
    assert_eq!(error.code(), "overlap");
    assert!(error.message().contains("4 partitions") && error.message().contains("test:1"), "{error}");

    fixture.exec("UPDATE airtight_relay SET expires_at = '2000-01-01T00:00:00.000Z'").await;
    let eight = Follower::join(&fixture.outbox, consumer("one", 8)).await;
    assert_eq!(eight.owned, (0..8).collect::<Vec<u16>>());
    for partition in 0..8 {
        assert_eq!(eight.standing(partition).await.offset, 10);
    }
    assert_eq!(eight.due(&[]).await.rows.len(), 4, "parked ones are kept");
    assert!(eight.due(&[]).await.rows.iter().all(|row| {
        let n = row.row.partition;
        eight.owned.contains(&n)
    }));
    // The old relay, back from its sleep.
    assert!(!four.store.members().heartbeat(&four.member, &[]).await.unwrap().alive);
    for partition in 0..4_u16 {
        let from = 10;
        let step = Move { partition, epoch: epochs[usize::from(partition)], from, to: 20 };
        assert_eq!(four.try_settle(step, vec![], vec![]).await.unwrap(), [partition]);
    }
    let two = consumer("one", 2);
    eight.store.members().leave(&eight.member).await.unwrap();
    let two = Follower::join(&fixture.outbox, two).await;
    assert_eq!(two.owned, [0, 1]);
    assert_eq!(fixture.text("SELECT count(*) FROM airtight_offset").await, "2");
}

#[tokio::test]
async fn consumers_are_in_nobodys_way() {
    let fixture = Fixture::log().await;
    let one = Follower::join(&fixture.outbox, consumer("one", 1)).await;
    let two = Follower::join(&fixture.outbox, consumer("two", 1)).await;
    fixture.publish(&["a", "b"]).await;
    one.settle(2, vec![], vec![]).await;
    assert_eq!((one.standing(0).await.offset, two.standing(0).await.offset), (2, 0));
    // Nor in a queue's on the same name, in whatever order they come.
    let queue = Fixture::new().await;
    let log = airtight_sqlite::SqliteLog::new(queue.outbox.clone());
    assert!(log.members().join(&consumer("one", 1)).await.is_err());
    queue
        .exec(
            "INSERT INTO airtight_relay (id, outbox, host, grp, streams, ord, expires_at) \
             VALUES ('x', 'airtight_outbox', 'h', 'log:one', '[]', 'key', '9999')",
        )
        .await;
    queue.relay(Order::Key).await;
}

#[tokio::test]
async fn a_new_consumer_begins_where_it_is_told() {
    let fixture = Fixture::log().await;
    fixture.publish(&["a", "b", "c"]).await;
    let late = consumer("late", 2);
    let store = SqliteLog::new(fixture.outbox.clone());
    store.attach(&late, Start::Latest).await.unwrap();
    // The second time it goes on where it was.
    fixture.publish(&["d"]).await;
    store.attach(&late, Start::Latest).await.unwrap();
    let found = fixture.outbox.consumers().await.unwrap();
    assert_eq!((found[0].offset, found[0].end, found[0].lag_events), (3, 4, 1));
    assert_eq!(fixture.outbox.lag("late").await.unwrap(), 1);
}

#[tokio::test]
async fn a_table_whose_numbers_went_back_is_refused() {
    let fixture = Fixture::log().await;
    fixture.publish(&["a", "b", "c"]).await;
    let one = Follower::join(&fixture.outbox, consumer("one", 1)).await;
    one.settle(3, vec![], vec![]).await;
    fixture.exec("DELETE FROM airtight_outbox; DELETE FROM sqlite_sequence").await;
    fixture.publish(&["d"]).await;
    let error = one.store.positions(&one.member, &[0]).await.unwrap_err();
    assert_eq!(error.code(), "sequence_behind");
    assert_eq!(one.store.attach(&one.member, Start::Earliest).await.unwrap_err().code(), "sequence_behind");
    fixture.outbox.seek("one", SeekTo::Earliest, SeekOptions::default()).await.unwrap();
    one.store.attach(&one.member, Start::Earliest).await.unwrap();
}
