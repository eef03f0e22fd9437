//! The operator's side of a log.

use std::{collections::BTreeMap, time::Duration};

use airtight_core::{
    Code, Error, Result,
    admin::{Acted, BlockedKey, Detail, EventRow, Filter, Finding, Status},
    event::MAX_PAYLOAD_BYTES,
    group::{GroupKind, GroupName},
    log::{
        Consumer, Instance, LogAdmin, Parked, ParkedFilter, PartitionOffset, Pruned, Retention, Seek,
        SeekOptions, SeekTo, open_publishers, unknown_consumer,
    },
    state::State,
    table::quote,
};
use async_trait::async_trait;
use sqlx::{AssertSqlSafe, Postgres, QueryBuilder, Row};

use super::{
    LogTable, consumers,
    parked::{self, Act},
    publishers, retention, seek, table_partitions, witness,
};
use crate::{
    PgOutbox,
    admin::{list_row, matching, relays},
    columns::{EventColumns, col, qualified},
    decode,
    error::doing,
    fits, groups,
    outbox::Conn,
};

/// What is stored about a consumer.
pub(super) struct ConsumerRow {
    pub(super) name: String,
    pub(super) partitions: u16,
    pub(super) streams: Vec<String>,
    paused: bool,
}

/// With `wal`, also those that follow the WAL and have no offset.
async fn known(
    outbox: &PgOutbox,
    conn: &mut Conn,
    table: &EventColumns,
    wal: bool,
) -> Result<Vec<ConsumerRow>> {
    let failed = doing("listing consumers");
    let sql = format!(
        "SELECT name, partitions, streams, paused FROM {} c WHERE outbox = $1 AND ($2 OR NOT EXISTS (SELECT FROM {} p \
         WHERE p.outbox = c.outbox AND p.grp = {})) ORDER BY name",
        outbox.own("consumer"),
        outbox.own("partition"),
        groups::stored(GroupKind::Cdc, "c.name")
    );
    let rows = sqlx::query(AssertSqlSafe(sql))
        .persistent(!outbox.pooled)
        .bind(&table.outbox)
        .bind(wal)
        .fetch_all(conn.get())
        .await
        .map_err(&failed)?;
    rows.iter()
        .map(|row| {
            let partitions: i16 = row.try_get("partitions").map_err(&failed)?;
            Ok(ConsumerRow {
                name: row.try_get("name").map_err(&failed)?,
                partitions: u16::try_from(partitions).unwrap_or(1),
                streams: row.try_get("streams").map_err(&failed)?,
                paused: row.try_get("paused").map_err(&failed)?,
            })
        })
        .collect()
}

/// The log's consumer of that name, or an error that names those there are.
pub(super) async fn require(
    outbox: &PgOutbox,
    conn: &mut Conn,
    table: &EventColumns,
    consumer: &str,
) -> Result<ConsumerRow> {
    find(outbox, conn, table, consumer, false).await
}

async fn find(
    outbox: &PgOutbox,
    conn: &mut Conn,
    table: &EventColumns,
    consumer: &str,
    wal: bool,
) -> Result<ConsumerRow> {
    let mut all = known(outbox, conn, table, wal).await?;
    match all.iter().position(|one| one.name == consumer) {
        Some(found) => Ok(all.swap_remove(found)),
        None => {
            let names: Vec<String> = all.into_iter().map(|one| one.name).collect();
            Err(unknown_consumer(consumer, &names))
        }
    }
}

#[async_trait]
impl LogAdmin for PgOutbox {
    async fn consumers(&self) -> Result<Vec<Consumer>> {
        let (mut conn, table) = self.log_table().await?;
        let consumers = consumers_of(self, &mut conn, &table).await?;
        conn.commit().await?;
        Ok(consumers)
    }

    async fn seek(&self, consumer: &str, to: SeekTo, options: SeekOptions) -> Result<Seek> {
        seek::seek(self, consumer, to, options).await
    }

    async fn pause(&self, consumer: &str, paused: bool) -> Result<()> {
        let (mut conn, table) = self.followed_table().await?;
        find(self, &mut conn, &table, consumer, true).await?;
        let sql = format!("UPDATE {} SET paused = $3 WHERE outbox = $1 AND name = $2", self.own("consumer"));
        sqlx::query(AssertSqlSafe(sql))
            .persistent(!self.pooled)
            .bind(&table.outbox)
            .bind(consumer)
            .bind(paused)
            .execute(conn.get())
            .await
            .map_err(doing("pausing the consumer"))?;
        conn.commit().await
    }

    async fn remove(&self, consumer: &str) -> Result<()> {
        let (conn, table) = self.log_table().await?;
        conn.commit().await?;
        let mut conn = self.begin().await?;
        crate::members::lock_group(self, &mut conn, &table.columns).await?;
        require(self, &mut conn, &table, consumer).await?;
        let group = GroupName::log(consumer);
        let sql = format!(
            "SELECT host FROM {} WHERE outbox = $1 AND grp = $2 AND expires_at > now() LIMIT 1",
            self.own("relay")
        );
        let live: Option<String> = sqlx::query_scalar(AssertSqlSafe(sql))
            .persistent(!self.pooled)
            .bind(&table.columns.outbox)
            .bind(group.stored())
            .fetch_optional(conn.get())
            .await
            .map_err(doing("looking for the consumer's relays"))?;
        if let Some(host) = live {
            return Err(Error::permanent(
                Code::IN_USE,
                format!("a relay on {host} works for consumer `{consumer}`: stop it first"),
            ));
        }
        let sql = format!(
            "WITH c AS (DELETE FROM {} WHERE outbox = $1 AND name = $2), p AS (DELETE FROM {} WHERE outbox = $1 AND consumer = $2), \
             r AS (DELETE FROM {} WHERE outbox = $1 AND grp = $3) DELETE FROM {} WHERE outbox = $1 AND grp = $3",
            self.own("consumer"),
            self.own("parked"),
            self.own("relay"),
            self.own("partition")
        );
        sqlx::query(AssertSqlSafe(sql))
            .persistent(!self.pooled)
            .bind(&table.columns.outbox)
            .bind(consumer)
            .bind(group.stored())
            .execute(conn.get())
            .await
            .map_err(doing("removing the consumer"))?;
        if let Some(offsets) = &table.columns.spec.log.offsets {
            let sql = format!(
                "DELETE FROM {} WHERE {} = $1",
                qualified(offsets.schema.as_deref(), &offsets.table),
                quote(&offsets.consumer)
            );
            sqlx::query(AssertSqlSafe(sql))
                .persistent(!self.pooled)
                .bind(consumer)
                .execute(conn.get())
                .await
                .map_err(doing("removing the consumer"))?;
        }
        conn.commit().await
    }

    async fn lag(&self, consumer: &str) -> Result<u64> {
        let (mut conn, table) = self.log_table().await?;
        require(self, &mut conn, &table, consumer).await?;
        let last = consumers::last_value(self, &mut conn, &table).await?;
        let offset = offset_of(self, &mut conn, &table, consumer).await?;
        conn.commit().await?;
        Ok(u64::try_from(last - offset).unwrap_or(0))
    }

    async fn parked(&self, filter: &ParkedFilter) -> Result<Vec<Parked>> {
        let (mut conn, table) = self.followed_table().await?;
        if let Some(consumer) = &filter.consumer {
            find(self, &mut conn, &table, consumer, true).await?;
        }
        let rows = parked::list(self, &mut conn, &table, filter).await?;
        conn.commit().await?;
        Ok(rows)
    }

    async fn show_parked(&self, consumer: &str, seq: i64) -> Result<Option<Detail>> {
        let (mut conn, table) = self.followed_table().await?;
        find(self, &mut conn, &table, consumer, true).await?;
        let detail = parked::show(self, &mut conn, &table, consumer, seq).await?;
        conn.commit().await?;
        Ok(detail)
    }

    async fn retry_parked(&self, filter: &ParkedFilter) -> Result<u64> {
        act(self, filter, Act::Retry).await
    }

    async fn discard_parked(&self, filter: &ParkedFilter) -> Result<u64> {
        act(self, filter, Act::Discard).await
    }

    async fn prune_log(&self, retention: Retention, progress: &(dyn Fn(u64) + Sync)) -> Result<Pruned> {
        retention::prune(self, retention, progress).await
    }

    async fn prunable(&self, retention: Retention) -> Result<Pruned> {
        retention::prunable(self, retention).await
    }

    async fn prune_inbox(&self, keep: Duration) -> Result<u64> {
        let inbox = self.inbox();
        let mut total = 0;
        loop {
            let mut conn = self.acquire().await?;
            let gone = inbox.prune_some(conn.get(), keep).await?;
            conn.commit().await?;
            total += gone;
            if gone == 0 {
                return Ok(total);
            }
        }
    }
}

impl PgOutbox {
    async fn log_table(&self) -> Result<(Conn, LogTable)> {
        let mut conn = self.acquire().await?;
        let table = LogTable::load(self, &mut conn).await?;
        Ok((conn, table))
    }

    /// For what is about consumers and not about the log: one that follows the WAL needs no log.
    async fn followed_table(&self) -> Result<(Conn, EventColumns)> {
        let mut conn = self.acquire().await?;
        let table = EventColumns::load(self, &mut conn).await?;
        Ok((conn, table))
    }
}

async fn act(outbox: &PgOutbox, filter: &ParkedFilter, act: Act) -> Result<u64> {
    let mut conn = outbox.begin().await?;
    let table = EventColumns::load(outbox, &mut conn).await?;
    if let Some(consumer) = &filter.consumer {
        find(outbox, &mut conn, &table, consumer, true).await?;
    }
    let acted = parked::act(outbox, &mut conn, &table, filter, act).await?;
    conn.commit().await?;
    Ok(acted)
}

async fn offset_of(outbox: &PgOutbox, conn: &mut Conn, table: &LogTable, consumer: &str) -> Result<i64> {
    if let Some(offsets) = &table.columns.spec.log.offsets {
        return consumers::foreign_offset(outbox, conn, offsets, consumer, None).await;
    }
    let sql = format!(
        "SELECT coalesce(min(last_seq), 0) FROM {} WHERE outbox = $1 AND grp = $2",
        outbox.own("partition")
    );
    sqlx::query_scalar(AssertSqlSafe(sql))
        .persistent(!outbox.pooled)
        .bind(&table.columns.outbox)
        .bind(GroupName::log(consumer).stored())
        .fetch_one(conn.get())
        .await
        .map_err(doing("reading offsets"))
}

/// Counting how far a consumer is behind stops here, and the difference of the sequences is told instead.
const LAG_CAP: i64 = 100_000;

async fn consumers_of(outbox: &PgOutbox, conn: &mut Conn, table: &LogTable) -> Result<Vec<Consumer>> {
    let failed = doing("reading consumers");
    let end = consumers::last_value(outbox, conn, table).await?;
    let (floor, _) = consumers::floor(outbox, conn, table).await?;
    let mut consumers: BTreeMap<String, Consumer> = BTreeMap::new();
    for one in known(outbox, conn, table, false).await? {
        let offset = offset_of(outbox, conn, table, &one.name).await?;
        let (lag_events, lag_seconds) = lag_of(outbox, conn, table, &one, offset, end).await?;
        let waits = lag_events > 0 && is_before_a_hole(outbox, conn, table, offset).await?;
        let waits_for = if waits { publishers::open(outbox, conn, table).await? } else { Vec::new() };
        let consumer = Consumer {
            partitions: one.partitions,
            paused: one.paused,
            offset,
            end,
            lag_events,
            lag_seconds,
            behind_retention: offset < floor,
            waits_for,
            name: one.name.clone(),
            ..Consumer::default()
        };
        consumers.insert(one.name, consumer);
    }
    let sql = format!(
        "SELECT {name} AS name, p.n, coalesce(p.last_seq, 0) AS last_seq, r.id::text AS owner FROM {} p \
         LEFT JOIN {} r ON r.id = p.owner AND r.expires_at > now() \
         WHERE p.outbox = $1 AND {is_log} ORDER BY p.n",
        outbox.own("partition"),
        outbox.own("relay"),
        name = groups::name_of("p.grp", GroupKind::Log),
        is_log = groups::is_kind("p.grp", GroupKind::Log),
    );
    for row in sqlx::query(AssertSqlSafe(sql))
        .persistent(!outbox.pooled)
        .bind(&table.columns.outbox)
        .fetch_all(conn.get())
        .await
        .map_err(&failed)?
    {
        let name: String = row.try_get("name").map_err(&failed)?;
        let n: i16 = row.try_get("n").map_err(&failed)?;
        if let Some(consumer) = consumers.get_mut(&name) {
            consumer.offsets.push(PartitionOffset {
                partition: u16::try_from(n).unwrap_or(0),
                offset: row.try_get("last_seq").map_err(&failed)?,
                owner: row.try_get("owner").map_err(&failed)?,
            });
        }
    }
    let sql = format!(
        "SELECT {name} AS name, r.id::text AS id, r.host, \
           (SELECT count(*) FROM {} p WHERE p.owner = r.id) AS partitions, \
           extract(epoch FROM r.expires_at - now())::float8 AS lease FROM {} r \
         WHERE r.outbox = $1 AND {is_log} AND r.expires_at > now() ORDER BY r.started_at, r.id",
        outbox.own("partition"),
        outbox.own("relay"),
        name = groups::name_of("r.grp", GroupKind::Log),
        is_log = groups::is_kind("r.grp", GroupKind::Log),
    );
    for row in sqlx::query(AssertSqlSafe(sql))
        .persistent(!outbox.pooled)
        .bind(&table.columns.outbox)
        .fetch_all(conn.get())
        .await
        .map_err(&failed)?
    {
        let name: String = row.try_get("name").map_err(&failed)?;
        if let Some(consumer) = consumers.get_mut(&name) {
            consumer.instances.push(Instance {
                id: row.try_get("id").map_err(&failed)?,
                host: row.try_get("host").map_err(&failed)?,
                partitions: row.try_get::<i64, _>("partitions").map_err(&failed)?.unsigned_abs(),
                lease_seconds: row.try_get("lease").map_err(&failed)?,
            });
        }
    }
    let sql = format!(
        "SELECT consumer, count(*) FILTER (WHERE state = 'waiting') AS retrying, count(*) FILTER (WHERE state = 'dead') AS dead, \
           count(*) FILTER (WHERE state = 'unknown') AS unknown FROM {} WHERE outbox = $1 GROUP BY consumer",
        outbox.own("parked")
    );
    for row in sqlx::query(AssertSqlSafe(sql))
        .persistent(!outbox.pooled)
        .bind(&table.columns.outbox)
        .fetch_all(conn.get())
        .await
        .map_err(&failed)?
    {
        let name: String = row.try_get("consumer").map_err(&failed)?;
        let count = |name: &str| row.try_get::<i64, _>(name).map(i64::unsigned_abs).map_err(&failed);
        if let Some(consumer) = consumers.get_mut(&name) {
            (consumer.retrying, consumer.dead, consumer.unknown) =
                (count("retrying")?, count("dead")?, count("unknown")?);
        }
    }
    Ok(consumers.into_values().collect())
}

/// Whether the next number is missing, though there are later ones.
async fn is_before_a_hole(outbox: &PgOutbox, conn: &mut Conn, table: &LogTable, offset: i64) -> Result<bool> {
    let sql =
        format!("SELECT NOT EXISTS (SELECT FROM {} t WHERE {} = $1 + 1)", table.columns.table, table.seq());
    sqlx::query_scalar(AssertSqlSafe(sql))
        .persistent(!outbox.pooled)
        .bind(offset)
        .fetch_one(conn.get())
        .await
        .map_err(doing("looking for a hole"))
}

/// How many events a consumer has before it, and how old the first of them is.
async fn lag_of(
    outbox: &PgOutbox,
    conn: &mut Conn,
    table: &LogTable,
    known: &ConsumerRow,
    offset: i64,
    end: i64,
) -> Result<(u64, f64)> {
    let c = &table.columns;
    let sql = format!(
        "WITH offsets AS (SELECT n, CASE WHEN {foreign} THEN $3 ELSE last_seq END AS last_seq FROM {partition} \
           WHERE outbox = $1 AND grp = $2), \
         ahead AS (SELECT {created} AS created FROM {table} t JOIN offsets o ON o.n = {part} WHERE {seq} > $3 \
           AND {seq} > o.last_seq AND (cardinality($4::text[]) = 0 OR {stream} = ANY($4)) LIMIT {LAG_CAP}) \
         SELECT count(*) AS events, greatest(extract(epoch FROM now() - min(created)), 0)::float8 AS seconds FROM ahead",
        foreign = c.spec.log.offsets.is_some(),
        partition = outbox.own("partition"),
        created = c.created_at(),
        table = c.table,
        part = table.partition(known.partitions),
        seq = table.seq(),
        stream = c.field(&c.spec.stream),
    );
    let failed = doing("measuring lag");
    let row = sqlx::query(AssertSqlSafe(sql))
        .persistent(!outbox.pooled)
        .bind(&c.outbox)
        .bind(GroupName::log(&known.name).stored())
        .bind(offset)
        .bind(&known.streams)
        .fetch_one(conn.get())
        .await
        .map_err(&failed)?;
    let counted: i64 = row.try_get("events").map_err(&failed)?;
    let seconds: Option<f64> = row.try_get("seconds").map_err(&failed)?;
    let events = if counted < LAG_CAP { counted } else { end - offset };
    Ok((u64::try_from(events).unwrap_or(0), seconds.unwrap_or(0.0)))
}

/// A table without a sequence cannot be a log, but it may be followed through the WAL.
fn is_no_log(error: &Error) -> bool {
    [Code::NO_SEQ, Code::NO_SEQUENCE, Code::BAD_SEQUENCE].iter().any(|code| error.is(code))
}

pub(crate) async fn status(outbox: &PgOutbox) -> Result<Status> {
    let (mut conn, table) = outbox.followed_table().await?;
    let consumers = match LogTable::load(outbox, &mut conn).await {
        Ok(log) => consumers_of(outbox, &mut conn, &log).await?,
        Err(error) if is_no_log(&error) => Vec::new(),
        Err(error) => return Err(error),
    };
    let relays = relays(outbox, &mut conn, &table).await?;
    let blocked_keys = parked::blocked(outbox, &mut conn, &table, 10_000).await?.len() as u64;
    let away = parked::away(outbox, &mut conn, &table).await?;
    conn.commit().await?;
    let slots = outbox.readers().await?;
    Ok(Status { outbox: table.outbox, streams: Vec::new(), relays, blocked_keys, consumers, slots, away })
}

pub(crate) async fn findings(outbox: &PgOutbox) -> Result<Vec<Finding>> {
    let mut conn = outbox.acquire().await?;
    let mut findings = outbox.missing(&mut conn).await?;
    if findings.iter().any(|finding| finding.fatal) {
        return Ok(findings);
    }
    let table = match LogTable::load(outbox, &mut conn).await {
        Ok(table) => table,
        Err(error) => {
            // There may be one connection only.
            conn.commit().await?;
            // Not meant to be a log, or followed in another way.
            let fatal = !error.is(&Code::NO_SEQ) && outbox.readers().await?.is_empty();
            let only_cdc = if fatal { "" } else { ". It can be followed through the WAL: `--read cdc`" };
            let found = Finding::from(error.map_message(|message| format!("{message}{only_cdc}")));
            return Ok(vec![Finding { fatal, ..found }]);
        }
    };
    findings.extend(outbox.sequence_finding(&mut conn).await?);
    // There may be one connection only.
    conn.commit().await?;
    let unfit = fits::findings(outbox, &table.columns, None).await?;
    let fatal = unfit.iter().any(|finding| finding.fatal);
    findings.extend(unfit);
    if fatal {
        return Ok(findings);
    }
    let mut conn = outbox.acquire().await?;
    for consumer in consumers_of(outbox, &mut conn, &table).await? {
        let name = &consumer.name;
        if let Err(error) = witness::check(outbox, &mut conn, &table, name).await {
            findings.push(error.into());
        } else if consumer.behind_retention {
            findings.push(
                Finding::fatal(format!("consumer `{name}` is behind retention"))
                    .with_remedy("see \"Rebuilding a consumer\" in docs/operations.md"),
            );
        } else if !consumer.waits_for.is_empty() {
            let note = Finding::note(format!(
                "consumer `{name}` waits after seq {}, because a transaction that has published is still open: {}",
                consumer.offset,
                open_publishers(&consumer.waits_for)
            ));
            findings.push(note.with_remedy("see \"A log that stands still\" in docs/operations.md"));
        } else if consumer.instances.is_empty() && consumer.lag_events > 0 {
            let note = Finding::note(format!(
                "consumer `{name}` is {} behind (in events), and no relay works for it right now; retention waits \
                 for it",
                consumer.lag_events
            ));
            findings.push(note.with_remedy(format!(
                "to remove it, if it is no longer needed: `airtight consumers remove {name}`"
            )));
        }
    }
    if table.partitioned
        && let Some(note) = table_partitions::caught(outbox, &mut conn, &table).await?
    {
        findings.push(note);
    }
    conn.commit().await?;
    Ok(findings)
}

/// Events of the log; or, asked for a state, parked ones.
pub(crate) async fn list(outbox: &PgOutbox, filter: &Filter) -> Result<Vec<EventRow>> {
    let (mut conn, table) = outbox.log_table().await?;
    if !filter.states.is_empty() || filter.error_code.is_some() {
        let parked_filter = ParkedFilter { limit: filter.limit, ..parked_filter(filter) };
        let rows = parked::list(outbox, &mut conn, &table, &parked_filter).await?;
        conn.commit().await?;
        let wanted = |row: &EventRow| {
            filter.states.is_empty() || filter.states.iter().any(|state| state.as_str() == row.state)
        };
        return Ok(rows.into_iter().map(|parked| parked.row).filter(wanted).collect());
    }
    let c = &table.columns;
    let mut query = QueryBuilder::<Postgres>::new(format!(
        "SELECT {} FROM {} t WHERE true",
        list_columns(&table),
        c.table
    ));
    let texts = [
        (&filter.stream, c.field(&c.spec.stream)),
        (&filter.event_type, c.field(&c.spec.event_type)),
        (&filter.aggregate_id, c.key()),
    ];
    for (value, column) in texts {
        if let Some(value) = value {
            query.push(format!(" AND {column} = ")).push_bind(value.clone());
        }
    }
    if let Some(after) = filter.after_seq {
        query.push(format!(" AND {} > ", table.seq())).push_bind(after);
    }
    let direction = if filter.newest_first { "DESC" } else { "ASC" };
    query.push(format!(" ORDER BY {} {direction} LIMIT ", table.seq()));
    query.push_bind(i64::try_from(if filter.limit == 0 { 50 } else { filter.limit }).unwrap_or(i64::MAX));
    let rows = query
        .build()
        .persistent(!outbox.pooled)
        .fetch_all(conn.get())
        .await
        .map_err(doing("listing events"))?;
    conn.commit().await?;
    rows.iter().map(list_row).collect()
}

fn list_columns(table: &LogTable) -> String {
    let c = &table.columns;
    format!(
        "{} AS l_seq, {}::text AS l_id, {} AS l_stream, {} AS l_type, {} AS l_aggregate_type, {} AS l_aggregate_id, \
         'stored' AS l_state, 0 AS l_attempts, 0 AS l_lost, NULL::timestamptz AS l_retry, false AS l_held, \
         NULL::text AS l_code, NULL::text AS l_message, {} AS l_created",
        c.seq(),
        col(&c.spec.id),
        c.label(&c.spec.stream),
        c.label(&c.spec.event_type),
        c.label(&c.spec.aggregate_type),
        c.label(&c.spec.aggregate_id),
        c.created_at(),
    )
}

pub(crate) async fn show(outbox: &PgOutbox, id: &str) -> Result<Option<Detail>> {
    let (mut conn, table) = outbox.log_table().await?;
    let c = &table.columns;
    let Some(matches) = matching(outbox, &mut conn, c, id).await? else { return Ok(None) };
    let sql = format!(
        "SELECT {}, {} FROM {} t WHERE {matches} LIMIT 1",
        list_columns(&table),
        c.event_columns(&MAX_PAYLOAD_BYTES.to_string()),
        c.table,
    );
    let row = sqlx::query(AssertSqlSafe(sql))
        .persistent(!outbox.pooled)
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

/// Retries or discards one parked event of any consumer, by its seq or its id.
pub(crate) async fn act_on(outbox: &PgOutbox, id: &str, discard: bool) -> Result<Acted> {
    let mut conn = outbox.acquire().await?;
    let sql = format!(
        "SELECT DISTINCT seq FROM {} WHERE outbox = $1 AND (id = $2 OR seq::text = $2)",
        outbox.own("parked")
    );
    let seqs: Vec<i64> = sqlx::query_scalar(AssertSqlSafe(sql))
        .persistent(!outbox.pooled)
        .bind(outbox.spec.display_name())
        .bind(id)
        .fetch_all(conn.get())
        .await
        .map_err(doing("looking for the parked event"))?;
    conn.commit().await?;
    if seqs.is_empty() {
        let there = show(outbox, id).await?.is_some();
        return Ok(if there { Acted::Refused(State::Done) } else { Acted::NotFound });
    }
    let filter = ParkedFilter { seqs, ..ParkedFilter::default() };
    act(outbox, &filter, if discard { Act::Discard } else { Act::Retry }).await?;
    Ok(Acted::Yes)
}

pub(crate) async fn act_on_dead(outbox: &PgOutbox, filter: &Filter, discard: bool) -> Result<u64> {
    act(outbox, &parked_filter(filter), if discard { Act::Discard } else { Act::Retry }).await
}

fn parked_filter(filter: &Filter) -> ParkedFilter {
    let dead = [State::Dead, State::Unknown];
    ParkedFilter {
        dead_only: !filter.states.is_empty() && filter.states.iter().all(|state| dead.contains(state)),
        stream: filter.stream.clone(),
        event_type: filter.event_type.clone(),
        aggregate_id: filter.aggregate_id.clone(),
        error_code: filter.error_code.clone(),
        after_seq: filter.after_seq,
        ..ParkedFilter::default()
    }
}

pub(crate) async fn blocked(outbox: &PgOutbox, limit: usize) -> Result<Vec<BlockedKey>> {
    let (mut conn, table) = outbox.log_table().await?;
    let keys = parked::blocked(outbox, &mut conn, &table, limit).await?;
    conn.commit().await?;
    Ok(keys)
}
