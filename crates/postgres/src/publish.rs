//! Publishing through sqlx, in the caller's transaction.
//!
//! Nothing here retries: a failed statement has aborted the caller's transaction, and only the caller can
//! begin another. What can be known to fail is refused before the database sees it.

use std::collections::HashMap;

use airtight_core::{
    Error, EventBus, NewEvent, Payload, Published, Result,
    table::{Shape, quote},
};
use async_trait::async_trait;
use sqlx::{AssertSqlSafe, PgConnection, Row};
use uuid::Uuid;

use crate::{PgOutbox, error::doing};

impl PgOutbox {
    /// Publishes one event in the transaction that `conn` is in.
    pub async fn publish(&self, conn: &mut PgConnection, event: &NewEvent) -> Result<Published> {
        let mut published = self.publish_many(conn, std::slice::from_ref(event)).await?;
        published
            .pop()
            .ok_or_else(|| Error::permanent("postgres", "the database returned nothing for the event"))
    }

    /// Publishes many events in one round trip, in the order given.
    pub async fn publish_many(&self, conn: &mut PgConnection, events: &[NewEvent]) -> Result<Vec<Published>> {
        if events.is_empty() {
            return Ok(Vec::new());
        }
        let rows = Rows::new(self, events)?;
        let returned = sqlx::query(AssertSqlSafe(self.insert_sql()))
            .persistent(!self.pooled)
            .bind(&rows.ids)
            .bind(&rows.streams)
            .bind(&rows.event_types)
            .bind(&rows.aggregate_types)
            .bind(&rows.aggregate_ids)
            .bind(&rows.ops)
            .bind(&rows.payloads)
            .bind(&rows.payload_bytes)
            .bind(&rows.headers)
            .bind(&rows.occurred_at)
            .bind(&rows.schema_versions)
            .bind(&rows.max_attempts)
            .fetch_all(&mut *conn)
            .await
            .map_err(doing("publishing"))?;
        let mut found = HashMap::with_capacity(returned.len());
        for row in returned {
            let id: Uuid = row.try_get(0).map_err(doing("publishing"))?;
            let seq: i64 = row.try_get(1).map_err(doing("publishing"))?;
            let is_new: bool = row.try_get(2).map_err(doing("publishing"))?;
            found.insert(id, (seq, is_new));
        }
        let missing = rows.missing(&found);
        if !missing.is_empty() {
            let late = sqlx::query(AssertSqlSafe(self.find_sql()))
                .persistent(!self.pooled)
                .bind(&missing)
                .fetch_all(conn)
                .await
                .map_err(doing("publishing"))?;
            for row in late {
                let id: Uuid = row.try_get(0).map_err(doing("publishing"))?;
                let seq: i64 = row.try_get(1).map_err(doing("publishing"))?;
                found.insert(id, (seq, false));
            }
        }
        rows.answer(found)
    }

    /// Finds what another transaction committed while the INSERT waited for it: a statement of its own has a
    /// snapshot of its own.
    pub(crate) fn find_sql(&self) -> String {
        let outbox = format!("{}.{}", quote(&self.options.schema), quote(&self.options.table));
        format!("SELECT o.id, o.seq FROM {outbox} o WHERE o.id = ANY($1::uuid[])")
    }

    /// One statement for any number of events. `WITH ORDINALITY … ORDER BY` gives them `seq` in order, and
    /// what another transaction has published already is looked up by the second half, which runs with the
    /// same snapshot: hence [`Self::find_sql`].
    pub(crate) fn insert_sql(&self) -> String {
        let outbox = format!("{}.{}", quote(&self.options.schema), quote(&self.options.table));
        // No index over all partitions of a log could be unique by id: each has its own.
        let conflict = match self.options.shape {
            Shape::Queue => "(id)",
            Shape::Log => "",
        };
        format!(
            "WITH new AS (\
               INSERT INTO {outbox} AS o (id, stream, event_type, aggregate_type, aggregate_id, op, payload, \
                 payload_bytes, headers, occurred_at, schema_version, max_attempts) \
               SELECT v.id, v.stream, v.event_type, v.aggregate_type, v.aggregate_id, v.op, v.payload::jsonb, \
                 v.payload_bytes, v.headers::jsonb, coalesce(v.occurred_at, now()), v.schema_version, v.max_attempts \
               FROM unnest($1::uuid[], $2::text[], $3::text[], $4::text[], $5::text[], $6::text[], $7::text[], \
                 $8::bytea[], $9::text[], $10::timestamptz[], $11::int[], $12::int[]) WITH ORDINALITY \
                 AS v(id, stream, event_type, aggregate_type, aggregate_id, op, payload, payload_bytes, headers, \
                 occurred_at, schema_version, max_attempts, place) \
               ORDER BY v.place \
               ON CONFLICT {conflict} DO NOTHING \
               RETURNING o.id, o.seq) \
             SELECT id, seq, true AS is_new FROM new \
             UNION ALL \
             SELECT o.id, o.seq, false FROM {outbox} o WHERE o.id = ANY($1) \
               AND NOT EXISTS (SELECT FROM new WHERE new.id = o.id)"
        )
    }
}

/// Atomic: the event is part of the transaction that the connection is in.
#[async_trait]
impl EventBus<PgConnection> for PgOutbox {
    async fn publish(&self, tx: &mut PgConnection, event: &NewEvent) -> Result<Published> {
        self.publish(tx, event).await
    }
}

/// Events as columns.
pub(crate) struct Rows<'a> {
    pub(crate) ids: Vec<Uuid>,
    pub(crate) streams: Vec<&'a str>,
    pub(crate) event_types: Vec<&'a str>,
    pub(crate) aggregate_types: Vec<&'a str>,
    pub(crate) aggregate_ids: Vec<&'a str>,
    pub(crate) ops: Vec<&'a str>,
    pub(crate) payloads: Vec<Option<&'a str>>,
    pub(crate) payload_bytes: Vec<Option<&'a [u8]>>,
    pub(crate) headers: Vec<String>,
    pub(crate) occurred_at: Vec<Option<time::OffsetDateTime>>,
    pub(crate) schema_versions: Vec<i32>,
    pub(crate) max_attempts: Vec<Option<i32>>,
}

impl<'a> Rows<'a> {
    pub(crate) fn new(outbox: &PgOutbox, events: &'a [NewEvent]) -> Result<Self> {
        if outbox.options.spec.is_some() {
            return Err(Error::permanent(
                "foreign_table",
                format!(
                    "{} is the application's own table: write to it with its own INSERT",
                    outbox.spec.display_name()
                ),
            ));
        }
        let mut rows = Self {
            ids: Vec::with_capacity(events.len()),
            streams: Vec::with_capacity(events.len()),
            event_types: Vec::with_capacity(events.len()),
            aggregate_types: Vec::with_capacity(events.len()),
            aggregate_ids: Vec::with_capacity(events.len()),
            ops: Vec::with_capacity(events.len()),
            payloads: Vec::with_capacity(events.len()),
            payload_bytes: Vec::with_capacity(events.len()),
            headers: Vec::with_capacity(events.len()),
            occurred_at: Vec::with_capacity(events.len()),
            schema_versions: Vec::with_capacity(events.len()),
            max_attempts: Vec::with_capacity(events.len()),
        };
        for event in events {
            event.validate()?;
            let (json, bytes) = match &event.payload {
                Payload::None => (None, None),
                Payload::Json(text) => {
                    let text = std::str::from_utf8(text)
                        .map_err(|_| Error::permanent("bad_payload", "payload is not UTF-8"))?;
                    (Some(text), None)
                }
                Payload::Bytes(bytes) => (None, Some(&bytes[..])),
            };
            let headers = serde_json::to_string(&event.headers)
                .map_err(|error| Error::permanent("bad_event", format!("headers: {error}")))?;
            rows.ids.push(event.id.unwrap_or_else(Uuid::now_v7));
            rows.streams.push(&event.stream);
            rows.event_types.push(&event.event_type);
            rows.aggregate_types.push(&event.aggregate_type);
            rows.aggregate_ids.push(&event.aggregate_id);
            rows.ops.push(event.op.as_str());
            rows.payloads.push(json);
            rows.payload_bytes.push(bytes);
            rows.headers.push(headers);
            rows.occurred_at.push(event.occurred_at);
            rows.schema_versions.push(event.schema_version);
            rows.max_attempts.push(event.max_attempts);
        }
        Ok(rows)
    }

    /// Ids that were neither inserted nor found: another transaction committed them after the INSERT began.
    pub(crate) fn missing(&self, found: &HashMap<Uuid, (i64, bool)>) -> Vec<Uuid> {
        self.ids.iter().copied().filter(|id| !found.contains_key(id)).collect()
    }

    /// One answer per event, in order. An id that occurs twice in one call is new the first time only.
    ///
    /// An id that is still missing is a duplicate that was removed as soon as it was committed: it has no place.
    pub(crate) fn answer(self, mut found: HashMap<Uuid, (i64, bool)>) -> Result<Vec<Published>> {
        let answers = self.ids.into_iter().map(|id| {
            let (seq, is_new) = found.get(&id).copied().unwrap_or((0, false));
            found.insert(id, (seq, false));
            Published { id: id.to_string(), seq, is_new }
        });
        Ok(answers.collect())
    }
}
