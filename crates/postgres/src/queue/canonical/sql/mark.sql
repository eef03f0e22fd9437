-- Writes how far the relay has handed out events, for each slot with something in flight, before it hands out a page.
-- Whoever evicts the relay counts a lost lease for the open events up to its newest mark.
--
-- Inserted, not updated: the versions of one row that is updated for every page would slow each other down while
-- another transaction is open. Without waiting for the disk: a mark that a crash of the server loses costs a count.
--
-- No row comes back if the relay was evicted.
--
-- $1 relay, $2 number of the page, $3 slots, $4 seqs
WITH quick AS (
    SELECT set_config('synchronous_commit', 'off', true)
),
me AS (
    SELECT r.id FROM {relay} r WHERE r.id = $1 FOR KEY SHARE
)
INSERT INTO {mark} (relay, page, slots, seqs)
SELECT me.id, $2, $3::smallint[], $4::bigint[] FROM me, quick
RETURNING relay
