-- Settles delivered events as done. What went wrong before is history.
--
-- The fence: the relay's own row, locked as an eviction must wait for, and the version of each row as it was read. No
-- row comes back of what another relay owns now, or an operator has changed.
--
-- Each row is looked up by the primary key, and then updated in its place, whatever the planner believes of the size of
-- the table: LATERAL and OFFSET 0 leave it no choice. A row that somebody changes while this statement waits for it has
-- another version then. The comparison with the versions is repeated for it; that with the place is not, on servers before
-- the minor releases of late 2025.
--
-- $1 relay, $2 and $3 seqs and versions, $4 the versions, each once
WITH me AS (
    SELECT r.id FROM {relay} r WHERE r.id = $1 FOR KEY SHARE
),
mine AS MATERIALIZED (
    SELECT row.place FROM me
    CROSS JOIN unnest($2::bigint[], $3::text[]::xid[]) AS v(seq, version)
    CROSS JOIN LATERAL (
        SELECT t.ctid AS place FROM {outbox} t WHERE t.seq = v.seq AND t.xmin = v.version OFFSET 0
    ) AS row
)
UPDATE {outbox} t
SET status = 'done', attempts = least(t.attempts, {most}) + 1, lost_leases = 0, claim_token = NULL, locked_until = NULL,
    error_code = NULL, error_message = NULL, last_attempt_at = now(), finished_at = now()
WHERE t.ctid = ANY(ARRAY(SELECT m.place FROM mine m)) AND t.xmin = ANY(ARRAY(SELECT x.version::xid FROM unnest($4::text[]) AS x(version)))
RETURNING t.seq
