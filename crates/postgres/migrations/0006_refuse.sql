-- What no relay could deliver is refused when it is written: all outboxes of one schema share this.

-- Says what is wrong with a row. The triggers call it when something is, and only then. A trigger and no CHECK: that would
-- be held against every update of a row that was there before, so that not even a relay could set it aside.
CREATE OR REPLACE FUNCTION {schema}.refuse() RETURNS trigger LANGUAGE plpgsql AS $body$
BEGIN
    PERFORM {schema}.refuse_event(NEW.payload, NEW.payload_bytes, NEW.headers);
    RETURN NEW;
END $body$;

-- The limit is that of airtight_core::event::MAX_PAYLOAD_BYTES. JSON is measured as it is sent, as text.
CREATE OR REPLACE FUNCTION {schema}.refuse_event(payload jsonb, payload_bytes bytea, headers jsonb)
RETURNS void LANGUAGE plpgsql AS $body$
DECLARE
    bytes bigint := coalesce(octet_length($1::text), octet_length($2), 0);
    name text;
    kind text;
BEGIN
    IF bytes > 16777216 THEN
        RAISE EXCEPTION 'payload has % bytes, the limit is 16777216', bytes
            USING ERRCODE = 'check_violation', HINT = 'Store it elsewhere and publish a reference.';
    END IF;
    SELECT h.key, jsonb_typeof(h.value) INTO name, kind FROM jsonb_each($3) AS h
    WHERE jsonb_typeof(h.value) <> 'string' LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'headers must be strings: % is %', name,
            CASE kind WHEN 'null' THEN kind WHEN 'number' THEN 'a number' WHEN 'boolean' THEN 'a boolean' ELSE 'an ' || kind END
            USING ERRCODE = 'check_violation', HINT = format('Write it as text: {%s: "…"}.', to_json(name));
    END IF;
END $body$;

CREATE OR REPLACE FUNCTION {schema}.emit(
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
    PERFORM {schema}.refuse_event($5, NULL, coalesce($6, '{}'));
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
