-- The log refuses what no relay could deliver, and events whose number is taken.

-- Nothing is measured that is small however it is written: 2,000 bytes of jsonb are less than 16 MiB of text, even if all of
-- them are numbers with the longest exponents. `strict`, since `lax` would look into an array for strings.
CREATE TRIGGER {trigger:refuse} BEFORE INSERT ON {outbox} FOR EACH ROW WHEN (
    (pg_column_size(NEW.payload) > 2000 AND octet_length(NEW.payload::text) > 16777216)
    OR octet_length(NEW.payload_bytes) > 16777216
    OR jsonb_path_exists(NEW.headers, 'strict $.* ? (@.type() <> "string")', '{}', true)
) EXECUTE FUNCTION {schema}.refuse();

-- Raises why an event was neither stored nor there already. No index over all partitions can be unique by id, so that
-- ON CONFLICT has no target here, and takes any other clash for a repeated id.
CREATE OR REPLACE FUNCTION {function:refuse_clash}(id uuid, seq bigint) RETURNS void LANGUAGE plpgsql AS $body$
BEGIN
    IF EXISTS (SELECT FROM {outbox} o WHERE o.seq = $2) THEN
        RAISE EXCEPTION 'seq % of % is taken by another event: the sequence is behind the table, and nothing was stored', $2, {literal:outbox}
            USING ERRCODE = 'unique_violation', HINT = 'Fix: ' || {literal:migrate} || ', as the owner of the table; then publish again.';
    END IF;
    RAISE EXCEPTION 'event % of % was refused by a unique index other than that of its id, and nothing was stored', $1, {literal:outbox}
        USING ERRCODE = 'unique_violation', HINT = 'Drop that index; or, if the event of this id was removed this moment, publish again.';
END $body$;

-- As they were, but for the clash. The INSERT draws the number, and not this function before it: who holds the table locked, to
-- move the sequence, then knows that nobody has a number in hand.
CREATE OR REPLACE FUNCTION {function:publish}(
    stream text, event_type text, aggregate_type text, aggregate_id text, payload jsonb,
    headers jsonb DEFAULT '{}', event_id uuid DEFAULT NULL, op text DEFAULT 'upsert',
    occurred_at timestamptz DEFAULT NULL, schema_version integer DEFAULT 1, max_attempts integer DEFAULT NULL,
    OUT id uuid, OUT seq bigint, OUT is_new boolean
) LANGUAGE plpgsql AS $body$
#variable_conflict use_column
DECLARE
    new_id uuid := coalesce($7, {schema}.uuid_v7());
BEGIN
    INSERT INTO {outbox} AS o (id, stream, event_type, aggregate_type, aggregate_id, payload, headers, op,
                               occurred_at, schema_version, max_attempts)
    VALUES (new_id, $1, $2, $3, $4, $5, coalesce($6, '{}'), coalesce($8, 'upsert'),
            coalesce($9, now()), coalesce($10, 1), $11)
    ON CONFLICT DO NOTHING
    RETURNING o.id, o.seq, true INTO id, seq, is_new;
    IF NOT FOUND THEN
        SELECT o.id, o.seq, false INTO id, seq, is_new FROM {outbox} o WHERE o.id = new_id;
        IF NOT FOUND THEN
            PERFORM {function:refuse_clash}(new_id, currval({literal:sequence}));
        END IF;
    END IF;
END $body$;

CREATE OR REPLACE FUNCTION {function:publish_bytes}(
    stream text, event_type text, aggregate_type text, aggregate_id text, payload bytea,
    headers jsonb DEFAULT '{}', event_id uuid DEFAULT NULL, op text DEFAULT 'upsert',
    occurred_at timestamptz DEFAULT NULL, schema_version integer DEFAULT 1, max_attempts integer DEFAULT NULL,
    OUT id uuid, OUT seq bigint, OUT is_new boolean
) LANGUAGE plpgsql AS $body$
#variable_conflict use_column
DECLARE
    new_id uuid := coalesce($7, {schema}.uuid_v7());
BEGIN
    INSERT INTO {outbox} AS o (id, stream, event_type, aggregate_type, aggregate_id, payload_bytes, headers, op,
                               occurred_at, schema_version, max_attempts)
    VALUES (new_id, $1, $2, $3, $4, $5, coalesce($6, '{}'), coalesce($8, 'upsert'),
            coalesce($9, now()), coalesce($10, 1), $11)
    ON CONFLICT DO NOTHING
    RETURNING o.id, o.seq, true INTO id, seq, is_new;
    IF NOT FOUND THEN
        SELECT o.id, o.seq, false INTO id, seq, is_new FROM {outbox} o WHERE o.id = new_id;
        IF NOT FOUND THEN
            PERFORM {function:refuse_clash}(new_id, currval({literal:sequence}));
        END IF;
    END IF;
END $body$;
