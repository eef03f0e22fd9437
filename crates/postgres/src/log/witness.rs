//! Checks whether the log is still the one that a consumer has followed.
//!
//! An offset says that everything up to it is settled. This holds as long as no number up to it is drawn again.
//! `TRUNCATE … RESTART IDENTITY`, `setval` and a table that was restored without its sequence break it: an event that gets
//! such a number would never be delivered. A sequence that is below the offset shows the problem; a sequence that has passed
//! the offset since then does not. So a consumer stores a *witness*, the newest event up to its offset, and each relay
//! remembers the newest event of its last check. If that number has another event id now, this is proof. If the event is gone,
//! this alone proves nothing, since people remove rows. It is proof if the sequence also has another file, because only
//! RESTART gives it a new one.
//!
//! The check runs with every heartbeat, and before a consumer starts. A relay that notices the problem stores this, so that a
//! restart does not hide it: until a seek, offsets may have moved past events that were never delivered.

use airtight_core::{Code, Error, Result, group::GroupName};
use sqlx::{AssertSqlSafe, Row};

use super::{LogTable, consumers};
use crate::{
    PgOutbox,
    columns::{EventColumns, col},
    error::doing,
    outbox::Conn,
};

/// How long a heartbeat waits for a lock on the table.
const PATIENCE: &str = "SET LOCAL lock_timeout = '500ms'";

/// An event by which the log is known again.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Witness {
    seq: i64,
    id: String,
    /// The sequence's file when it was noted.
    file: i64,
}

impl Witness {
    /// Whether its number was drawn again; `now` is the id that has it.
    fn is_replaced(&self, now: Option<&String>, look: &Look) -> bool {
        match now {
            Some(id) => *id != self.id,
            None => self.seq > look.floor && self.file != look.file,
        }
    }
}

/// What a relay remembers from its last look. Of another server, or another life of it, it means nothing.
#[derive(Debug, Clone)]
pub(super) struct Memory {
    server: String,
    top: i64,
    newest: Option<Witness>,
}

/// The log as one statement saw it, together with what was stored before.
#[derive(Debug)]
pub(super) struct Look {
    pub(super) top: i64,
    pub(super) floor: i64,
    file: i64,
    /// The largest of the consumer's offsets.
    offset: Option<i64>,
    revision: Option<i64>,
    seen: bool,
    stored: Option<Witness>,
    /// The id that has the stored witness's number now.
    stored_now: Option<String>,
    remembered_now: Option<String>,
    newest: Option<Witness>,
    at_offset: Option<Witness>,
}

/// Looks at the log and at what a consumer has noted down about it.
pub(super) async fn look(
    outbox: &PgOutbox,
    conn: &mut Conn,
    table: &LogTable,
    consumer: &str,
    memory: Option<&Memory>,
) -> Result<Look> {
    let c = &table.columns;
    let failed = doing("checking whether the log was set back");
    let foreign = match &c.spec.log.offsets {
        Some(offsets) => consumers::find_foreign_offset(outbox, conn, offsets, consumer).await?,
        None => None,
    };
    let (seq, id, name) = (table.seq(), col(&c.spec.id), &c.table);
    let sql = format!(
        "SELECT s.top, pg_relation_filenode({oid}::bigint::oid)::bigint AS file, \
           coalesce((SELECT floor FROM {log} WHERE outbox = $1), 0) AS floor, o.seq AS place, \
           c.revision, coalesce(c.set_back, false) AS seen, c.witness_seq, c.witness_id, c.witness_file, \
           (SELECT {id}::text FROM {name} t WHERE {seq} = c.witness_seq LIMIT 1) AS stored_now, \
           (SELECT {id}::text FROM {name} t WHERE {seq} = $4 LIMIT 1) AS remembered_now, \
           n.seq AS newest_seq, n.id AS newest_id, a.seq AS at_seq, a.id AS at_id \
         FROM {top} AS s(top) \
         CROSS JOIN (SELECT coalesce($5::bigint, max(last_seq)) AS seq FROM {partition} WHERE outbox = $1 AND grp = $3) AS o \
         LEFT JOIN {consumers} c ON c.outbox = $1 AND c.name = $2 \
         LEFT JOIN LATERAL (SELECT {seq}::bigint AS seq, {id}::text AS id FROM {name} t ORDER BY {seq} DESC LIMIT 1) n ON true \
         LEFT JOIN LATERAL (SELECT {seq}::bigint AS seq, {id}::text AS id FROM {name} t WHERE {seq} <= o.seq \
           ORDER BY {seq} DESC LIMIT 1) a ON true",
        oid = table.sequence.oid,
        log = outbox.own("log"),
        partition = outbox.own("partition"),
        consumers = outbox.own("consumer"),
        top = consumers::top(table),
    );
    let remembered = memory.and_then(|memory| memory.newest.as_ref()).map(|newest| newest.seq);
    let row = sqlx::query(AssertSqlSafe(sql))
        .persistent(!outbox.pooled)
        .bind(&c.outbox)
        .bind(consumer)
        .bind(GroupName::log(consumer).stored())
        .bind(remembered)
        .bind(foreign)
        .fetch_one(conn.get())
        .await
        .map_err(&failed)?;
    let file: i64 = row.try_get("file").map_err(&failed)?;
    let witness = |seq: &str, id: &str, file: Option<i64>| -> Result<Option<Witness>> {
        let seq: Option<i64> = row.try_get(seq).map_err(&failed)?;
        let id: Option<String> = row.try_get(id).map_err(&failed)?;
        Ok(seq.zip(id).zip(file).map(|((seq, id), file)| Witness { seq, id, file }))
    };
    Ok(Look {
        top: row.try_get("top").map_err(&failed)?,
        floor: row.try_get("floor").map_err(&failed)?,
        file,
        offset: row.try_get("place").map_err(&failed)?,
        revision: row.try_get("revision").map_err(&failed)?,
        seen: row.try_get("seen").map_err(&failed)?,
        stored: witness("witness_seq", "witness_id", row.try_get("witness_file").map_err(&failed)?)?,
        stored_now: row.try_get("stored_now").map_err(&failed)?,
        remembered_now: row.try_get("remembered_now").map_err(&failed)?,
        newest: witness("newest_seq", "newest_id", Some(file))?,
        at_offset: witness("at_seq", "at_id", Some(file))?,
    })
}

impl Look {
    /// What shows that numbers were, or will be, drawn again that the consumer has passed.
    pub(super) fn set_back(&self, memory: Option<&Memory>) -> Option<String> {
        let replaced = |witness: &Witness| {
            format!("seq {} was event {}, and is now another event or missing", witness.seq, witness.id)
        };
        if let Some(offset) = self.offset.filter(|offset| *offset > self.top) {
            return Some(format!("it has passed seq {offset}, but the sequence is at {}", self.top));
        }
        if let Some(stored) = self.stored.as_ref().filter(|it| it.is_replaced(self.stored_now.as_ref(), self))
        {
            return Some(replaced(stored));
        }
        if self.seen {
            return Some("a relay noticed this while it ran".into());
        }
        let memory = memory?;
        if self.top < memory.top {
            return Some(format!("the sequence was at {}, and is at {} now", memory.top, self.top));
        }
        let newest = memory.newest.as_ref();
        newest.filter(|it| it.is_replaced(self.remembered_now.as_ref(), self)).map(replaced)
    }

    /// Refuses to continue if the log was set back.
    pub(super) fn check(&self, c: &EventColumns, consumer: &str, memory: Option<&Memory>) -> Result<()> {
        let Some(what) = self.set_back(memory) else { return Ok(()) };
        Err(Error::permanent(
            Code::SEQUENCE_BEHIND,
            format!(
                "{}: numbers that consumer `{consumer}` has passed are drawn again: {what}. The table was truncated with \
                 RESTART IDENTITY or restored, or its sequence was set back, and events that were published since \
                 then may not have been delivered. A seek delivers everything that is in the table, including what \
                 was delivered before",
                c.outbox
            ),
        )
        .with_remedy(format!("`airtight consumers seek {consumer} --earliest`")))
    }
}

/// Refuses a consumer whose log was set back, before it starts.
pub(super) async fn check(
    outbox: &PgOutbox,
    conn: &mut Conn,
    table: &LogTable,
    consumer: &str,
) -> Result<()> {
    look(outbox, conn, table, consumer, None).await?.check(&table.columns, consumer, None)
}

/// The same for one that runs: compares with what it remembers, writes down what it finds, and returns what to
/// remember from now on.
pub(super) async fn watch(
    outbox: &PgOutbox,
    table: &LogTable,
    consumer: &str,
    server: &str,
    memory: Option<Memory>,
) -> Result<Option<Memory>> {
    let memory = memory.filter(|memory| memory.server == server);
    let mut conn = outbox.begin().await?;
    sqlx::raw_sql(PATIENCE).execute(conn.get()).await.map_err(doing("checking the state of the log"))?;
    let look = match look(outbox, &mut conn, table, consumer, memory.as_ref()).await {
        // The table is locked, so nobody can publish either. The lease must not wait for the lock.
        Err(error) if error.is(&Code::LOCKED) => return Ok(memory),
        look => look?,
    };
    let checked = look.check(&table.columns, consumer, memory.as_ref());
    match (&checked, &look.at_offset) {
        (Err(_), _) if !look.seen => mark(outbox, &mut conn, table, consumer).await?,
        (Ok(()), Some(now)) if look.stored.as_ref() != Some(now) => {
            note(outbox, &mut conn, table, consumer, look.revision, now).await?;
        }
        _ => {}
    }
    conn.commit().await?;
    checked?;
    Ok(Some(Memory { server: server.to_owned(), top: look.top, newest: look.newest }))
}

/// Writes down that the log was set back.
async fn mark(outbox: &PgOutbox, conn: &mut Conn, table: &LogTable, consumer: &str) -> Result<()> {
    let sql =
        format!("UPDATE {} SET set_back = true WHERE outbox = $1 AND name = $2", outbox.own("consumer"));
    sqlx::query(AssertSqlSafe(sql))
        .persistent(!outbox.pooled)
        .bind(&table.columns.outbox)
        .bind(consumer)
        .execute(conn.get())
        .await
        .map_err(doing("recording that the log was set back"))?;
    Ok(())
}

/// Stores the witness, unless the consumer was moved since the check.
async fn note(
    outbox: &PgOutbox,
    conn: &mut Conn,
    table: &LogTable,
    consumer: &str,
    revision: Option<i64>,
    now: &Witness,
) -> Result<()> {
    let sql = format!(
        "UPDATE {} SET witness_seq = $4, witness_id = $5, witness_file = $6 \
         WHERE outbox = $1 AND name = $2 AND revision = $3",
        outbox.own("consumer")
    );
    sqlx::query(AssertSqlSafe(sql))
        .persistent(!outbox.pooled)
        .bind(&table.columns.outbox)
        .bind(consumer)
        .bind(revision)
        .bind(now.seq)
        .bind(&now.id)
        .bind(now.file)
        .execute(conn.get())
        .await
        .map_err(doing("storing the position of the consumer"))?;
    Ok(())
}

/// Forgets what was noted down, in the transaction that moves the consumer. Where the log was set back, the floor of
/// retention is one of other numbers, and goes too; and parked events whose rows are gone are moved below all
/// numbers, since theirs belong to others now: reading on would take those for parked.
pub(super) async fn forget(
    outbox: &PgOutbox,
    conn: &mut Conn,
    table: &LogTable,
    consumer: &str,
    set_back: bool,
) -> Result<()> {
    let failed = doing("clearing the stored position of the consumer");
    let c = &table.columns;
    let sql = format!(
        "UPDATE {} SET witness_seq = NULL, witness_id = NULL, witness_file = NULL, set_back = false \
         WHERE outbox = $1 AND name = $2",
        outbox.own("consumer")
    );
    sqlx::query(AssertSqlSafe(sql))
        .persistent(!outbox.pooled)
        .bind(&c.outbox)
        .bind(consumer)
        .execute(conn.get())
        .await
        .map_err(&failed)?;
    if !set_back {
        return Ok(());
    }
    let sql = format!(
        "WITH floor AS (UPDATE {log} SET floor = 0, floor_time = NULL WHERE outbox = $1), \
         stale AS (SELECT p.seq FROM {parked} p WHERE p.outbox = $1 AND p.consumer = $2 AND p.seq > 0 \
           AND NOT EXISTS (SELECT FROM {table} t WHERE {seq} = p.seq AND {id}::text = p.id)), \
         shift AS (SELECT (SELECT max(seq) FROM stale) - least(min(p.seq), 1) + 1 AS by FROM {parked} p \
           WHERE p.outbox = $1 AND p.consumer = $2) \
         UPDATE {parked} p SET seq = p.seq - shift.by FROM stale, shift \
         WHERE p.outbox = $1 AND p.consumer = $2 AND p.seq = stale.seq",
        log = outbox.own("log"),
        parked = outbox.own("parked"),
        table = c.table,
        seq = table.seq(),
        id = col(&c.spec.id),
    );
    sqlx::query(AssertSqlSafe(sql))
        .persistent(!outbox.pooled)
        .bind(&c.outbox)
        .bind(consumer)
        .execute(conn.get())
        .await
        .map_err(failed)?;
    Ok(())
}
