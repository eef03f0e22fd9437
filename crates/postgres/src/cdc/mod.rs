//! CDC: an outbox followed through the WAL.
//!
//! A reader has a replication slot, a publication of inserts, and the same engine as the consumers of a log
//! ([`airtight_core::log::Log`]): [`PgCdc`] is its store. One relay streams, others stand by. Events are numbered in
//! the order of the stream (see `feed`). An event that fails is parked, from memory, in the transaction that moves the
//! stored position past it.
//!
//! If this process is killed at any point, the stored position may be too small, but never too large. A position is
//! acknowledged to the slot only after it is stored. So the slot's own position is never ahead of the stored one. If it
//! is, the slot was changed from outside and events were lost, and the reader refuses to continue.
//!
//! | module | what lives there |
//! | --- | --- |
//! | `wire` | a connection that can replicate |
//! | `pgoutput`, `values`, `row`, `emitted` | from messages of the WAL to events |
//! | `feed` | what was read and is not settled |
//! | `slot`, `publication` | the slot and the publication, and what is wrong with them |
//! | `session`, `first`, `health` | reading over one connection, the first session of a reader, and the checks next to the stream |
//! | `progress` | settling: what is written, and when |
//! | `state` | the statements behind it |
//! | `emit` | events without a table, from Rust |
//! | `admin` | the operator's side |

mod admin;
#[cfg(test)]
mod bounded;
#[cfg(test)]
mod drift;
mod emit;
mod emitted;
mod feed;
mod first;
mod health;
mod lsn;
mod options;
mod parked_row;
mod pgoutput;
mod progress;
mod publication;
mod row;
mod session;
mod slot;
mod state;
mod values;

mod wire;

use std::{
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::Duration,
};

use airtight_core::{
    Backlog, Backoff, Capabilities, Code, Error, Result,
    group::{GroupKind, Member, Members, Pulse},
    log::{Changes, ConsumerState, Due, Log, LogRow, LogStore, Read, ReadRequest, Revision, Standing, Start},
    queue::BadRow,
};
use async_trait::async_trait;
use bytes::Bytes;
use sqlx::AssertSqlSafe;
use tokio::{
    sync::{Notify, watch},
    task::JoinHandle,
};

use self::{
    feed::{Boundary, Feed, Raw},
    progress::Progress,
    publication::Reader,
    row::{Mapping, RowOptions},
    session::Session,
    slot::Server,
    state::{Phase, Stored},
    wire::Endpoint,
};
pub use self::{
    lsn::Lsn,
    options::{CdcOptions, Snapshot},
};
use crate::{
    PgOutbox,
    columns::EventColumns,
    error::doing,
    fits, log,
    members::RelayGroup,
    queue::{self, Store},
};

/// Waits between sessions that come to nothing.
const AGAIN: Backoff =
    Backoff { base: Duration::from_millis(200), multiplier: 2.0, cap: Duration::from_secs(10), jitter: 0.2 };

impl PgOutbox {
    /// The outbox followed through the WAL: a source for a relay.
    ///
    /// ```no_run
    /// # async fn example() -> airtight_core::Result<()> {
    /// use airtight_core::{CancellationToken, Relay, sinks::StdoutSink};
    /// use airtight_postgres::{CdcOptions, PgOptions, PgOutbox};
    ///
    /// let outbox = PgOutbox::connect("postgres://localhost/shop", PgOptions::default()).await?;
    /// let source = outbox.cdc(CdcOptions::slot("airtight_shop"))?;
    /// Relay::new(source, StdoutSink::new()).run(CancellationToken::new()).await?;
    /// # Ok(()) }
    /// ```
    pub fn cdc(&self, options: CdcOptions) -> Result<Log<PgCdc>> {
        options.check()?;
        let log = options.log.clone().reading(|read| read.partitions = 1);
        let endpoint = match &options.url {
            Some(url) => Endpoint::parse(url)?,
            None => Endpoint::of(&self.pool.connect_options()),
        };
        Ok(Log::new(PgCdc::new(self.clone(), options, endpoint), log))
    }
}

/// An outbox in PostgreSQL, followed through the WAL, as a [`LogStore`].
pub struct PgCdc {
    shared: Arc<Shared>,
    running: Mutex<Option<Running>>,
    /// What draining waits for.
    target: Mutex<Option<Lsn>>,
}

/// What the store and its session share.
struct Shared {
    group: RelayGroup,
    outbox: PgOutbox,
    options: CdcOptions,
    endpoint: Endpoint,
    /// Whether events carry their row ([`airtight_core::Event::row`]), because the sink wants it.
    keep_rows: AtomicBool,
    columns: OnceLock<EventColumns>,
    marks: OnceLock<Option<Box<dyn Store>>>,
    /// See [`publication::contents`].
    contents: OnceLock<String>,
    feed: Mutex<Feed>,
    life: Mutex<Life>,
    progress: tokio::sync::Mutex<Progress>,
    /// Something was read, or the session has ended.
    arrived: Notify,
    /// Something was settled: there is room.
    room: Notify,
    /// Something is to be written soon.
    pending: Notify,
    /// The server is to be asked how far it is.
    ask: Notify,
    /// The publication must be checked.
    look: Notify,
    /// What is stored, and may be acknowledged.
    acked: watch::Sender<Lsn>,
    /// Numbers must be assigned again: nothing is read until the partition is taken again.
    renew: AtomicBool,
    /// How many sessions in a row have ended before they had the stream.
    failures: AtomicU32,
    /// The server shuts down, and no session has begun since.
    going_down: AtomicBool,
}

/// Where a reader is since this relay took it over.
#[derive(Debug, Default)]
struct Life {
    /// The feed knows from where to read.
    begun: bool,
    /// What the table had is in the feed.
    snapshot_done: bool,
    /// Where the stream begins after the snapshot.
    start: Lsn,
    timeline: Option<String>,
    /// Why the last session ended.
    ended: Option<Error>,
    /// As the partition was taken up.
    settled: i64,
}

/// A session under way. Dropped, it ends.
struct Running {
    tasks: [JoinHandle<()>; 2],
}

impl Drop for Running {
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

impl Shared {
    fn feed(&self) -> MutexGuard<'_, Feed> {
        self.feed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn life(&self) -> MutexGuard<'_, Life> {
        self.life.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn columns(&self) -> Result<&EventColumns> {
        self.columns.get().ok_or_else(|| Error::permanent(Code::NOT_OPEN, "the reader was not opened"))
    }

    fn contents(&self) -> Result<&str> {
        let contents = self.contents.get().map(String::as_str);
        contents.ok_or_else(|| Error::permanent(Code::NOT_OPEN, "the reader was not opened"))
    }

    fn reader<'a>(&'a self, name: &'a str) -> Result<Reader<'a>> {
        Ok(Reader {
            outbox: &self.outbox,
            columns: self.columns()?,
            name,
            publication: &self.options.publication,
            contents: self.contents()?,
            open: self.marks().map_or_else(|| "true".into(), |marks| marks.is_open()),
        })
    }

    /// Refuses a publication that may have left something out since the position was stored.
    async fn verify(&self, name: &str) -> Result<()> {
        let stored = state::load(&self.outbox, self.columns()?, name).await?;
        if stored.has_position() { self.reader(name)?.verify(&stored).await } else { Ok(()) }
    }

    fn keeps_rows(&self) -> bool {
        self.keep_rows.load(Ordering::Acquire)
    }

    /// The status column of the table, where rows are marked.
    fn marks(&self) -> Option<&dyn Store> {
        self.marks.get().and_then(Option::as_deref)
    }

    /// Whether some rows are not wanted, so that each row must be checked.
    fn is_choosy(&self) -> bool {
        !self.options.log.read.streams.is_empty() || self.outbox.spec.status.is_some()
    }

    /// Whether a row is to be delivered: of a stream that is read, and not finished as it was written.
    fn wants(&self, mapping: &Mapping, values: &[Option<Bytes>]) -> bool {
        let streams = &self.options.log.read.streams;
        mapping.is_open(values)
            && (streams.is_empty()
                || mapping.stream(values).is_none_or(|stream| streams.iter().any(|name| *name == stream)))
    }

    /// Whether the reader has begun on this server. On another timeline events may have other numbers.
    fn timeline(&self, server: &Server) -> Result<bool> {
        let mut life = self.life();
        let moved = life.timeline.as_ref().is_some_and(|timeline| *timeline != server.timeline);
        if moved && life.begun {
            *life = Life::default();
            self.renew.store(true, Ordering::Release);
            return Err(Error::retryable(
                Code::PROMOTED,
                "another server was promoted; continuing at its current position",
            ));
        }
        life.timeline = Some(server.timeline.clone());
        Ok(life.begun)
    }

    /// Starts over where a server that was set back to an earlier state stands: a snapshot of its disk was restored under
    /// this relay. Its timeline is the same, but it has neither what was read last nor the position that was stored last.
    /// It would skip everything that commits before the position at which this relay would continue.
    fn refuse_set_back(&self, server: &Server, stored: &Stored) -> Result<()> {
        let (received, acked) = (self.feed().received().lsn, *self.acked.borrow());
        let is_behind = stored.phase == Phase::Streaming && stored.lsn.unwrap_or_default() < acked;
        if server.end >= received && !is_behind {
            return Ok(());
        }
        let mut life = self.life();
        if !life.begun {
            return Ok(());
        }
        let timeline = life.timeline.take();
        *life = Life { timeline, ..Life::default() };
        self.renew.store(true, Ordering::Release);
        Err(Error::retryable(
            Code::SET_BACK,
            format!(
                "the server was set back to an earlier state, before {}; continuing at its current position. Events \
                 that were delivered since then are no longer in the database",
                received.max(acked)
            ),
        ))
    }

    fn settled(&self) -> i64 {
        self.life().settled
    }

    fn begin(&self, base: Boundary, settled: i64, snapshot_done: bool) {
        self.feed().reset(base, settled);
        self.acked.send_replace(base.lsn);
        let mut life = self.life();
        (life.begun, life.snapshot_done) = (true, snapshot_done);
    }

    fn set_start(&self, start: Lsn) {
        self.life().start = start;
    }

    fn has_snapshot(&self) -> bool {
        self.life().snapshot_done
    }

    fn end_snapshot(&self) {
        let start = {
            let mut life = self.life();
            life.snapshot_done = true;
            life.start
        };
        self.feed().complete(start, 0);
        self.pending.notify_one();
    }

    /// The event behind something of the feed.
    fn event(&self, raw: &Raw, max_payload: usize) -> Option<LogRow> {
        let context = RowOptions { max_payload, keep_row: self.keeps_rows() };
        let (event, max_attempts) = match raw {
            Raw::Unwanted => return None,
            Raw::Emitted(content) => {
                let event = emitted::event(content.clone(), &context);
                if let Ok(event) = &event
                    && !self.options.log.read.streams.is_empty()
                    && !self.options.log.read.streams.contains(&event.stream)
                {
                    return None;
                }
                (event, emitted::max_attempts(content))
            }
            Raw::Tuple(mapping, tuple) => match mapping.texts(tuple) {
                Ok(values) => {
                    let max_attempts = mapping.max_attempts(&values);
                    (mapping.event(values, &context), max_attempts)
                }
                Err(error) => (Err(BadRow { id: "(no id)".into(), key: None, error }), None),
            },
            Raw::Values(mapping, values) => {
                (mapping.event(values.clone(), &context), mapping.max_attempts(values))
            }
        };
        Some(LogRow { seq: 0, partition: 0, max_attempts, event })
    }
}

impl PgCdc {
    fn new(outbox: PgOutbox, options: CdcOptions, endpoint: Endpoint) -> Self {
        let shared = Shared {
            group: RelayGroup::new(outbox.clone()),
            outbox,
            options,
            endpoint,
            keep_rows: AtomicBool::new(false),
            columns: OnceLock::new(),
            marks: OnceLock::new(),
            contents: OnceLock::new(),
            feed: Mutex::default(),
            life: Mutex::default(),
            progress: tokio::sync::Mutex::default(),
            arrived: Notify::new(),
            room: Notify::new(),
            pending: Notify::new(),
            ask: Notify::new(),
            look: Notify::new(),
            acked: watch::Sender::new(Lsn(0)),
            renew: AtomicBool::new(false),
            failures: AtomicU32::new(0),
            going_down: AtomicBool::new(false),
        };
        Self { shared: Arc::new(shared), running: Mutex::new(None), target: Mutex::new(None) }
    }

    fn running(&self) -> MutexGuard<'_, Option<Running>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sees to it that something is being read.
    async fn ensure_session(&self, member: &Member) {
        if self.shared.renew.load(Ordering::Acquire) {
            return;
        }
        let Some(epoch) = self.shared.progress.lock().await.epoch() else { return };
        let mut running = self.running();
        if running.as_ref().is_some_and(|running| !running.tasks[0].is_finished()) {
            return;
        }
        // A session that has ended says why before the next one begins.
        if running.is_some() && self.shared.life().ended.is_some() {
            return;
        }
        let shared = self.shared.clone();
        let session = Session::new(shared.clone(), member.clone(), epoch);
        let reading = tokio::spawn(async move {
            let error = session.run().await;
            // The next call waits for so long, so that a wrong password is not tried several times a second.
            let failures = shared.failures.fetch_add(1, Ordering::AcqRel) + 1;
            shared.life().ended = Some(error.with_retry_after(AGAIN.after(failures)));
            shared.arrived.notify_one();
        });
        let keeping = tokio::spawn(progress::keep(self.shared.clone(), member.clone()));
        *running = Some(Running { tasks: [reading, keeping] });
    }

    /// Ends the session. What was read and not settled is dropped, because another relay may deliver it.
    fn stop(&self) {
        *self.running() = None;
        let timeline = self.shared.life().timeline.take();
        *self.shared.life() = Life { timeline, ..Life::default() };
    }
}

#[async_trait]
impl LogStore for PgCdc {
    fn members(&self) -> &dyn Members {
        &self.shared.group
    }

    fn kind(&self) -> GroupKind {
        GroupKind::Cdc
    }

    /// Ends the session if another relay reads.
    fn renewed(&self, member: &Member, pulse: &Pulse) {
        if !pulse.alive || pulse.owners.get(&0).is_some_and(|owner| *owner != member.id) {
            self.stop();
        }
    }

    /// What was gathered and is not stored would be delivered again by the next one.
    async fn before_giving(&self, member: &Member) -> Result<()> {
        progress::flush(&self.shared, member).await?;
        self.stop();
        Ok(())
    }

    async fn before_leaving(&self, member: &Member) -> Result<()> {
        if self.shared.columns.get().is_none() {
            return Ok(());
        }
        let flushed = progress::flush(&self.shared, member).await;
        self.stop();
        flushed
    }

    async fn open(&self, sink: &Capabilities) -> Result<()> {
        let shared = &self.shared;
        shared.keep_rows.store(sink.wants_rows, Ordering::Release);
        let mut conn = shared.outbox.acquire().await?;
        let columns = EventColumns::load(&shared.outbox, &mut conn).await?;
        if columns.spec.log.lookup.is_some() {
            return Err(Error::permanent(
                Code::NO_LOOKUP,
                format!(
                    "{} only refers to its payloads, and a row of the WAL cannot be joined with another table: read it as a log",
                    columns.outbox
                ),
            ));
        }
        let marks = if shared.options.mark && columns.spec.status.is_some() {
            Some(queue::load(&shared.outbox, &mut conn).await?)
        } else {
            None
        };
        conn.commit().await?;
        fits::at_start(&shared.outbox, &columns, marks.as_ref().map(|marks| &marks.status)).await?;
        slot::check_server(&shared.outbox, &shared.endpoint).await?;
        let version = slot::server_version(&shared.outbox).await?;
        let contents = publication::contents(&columns, &shared.options.publication, version);
        shared.group.follow(&columns);
        // Opening again after a failure further on finds these set already.
        let _ = (shared.columns.set(columns), shared.marks.set(marks), shared.contents.set(contents));
        let name = shared.options.log.consumer.as_str();
        let mut conn = shared.outbox.acquire().await?;
        let stored = state::load_in(&shared.outbox, &mut conn, shared.columns()?, name).await?;
        conn.commit().await?;
        let has_slot = slot::find(&shared.outbox, name).await?.is_some();
        publication::refuse(&shared.reader(name)?, stored.as_ref(), has_slot).await
    }

    async fn attach(&self, member: &Member, _start: Start) -> Result<()> {
        let shared = &self.shared;
        // Older servers do not send messages, and `emit` must not think so.
        let carries = slot::server_version(&shared.outbox).await? >= slot::MESSAGES;
        let prefix = shared.options.messages.as_deref().filter(|_| carries);
        let publication = &shared.options.publication;
        state::attach(&shared.outbox, shared.columns()?, member, publication, prefix).await
    }

    async fn positions(&self, member: &Member, _partitions: &[u16]) -> Result<Vec<Standing>> {
        let shared = &self.shared;
        let mut progress = shared.progress.lock().await;
        let renew = shared.renew.load(Ordering::Acquire);
        let begun = shared.life().begun && !renew;
        let (outbox, columns) = (&shared.outbox, shared.columns()?);
        let mut standings = state::positions(outbox, columns, member, !begun, renew).await?;
        if let Some(standing) = standings.first_mut().filter(|standing| progress.is_under(standing.epoch)) {
            // Some of what is settled may not be written down yet, and has not moved for that.
            standing.offset = progress.settled();
            return Ok(standings);
        }
        self.stop();
        if begun {
            // Taken again: everything that was read under the old epoch has ended.
            standings = state::positions(outbox, columns, member, true, progress.is_fenced()).await?;
        }
        *progress = standings.first().map_or_else(Progress::default, Progress::new);
        shared.life().settled = progress.settled();
        shared.renew.store(false, Ordering::Release);
        Ok(standings)
    }

    async fn consumer_state(&self, member: &Member) -> Result<ConsumerState> {
        let watch =
            state::consumer_state(&self.shared.outbox, self.shared.columns()?, member.consumer()).await?;
        let renew = self.shared.renew.load(Ordering::Acquire);
        Ok(if renew { ConsumerState { revision: Revision::Moved, ..watch } } else { watch })
    }

    async fn read(&self, request: &ReadRequest<'_>) -> Result<Read> {
        let shared = &self.shared;
        self.ensure_session(request.member).await;
        let mut taken: Vec<(i64, Raw)> = Vec::new();
        {
            let feed = shared.feed();
            if shared.life().begun {
                let Some(rows) = feed.after(request.after) else {
                    return Err(Error::retryable(
                        Code::MOVED,
                        "the reader was moved; continuing at its new position",
                    ));
                };
                taken.extend(rows.take(request.events).map(|(seq, raw)| (seq, raw.clone())));
            }
        }
        if taken.is_empty() {
            if let Some(error) = shared.life().ended.take() {
                return Err(error);
            }
            return Ok(Read { through: request.after, ..Read::default() });
        }
        let (mut rows, mut bytes, mut through) = (Vec::with_capacity(taken.len()), 0, request.after);
        for (seq, raw) in &taken {
            through = *seq;
            if let Some(row) = shared.event(raw, request.max_payload) {
                bytes += row.event.as_ref().map_or(0, airtight_core::Event::size);
                rows.push(LogRow { seq: *seq, ..row });
            }
            if bytes >= request.bytes {
                break;
            }
        }
        let more = through < shared.feed().last();
        Ok(Read { rows, through, more, blocked: false })
    }

    async fn reread(&self, request: &ReadRequest<'_>, seqs: &[i64]) -> Result<Vec<LogRow>> {
        let shared = &self.shared;
        let raws: Vec<(i64, Raw)> = {
            let feed = shared.feed();
            seqs.iter().map_while(|seq| Some((*seq, feed.get(*seq)?.clone()))).collect()
        };
        if raws.is_empty() {
            return Err(Error::retryable(
                Code::MOVED,
                "the reader was moved; continuing at its new position",
            ));
        }
        let (mut rows, mut bytes) = (Vec::new(), 0);
        for (seq, raw) in raws {
            if let Some(row) = shared.event(&raw, request.max_payload) {
                bytes += row.event.as_ref().map_or(0, airtight_core::Event::size);
                rows.push(LogRow { seq, ..row });
            }
            if bytes >= request.bytes {
                break;
            }
        }
        Ok(rows)
    }

    async fn due(&self, request: &ReadRequest<'_>, except: &[i64]) -> Result<Due> {
        let shared = &self.shared;
        let mut due = log::read::due(&shared.outbox, shared.columns()?, request, except).await?;
        if shared.keeps_rows() && !due.rows.is_empty() {
            self.add_rows(request.member, &mut due).await?;
        }
        Ok(due)
    }

    async fn settle(&self, member: &Member, changes: &Changes) -> Result<Vec<u16>> {
        progress::settle(&self.shared, member, changes).await
    }

    async fn unhold(&self, member: &Member, partitions: &[u16]) -> Result<u64> {
        let shared = &self.shared;
        log::settle::unhold(&shared.outbox, shared.columns()?, member, partitions).await
    }

    /// Everything that was committed when this was asked first is what is waited for.
    async fn backlog(&self, member: &Member) -> Result<Backlog> {
        let shared = &self.shared;
        let known = *self.target.lock().unwrap_or_else(PoisonError::into_inner);
        let target = match known {
            Some(target) => target,
            None => {
                let target = current_lsn(&shared.outbox).await?;
                *self.target.lock().unwrap_or_else(PoisonError::into_inner) = Some(target);
                target
            }
        };
        shared.ask.notify_one();
        let settled = shared.progress.lock().await.settled();
        let (waiting, blocked) = state::waiting(&shared.outbox, shared.columns()?, member).await?;
        let (ahead, is_read) = {
            let feed = shared.feed();
            let begun = shared.life().begun && shared.has_snapshot();
            (feed.last().saturating_sub(settled).unsigned_abs(), begun && feed.received().lsn >= target)
        };
        if ahead == 0 && is_read {
            *self.target.lock().unwrap_or_else(PoisonError::into_inner) = None;
        }
        Ok(Backlog { unfinished: ahead + u64::from(!is_read) + waiting, blocked, ..Backlog::default() })
    }

    async fn wait(&self, at_most: Duration) {
        let _ = tokio::time::timeout(at_most, self.shared.arrived.notified()).await;
    }
}

impl PgCdc {
    /// Gives parked events their rows back.
    async fn add_rows(&self, member: &Member, due: &mut Due) -> Result<()> {
        let shared = &self.shared;
        let failed = doing("reading parked rows");
        let sql = format!(
            "SELECT seq, source_row::text FROM {} WHERE outbox = $1 AND consumer = $2 AND seq = ANY($3::bigint[]) \
             AND source_row IS NOT NULL",
            shared.outbox.own("parked")
        );
        let seqs: Vec<i64> = due.rows.iter().map(|row| row.row.seq).collect();
        let mut conn = shared.outbox.acquire().await?;
        let rows: Vec<(i64, String)> = sqlx::query_as(AssertSqlSafe(sql))
            .persistent(!shared.outbox.pooled)
            .bind(&shared.columns()?.outbox)
            .bind(member.consumer())
            .bind(seqs)
            .fetch_all(conn.get())
            .await
            .map_err(&failed)?;
        conn.commit().await?;
        for (seq, text) in rows {
            let parked = due.rows.iter_mut().find(|row| row.row.seq == seq);
            if let Some(Ok(event)) = parked.map(|parked| parked.row.event.as_mut()) {
                event.row = parked_row::from_json(&text).map(Arc::new);
            }
        }
        Ok(())
    }
}

/// How far the server's WAL is safely written.
async fn current_lsn(outbox: &PgOutbox) -> Result<Lsn> {
    let mut conn = outbox.acquire().await?;
    let lsn: String = sqlx::query_scalar("SELECT pg_current_wal_flush_lsn()::text")
        .persistent(!outbox.pooled)
        .fetch_one(conn.get())
        .await
        .map_err(doing("reading the current position of the WAL"))?;
    conn.commit().await?;
    lsn.parse()
}
