-- What the consumers of logs need: all logs of one schema share it.

-- How far retention has got with each log: nothing up to `floor` may be missed silently.
CREATE TABLE {schema}.log (
    outbox     text PRIMARY KEY,
    floor      bigint NOT NULL DEFAULT 0,
    -- When the newest removed event was published.
    floor_time timestamptz
);

CREATE TABLE {schema}.consumer (
    outbox     text NOT NULL,
    name       text NOT NULL,
    partitions smallint NOT NULL,
    streams    text[] NOT NULL DEFAULT '{}',
    paused     boolean NOT NULL DEFAULT false,
    -- Grows whenever a person changes something about the consumer's parked events.
    revision   bigint NOT NULL DEFAULT 0,
    created_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (outbox, name)
);

-- Offsets stand beside the owner and the epoch of their partition, so that moving one and being fenced are
-- the same statement. The group of a consumer is `log:` and its name.
ALTER TABLE {schema}.partition ADD COLUMN last_seq bigint, ADD COLUMN moved_at timestamptz;

-- Events that failed, and events of the same key behind them: whole copies, since the log forgets.
CREATE TABLE {schema}.parked (
    outbox         text NOT NULL,
    consumer       text NOT NULL,
    seq            bigint NOT NULL,
    slot           smallint NOT NULL,
    key            text NOT NULL,
    id             text,
    stream         text,
    event_type     text,
    aggregate_type text,
    aggregate_id   text,
    op             text,
    payload        text,
    payload_bytes  bytea,
    headers        text,
    occurred_at    timestamptz,
    schema_version integer,
    max_attempts   bigint,
    extra          text,
    state          text NOT NULL CHECK (state IN ('waiting', 'dead', 'unknown')),
    attempts       integer NOT NULL DEFAULT 0,
    -- NULL while it waits: held back behind an earlier event of its key.
    due_at         timestamptz,
    error_code     text,
    error_message  text,
    parked_at      timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (outbox, consumer, seq)
) WITH (fillfactor = 80);
CREATE INDEX parked_key ON {schema}.parked (outbox, consumer, key, seq);
CREATE INDEX parked_due ON {schema}.parked (outbox, consumer, due_at) WHERE state = 'waiting' AND due_at IS NOT NULL;

-- What consumers have processed. It belongs into the database that their handlers write to.
CREATE TABLE {schema}.inbox (
    consumer text NOT NULL,
    key      text NOT NULL,
    seq      bigint,
    seen_at  timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (consumer, key)
);
CREATE INDEX inbox_seen ON {schema}.inbox USING brin (seen_at);
