//! The claim on a foreign table: leases are in the side table, and the claim requires no index of the foreign table.
//!
//! Exclusiveness comes from the side table's primary key. The relay that inserts or takes over the lease row has the event,
//! and the `ON CONFLICT … WHERE` of other relays refuses them, whatever their snapshots showed.

use airtight_core::{
    Order,
    group::Member,
    queue::SUSPECT_AFTER,
    table::{Count, literal},
};

use super::{join_side, lost_leases};
use crate::{
    columns::{Assignments, Columns, col},
    slots,
};

/// The claim. Parameters: token, events, bytes, lease in seconds, relay, partitions, tokens, streams, largest
/// payload.
pub(super) fn claim(c: &Columns, member: &Member, alone: bool) -> String {
    let table = &c.table;
    let side = join_side(c);
    let identity = c.identity();
    // A row without a key is in a partition, too: it is to be rejected, not overlooked.
    let key = c.label(&c.spec.aggregate_id);
    let retry = c.next_retry_at();
    let lost = lost_leases();
    let attempts = c.attempts();
    let order = c.order();
    let places: Vec<String> = (0..order.len()).map(|n| format!("o{n}")).collect();
    let place_columns: Vec<String> =
        order.iter().zip(&places).map(|(expression, name)| format!("{expression} AS {name}")).collect();
    let (order_by, place) = (order.join(", "), places.join(", "));
    let open = c.is_open();
    let streams = format!("(cardinality($8::text[]) = 0 OR {} = ANY($8))", c.field(&c.spec.stream));

    let slot = match member.order {
        Order::Key => slots::partition_of(&slots::slot_of(&key), member.partitions),
        Order::None | Order::Total => "0::smallint".into(),
    };
    let in_partition = match member.order {
        Order::None => "$6::smallint[] IS NOT NULL".into(),
        Order::Key | Order::Total => format!("{slot} = ANY($6::smallint[])"),
    };
    // Free, or held by a relay that no longer counts.
    let void = |row: &str| match member.order {
        Order::None => format!("({row}.claim_token IS NULL OR {row}.locked_until < now())"),
        Order::Key | Order::Total => {
            format!("({row}.claim_token IS NULL OR {row}.claim_token <> ALL($7::uuid[]))")
        }
    };
    let free = void("s");
    // A word for processing without a lease of ours: another program's claim, whose own lock is respected.
    let others = match (&c.spec.locked_until, &c.status.processing) {
        (Some(locked), Some(processing)) => format!(
            "AND NOT (s.claim_token IS NULL AND {} AND coalesce({} > now(), false))",
            c.is(processing),
            c.read_time(locked)
        ),
        _ => String::new(),
    };

    let suspect = format!("{lost} + (s.claim_token IS NOT NULL)::int >= {SUSPECT_AFTER}");
    let wanted = if alone { suspect.clone() } else { "true".into() };
    let blocked = blocked(c, member, alone, &places, &suspect, &free);
    let lock = if member.order == Order::None { "FOR UPDATE OF t SKIP LOCKED" } else { "FOR UPDATE OF t" };
    let no_suspect_before = match member.order {
        _ if alone => "true".to_owned(),
        Order::None => "NOT x.suspect".to_owned(),
        Order::Key => format!(
            "NOT x.suspect AND NOT EXISTS (SELECT FROM candidate y WHERE y.suspect AND y.key = x.key AND ({}) < ({}))",
            prefixed("y", &places),
            prefixed("x", &places)
        ),
        Order::Total => format!(
            "NOT x.suspect AND NOT EXISTS (SELECT FROM candidate y WHERE y.suspect AND ({}) < ({}))",
            prefixed("y", &places),
            prefixed("x", &places)
        ),
    };
    let moved = moved(c);
    let returned = c.event_columns("$9");
    // Where attempts are counted here, the row as it is now decides: between this claim's snapshot and its lock
    // another relay may have claimed the event and failed.
    let attempts_now = match &c.spec.count {
        Some(_) => "excluded.attempts".to_owned(),
        None => format!("{} + (s.claim_token IS NULL)::int", c.attempts()),
    };
    let attempt = match &c.spec.count {
        Some(Count::Retries(_)) => "candidate.attempts + 1",
        Some(Count::Attempts(_)) | None => "leased.attempts",
    };
    format!(
        "WITH me AS (SELECT r.id FROM {relay} r WHERE r.id = $5 AND $7::uuid[] IS NOT NULL FOR KEY SHARE), \
         {waiting} \
         candidate AS MATERIALIZED (SELECT {identity} AS identity, {identity}::text AS event, {key} AS key, \
             ({slot})::smallint AS slot, {attempts} AS attempts, {lost} AS lost, \
             s.claim_token IS NOT NULL AS takeover, {retry} IS NOT NULL AS waited, {suspect} AS suspect, \
             {size} AS size, {place_columns} \
           FROM me CROSS JOIN {table} t {side} \
           WHERE {open} AND {streams} AND {in_partition} AND ({retry} IS NULL OR {retry} <= now()) AND {free} {others} \
             AND {wanted} {blocked_filter} ORDER BY {order_by} LIMIT $2 {lock}), \
         chosen AS (SELECT x.* FROM (SELECT x.*, sum(x.size) OVER (ORDER BY {place}) - x.size AS before \
           FROM candidate x WHERE {no_suspect_before}) AS x WHERE x.before < $3), \
         leased AS (INSERT INTO {side_table} AS s (outbox, event, claim_token, locked_until, attempts, lost_leases) \
           SELECT {outbox}, event, $1::uuid, now() + make_interval(secs => $4), attempts + (NOT takeover)::int, \
             lost + takeover::int FROM chosen \
           ON CONFLICT (outbox, event) DO UPDATE SET claim_token = excluded.claim_token, \
             locked_until = excluded.locked_until, attempts = {attempts_now}, \
             lost_leases = s.lost_leases + (s.claim_token IS NOT NULL)::int \
           WHERE {free} AND (s.next_retry_at IS NULL OR s.next_retry_at <= now()) RETURNING s.event, s.attempts, s.lost_leases) \
         {suspected} {moved} \
         SELECT EXISTS (SELECT FROM me) AS alive, false AS held, \
           EXISTS (SELECT FROM candidate WHERE suspect) AS suspects, got.* \
         FROM (SELECT 1) AS one LEFT JOIN (SELECT candidate.event AS row_id, candidate.slot, \
             ({attempt})::int AS attempt, leased.lost_leases AS lost, candidate.waited, {place_names}, {returned} \
           FROM leased JOIN candidate USING (event) JOIN {table} t ON {identity} = candidate.identity) AS got ON true \
         ORDER BY {place}",
        relay = c.relay,
        suspected = if alone { String::new() } else { suspected(c, &free) },
        waiting = blocked.cte,
        blocked_filter = blocked.filter,
        size = c.stored_size(),
        place_columns = place_columns.join(", "),
        place_names = prefixed("candidate", &places),
        side_table = c.side,
        outbox = literal(&c.outbox),
    )
}

struct Blocked {
    /// What waits, first of each key, with a trailing comma.
    cte: String,
    /// ` AND nothing before it waits`.
    filter: String,
}

/// Keeps events out that stand behind one that waits. The filter comes before the claim's LIMIT, or a key
/// with many events behind a waiting one would leave no room for the others.
fn blocked(
    c: &Columns,
    member: &Member,
    alone: bool,
    places: &[String],
    suspect: &str,
    free: &str,
) -> Blocked {
    let group = match member.order {
        Order::None => return Blocked { cte: String::new(), filter: String::new() },
        Order::Key => c.label(&c.spec.aggregate_id),
        Order::Total => "''::text".to_owned(),
    };
    let retry = c.next_retry_at();
    // An event that is being delivered under a token of ours counts as waiting if it failed before: behind
    // it nothing may overtake. A suspect waits for its turn alone; when that has come, everything else before
    // it is in its way, for a claim of the usual kind to take first, but it itself is not.
    let suspects = format!("({suspect} AND {free})");
    let waits = if alone {
        format!("{} AND (NOT {suspects} OR coalesce({retry} > now(), false))", c.is_open())
    } else {
        format!(
            "{open} AND (coalesce({retry} > now(), false) OR (NOT {free} AND {failed_before}) OR {suspects})",
            open = c.is_open(),
            failed_before = match &c.spec.count {
                Some(Count::Retries(_)) => format!("{} > 0", c.attempts()),
                Some(Count::Attempts(_)) | None => format!("{} > 1", c.attempts()),
            },
        )
    };
    let dead = if member.block_on_dead { format!(" OR {}", c.is_dead_or_unknown()) } else { String::new() };
    let order = c.order();
    let order_by = order.join(", ");
    let place_columns: Vec<String> =
        order.iter().zip(places).map(|(expression, name)| format!("{expression} AS {name}")).collect();
    let cte = format!(
        "waiting AS MATERIALIZED (SELECT DISTINCT ON ({group}) {group} AS key, {columns} FROM {table} t {side} \
         WHERE ({waits}{dead}) AND (cardinality($8::text[]) = 0 OR {stream} = ANY($8)) ORDER BY {group}, {order_by}), ",
        columns = place_columns.join(", "),
        table = c.table,
        side = join_side(c),
        stream = c.field(&c.spec.stream),
    );
    let filter = format!(
        "AND NOT EXISTS (SELECT FROM waiting w WHERE w.key = {group} AND ({}) < ({order_by}))",
        prefixed("w", places)
    );
    Blocked { cte, filter }
}

/// What the claim writes into the table itself, so that its own readers see it.
fn moved(c: &Columns) -> String {
    let mut set = Assignments::default();
    if let Some(processing) = &c.status.processing {
        set.set(&c.status.column, literal(&processing.word));
    }
    if let Some(Count::Attempts(column)) = &c.spec.count {
        set.set(column, format!("least(leased.attempts, {})", c.most(column)));
    }
    if let Some(column) = &c.spec.claim_token {
        let cast = if c.is_uuid(column) { "" } else { "::text" };
        set.set(column, format!("$1::uuid{cast}"));
    }
    if let Some(column) = &c.spec.locked_until {
        set.set(column, c.write_time(column, "now() + make_interval(secs => $4)"));
    }
    for column in [&c.spec.last_attempt_at, &c.spec.updated_at].into_iter().flatten() {
        set.set(column, c.write_time(column, "now()"));
    }
    if set.is_empty() {
        return String::new();
    }
    format!(
        ", moved AS (UPDATE {} t SET {set} FROM leased WHERE {} = leased.event::{})",
        c.table,
        c.identity(),
        c.identity_type()
    )
}

/// Sets suspects aside for a claim with `alone`. Those that were claimed get their attempt back, in the table as well if it
/// counts attempts itself.
fn suspected(c: &Columns, free: &str) -> String {
    let side = format!(
        ", suspected AS (UPDATE {} s SET claim_token = NULL, locked_until = NULL, \
           attempts = greatest(s.attempts - 1, 0), lost_leases = s.lost_leases + 1 \
         FROM candidate x WHERE s.outbox = {} AND s.event = x.event AND x.suspect AND x.takeover AND {free})",
        c.side,
        literal(&c.outbox),
    );
    let Some(Count::Attempts(column)) = &c.spec.count else { return side };
    let mut set = Assignments::default();
    set.set(column, format!("greatest({}, 1) - 1", col(column)));
    format!(
        "{side}, refunded AS (UPDATE {} t SET {set} FROM candidate x \
         WHERE {} = x.identity AND x.suspect AND x.takeover)",
        c.table,
        c.identity(),
    )
}

fn prefixed(alias: &str, names: &[String]) -> String {
    names.iter().map(|name| format!("{alias}.{name}")).collect::<Vec<_>>().join(", ")
}
