//! Publishing through sqlx, in the caller's transaction.
//!
//! Nothing here retries: a failed statement has aborted the caller's transaction, and only the caller can begin another.
//! An event that is known to fail is refused before it is sent to the database.

use std::collections::HashMap;

use airtight_core::{
    Code, Error, EventBus, NewEvent, Payload, Published, Result,
    table::{Shape, quote},
};
use async_trait::async_trait;
use sqlx::{AssertSqlSafe, PgConnection, Row};
use uuid::Uuid;

use crate::{PgOutbox, error::doing, schema::sequence};

impl PgOutbox {
    /// Publishes one event in the transaction that `conn` is in.
    pub async fn publish(&self, conn: &mut PgConnection, event: &NewEvent) -> Result<Published> {
        let mut published = self.publish_many(conn, std::slice::from_ref(event)).await?;
        published
            .pop()
            .ok_or_else(|| Error::permanent(Code::NO_EVENT, "the database returned nothing for the event"))
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
            .map_err(|error| self.not_published(error))?;
        let mut answer = Answers::default();
        for row in returned {
            let seq: i64 = row.try_get(1).map_err(doing("publishing"))?;
            let is_new: Option<bool> = row.try_get(2).map_err(doing("publishing"))?;
            answer.note(row.try_get(0).map_err(doing("publishing"))?, seq, is_new);
        }
        let missing = answer.missing(&rows.ids);
        if !missing.is_empty() {
            let late = sqlx::query(AssertSqlSafe(self.find_sql()))
                .persistent(!self.pooled)
                .bind(&missing)
                .bind(answer.drawn(&missing))
                .fetch_all(&mut *conn)
                .await
                .map_err(doing("publishing"))?;
            for row in late {
                let seq: i64 = row.try_get(1).map_err(doing("publishing"))?;
                answer.found(row.try_get(0).map_err(doing("publishing"))?, seq);
            }
        }
        if let Some(error) = answer.refused(self, &rows.ids) {
            // It fails, which is what it is for.
            _ = sqlx::raw_sql(AssertSqlSafe(Self::abort_sql(&error))).execute(conn).await;
            return Err(error);
        }
        Ok(answer.answer(rows.ids))
    }

    /// Why the INSERT failed. A queue's is refused by the server when a number is taken.
    fn not_published(&self, error: sqlx::Error) -> Error {
        match error.as_database_error().and_then(|error| error.constraint()) {
            Some(constraint) if constraint == self.primary_key() => sequence::behind(self, None),
            _ => doing("publishing")(error),
        }
    }

    /// Finds what another transaction committed while the INSERT waited for it: a statement of its own has a
    /// snapshot of its own. And what has the numbers that were drawn.
    pub(crate) fn find_sql(&self) -> String {
        let outbox = format!("{}.{}", quote(&self.options.schema), quote(&self.options.table));
        format!(
            "SELECT o.id, o.seq FROM {outbox} o WHERE o.id = ANY($1::uuid[]) OR o.seq = ANY($2::bigint[])"
        )
    }

    /// One statement for any number of events, in their order. What another transaction has published already is
    /// looked up by the second half, which runs with the same snapshot: hence [`Self::find_sql`].
    pub(crate) fn insert_sql(&self) -> String {
        let outbox = format!("{}.{}", quote(&self.options.schema), quote(&self.options.table));
        let given = "unnest($1::uuid[], $2::text[], $3::text[], $4::text[], $5::text[], $6::text[], $7::text[], \
             $8::bytea[], $9::text[], $10::timestamptz[], $11::int[], $12::int[]) WITH ORDINALITY \
             AS v(id, stream, event_type, aggregate_type, aggregate_id, op, payload, payload_bytes, headers, \
             occurred_at, schema_version, max_attempts, place)";
        let columns = "id, stream, event_type, aggregate_type, aggregate_id, op, payload, payload_bytes, headers, \
             occurred_at, schema_version, max_attempts";
        let values = "v.id, v.stream, v.event_type, v.aggregate_type, v.aggregate_id, v.op, v.payload::jsonb, \
             v.payload_bytes, v.headers::jsonb, coalesce(v.occurred_at, now()), v.schema_version, v.max_attempts";
        let answer = format!(
            "SELECT id, seq, true AS is_new FROM new \
             UNION ALL \
             SELECT o.id, o.seq, false FROM {outbox} o WHERE o.id = ANY($1) \
               AND NOT EXISTS (SELECT FROM new WHERE new.id = o.id)"
        );
        match self.options.shape {
            Shape::Queue => format!(
                "WITH new AS (INSERT INTO {outbox} AS o ({columns}) SELECT {values} FROM {given} ORDER BY v.place \
                 ON CONFLICT (id) DO NOTHING RETURNING o.id, o.seq) {answer}"
            ),
            // No index over all partitions of a log can be unique by id, so that ON CONFLICT has no target and takes any
            // clash for a repeated id. The numbers that were drawn in vain tell one from the other.
            Shape::Log => format!(
                "WITH drawn AS MATERIALIZED (SELECT v.*, {draw} AS seq FROM (SELECT * FROM {given} ORDER BY place) AS v), \
                 new AS (INSERT INTO {outbox} AS o (seq, {columns}) SELECT v.seq, {values} FROM drawn v \
                   ON CONFLICT DO NOTHING RETURNING o.id, o.seq) \
                 {answer} \
                 UNION ALL \
                 SELECT d.id, d.seq, NULL FROM drawn d WHERE NOT EXISTS (SELECT FROM new WHERE new.seq = d.seq)",
                draw = self.draw()
            ),
        }
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
                Code::FOREIGN_TABLE,
                format!("{} is the application's own table", outbox.spec.display_name()),
            )
            .with_remedy("write to it with its own INSERT"));
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
                        .map_err(|_| Error::permanent(Code::BAD_PAYLOAD, "payload is not UTF-8"))?;
                    (Some(text), None)
                }
                Payload::Bytes(bytes) => (None, Some(&bytes[..])),
            };
            let headers = serde_json::to_string(&event.headers)
                .map_err(|error| Error::permanent(Code::BAD_EVENT, format!("headers: {error}")))?;
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
}

/// What became of each event.
#[derive(Debug, Default)]
pub(crate) struct Answers {
    stored: HashMap<Uuid, (i64, bool)>,
    /// Numbers that were drawn for events that were not stored.
    drawn: HashMap<Uuid, i64>,
    /// Those of them that another event has.
    taken: Vec<i64>,
}

impl Answers {
    /// A row of the INSERT's answer.
    pub(crate) fn note(&mut self, id: Uuid, seq: i64, is_new: Option<bool>) {
        match is_new {
            Some(is_new) => _ = self.stored.insert(id, (seq, is_new)),
            None => _ = self.drawn.insert(id, seq),
        }
    }

    /// Ids that were neither inserted nor found.
    pub(crate) fn missing(&self, ids: &[Uuid]) -> Vec<Uuid> {
        ids.iter().copied().filter(|id| !self.stored.contains_key(id)).collect()
    }

    /// The numbers that were drawn for these.
    pub(crate) fn drawn(&self, ids: &[Uuid]) -> Vec<i64> {
        ids.iter().filter_map(|id| self.drawn.get(id).copied()).collect()
    }

    /// A row that was found afterwards: an event of this id, or with the number of another.
    pub(crate) fn found(&mut self, id: Uuid, seq: i64) {
        if self.drawn.values().any(|drawn| *drawn == seq) {
            self.taken.push(seq);
        }
        self.stored.entry(id).or_insert((seq, false));
    }

    /// Why something was neither stored nor there already, if that is so.
    pub(crate) fn refused(&self, outbox: &PgOutbox, ids: &[Uuid]) -> Option<Error> {
        let id = self.missing(ids).first().copied()?;
        if let Some(seq) = self.taken.iter().min() {
            return Some(sequence::behind(outbox, Some(*seq)));
        }
        Some(Error::permanent(
            Code::CONFLICT,
            format!(
                "event {id} of {} was refused by a unique index other than that of its id, and nothing was stored",
                outbox.spec.display_name()
            ),
        )
        .with_remedy(
            "drop that index; or, if the event of this id was removed this moment, publish again",
        ))
    }

    /// One answer per event, in order. An id that occurs twice in one call is new the first time only.
    pub(crate) fn answer(mut self, ids: Vec<Uuid>) -> Vec<Published> {
        let answers = ids.into_iter().filter_map(|id| {
            let (seq, is_new) = self.stored.get(&id).copied()?;
            self.stored.insert(id, (seq, false));
            Some(Published { id: id.to_string(), seq, is_new })
        });
        answers.collect()
    }
}
