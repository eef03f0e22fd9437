-- The log. An application inserts here, in the transaction that writes its business rows; nothing is ever
-- updated. Partitioned by seq, so that retention drops whole partitions, and a reader that is past one does not
-- look at it.

-- CACHE 1 and INCREMENT 1 matter: the rule for holes relies on them. A plain sequence rather than an identity,
-- so that an insert straight into a partition draws from it, too.
CREATE SEQUENCE {sequence} AS bigint INCREMENT 1 CACHE 1;

CREATE TABLE {outbox} (
    seq             bigint NOT NULL DEFAULT nextval({literal:sequence}) PRIMARY KEY,
    id              uuid NOT NULL DEFAULT {schema}.uuid_v7(),
    stream          text NOT NULL CHECK (stream <> ''),
    event_type      text NOT NULL CHECK (event_type <> ''),
    aggregate_type  text NOT NULL CHECK (aggregate_type <> ''),
    aggregate_id    text NOT NULL CHECK (aggregate_id <> ''),
    op              text NOT NULL DEFAULT 'upsert' CHECK (op IN ('upsert', 'delete')),
    payload         jsonb,
    payload_bytes   bytea,
    headers         jsonb NOT NULL DEFAULT '{}' CHECK (jsonb_typeof(headers) = 'object'),
    occurred_at     timestamptz NOT NULL DEFAULT now(),
    schema_version  integer NOT NULL DEFAULT 1,
    max_attempts    integer CHECK (max_attempts > 0),
    created_at      timestamptz NOT NULL DEFAULT now(),
    CHECK (num_nonnulls(payload, payload_bytes) <= 1)
) PARTITION BY RANGE (seq);
ALTER SEQUENCE {sequence} OWNED BY {outbox}.seq;
-- Finds the place of a time: rows come in nearly that order, so a few pages do.
CREATE INDEX {index:created} ON {outbox} USING brin (created_at);

-- A net for what comes before its partition was made. Ids are unique within a partition: no index over all of
-- them can be, without seq.
CREATE TABLE {outbox:default} PARTITION OF {outbox} DEFAULT;
CREATE UNIQUE INDEX {index:default_id} ON {outbox:default} (id);
CREATE TABLE {outbox:first} PARTITION OF {outbox} FOR VALUES FROM (1) TO (1000001);
CREATE UNIQUE INDEX {index:first_id} ON {outbox:first} (id);

INSERT INTO {schema}.log (outbox) VALUES ({literal:outbox}) ON CONFLICT DO NOTHING;

-- How far a consumer is behind, at the price of two look-ups: for a producer that holds back a backfill, or
-- topics that can wait, while somebody is. NULL for a consumer that is not there.
CREATE FUNCTION {function:backlog}(consumer text) RETURNS bigint LANGUAGE sql STABLE AS $body$
    SELECT CASE WHEN p.last_seq IS NOT NULL THEN greatest(s.last_value - p.last_seq, 0) END
    FROM (SELECT CASE WHEN is_called THEN last_value ELSE 0 END AS last_value FROM {sequence}) AS s,
         (SELECT min(last_seq) AS last_seq FROM {schema}.partition
          WHERE outbox = {literal:outbox} AND grp = 'log:' || $1) AS p
$body$;

-- Publishing for any language: returns the id, the place, and whether the event is new. A repeated
-- id is refused by the partition that holds it; one that is in another partition is not, and is for the inbox. Parameters are
-- named by number in the body, since half of them share their name with a column.
CREATE FUNCTION {function:publish}(
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
    END IF;
END $body$;

-- Its twin for payloads that are bytes.
CREATE FUNCTION {function:publish_bytes}(
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
    END IF;
END $body$;

-- For those who want to be woken up: attached only by `migrate --notify`, since NOTIFY serialises commits and
-- keeps a transaction from being prepared. Once per statement, with the highest seq drawn so far, which a
-- publisher need not have the right to read.
CREATE FUNCTION {function:notify}() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $body$
BEGIN
    PERFORM pg_notify({literal:channel}, (SELECT last_value::text FROM {sequence}));
    RETURN NULL;
END $body$;
