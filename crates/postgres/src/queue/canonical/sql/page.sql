-- Reads fresh events: open ones that have never failed, of the relay's slots, each slot from its cursor to its end.
--
-- One range of the index `claim` (part, seq) for each slot, from the cursor on: what was delivered before the cursor
-- costs nothing, and the planner needs no statistics. Nothing is written.
--
-- What the relay has in hand is left out by seq and version. A slot's limit has room for these rows, so that they do not
-- use up the page. Payloads are converted to text only for rows that are left.
--
-- $1 slots, $2 after, $3 through, $4 limits, $5 and $6 seqs and versions in hand, $7 streams (empty: all),
-- $8 whether to look for earlier events of the key that wait, $9 the same for dead ones, $10 largest payload
SELECT row.seq, row.part, row.xmin::text AS version, row.attempts, row.lost_leases,
       $8 AND EXISTS (
           SELECT FROM {outbox} w
           WHERE w.aggregate_id = row.aggregate_id AND w.phase = 0 AND w.next_retry_at IS NOT NULL AND w.seq < row.seq
             AND (cardinality($7::text[]) = 0 OR w.stream = ANY($7))
       )
       OR $9 AND EXISTS (
           SELECT FROM {outbox} d
           WHERE d.aggregate_id = row.aggregate_id AND d.phase = 1 AND d.seq < row.seq
             AND (cardinality($7::text[]) = 0 OR d.stream = ANY($7))
       ) AS blocked,
       {event:row:$10}
FROM unnest($1::smallint[], $2::bigint[], $3::bigint[], $4::bigint[]) AS lane(slot, after, through, most)
CROSS JOIN LATERAL (
    SELECT t.*, t.xmin FROM {outbox} t
    WHERE t.part = lane.slot AND t.phase = 0 AND t.next_retry_at IS NULL
      AND t.seq > lane.after AND t.seq <= lane.through
      AND (cardinality($7::text[]) = 0 OR t.stream = ANY($7))
    ORDER BY t.seq
    LIMIT lane.most
) AS row
WHERE NOT EXISTS (
    SELECT FROM unnest($5::bigint[], $6::text[]::xid[]) AS hand(seq, version)
    WHERE hand.seq = row.seq AND hand.version = row.xmin
)
