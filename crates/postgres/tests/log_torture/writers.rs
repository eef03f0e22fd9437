//! Writers: plain inserts, rollbacks, prepared transactions, savepoints, COPY, values drawn ahead, inserts straight
//! into a partition, repeated ids; with pauses while a transaction is open.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use sqlx::{AssertSqlSafe, Connection, PgConnection, postgres::PgConnectOptions};

/// Who writes, until told to stop.
pub(crate) struct Writers {
    stop: Arc<AtomicBool>,
    tasks: Vec<tokio::task::JoinHandle<()>>,
    pub(crate) committed: Arc<AtomicU64>,
}

/// How they behave.
#[derive(Clone)]
pub(crate) struct Plan {
    pub(crate) options: PgConnectOptions,
    /// Distinguishes prepared transactions from those of other tests.
    pub(crate) prefix: String,
    /// Connect again after an error, since the server may be crashed.
    pub(crate) survive: bool,
}

impl Writers {
    pub(crate) fn start(plan: &Plan, count: usize) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let committed = Arc::new(AtomicU64::new(0));
        let tasks = (0..count)
            .map(|number| tokio::spawn(write(plan.clone(), number, stop.clone(), committed.clone())))
            .collect();
        Self { stop, tasks, committed }
    }

    pub(crate) async fn stop(self) -> u64 {
        self.stop.store(true, Ordering::Relaxed);
        for task in self.tasks {
            task.await.unwrap();
        }
        self.committed.load(Ordering::Relaxed)
    }
}

async fn write(plan: Plan, number: usize, stop: Arc<AtomicBool>, committed: Arc<AtomicU64>) {
    let mut round = 0u64;
    while !stop.load(Ordering::Relaxed) {
        let mut conn = match PgConnection::connect_with(&plan.options).await {
            Ok(conn) => conn,
            Err(error) => {
                assert!(plan.survive, "{error}");
                tokio::time::sleep(Duration::from_millis(20)).await;
                continue;
            }
        };
        while !stop.load(Ordering::Relaxed) {
            round += 1;
            let gid = format!("{}_{number}_{round}", plan.prefix);
            match transaction(&mut conn, number, &gid).await {
                Ok(events) => {
                    committed.fetch_add(events, Ordering::Relaxed);
                }
                Err(error) => {
                    assert!(plan.survive, "{error}");
                    break;
                }
            }
        }
    }
}

/// One transaction; returns how many events it committed.
async fn transaction(conn: &mut PgConnection, number: usize, gid: &str) -> sqlx::Result<u64> {
    run(conn, "BEGIN").await?;
    let mut events = 0;
    for _ in 0..fastrand::u32(1..=3) {
        events += insert(conn, number).await?;
    }
    // Open for a while, so that others overtake.
    if fastrand::bool() {
        tokio::time::sleep(Duration::from_micros(fastrand::u64(0..4_000))).await;
    }
    match fastrand::u32(0..100) {
        0..15 => {
            run(conn, "ROLLBACK").await?;
            Ok(0)
        }
        15..20 => {
            run(conn, &format!("PREPARE TRANSACTION '{gid}'")).await?;
            tokio::time::sleep(Duration::from_micros(fastrand::u64(0..6_000))).await;
            let fate = if fastrand::u32(0..5) == 0 { "ROLLBACK" } else { "COMMIT" };
            run(conn, &format!("{fate} PREPARED '{gid}'")).await?;
            Ok(if fate == "COMMIT" { events } else { 0 })
        }
        _ => {
            run(conn, "COMMIT").await?;
            Ok(events)
        }
    }
}

async fn insert(conn: &mut PgConnection, number: usize) -> sqlx::Result<u64> {
    let key = format!("k{}", fastrand::u32(0..50));
    let plain = |table: &str, seq: &str| {
        format!(
            "INSERT INTO {table} (seq, stream, event_type, aggregate_type, aggregate_id, payload) \
             VALUES ({seq}, 's', 'T', 'A', '{key}', '{{\"writer\": {number}}}')"
        )
    };
    match fastrand::u32(0..20) {
        0 => {
            run(conn, "SAVEPOINT s").await?;
            run(conn, &plain("airtight.outbox", "DEFAULT")).await?;
            run(conn, "ROLLBACK TO s").await?;
            run(conn, &plain("airtight.outbox", "DEFAULT")).await?;
            Ok(1)
        }
        1 => {
            let seq: i64 =
                sqlx::query_scalar("SELECT nextval('airtight.outbox_seq')").fetch_one(&mut *conn).await?;
            tokio::time::sleep(Duration::from_micros(fastrand::u64(0..1_000))).await;
            run(conn, &plain("airtight.outbox", &seq.to_string())).await?;
            Ok(1)
        }
        2 => {
            run(conn, &plain("airtight.outbox_1", "DEFAULT")).await?;
            Ok(1)
        }
        3 => {
            let mut copy = conn
                .copy_in_raw(
                    "COPY airtight.outbox (stream, event_type, aggregate_type, aggregate_id) FROM STDIN",
                )
                .await?;
            copy.send(format!("s\tT\tA\t{key}\ns\tT\tA\t{key}\n").as_bytes()).await?;
            copy.finish().await
        }
        4 => {
            // Drawn twice, stored once.
            let id = uuid::Uuid::now_v7();
            let publish =
                format!("SELECT airtight.publish('s', 'T', 'A', '{key}', NULL, event_id => '{id}')");
            run(conn, &publish).await?;
            run(conn, &publish).await?;
            Ok(1)
        }
        _ => {
            run(conn, &plain("airtight.outbox", "DEFAULT")).await?;
            Ok(1)
        }
    }
}

async fn run(conn: &mut PgConnection, sql: &str) -> sqlx::Result<()> {
    sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).execute(conn).await.map(|_| ())
}
