//! A file of its own for each test, and a relay that is driven by hand.

use std::time::Duration;

use airtight_core::{
    Code, Error, NewEvent, Order, Result, Verdict,
    admin::Admin,
    group::{GroupKind, GroupName, Member},
    queue::{ClaimRequest, Claimed, QueueStore, RowClaim, RowKey},
    table::Shape,
};
use airtight_sqlite::{SqliteOutbox, SqliteQueue};
use sqlx::AssertSqlSafe;
use tempfile::TempDir;
use uuid::Uuid;

/// An outbox in a directory that goes away with it.
pub(crate) struct Fixture {
    pub(crate) dir: TempDir,
    pub(crate) outbox: SqliteOutbox,
}

impl Fixture {
    pub(crate) async fn new() -> Self {
        let fixture = Self::empty().await;
        fixture.outbox.migrate().await.unwrap();
        fixture
    }

    /// The same as a log.
    pub(crate) async fn log() -> Self {
        let empty = Self::empty().await;
        let fixture = Self { outbox: empty.outbox.clone().shape(Shape::Log), dir: empty.dir };
        fixture.outbox.migrate().await.unwrap();
        fixture
    }

    pub(crate) async fn empty() -> Self {
        let dir = TempDir::new().unwrap();
        let outbox = SqliteOutbox::open(&path_in(&dir)).await.unwrap();
        Self { dir, outbox }
    }

    pub(crate) fn path(&self) -> String {
        path_in(&self.dir)
    }

    /// Another process, as far as SQLite can tell: a pool of its own.
    pub(crate) async fn second(&self) -> SqliteOutbox {
        SqliteOutbox::open(&self.path()).await.unwrap()
    }

    pub(crate) async fn exec(&self, sql: &str) -> u64 {
        sqlx::raw_sql(AssertSqlSafe(sql)).execute(self.outbox.pool()).await.unwrap().rows_affected()
    }

    pub(crate) async fn text(&self, sql: &str) -> String {
        let sql = format!("SELECT COALESCE(CAST(({sql}) AS TEXT), 'NULL')");
        sqlx::query_scalar(AssertSqlSafe(sql)).fetch_one(self.outbox.pool()).await.unwrap()
    }

    pub(crate) async fn status(&self, seq: i64) -> String {
        self.text(&format!("SELECT status FROM airtight_outbox WHERE seq = {seq}")).await
    }

    /// Publishes one event of each key, in order, and returns their seqs.
    pub(crate) async fn publish(&self, keys: &[&str]) -> Vec<i64> {
        let events: Vec<NewEvent> = keys.iter().map(|key| event(key)).collect();
        let published = Admin::publish(&self.outbox, &events).await.unwrap();
        published.into_iter().map(|published| published.seq).collect()
    }

    pub(crate) async fn relay(&self, order: Order) -> Hand {
        Hand::join(&self.outbox, member(order)).await
    }
}

fn path_in(dir: &TempDir) -> String {
    dir.path().join("outbox.db").to_str().unwrap().to_owned()
}

pub(crate) fn event(key: &str) -> NewEvent {
    NewEvent::new("shop.orders", "OrderPlaced", "Order", key).json(&serde_json::json!({"key": key})).unwrap()
}

pub(crate) fn member(order: Order) -> Member {
    Member {
        id: Uuid::new_v4(),
        host: "test:1".into(),
        group: GroupName::new(GroupKind::Queue, &format!("{}:*", order.as_str())),
        streams: Vec::new(),
        order,
        block_on_dead: false,
        lease: Duration::from_secs(30),
        partitions: match order {
            Order::None => 0,
            Order::Key => 8,
            Order::Total => 1,
        },
    }
}

/// A relay driven by hand.
pub(crate) struct Hand {
    pub(crate) store: SqliteQueue,
    pub(crate) member: Member,
    pub(crate) partitions: Vec<u16>,
    pub(crate) tokens: Vec<Uuid>,
    pub(crate) bytes: usize,
    pub(crate) max_payload: usize,
}

/// A claim and the token it was made with.
pub(crate) struct Got {
    pub(crate) token: Uuid,
    pub(crate) claimed: Claimed,
}

impl Got {
    pub(crate) fn seqs(&self) -> Vec<i64> {
        self.claimed.rows.iter().map(|row| seq_of(&row.key)).collect()
    }
}

pub(crate) fn seq_of(key: &RowKey) -> i64 {
    match key {
        RowKey::Int(seq) => *seq,
        RowKey::Text(text) => panic!("{text} is no seq"),
    }
}

impl Hand {
    pub(crate) async fn join(outbox: &SqliteOutbox, member: Member) -> Self {
        let store = SqliteQueue::new(outbox.clone());
        store.open().await.unwrap();
        store.members().join(&member).await.unwrap();
        let wanted: Vec<u16> = (0..member.partitions).collect();
        let partitions = store.members().take(&member, &wanted).await.unwrap();
        Self { store, member, partitions, tokens: Vec::new(), bytes: 1 << 20, max_payload: 1 << 20 }
    }

    pub(crate) async fn try_claim(&mut self, events: usize, alone: bool) -> Result<Got> {
        let token = Uuid::new_v4();
        let claimed = self
            .store
            .claim(&ClaimRequest {
                member: &self.member,
                token,
                events,
                bytes: self.bytes,
                max_payload: self.max_payload,
                partitions: &self.partitions,
                tokens: &self.tokens,
                alone,
            })
            .await?;
        self.tokens.push(token);
        Ok(Got { token, claimed })
    }

    pub(crate) async fn claim(&mut self, events: usize) -> Got {
        self.try_claim(events, false).await.unwrap()
    }

    pub(crate) async fn claim_alone(&mut self) -> Got {
        self.try_claim(10, true).await.unwrap()
    }

    pub(crate) async fn settle(&mut self, got: &Got, verdict: Verdict) -> Vec<bool> {
        let rows: Vec<_> = got
            .claimed
            .rows
            .iter()
            .map(|row| (RowClaim { key: row.key.clone(), token: got.token }, &verdict))
            .collect();
        self.store.settle(&self.member, &rows).await.unwrap()
    }

    pub(crate) async fn settle_one(&mut self, got: &Got, index: usize, verdict: Verdict) -> bool {
        let claim = RowClaim { key: got.claimed.rows[index].key.clone(), token: got.token };
        self.store.settle(&self.member, &[(claim, &verdict)]).await.unwrap()[0]
    }

    pub(crate) async fn unhold(&self) -> u64 {
        self.store.unhold(&self.member, &self.partitions).await.unwrap()
    }
}

pub(crate) fn retry() -> Verdict {
    Verdict::Retry { after: Duration::from_secs(3600), error: Error::retryable(Code::TIMEOUT, "no answer") }
}

pub(crate) fn dead() -> Verdict {
    Verdict::Dead { error: Error::permanent(Code::custom("bad"), "never") }
}

/// Makes every waiting event due.
pub(crate) const DUE: &str = "UPDATE airtight_outbox SET next_retry_at = '2000-01-01T00:00:00.000Z' \
     WHERE next_retry_at IS NOT NULL AND next_retry_at < '9000'";
