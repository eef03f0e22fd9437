//! Exactly-once effect: a counter in the database, incremented by a handler that is killed at random moments.

use std::time::{Duration, Instant};

use airtight_testkit::postgres::TestDb;

use crate::{
    children::Process,
    readers::outbox,
    seconds,
    writers::{Plan, Writers},
};

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_counter_ends_at_the_number_of_committed_events() {
    let Some(db) = TestDb::create("exactly_once").await else { return };
    let _migrated = outbox(&db.url()).await;
    let pool = db.pool(2).await;
    sqlx::raw_sql("CREATE TABLE counter (n bigint NOT NULL); INSERT INTO counter VALUES (0)")
        .execute(&pool)
        .await
        .unwrap();
    let plan = Plan { options: db.connect_options(), prefix: db.name().to_owned(), survive: false };
    let writers = Writers::start(&plan, 2);
    let end = Instant::now() + seconds(8);
    let (mut kills, mut worked) = (0, 0);
    let mut before = 0i64;
    while Instant::now() < end {
        let consumer = Process::start("counter", &db.url());
        tokio::time::sleep(Duration::from_millis(fastrand::u64(300..1_800))).await;
        consumer.kill();
        kills += 1;
        let now: i64 = sqlx::query_scalar("SELECT n FROM counter").fetch_one(&pool).await.unwrap();
        worked += u32::from(now > before);
        before = now;
    }
    let committed = writers.stop().await;
    tokio::task::block_in_place(|| Process::start("counter-drain", &db.url()).wait());
    let counted: i64 = sqlx::query_scalar("SELECT n FROM counter").fetch_one(&pool).await.unwrap();
    println!(
        "{kills} kills, {worked} of them of a consumer that had counted; {committed} events committed, {counted} counted"
    );
    assert_eq!(counted.cast_unsigned(), committed);
    assert!(worked >= 2, "the kills have hit nobody at work");
}
