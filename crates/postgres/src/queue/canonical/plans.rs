//! The plans of the statements: each goes by the index that is meant for it, on a table that was never analysed, with plans
//! for the given values and with plans for any. A plan that reads the whole table is right in every other test.

use airtight_testkit::postgres::TestDb;
use sqlx::{AssertSqlSafe, Connection, Executor, PgConnection, Row};

use super::{
    super::store,
    statements::{Names, Statements},
};
use crate::{PgOptions, PgOutbox};

const ID: &str = "'018f0000-0000-7000-8000-000000000001'::uuid";

/// The arguments of each statement, and the indexes that its plan names.
fn expected(sql: &Statements) -> Vec<(&'static str, &str, String, Vec<&'static str>)> {
    let array = |values: Vec<String>| format!("'{{{}}}'", values.join(","));
    let slots = array((0..64).map(|slot| slot.to_string()).collect());
    let of_slots = |value: &str| array(vec![value.to_owned(); 64]);
    let seqs = array((1..=500).map(|seq| seq.to_string()).collect());
    let versions = array(vec!["7".to_owned(); 500]);
    let lanes = |first: &str| format!("{slots}, {first}{}", of_slots("15"));
    let row = format!("{ID}, {seqs}, {versions}");
    vec![
        ("top", &sql.top, format!("{slots}, '{{}}', true, true"), vec!["outbox_waiting"]),
        (
            "page",
            &sql.page,
            format!(
                "{}, '{{}}', '{{}}', '{{}}', true, true, 1000000",
                lanes(&format!("{}, {}, ", of_slots("10"), of_slots("1000000")))
            ),
            vec!["outbox_claim", "outbox_waiting_key", "outbox_dead"],
        ),
        (
            "net",
            &sql.net,
            format!("{}, {seqs}, {versions}, '{{}}'", lanes(&format!("{}, ", of_slots("1000000")))),
            vec!["outbox_claim"],
        ),
        ("hold", &sql.hold, row.clone(), vec!["outbox_pkey"]),
        ("done", &sql.done, format!("{row}, '{{7}}'"), vec!["outbox_pkey", "Tid Scan"]),
        ("delete", &sql.delete, format!("{row}, '{{7}}'"), vec!["outbox_pkey", "Tid Scan"]),
        ("release", &sql.release, row.clone(), vec!["outbox_pkey"]),
        (
            "failed",
            &sql.failed,
            format!("{row}, {}, '{{}}', '{{}}', 'pending', 1", array(vec!["1".to_owned(); 500])),
            vec!["outbox_pkey"],
        ),
        (
            "due",
            &sql.due,
            format!("{ID}, {slots}, 1000, 30, '{{}}', '{{}}', true, true, 1000000, NULL"),
            vec!["outbox_waiting", "outbox_pkey"],
        ),
        (
            "alone",
            &sql.alone,
            format!("{ID}, {slots}, 30, '{{}}', true, false, false, 1000000"),
            vec!["outbox_waiting", "outbox_pkey"],
        ),
        (
            "lost_fresh",
            &sql.lost_fresh,
            format!("ARRAY[{ID}], '{{[]}}'"),
            vec!["outbox_claim", "outbox_pkey"],
        ),
        ("lost_waiting", &sql.lost_waiting, format!("ARRAY[{ID}]"), vec!["outbox_waiting", "outbox_pkey"]),
    ]
}

#[tokio::test]
async fn every_statement_goes_by_its_index_without_statistics() {
    let Some(db) = TestDb::create("plans").await else { return };
    let outbox = PgOutbox::connect(&db.url(), PgOptions::default()).await.unwrap();
    outbox.apply_migrations().await.unwrap();
    let mut sql = PgConnection::connect(&db.url()).await.unwrap();
    sql.execute(
        "ALTER TABLE airtight.outbox SET (autovacuum_enabled = false);
         INSERT INTO airtight.outbox (stream, event_type, aggregate_type, aggregate_id, status, next_retry_at)
         SELECT 's', 'T', 'A', 'k' || n % 1000, CASE WHEN n <= 20000 THEN 'done' ELSE 'pending' END,
           CASE WHEN n % 1000 = 0 THEN now() END
         FROM generate_series(1, 40000) AS n",
    )
    .await
    .unwrap();
    let mut conn = outbox.acquire().await.unwrap();
    let store = store::load(&outbox, &mut conn).await.unwrap();
    conn.commit().await.unwrap();
    let statements = Statements::new(&Names::new(&store, "airtight.outbox_seq_seq"));
    let mut wrong = Vec::new();
    for analysed in [false, true] {
        if analysed {
            sql.execute("ANALYZE airtight.outbox").await.unwrap();
        }
        for mode in ["force_custom_plan", "force_generic_plan"] {
            sql.execute(AssertSqlSafe(format!("SET jit = off; SET plan_cache_mode = {mode}"))).await.unwrap();
            for (name, text, arguments, indexes) in expected(&statements) {
                sql.execute(AssertSqlSafe(format!("PREPARE {name} AS {text}"))).await.unwrap();
                let rows = sqlx::raw_sql(AssertSqlSafe(format!("EXPLAIN EXECUTE {name} ({arguments})")))
                    .fetch_all(&mut sql)
                    .await
                    .unwrap_or_else(|error| panic!("{name}: {error}"));
                let plan: Vec<String> = rows.iter().map(|row| row.get(0)).collect();
                let plan = plan.join("\n");
                sql.execute(AssertSqlSafe(format!("DEALLOCATE {name}"))).await.unwrap();
                let missing: Vec<&str> =
                    indexes.iter().filter(|index| !plan.contains(*index)).copied().collect();
                if plan.contains("Seq Scan on outbox ") || !missing.is_empty() {
                    wrong.push(format!("{name}, {mode}, analysed: {analysed}: no {missing:?} in\n{plan}"));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n\n"));
}
