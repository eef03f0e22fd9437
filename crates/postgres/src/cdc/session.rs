//! Reading over one connection: the slot, the table's rows at first (`first`), then the stream.
//!
//! A session fills the [`Feed`] up to its limit in bytes and then stops reading, so that the rest waits in the server's own
//! files. Meanwhile a timer keeps telling the server that the reader is alive, and up to where everything is settled.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError, atomic::Ordering},
    time::Duration,
};

use airtight_core::{Class, Code, Error, Result, SourceColumn, group::Member, table::quote};
use bytes::{Buf, Bytes};
use tokio::time::{Instant, MissedTickBehavior};

use super::{
    Lsn, Shared, Snapshot,
    feed::{Feed, Raw},
    health,
    pgoutput::{self, Message, Relation},
    row::Mapping,
    slot::{self, Server, Slot},
    state::{self, Phase, Stored},
    values::builtin,
    wire::Wire,
};
use crate::error::{doing, sqlstate};

/// How often the server is told how far we are, and asked how far it is.
const STATUS: Duration = Duration::from_secs(1);

/// If the server sends nothing for so long, although it was asked, it counts as gone.
const SILENCE: Duration = Duration::from_secs(30);

/// How long a connection of a relay that is gone may hold on to the slot.
const HANDOVER: Duration = Duration::from_secs(30);

/// Between two looks at something that takes its time.
const LOOK: Duration = Duration::from_millis(100);

/// What a relation of the stream is to this reader.
enum RelationKind {
    /// The outbox.
    Ours(Arc<Mapping>),
    /// The outbox, in a form that cannot be read: none of its rows may be skipped.
    Unreadable(Error),
    /// Something else that the publication has.
    Other,
}

pub(super) struct Session {
    pub(super) shared: Arc<Shared>,
    pub(super) member: Member,
    pub(super) epoch: i64,
    pub(super) version: i32,
    /// When the stream last said something, or was not asked to.
    heard: Mutex<Instant>,
}

impl Session {
    pub(super) fn new(shared: Arc<Shared>, member: Member, epoch: i64) -> Self {
        Self { shared, member, epoch, version: 0, heard: Mutex::new(Instant::now()) }
    }

    /// For how long nothing came, though the server was asked.
    pub(super) fn silence(&self) -> Duration {
        self.heard.lock().unwrap_or_else(PoisonError::into_inner).elapsed()
    }

    fn hear(&self) {
        *self.heard.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
    }

    pub(super) fn name(&self) -> &str {
        self.member.consumer()
    }

    /// Reads until something goes wrong.
    pub(super) async fn run(mut self) -> Error {
        let error = match self.read().await {
            Ok(never) => match never {},
            Err(error) => error,
        };
        if !health::is_going_down(&error) {
            return error;
        }
        // What this process holds must not keep the server up.
        health::let_go(&self.shared);
        let message = format!("{error}. Reading continues when the server is available again");
        Error::retryable(Code::SHUTTING_DOWN, message)
    }

    async fn read(&mut self) -> Result<std::convert::Infallible> {
        let mut wire = Wire::connect_for_replication(&self.shared.endpoint).await?;
        self.shared.going_down.store(false, Ordering::Release);
        let server = slot::identify(&mut wire).await?;
        self.version = slot::server_version(&self.shared.outbox).await?;
        let begun = self.shared.timeline(&server)?;
        let (stored, slot) = self.look(&server).await?;
        if begun {
            self.shared.refuse_set_back(&server, &stored)?;
        } else {
            wire = self.begin(wire, &server, stored, slot).await?;
        }
        if !self.shared.has_snapshot() {
            self.snapshot(None).await?;
        }
        let from = self.shared.feed().resume();
        let options = &self.shared.options;
        let messages = options.messages.is_some();
        let command =
            slot::start_command(self.name(), from.lsn, &options.publication, messages, self.version);
        wire.copy_both(&command, "starting the stream").await.map_err(|error| {
            // Gone since it was looked at: the next look says what that means.
            let gone =
                error.sqlstate() == Some(sqlstate::UNDEFINED_OBJECT) && error.message().contains(self.name());
            if gone { Error::retryable(Code::SLOT_GONE, error.message().to_owned()) } else { error }
        })?;
        // From here on nobody else can touch it, so that what is seen now is what is read.
        self.check_gap(slot::find(&self.shared.outbox, self.name()).await?.as_ref(), &server).await?;
        self.shared.failures.store(0, Ordering::Release);
        tracing::info!(slot = self.name(), from = %from.lsn, "streaming");
        self.hear();
        let pid = wire.pid();
        let error = tokio::select! {
            error = self.stream(&mut wire) => error,
            error = self.watch(pid) => error,
        };
        wire.close().await;
        if error.is(&Code::DIVERGED) {
            let (outbox, c) = (&self.shared.outbox, self.shared.columns()?);
            let stored = state::load(outbox, c, self.name()).await?;
            let advice = slot::recovery(outbox, c, self.name(), &stored).await;
            return Err(Error::permanent(Code::DIVERGED, format!("{error}. {advice}")));
        }
        if error.class() == Class::Permanent {
            // The server may have stumbled over a publication that is not there: that says more.
            self.shared.verify(self.name()).await?;
            // It may be back by now. The server reads these changes as of their own time, when it was not there, and stumbles
            // again at every start.
            if error.sqlstate() == Some(sqlstate::UNDEFINED_OBJECT)
                && error.message().contains(&self.shared.options.publication)
            {
                let (outbox, c) = (&self.shared.outbox, self.shared.columns()?);
                let stored = state::load(outbox, c, self.name()).await?;
                let what = format!(
                    "the publication `{}` did not exist for a while",
                    self.shared.options.publication
                );
                return Err(self
                    .shared
                    .reader(self.name())?
                    .gap(Code::PUBLICATION_LOST, what, None, &stored)
                    .await);
            }
        }
        Err(error)
    }

    /// What is stored and what the slot is, whenever a session begins: the slot may have been recreated since the
    /// last one, and the server would begin without a word where that one stands.
    async fn look(&self, server: &Server) -> Result<(Stored, Option<Slot>)> {
        let (outbox, c) = (&self.shared.outbox, self.shared.columns()?);
        // The relay that has the reader ends the connections of others, so the reader must be ours.
        if !state::owns(outbox, c, &self.member, self.epoch).await? {
            return Err(Error::retryable(Code::FENCED, "another relay has taken over the reader"));
        }
        let slot = self.free_slot().await?;
        if let Some(slot) = &slot {
            slot::check_kind(outbox, self.name(), slot).await?;
        }
        let stored = self.check_gap(slot.as_ref(), server).await?;
        if slot.is_some() {
            let reader = self.shared.reader(self.name())?;
            match stored.phase {
                Phase::New => reader.verify_given(&stored).await?,
                Phase::Snapshot | Phase::Streaming => reader.verify(&stored).await?,
            }
        }
        Ok((stored, slot))
    }

    async fn check_gap(&self, slot: Option<&Slot>, server: &Server) -> Result<Stored> {
        let (outbox, c) = (&self.shared.outbox, self.shared.columns()?);
        let stored = state::load(outbox, c, self.name()).await?;
        let has_marks = self.shared.marks().is_some() && self.shared.options.snapshot != Snapshot::Never;
        slot::check_gap(outbox, c, self.name(), stored, slot, server, has_marks).await
    }

    /// Waits until nobody holds the slot. This relay has the lease: a connection of ours that is still there belongs
    /// to one that is gone, and is ended.
    async fn free_slot(&self) -> Result<Option<Slot>> {
        let deadline = Instant::now() + HANDOVER;
        loop {
            let slot = slot::find(&self.shared.outbox, self.name()).await?;
            let Some((pid, holder, is_passing)) =
                slot.as_ref().and_then(|slot| Some((slot.active_pid?, slot.holder.clone(), slot.is_passing)))
            else {
                return Ok(slot);
            };
            // One that has no name because it is just ending is neither ours nor somebody's.
            let others = !is_passing && holder.as_deref().is_some_and(|name| name != "airtight");
            if others || Instant::now() >= deadline {
                let holder = holder.filter(|name| !name.is_empty()).unwrap_or_else(|| "somebody".into());
                return Err(Error::permanent(
                    Code::IN_USE,
                    format!(
                        "the slot `{}` is being read by {holder} (pid {pid}): stop that process, or use another slot \
                         (`--slot NAME`). To end it: SELECT pg_terminate_backend({pid})",
                        self.name()
                    ),
                ));
            }
            if holder.is_none() || is_passing {
                tokio::time::sleep(LOOK).await;
                continue;
            }
            let mut conn = self.shared.outbox.acquire().await?;
            // It may have ended by itself, or be out of reach: seen with the next look.
            let _ = sqlx::query("SELECT pg_terminate_backend($1)")
                .persistent(!self.shared.outbox.pooled)
                .bind(pid)
                .execute(conn.get())
                .await;
            conn.commit().await?;
            tokio::time::sleep(LOOK).await;
        }
    }

    pub(super) async fn wait_for_room(&self) {
        loop {
            let room = self.shared.room.notified();
            if self.shared.feed().bytes() < self.shared.options.buffer_bytes {
                return;
            }
            self.shared.arrived.notify_one();
            room.await;
        }
    }

    /// How the columns of a row make an event.
    pub(super) async fn mapping(&self, columns: Vec<(String, u32, i32)>) -> Result<Arc<Mapping>> {
        let shared = &self.shared;
        let c = shared.columns()?;
        let nullable = if shared.keeps_rows() { self.nullable().await? } else { HashMap::new() };
        let columns: Arc<[SourceColumn]> = columns
            .into_iter()
            .map(|(name, type_oid, type_modifier)| {
                let nullable = nullable.get(&name).copied().unwrap_or(true);
                SourceColumn { name, type_oid, type_modifier, nullable }
            })
            .collect();
        Ok(Arc::new(Mapping::new(&c.spec, columns)?))
    }

    async fn nullable(&self) -> Result<HashMap<String, bool>> {
        let mut conn = self.shared.outbox.acquire().await?;
        let columns: Vec<(String, bool)> = sqlx::query_as(
            "SELECT attname::text, NOT attnotnull FROM pg_attribute WHERE attrelid = to_regclass($1) AND attnum > 0",
        )
        .persistent(!self.shared.outbox.pooled)
        .bind(&self.shared.columns()?.table)
        .fetch_all(conn.get())
        .await
        .map_err(doing("reading the table's columns"))?;
        conn.commit().await?;
        Ok(columns.into_iter().collect())
    }

    /// The outbox's own number, under which the stream knows it whatever it is called, and its schema.
    async fn table(&self) -> Result<(u32, String)> {
        let c = self.shared.columns()?;
        let mut conn = self.shared.outbox.acquire().await?;
        let found: Option<(i64, String)> = sqlx::query_as(
            "SELECT c.oid::bigint, n.nspname::text FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace \
             WHERE c.oid = to_regclass($1)",
        )
        .persistent(!self.shared.outbox.pooled)
        .bind(&c.table)
        .fetch_optional(conn.get())
        .await
        .map_err(doing("looking up the table"))?;
        conn.commit().await?;
        // Without its number, its rows could not be told from those of other tables, and would be skipped.
        if let Some(found) = found.and_then(|(oid, schema)| Some((u32::try_from(oid).ok()?, schema))) {
            return Ok(found);
        }
        let (what, remedy) = match self.shared.reader(self.name())?.name_now().await? {
            Some(name) => (
                format!("the table {} is now called {name}. Nothing is skipped", c.outbox),
                format!("ALTER TABLE {name} RENAME TO {}", quote(&c.spec.table)),
            ),
            None => (
                format!("the table {} is gone: it was dropped or renamed", c.outbox),
                "correct the table's name".to_owned(),
            ),
        };
        Err(Error::permanent(Code::NO_TABLE, what).with_remedy(remedy))
    }

    async fn stream(&self, wire: &mut Wire) -> Error {
        match self.stream_on(wire).await {
            Ok(never) => match never {},
            Err(error) => error,
        }
    }

    async fn stream_on(&self, wire: &mut Wire) -> Result<std::convert::Infallible> {
        let shared = &self.shared;
        let table = self.table().await?;
        let mut relations: HashMap<u32, RelationKind> = HashMap::new();
        let mut domains: HashMap<u32, u32> = HashMap::new();
        let mut acked = shared.acked.subscribe();
        let mut status = tokio::time::interval(STATUS);
        status.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let room = shared.room.notified();
            let has_room = shared.feed().bytes() < shared.options.buffer_bytes;
            tokio::select! {
                frame = wire.receive(), if has_room => {
                    self.hear();
                    let mut frame = frame?;
                    let mut asked = None;
                    loop {
                        let described = {
                            let mut feed = shared.feed();
                            take_in(shared, &mut feed, &relations, frame, &mut asked)?
                        };
                        match described {
                            Some(Described::Relation(relation)) => {
                                let (id, known) = self.relation(&table, relation, &domains).await?;
                                relations.insert(id, known);
                            }
                            Some(Described::Domain(domain, base)) => {
                                domains.insert(domain, base);
                            }
                            None => {}
                        }
                        if shared.feed().bytes() >= shared.options.buffer_bytes {
                            break;
                        }
                        match wire.received() {
                            Some(next) => frame = next?,
                            None => break,
                        }
                    }
                    shared.arrived.notify_one();
                    if let Some(end) = asked {
                        self.tell(wire, false).await?;
                        self.answer(wire, end).await?;
                    }
                }
                () = room, if !has_room => {}
                changed = acked.changed() => {
                    if changed.is_err() {
                        return Err(Error::retryable(Code::NOT_OPEN, "the reader was closed"));
                    }
                    self.tell(wire, false).await?;
                }
                () = shared.ask.notified() => self.tell(wire, true).await?,
                _ = status.tick() => {
                    if has_room && self.silence() > SILENCE {
                        return Err(Error::retryable(
                            Code::TIMEOUT,
                            format!("the server has sent nothing for {} s, although it was asked to", SILENCE.as_secs()),
                        ));
                    }
                    if !has_room {
                        self.hear();
                    }
                    self.tell(wire, true).await?;
                }
            }
        }
    }

    /// Says how far everything is settled; with `ask`, asks how far the server is.
    async fn tell(&self, wire: &mut Wire, ask: bool) -> Result<()> {
        let settled = *self.shared.acked.borrow();
        let received = self.shared.feed().received().lsn.max(settled);
        wire.send(&status(received, settled, ask)).await
    }

    /// Answers a server that asks, by saying that everything up to `end` has arrived, and of what is settled nothing.
    ///
    /// A server that shuts down asks until all that it has sent is flushed here, its own last records included, and ends
    /// only then. We could not store that position any more, and nothing is acknowledged that is not stored. Without a
    /// flushed position it goes by the one that was received, and does not move the slot.
    async fn answer(&self, wire: &mut Wire, end: Lsn) -> Result<()> {
        wire.send(&status(end, Lsn(0), false)).await
    }

    async fn relation(
        &self,
        (oid, schema): &(u32, String),
        relation: Relation,
        domains: &HashMap<u32, u32>,
    ) -> Result<(u32, RelationKind)> {
        let c = self.shared.columns()?;
        // A table that was dropped and recreated since then had the name.
        let named = c.spec.table == relation.name && *schema == relation.schema;
        if *oid != relation.id && !named {
            return Ok((relation.id, RelationKind::Other));
        }
        let columns = relation.columns.into_iter().map(|column| {
            // A column of a domain is one of the type below it.
            let type_oid = domains.get(&column.type_oid).copied().unwrap_or(column.type_oid);
            (column.name, type_oid, column.type_modifier)
        });
        let known = match self.mapping(columns.collect()).await {
            Ok(mapping) => RelationKind::Ours(mapping),
            // The table has changed under the relay. That counts with the next row of it that is not settled.
            Err(error) if error.class() == Class::Permanent => {
                let at = self.shared.feed().received().lsn;
                let table = quote(&relation.name);
                RelationKind::Unreadable(
                    error.context(format_args!("after {at}, the table {table} is different")),
                )
            }
            Err(error) => return Err(error),
        };
        Ok((relation.id, known))
    }
}

/// A standby's status update.
fn status(received: Lsn, settled: Lsn, ask: bool) -> [u8; 34] {
    let mut message = [0_u8; 34];
    message[0] = b'r';
    message[1..9].copy_from_slice(&received.0.to_be_bytes());
    message[9..17].copy_from_slice(&settled.0.to_be_bytes());
    message[17..25].copy_from_slice(&settled.0.to_be_bytes());
    // The time is not used.
    message[33] = u8::from(ask);
    message
}

/// What the stream says of rows before they come.
enum Described {
    Relation(Relation),
    /// A domain, and the built-in type below it.
    Domain(u32, u32),
}

/// Takes in one message of the stream. Returns what it describes.
fn take_in(
    shared: &Shared,
    feed: &mut Feed,
    relations: &HashMap<u32, RelationKind>,
    mut frame: Bytes,
    asked: &mut Option<Lsn>,
) -> Result<Option<Described>> {
    let short = || Error::permanent(Code::BAD_WAL, "the stream has a message that is too short");
    match frame.first() {
        Some(b'k') if frame.len() >= 18 => {
            frame.advance(1);
            let (end, time) = (Lsn(frame.get_u64()), frame.get_i64());
            if frame.get_u8() == 1 {
                *asked = Some(end);
            }
            feed.heard(end, time);
            return Ok(None);
        }
        Some(b'w') if frame.len() >= 25 => {}
        // A kind of message that is not known yet carries no rows.
        Some(kind) if !matches!(kind, b'k' | b'w') => return Ok(None),
        _ => return Err(short()),
    }
    frame.advance(1);
    let start = Lsn(frame.get_u64());
    frame.advance(16);
    let message = pgoutput::parse(frame).map_err(|malformed| {
        Error::permanent(
            Code::BAD_WAL,
            format!(
                "the message at {start} of the stream cannot be read ({malformed}). Nothing is skipped: the relay \
                 stops here, and everything before this message is delivered. Report this with the version of the \
                 server"
            ),
        )
    })?;
    match message {
        Message::Begin { final_lsn, xid, .. } => feed.begin(final_lsn, xid)?,
        Message::Commit { end_lsn, commit_time, .. } => feed.commit(end_lsn, commit_time),
        Message::Relation(relation) => return Ok(Some(Described::Relation(relation))),
        Message::Type { oid, schema, name } => {
            return Ok(builtin(&schema, &name).map(|base| Described::Domain(oid, base)));
        }
        Message::Insert { relation, tuple } => match relations.get(&relation) {
            Some(RelationKind::Ours(mapping)) => {
                // One that cannot be read is wanted: it must not vanish.
                let wanted = !shared.is_choosy()
                    || mapping.texts(&tuple).map_or(true, |values| shared.wants(mapping, &values));
                feed.push(if wanted { Raw::Tuple(mapping.clone(), tuple) } else { Raw::Unwanted });
            }
            // Settled already, under the mapping of that time.
            Some(RelationKind::Unreadable(_)) if feed.is_next_known() => feed.push(Raw::Unwanted),
            Some(RelationKind::Unreadable(error)) => return Err(error.clone()),
            Some(RelationKind::Other) => {}
            None => {
                return Err(Error::permanent(
                    Code::BAD_WAL,
                    format!(
                        "at {start}, the stream has a row of a table ({relation}) that it has never described"
                    ),
                ));
            }
        },
        Message::Logical { transactional: true, prefix, content, .. }
            if shared.options.messages.as_ref() == Some(&prefix) =>
        {
            feed.push(Raw::Emitted(content));
        }
        Message::Truncate { relations: truncated } => {
            if truncated.iter().any(|id| matches!(relations.get(id), Some(RelationKind::Ours(_)))) {
                tracing::warn!(at = %start, "the outbox was truncated; events that were committed before are still delivered");
            }
        }
        Message::Logical { .. }
        | Message::Origin { .. }
        | Message::Update { .. }
        | Message::Delete { .. } => {}
    }
    Ok(None)
}
