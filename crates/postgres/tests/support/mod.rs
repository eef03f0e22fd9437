//! Outboxes to test on: the canonical table, and the table of an application that was not written for airtight.

#![allow(dead_code, unused_imports, reason = "each test binary uses its share")]

mod transfer;

use std::sync::Arc;

use airtight_core::{
    NewEvent, Published, Source,
    admin::Admin,
    queue::QueueOptions,
    table::{Field, LogSpec, PayloadKind, Role, StatusSpec, TableSpec},
};
use airtight_postgres::{PgOptions, PgOutbox};
use airtight_testkit::{
    postgres::TestDb,
    sources::{SourceCapabilities, SourceUnderTest},
};
use async_trait::async_trait;
use sqlx::AssertSqlSafe;
use uuid::Uuid;

pub(crate) use self::transfer::transfer;

/// A migrated outbox in a database of its own.
pub(crate) struct Canonical {
    pub(crate) db: TestDb,
    pub(crate) outbox: PgOutbox,
}

impl Canonical {
    pub(crate) async fn create(name: &str) -> Option<Self> {
        Self::with(name, PgOptions::default()).await
    }

    pub(crate) async fn with(name: &str, options: PgOptions) -> Option<Self> {
        let db = TestDb::create(name).await?;
        let outbox = PgOutbox::connect(&db.url(), options).await.unwrap();
        outbox.migrate().await.unwrap();
        Some(Self { db, outbox })
    }

    /// Runs a statement of the operator's, in the simple protocol, which any pooler takes.
    pub(crate) async fn sql(&self, sql: &str) -> u64 {
        let done = sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).execute(self.outbox.pool()).await;
        done.unwrap().rows_affected()
    }
}

#[async_trait]
impl SourceUnderTest for Canonical {
    async fn publish(&self, events: &[NewEvent]) -> Vec<Published> {
        Admin::publish(&self.outbox, events).await.unwrap()
    }

    async fn publish_rolled_back(&self, events: &[NewEvent]) {
        let mut tx = self.outbox.pool().begin().await.unwrap();
        self.outbox.publish_many(&mut tx, events).await.unwrap();
        tx.rollback().await.unwrap();
    }

    fn queue(&self, options: QueueOptions) -> Arc<dyn Source> {
        Arc::new(self.outbox.queue(options))
    }

    fn admin(&self) -> Option<Arc<dyn Admin>> {
        Some(Arc::new(self.outbox.clone()))
    }

    async fn set_back_by_hand(&self, id: &str) {
        let changed =
            self.sql(&format!("UPDATE airtight.outbox SET status = 'pending' WHERE id = '{id}'")).await;
        assert_eq!(changed, 1);
    }

    async fn expire_leases(&self) {
        self.sql("UPDATE airtight.relay SET expires_at = now() - interval '1 s'").await;
        self.sql(
            "UPDATE airtight.outbox SET locked_until = now() - interval '1 s' WHERE status = 'processing'",
        )
        .await;
    }

    /// Lanes take turns: the order of a key is kept, that of all events only roughly.
    fn capabilities(&self) -> SourceCapabilities {
        SourceCapabilities { seq_order: false, ..SourceCapabilities::default() }
    }
}

/// A table without lease, retry, attempt or error columns, without a word for processing, and with times that
/// have no zone.
pub(crate) struct Foreign {
    pub(crate) db: TestDb,
    pub(crate) outbox: PgOutbox,
}

pub(crate) fn foreign_spec() -> TableSpec {
    let column = |name: &str| Some(name.to_owned());
    TableSpec {
        schema: column("shop"),
        table: "Legacy Outbox".into(),
        identity: "id".into(),
        id: "id".into(),
        seq: column("position"),
        created_at: column("created"),
        stream: Field::Column("topic".into()),
        event_type: Field::Column("kind".into()),
        aggregate_type: Field::Column("entity".into()),
        aggregate_id: Field::Column("entity_id".into()),
        op: column("op"),
        payload: "body".into(),
        payload_kind: PayloadKind::JsonText,
        payload_bytes: column("body_bytes"),
        headers: column("meta"),
        occurred_at: column("happened"),
        schema_version: column("version"),
        max_attempts: column("tries"),
        extra: vec![("tenant".into(), "tenant".into())],
        status: Some(StatusSpec {
            column: "state".into(),
            new: Role::word("NEW"),
            retrying: Role::word("NEW"),
            processing: None,
            done: Role::word("SENT"),
            dead: Role::word("FAILED"),
            unknown: None,
        }),
        count: None,
        next_retry_at: None,
        locked_until: None,
        claim_token: None,
        lost_leases: None,
        error_code: None,
        error_message: None,
        finished_at: column("sent"),
        updated_at: None,
        last_attempt_at: None,
        partition: None,
        phase: None,
        zone: "UTC".into(),
        log: LogSpec::default(),
    }
}

impl Foreign {
    pub(crate) async fn create(name: &str) -> Option<Self> {
        let db = TestDb::create(name).await?;
        let options = PgOptions { spec: Some(foreign_spec()), ..PgOptions::default() };
        let outbox = PgOutbox::connect(&db.url(), options).await.unwrap();
        sqlx::raw_sql(
            "CREATE SCHEMA shop; CREATE TABLE shop.\"Legacy Outbox\" (id uuid PRIMARY KEY, position bigserial, \
             topic text NOT NULL, kind text NOT NULL, entity text NOT NULL, entity_id text NOT NULL, \
             op text NOT NULL DEFAULT 'upsert', body text, body_bytes bytea, meta text, tries int, version int, \
             tenant text DEFAULT 'acme', state varchar(10) NOT NULL DEFAULT 'NEW', \
             happened timestamp NOT NULL DEFAULT (now() AT TIME ZONE 'UTC'), \
             created timestamp NOT NULL DEFAULT (now() AT TIME ZONE 'UTC'), sent timestamp)",
        )
        .execute(outbox.pool())
        .await
        .unwrap();
        outbox.migrate().await.unwrap();
        Some(Self { db, outbox })
    }

    async fn insert(&self, tx: &mut sqlx::PgConnection, events: &[NewEvent]) -> Vec<Published> {
        let mut published = Vec::new();
        for event in events {
            let id = event.id.unwrap_or_else(Uuid::now_v7);
            let (body, bytes) = match &event.payload {
                airtight_core::Payload::None => (None, None),
                airtight_core::Payload::Json(text) => {
                    (Some(std::str::from_utf8(text).unwrap().to_owned()), None)
                }
                airtight_core::Payload::Bytes(bytes) => (None, Some(bytes.to_vec())),
            };
            let happened = event.occurred_at.map(|at| time::PrimitiveDateTime::new(at.date(), at.time()));
            let seq: Option<i64> = sqlx::query_scalar(
                "INSERT INTO shop.\"Legacy Outbox\" (id, topic, kind, entity, entity_id, op, body, body_bytes, meta, tries, version, happened) \
                 VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, coalesce($12, now() AT TIME ZONE 'UTC')) \
                 ON CONFLICT (id) DO NOTHING RETURNING position",
            )
            .bind(id)
            .bind(&event.stream)
            .bind(&event.event_type)
            .bind(&event.aggregate_type)
            .bind(&event.aggregate_id)
            .bind(event.op.as_str())
            .bind(body)
            .bind(bytes)
            .bind(serde_json::to_string(&event.headers).unwrap())
            .bind(event.max_attempts)
            .bind(event.schema_version)
            .bind(happened)
            .fetch_optional(&mut *tx)
            .await
            .unwrap();
            let (seq, is_new) = match seq {
                Some(seq) => (seq, true),
                None => {
                    let stored =
                        sqlx::query_scalar("SELECT position FROM shop.\"Legacy Outbox\" WHERE id = $1")
                            .bind(id)
                            .fetch_one(&mut *tx)
                            .await
                            .unwrap();
                    (stored, false)
                }
            };
            published.push(Published { id: id.to_string(), seq, is_new });
        }
        published
    }
}

#[async_trait]
impl SourceUnderTest for Foreign {
    async fn publish(&self, events: &[NewEvent]) -> Vec<Published> {
        let mut tx = self.outbox.pool().begin().await.unwrap();
        let published = self.insert(&mut tx, events).await;
        tx.commit().await.unwrap();
        published
    }

    async fn publish_rolled_back(&self, events: &[NewEvent]) {
        let mut tx = self.outbox.pool().begin().await.unwrap();
        self.insert(&mut tx, events).await;
        tx.rollback().await.unwrap();
    }

    fn queue(&self, options: QueueOptions) -> Arc<dyn Source> {
        Arc::new(self.outbox.queue(options))
    }

    fn admin(&self) -> Option<Arc<dyn Admin>> {
        Some(Arc::new(self.outbox.clone()))
    }

    async fn set_back_by_hand(&self, id: &str) {
        sqlx::query("UPDATE shop.\"Legacy Outbox\" SET state = 'NEW' WHERE id = $1")
            .bind(Uuid::parse_str(id).unwrap())
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
        SourceCapabilities { shows_claims: false, ..SourceCapabilities::default() }
    }
}

/// The canonical table, reached through a transaction pooler.
pub(crate) async fn pooled(name: &str) -> Option<Canonical> {
    let db = TestDb::create(&format!("pooled_{name}")).await?;
    let url = db.pooled_url()?;
    let options = PgOptions { prepared_statements: false, ..PgOptions::default() };
    let outbox = PgOutbox::connect(&url, options).await.unwrap();
    outbox.migrate().await.unwrap();
    Some(Canonical { db, outbox })
}
