//! The claim on the canonical table: one statement, whose cost does not depend on the length of the backlog.
//!
//! The reasons for its shape:
//! - The claim reads one index range for each key slot, or for each key slot within a stream. An index range is an ordered
//!   range of a partial index, read from its start. So it never scans rows of other relays' partitions, of streams that
//!   nobody reads, or of events that wait for a retry.
//! - A claim changes no indexed column (`phase` stays 0, `next_retry_at` stays as it was), so it is a HOT update, and the
//!   indexes do not grow.
//! - With order, only the owner claims from a partition, so locked rows are not skipped. If an operator holds a row, or an
//!   earlier claim of this relay whose connection broke, waiting for the row keeps the order.
//! - An event behind one that waits is *held*: `next_retry_at` becomes infinity, which takes all such events out of the index
//!   ranges in one statement. `unhold` puts them back.
//! - Identities go to the UPDATE as an array. The planner does not know how few they are, and might otherwise choose to read
//!   the whole table.

use airtight_core::{Order, group::Member, queue::SUSPECT_AFTER};

use super::of_streams;
use crate::columns::Columns;

/// A count that is larger by one still fits; one that did not would fail the claim of all rows.
const MOST: i32 = i32::MAX - 1;

/// How many bytes the payload takes as stored.
const SIZE: &str = "(coalesce(pg_column_size(t.payload), 0) + coalesce(pg_column_size(t.payload_bytes), 0))";

/// The claim. Parameters: token, events, bytes, lease in seconds, relay, slots, tokens, streams, events per
/// index range, largest payload. With `alone` the statement claims one suspect; without it, it sets suspects aside.
pub(super) fn claim(c: &Columns, member: &Member, alone: bool) -> String {
    let (table, relay) = (&c.table, &c.relay);
    let takeable = takeable(member.order);
    let (fresh, due) = (fresh(c, member), due(c, member));
    let candidates = if alone { alone_candidate(c, member) } else { candidates(member) };
    let Blocking { blocked, free } = if alone { Blocking::nothing() } else { Blocking::by_order(c, member) };
    let event = event();
    // Set aside: pending again, with the attempt given back if there was a claim, which counts as a lost lease.
    let back = "status = 'pending', claim_token = NULL, locked_until = NULL,
            attempts = greatest(t.attempts - (t.status = 'processing')::int, 0),
            lost_leases = t.lost_leases + (t.status = 'processing')::int";
    let (may_claim, suspected) = if alone {
        ("true", String::new())
    } else {
        let suspected = format!(
            ",
        suspected AS (
          UPDATE {table} t SET next_retry_at = coalesce(t.next_retry_at, now()), {back}
          WHERE t.seq = ANY(ARRAY(SELECT seq FROM candidate WHERE suspect AND takeover))
            AND t.phase = 0 AND {takeable}
        )"
        );
        ("NOT suspect", suspected)
    };
    // In `claimed`, a takeover is the same attempt, and one more lost lease.
    format!(
        "
        WITH me AS (
          SELECT r.id FROM {relay} r WHERE r.id = $5 AND $7::uuid[] IS NOT NULL AND $8::text[] IS NOT NULL FOR KEY SHARE
        ),
        fresh AS MATERIALIZED ({fresh}),
        due AS MATERIALIZED ({due}),
        candidate AS MATERIALIZED ({candidates}),
        blocked AS MATERIALIZED ({blocked}),
        chosen AS (
          SELECT seq, sum(size) OVER (ORDER BY seq) - size AS before FROM candidate x
          WHERE {may_claim} AND seq NOT IN (SELECT b.seq FROM blocked b) AND {free}
        ),
        claimed AS (
          UPDATE {table} t SET status = 'processing', claim_token = $1,
            locked_until = now() + make_interval(secs => $4),
            lost_leases = least(t.lost_leases, {MOST}) + (t.status = 'processing')::int,
            attempts = least(t.attempts, {MOST}) + (t.status <> 'processing')::int,
            last_attempt_at = now()
          WHERE t.seq = ANY(ARRAY(SELECT seq FROM chosen WHERE before < $3)) AND t.phase = 0 AND {takeable}
          RETURNING t.seq AS row_id, t.part AS slot, t.attempts AS attempt, t.lost_leases AS lost,
            t.next_retry_at IS NOT NULL AS waited, {event}
        ),
        held AS (
          UPDATE {table} t SET next_retry_at = 'infinity', {back}
          WHERE t.seq = ANY(ARRAY(SELECT seq FROM blocked)) AND t.phase = 0 AND {takeable} RETURNING 1
        ){suspected}
        SELECT EXISTS (SELECT FROM me) AS alive, EXISTS (SELECT FROM held) AS held,
          EXISTS (SELECT FROM candidate WHERE suspect AND seq NOT IN (SELECT b.seq FROM blocked b)) AS suspects,
          claimed.* FROM (SELECT 1) AS one LEFT JOIN claimed ON true ORDER BY claimed.row_id"
    )
}

/// Pending, or claimed by a relay that no longer counts.
fn takeable(order: Order) -> &'static str {
    match order {
        Order::None => {
            "(t.status = 'pending'
               OR t.status = 'processing' AND (t.locked_until IS NULL OR t.locked_until < now()))"
        }
        Order::Key | Order::Total => {
            "(t.status = 'pending'
               OR t.status = 'processing' AND (t.claim_token IS NULL OR t.claim_token <> ALL($7)))"
        }
    }
}

/// What has never failed, the first of each index range.
fn fresh(c: &Columns, member: &Member) -> String {
    index_ranges(c, member, "t.next_retry_at IS NULL", "t.seq")
}

/// What has failed and is due again, the first of each index range.
fn due(c: &Columns, member: &Member) -> String {
    let due = "t.next_retry_at IS NOT NULL AND t.next_retry_at <= now()";
    index_ranges(c, member, due, "t.next_retry_at, t.seq")
}

/// The first rows of each index range.
fn index_ranges(c: &Columns, member: &Member, when: &str, sort: &str) -> String {
    let table = &c.table;
    let takeable = takeable(member.order);
    let (index_ranges, in_range) = if member.streams.is_empty() {
        ("unnest($6::smallint[]) AS index_range(slot)", "t.part = index_range.slot")
    } else {
        (
            "unnest($6::smallint[]) AS index_range(slot) CROSS JOIN unnest($8::text[]) AS topic(name)",
            "t.part = index_range.slot AND t.stream = topic.name",
        )
    };
    let lock = if member.order == Order::None { "FOR UPDATE OF t SKIP LOCKED" } else { "" };
    format!(
        "
          SELECT row.* FROM me CROSS JOIN {index_ranges} CROSS JOIN LATERAL (
            SELECT t.seq AS seq, t.part AS slot, t.stream AS stream, t.aggregate_id AS key,
              t.status = 'processing' AS takeover, t.lost_leases AS lost, {SIZE} AS size,
              t.next_retry_at IS NOT NULL AS waited
            FROM {table} t WHERE {in_range} AND t.phase = 0 AND {when} AND {takeable}
            ORDER BY {sort} LIMIT $9 {lock}
          ) AS row"
    )
}

/// All that was found in the index ranges.
fn found(member: &Member) -> String {
    // Several streams of one slot are cut at the same place, or a key that is in two of them could be
    // claimed out of order.
    let cut = if member.order == Order::Key && member.streams.len() > 1 {
        "WHERE seq <= coalesce((SELECT min(index_range.last) FROM (SELECT max(f.seq) AS last FROM fresh f
             WHERE f.slot = found.slot GROUP BY f.stream HAVING count(*) >= $9) AS index_range), seq)"
    } else {
        ""
    };
    format!("(SELECT * FROM fresh UNION ALL SELECT * FROM due) AS found {cut}")
}

/// The first rows of all index ranges together.
fn candidates(member: &Member) -> String {
    let found = found(member);
    format!("SELECT *, lost + takeover::int >= {SUSPECT_AFTER} AS suspect FROM {found} ORDER BY seq LIMIT $2")
}

/// One suspect, lowest first, with nothing before it that its order puts first. It may be among the fresh ones:
/// one that was held has no retry time once it is freed.
fn alone_candidate(c: &Columns, member: &Member) -> String {
    let (table, found, streams) = (&c.table, found(member), of_streams(member, "$8"));
    let first = match member.order {
        Order::None => "true".into(),
        Order::Key => format!(
            "NOT EXISTS (SELECT FROM fresh f WHERE f.key = d.key AND f.seq < d.seq)
             AND NOT EXISTS (SELECT FROM {table} t WHERE t.aggregate_id = d.key AND t.phase = 0
               AND t.next_retry_at IS NOT NULL AND t.seq < d.seq{streams})"
        ),
        Order::Total => format!(
            "NOT EXISTS (SELECT FROM fresh f WHERE f.seq < d.seq)
             AND NOT EXISTS (SELECT FROM {table} t WHERE t.phase = 0
               AND t.next_retry_at IS NOT NULL AND t.seq < d.seq{streams})"
        ),
    };
    format!(
        "SELECT d.*, true AS suspect FROM (SELECT * FROM {found}) AS d
         WHERE d.lost >= {SUSPECT_AFTER} AND {first} ORDER BY d.seq LIMIT 1"
    )
}

/// What may not be claimed although it was found.
struct Blocking {
    /// The candidates to hold back.
    blocked: String,
    /// What must be true of a candidate `x` that is not held back.
    free: String,
}

impl Blocking {
    fn nothing() -> Self {
        Self { blocked: "SELECT seq FROM candidate WHERE false".into(), free: "true".into() }
    }

    fn by_order(c: &Columns, member: &Member) -> Self {
        let table = &c.table;
        // Another pipeline's streams are its own business, even where they share a key with ours.
        let streams = of_streams(member, "$8");
        match member.order {
            Order::None => Self::nothing(),
            Order::Key => {
                // Something earlier of the key waits, and is not being claimed in this very statement.
                let mut blocked = format!(
                    "SELECT x.seq FROM candidate x WHERE EXISTS (
                       SELECT FROM {table} t WHERE t.aggregate_id = x.key AND t.phase = 0
                         AND t.next_retry_at IS NOT NULL AND t.seq < x.seq{streams}
                         AND t.seq NOT IN (SELECT d.seq FROM candidate d WHERE d.waited AND NOT d.suspect))"
                );
                if member.block_on_dead {
                    blocked.push_str(&format!(
                        " OR EXISTS (SELECT FROM {table} t WHERE t.aggregate_id = x.key AND t.phase = 1
                            AND t.seq < x.seq{streams})"
                    ));
                }
                let free = "NOT EXISTS (SELECT FROM candidate s WHERE s.suspect AND s.key = x.key AND s.seq < x.seq)";
                Self { blocked, free: free.into() }
            }
            Order::Total => {
                let mut barriers = format!(
                    "SELECT min(t.seq) AS seq FROM {table} t WHERE t.phase = 0 AND t.next_retry_at IS NOT NULL
                       AND (t.next_retry_at > now() OR t.lost_leases >= {SUSPECT_AFTER}){streams}
                     UNION ALL SELECT min(s.seq) FROM candidate s WHERE s.suspect"
                );
                if member.block_on_dead {
                    barriers.push_str(&format!(
                        " UNION ALL SELECT min(t.seq) FROM {table} t WHERE t.phase = 1{streams}"
                    ));
                }
                let free = format!("x.seq < coalesce((SELECT min(b.seq) FROM ({barriers}) AS b), x.seq + 1)");
                Self { free, ..Self::nothing() }
            }
        }
    }
}

/// What [`crate::decode`] turns into an event, in its order: the same as [`Columns::event_columns`](crate::columns::EventColumns)
/// says for any table.
fn event() -> String {
    format!(
        "t.id::text AS e_id, t.seq AS e_seq, t.stream AS e_stream, t.event_type AS e_type,
            t.aggregate_type AS e_aggregate_type, t.aggregate_id AS e_aggregate_id, t.op AS e_op,
            CASE WHEN {SIZE} <= $10 THEN t.payload::text END AS e_payload,
            CASE WHEN {SIZE} <= $10 THEN t.payload_bytes END AS e_payload_bytes,
            {SIZE}::bigint AS e_size, t.headers::text AS e_headers,
            CASE WHEN t.occurred_at IS NOT NULL
              THEN least(greatest(t.occurred_at, timestamptz '0001-01-01 00:00:00+00'),
                         timestamptz '9999-12-31 23:59:59+00') END AS e_occurred_at,
            t.schema_version AS e_schema_version, t.max_attempts::bigint AS e_max_attempts,
            NULL::text AS e_extra"
    )
}
