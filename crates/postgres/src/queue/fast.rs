//! The claim on a table of the canonical shape: one statement, flat however long the backlog is.
//!
//! Why it is shaped like this:
//! - A *lane* is a slot of the key, or a slot within a stream. Each lane is an ordered range of a partial
//!   index, read from its start; so neither rows of other relays' partitions, nor streams that nobody reads,
//!   nor events that wait for a retry are ever scanned.
//! - A claim changes no indexed column (`phase` stays 0, `next_retry_at` stays as it was), so it is a HOT
//!   update and the indexes do not grow by it.
//! - With order, nobody but the owner claims from a partition, so rows are not skipped when locked: if an
//!   operator, or a claim of our own whose connection broke, holds one, waiting for it keeps the order.
//! - An event behind one that waits is *held*: `next_retry_at` becomes infinity, which takes it out of the
//!   lanes in one go, however many there are. `unhold` brings them back.
//! - Identities go to the UPDATE as an array, since the planner, not knowing how few they are, might
//!   otherwise choose to read the whole table.

use airtight_core::{
    Order,
    group::Member,
    queue::SUSPECT_AFTER,
    table::{Count, Field, quote},
};

use crate::columns::{Columns, col};

/// A count that is larger by one still fits; one that did not would fail the claim of all rows.
const MOST: i32 = i32::MAX - 1;

/// How many slots a key may fall into; see the migration.
pub(super) use crate::slots::SLOTS;

/// The columns of a fast table, by short names.
struct Names {
    seq: String,
    part: String,
    phase_open: String,
    retry: String,
    token: String,
    locked: String,
    lost: String,
    attempts: String,
    key: String,
    stream: String,
    pending: String,
    processing: String,
}

impl Names {
    fn new(c: &Columns) -> Self {
        let column = |name: &Option<String>| name.as_ref().map(|name| col(name)).unwrap_or_default();
        let field = |field: &Field| match field {
            Field::Column(name) => col(name),
            Field::Constant(_) | Field::FirstOf(_) => c.field(field),
        };
        let attempts = match &c.spec.count {
            Some(Count::Attempts(name) | Count::Retries(name)) => col(name),
            None => String::new(),
        };
        let processing = c.status.processing.as_ref().map_or("false".into(), |role| c.is(role));
        Self {
            seq: c.identity(),
            part: column(&c.spec.partition),
            phase_open: c.is_open(),
            retry: column(&c.spec.next_retry_at),
            token: column(&c.spec.claim_token),
            locked: column(&c.spec.locked_until),
            lost: column(&c.spec.lost_leases),
            attempts,
            key: field(&c.spec.aggregate_id),
            stream: field(&c.spec.stream),
            pending: format!("({} OR {})", c.is(&c.status.new), c.is(&c.status.retrying)),
            processing,
        }
    }

    /// Pending, or claimed by nobody who still counts.
    fn takeable(&self, order: Order) -> String {
        let void = match order {
            Order::None => format!("({0} IS NULL OR {0} < now())", self.locked),
            Order::Key | Order::Total => format!("({0} IS NULL OR {0} <> ALL($7))", self.token),
        };
        format!("({} OR ({} AND {void}))", self.pending, self.processing)
    }
}

/// The claim. Parameters: token, events, bytes, lease in seconds, relay, slots, tokens, streams, events per
/// lane, largest payload.
pub(super) fn claim(c: &Columns, member: &Member, alone: bool) -> String {
    let n = Names::new(c);
    let order = member.order;
    let takeable = n.takeable(order);
    let Names { seq, part, phase_open, retry, lost, key, stream, processing, .. } = &n;
    let table = &c.table;

    let by_stream = !member.streams.is_empty();
    let (lanes, in_lane) = if by_stream {
        (
            "unnest($6::smallint[]) AS lane(slot) CROSS JOIN unnest($8::text[]) AS topic(name)",
            format!("{part} = lane.slot AND {stream} = topic.name"),
        )
    } else {
        ("unnest($6::smallint[]) AS lane(slot)", format!("{part} = lane.slot"))
    };
    let lock = if order == Order::None { "FOR UPDATE OF t SKIP LOCKED" } else { "" };
    let columns = format!(
        "{seq} AS seq, {part} AS slot, {stream} AS stream, {key} AS key, {processing} AS takeover, {lost} AS lost, \
         {} AS size",
        c.stored_size()
    );
    let read = |due: &str, sort: &str| {
        format!(
            "SELECT row.* FROM me CROSS JOIN {lanes} CROSS JOIN LATERAL (\
             SELECT {columns}, {retry} IS NOT NULL AS waited FROM {table} t \
             WHERE {in_lane} AND {phase_open} AND {due} AND {takeable} ORDER BY {sort} LIMIT $9 {lock}) AS row"
        )
    };
    let fresh = read(&format!("{retry} IS NULL"), seq);
    let due = read(&format!("{retry} IS NOT NULL AND {retry} <= now()"), &format!("{retry}, {seq}"));

    // Several streams of one slot are cut at the same place, or a key that is in two of them could be
    // claimed out of order.
    let cut = if order == Order::Key && member.streams.len() > 1 {
        "WHERE seq <= coalesce((SELECT min(lane.last) FROM (SELECT max(f.seq) AS last FROM fresh f \
         WHERE f.slot = found.slot GROUP BY f.stream HAVING count(*) >= $9) AS lane), seq)"
    } else {
        ""
    };
    let suspect = format!("lost + takeover::int >= {SUSPECT_AFTER}");
    let found = format!("(SELECT * FROM fresh UNION ALL SELECT * FROM due) AS found {cut}");
    let candidates = if alone {
        alone_candidate(member, c, &n, &found)
    } else {
        format!("SELECT *, {suspect} AS suspect FROM {found} ORDER BY seq LIMIT $2")
    };
    let (blocked, free) = if alone {
        ("SELECT seq FROM candidate WHERE false".into(), "true".into())
    } else {
        blocking(member, c, &n)
    };

    let returned = c.event_columns("$10");
    let pending_word = airtight_core::table::literal(&c.status.retrying.word);
    let status = bare(&c.status.column);
    let set_claim = claim_assignments(c, &n);
    let back = format!(
        "{status} = {pending_word}, {token} = NULL, {locked} = NULL, \
         {attempts} = greatest({attempts_of} - ({processing})::int, 0), {lost_col} = {lost} + ({processing})::int",
        token = bare_of(&n.token),
        locked = bare_of(&n.locked),
        attempts = bare_of(&n.attempts),
        attempts_of = n.attempts,
        lost_col = bare_of(lost),
    );
    let retry_col = bare_of(retry);
    format!(
        "WITH me AS (SELECT r.id FROM {relay} r WHERE r.id = $5 AND $7::uuid[] IS NOT NULL AND $8::text[] IS NOT NULL \
           FOR KEY SHARE), \
         fresh AS MATERIALIZED ({fresh}), \
         due AS MATERIALIZED ({due}), \
         candidate AS MATERIALIZED ({candidates}), \
         blocked AS MATERIALIZED ({blocked}), \
         chosen AS (SELECT seq, sum(size) OVER (ORDER BY seq) - size AS before FROM candidate x \
           WHERE ({may_suspect}) AND seq NOT IN (SELECT b.seq FROM blocked b) AND {free}), \
         claimed AS (UPDATE {table} t SET {set_claim} \
           WHERE {seq} = ANY(ARRAY(SELECT seq FROM chosen WHERE before < $3)) AND {phase_open} AND {takeable} \
           RETURNING {seq} AS row_id, {part} AS slot, {attempts} AS attempt, {lost} AS lost, \
             {retry} IS NOT NULL AS waited, {returned}), \
         held AS (UPDATE {table} t SET {retry_col} = 'infinity', {back} \
           WHERE {seq} = ANY(ARRAY(SELECT seq FROM blocked)) AND {phase_open} AND {takeable} RETURNING 1), \
         suspected AS (UPDATE {table} t SET {retry_col} = coalesce({retry}, now()), {back} \
           WHERE {seq} = ANY(ARRAY(SELECT seq FROM candidate WHERE suspect AND takeover AND NOT $11)) \
           AND {phase_open} AND {takeable}) \
         SELECT EXISTS (SELECT FROM me) AS alive, EXISTS (SELECT FROM held) AS held, \
           EXISTS (SELECT FROM candidate WHERE suspect AND seq NOT IN (SELECT b.seq FROM blocked b)) AS suspects, \
           claimed.* FROM (SELECT 1) AS one LEFT JOIN claimed ON true ORDER BY claimed.row_id",
        relay = c.relay,
        may_suspect = if alone { "$11" } else { "NOT $11 AND NOT suspect" },
        attempts = n.attempts,
    )
}

/// What a claim writes. A takeover is the same attempt, and one more lost lease.
fn claim_assignments(c: &Columns, n: &Names) -> String {
    let word = c.status.processing.as_ref().map(|role| role.word.as_str()).unwrap_or_default();
    let mut set = vec![
        format!("{} = {}", bare(&c.status.column), airtight_core::table::literal(word)),
        format!("{} = $1", bare_of(&n.token)),
        format!("{} = now() + make_interval(secs => $4)", bare_of(&n.locked)),
        format!("{} = least({}, {MOST}) + ({})::int", bare_of(&n.lost), n.lost, n.processing),
    ];
    if matches!(c.spec.count, Some(Count::Attempts(_))) {
        set.push(format!(
            "{} = least({}, {MOST}) + (NOT {})::int",
            bare_of(&n.attempts),
            n.attempts,
            n.processing
        ));
    }
    set.extend(c.spec.last_attempt_at.iter().map(|column| format!("{} = now()", bare(column))));
    set.extend(c.spec.updated_at.iter().map(|column| format!("{} = now()", bare(column))));
    set.join(", ")
}

/// (candidates to hold back, condition on the others), by order.
fn blocking(member: &Member, c: &Columns, n: &Names) -> (String, String) {
    let Names { seq, phase_open, retry, lost, key, .. } = n;
    let table = &c.table;
    let dead = c.is_dead_or_unknown();
    // Another pipeline's streams are its own business, even where they share a key with ours.
    let streams = stream_filter(member, n, "$8");
    match member.order {
        Order::None => ("SELECT seq FROM candidate WHERE false".into(), "true".into()),
        Order::Key => {
            // Something earlier of the key waits, and is not being claimed in this very statement.
            let mut blocked = format!(
                "SELECT x.seq FROM candidate x WHERE EXISTS (SELECT FROM {table} t WHERE {key} = x.key AND {phase_open} \
                 AND {retry} IS NOT NULL AND {seq} < x.seq{streams} \
                 AND {seq} NOT IN (SELECT d.seq FROM candidate d WHERE d.waited AND NOT d.suspect))"
            );
            if member.block_on_dead {
                blocked.push_str(&format!(
                    " OR EXISTS (SELECT FROM {table} t WHERE {key} = x.key AND {dead} AND {seq} < x.seq{streams})"
                ));
            }
            let free =
                "NOT EXISTS (SELECT FROM candidate s WHERE s.suspect AND s.key = x.key AND s.seq < x.seq)";
            (blocked, free.into())
        }
        Order::Total => {
            let mut barriers = format!(
                "SELECT min({seq}) AS seq FROM {table} t WHERE {phase_open} AND {retry} IS NOT NULL \
                 AND ({retry} > now() OR {lost} >= {SUSPECT_AFTER}){streams} \
                 UNION ALL SELECT min(s.seq) FROM candidate s WHERE s.suspect"
            );
            if member.block_on_dead {
                barriers
                    .push_str(&format!(" UNION ALL SELECT min({seq}) FROM {table} t WHERE {dead}{streams}"));
            }
            let free = format!("x.seq < coalesce((SELECT min(b.seq) FROM ({barriers}) AS b), x.seq + 1)");
            ("SELECT seq FROM candidate WHERE false".into(), free)
        }
    }
}

/// One suspect, lowest first, with nothing before it that its order puts first. It may be among the fresh ones:
/// one that was held has no retry time once it is freed.
fn alone_candidate(member: &Member, c: &Columns, n: &Names, found: &str) -> String {
    let Names { seq, phase_open, retry, key, .. } = n;
    let streams = stream_filter(member, n, "$8");
    let first = match member.order {
        Order::None => "true".into(),
        Order::Key => format!(
            "NOT EXISTS (SELECT FROM fresh f WHERE f.key = d.key AND f.seq < d.seq) AND NOT EXISTS \
             (SELECT FROM {} t WHERE {key} = d.key AND {phase_open} AND {retry} IS NOT NULL AND {seq} < d.seq{streams})",
            c.table
        ),
        Order::Total => format!(
            "NOT EXISTS (SELECT FROM fresh f WHERE f.seq < d.seq) AND NOT EXISTS \
             (SELECT FROM {} t WHERE {phase_open} AND {retry} IS NOT NULL AND {seq} < d.seq{streams})",
            c.table
        ),
    };
    format!(
        "SELECT d.*, true AS suspect FROM (SELECT * FROM {found}) AS d \
         WHERE d.lost >= {SUSPECT_AFTER} AND {first} ORDER BY d.seq LIMIT 1"
    )
}

/// ` AND stream in (…)`, or nothing when all streams are meant.
fn stream_filter(member: &Member, n: &Names, parameter: &str) -> String {
    if member.streams.is_empty() {
        String::new()
    } else {
        format!(" AND {} = ANY({parameter}::text[])", n.stream)
    }
}

/// Keys with held events that have nothing before them any more, and their slots. Parameters: slots, how many,
/// streams.
///
/// The lowest held row of a key decides: if nothing else waits before it, what it was held behind is gone. The
/// recursive part steps from key to key along the index of each slot, so its cost is the number of keys with
/// something held, not that of the events, nor of the keys that merely wait.
pub(super) fn freeable(c: &Columns, member: &Member) -> String {
    let n = Names::new(c);
    let Names { seq, part, phase_open, retry, key, .. } = &n;
    let table = &c.table;
    let streams = stream_filter(member, &n, "$3");
    let held = format!("{phase_open} AND {retry} = 'infinity'{streams}");
    let dead = if member.block_on_dead {
        format!(
            " AND NOT EXISTS (SELECT FROM {table} t WHERE {key} = w.key AND {} AND {seq} < w.seq{streams})",
            c.is_dead_or_unknown()
        )
    } else {
        String::new()
    };
    let first = |after: &str| {
        format!(
            "SELECT {part} AS slot, {key} AS key, {seq} AS seq FROM {table} t WHERE {held} AND {after} \
             ORDER BY {key}, {seq} LIMIT 1"
        )
    };
    format!(
        "WITH RECURSIVE w AS (\
           SELECT step.* FROM unnest($1::smallint[]) AS lane(slot) CROSS JOIN LATERAL ({first}) AS step \
           UNION ALL SELECT step.* FROM w CROSS JOIN LATERAL ({next}) AS step) \
         SELECT w.slot, w.key FROM w WHERE $3::text[] IS NOT NULL \
           AND NOT EXISTS (SELECT FROM {table} t WHERE {key} = w.key AND {phase_open} AND {retry} IS NOT NULL \
             AND {seq} < w.seq{streams}){dead} LIMIT $2",
        first = first(&format!("{part} = lane.slot")),
        next = first(&format!("{part} = w.slot AND {key} > w.key")),
    )
}

/// Frees held events of these keys, the first ones of each. Parameters: slots, keys, how many, streams.
///
/// A statement of its own: what the one above finds is nothing most of the time, and unknown to the planner,
/// which for the two in one prepared for millions. If a key waits again meanwhile, the claim holds these back
/// once more.
pub(super) fn unhold(c: &Columns, member: &Member) -> String {
    let n = Names::new(c);
    let Names { seq, part, phase_open, retry, key, .. } = &n;
    let table = &c.table;
    let streams = stream_filter(member, &n, "$4");
    let held = format!("{phase_open} AND {retry} = 'infinity'{streams}");
    format!(
        "WITH row AS MATERIALIZED (SELECT held.seq FROM unnest($1::smallint[], $2::text[]) AS free(slot, key) \
           CROSS JOIN LATERAL (SELECT {seq} AS seq FROM {table} t \
             WHERE {part} = free.slot AND {key} = free.key AND {held} ORDER BY {seq} LIMIT $3) AS held \
           WHERE $4::text[] IS NOT NULL ORDER BY held.seq LIMIT $3) \
         UPDATE {table} t SET {retry_col} = NULL WHERE {seq} = ANY(ARRAY(SELECT seq FROM row)) AND {held}",
        retry_col = bare_of(retry),
    )
}

/// Frees everything that is held, for an order that holds nothing. Parameter: streams.
pub(super) fn unhold_all(c: &Columns, member: &Member) -> String {
    let n = Names::new(c);
    format!(
        "UPDATE {} t SET {} = NULL WHERE {} AND {} = 'infinity' AND $1::text[] IS NOT NULL{}",
        c.table,
        bare_of(&n.retry),
        n.phase_open,
        n.retry,
        stream_filter(member, &n, "$1"),
    )
}

fn bare(column: &str) -> String {
    quote(column)
}

/// `t."column"` without its `t.`, as the left side of SET wants it.
fn bare_of(qualified: &str) -> String {
    qualified.trim_start_matches("t.").to_owned()
}
