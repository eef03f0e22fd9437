//! Publishing and the inbox through tokio-postgres, in the caller's transaction.

use airtight_core::{Code, Error, NewEvent, Published, Result};
use tokio_postgres::GenericClient;
use uuid::Uuid;

use crate::{
    Inbox, PgOutbox,
    error::from_sqlstate,
    publish::{Answers, Rows},
    schema::sequence,
};

impl PgOutbox {
    /// Publishes one event through a tokio-postgres client or transaction.
    pub async fn publish_tokio<C: GenericClient + Sync>(
        &self,
        client: &C,
        event: &NewEvent,
    ) -> Result<Published> {
        let mut published = self.publish_many_tokio(client, std::slice::from_ref(event)).await?;
        published
            .pop()
            .ok_or_else(|| Error::permanent(Code::NO_EVENT, "the database returned nothing for the event"))
    }

    /// Publishes many events through a tokio-postgres client or transaction, in one round trip.
    pub async fn publish_many_tokio<C: GenericClient + Sync>(
        &self,
        client: &C,
        events: &[NewEvent],
    ) -> Result<Vec<Published>> {
        if events.is_empty() {
            return Ok(Vec::new());
        }
        let rows = Rows::new(self, events)?;
        let returned = client
            .query(
                &self.insert_sql(),
                &[
                    &rows.ids,
                    &rows.streams,
                    &rows.event_types,
                    &rows.aggregate_types,
                    &rows.aggregate_ids,
                    &rows.ops,
                    &rows.payloads,
                    &rows.payload_bytes,
                    &rows.headers,
                    &rows.occurred_at,
                    &rows.schema_versions,
                    &rows.max_attempts,
                ],
            )
            .await
            .map_err(|error| match error.as_db_error().and_then(|error| error.constraint()) {
                Some(constraint) if constraint == self.primary_key() => sequence::behind(self, None),
                _ => from_tokio(&error),
            })?;
        let mut answer = Answers::default();
        let column = |error: tokio_postgres::Error| from_tokio(&error);
        for row in returned {
            let (id, seq): (Uuid, i64) = (row.try_get(0).map_err(column)?, row.try_get(1).map_err(column)?);
            answer.note(id, seq, row.try_get(2).map_err(column)?);
        }
        let missing = answer.missing(&rows.ids);
        if !missing.is_empty() {
            let drawn = answer.drawn(&missing);
            for row in client.query(&self.find_sql(), &[&missing, &drawn]).await.map_err(column)? {
                answer.found(row.try_get(0).map_err(column)?, row.try_get(1).map_err(column)?);
            }
        }
        if let Some(error) = answer.refused(self, &rows.ids) {
            // It fails, which is what it is for.
            _ = client.batch_execute(&Self::abort_sql(&error)).await;
            return Err(error);
        }
        Ok(answer.answer(rows.ids))
    }
}

impl Inbox {
    /// [`Inbox::first_time`] through a tokio-postgres transaction.
    pub async fn first_time_tokio<C: GenericClient + Sync>(
        &self,
        client: &C,
        consumer: &str,
        key: &str,
    ) -> Result<bool> {
        let noted = client
            .execute(&self.sql(), &[&consumer, &key, &None::<i64>])
            .await
            .map_err(|error| from_tokio(&error))?;
        Ok(noted == 1)
    }
}

fn from_tokio(error: &tokio_postgres::Error) -> Error {
    match error.as_db_error() {
        Some(database) => {
            from_sqlstate(Some(database.code().code()), database.message(), "in the caller's transaction")
        }
        None => Error::retryable(Code::SERVER_ERROR, format!("in the caller's transaction: {error}")),
    }
}
