//! Publishes events in the caller's transaction.
//!
//! Nothing here begins, commits or retries: the transaction belongs to the application, and an event exists exactly
//! if it commits. Everything that can be refused without the database is refused first.

use std::collections::HashMap;

use airtight_core::{
    Code, Error, EventBus, NewEvent, Payload, Published, Result,
    group::hash_of,
    table::{Count, Field, PayloadKind, literal, quote},
};
use async_trait::async_trait;
use sqlx::{AssertSqlSafe, Row, SqliteConnection};
use time::{OffsetDateTime, UtcOffset, format_description::well_known::Rfc3339};
use uuid::Uuid;

use crate::{
    error::db,
    outbox::SqliteOutbox,
    schema,
    sql::{NOW, Sql},
};

/// Rows in one statement, at most. Other sizes are powers of two, so that few statements need be prepared.
const CHUNK: usize = 128;

/// Atomic: the event is part of the transaction that the connection is in.
#[async_trait]
impl EventBus<SqliteConnection> for SqliteOutbox {
    async fn publish(&self, tx: &mut SqliteConnection, event: &NewEvent) -> Result<Published> {
        self.publish(tx, event).await
    }
}

impl SqliteOutbox {
    /// Publishes an event in the caller's transaction: it exists when that commits, and never did when that
    /// rolls back. An id that is there already stores nothing, and is reported with `is_new: false`.
    pub async fn publish(&self, conn: &mut SqliteConnection, event: &NewEvent) -> Result<Published> {
        let published = self.publish_many(conn, std::slice::from_ref(event)).await?;
        published.into_iter().next().ok_or_else(|| Error::permanent(Code::NO_EVENT, "nothing was published"))
    }

    /// Publishes several events in the caller's transaction, in this order.
    ///
    /// All are validated before the first is stored.
    pub async fn publish_many(
        &self,
        conn: &mut SqliteConnection,
        events: &[NewEvent],
    ) -> Result<Vec<Published>> {
        for event in events {
            event.validate()?;
            fits(event, self.sql())?;
        }
        self.check_known_file().await?;
        let mut published = Vec::with_capacity(events.len());
        let mut rest = events;
        while !rest.is_empty() {
            let size = if rest.len() >= CHUNK { CHUNK } else { 1 << rest.len().ilog2() };
            let (chunk, tail) = rest.split_at(size);
            match insert(conn, self.sql(), chunk).await {
                Ok(stored) => published.extend(stored),
                Err(error) if error.is(&Code::BAD_COLUMN) => {
                    schema::refuse_other_shape(conn, self.sql()).await?;
                    return Err(error);
                }
                Err(error) => return Err(error),
            }
            rest = tail;
        }
        // Relays look for the commit from now on; see `SqliteQueue::wait`.
        self.published().notify_waiters();
        Ok(published)
    }
}

/// Refuses what this table has no place for, rather than losing it.
fn fits(event: &NewEvent, sql: &Sql) -> Result<()> {
    let spec = &sql.spec;
    let constants = [
        ("stream", &spec.stream, &event.stream),
        ("event_type", &spec.event_type, &event.event_type),
        ("aggregate_type", &spec.aggregate_type, &event.aggregate_type),
        ("aggregate_id", &spec.aggregate_id, &event.aggregate_id),
    ];
    for (name, field, value) in constants {
        if let Field::Constant(text) = field
            && text != value
        {
            return Err(unfit(format!("{name} must be `{text}`, the table has no column for it")));
        }
    }
    match &event.payload {
        Payload::Bytes(_) if spec.payload_bytes.is_none() && spec.payload_kind != PayloadKind::Bytes => {
            Err(unfit("the table has no column for a payload of bytes".into()))
        }
        _ if spec.headers.is_none() && !event.headers.is_empty() => {
            Err(unfit("the table has no column for headers".into()))
        }
        _ if spec.op.is_none() && event.op != airtight_core::Op::Upsert => {
            Err(unfit("the table has no column for the op".into()))
        }
        _ => Ok(()),
    }
}

fn unfit(message: String) -> Error {
    Error::permanent(Code::BAD_EVENT, message)
}

/// A value that is bound for each event.
enum Value {
    Text(String),
    Bytes(Vec<u8>),
    Int(i64),
    Null,
}

async fn insert(conn: &mut SqliteConnection, sql: &Sql, events: &[NewEvent]) -> Result<Vec<Published>> {
    let spec = &sql.spec;
    let ids: Vec<String> =
        events.iter().map(|event| event.id.unwrap_or_else(Uuid::now_v7).to_string()).collect();
    let rows: Vec<Vec<(&str, Value)>> =
        events.iter().zip(&ids).map(|(event, id)| values(sql, event, id)).collect();
    let Some(first) = rows.first() else { return Ok(Vec::new()) };

    let (fixed_names, fixed_values): (Vec<String>, Vec<String>) = fixed(sql).into_iter().unzip();
    let mut names: Vec<String> = first.iter().map(|(name, _)| quote(name)).collect();
    names.extend(fixed_names);
    let mut marks: Vec<String> = vec!["?".to_owned(); first.len()];
    // An occurrence that the producer leaves open is the database's now.
    for (mark, (name, _)) in marks.iter_mut().zip(first) {
        if spec.occurred_at.as_deref() == Some(*name) {
            *mark = format!("COALESCE(?, {NOW})");
        }
    }
    marks.extend(fixed_values);
    let tuple = format!("({})", marks.join(", "));
    let statement = format!(
        "INSERT INTO {} ({}) VALUES {} ON CONFLICT DO NOTHING RETURNING CAST({} AS TEXT), {}",
        spec.qualified(),
        names.join(", "),
        vec![tuple.as_str(); rows.len()].join(", "),
        quote(&spec.id),
        seq_of(sql)
    );
    let mut query = sqlx::query(AssertSqlSafe(statement));
    for (_, value) in rows.into_iter().flatten() {
        query = match value {
            Value::Text(text) => query.bind(text),
            Value::Bytes(bytes) => query.bind(bytes),
            Value::Int(number) => query.bind(number),
            Value::Null => query.bind(None::<String>),
        };
    }
    let mut new: HashMap<String, i64> = HashMap::with_capacity(events.len());
    for row in query.fetch_all(&mut *conn).await.map_err(db)? {
        new.insert(row.try_get(0).map_err(db)?, row.try_get(1).map_err(db)?);
    }
    let mut published = Vec::with_capacity(events.len());
    for id in ids {
        let (seq, is_new) = match new.remove(&id) {
            Some(seq) => (seq, true),
            None => (stored(conn, sql, &id).await?, false),
        };
        published.push(Published { id, seq, is_new });
    }
    Ok(published)
}

/// What one event binds, the columns in the same order for every event.
fn values<'a>(sql: &'a Sql, event: &NewEvent, id: &str) -> Vec<(&'a str, Value)> {
    let spec = &sql.spec;
    let mut values: Vec<(&str, Value)> = vec![(spec.id.as_str(), Value::Text(id.to_owned()))];
    for (field, text) in [
        (&spec.stream, &event.stream),
        (&spec.event_type, &event.event_type),
        (&spec.aggregate_type, &event.aggregate_type),
        (&spec.aggregate_id, &event.aggregate_id),
    ] {
        // Of several columns the first decides.
        if let Some(name) = field.columns().first() {
            values.push((name, Value::Text(text.clone())));
        }
    }
    let body = match (&event.payload, spec.payload_kind) {
        (Payload::None, _) => (Value::Null, Value::Null),
        (payload, PayloadKind::Bytes) => (Value::Bytes(payload.as_bytes().to_vec()), Value::Null),
        // Checked to be JSON, so it is UTF-8.
        (Payload::Json(text), _) => (Value::Text(String::from_utf8_lossy(text).into_owned()), Value::Null),
        (Payload::Bytes(bytes), _) => (Value::Null, Value::Bytes(bytes.to_vec())),
    };
    values.push((&spec.payload, body.0));
    if let Some(name) = &spec.payload_bytes {
        values.push((name, body.1));
    }
    if let Some(name) = &spec.op {
        values.push((name, Value::Text(event.op.as_str().into())));
    }
    if let Some(name) = &spec.headers {
        let headers: serde_json::Map<_, _> =
            event.headers.iter().map(|(name, value)| (name.clone(), value.as_str().into())).collect();
        values.push((name, Value::Text(serde_json::Value::Object(headers).to_string())));
    }
    if let Some(name) = &spec.occurred_at {
        values.push((name, event.occurred_at.map_or(Value::Null, |at| Value::Text(format_time(at)))));
    }
    if let Some(name) = &spec.schema_version {
        values.push((name, Value::Int(event.schema_version.into())));
    }
    if let Some(name) = &spec.max_attempts {
        values.push((name, event.max_attempts.map_or(Value::Null, |limit| Value::Int(limit.into()))));
    }
    if let Some(name) = &spec.partition {
        values.push((name, Value::Int(hash_of(event.aggregate_id.as_bytes()))));
    }
    let mut seen = std::collections::HashSet::new();
    values.retain(|(name, _)| seen.insert(*name));
    values
}

/// What a foreign table needs besides, the same for every event. The canonical one has defaults.
fn fixed(sql: &Sql) -> Vec<(String, String)> {
    if sql.canonical {
        return Vec::new();
    }
    let spec = &sql.spec;
    let mut fixed = Vec::new();
    if let (Some(role), Some(status)) = (sql.role_new(), &spec.status) {
        fixed.push((quote(&status.column), literal(&role.word)));
    }
    for name in [&spec.created_at, &spec.updated_at].into_iter().flatten() {
        if spec.occurred_at.as_ref() != Some(name) {
            fixed.push((quote(name), NOW.to_owned()));
        }
    }
    if let Some(Count::Attempts(name) | Count::Retries(name)) = &spec.count {
        fixed.push((quote(name), "0".into()));
    }
    fixed
}

/// The seq to report: zero where the table has no number to tell.
fn seq_of(sql: &Sql) -> String {
    let name = quote(sql.spec.seq.as_ref().unwrap_or(&sql.spec.identity));
    format!("CASE typeof({name}) WHEN 'integer' THEN {name} ELSE 0 END")
}

async fn stored(conn: &mut SqliteConnection, sql: &Sql, id: &str) -> Result<i64> {
    let statement = format!(
        "SELECT {} FROM {} WHERE {} = ?1 LIMIT 1",
        seq_of(sql),
        sql.spec.qualified(),
        quote(&sql.spec.id)
    );
    let seq = sqlx::query_scalar(AssertSqlSafe(statement)).bind(id).fetch_optional(conn).await.map_err(db)?;
    seq.ok_or_else(|| {
        Error::permanent(
            Code::CONFLICT,
            format!("event {id} was refused by a unique constraint other than that of its id"),
        )
    })
}

/// RFC 3339 in UTC, with milliseconds at least and as many digits more as there are.
pub(crate) fn format_time(at: OffsetDateTime) -> String {
    let at = at.to_offset(UtcOffset::UTC);
    if at.nanosecond().is_multiple_of(1_000_000) {
        let date = at.date();
        let (h, m, s, ms) = at.time().as_hms_milli();
        return format!("{date}T{h:02}:{m:02}:{s:02}.{ms:03}Z");
    }
    at.format(&Rfc3339).unwrap_or_else(|_| at.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_milliseconds_or_all_their_digits() {
        let at = OffsetDateTime::from_unix_timestamp(1_700_000_000).unwrap();
        assert_eq!(format_time(at), "2023-11-14T22:13:20.000Z");
        assert_eq!(format_time(at + time::Duration::microseconds(5)), "2023-11-14T22:13:20.000005Z");
    }
}
