//! The demo's bank: accounts, transfers, and writers that publish each transfer in the transaction that makes it.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use airtight::NewEvent;
use serde_json::json;
use sqlx::{Row, Sqlite, SqliteConnection, Transaction};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::sink::FlakySink;
use crate::{
    errors::{Failure, Outcome},
    wiring::SqliteOutbox,
};

const ACCOUNTS: i64 = 200;
const OPENING_BALANCE: i64 = 1_000_000;
const WRITERS: u64 = 4;
/// The maximum number of transfers in one transaction: a payment run, not a single payment.
const RUN: u64 = 64;
/// One transaction in this many is rolled back after it has published.
const ROLLBACK_ONE_IN: u64 = 10;

const SCHEMA: [&str; 3] = [
    "CREATE TABLE accounts (id INTEGER PRIMARY KEY, balance INTEGER NOT NULL, transfers INTEGER NOT NULL DEFAULT 0)",
    "CREATE TABLE transfers (event_id TEXT PRIMARY KEY, account_id INTEGER NOT NULL, number INTEGER NOT NULL, \
     to_account INTEGER NOT NULL, amount INTEGER NOT NULL) WITHOUT ROWID",
    "WITH RECURSIVE n(id) AS (SELECT 1 UNION ALL SELECT id + 1 FROM n WHERE id < ?1) \
     INSERT INTO accounts (id, balance) SELECT id, ?2 FROM n",
];

/// The number of undelivered events at which the writers slow down. SQLite has one writer at a time and no fair queue
/// for writers: four busy writers would block the relay until they are done.
const BACKLOG: u64 = 1_000;
const SLOW_DOWN: Duration = Duration::from_millis(20);

/// When to stop writing, at the first of these, and how fast to write.
#[derive(Debug, Clone, Copy)]
pub(super) struct Goal {
    pub(super) events: Option<u64>,
    pub(super) deadline: Option<Instant>,
    /// The pause between two transactions of a writer.
    pub(super) pause: Duration,
}

impl Goal {
    /// The pause with which the whole demo takes about this many `seconds`, so that people can watch it.
    pub(super) fn pause_for(events: u64, seconds: u64) -> Duration {
        let transactions = events.div_ceil(RUN / 2 * WRITERS).max(1);
        (Duration::from_secs(seconds) / u32::try_from(transactions).unwrap_or(u32::MAX))
            .min(Duration::from_millis(500))
    }
}

/// What the writers have done so far.
#[derive(Debug, Default)]
pub(super) struct Tally {
    pub(super) committed: AtomicU64,
    pub(super) rolled_back: AtomicU64,
}

/// The bank and its outbox, in one database.
pub(super) struct Bank {
    outbox: SqliteOutbox,
    tally: Arc<Tally>,
    seed: u64,
}

impl Bank {
    pub(super) async fn open(outbox: SqliteOutbox, seed: u64) -> Outcome<Self> {
        let [accounts, transfers, customers] = SCHEMA;
        for statement in [accounts, transfers] {
            sqlx::query(statement).execute(outbox.pool()).await.map_err(failed)?;
        }
        sqlx::query(customers)
            .bind(ACCOUNTS)
            .bind(OPENING_BALANCE)
            .execute(outbox.pool())
            .await
            .map_err(failed)?;
        Ok(Self { outbox, tally: Arc::default(), seed })
    }

    pub(super) fn outbox(&self) -> &SqliteOutbox {
        &self.outbox
    }

    pub(super) fn tally(&self) -> Arc<Tally> {
        self.tally.clone()
    }

    /// Runs the writers to the goal.
    pub(super) async fn write(
        self: &Arc<Self>,
        goal: Goal,
        sink: &FlakySink,
        stop: &CancellationToken,
    ) -> Outcome {
        let mut writers = JoinSet::new();
        for writer in 0..WRITERS {
            let (bank, sink, stop) = (self.clone(), sink.clone(), stop.clone());
            let random = fastrand::Rng::with_seed(self.seed.wrapping_add(writer));
            // A fixed share per writer: the writers' speed must not decide what is written.
            let share = goal.events.map(|events| events / WRITERS + u64::from(writer < events % WRITERS));
            writers.spawn(async move { bank.writer(goal, share, random, &sink, &stop).await });
        }
        while let Some(ended) = writers.join_next().await {
            ended.map_err(|error| Failure::failed(format!("a writer crashed: {error}")))??;
        }
        Ok(())
    }

    async fn writer(
        &self,
        goal: Goal,
        share: Option<u64>,
        mut random: fastrand::Rng,
        sink: &FlakySink,
        stop: &CancellationToken,
    ) -> Outcome {
        let mut left = share;
        while left != Some(0) {
            let backlog = self.tally.committed.load(Ordering::Acquire).saturating_sub(sink.distinct());
            let pause = if backlog > BACKLOG { goal.pause.max(SLOW_DOWN) } else { goal.pause };
            if !pause.is_zero() {
                tokio::select! {
                    () = stop.cancelled() => {}
                    () = tokio::time::sleep(pause) => {}
                }
            }
            let late = goal.deadline.is_some_and(|deadline| Instant::now() >= deadline);
            if late || stop.is_cancelled() {
                return Ok(());
            }
            let transfers = random.u64(1..=RUN).min(left.unwrap_or(u64::MAX));
            if self.payment_run(transfers, &mut random).await? {
                self.tally.committed.fetch_add(transfers, Ordering::AcqRel);
                left = left.map(|left| left - transfers);
            } else {
                self.tally.rolled_back.fetch_add(transfers, Ordering::AcqRel);
            }
        }
        Ok(())
    }

    /// One transaction: some transfers and their events. Returns whether it was committed.
    async fn payment_run(&self, transfers: u64, random: &mut fastrand::Rng) -> Outcome<bool> {
        // IMMEDIATE: two deferred transactions that both read and then write would deadlock, and one of
        // them would fail in the middle.
        let mut tx: Transaction<'_, Sqlite> =
            self.outbox.pool().begin_with("BEGIN IMMEDIATE").await.map_err(failed)?;
        let mut events = Vec::new();
        for _ in 0..transfers {
            events.push(transfer(&mut tx, random).await.map_err(failed)?);
        }
        self.outbox.publish_many(&mut tx, &events).await?;
        if random.u64(0..ROLLBACK_ONE_IN) == 0 {
            tx.rollback().await.map_err(failed)?;
            return Ok(false);
        }
        tx.commit().await.map_err(failed)?;
        Ok(true)
    }

    /// The event ids of all transfers in the database.
    pub(super) async fn committed(&self) -> Outcome<Vec<String>> {
        sqlx::query_scalar("SELECT event_id FROM transfers")
            .fetch_all(self.outbox.pool())
            .await
            .map_err(failed)
    }

    /// Whether the sum of all balances is unchanged: transfers only move money.
    pub(super) async fn balances(&self) -> Outcome<bool> {
        let row = sqlx::query("SELECT SUM(balance) FROM accounts").fetch_one(self.outbox.pool()).await;
        let sum: i64 = row.map_err(failed)?.try_get(0).map_err(failed)?;
        Ok(sum == ACCOUNTS * OPENING_BALANCE)
    }
}

/// Moves money and numbers the transfer within its account. The row lock of the update serialises the writers of that
/// key, and so gives the order that is promised.
async fn transfer(connection: &mut SqliteConnection, random: &mut fastrand::Rng) -> sqlx::Result<NewEvent> {
    let from = random.i64(1..=ACCOUNTS);
    let to = (from + random.i64(1..ACCOUNTS) - 1) % ACCOUNTS + 1;
    let amount = random.i64(1..=500);
    // From the seed as well: the sink's faults depend on the id.
    let id = uuid::Builder::from_random_bytes(random.u128(..).to_ne_bytes()).into_uuid();
    let number: i64 = sqlx::query(
        "UPDATE accounts SET balance = balance - ?2, transfers = transfers + 1 WHERE id = ?1 RETURNING transfers",
    )
    .bind(from)
    .bind(amount)
    .fetch_one(&mut *connection)
    .await?
    .try_get(0)?;
    sqlx::query("UPDATE accounts SET balance = balance + ?2 WHERE id = ?1")
        .bind(to)
        .bind(amount)
        .execute(&mut *connection)
        .await?;
    sqlx::query("INSERT INTO transfers (event_id, account_id, number, to_account, amount) VALUES (?1, ?2, ?3, ?4, ?5)")
        .bind(id.to_string())
        .bind(from)
        .bind(number)
        .bind(to)
        .bind(amount)
        .execute(&mut *connection)
        .await?;
    let body = json!({"from": from, "to": to, "amount": amount, "number": number});
    Ok(NewEvent::new("bank.transfers", "TransferCompleted", "Account", from.to_string())
        .id(id)
        .json_text(body.to_string()))
}

fn failed(error: sqlx::Error) -> Failure {
    Failure::failed(format!("the demo's database: {error}"))
}
