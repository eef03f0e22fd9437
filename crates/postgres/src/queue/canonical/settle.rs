//! Settling and marking on the canonical table. Every verdict is fenced by the relay's own row and the row's version.

use std::collections::HashSet;

use airtight_core::{
    Error, Result,
    group::Member,
    queue::{RowClaim, RowKey},
};
use sqlx::AssertSqlSafe;

use super::{
    super::settle::{Kind, Marked, Settled, marked},
    Canonical, seq_of,
    version::Version,
};
use crate::{PgOutbox, error::doing, outbox::Conn, session::Session};

/// Applies verdicts of one kind; returns the rows on which they took effect. What the relay remembers of the rows
/// changes only once this is committed: see [`Canonical::settled`].
pub(super) async fn settle(
    store: &Canonical,
    outbox: &PgOutbox,
    conn: &mut Conn,
    member: &Member,
    kind: Kind,
    rows: Settled<'_>,
) -> Result<Vec<RowKey>> {
    let sql = store.sql()?;
    let mut in_hand = InHand::of(store, &rows);
    // Giving back a fresh event writes nothing.
    let mut given_back = Vec::new();
    if kind == Kind::Released {
        (in_hand, given_back) = in_hand.split_waited(store);
        if in_hand.seqs.is_empty() {
            return Ok(given_back);
        }
    }
    let (text, status, attempts) = match kind {
        Kind::Delivered => (&sql.done, "done", 1),
        Kind::Deleted => (&sql.delete, "done", 1),
        Kind::Retry => (&sql.failed, "pending", 1),
        Kind::Away => (&sql.failed, "pending", 0),
        Kind::Dead => (&sql.failed, "dead", 1),
        Kind::Unknown => (&sql.failed, "unknown", 1),
        Kind::Released => (&sql.release, "pending", 0),
    };
    let waits = matches!(kind, Kind::Retry | Kind::Away);
    let mut query = sqlx::query_scalar(AssertSqlSafe(text.clone()))
        .persistent(!outbox.pooled)
        .bind(member.id)
        .bind(&in_hand.seqs)
        .bind(&in_hand.versions);
    if matches!(kind, Kind::Delivered | Kind::Deleted) {
        query = query.bind(in_hand.distinct_versions());
    }
    if !matches!(kind, Kind::Delivered | Kind::Deleted | Kind::Released) {
        let of = |index: &usize| *index;
        query = query
            .bind(in_hand.at.iter().map(of).map(|at| waits.then_some(rows.waits[at])).collect::<Vec<_>>())
            .bind(in_hand.at.iter().map(of).map(|at| rows.codes[at].clone()).collect::<Vec<_>>())
            .bind(in_hand.at.iter().map(of).map(|at| rows.messages[at].clone()).collect::<Vec<_>>())
            .bind(status)
            .bind(attempts);
    }
    let settled: Vec<i64> = query.fetch_all(conn.get()).await.map_err(doing("settling"))?;
    Ok(settled.into_iter().map(RowKey::Int).chain(given_back).collect())
}

/// Rows that are in hand under the token of their claim, as the arrays that a statement takes.
#[derive(Default)]
struct InHand {
    seqs: Vec<i64>,
    versions: Vec<Version>,
    /// The index of each among the rows to settle.
    at: Vec<usize>,
}

impl InHand {
    fn of(store: &Canonical, rows: &Settled<'_>) -> Self {
        let reader = store.reader();
        let mut in_hand = Self::default();
        for (at, claim) in rows.claims.iter().enumerate() {
            let seq = seq_of(&claim.key);
            if let Some(version) = reader.version(seq, claim.token) {
                in_hand.push(seq, version, at);
            }
        }
        in_hand
    }

    fn push(&mut self, seq: i64, version: Version, at: usize) {
        self.seqs.push(seq);
        self.versions.push(version);
        self.at.push(at);
    }

    fn distinct_versions(&self) -> Vec<Version> {
        let distinct: HashSet<Version> = self.versions.iter().copied().collect();
        distinct.into_iter().collect()
    }

    /// Those that were claimed in their rows, and the others.
    fn split_waited(self, store: &Canonical) -> (Self, Vec<RowKey>) {
        let reader = store.reader();
        let (mut waited, mut fresh) = (Self::default(), Vec::new());
        for (index, seq) in self.seqs.iter().enumerate() {
            if reader.waited(*seq) {
                waited.push(*seq, self.versions[index], self.at[index]);
            } else {
                fresh.push(RowKey::Int(*seq));
            }
        }
        (waited, fresh)
    }
}

/// The claim's row was settled or given back, for good.
pub(super) fn remember(store: &Canonical, member: &Member, claim: &RowClaim, kind: Kind, applied: bool) {
    let seq = seq_of(&claim.key);
    let mut reader = store.reader();
    let total = member.order == airtight_core::Order::Total;
    match kind {
        Kind::Released if applied => return reader.released(seq, claim.token),
        Kind::Retry | Kind::Away if applied => reader.makes_wait(seq, false, total),
        Kind::Dead | Kind::Unknown if applied && member.block_on_dead => reader.makes_wait(seq, true, total),
        _ => {}
    }
    reader.settled(seq, claim.token);
}

pub(super) async fn mark(
    store: &Canonical,
    outbox: &PgOutbox,
    conn: &mut Session<'_>,
    rows: &[(String, Option<&Error>)],
    unknown: bool,
) -> Result<()> {
    for Marked { kind, ids, codes, messages } in marked(rows, unknown) {
        // One that is dead may still be delivered, once a person has said so.
        let open = if kind == Kind::Delivered { "t.status <> 'done'" } else { "t.phase = 0" };
        let status = match kind {
            Kind::Delivered | Kind::Deleted => "done",
            Kind::Unknown => "unknown",
            Kind::Dead | Kind::Retry | Kind::Away | Kind::Released => "dead",
        };
        let sql = format!(
            "
            UPDATE {table} t SET status = '{status}', error_code = v.code, error_message = v.message, finished_at = now(),
              claim_token = NULL, locked_until = NULL
            FROM unnest($1::text[], $2::text[], $3::text[]) AS v(seq, code, message)
            WHERE t.seq = v.seq::bigint AND {open}",
            table = store.table,
        );
        sqlx::query(AssertSqlSafe(sql))
            .persistent(!outbox.pooled)
            .bind(ids)
            .bind(codes)
            .bind(messages)
            .execute(&mut *conn)
            .await
            .map_err(doing("marking rows"))?;
    }
    Ok(())
}
