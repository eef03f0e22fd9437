//! The table of an application: its own word for every role, a count of attempts, times without a zone,
//! a retry time that is never NULL, no stream, no lease.

use std::sync::Arc;

use airtight_core::{
    NewEvent, Payload, Published, Source,
    admin::Admin,
    queue::QueueOptions,
    table::{Count, Field, PayloadKind, Role, StatusSpec, TableSpec},
};
use airtight_postgres::{PgOptions, PgOutbox};
use airtight_testkit::{
    postgres::TestDb,
    sources::{SourceCapabilities, SourceUnderTest},
};
use async_trait::async_trait;

pub(crate) struct Transfer {
    _db: TestDb,
    outbox: PgOutbox,
}

pub(crate) async fn transfer(name: &str) -> Option<Transfer> {
    let db = TestDb::create(name).await?;
    let options = PgOptions { spec: Some(spec()), ..PgOptions::default() };
    let outbox = PgOutbox::connect(&db.url(), options).await.unwrap();
    sqlx::raw_sql(
        "CREATE TABLE transfer_events (event_id BIGSERIAL PRIMARY KEY, aggregate_type VARCHAR(50) NOT NULL, \
         aggregate_id VARCHAR(100) NOT NULL, event_type VARCHAR(50) NOT NULL, payload TEXT NOT NULL, headers TEXT, \
         status VARCHAR(20) NOT NULL DEFAULT 'PENDING', attempt_count INT NOT NULL DEFAULT 0, \
         next_retry_at TIMESTAMP NOT NULL DEFAULT (now() AT TIME ZONE 'UTC'), \
         created_at TIMESTAMP NOT NULL DEFAULT (now() AT TIME ZONE 'UTC'), \
         updated_at TIMESTAMP NOT NULL DEFAULT (now() AT TIME ZONE 'UTC'), published_at TIMESTAMP, last_error TEXT); \
         CREATE INDEX idx_transfer_events_status ON transfer_events(status);",
    )
    .execute(outbox.pool())
    .await
    .unwrap();
    outbox.migrate().await.unwrap();
    Some(Transfer { _db: db, outbox })
}

fn spec() -> TableSpec {
    let column = |name: &str| Some(name.to_owned());
    let mut spec = TableSpec::canonical(None, "transfer_events");
    spec.identity = "event_id".into();
    spec.id = "event_id".into();
    spec.seq = column("event_id");
    spec.stream = Field::Constant("transfers".into());
    spec.op = None;
    spec.payload_kind = PayloadKind::JsonText;
    spec.payload_bytes = None;
    spec.occurred_at = None;
    spec.schema_version = None;
    spec.max_attempts = None;
    spec.status = Some(StatusSpec {
        column: "status".into(),
        new: Role::word("PENDING"),
        retrying: Role::word("FAILED"),
        processing: Some(Role::word("SENDING")),
        done: Role::word("PUBLISHED"),
        dead: Role::word("DEAD_LETTER"),
        unknown: None,
    });
    spec.count = Some(Count::Attempts("attempt_count".into()));
    spec.locked_until = None;
    spec.claim_token = None;
    spec.lost_leases = None;
    spec.error_code = None;
    spec.error_message = column("last_error");
    spec.finished_at = column("published_at");
    spec.updated_at = column("updated_at");
    spec.last_attempt_at = None;
    spec.partition = None;
    spec.phase = None;
    spec
}

impl Transfer {
    async fn insert(conn: &mut sqlx::PgConnection, events: &[NewEvent]) -> Vec<Published> {
        let mut published = Vec::new();
        for event in events {
            let body = match &event.payload {
                Payload::Json(text) => std::str::from_utf8(text).unwrap(),
                Payload::None | Payload::Bytes(_) => "null",
            };
            let seq: i64 = sqlx::query_scalar(
                "INSERT INTO transfer_events (aggregate_type, aggregate_id, event_type, payload, headers) \
                 VALUES ($1, $2, $3, $4, $5) RETURNING event_id",
            )
            .bind(&event.aggregate_type)
            .bind(&event.aggregate_id)
            .bind(&event.event_type)
            .bind(body)
            .bind(serde_json::to_string(&event.headers).unwrap())
            .fetch_one(&mut *conn)
            .await
            .unwrap();
            published.push(Published { id: seq.to_string(), seq, is_new: true });
        }
        published
    }
}

#[async_trait]
impl SourceUnderTest for Transfer {
    async fn publish(&self, events: &[NewEvent]) -> Vec<Published> {
        let mut tx = self.outbox.pool().begin().await.unwrap();
        let published = Self::insert(&mut tx, events).await;
        tx.commit().await.unwrap();
        published
    }

    async fn publish_rolled_back(&self, events: &[NewEvent]) {
        let mut tx = self.outbox.pool().begin().await.unwrap();
        Self::insert(&mut tx, events).await;
        tx.rollback().await.unwrap();
    }

    fn queue(&self, options: QueueOptions) -> Arc<dyn Source> {
        Arc::new(self.outbox.queue(options))
    }

    fn admin(&self) -> Option<Arc<dyn Admin>> {
        Some(Arc::new(self.outbox.clone()))
    }

    async fn set_back_by_hand(&self, id: &str) {
        sqlx::query("UPDATE transfer_events SET status = 'PENDING' WHERE event_id = $1")
            .bind(id.parse::<i64>().unwrap())
            .execute(self.outbox.pool())
            .await
            .unwrap();
    }

    async fn expire_leases(&self) {
        let sql = "UPDATE airtight.relay SET expires_at = now() - interval '1 s'; \
                   UPDATE airtight.side SET locked_until = now() - interval '1 s' WHERE claim_token IS NOT NULL";
        sqlx::raw_sql(sql).execute(self.outbox.pool()).await.unwrap();
    }

    fn capabilities(&self) -> SourceCapabilities {
        SourceCapabilities {
            shows_claims: false,
            unique_ids: false,
            streams: false,
            bytes: false,
            envelope_fields: false,
            ..SourceCapabilities::default()
        }
    }
}
