-- Claims events that have waited and are due: retries, and events that were held and freed. They are few, so each claim is
-- written into its row. The status stays.
--
-- With order by key, an event behind another one of its key that waits is held again, unless that one is claimed here, too.
-- `IS TRUE` where rows are written keeps the planner to the primary key.
--
-- Suspects, which several relays held when they vanished, are left to alone.sql.
--
-- $1 relay, $2 slots, $3 events, $4 lease in seconds, $5 seqs in hand, $6 streams (empty: all), $7 whether the order is by
-- key, $8 whether dead events block their key, $9 largest payload, $10 the only seq that may be claimed (total order)
WITH me AS (
    SELECT r.id FROM {relay} r WHERE r.id = $1 FOR KEY SHARE
),
candidate AS MATERIALIZED (
    SELECT row.seq, row.aggregate_id AS key, row.lost_leases >= {suspect_after} AS suspect
    FROM me
    CROSS JOIN unnest($2::smallint[]) AS lane(slot)
    CROSS JOIN LATERAL (
        SELECT t.seq, t.aggregate_id, t.lost_leases FROM {outbox} t
        WHERE t.part = lane.slot AND t.phase = 0 AND t.next_retry_at IS NOT NULL AND t.next_retry_at <= now()
          AND t.seq <> ALL($5::bigint[])
          AND (cardinality($6::text[]) = 0 OR t.stream = ANY($6))
        ORDER BY t.next_retry_at, t.seq
        LIMIT $3
    ) AS row
    WHERE $10::bigint IS NULL OR row.seq = $10
    ORDER BY row.seq
    LIMIT $3
),
blocked AS MATERIALIZED (
    SELECT x.seq FROM candidate x
    WHERE $7 AND (
        EXISTS (
            SELECT FROM {outbox} w
            WHERE w.aggregate_id = x.key AND w.phase = 0 AND w.next_retry_at IS NOT NULL AND w.seq < x.seq
              AND (cardinality($6::text[]) = 0 OR w.stream = ANY($6))
              AND w.seq NOT IN (SELECT c.seq FROM candidate c WHERE NOT c.suspect)
        )
        OR $8 AND EXISTS (
            SELECT FROM {outbox} d
            WHERE d.aggregate_id = x.key AND d.phase = 1 AND d.seq < x.seq
              AND (cardinality($6::text[]) = 0 OR d.stream = ANY($6))
        )
    )
),
claimed AS (
    UPDATE {outbox} t SET claim_token = $1, locked_until = now() + make_interval(secs => $4)
    WHERE t.seq = ANY(ARRAY(
            SELECT x.seq FROM candidate x
            WHERE NOT x.suspect AND x.seq NOT IN (SELECT b.seq FROM blocked b)
              AND NOT ($7 AND EXISTS (SELECT FROM candidate s WHERE s.suspect AND s.key = x.key AND s.seq < x.seq))))
      AND (t.phase = 0) IS TRUE AND (t.next_retry_at <= now()) IS TRUE
    RETURNING t.seq, t.part, t.xmin::text AS version, t.attempts, t.lost_leases, {event:t:$9}
),
held AS (
    UPDATE {outbox} t SET next_retry_at = 'infinity'
    WHERE t.seq = ANY(ARRAY(SELECT b.seq FROM blocked b)) AND (t.phase = 0) IS TRUE AND (t.next_retry_at <= now()) IS TRUE
    RETURNING 1
)
SELECT EXISTS (SELECT FROM me) AS alive, EXISTS (SELECT FROM held) AS held,
       EXISTS (SELECT FROM candidate x WHERE x.suspect AND x.seq NOT IN (SELECT b.seq FROM blocked b)) AS suspects,
       claimed.*
FROM (SELECT 1) AS one LEFT JOIN claimed ON true
ORDER BY claimed.seq
