-- The first half of a look: the newest value of the sequence, and what waits in the relay's slots.
--
-- It must be a statement before the second half (publishers.sql): a transaction that has drawn a value up to `top` has
-- then either ended, or holds the sequence when the second half looks.
--
-- One probe of the index `waiting` for each slot. The planner needs no statistics for that.
--
-- $1 slots, $2 streams (empty: all), $3 whether dead events block their key, $4 whether the order is total
SELECT CASE WHEN s.is_called THEN s.last_value ELSE s.last_value - 1 END AS top,
       waits.first IS NOT NULL AS waits,
       coalesce(waits.first <= now(), false) AS due,
       $3::boolean AND EXISTS (SELECT FROM {outbox} t WHERE t.phase = 1) AS dead,
       CASE WHEN $4::boolean THEN (
           -- Nothing may pass an event that waits. OFFSET 0 keeps the planner from walking the primary key for min().
           SELECT min(b.seq) FROM (
               SELECT t.seq FROM {outbox} t
               WHERE t.phase = 0 AND t.next_retry_at IS NOT NULL
                 AND (cardinality($2::text[]) = 0 OR t.stream = ANY($2))
               UNION ALL
               SELECT t.seq FROM {outbox} t
               WHERE $3 AND t.phase = 1 AND (cardinality($2::text[]) = 0 OR t.stream = ANY($2))
               OFFSET 0
           ) AS b
       ) END AS barrier
FROM {sequence} s,
     (SELECT min(w.next_retry_at) AS first
      FROM unnest($1::smallint[]) AS lane(slot)
      CROSS JOIN LATERAL (
          SELECT t.next_retry_at FROM {outbox} t
          WHERE t.part = lane.slot AND t.phase = 0 AND t.next_retry_at IS NOT NULL
          ORDER BY t.next_retry_at
          LIMIT 1
      ) AS w) AS waits
