//! The operator's side of a queue: counts, lists, retries, retention. Every statement is bounded.

mod prune;
mod report;

use airtight_core::{
    Code, Error, NewEvent, Published, Result,
    admin::{
        Acted, Admin, BlockedKey, Detail, EventRow, Filter, Finding, Prune, Removed, Status, StreamStatus,
    },
    event::MAX_PAYLOAD_BYTES,
    state::State,
    table::{Count, literal},
};
use async_trait::async_trait;
use sqlx::{AssertSqlSafe, Postgres, QueryBuilder, Row, postgres::PgRow};
use uuid::Uuid;

pub(crate) use self::report::{away_row, relays};
use self::report::{blocked_keys, done_counts, open_counts, unexplained_counts, unread_streams};
use crate::{
    PgOutbox,
    columns::{Assignments, Columns, EventColumns, col},
    decode,
    error::doing,
    fits,
    log::{admin as log, parked},
    outbox::Conn,
    queue::{self, QueueTable},
};

/// How many rows one statement of retention, bulk retry or bulk discard touches.
const CHUNK: i64 = 5_000;

/// Past this, done events are not counted: a dashboard must not scan millions of rows.
const DONE_CAP: i64 = 1_000_000;

#[async_trait]
impl Admin for PgOutbox {
    async fn migrate(&self) -> Result<Vec<String>> {
        self.apply_migrations().await
    }

    async fn check(&self) -> Result<Vec<Finding>> {
        if self.is_log() {
            return log::findings(self).await;
        }
        let mut conn = self.acquire().await?;
        let mut findings = self.missing(&mut conn).await?;
        if findings.iter().any(|finding| finding.fatal) {
            return Ok(findings);
        }
        let columns = match queue::load(self, &mut conn).await {
            Ok(columns) => columns,
            Err(error) => return Ok(vec![error.into()]),
        };
        // There may be one connection only.
        conn.commit().await?;
        findings.extend(fits::findings(self, &columns, Some(&columns.status)).await?);
        if findings.iter().any(|finding| finding.fatal) {
            return Ok(findings);
        }
        findings.extend(fits::unexplained(self, &*columns).await?);
        let mut conn = self.acquire().await?;
        let mut note = |message: String| findings.push(Finding::note(message));
        if columns.spec.seq.is_none() {
            note(format!(
                "{} has no ascending column: events of one transaction are delivered in no particular order",
                columns.outbox
            ));
        }
        for stream in unread_streams(self, &mut conn, &*columns).await? {
            note(format!("stream `{stream}` has events waiting, and no relay reads it right now"));
        }
        let settings = sqlx::query("SELECT current_setting('transaction_read_only'), pg_is_in_recovery()")
            .persistent(!self.pooled)
            .fetch_one(conn.get())
            .await
            .map_err(doing("reading settings"))?;
        let standby: bool = settings.try_get(1).map_err(doing("reading settings"))?;
        conn.commit().await?;
        if standby {
            findings.push(Finding::fatal("this server is a standby: claims need the primary"));
        }
        Ok(findings)
    }

    async fn publish(&self, events: &[NewEvent]) -> Result<Vec<Published>> {
        let mut conn = self.begin().await?;
        let failed = doing("publishing");
        let raw = conn.get().raw().map_err(&failed)?;
        let published = self.watchdog.wait(self.publish_many(raw, events)).await.map_err(failed)??;
        conn.commit().await?;
        Ok(published)
    }

    async fn status(&self) -> Result<Status> {
        if self.is_log() {
            return log::status(self).await;
        }
        let mut conn = self.acquire().await?;
        let c = queue::load(self, &mut conn).await?;
        let mut streams = open_counts(self, &mut conn, &*c).await?;
        let done = done_counts(self, &mut conn, &*c).await?.into_iter();
        let unexplained = unexplained_counts(self, &mut conn, &*c).await?.into_iter();
        let rest = done.map(|(stream, done)| StreamStatus { stream, done, ..StreamStatus::default() });
        let rest = rest.chain(unexplained.map(|(stream, unexplained)| StreamStatus {
            stream,
            unexplained,
            ..StreamStatus::default()
        }));
        for more in rest {
            match streams.iter_mut().find(|status| status.stream == more.stream) {
                Some(status) => {
                    status.done += more.done;
                    status.unexplained += more.unexplained;
                }
                None => streams.push(more),
            }
        }
        streams.sort_by(|left, right| left.stream.cmp(&right.stream));
        let relays = relays(self, &mut conn, &c).await?;
        let blocked_keys = blocked_keys(self, &mut conn, &*c, 10_000).await?.len() as u64;
        let mut away = report::away(self, &mut conn, &*c).await?;
        away.extend(parked::away(self, &mut conn, &c).await?);
        conn.commit().await?;
        let slots = self.readers().await?;
        let consumers = Vec::new();
        Ok(Status { outbox: c.outbox.clone(), streams, relays, blocked_keys, consumers, slots, away })
    }

    async fn list(&self, filter: &Filter) -> Result<Vec<EventRow>> {
        if self.is_log() {
            return log::list(self, filter).await;
        }
        let mut conn = self.acquire().await?;
        let c = queue::load(self, &mut conn).await?;
        let mut query = QueryBuilder::<Postgres>::new(format!(
            "SELECT {} FROM {} t {} WHERE true",
            list_columns(&*c),
            c.table,
            c.side()
        ));
        push_filter(&mut query, &*c, filter);
        let direction = if filter.newest_first { "DESC" } else { "ASC" };
        let order: Vec<String> = c.order().iter().map(|column| format!("{column} {direction}")).collect();
        query.push(format!(" ORDER BY {} LIMIT ", order.join(", ")));
        query.push_bind(i64::try_from(if filter.limit == 0 { 50 } else { filter.limit }).unwrap_or(i64::MAX));
        let rows = query
            .build()
            .persistent(!self.pooled)
            .fetch_all(conn.get())
            .await
            .map_err(doing("listing events"))?;
        conn.commit().await?;
        rows.iter().map(list_row).collect()
    }

    async fn show(&self, id: &str) -> Result<Option<Detail>> {
        if self.is_log() {
            return log::show(self, id).await;
        }
        let mut conn = self.acquire().await?;
        let c = queue::load(self, &mut conn).await?;
        let Some(matches) = matching(self, &mut conn, &c, id).await? else { return Ok(None) };
        let sql = format!(
            "SELECT {}, {} FROM {} t {} WHERE {matches} LIMIT 1",
            list_columns(&*c),
            c.event_columns(&MAX_PAYLOAD_BYTES.to_string()),
            c.table,
            c.side()
        );
        let row = sqlx::query(AssertSqlSafe(sql))
            .persistent(!self.pooled)
            .bind(id)
            .fetch_optional(conn.get())
            .await
            .map_err(doing("reading the event"))?;
        conn.commit().await?;
        row.map(|row| {
            let event = decode::event(&row, &c.spec, MAX_PAYLOAD_BYTES).map_err(|bad| bad.error.to_string());
            Ok(Detail { row: list_row(&row)?, event })
        })
        .transpose()
    }

    async fn retry(&self, id: &str) -> Result<Acted> {
        if self.is_log() {
            return log::act_on(self, id, false).await;
        }
        self.act_on(id, retry_statement).await
    }

    async fn discard(&self, id: &str) -> Result<Acted> {
        if self.is_log() {
            return log::act_on(self, id, true).await;
        }
        self.act_on(id, discard_statement).await
    }

    async fn retry_dead(&self, filter: &Filter) -> Result<u64> {
        if self.is_log() {
            return log::act_on_dead(self, filter, false).await;
        }
        self.act_on_dead(filter, retry_statement).await
    }

    async fn discard_dead(&self, filter: &Filter) -> Result<u64> {
        if self.is_log() {
            return log::act_on_dead(self, filter, true).await;
        }
        self.act_on_dead(filter, discard_statement).await
    }

    async fn prune(&self, what: Prune, progress: &(dyn Fn(u64) + Sync)) -> Result<Removed> {
        // A log knows no done events; its retention is `LogAdmin::prune_log`.
        if self.is_log() {
            return Ok(Removed::default());
        }
        prune::prune(self, what, progress).await
    }

    async fn blocked(&self, limit: usize) -> Result<Vec<BlockedKey>> {
        if self.is_log() {
            return log::blocked(self, limit).await;
        }
        let mut conn = self.acquire().await?;
        let c = queue::load(self, &mut conn).await?;
        let keys = blocked_keys(self, &mut conn, &*c, i64::try_from(limit).unwrap_or(i64::MAX)).await?;
        conn.commit().await?;
        Ok(keys)
    }
}

impl PgOutbox {
    /// Acts on one event if its state allows it.
    async fn act_on(&self, id: &str, statement: fn(&dyn QueueTable, &str) -> String) -> Result<Acted> {
        let mut conn = self.begin().await?;
        let c = queue::load(self, &mut conn).await?;
        let Some(matches) = matching(self, &mut conn, &c, id).await? else { return Ok(Acted::NotFound) };
        let target = format!(
            "SELECT {} AS identity, {} AS state FROM {} t {} WHERE {matches} LIMIT 1 FOR UPDATE OF t",
            c.identity(),
            c.state(),
            c.table,
            c.side()
        );
        // Twice: the first waits for a claim or a settle under way, but sees the side table as it was before;
        // the second, with the row locked, sees it as it is.
        let mut state: Option<Option<String>> = None;
        for _ in 0..2 {
            state = sqlx::query_scalar(AssertSqlSafe(format!("SELECT state FROM ({target}) AS target")))
                .persistent(!self.pooled)
                .bind(id)
                .fetch_optional(conn.get())
                .await
                .map_err(doing("reading the event"))?;
        }
        let Some(state) = state else { return Ok(Acted::NotFound) };
        // An event with an unknown status word waits for a person, like a dead one, and so does an event without a word.
        let state = state.and_then(|word| State::parse(&word)).unwrap_or(State::Dead);
        if !state.can_retry() {
            return Ok(Acted::Refused(state));
        }
        sqlx::query(AssertSqlSafe(statement(&*c, &target)))
            .persistent(!self.pooled)
            .bind(id)
            .execute(conn.get())
            .await
            .map_err(doing("changing the event"))?;
        conn.commit().await?;
        Ok(Acted::Yes)
    }

    /// Acts on all dead events of the filter, in chunks.
    async fn act_on_dead(
        &self,
        filter: &Filter,
        statement: fn(&dyn QueueTable, &str) -> String,
    ) -> Result<u64> {
        let filter = Filter { states: vec![State::Dead], limit: 0, ..filter.clone() };
        let mut total = 0;
        loop {
            let mut conn = self.acquire().await?;
            let c = queue::load(self, &mut conn).await?;
            let mut target = QueryBuilder::<Postgres>::new(format!(
                "SELECT {} AS identity FROM {} t {} WHERE true",
                c.identity(),
                c.table,
                c.side()
            ));
            push_filter(&mut target, &*c, &filter);
            target.push(format!(
                " ORDER BY {} LIMIT {CHUNK} FOR UPDATE OF t SKIP LOCKED",
                c.order().join(", ")
            ));
            // The same parameters, in a statement around it.
            let sql = statement(&*c, target.sql().as_str());
            let mut query = sqlx::query(AssertSqlSafe(sql)).persistent(!self.pooled);
            query = bind_filter(query, &c, &filter);
            let done =
                query.execute(conn.get()).await.map_err(doing("changing dead events"))?.rows_affected();
            conn.commit().await?;
            total += done;
            if done == 0 {
                return Ok(total);
            }
        }
    }
}

/// Makes the target due now, as if it had never been tried.
fn retry_statement(c: &dyn QueueTable, target: &str) -> String {
    let spec = &c.spec;
    let mut set = Assignments::default();
    set.set(&c.status.column, literal(&c.status.new.word));
    if let Some(Count::Attempts(column) | Count::Retries(column)) = &spec.count {
        set.set(column, 0);
    }
    if let Some(column) = &spec.lost_leases {
        set.set(column, 0);
    }
    if let Some(column) = &spec.next_retry_at {
        set.set(column, c.due_now(column));
    }
    for column in [&spec.claim_token, &spec.locked_until, &spec.finished_at].into_iter().flatten() {
        set.set(column, "NULL");
    }
    format!(
        "WITH {} UPDATE {} t SET {set} FROM target WHERE {} = target.identity",
        with_target(c, target),
        c.table,
        c.identity()
    )
}

fn discard_statement(c: &dyn QueueTable, target: &str) -> String {
    format!(
        "WITH {} DELETE FROM {} t USING target WHERE {} = target.identity",
        with_target(c, target),
        c.table,
        c.identity()
    )
}

/// The target, and what the side table has of it, which is removed.
fn with_target(c: &dyn QueueTable, target: &str) -> String {
    match c.forget_side() {
        Some(forget) => format!("target AS ({target}), side AS ({forget})"),
        None => format!("target AS ({target})"),
    }
}

/// The condition that finds an event by what an operator typed; none if there is no such event.
pub(crate) async fn matching(
    outbox: &PgOutbox,
    conn: &mut Conn,
    c: &EventColumns,
    id: &str,
) -> Result<Option<String>> {
    for condition in conditions(c, id) {
        let sql =
            format!("SELECT count(*) FROM (SELECT FROM {} t WHERE {condition} LIMIT 2) AS found", c.table);
        let found: i64 = sqlx::query_scalar(AssertSqlSafe(sql))
            .persistent(!outbox.pooled)
            .bind(id)
            .fetch_one(conn.get())
            .await
            .map_err(doing("looking for the event"))?;
        if found > 1 && c.spec.seq.is_none() && condition.contains("extract(") {
            return Err(Error::permanent(
                Code::AMBIGUOUS,
                format!("several events were written at {id}, which stands for their time"),
            )
            .with_remedy("give an id"));
        }
        if found > 0 {
            return Ok(Some(condition));
        }
    }
    Ok(None)
}

/// What may find it, the id first.
fn conditions(c: &EventColumns, id: &str) -> Vec<String> {
    let mut conditions = Vec::new();
    let number = id.parse::<i64>().is_ok();
    let column = &c.spec.id;
    match c.type_of(column) {
        "uuid" if Uuid::parse_str(id).is_ok() => conditions.push(format!("{} = $1::text::uuid", col(column))),
        "bigint" | "integer" | "smallint" if number => {
            conditions.push(format!("{} = $1::text::bigint", col(column)));
        }
        "uuid" | "bigint" | "integer" | "smallint" => {}
        "text" | "character varying" | "bpchar" | "citext" => {
            conditions.push(format!("{} = $1::text", col(column)));
        }
        _ => conditions.push(format!("{}::text = $1::text", col(column))),
    }
    match &c.spec.seq {
        Some(seq) if number && seq != column => {
            conditions.push(format!("{} = $1::text::bigint", col(seq)));
        }
        // What lists show in its place, which no index has.
        None if number && c.spec.created_at.is_some() => {
            conditions.push(format!("{} = $1::text::bigint", c.seq()));
        }
        _ => {}
    }
    conditions
}

fn list_columns(c: &dyn QueueTable) -> String {
    let attempts = c.attempts();
    format!(
        "coalesce({}, 0) AS l_seq, {}::text AS l_id, {} AS l_stream, {} AS l_type, {} AS l_aggregate_type, {} AS l_aggregate_id, \
         coalesce({}, '') AS l_state, ({attempts})::int AS l_attempts, ({})::int AS l_lost, \
         {} AS l_retry, {} AS l_held, \
         {}::text AS l_code, {}::text AS l_message, {} AS l_created",
        c.seq(),
        col(&c.spec.id),
        c.label(&c.spec.stream),
        c.label(&c.spec.event_type),
        c.label(&c.spec.aggregate_type),
        c.label(&c.spec.aggregate_id),
        c.state(),
        c.lost_leases(),
        c.shown_retry(),
        c.is_held(),
        c.error_code(),
        c.error_message(),
        c.created_at(),
    )
}

pub(crate) fn list_row(row: &PgRow) -> Result<EventRow> {
    let number = |value: i32| u32::try_from(value).unwrap_or(0);
    // A list shows what is there, or one bad row would hide all others.
    let text = |column: &str| Ok::<String, Error>(decode::lossy(row, column)?.unwrap_or_default());
    Ok(EventRow {
        seq: decode::get(row, "l_seq")?,
        id: text("l_id")?,
        stream: text("l_stream")?,
        event_type: text("l_type")?,
        aggregate_type: text("l_aggregate_type")?,
        aggregate_id: text("l_aggregate_id")?,
        state: text("l_state")?,
        attempts: number(decode::get(row, "l_attempts")?),
        lost_leases: number(decode::get(row, "l_lost")?),
        next_retry_at: decode::get(row, "l_retry")?,
        held: decode::get(row, "l_held")?,
        error_code: decode::lossy(row, "l_code")?,
        error_message: decode::lossy(row, "l_message")?,
        created_at: decode::get(row, "l_created")?,
    })
}

/// ` AND …` for each part of the filter; parameters in the order of [`bind_filter`].
fn push_filter(query: &mut QueryBuilder<Postgres>, c: &dyn QueueTable, filter: &Filter) {
    let states: Vec<String> = filter.states.iter().map(|state| state.as_str().to_owned()).collect();
    if !states.is_empty() {
        query.push(format!(" AND {} = ANY(", c.state())).push_bind(states).push(")");
        let all = |wanted: &[State]| filter.states.iter().all(|state| wanted.contains(state));
        // The same again, in words that an index knows.
        if all(&[State::Dead, State::Unknown]) {
            query.push(format!(" AND {}", c.is_dead_or_unknown()));
        } else if all(&[State::Pending, State::Processing]) {
            query.push(format!(" AND {}", c.is_open()));
        }
    }
    let texts = [
        (&filter.stream, c.field(&c.spec.stream)),
        (&filter.event_type, c.field(&c.spec.event_type)),
        (&filter.aggregate_id, c.key()),
        (&filter.error_code, format!("{}::text", c.error_code())),
    ];
    for (value, column) in texts {
        if let Some(value) = value {
            query.push(format!(" AND {column} = ")).push_bind(value.clone());
        }
    }
    if let (Some(after), Some(seq)) = (filter.after_seq, &c.spec.seq) {
        query.push(format!(" AND {} > ", col(seq))).push_bind(after);
    }
}

type Query<'q> = sqlx::query::Query<'q, Postgres, sqlx::postgres::PgArguments>;

fn bind_filter<'q>(mut query: Query<'q>, c: &Columns, filter: &Filter) -> Query<'q> {
    if !filter.states.is_empty() {
        let states: Vec<String> = filter.states.iter().map(|state| state.as_str().to_owned()).collect();
        query = query.bind(states);
    }
    for value in
        [&filter.stream, &filter.event_type, &filter.aggregate_id, &filter.error_code].into_iter().flatten()
    {
        query = query.bind(value.clone());
    }
    match (filter.after_seq, &c.spec.seq) {
        (Some(after), Some(_)) => query.bind(after),
        _ => query,
    }
}
