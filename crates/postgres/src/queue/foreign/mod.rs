//! A foreign table: any table that is not canonical, mapped by a `TableSpec`.
//!
//! Its statements are assembled from the mapping. Leases are in the side table, whatever columns the table has. State for
//! which the table has no column is kept there as well. State for which it has columns is also written to the table, for
//! its own readers.
//!
//! | module | what lives there |
//! | --- | --- |
//! | `claim` | the claim, and what makes it exclusive |
//! | `settle` | settling, renewing and marking |
//! | `table` | how its rows are shown to an operator |

mod claim;
mod settle;
mod table;

use std::ops::Deref;

use airtight_core::{
    Error, Result,
    group::Member,
    queue::{ClaimRequest, Claimed, RowClaim, RowKey},
    table::literal,
};
use async_trait::async_trait;
use sqlx::{AssertSqlSafe, postgres::PgRow};

use super::{
    as_i64, collect, most_events,
    settle::{Kind, Settled},
    store::Store,
};
use crate::{PgOutbox, columns::Columns, decode, outbox::Conn, session::Session};

/// The store of a foreign table.
#[derive(Debug)]
pub(super) struct Foreign {
    columns: Columns,
}

impl Deref for Foreign {
    type Target = Columns;

    fn deref(&self) -> &Columns {
        &self.columns
    }
}

impl Foreign {
    pub(super) fn new(columns: Columns) -> Self {
        Self { columns }
    }
}

#[async_trait]
impl Store for Foreign {
    async fn claim(&self, outbox: &PgOutbox, request: &ClaimRequest<'_>) -> Result<Claimed> {
        let member = request.member;
        let partitions: Vec<i16> = request.partitions.iter().filter_map(|n| i16::try_from(*n).ok()).collect();
        let mut conn = outbox.acquire().await?;
        let rows = sqlx::query(AssertSqlSafe(claim::claim(self, member, request.alone)))
            .persistent(!outbox.pooled)
            .bind(request.token)
            .bind(as_i64(if request.alone { 1 } else { most_events(request) }))
            .bind(as_i64(request.bytes))
            .bind(member.lease.as_secs_f64())
            .bind(member.id)
            .bind(partitions)
            .bind(request.tokens)
            .bind(&member.streams)
            .bind(as_i64(request.max_payload))
            .fetch(conn.get());
        let (claimed, _) = collect(rows, &self.spec, request, row_key).await?;
        conn.commit().await?;
        Ok(claimed)
    }

    async fn renew(
        &self,
        outbox: &PgOutbox,
        conn: &mut Conn,
        member: &Member,
        rows: &[RowClaim],
    ) -> Result<Vec<RowKey>> {
        settle::renew(self, outbox, conn, member, rows).await
    }

    async fn settle(
        &self,
        outbox: &PgOutbox,
        conn: &mut Conn,
        member: &Member,
        kind: Kind,
        rows: Settled<'_>,
    ) -> Result<Vec<RowKey>> {
        settle::settle(self, outbox, conn, member, kind, rows).await
    }

    async fn mark(
        &self,
        outbox: &PgOutbox,
        conn: &mut Session<'_>,
        rows: &[(String, Option<&Error>)],
        unknown: bool,
    ) -> Result<()> {
        settle::mark(self, outbox, conn, rows, unknown).await
    }

    /// Nothing is marked as held: what waits is worked out at each claim.
    async fn unhold(&self, _outbox: &PgOutbox, _member: &Member, _partitions: &[u16]) -> Result<u64> {
        Ok(0)
    }

    fn backlog_statement(&self, member: &Member) -> String {
        table::backlog(self, member)
    }

    fn has_dead_statement(&self) -> String {
        table::has_dead(self)
    }
}

/// What tells rows apart.
fn row_key(row: &PgRow) -> Result<Option<RowKey>> {
    Ok(decode::get::<Option<String>>(row, "row_id")?.map(RowKey::Text))
}

/// The identities of rows as an array that a statement can take.
fn identities<'a>(rows: impl Iterator<Item = &'a RowClaim>) -> Vec<String> {
    rows.map(|row| match &row.key {
        RowKey::Int(key) => key.to_string(),
        RowKey::Text(text) => text.clone(),
    })
    .collect()
}

/// `LEFT JOIN` to the row `s` of the side table.
fn join_side(c: &Columns) -> String {
    format!(
        "LEFT JOIN {} s ON s.outbox = {} AND s.event = {}::text",
        c.side,
        literal(&c.outbox),
        c.identity()
    )
}

/// How often a relay vanished with the row. A column that the table has for it is not asked: claims do not write it.
fn lost_leases() -> String {
    "coalesce(s.lost_leases, 0)".into()
}
