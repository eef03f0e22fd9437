-- Settles events that failed: a retry waits, a dead or unknown one stays for a person. This is where attempts grow; an
-- event whose destination is unavailable waits without an attempt. The fence is that of done.sql.
--
-- $1 relay, $2 and $3 seqs and versions, $4 seconds to wait (NULL: it does not wait), $5 codes, $6 messages, $7 status,
-- $8 attempts that it costs
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
SET status = $7, attempts = least(t.attempts, {most}) + $8, lost_leases = 0, claim_token = NULL, locked_until = NULL,
    next_retry_at = CASE WHEN v.wait IS NULL THEN t.next_retry_at ELSE now() + make_interval(secs => v.wait) END,
    error_code = v.code, error_message = v.message, last_attempt_at = now(),
    finished_at = CASE WHEN v.wait IS NULL THEN now() END
FROM unnest($2::bigint[], $3::text[]::xid[], $4::float8[], $5::text[], $6::text[]) AS v(seq, version, wait, code, message)
WHERE t.ctid = ANY(ARRAY(SELECT m.place FROM mine m)) AND t.seq = v.seq AND t.xmin = v.version
RETURNING t.seq
