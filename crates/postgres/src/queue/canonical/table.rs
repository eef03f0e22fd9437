//! How the rows of the canonical table are shown to an operator. Everything is in the table itself; there is no side table.

use airtight_core::{Order, group::Member, table::literal};

use super::{super::store::QueueTable, Canonical};
use crate::columns::{Columns, in_calendar};

impl QueueTable for Canonical {
    fn side(&self) -> String {
        String::new()
    }

    fn forget_side(&self) -> Option<String> {
        None
    }

    /// Reading writes nothing into a row, so the relays' marks tell what is in flight.
    fn state(&self) -> String {
        format!(
            "(CASE WHEN t.phase <> 0 THEN t.status WHEN {} THEN 'processing' ELSE 'pending' END)",
            in_flight(self)
        )
    }

    fn lost_leases(&self) -> String {
        "t.lost_leases".into()
    }

    fn is_held(&self) -> String {
        "coalesce(t.next_retry_at = 'infinity', false)".into()
    }

    fn shown_retry(&self) -> String {
        format!("CASE WHEN t.next_retry_at < 'infinity' THEN {} END", in_calendar("t.next_retry_at"))
    }

    fn waits(&self) -> String {
        "t.next_retry_at IS NOT NULL".into()
    }

    fn is_blocked(&self) -> String {
        "t.phase = 0 AND t.next_retry_at = 'infinity'".into()
    }

    fn blocked_key(&self) -> String {
        "t.aggregate_id".into()
    }

    /// Not NULL: no cursor would lead to it.
    fn due_now(&self, _column: &str) -> String {
        "now()".into()
    }

    /// A row that was finished manually may have no time for it: then the time at which it was written counts.
    fn finished(&self, column: &str) -> String {
        format!("coalesce({}, t.created_at)", self.read_time(column))
    }

    /// The table's own constraint refuses other words.
    fn unexplained(&self) -> Option<String> {
        None
    }
}

/// Whether a live relay has the open row `t` in flight. The first comparison spares rows beyond all marks the rest.
fn in_flight(c: &Columns) -> String {
    let (mark, relay, outbox) = (&c.mark, &c.relay, literal(&c.outbox));
    let marks = format!(
        "SELECT DISTINCT ON (m.relay) m.slots, m.seqs, r.streams FROM {mark} m JOIN {relay} r ON r.id = m.relay
         WHERE r.outbox = {outbox} AND r.expires_at > now() ORDER BY m.relay, m.page DESC"
    );
    format!(
        "(t.next_retry_at IS NULL
           AND t.seq <= (SELECT max(lane.through) FROM ({marks}) AS n CROSS JOIN unnest(n.seqs) AS lane(through))
           AND EXISTS (SELECT FROM ({marks}) AS n CROSS JOIN unnest(n.slots, n.seqs) AS lane(slot, through)
             WHERE lane.slot = t.part AND t.seq <= lane.through
               AND (cardinality(n.streams) = 0 OR t.stream = ANY(n.streams)))
         OR t.claim_token = ANY(ARRAY(SELECT r.id FROM {relay} r WHERE r.outbox = {outbox} AND r.expires_at > now()))
         OR t.status = 'processing' AND t.locked_until > now())"
    )
}

/// See [`super::Store::backlog_statement`].
pub(super) fn backlog(c: &Columns, member: &Member) -> String {
    let table = &c.table;
    let ours = "(cardinality($1::text[]) = 0 OR t.stream = ANY($1))";
    let blocked = if member.block_on_dead && member.order == Order::Key {
        format!(
            "count(*) FILTER (WHERE EXISTS (
            SELECT FROM {table} t WHERE t.aggregate_id = o.key AND t.phase = 1 AND {ours} AND t.seq < o.seq))"
        )
    } else {
        "0::bigint".into()
    };
    // What is held waits for another event, and not for a time.
    let later = "o.retry > now() AND o.retry < 'infinity'";
    format!(
        "
        SELECT count(*), {blocked}, count(*) FILTER (WHERE {later}),
          least(extract(epoch FROM min(o.retry) FILTER (WHERE {later}) - now()), 3e9)::float8
        FROM (
          SELECT t.aggregate_id AS key, t.seq, t.next_retry_at AS retry FROM {table} t WHERE t.phase = 0 AND {ours}
        ) AS o"
    )
}

/// See [`super::Store::has_dead_statement`].
pub(super) fn has_dead(c: &Columns) -> String {
    let table = &c.table;
    format!(
        "SELECT EXISTS (SELECT FROM {table} t
           WHERE t.phase = 1 AND (cardinality($1::text[]) = 0 OR t.stream = ANY($1)))"
    )
}
