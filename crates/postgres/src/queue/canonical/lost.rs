//! Lost leases: what an evicted relay had in flight is counted when it is evicted, in the same transaction.

use airtight_core::Result;
use sqlx::AssertSqlSafe;
use uuid::Uuid;

use super::statements::{Names, Statements};
use crate::{PgOutbox, columns::EventColumns, error::doing, outbox::Conn};

/// Relays that were evicted, and the streams that they read.
#[derive(Debug, Default)]
pub(crate) struct Evicted {
    pub(crate) relays: Vec<Uuid>,
    /// Each a JSON array: SQL has no arrays of arrays of different lengths.
    pub(crate) streams: Vec<String>,
}

/// Counts a lost lease for every event that these relays had in flight, and removes their marks.
pub(crate) async fn count(
    outbox: &PgOutbox,
    conn: &mut Conn,
    c: &EventColumns,
    evicted: &Evicted,
) -> Result<()> {
    if evicted.relays.is_empty() {
        return Ok(());
    }
    let failed = doing("counting lost leases");
    let sql = Statements::new(&Names::new(c, ""));
    sqlx::query(AssertSqlSafe(sql.lost_fresh))
        .persistent(!outbox.pooled)
        .bind(&evicted.relays)
        .bind(&evicted.streams)
        .execute(conn.get())
        .await
        .map_err(&failed)?;
    sqlx::query(AssertSqlSafe(sql.lost_waiting))
        .persistent(!outbox.pooled)
        .bind(&evicted.relays)
        .execute(conn.get())
        .await
        .map_err(&failed)?;
    forget_marks(outbox, conn, c, &evicted.relays).await
}

/// Removes the marks of relays that are gone.
pub(crate) async fn forget_marks(
    outbox: &PgOutbox,
    conn: &mut Conn,
    c: &EventColumns,
    relays: &[Uuid],
) -> Result<()> {
    sqlx::query(AssertSqlSafe(format!("DELETE FROM {} WHERE relay = ANY($1::uuid[])", c.mark)))
        .persistent(!outbox.pooled)
        .bind(relays)
        .execute(conn.get())
        .await
        .map_err(doing("removing marks"))?;
    Ok(())
}
