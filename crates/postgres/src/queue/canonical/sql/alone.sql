-- Claims one suspect, the first that has nothing before it in its order. Nothing else is in flight then, so that a crash
-- can be put down to it.
--
-- $1 relay, $2 slots, $3 lease in seconds, $4 streams (empty: all), $5 whether the order is by key, $6 whether it is total,
-- $7 whether dead events block their key, $8 largest payload
WITH me AS (
    SELECT r.id FROM {relay} r WHERE r.id = $1 FOR KEY SHARE
),
suspect AS MATERIALIZED (
    SELECT row.* FROM me
    CROSS JOIN unnest($2::smallint[]) AS lane(slot)
    CROSS JOIN LATERAL (
        SELECT t.seq, t.part, t.aggregate_id AS key FROM {outbox} t
        WHERE t.part = lane.slot AND t.phase = 0 AND t.next_retry_at IS NOT NULL AND t.next_retry_at <= now()
          AND t.lost_leases >= {suspect_after}
          AND (cardinality($4::text[]) = 0 OR t.stream = ANY($4))
        ORDER BY t.next_retry_at, t.seq
    ) AS row
),
first AS MATERIALIZED (
    SELECT s.seq FROM suspect s
    WHERE NOT (($5 OR $6) AND EXISTS (
            SELECT FROM {outbox} f
            WHERE f.part = ANY($2) AND ($6 OR f.part = s.part AND f.aggregate_id = s.key)
              AND f.phase = 0 AND f.next_retry_at IS NULL AND f.seq < s.seq
              AND (cardinality($4::text[]) = 0 OR f.stream = ANY($4))))
      AND NOT ($5 AND EXISTS (
            SELECT FROM {outbox} w
            WHERE w.aggregate_id = s.key AND w.phase = 0 AND w.next_retry_at IS NOT NULL AND w.seq < s.seq
              AND (cardinality($4::text[]) = 0 OR w.stream = ANY($4))))
      AND NOT ($6 AND EXISTS (
            SELECT FROM {outbox} w
            WHERE w.phase = 0 AND w.next_retry_at IS NOT NULL AND w.seq < s.seq
              AND (cardinality($4::text[]) = 0 OR w.stream = ANY($4))))
      AND NOT ($7 AND EXISTS (
            SELECT FROM {outbox} d
            WHERE ($6 OR d.aggregate_id = s.key) AND d.phase = 1 AND d.seq < s.seq
              AND (cardinality($4::text[]) = 0 OR d.stream = ANY($4))))
    ORDER BY s.seq
    LIMIT 1
),
claimed AS (
    UPDATE {outbox} t SET claim_token = $1, locked_until = now() + make_interval(secs => $3)
    WHERE t.seq = ANY(ARRAY(SELECT f.seq FROM first f)) AND (t.phase = 0) IS TRUE AND (t.next_retry_at <= now()) IS TRUE
    RETURNING t.seq, t.part, t.xmin::text AS version, t.attempts, t.lost_leases, {event:t:$8}
)
SELECT EXISTS (SELECT FROM me) AS alive, false AS held, EXISTS (SELECT FROM suspect) AS suspects, claimed.*
FROM (SELECT 1) AS one LEFT JOIN claimed ON true
