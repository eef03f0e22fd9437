-- The same for events that were claimed in their rows.
--
-- $1 relays
WITH lost AS MATERIALIZED (
    SELECT row.seq FROM generate_series(0, 63) AS lane(slot)
    CROSS JOIN LATERAL (
        SELECT t.seq FROM {outbox} t
        WHERE t.part = lane.slot::smallint AND t.phase = 0 AND t.next_retry_at IS NOT NULL AND t.next_retry_at <= now()
          AND t.claim_token = ANY($1::uuid[])
        ORDER BY t.next_retry_at
    ) AS row
)
UPDATE {outbox} t SET lost_leases = least(t.lost_leases, {most}) + 1, claim_token = NULL, locked_until = NULL
WHERE t.seq = ANY(ARRAY(SELECT l.seq FROM lost l)) AND t.claim_token = ANY($1)
