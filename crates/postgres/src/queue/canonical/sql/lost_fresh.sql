-- Counts a lost lease for the fresh events that evicted relays had in flight: the open ones up to their newest marks.
-- One that was lost too often waits to be delivered alone.
--
-- $1 relays, $2 streams that they read, each as a JSON array
WITH newest AS (
    SELECT DISTINCT ON (m.relay) m.slots, m.seqs, gone.streams
    FROM unnest($1::uuid[], $2::text[]) AS gone(relay, streams) JOIN {mark} m ON m.relay = gone.relay
    ORDER BY m.relay, m.page DESC
),
lost AS MATERIALIZED (
    SELECT row.seq FROM newest
    CROSS JOIN unnest(newest.slots, newest.seqs) AS lane(slot, through)
    CROSS JOIN LATERAL (
        SELECT t.seq FROM {outbox} t
        WHERE t.part = lane.slot AND t.phase = 0 AND t.next_retry_at IS NULL AND t.seq <= lane.through
          AND (newest.streams = '[]' OR newest.streams::jsonb ? t.stream)
        ORDER BY t.seq
    ) AS row
)
UPDATE {outbox} t
SET lost_leases = least(t.lost_leases, {most}) + 1,
    next_retry_at = CASE WHEN t.lost_leases + 1 >= {suspect_after} THEN now() END
WHERE t.seq = ANY(ARRAY(SELECT l.seq FROM lost l)) AND (t.phase = 0 AND t.next_retry_at IS NULL) IS TRUE
