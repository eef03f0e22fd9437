//! Reads the canonical table: looks, pages, what is due, and the net. [`super::reader`] has the rules.

use std::time::Instant;

use airtight_core::{
    Code, Error, Order, Result,
    group::{Member, evicted},
    queue::{ClaimRequest, Claimed, ClaimedRow, RowKey},
};
use futures::TryStreamExt;
use sqlx::{AssertSqlSafe, Row, postgres::PgRow};

use super::{
    super::{as_i64, most_events},
    Canonical, partition_of,
    reader::{Found, Holder, Holders, Marks, Page, Waiting},
    slots,
    version::Version,
};
use crate::{
    PgOutbox,
    decode::{self, Layout},
    error::doing,
};

/// How often a call that found only events to hold back reads on: bounds how long it takes.
const ROUNDS: u32 = 100;

/// What can be delivered now.
pub(super) async fn next(
    store: &Canonical,
    outbox: &PgOutbox,
    request: &ClaimRequest<'_>,
) -> Result<Claimed> {
    let reading =
        Reading { store, outbox, request, slots: slots(request.partitions, request.member.partitions) };
    store.reader().own(request.member.id, &reading.slots);
    let claimed = if request.alone { reading.alone().await } else { reading.some().await };
    if claimed.is_err() {
        store.reader().call_failed(request.token);
    }
    claimed
}

/// One call.
struct Reading<'a> {
    store: &'a Canonical,
    outbox: &'a PgOutbox,
    request: &'a ClaimRequest<'a>,
    slots: Vec<i16>,
}

/// A row of a page, with its event.
struct ReadRow {
    found: Found,
    row: ClaimedRow,
}

impl Reading<'_> {
    async fn some(&self) -> Result<Claimed> {
        let events = most_events(self.request);
        let mut claimed = Claimed::default();
        for _ in 0..ROUNDS {
            let netted = self.cast_net().await?;
            if self.store.reader().wants_look() {
                self.look().await?;
            }
            let mut held = false;
            let beyond = if netted { self.store.reader().ask_beyond(events) } else { None };
            if let Some(page) = beyond {
                held |= self.page(&page, events, true, &mut claimed).await?;
            }
            // In total order an event that waits comes after everything before it, and alone.
            if self.request.member.order != Order::Total {
                held |= self.due(events, None, &mut claimed).await?;
            }
            let left = events.saturating_sub(claimed.rows.len());
            let page = if left > 0 { self.store.reader().ask(left) } else { None };
            let read_on = page.is_some();
            if let Some(page) = page {
                held |= self.page(&page, left, false, &mut claimed).await?;
            }
            let barrier = self.store.reader().waiting().barrier;
            if self.request.member.order == Order::Total && claimed.rows.is_empty() && !read_on {
                let idle = self.store.reader().is_idle();
                if let (true, Some(barrier)) = (idle, barrier) {
                    self.due(1, Some(barrier), &mut claimed).await?;
                }
            }
            // Nothing was found but events behind one that waits. They are out of the way now: an empty answer would let
            // the relay rest, although more may follow them.
            if !claimed.rows.is_empty() || claimed.suspects || !(held || read_on) {
                break;
            }
        }
        Ok(claimed)
    }

    /// See [`super::reader`], rule 1.
    async fn look(&self) -> Result<()> {
        let failed = doing("looking for new events");
        let failures = self.store.reader().failures();
        let member = self.request.member;
        let mut conn = self.outbox.acquire().await?;
        let first = sqlx::query(AssertSqlSafe(self.store.sql()?.top.clone()))
            .persistent(!self.outbox.pooled)
            .bind(&self.slots)
            .bind(&member.streams)
            .bind(member.block_on_dead)
            .bind(member.order == Order::Total)
            .fetch_one(conn.get())
            .await
            .map_err(&failed)?;
        conn.commit().await?;
        // A statement of its own, and behind a pooler a transaction of its own.
        let mut conn = self.outbox.acquire().await?;
        let second = sqlx::query(AssertSqlSafe(self.store.sql()?.publishers.clone()))
            .persistent(!self.outbox.pooled)
            .bind(self.store.reading()?.0.oid)
            .fetch_one(conn.get())
            .await
            .map_err(&failed)?;
        conn.commit().await?;
        if second.try_get("standby").map_err(&failed)? {
            return Err(Error::unavailable(
                Code::READ_ONLY,
                "this server is a standby, which does not show who is publishing: read the queue on the primary",
            ));
        }
        let names: Vec<String> = second.try_get("names").map_err(&failed)?;
        let prepared: Vec<bool> = second.try_get("prepared").map_err(&failed)?;
        let running: Vec<bool> = second.try_get("running").map_err(&failed)?;
        let numbers: Vec<i64> = second.try_get("unseen").map_err(&failed)?;
        let holders = names.into_iter().zip(prepared.into_iter().zip(running));
        let holders = Holders {
            all: holders.map(|(name, (prepared, running))| Holder { name, prepared, running }).collect(),
            unseen: numbers.into_iter().map(Version::of).collect(),
            next: Version::of(second.try_get("next").map_err(&failed)?),
            server: second.try_get("server").map_err(&failed)?,
        };
        let waiting = Waiting {
            waits: first.try_get("waits").map_err(&failed)?,
            due: first.try_get("due").map_err(&failed)?,
            dead: first.try_get("dead").map_err(&failed)?,
            barrier: first.try_get("barrier").map_err(&failed)?,
        };
        let top: i64 = first.try_get("top").map_err(&failed)?;
        self.store.reader().looked(top, &holders, waiting, failures);
        Ok(())
    }

    /// Reads one page and hands it out. Returns whether events were held back.
    ///
    /// A page `beyond` the top finds rows with an explicit seq. Those that the sequence has reached by now may have been
    /// drawn from it since, and are left to a look.
    async fn page(&self, page: &Page, events: usize, beyond: bool, claimed: &mut Claimed) -> Result<bool> {
        let read = self.read_page(page).await;
        if read.is_err() {
            self.store.reader().failed();
        }
        let (mut rows, cut_short) = read?;
        if beyond && !rows.is_empty() {
            self.look().await.inspect_err(|_| self.store.reader().failed())?;
            let top = self.store.reader().top();
            rows.retain(|row| row.found.seq > top);
        }
        let found: Vec<Found> = rows.iter().map(|row| row.found).collect();
        let total = self.request.member.order == Order::Total;
        let (taken, marks) = {
            let mut reader = self.store.reader();
            let taken = reader.read(page, &found, events, cut_short, total);
            for at in &taken {
                reader.hand_out(&found[*at], self.request.token, false);
            }
            (taken, reader.marks())
        };
        let blocked: Vec<Found> = found.iter().filter(|row| row.blocked).copied().collect();
        let handed = async {
            if !blocked.is_empty() {
                self.hold(&blocked).await?;
            }
            if taken.is_empty() {
                Ok(())
            } else {
                mark(self.store, self.outbox, self.request.member, page.number, marks).await
            }
        };
        if let Err(error) = handed.await {
            let mut reader = self.store.reader();
            for at in &taken {
                reader.released(found[*at].seq, self.request.token);
            }
            reader.give_back(&blocked);
            return Err(error);
        }
        let mut rows: Vec<Option<ClaimedRow>> = rows.into_iter().map(|row| Some(row.row)).collect();
        claimed.rows.extend(taken.iter().filter_map(|at| rows[*at].take()));
        claimed.rows.sort_by(|left, right| left.key.cmp(&right.key));
        Ok(!blocked.is_empty())
    }

    /// The rows of a page, and whether it was given up before its end, for it had more bytes than were asked for.
    async fn read_page(&self, page: &Page) -> Result<(Vec<ReadRow>, bool)> {
        let failed = doing("reading events");
        let waiting = self.store.reader().waiting();
        let by_key = self.request.member.order == Order::Key;
        let mut conn = self.outbox.acquire().await?;
        let mut stream = sqlx::query(AssertSqlSafe(self.store.sql()?.page.clone()))
            .persistent(!self.outbox.pooled)
            .bind(&page.slots)
            .bind(&page.after)
            .bind(&page.through)
            .bind(&page.limits)
            .bind(&page.hand_seqs)
            .bind(&page.hand_versions)
            .bind(&self.request.member.streams)
            .bind(by_key && waiting.waits)
            .bind(by_key && waiting.dead)
            .bind(as_i64(self.request.max_payload))
            .fetch(conn.get());
        let mut rows = Vec::new();
        let mut bytes = 0;
        let mut layout = None;
        let mut cut_short = false;
        while let Some(row) = stream.try_next().await.map_err(&failed)? {
            let layout = match layout {
                Some(layout) => layout,
                None => *layout.insert(Layout::of(&row)?),
            };
            let read = self.row(&row, layout, 0)?;
            let size = read.row.event.as_ref().map_or(0, |event| event.payload.len());
            // One event always fits.
            if bytes + size > self.request.bytes && !rows.is_empty() {
                cut_short = true;
                break;
            }
            bytes += size;
            rows.push(read);
        }
        drop(stream);
        if cut_short {
            conn.hang_up();
        } else {
            conn.commit().await?;
        }
        Ok((rows, cut_short))
    }

    /// A row whose own columns begin at `at`: seq, slot, version, attempts, lost leases, and in a page whether it is blocked.
    fn row(&self, row: &PgRow, layout: Layout, at: usize) -> Result<ReadRow> {
        let failed = doing("reading events");
        let seq: i64 = row.try_get(at).map_err(&failed)?;
        let slot: i16 = row.try_get(at + 1).map_err(&failed)?;
        let version: Version = row.try_get(at + 2).map_err(&failed)?;
        let attempts: i32 = row.try_get(at + 3).map_err(&failed)?;
        let lost: i32 = row.try_get(at + 4).map_err(&failed)?;
        let waited = at > 0;
        let blocked = !waited && row.try_get(at + 5).map_err(&failed)?;
        let claimed = ClaimedRow {
            key: RowKey::Int(seq),
            partition: partition_of(u16::try_from(slot).unwrap_or(0), self.request.member.partitions),
            attempt: u32::try_from(attempts).unwrap_or(0).saturating_add(1),
            max_attempts: layout.max_attempts(row),
            lost_leases: u32::try_from(lost).unwrap_or(0),
            waited,
            event: layout.event(row, &self.store.spec, self.request.max_payload),
        };
        Ok(ReadRow { found: Found { seq, slot, version, blocked }, row: claimed })
    }

    /// Claims what has waited and is due. Returns whether events were held back.
    async fn due(&self, events: usize, only: Option<i64>, claimed: &mut Claimed) -> Result<bool> {
        if !self.store.reader().waiting().due {
            return Ok(false);
        }
        let member = self.request.member;
        let in_hand = self.store.reader().waited_in_hand();
        let mut conn = self.outbox.acquire().await?;
        let rows = sqlx::query(AssertSqlSafe(self.store.sql()?.due.clone()))
            .persistent(!self.outbox.pooled)
            .bind(member.id)
            .bind(&self.slots)
            .bind(as_i64(events))
            .bind(member.lease.as_secs_f64())
            .bind(in_hand)
            .bind(&member.streams)
            .bind(member.order == Order::Key)
            .bind(member.block_on_dead)
            .bind(as_i64(self.request.max_payload))
            .bind(only)
            .fetch_all(conn.get())
            .await
            .map_err(doing("claiming events that are due"))?;
        conn.commit().await?;
        let held = self.take_in(&rows, claimed)?;
        if rows.len() < events {
            self.store.reader().claimed_due();
        }
        Ok(held)
    }

    async fn alone(&self) -> Result<Claimed> {
        let member = self.request.member;
        let mut conn = self.outbox.acquire().await?;
        let rows = sqlx::query(AssertSqlSafe(self.store.sql()?.alone.clone()))
            .persistent(!self.outbox.pooled)
            .bind(member.id)
            .bind(&self.slots)
            .bind(member.lease.as_secs_f64())
            .bind(&member.streams)
            .bind(member.order == Order::Key)
            .bind(member.order == Order::Total)
            .bind(member.block_on_dead)
            .bind(as_i64(self.request.max_payload))
            .fetch_all(conn.get())
            .await
            .map_err(doing("claiming an event alone"))?;
        conn.commit().await?;
        let mut claimed = Claimed::default();
        self.take_in(&rows, &mut claimed)?;
        Ok(claimed)
    }

    /// Takes in rows that were claimed in the table. Returns whether others were held back.
    fn take_in(&self, rows: &[PgRow], claimed: &mut Claimed) -> Result<bool> {
        let mut held = false;
        for row in rows {
            if !decode::get::<bool>(row, "alive")? {
                return Err(evicted());
            }
            held |= decode::get::<bool>(row, "held")?;
            claimed.suspects |= decode::get::<bool>(row, "suspects")?;
            if decode::get::<Option<i64>>(row, "seq")?.is_none() {
                continue;
            }
            let read = self.row(row, Layout::of(row)?, 3)?;
            self.store.reader().hand_out(&read.found, self.request.token, true);
            claimed.rows.push(read.row);
        }
        Ok(held)
    }

    async fn hold(&self, rows: &[Found]) -> Result<()> {
        let mut conn = self.outbox.acquire().await?;
        sqlx::query(AssertSqlSafe(self.store.sql()?.hold.clone()))
            .persistent(!self.outbox.pooled)
            .bind(self.request.member.id)
            .bind(rows.iter().map(|row| row.seq).collect::<Vec<_>>())
            .bind(rows.iter().map(|row| row.version).collect::<Vec<_>>())
            .execute(conn.get())
            .await
            .map_err(doing("holding events back"))?;
        conn.commit().await
    }

    /// The net, if it is time: what the cursors have passed is read again from there.
    async fn cast_net(&self) -> Result<bool> {
        let Some(net) = self.store.reader().net() else { return Ok(false) };
        let failed = doing("looking for events that were passed");
        let began = Instant::now();
        let mut conn = self.outbox.acquire().await?;
        let found: Vec<(i16, i64)> = sqlx::query_as(AssertSqlSafe(self.store.sql()?.net.clone()))
            .persistent(!self.outbox.pooled)
            .bind(&net.slots)
            .bind(&net.through)
            .bind(&net.limits)
            .bind(&net.hand_seqs)
            .bind(&net.hand_versions)
            .bind(&self.request.member.streams)
            .fetch_all(conn.get())
            .await
            .map_err(failed)?;
        conn.commit().await?;
        self.store.reader().netted(began.elapsed(), &found);
        Ok(true)
    }
}

/// Writes how far events are handed out: see `sql/mark.sql`.
pub(super) async fn mark(
    store: &Canonical,
    outbox: &PgOutbox,
    member: &Member,
    page: u64,
    marks: Marks,
) -> Result<()> {
    let mut conn = outbox.acquire().await?;
    let alive = sqlx::query(AssertSqlSafe(store.sql()?.mark.clone()))
        .persistent(!outbox.pooled)
        .bind(member.id)
        .bind(i64::try_from(page).unwrap_or(i64::MAX))
        .bind(&marks.slots)
        .bind(&marks.seqs)
        .fetch_optional(conn.get())
        .await
        .map_err(doing("marking what is handed out"))?;
    conn.commit().await?;
    if alive.is_none() {
        return Err(evicted());
    }
    store.reader().marked(marks);
    Ok(())
}
