-- The net: the first open fresh event of each slot that lies before the slot's cursor and is not in hand. There is none,
-- unless somebody inserted an explicit seq or changed a row directly in SQL.
--
-- $1 slots, $2 cursors, $3 limits (one more than what is in hand there), $4 and $5 seqs and versions in hand, $6 streams
SELECT row.part AS slot, min(row.seq) AS first
FROM unnest($1::smallint[], $2::bigint[], $3::bigint[]) AS lane(slot, through, most)
CROSS JOIN LATERAL (
    SELECT t.part, t.seq, t.xmin FROM {outbox} t
    WHERE t.part = lane.slot AND t.phase = 0 AND t.next_retry_at IS NULL AND t.seq <= lane.through
      AND (cardinality($6::text[]) = 0 OR t.stream = ANY($6))
    ORDER BY t.seq
    LIMIT lane.most
) AS row
WHERE NOT EXISTS (
    SELECT FROM unnest($4::bigint[], $5::text[]::xid[]) AS hand(seq, version)
    WHERE hand.seq = row.seq AND hand.version = row.xmin
)
GROUP BY row.part
