-- The application's part of the stack: a business table, and the outbox that its transactions write to.
-- Safe to run again. `airtight migrate` adds what airtight needs, in its own schema.

CREATE TABLE IF NOT EXISTS raw_data (
    tenant_id   VARCHAR(128) NOT NULL,
    entity_key  VARCHAR(128) NOT NULL,
    version     BIGINT       NOT NULL,
    payload     JSONB        NOT NULL,
    created_at  TIMESTAMPTZ  NOT NULL DEFAULT NOW(),
    PRIMARY KEY (tenant_id, entity_key, version)
);

CREATE TABLE IF NOT EXISTS outbox (
    id              UUID PRIMARY KEY,
    aggregatetype   VARCHAR(128) NOT NULL,  -- the topic: ivm.events.{aggregatetype}
    aggregateid     VARCHAR(256) NOT NULL,  -- the message's key
    type            VARCHAR(128) NOT NULL,  -- its header eventType
    payload         JSONB NOT NULL,

    status          VARCHAR(32) DEFAULT 'PENDING',  -- PENDING, PROCESSED, FAILED
    processed_at    TIMESTAMPTZ,
    retry_count     INT DEFAULT 0,

    created_at      TIMESTAMPTZ DEFAULT NOW(),

    -- created_at is the same for all events of a transaction. This column gives their order.
    seq             BIGINT GENERATED ALWAYS AS IDENTITY
);

CREATE INDEX IF NOT EXISTS idx_outbox_status ON outbox (status, created_at);
-- The rows that a relay looks for: few, however many are done.
CREATE INDEX IF NOT EXISTS idx_outbox_pending ON outbox (seq) WHERE status = 'PENDING';
