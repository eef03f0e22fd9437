//! Rows that may be claimed: what is read of them, and the statement that reads it.

use airtight_core::{
    Order, Result,
    queue::{ClaimRequest, RowKey, SUSPECT_AFTER},
    table::quote,
};
use serde_json::{Value, json};
use sqlx::{Row, sqlite::SqliteRow};

use crate::{
    decode::{self, row_key},
    error::db,
    sql::Sql,
};

/// A row's place in the outbox's order: its seq, or when it was written and its identity.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Place(i64, String, Option<RowKey>);

impl Place {
    /// The place of a seq.
    pub(crate) fn seq(seq: i64) -> Self {
        Self(seq, String::new(), None)
    }

    /// Reads the three columns of `Sql::place`, starting at `at`.
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
    pub(crate) place: Place,
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
    pub(crate) waits_for: Option<Place>,
    /// Its key is blocked by an earlier dead event.
    pub(crate) behind_dead: bool,
}

impl Candidate {
    /// Lost leases, this one included.
    pub(crate) fn lost_now(&self) -> i64 {
        self.lost + i64::from(self.taken_over)
    }

    pub(crate) fn is_suspect(&self) -> bool {
        self.lost_now() >= i64::from(SUSPECT_AFTER)
    }
}

/// Whether partitions are told apart here rather than in SQL, which has no hash of ours.
pub(crate) fn filters_here(sql: &Sql, request: &ClaimRequest<'_>) -> bool {
    request.member.order == Order::Key && sql.spec.partition.is_none()
}

/// Candidates of one kind. Parameters: now, streams, tokens, partitions, how many there are, limit.
pub(crate) fn select_statement(sql: &Sql, request: &ClaimRequest<'_>, arm: &str, order_by: &str) -> String {
    let member = request.member;
    let void = match member.order {
        Order::None => format!("COALESCE({}, '') < ?1", sql.locked("o")),
        Order::Key | Order::Total => {
            format!("COALESCE({}, '') NOT IN (SELECT value FROM json_each(?3))", sql.token("o"))
        }
    };
    let mut conditions = format!(
        "{} AND {arm} AND ({} OR ({} AND {void})){}",
        sql.open("o"),
        sql.pending("o"),
        sql.processing("o"),
        streams_where(sql, "o", &member.streams, 2)
    );
    let part = sql.spec.partition.as_deref().map(|name| format!("o.{}", quote(name)));
    if let (Order::Key, Some(part)) = (member.order, &part)
        && request.partitions.len() < usize::from(member.partitions)
    {
        conditions.push_str(&format!(" AND {part} % ?5 IN (SELECT value FROM json_each(?4))"));
    }
    let look_up = sql.canonical && member.order == Order::Key;
    let waits_for = if look_up {
        let (before, retry) = (sql.before("e", "o"), sql.retry("e"));
        format!(
            "(SELECT e.seq FROM {} AS e WHERE {} = {} AND {before} AND {} AND {retry} IS NOT NULL{} \
             ORDER BY e.seq DESC LIMIT 1)",
            sql.spec.qualified(),
            sql.key("e"),
            sql.key("o"),
            sql.open("e"),
            streams_where(sql, "e", &member.streams, 2)
        )
    } else {
        "NULL".into()
    };
    let behind_dead = if look_up && member.block_on_dead {
        format!(
            "EXISTS (SELECT 1 FROM {} AS e WHERE {} = {} AND {} AND {}{})",
            sql.spec.qualified(),
            sql.key("e"),
            sql.key("o"),
            sql.before("e", "o"),
            sql.closed("e"),
            streams_where(sql, "e", &member.streams, 2)
        )
    } else {
        "0".into()
    };
    format!(
        "SELECT {}, {}, {}, {}, {}, {}, {}, {}, {waits_for}, {behind_dead} FROM {} WHERE {conditions} {order_by} LIMIT ?6",
        sql.place("o"),
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
