//! Held events: those behind a waiting one of their key, which the relay has marked with `next_retry_at = infinity`.

use airtight_core::group::Member;

use super::of_streams;
use crate::columns::Columns;

/// Keys with held events that have nothing before them any more, and their slots. Parameters: slots, how many,
/// streams.
///
/// The lowest held row of a key decides: if nothing else waits before it, what it was held behind is gone. The
/// recursive part steps from key to key along the index of each slot, so its cost is the number of keys with
/// something held, not that of the events, nor of the keys that merely wait.
pub(super) fn freeable(c: &Columns, member: &Member) -> String {
    let table = &c.table;
    let streams = of_streams(member, "$3");
    let dead = if member.block_on_dead {
        format!(
            "AND NOT EXISTS (
            SELECT FROM {table} t WHERE t.aggregate_id = w.key AND t.phase = 1 AND t.seq < w.seq{streams})"
        )
    } else {
        String::new()
    };
    format!(
        "
        WITH RECURSIVE w AS (
          SELECT step.* FROM unnest($1::smallint[]) AS index_range(slot) CROSS JOIN LATERAL (
            SELECT t.part AS slot, t.aggregate_id AS key, t.seq AS seq FROM {table} t
            WHERE t.phase = 0 AND t.next_retry_at = 'infinity'{streams} AND t.part = index_range.slot
            ORDER BY t.aggregate_id, t.seq LIMIT 1
          ) AS step
          UNION ALL
          SELECT step.* FROM w CROSS JOIN LATERAL (
            SELECT t.part AS slot, t.aggregate_id AS key, t.seq AS seq FROM {table} t
            WHERE t.phase = 0 AND t.next_retry_at = 'infinity'{streams} AND t.part = w.slot AND t.aggregate_id > w.key
            ORDER BY t.aggregate_id, t.seq LIMIT 1
          ) AS step
        )
        SELECT w.slot, w.key FROM w WHERE $3::text[] IS NOT NULL AND NOT EXISTS (
            SELECT FROM {table} t WHERE t.aggregate_id = w.key AND t.phase = 0 AND t.next_retry_at IS NOT NULL
              AND t.seq < w.seq{streams})
          {dead} LIMIT $2"
    )
}

/// Frees held events of these keys, the first ones of each. Parameters: slots, keys, how many, streams.
///
/// A statement of its own: what the one above finds is nothing most of the time, and unknown to the planner,
/// which for the two in one prepared for millions. If a key waits again meanwhile, the claim holds these back
/// once more.
pub(super) fn unhold(c: &Columns, member: &Member) -> String {
    let table = &c.table;
    let streams = of_streams(member, "$4");
    format!(
        "
        WITH row AS MATERIALIZED (
          SELECT held.seq FROM unnest($1::smallint[], $2::text[]) AS free(slot, key) CROSS JOIN LATERAL (
            SELECT t.seq AS seq FROM {table} t
            WHERE t.part = free.slot AND t.aggregate_id = free.key
              AND t.phase = 0 AND t.next_retry_at = 'infinity'{streams}
            ORDER BY t.seq LIMIT $3
          ) AS held WHERE $4::text[] IS NOT NULL ORDER BY held.seq LIMIT $3
        )
        UPDATE {table} t SET next_retry_at = now()
        WHERE t.seq = ANY(ARRAY(SELECT seq FROM row)) AND t.phase = 0 AND t.next_retry_at = 'infinity'{streams}"
    )
}

/// Frees everything that is held, for an order that holds nothing. Parameter: streams.
pub(super) fn unhold_all(c: &Columns, member: &Member) -> String {
    let table = &c.table;
    let streams = of_streams(member, "$1");
    format!(
        "UPDATE {table} t SET next_retry_at = now()
         WHERE t.phase = 0 AND t.next_retry_at = 'infinity' AND $1::text[] IS NOT NULL{streams}"
    )
}
