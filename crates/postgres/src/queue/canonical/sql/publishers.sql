-- The second half of a look: the transactions that hold the sequence, since they have drawn a value and not ended.
--
-- A transaction keeps the name `virtualtransaction` until it ends or is prepared. A name that ends in /0 has ended. A
-- holder without a process is a prepared transaction, and counts only while it is among them.
--
-- A transaction that commits becomes visible first, and then releases its locks, one after the other. So one that is listed
-- here may be visible, and others may have drawn values after it. `running` says that it is not visible to this
-- statement, whose snapshot is younger than `top`. One that is running may commit before a page is read. The page would
-- then show its rows above the cursors, and not those below. `unseen` and `next` are for leaving them out: the numbers of
-- transactions and subtransactions that run, and the first number that was free.
--
-- $1 the sequence
WITH snapshot AS (
    SELECT ARRAY(SELECT r.xid::text::bigint % 4294967296 FROM pg_snapshot_xip(s.now) AS r(xid)) AS running,
           pg_snapshot_xmax(s.now)::text::bigint % 4294967296 AS next
    FROM (SELECT pg_current_snapshot() AS now) AS s
),
lock AS MATERIALIZED (
    SELECT l.locktype, l.virtualtransaction, l.pid, l.transactionid, l.relation, l.mode,
           l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database()) AS here
    FROM pg_locks l WHERE l.locktype IN ('relation', 'transactionid') AND l.granted
),
holder AS (
    SELECT DISTINCT l.virtualtransaction AS name, l.pid IS NULL AS prepared FROM lock l
    WHERE l.locktype = 'relation' AND l.relation = $1::bigint::oid AND l.here AND l.mode = 'RowExclusiveLock'
      AND l.virtualtransaction NOT LIKE '%/0'
      AND (l.pid IS NOT NULL OR EXISTS (
          SELECT FROM lock x JOIN pg_prepared_xacts p ON p.transaction = x.transactionid
          WHERE x.locktype = 'transactionid' AND x.pid IS NULL AND x.virtualtransaction = l.virtualtransaction))
),
transaction AS (
    SELECT x.virtualtransaction AS name, x.transactionid::text::bigint AS number,
           x.transactionid::text::bigint = ANY(s.running)
             -- Begun after the snapshot. Numbers go round.
             OR (x.transactionid::text::bigint - s.next + 4294967296) % 4294967296 < 2147483648 AS running
    FROM lock x, snapshot s WHERE x.locktype = 'transactionid' AND x.mode = 'ExclusiveLock'
)
SELECT coalesce(array_agg(h.name), '{}') AS names,
       coalesce(array_agg(h.prepared), '{}') AS prepared,
       coalesce(array_agg(EXISTS (SELECT FROM transaction x WHERE x.name = h.name AND x.running)), '{}') AS running,
       ARRAY(SELECT x.number FROM transaction x
             WHERE x.name IN (SELECT r.name FROM transaction r WHERE r.running)) AS unseen,
       (SELECT s.next FROM snapshot s) AS next,
       pg_postmaster_start_time()::text AS server,
       pg_is_in_recovery() AS standby
FROM holder h
