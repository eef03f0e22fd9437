-- What following an outbox through the WAL needs: all outboxes of one schema share it.

-- Where each replication slot's reader stands. Stored before it is acknowledged: a slot that is ahead of this has
-- lost something.
CREATE TABLE {schema}.slot (
    outbox      text NOT NULL,
    -- The reader's name, and the slot's.
    name        text NOT NULL UNIQUE,
    publication text NOT NULL,
    -- The prefix of logical messages that it delivers; NULL for none.
    prefix      text,
    -- Which server, and in which of its lives.
    system      text,
    timeline    bigint,
    -- new: nothing was done. snapshot: the slot is there, and rows of the table are being delivered. streaming.
    phase       text NOT NULL DEFAULT 'new' CHECK (phase IN ('new', 'snapshot', 'streaming')),
    -- Everything up to lsn is settled; seq is the number of the last event before it.
    lsn         pg_lsn,
    seq         bigint NOT NULL DEFAULT 0,
    -- When the newest transaction before it was committed.
    lsn_time    timestamptz,
    moved_at    timestamptz NOT NULL DEFAULT now(),
    -- When a relay last knew that everything is settled.
    idle_at     timestamptz,
    created_at  timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (outbox, name)
) WITH (fillfactor = 50);

-- The row as the WAL had it, for formats that want more than an event has; and which row it is, to mark it.
ALTER TABLE {schema}.parked ADD COLUMN source_row jsonb, ADD COLUMN identity text;

-- An event without a table: a message in the WAL, in the caller's transaction. No row, no index, nothing to clean
-- up; and nobody to find it again, so it is refused where no slot would carry it.
CREATE FUNCTION {schema}.emit(
    stream text, event_type text, aggregate_type text, aggregate_id text, payload jsonb,
    headers jsonb DEFAULT '{}', event_id uuid DEFAULT NULL, op text DEFAULT 'upsert',
    occurred_at timestamptz DEFAULT NULL, schema_version integer DEFAULT 1, max_attempts integer DEFAULT NULL,
    prefix text DEFAULT 'airtight'
) RETURNS uuid LANGUAGE plpgsql AS $body$
DECLARE
    new_id uuid := coalesce($7, {schema}.uuid_v7());
BEGIN
    IF coalesce($1, '') = '' OR coalesce($2, '') = '' OR coalesce($3, '') = '' OR coalesce($4, '') = '' THEN
        RAISE EXCEPTION 'stream, event_type, aggregate_type and aggregate_id must not be empty'
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF coalesce($8, 'upsert') NOT IN ('upsert', 'delete') THEN
        RAISE EXCEPTION 'op must be upsert or delete, found %', $8 USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF jsonb_typeof(coalesce($6, '{}')) <> 'object' THEN
        RAISE EXCEPTION 'headers must be a JSON object' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF NOT EXISTS (SELECT FROM {schema}.slot s JOIN pg_replication_slots r ON r.slot_name = s.name
                   WHERE s.prefix = $12 AND r.database = current_database() AND r.wal_status IS DISTINCT FROM 'lost') THEN
        RAISE EXCEPTION 'no replication slot carries messages of the prefix %: the event would vanish', $12
            USING ERRCODE = 'object_not_in_prerequisite_state',
                  HINT = 'Start a relay with `--read cdc` first; it makes the slot.';
    END IF;
    PERFORM pg_logical_emit_message(true, $12, jsonb_build_object(
        'id', new_id, 'stream', $1, 'eventType', $2, 'aggregateType', $3, 'aggregateId', $4,
        'op', coalesce($8, 'upsert'), 'payload', $5, 'headers', coalesce($6, '{}'),
        'occurredAt', coalesce($9, now()), 'schemaVersion', coalesce($10, 1), 'maxAttempts', $11)::text);
    RETURN new_id;
END $body$;
