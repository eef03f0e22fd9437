//! How the rows of a foreign table are shown to an operator, together with their rows of the side table.

use airtight_core::{Order, group::Member, table::literal};

use super::{super::store::QueueTable, Foreign, join_side, lost_leases};
use crate::columns::{Columns, in_calendar};

impl QueueTable for Foreign {
    fn side(&self) -> String {
        join_side(self)
    }

    fn forget_side(&self) -> Option<String> {
        Some(format!(
            "DELETE FROM {} s USING target WHERE s.outbox = {} AND s.event = target.identity::text",
            self.side,
            literal(&self.outbox)
        ))
    }

    fn state(&self) -> String {
        format!(
            "(CASE WHEN s.claim_token IS NOT NULL THEN 'processing' WHEN s.unknown AND {} THEN 'unknown' ELSE {} END)",
            self.is(&self.status.dead),
            self.state_by_words()
        )
    }

    fn lost_leases(&self) -> String {
        lost_leases()
    }

    /// Nothing is marked as held. Infinity in the table's own column is a time like any other.
    fn is_held(&self) -> String {
        "false".into()
    }

    fn shown_retry(&self) -> String {
        in_calendar(&self.next_retry_at())
    }

    /// An event whose destination is unavailable waits without having spent an attempt.
    fn waits(&self) -> String {
        format!("({} > 0 OR coalesce({} > now(), false))", self.attempts(), self.next_retry_at())
    }

    fn is_blocked(&self) -> String {
        format!("{} AND s.claim_token IS NULL", self.is_open())
    }

    fn blocked_key(&self) -> String {
        self.label(&self.spec.aggregate_id)
    }

    /// The column may not take NULL; now is as good.
    fn due_now(&self, column: &str) -> String {
        self.write_time(column, "now()")
    }

    fn finished(&self, column: &str) -> String {
        self.read_time(column)
    }

    fn unexplained(&self) -> Option<String> {
        Some(self.is_unexplained())
    }
}

/// See [`super::Store::backlog_statement`].
pub(super) fn backlog(c: &Columns, member: &Member) -> String {
    let ours = format!("(cardinality($1::text[]) = 0 OR {} = ANY($1))", c.field(&c.spec.stream));
    let order = c.order().join(", ");
    let blocked = if member.block_on_dead && member.order == Order::Key {
        format!(
            "count(*) FILTER (WHERE EXISTS (SELECT FROM {} t WHERE {} = o.key AND {} AND {ours} \
             AND ROW({order}) < o.place))",
            c.table,
            c.key(),
            c.is_dead_or_unknown(),
        )
    } else {
        "0::bigint".into()
    };
    format!(
        "SELECT count(*), {blocked}, count(*) FILTER (WHERE o.retry > now()), \
           least(extract(epoch FROM min(o.retry) FILTER (WHERE o.retry > now() AND isfinite(o.retry)) - now()), 3e9)::float8 \
         FROM (SELECT {} AS key, ROW({order}) AS place, {} AS retry FROM {} t {} WHERE {} AND {ours}) AS o",
        c.key(),
        c.next_retry_at(),
        c.table,
        join_side(c),
        c.is_open(),
    )
}

/// See [`super::Store::has_dead_statement`].
pub(super) fn has_dead(c: &Columns) -> String {
    format!(
        "SELECT EXISTS (SELECT FROM {} t WHERE {} AND (cardinality($1::text[]) = 0 OR {} = ANY($1)))",
        c.table,
        c.is_dead_or_unknown(),
        c.field(&c.spec.stream)
    )
}
