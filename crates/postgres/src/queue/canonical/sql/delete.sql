-- Settles delivered events by deleting them, where done events are not kept. The fence is that of done.sql.
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
DELETE FROM {outbox} t
WHERE t.ctid = ANY(ARRAY(SELECT m.place FROM mine m)) AND t.xmin = ANY(ARRAY(SELECT x.version::xid FROM unnest($4::text[]) AS x(version)))
RETURNING t.seq
