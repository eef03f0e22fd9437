//! How the rows of the canonical table are shown to an operator. Everything is in the table itself; there is no side table.

use airtight_core::{Order, group::Member};

use super::{super::store::QueueTable, Canonical};
use crate::columns::{Columns, in_calendar};

impl QueueTable for Canonical {
    fn side(&self) -> String {
        String::new()
    }

    fn forget_side(&self) -> Option<String> {
        None
    }

    fn state(&self) -> String {
        "t.status".into()
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

    fn due_now(&self, _column: &str) -> String {
        "NULL".into()
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
