-- What all outboxes of one schema share.

-- A UUID that sorts by time: 48 bits of milliseconds, then random bits, version 7.
CREATE FUNCTION {schema}.uuid_v7() RETURNS uuid LANGUAGE sql VOLATILE PARALLEL SAFE AS $body$
    SELECT encode(
        substring(int8send(floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint) FROM 3)
        || set_byte(random.bytes, 0, get_byte(random.bytes, 0) & 15 | 112),
        'hex'
    )::uuid
    FROM (SELECT substring(uuid_send(gen_random_uuid()) FROM 7) AS bytes) AS random
$body$;

-- Relays that are there. A claim holds its relay's row FOR KEY SHARE, so that evicting (deleting) a relay
-- waits for the claim it has under way, and no claim can begin afterwards.
CREATE TABLE {schema}.relay (
    id         uuid PRIMARY KEY,
    outbox     text NOT NULL,
    grp        text NOT NULL,
    host       text NOT NULL,
    streams    text[] NOT NULL,
    ord        text NOT NULL,
    started_at timestamptz NOT NULL DEFAULT now(),
    expires_at timestamptz NOT NULL
) WITH (fillfactor = 50);

-- Key partitions and their owners.
CREATE TABLE {schema}.partition (
    outbox text NOT NULL,
    grp    text NOT NULL,
    n      smallint NOT NULL,
    owner  uuid,
    epoch  bigint NOT NULL DEFAULT 0,
    PRIMARY KEY (outbox, grp, n)
) WITH (fillfactor = 50);

-- What a foreign table cannot hold, only while it is needed.
CREATE TABLE {schema}.side (
    outbox        text NOT NULL,
    event         text NOT NULL,
    attempts      integer NOT NULL DEFAULT 0,
    lost_leases   integer NOT NULL DEFAULT 0,
    next_retry_at timestamptz,
    locked_until  timestamptz,
    claim_token   uuid,
    error_code    text,
    error_message text,
    unknown       boolean NOT NULL DEFAULT false,
    PRIMARY KEY (outbox, event)
) WITH (fillfactor = 70);
