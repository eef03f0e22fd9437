//! Settling: verdicts by kind, in the order in which they are applied. Each kind is one statement of the store.

use std::collections::HashSet;

use airtight_core::{
    Code, Error, Order, Result, Verdict,
    group::Member,
    queue::{RowClaim, RowKey},
};
use uuid::Uuid;

use super::store::Store;
use crate::{PgOutbox, columns::Columns};

/// In the order in which they are applied: what holds a key back comes before what it holds back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Retry,
    Away,
    Dead,
    Unknown,
    Delivered,
    /// Delivered, and not kept.
    Deleted,
    Released,
}

impl Kind {
    const ALL: [Self; 7] =
        [Self::Retry, Self::Away, Self::Dead, Self::Unknown, Self::Delivered, Self::Deleted, Self::Released];

    fn of(verdict: &Verdict, keep_done: bool) -> Self {
        match verdict {
            Verdict::Retry { .. } => Self::Retry,
            Verdict::Away { .. } => Self::Away,
            Verdict::Dead { .. } => Self::Dead,
            Verdict::Unknown { .. } => Self::Unknown,
            Verdict::Delivered | Verdict::SettledInTransaction if keep_done => Self::Delivered,
            Verdict::Delivered | Verdict::SettledInTransaction => Self::Deleted,
            Verdict::Released => Self::Released,
        }
    }

    /// Whether the attempt that the claim counted is given back.
    pub(super) fn gives_back(self) -> bool {
        matches!(self, Self::Released | Self::Away)
    }
}

/// Rows with verdicts of one kind, as the arrays that a statement takes.
pub(crate) struct Settled<'a> {
    pub(super) claims: Vec<&'a RowClaim>,
    pub(super) tokens: Vec<Uuid>,
    /// In seconds, until a row that failed is due again.
    pub(super) waits: Vec<f64>,
    pub(super) codes: Vec<Option<String>>,
    pub(super) messages: Vec<Option<String>>,
}

impl<'a> Settled<'a> {
    fn new(rows: &[&'a (RowClaim, &Verdict)]) -> Self {
        let mut waits: Vec<f64> = Vec::with_capacity(rows.len());
        let mut codes: Vec<Option<String>> = Vec::with_capacity(rows.len());
        let mut messages: Vec<Option<String>> = Vec::with_capacity(rows.len());
        for (_, verdict) in rows {
            let (after, error) = match verdict {
                Verdict::Retry { after, error } | Verdict::Away { after, error } => {
                    (after.as_secs_f64().min(LONGEST_WAIT), Some(error))
                }
                Verdict::Dead { error } | Verdict::Unknown { error } => (0.0, Some(error)),
                Verdict::Delivered | Verdict::SettledInTransaction | Verdict::Released => (0.0, None),
            };
            waits.push(after);
            codes.push(error.map(stored_code));
            messages.push(error.map(stored_message));
        }
        Self {
            claims: rows.iter().map(|(claim, _)| claim).collect(),
            tokens: rows.iter().map(|(claim, _)| claim.token).collect(),
            waits,
            codes,
            messages,
        }
    }
}

/// How often a settle is tried that stands in a claim's way, each waiting for a row of the other. The server has undone
/// it, so that trying again is safe.
const TRIES: u32 = 3;

pub(super) async fn settle(
    outbox: &PgOutbox,
    store: &dyn Store,
    member: &Member,
    rows: &[(RowClaim, &Verdict)],
    keep_done: bool,
) -> Result<Vec<bool>> {
    for _ in 1..TRIES {
        match settle_once(outbox, store, member, rows, keep_done).await {
            Err(error) if error.is(&Code::DEADLOCK) => tracing::debug!(%error, "settling again"),
            other => return other,
        }
    }
    settle_once(outbox, store, member, rows, keep_done).await
}

async fn settle_once(
    outbox: &PgOutbox,
    store: &dyn Store,
    member: &Member,
    rows: &[(RowClaim, &Verdict)],
    keep_done: bool,
) -> Result<Vec<bool>> {
    let kinds: Vec<(Kind, Vec<&(RowClaim, &Verdict)>)> = Kind::ALL
        .into_iter()
        .map(|kind| {
            (
                kind,
                rows.iter().filter(|(_, verdict)| Kind::of(verdict, keep_done) == kind).collect::<Vec<_>>(),
            )
        })
        .filter(|(_, rows)| !rows.is_empty())
        .collect();
    // One statement needs no transaction; several are all or nothing.
    let mut conn = if kinds.len() > 1 { outbox.begin().await? } else { outbox.acquire().await? };
    let mut applied: HashSet<RowKey> = HashSet::with_capacity(rows.len());
    for (kind, rows) in &kinds {
        applied.extend(store.settle(outbox, &mut conn, member, *kind, Settled::new(rows)).await?);
    }
    conn.commit().await?;
    for (kind, rows) in &kinds {
        for (claim, _) in rows {
            store.settled(member, claim, *kind, applied.contains(&claim.key));
        }
    }
    Ok(rows.iter().map(|(row, _)| applied.contains(&row.key)).collect())
}

/// The relay's own row, locked as its claims lock it, and the condition that it is there. With order, evicting a
/// relay thereby waits for its settles, and afterwards none takes effect: a new owner's claim, which has read
/// the rows already, could not see it. Without order the claim token alone decides. $6 is the relay.
pub(super) fn fence(c: &Columns, order: Order) -> (String, &'static str) {
    match order {
        Order::None => ("me AS (SELECT $6::uuid)".into(), "true"),
        Order::Key | Order::Total => (
            format!("me AS (SELECT id FROM {} WHERE id = $6 FOR KEY SHARE)", c.relay),
            "EXISTS (SELECT FROM me)",
        ),
    }
}

/// Rows to mark as one kind, as the arrays that a statement takes.
pub(super) struct Marked<'a> {
    pub(super) kind: Kind,
    pub(super) ids: Vec<&'a str>,
    pub(super) codes: Vec<Option<String>>,
    pub(super) messages: Vec<Option<String>>,
}

/// The rows by what became of them: those without an error were delivered.
pub(super) fn marked<'a>(rows: &'a [(String, Option<&Error>)], unknown: bool) -> Vec<Marked<'a>> {
    let (dead, delivered): (Vec<_>, Vec<_>) = rows.iter().partition(|(_, error)| error.is_some());
    let dead_kind = if unknown { Kind::Unknown } else { Kind::Dead };
    [(Kind::Delivered, delivered), (dead_kind, dead)]
        .into_iter()
        .filter(|(_, rows)| !rows.is_empty())
        .map(|(kind, rows)| Marked {
            kind,
            ids: rows.iter().map(|(id, _)| id.as_str()).collect(),
            codes: rows.iter().map(|(_, error)| error.map(stored_code)).collect(),
            messages: rows.iter().map(|(_, error)| error.map(stored_message)).collect(),
        })
        .collect()
}

/// What a sink may ask for at most, in seconds: ten years. The server refuses times that its calendar does not
/// have, and a settle that is refused stops the relay.
pub(crate) const LONGEST_WAIT: f64 = 10.0 * 365.0 * 86_400.0;

fn stored_code(error: &Error) -> String {
    storable(error.code(), 100)
}

fn stored_message(error: &Error) -> String {
    storable(&error.to_string(), 4_000)
}

/// Text that PostgreSQL can store, and an operator can read.
pub(crate) fn storable(text: &str, limit: usize) -> String {
    text.chars().filter(|letter| *letter != '\0').take(limit).collect()
}
