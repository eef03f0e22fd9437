//! Tables full of events to measure on.

use airtight_core::admin::Admin;
use airtight_postgres::{PgOptions, PgOutbox};
use airtight_testkit::postgres::TestDb;
use sqlx::{AssertSqlSafe, PgPool};

/// An outbox of its own, migrated and empty.
pub(crate) async fn outbox(db: &TestDb, table: &str) -> PgOutbox {
    let options = PgOptions { table: table.into(), ..PgOptions::default() };
    let outbox = PgOutbox::connect(&db.url(), options).await.expect("the URL comes from the testkit");
    outbox.migrate().await.expect("a fresh database takes migrations");
    outbox
}

/// Fills it with events of about 500 bytes over 1,000 keys.
pub(crate) async fn fill(outbox: &PgOutbox, events: i64) {
    let sql = format!(
        "INSERT INTO {} (stream, event_type, aggregate_type, aggregate_id, payload) \
         SELECT 'bench', 'Happened', 'Thing', 'key-' || n % 1000, \
         jsonb_build_object('n', n, 'text', rpad(md5(n::text), 470, md5((n * 7)::text))) FROM generate_series(1, $1::bigint) AS n",
        outbox.spec().qualified()
    );
    sqlx::query(AssertSqlSafe(sql)).bind(events).execute(outbox.pool()).await.expect("filling");
    settle_down(outbox.pool(), &outbox.spec().qualified()).await;
}

/// Statistics, and dirty pages written: so that each measurement starts alike.
pub(crate) async fn settle_down(pool: &PgPool, table: &str) {
    sqlx::query(AssertSqlSafe(format!("VACUUM ANALYZE {table}"))).execute(pool).await.expect("vacuum");
    sqlx::query("CHECKPOINT").execute(pool).await.expect("checkpoint");
}
