//! Publishes an event without a table.

use airtight_core::{Code, Error, NewEvent, Payload, Result};
use sqlx::{AssertSqlSafe, PgConnection};
use uuid::Uuid;

use crate::{PgOutbox, error::doing};

impl PgOutbox {
    /// Writes an event into the WAL, in the caller's transaction, and nowhere else: there is no row to clean up, and no row
    /// in which to find the event later. Relays that follow the outbox through the WAL ([`PgOutbox::cdc`]) deliver it. If no
    /// slot would carry the event, it is refused. Returns its id.
    ///
    /// The same as `SELECT airtight.emit(…)`. Bodies are JSON.
    pub async fn emit(&self, conn: &mut PgConnection, event: &NewEvent) -> Result<Uuid> {
        event.validate()?;
        let payload = match &event.payload {
            Payload::None => None,
            // Checked to be JSON, so it is UTF-8.
            Payload::Json(text) => Some(String::from_utf8_lossy(text).into_owned()),
            Payload::Bytes(_) => {
                return Err(Error::permanent(
                    Code::BAD_EVENT,
                    "the payload is bytes, but an event without a table must have a JSON payload",
                ));
            }
        };
        let headers = serde_json::to_string(&event.headers)
            .map_err(|error| Error::permanent(Code::BAD_EVENT, format!("headers: {error}")))?;
        let sql = format!(
            "SELECT {}($1, $2, $3, $4, $5::jsonb, $6::jsonb, $7, $8, $9, $10, $11)",
            self.own("emit")
        );
        sqlx::query_scalar(AssertSqlSafe(sql))
            .persistent(!self.pooled)
            .bind(&event.stream)
            .bind(&event.event_type)
            .bind(&event.aggregate_type)
            .bind(&event.aggregate_id)
            .bind(payload)
            .bind(headers)
            .bind(event.id)
            .bind(event.op.as_str())
            .bind(event.occurred_at)
            .bind(event.schema_version)
            .bind(event.max_attempts)
            .fetch_one(conn)
            .await
            .map_err(doing("emitting"))
    }
}
