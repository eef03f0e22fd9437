//! A server that crashes: what was prepared comes back with its locks, the rest never was, and the sequence jumps.

use std::{
    sync::{Arc, atomic::AtomicBool},
    time::Duration,
};

use airtight_testkit::postgres_server::PrivateServer;
use sqlx::{AssertSqlSafe, PgPool, postgres::PgPoolOptions};

use crate::{
    readers::{Seen, follow, outbox, verify},
    seconds,
    writers::{Plan, Writers},
};

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_server_that_crashes_loses_nothing_of_what_it_committed() {
    let Some(server) = PrivateServer::start("crash") else { return };
    let outbox = outbox(&server.url()).await;
    let pool: PgPool = PgPoolOptions::new().max_connections(3).connect(&server.url()).await.unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    let seen = Seen::default();
    let reader = {
        let (outbox, stop, seen) = (outbox.clone(), stop.clone(), seen.clone());
        tokio::spawn(async move { follow(outbox, "c", true, stop, seen).await })
    };
    let plan = Plan { options: server.url().parse().unwrap(), prefix: "crash".into(), survive: true };
    let writers = Writers::start(&plan, 8);
    for _ in 0..3 {
        tokio::time::sleep(seconds(6) / 4).await;
        // Prepared, and left over: nobody may pass it.
        let mut lost = writer(&server).await;
        let gid = format!("left_{}", fastrand::u64(..));
        for sql in ["BEGIN".to_owned(), insert(), format!("PREPARE TRANSACTION '{gid}'")] {
            sqlx::raw_sql(AssertSqlSafe(sql)).execute(&mut lost).await.unwrap();
        }
        tokio::task::block_in_place(|| server.crash());
    }
    tokio::time::sleep(seconds(6) / 4).await;
    let committed = writers.stop().await;
    // Whoever has lost its answer has left its transaction prepared.
    let left: Vec<String> =
        sqlx::query_scalar("SELECT gid FROM pg_prepared_xacts").fetch_all(&pool).await.unwrap();
    assert!(left.len() >= 3, "{left:?}");
    for gid in &left {
        sqlx::raw_sql(AssertSqlSafe(format!("COMMIT PREPARED '{gid}'"))).execute(&pool).await.unwrap();
    }
    let total = verify(&pool, "c", &seen, &AtomicBool::new(false)).await;
    stop.store(true, std::sync::atomic::Ordering::Relaxed);
    reader.await.unwrap();
    println!(
        "three crashes: {total} events, {committed} acknowledged, {} left prepared; all seen",
        left.len()
    );
    assert!(total as u64 >= committed, "what was acknowledged is there");
    assert!(total > 100, "{total} events are no load");
}

async fn writer(server: &PrivateServer) -> sqlx::PgConnection {
    use sqlx::Connection;
    for _ in 0..200 {
        if let Ok(conn) = sqlx::PgConnection::connect(&server.url()).await {
            return conn;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!("the server does not come back");
}

fn insert() -> String {
    "INSERT INTO airtight.outbox (stream, event_type, aggregate_type, aggregate_id) VALUES ('s', 'T', 'A', 'k')".into()
}
