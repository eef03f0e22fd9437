//! From a key to its key slot and its partition: the only formula in SQL. [`airtight_core::group::partition_of`] is its
//! counterpart in Rust, for key slots that a query has returned.
//!
//! The canonical table stores the key slot of each row in its generated column `part`, and parked events store theirs in
//! `slot`. So the formula can never change.

use airtight_core::{Code, Error, Result, group::Member};

/// The number of key slots. A partition is a set of key slots, so there are at most as many partitions.
pub(crate) const KEY_SLOTS: u16 = 64;

/// The key slot of a key, which must not be NULL.
pub(crate) fn slot_of(key: &str) -> String {
    format!("(hashtextextended({key}, 0) & {})::smallint", KEY_SLOTS - 1)
}

/// The partition of a key slot, of so many partitions.
pub(crate) fn partition_of(slot: &str, partitions: u16) -> String {
    if partitions <= 1 { "0::smallint".into() } else { format!("({slot} % {partitions})::smallint") }
}

/// Refuses more partitions than there are key slots.
pub(crate) fn check(member: &Member) -> Result<()> {
    if member.partitions <= KEY_SLOTS {
        return Ok(());
    }
    Err(Error::permanent(
        Code::TOO_MANY_PARTITIONS,
        format!("{} partitions were requested; {KEY_SLOTS} is the maximum", member.partitions),
    ))
}

#[cfg(test)]
mod tests {
    use airtight_core::{NewEvent, admin::Admin};
    use airtight_testkit::postgres::TestDb;
    use sqlx::AssertSqlSafe;

    use super::*;
    use crate::{PgOptions, PgOutbox};

    /// The generated column, the expression and the function in Rust agree on every key.
    #[tokio::test]
    async fn sql_and_rust_put_a_key_into_the_same_partition() {
        let Some(db) = TestDb::create("slots").await else {
            return;
        };
        let outbox = PgOutbox::connect(&db.url(), PgOptions::default()).await.unwrap();
        outbox.migrate().await.unwrap();
        let mut conn = outbox.pool().acquire().await.unwrap();
        let keys = (0..500).map(|n| format!("key-{n}")).chain(["Ü 🦀".into(), "k".repeat(200)]);
        let events: Vec<NewEvent> =
            keys.map(|key| NewEvent::new("s", "Tested", "Test", key).json_text("{}")).collect();
        outbox.publish_many(&mut conn, &events).await.unwrap();
        for partitions in [1, 2, 3, 7, 16, 63, 64] {
            let slot = slot_of("t.aggregate_id");
            let sql =
                format!("SELECT part, {slot}, {} FROM airtight.outbox t", partition_of(&slot, partitions));
            let rows: Vec<(i16, i16, i16)> =
                sqlx::query_as(AssertSqlSafe(sql)).fetch_all(&mut *conn).await.unwrap();
            assert_eq!(rows.len(), events.len());
            for (stored, computed, partition) in rows {
                assert_eq!(stored, computed);
                let in_rust = airtight_core::group::partition_of(stored.into(), partitions);
                assert_eq!(u16::try_from(partition), Ok(in_rust), "slot {stored} of {partitions}");
            }
        }
    }
}
