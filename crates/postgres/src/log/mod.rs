//! The log's statements: what [`airtight_core::log::Log`] asks of PostgreSQL, and what operators ask of a log.
//!
//! | module | what lives there |
//! | --- | --- |
//! | `holes` | when a `seq` that is missing is missing for ever |
//! | `check` | which tables can be followed |
//! | `ahead` | reading pages before they are asked for |
//! | `read` | reading on, reading again, parked events that are due |
//! | `settle` | offsets and parked events, in one transaction |
//! | `consumers` | consumers and their offsets |
//! | `publishers` | open transactions that keep the log waiting |
//! | `table_partitions` | partitions of the table, created in advance |
//! | `retention` | removes old events, and maintains the floor |
//! | `seek` | replay |
//! | `witness` | notices when numbers that a consumer has passed are drawn again |
//! | `parked` | operations on parked events |
//! | `admin` | the operator's side: wiring of the above |

pub(crate) mod admin;
mod ahead;
pub(crate) mod check;
pub(crate) mod consumers;
mod holes;
pub(crate) mod parked;
mod publishers;
pub(crate) mod read;
mod retention;
mod seek;
pub(crate) mod settle;
pub(crate) mod table_partitions;
mod witness;

use std::{
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use airtight_core::{
    Backlog, Capabilities, Code, Error, Result,
    group::{Member, Members},
    log::{
        Changes, ConsumerState, Due, Log, LogOptions, LogRow, LogStore, Read, ReadRequest, Revision,
        Standing, Start, open_publishers,
    },
};
use async_trait::async_trait;
use sqlx::PgConnection;
use tokio_util::sync::{CancellationToken, DropGuard};

use self::{
    ahead::{Ahead, PAGE_BYTES},
    check::Sequence,
    holes::Holes,
    publishers::Waiting,
    read::{Ask, Page},
};
use crate::{
    PgOutbox, columns::EventColumns, listen::Listener, members::RelayGroup, outbox::Conn, session::Session,
    slots,
};

/// How many rounds of deciding holes one read makes before it returns what it has.
const HOLE_ROUNDS: u32 = 3;

/// How often a relay looks whether the table needs a new partition.
const MAINTAIN_EVERY: Duration = Duration::from_secs(20);

impl PgOutbox {
    /// The outbox followed as a log: a source for a relay.
    pub fn log(&self, options: LogOptions) -> Log<PgLog> {
        Log::new(PgLog::new(self.clone()), options)
    }
}

/// An outbox in PostgreSQL as a [`LogStore`].
#[derive(Debug)]
pub struct PgLog {
    group: RelayGroup,
    outbox: PgOutbox,
    table: OnceLock<Arc<LogTable>>,
    listener: OnceLock<Listener>,
    holes: Mutex<Holes>,
    /// How long a read has stood before a hole.
    waiting: Mutex<Waiting>,
    /// Which server, in which of its lives, the partitions were taken up from.
    server: Mutex<Option<String>>,
    /// The log as it was at the last look, to know it again.
    memory: Mutex<Option<witness::Memory>>,
    /// What a row takes, near enough: how many to ask for at once.
    row_bytes: AtomicUsize,
    ahead: Mutex<Option<Ahead>>,
    maintenance: OnceLock<DropGuard>,
}

/// A log's table as the database has it.
#[derive(Debug)]
pub(crate) struct LogTable {
    pub(crate) columns: EventColumns,
    sequence: Sequence,
    partitioned: bool,
}

impl std::ops::Deref for LogTable {
    type Target = EventColumns;

    fn deref(&self) -> &EventColumns {
        &self.columns
    }
}

impl LogTable {
    /// Reads the table, and refuses one that cannot be followed.
    pub(crate) async fn load(outbox: &PgOutbox, conn: &mut Conn) -> Result<Self> {
        if outbox.options.spec.is_none() && outbox.spec.status.is_some() {
            return Err(Error::permanent(
                Code::WRONG_SHAPE,
                format!(
                    "{} is a queue; create a log with `airtight migrate --shape log`, in another table (`--table NAME`)",
                    outbox.spec.display_name()
                ),
            ));
        }
        let columns = EventColumns::load(outbox, conn).await?;
        let sequence = check::check(outbox, conn, &columns).await?;
        let partitioned = outbox.options.spec.is_none();
        Ok(Self { columns, sequence, partitioned })
    }

    /// The slot of a row's key.
    fn slot(&self) -> String {
        slots::slot_of(&format!("coalesce({}, '')", self.columns.key()))
    }

    /// The partition of a row's key, of so many.
    fn partition(&self, count: u16) -> String {
        slots::partition_of(&self.slot(), count)
    }

    /// The column that orders rows.
    fn seq(&self) -> String {
        self.columns.spec.seq.as_deref().map(crate::columns::col).unwrap_or_default()
    }
}

impl PgLog {
    /// A store over this outbox. [`PgOutbox::log`] returns a source directly.
    pub fn new(outbox: PgOutbox) -> Self {
        Self {
            group: RelayGroup::new(outbox.clone()),
            outbox,
            table: OnceLock::new(),
            listener: OnceLock::new(),
            holes: Mutex::default(),
            waiting: Mutex::default(),
            server: Mutex::default(),
            memory: Mutex::default(),
            row_bytes: AtomicUsize::new(1_024),
            ahead: Mutex::default(),
            maintenance: OnceLock::new(),
        }
    }

    /// Writes changes in the caller's transaction; see [`Log::committing`]. Returns whether all of them
    /// were accepted: otherwise the transaction must be rolled back.
    pub async fn settle_in(
        &self,
        conn: &mut PgConnection,
        member: &Member,
        changes: &Changes,
    ) -> Result<bool> {
        let server = self.server();
        let conn = &mut Session::borrowed(conn, self.outbox.watchdog.clone());
        Ok(settle::apply(&self.outbox, conn, self.table()?, member, server, changes).await?.is_empty())
    }

    fn table(&self) -> Result<&Arc<LogTable>> {
        self.table.get().ok_or_else(|| Error::permanent(Code::NOT_OPEN, "the log was not opened"))
    }

    fn server(&self) -> Option<String> {
        self.server.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn holes(&self) -> MutexGuard<'_, Holes> {
        self.holes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps creating table partitions in advance for as long as this log exists.
    fn start_maintenance(&self) {
        let stop = CancellationToken::new();
        if self.maintenance.set(stop.clone().drop_guard()).is_err() {
            return;
        }
        let outbox = self.outbox.clone();
        tokio::spawn(async move {
            loop {
                match outbox.make_partitions().await {
                    Ok(made) if made > 0 => {
                        tracing::info!(partitions = made, "created partitions in advance");
                    }
                    Ok(_) => {}
                    Err(error) => {
                        tracing::warn!(%error, "could not create partitions in advance; trying again soon");
                    }
                }
                tokio::select! {
                    () = stop.cancelled() => return,
                    () = tokio::time::sleep(MAINTAIN_EVERY) => {}
                }
            }
        });
    }
}

#[async_trait]
impl LogStore for PgLog {
    fn members(&self) -> &dyn Members {
        &self.group
    }

    async fn open(&self, _sink: &Capabilities) -> Result<()> {
        let mut conn = self.outbox.acquire().await?;
        let table = LogTable::load(&self.outbox, &mut conn).await?;
        let foreign_channel = self.outbox.spec.log.channel.is_some();
        let notifying = self.outbox.options.listen
            && (foreign_channel
                || self.outbox.options.spec.is_none() && self.outbox.is_notifying(&mut conn).await?);
        conn.commit().await?;
        crate::fits::at_start(&self.outbox, &table.columns, None).await?;
        let partitioned = table.partitioned;
        self.group.follow(&table.columns);
        // Opening again after a failure further on finds these set already.
        let _ = self.table.set(Arc::new(table));
        let session = !self.outbox.pooled || self.outbox.options.listen_url.is_some();
        if notifying && session && self.listener.get().is_none() {
            let _ = self.listener.set(Listener::start(&self.outbox).await?);
        }
        if partitioned {
            self.start_maintenance();
        }
        Ok(())
    }

    /// The last settle came after the last heartbeat. The relay that starts next must recognise the log.
    async fn before_leaving(&self, member: &Member) -> Result<()> {
        if self.table.get().is_some()
            && let Some(server) = self.server()
            && let Err(error) = self.recognise(member, &server).await
        {
            tracing::debug!(%error, "could not store the position of the consumer");
        }
        Ok(())
    }

    async fn attach(&self, member: &Member, start: Start) -> Result<()> {
        consumers::attach(&self.outbox, self.table()?, member, start).await
    }

    async fn positions(&self, member: &Member, partitions: &[u16]) -> Result<Vec<Standing>> {
        // Offsets may have been moved back, over holes that retention has made since.
        self.holes().forget();
        self.forget_ahead();
        let (standings, server) =
            consumers::positions(&self.outbox, self.table()?, member, partitions, self.server()).await?;
        *self.server.lock().unwrap_or_else(PoisonError::into_inner) = Some(server);
        Ok(standings)
    }

    async fn consumer_state(&self, member: &Member) -> Result<ConsumerState> {
        let table = self.table()?;
        let (watch, server) = consumers::consumer_state(&self.outbox, table, member).await?;
        self.recognise(member, &server).await?;
        // On another server, or after a restart, nothing that is remembered need be true.
        let moved = self.server().is_some_and(|before| before != server);
        Ok(if moved { ConsumerState { revision: Revision::Moved, ..watch } } else { watch })
    }

    async fn read(&self, request: &ReadRequest<'_>) -> Result<Read> {
        let table = self.table()?;
        for _ in 0..HOLE_ROUNDS {
            let page = self.page(request).await?;
            let reach = holes::reach(request.after, page.decided_to, page.rows.iter().map(|row| row.seq));
            if reach.passes_holes {
                read::refuse_behind(request, page.floor)?;
            }
            if !reach.blocked {
                self.goes_on();
                if page.full {
                    self.read_ahead(request, reach.through);
                }
                return Ok(page.into_read(reach, false));
            }
            self.forget_ahead();
            let decided = self.look(table).await?;
            if !decided {
                self.stands(table, reach.through).await?;
            }
            if !decided || reach.through > request.after {
                return Ok(page.into_read(reach, decided));
            }
        }
        Ok(Read { through: request.after, blocked: true, ..Read::default() })
    }

    async fn reread(&self, request: &ReadRequest<'_>, seqs: &[i64]) -> Result<Vec<LogRow>> {
        read::again(&self.outbox, self.table()?, request, seqs).await
    }

    async fn due(&self, request: &ReadRequest<'_>, except: &[i64]) -> Result<Due> {
        read::due(&self.outbox, self.table()?, request, except).await
    }

    async fn settle(&self, member: &Member, changes: &Changes) -> Result<Vec<u16>> {
        let table = self.table()?;
        // One statement alone needs no transaction around it.
        let alone =
            changes.park.is_empty() && changes.parked.is_empty() && table.columns.spec.log.offsets.is_none();
        let mut conn = if alone { self.outbox.acquire().await? } else { self.outbox.begin().await? };
        let refused = settle::apply(&self.outbox, conn.get(), table, member, self.server(), changes).await?;
        let started = if refused.is_empty() { None } else { Some(consumers::server(&mut conn).await?) };
        conn.commit().await?;
        if started.is_some() && started != self.server() {
            tracing::warn!(
                "PostgreSQL was restarted, or is another server: events that were being delivered are delivered again"
            );
        }
        Ok(refused)
    }

    async fn unhold(&self, member: &Member, partitions: &[u16]) -> Result<u64> {
        settle::unhold(&self.outbox, self.table()?, member, partitions).await
    }

    async fn backlog(&self, member: &Member) -> Result<Backlog> {
        consumers::backlog(&self.outbox, self.table()?, member).await
    }

    async fn wait(&self, at_most: Duration) {
        match self.listener.get() {
            Some(listener) => {
                let _ = tokio::time::timeout(at_most, listener.woken()).await;
            }
            None => tokio::time::sleep(at_most).await,
        }
    }
}

impl PgLog {
    /// Looks whether the log is the one that it was at the last look.
    async fn recognise(&self, member: &Member, server: &str) -> Result<()> {
        let memory = self.memory.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let memory = witness::watch(&self.outbox, self.table()?, member.consumer(), server, memory).await?;
        *self.memory.lock().unwrap_or_else(PoisonError::into_inner) = memory;
        Ok(())
    }

    /// Looks who may still fill holes, in statements that are younger than what was read. A new watch is about
    /// everything that was drawn before it began. Returns whether holes were decided.
    async fn look(&self, table: &LogTable) -> Result<bool> {
        let mut top = 0;
        if !self.holes().is_watching() {
            let mut conn = self.outbox.acquire().await?;
            top = consumers::last_value(&self.outbox, &mut conn, table).await?;
            conn.commit().await?;
        }
        let holders = holes::holders(&self.outbox, table.sequence.oid).await?;
        Ok(self.holes().look(top, holders))
    }

    /// Says who keeps a hole open, once that has lasted.
    async fn stands(&self, table: &LogTable, seq: i64) -> Result<()> {
        if !self.waiting.lock().unwrap_or_else(PoisonError::into_inner).stands(seq) {
            return Ok(());
        }
        let mut conn = self.outbox.acquire().await?;
        let open = publishers::open(&self.outbox, &mut conn, table).await?;
        conn.commit().await?;
        if !open.is_empty() {
            tracing::warn!(
                outbox = table.columns.outbox,
                "the log and all its consumers wait after seq {seq}: a transaction has published and is still open: {}",
                open_publishers(&open)
            );
        }
        Ok(())
    }

    fn goes_on(&self) {
        let stood = self.waiting.lock().unwrap_or_else(PoisonError::into_inner).goes_on();
        if let Some(stood) = stood {
            tracing::info!("the log continues, after it had waited for {stood:.0?}");
        }
    }

    /// The page that was read ahead, if it is the one that is wanted now; else a fresh one.
    async fn page(&self, request: &ReadRequest<'_>) -> Result<Page> {
        let ask = Ask::new(request, self.limit(request));
        let ahead = self.ahead.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(mut ahead) = ahead
            && let Some(page) = ahead.page(&ask).await
        {
            *self.ahead.lock().unwrap_or_else(PoisonError::into_inner) = Some(ahead);
            return Ok(page);
        }
        let decided_to = self.holes().decided_to();
        let page = read::page(&self.outbox, self.table()?, &ask, decided_to).await?;
        self.learn(&page);
        Ok(page)
    }

    /// Begins to read on from `after` while what was read is being delivered, unless that is under way.
    fn read_ahead(&self, request: &ReadRequest<'_>, after: i64) {
        let mut ahead = self.ahead.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(table) = self.table.get().filter(|_| ahead.is_none()).cloned() else { return };
        let bytes = request.bytes.min(PAGE_BYTES);
        let ask = Ask { after, bytes, ..Ask::new(request, self.limit(request)) };
        *ahead = Some(Ahead::start(self.outbox.clone(), table, ask, self.holes().decided_to()));
    }

    fn forget_ahead(&self) {
        *self.ahead.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// How many rows to ask for, so that they probably fit the bytes.
    fn limit(&self, request: &ReadRequest<'_>) -> usize {
        let row = self.row_bytes.load(Ordering::Relaxed).max(1);
        request.events.min((request.bytes / row).max(1))
    }

    fn learn(&self, page: &Page) {
        if let Some(seen) = page.row_bytes() {
            let before = self.row_bytes.load(Ordering::Relaxed);
            // Up at once, down slowly.
            self.row_bytes.store(seen.max(before - before / 8), Ordering::Relaxed);
        }
    }
}

fn numbers(partitions: &[u16]) -> Vec<i16> {
    partitions.iter().filter_map(|n| i16::try_from(*n).ok()).collect()
}
