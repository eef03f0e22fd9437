//! Rows that may be claimed: what is read of them, and the statement that reads it.

use airtight_core::{
    Order, Result,
    group::Member,
    queue::{ClaimRequest, RowKey, SUSPECT_AFTER},
    table::quote,
};
use serde_json::{Value, json};
use sqlx::{Row, sqlite::SqliteRow};

use crate::{
    decode::{self, row_key},
    error::db,
    sql::{HELD, Sql},
};

/// The key that orders the rows of an outbox: the seq, or the time of writing and the identity.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct OrderKey(i64, String, Option<RowKey>);

impl OrderKey {
    /// The order key of a seq.
    pub(crate) fn seq(seq: i64) -> Self {
        Self(seq, String::new(), None)
    }

    /// Reads the three columns of `Sql::order_key`, starting at `at`.
    pub(crate) fn read(row: &SqliteRow, at: usize) -> Result<Self> {
        match row.try_get::<Option<i64>, _>(at).map_err(db)? {
            Some(seq) => Ok(Self::seq(seq)),
            None => Ok(Self(0, decode::lossy(row, at + 1).unwrap_or_default(), Some(row_key(row, at + 2)?))),
        }
    }
}

/// A row that may be claimed, without its payload.
#[derive(Debug)]
pub(crate) struct Candidate {
    pub(crate) order_key: OrderKey,
    pub(crate) row: RowKey,
    pub(crate) key: String,
    pub(crate) partition: u16,
    /// Somebody claimed it and is gone.
    pub(crate) taken_over: bool,
    pub(crate) retry_at: Option<String>,
    pub(crate) count: i64,
    pub(crate) lost: i64,
    pub(crate) size: usize,
    /// The last event of its key before it that waits.
    pub(crate) waits_for: Option<OrderKey>,
    /// Its key is blocked by an earlier dead event.
    pub(crate) behind_dead: bool,
}

impl Candidate {
    /// Lost leases, this one included.
    pub(crate) fn lost_now(&self) -> i64 {
        self.lost.saturating_add(self.taken_over.into())
    }

    pub(crate) fn is_suspect(&self) -> bool {
        self.lost_now() >= i64::from(SUSPECT_AFTER)
    }
}

/// The kinds of candidates. Each repeats the predicate of its index word for word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Never held up.
    Hot,
    /// Held up before, and its time has come.
    Due,
    /// May crash relays, and its time has come.
    Suspect,
}

impl Kind {
    fn condition(self, sql: &Sql) -> String {
        let (retry, lost) = (sql.retry("o"), sql.lost("o"));
        match self {
            Self::Hot => format!("{retry} IS NULL"),
            Self::Due => {
                format!("{retry} < '{HELD}' AND {retry} <= ?1 AND {lost} < {SUSPECT_AFTER}")
            }
            Self::Suspect => format!("{lost} >= {SUSPECT_AFTER} AND ({retry} IS NULL OR {retry} <= ?1)"),
        }
    }
}

/// So many streams are merged from an index each; more are picked out of all events.
const MERGE_STREAMS: usize = 16;

/// Whether partitions are told apart here rather than in SQL, which has no hash of ours.
pub(crate) fn filters_here(sql: &Sql, request: &ClaimRequest<'_>) -> bool {
    request.member.order == Order::Key && sql.spec.partition.is_none()
}

/// Candidates of one kind. Parameters: now, streams, tokens, partitions, how many there are, limit, and then
/// each stream on its own.
pub(crate) fn select_statement(sql: &Sql, request: &ClaimRequest<'_>, kind: Kind) -> String {
    let streams = &request.member.streams;
    let order_by = match (kind, request.member.order) {
        (Kind::Due, Order::None | Order::Key) => format!("ORDER BY {}", sql.retry("o")),
        (Kind::Due, Order::Total) => sql.sorted("o", "ASC"),
        _ => sql.order_by("o", "ASC"),
    };
    let select = select_from(sql, request, kind);
    if kind == Kind::Hot && sql.canonical && (2..=MERGE_STREAMS).contains(&streams.len()) {
        // `stream IN (…)` would sort the whole backlog of these streams for every claim, or walk past that of
        // all others. Arms of one stream each come in seq order, and are merged as far as the limit needs.
        let arms: Vec<String> =
            (0..streams.len()).map(|n| format!("{select} AND {} = ?{}", sql.stream("o"), n + 7)).collect();
        return format!("{} ORDER BY 1 LIMIT ?6", arms.join(" UNION ALL "));
    }
    let stream = match streams_where(sql, "o", streams, 2) {
        // The plus keeps the planner from the index by stream, and its sort.
        filter if streams.len() > 1 && sql.canonical => filter.replacen(" AND ", " AND +", 1),
        filter => filter,
    };
    format!("{select}{stream} {order_by} LIMIT ?6")
}

/// `SELECT … WHERE …` without streams and order.
fn select_from(sql: &Sql, request: &ClaimRequest<'_>, kind: Kind) -> String {
    let member = request.member;
    let void = match member.order {
        Order::None => format!("COALESCE({}, '') < ?1", sql.locked("o")),
        Order::Key | Order::Total => {
            format!("COALESCE({}, '') NOT IN (SELECT value FROM json_each(?3))", sql.token("o"))
        }
    };
    let mut conditions = format!(
        "{} AND {} AND ({} OR ({} AND {void}))",
        sql.open("o"),
        kind.condition(sql),
        sql.pending("o"),
        sql.processing("o")
    );
    let part = sql.spec.partition.as_deref().map(|name| format!("o.{}", quote(name)));
    if let (Order::Key, Some(part)) = (member.order, &part)
        && request.partitions.len() < usize::from(member.partitions)
    {
        conditions.push_str(&format!(" AND {part} % ?5 IN (SELECT value FROM json_each(?4))"));
    }
    let (waits_for, behind_dead) = in_front(sql, request);
    format!(
        "SELECT {}, {}, {}, {}, {}, {}, {}, {}, {waits_for}, {behind_dead} FROM {} WHERE {conditions}",
        sql.order_key("o"),
        sql.key("o"),
        part.as_deref().unwrap_or("NULL"),
        sql.processing("o"),
        sql.retry("o"),
        sql.count("o"),
        sql.lost("o"),
        decode::size(sql, "o"),
        sql.from("o")
    )
}

/// With total order, the first of what nothing may pass: one that waits, one that is to be alone, one that is
/// dead if that blocks. Parameters: now, streams.
pub(crate) fn barrier_statements(sql: &Sql, member: &Member) -> Vec<String> {
    let mut kinds = vec![
        format!("{} AND {} IS NOT NULL AND {1} > ?1", sql.open("o"), sql.retry("o")),
        format!("{} AND {} >= {SUSPECT_AFTER}", sql.open("o"), sql.lost("o")),
    ];
    if member.block_on_dead {
        kinds.push(sql.closed("o"));
    }
    let streams = streams_where(sql, "o", &member.streams, 2);
    let (order_key, from, order_by) = (sql.order_key("o"), sql.from("o"), sql.sorted("o", "ASC"));
    kinds
        .into_iter()
        .map(|kind| format!("SELECT {order_key} FROM {from} WHERE {kind}{streams} {order_by} LIMIT 1"))
        .collect()
}

/// What stands in front of a candidate: the last event of its key that waits, and whether one is dead. Only
/// where indexes answer that; see `Claim::look_around` for the others.
fn in_front(sql: &Sql, request: &ClaimRequest<'_>) -> (String, String) {
    let member = request.member;
    if !sql.canonical || member.order != Order::Key {
        return ("NULL".into(), "0".into());
    }
    let earlier = format!(
        "FROM {} AS e WHERE {} = {} AND {}{}",
        sql.spec.qualified(),
        sql.key("e"),
        sql.key("o"),
        sql.before("e", "o"),
        streams_where(sql, "e", &member.streams, 2)
    );
    let waits_for = format!(
        "(SELECT e.seq {earlier} AND {} AND {} IS NOT NULL ORDER BY e.seq DESC LIMIT 1)",
        sql.open("e"),
        sql.retry("e")
    );
    let behind_dead = if member.block_on_dead {
        format!("EXISTS (SELECT 1 {earlier} AND {})", sql.closed("e"))
    } else {
        "0".into()
    };
    (waits_for, behind_dead)
}

/// ` AND stream = …` for a relay's streams; the parameter is what [`streams_bind`] gives.
pub(crate) fn streams_where(sql: &Sql, alias: &str, streams: &[String], parameter: usize) -> String {
    match streams {
        [] => String::new(),
        // Alone, so that an index that begins with the stream yields seq order.
        [_] => format!(" AND {} = ?{parameter}", sql.stream(alias)),
        _ => format!(" AND {} IN (SELECT value FROM json_each(?{parameter}))", sql.stream(alias)),
    }
}

/// The parameter for [`streams_where`].
pub(crate) fn streams_bind(streams: &[String]) -> String {
    match streams {
        [one] => one.clone(),
        many => json!(many).to_string(),
    }
}

/// A row's identity as JSON.
pub(crate) fn key_value(key: &RowKey) -> Value {
    match key {
        RowKey::Int(number) => json!(number),
        RowKey::Text(text) => json!(text),
    }
}
