//! A sequence that is behind its table: a copy that was restored without sequences, a `setval`, a table that was recreated.
//!
//! If the numbers of such a sequence are in use, publishing is refused. If they are free and below the offsets of consumers,
//! no consumer would ever read the events that get them. `migrate` moves the sequence forward, and marks the consumers below
//! whose offset something was stored: `crate::log::witness` stops these until a person seeks them.

use std::time::Duration;

use airtight_core::{
    Code, Error, Result,
    admin::Finding,
    group::GroupKind,
    table::{Shape, literal, quote},
};
use sqlx::{AssertSqlSafe, Row};

use super::{LOCK_TIMEOUT, Names, TRIES, migrate_command};
use crate::{PgOutbox, error::doing, groups, log::table_partitions::is_locked, outbox::Conn};

/// Where a sequence stands, and where it must stand at least.
struct SequenceState {
    stands: i64,
    needed: i64,
}

/// The error for an event whose number another one has.
pub(crate) fn behind(outbox: &PgOutbox, seq: Option<i64>) -> Error {
    let name = outbox.spec.display_name();
    let which = seq.map_or(format!("the next seq of {name}"), |seq| format!("seq {seq} of {name}"));
    Error::permanent(
        Code::SEQUENCE_BEHIND,
        format!(
            "{which} is taken by another event: the sequence is behind the table, and nothing was stored"
        ),
    )
    .with_remedy(format!(
        "{}, as the owner of the table; then publish again",
        migrate_command(&outbox.options)
    ))
}

impl PgOutbox {
    /// Moves the outbox's sequence behind everything that has a number. Returns a line for each thing done.
    pub(super) async fn mend_sequence(&self) -> Result<Vec<String>> {
        let mut done = Vec::new();
        if self.options.spec.is_some() {
            return Ok(done);
        }
        let mut wait = Duration::from_millis(100);
        for _ in 0..TRIES {
            let mut conn = self.acquire().await?;
            let state = self.sequence_state(&mut conn).await?;
            conn.commit().await?;
            if !state.is_behind() {
                return Ok(done);
            }
            if let Some(lines) = self.move_sequence().await? {
                done.extend(lines);
                return Ok(done);
            }
            tokio::time::sleep(wait).await;
            wait = (wait * 2).min(Duration::from_secs(1));
        }
        Err(self.kept_locked())
    }

    /// Moves it, with everybody kept from publishing: whoever publishes locks the table before a number is drawn. None if the
    /// lock could not be had.
    async fn move_sequence(&self) -> Result<Option<Vec<String>>> {
        let failed = doing("moving the sequence");
        let mut conn = self.begin().await?;
        let lock =
            format!("{LOCK_TIMEOUT}; LOCK TABLE {} IN SHARE ROW EXCLUSIVE MODE", self.spec.qualified());
        match sqlx::raw_sql(AssertSqlSafe(lock)).execute(conn.get()).await {
            Ok(_) => {}
            Err(error) if is_locked(&error) => return Ok(None),
            Err(error) => return Err(failed(error)),
        }
        let state = self.sequence_state(&mut conn).await?;
        if !state.is_behind() {
            return Ok(Some(Vec::new()));
        }
        let passed = self.passed(&mut conn).await?;
        let name = self.sequence(&mut conn).await?;
        sqlx::query("SELECT setval($1::text::regclass, $2)")
            .persistent(!self.pooled)
            .bind(&name)
            .bind(state.needed)
            .execute(conn.get())
            .await
            .map_err(&failed)?;
        if !passed.is_empty() {
            let sql = format!(
                "UPDATE {} SET set_back = true WHERE outbox = $1 AND name = ANY($2)",
                self.own("consumer")
            );
            sqlx::query(AssertSqlSafe(sql))
                .persistent(!self.pooled)
                .bind(self.spec.display_name())
                .bind(&passed)
                .execute(conn.get())
                .await
                .map_err(&failed)?;
        }
        conn.commit().await?;
        let mut lines = vec![format!(
            "moved {} from {} to {}: it was behind the table",
            name.replace('"', ""),
            state.stands,
            state.needed
        )];
        lines.extend(passed.into_iter().map(|consumer| {
            format!(
                "consumer `{consumer}` has passed numbers under which events were stored in the meantime. It \
                 delivers nothing until a seek moves it. Fix: `airtight consumers seek {consumer} --earliest`"
            )
        }));
        Ok(Some(lines))
    }

    /// The sequence behind the canonical table, quoted.
    async fn sequence(&self, conn: &mut Conn) -> Result<String> {
        if self.options.shape == Shape::Log {
            return Ok(Names::of(&self.options).fill("{sequence}"));
        }
        let found: Option<String> = sqlx::query_scalar("SELECT pg_get_serial_sequence($1, 'seq')")
            .persistent(!self.pooled)
            .bind(self.spec.qualified())
            .fetch_one(conn.get())
            .await
            .map_err(doing("looking for the sequence"))?;
        found.ok_or_else(|| {
            Error::permanent(
                Code::NO_SEQUENCE,
                format!("the column seq of {} no longer draws from a sequence", self.spec.display_name()),
            )
            .with_remedy(format!(
                "ALTER TABLE {} ALTER COLUMN seq ADD GENERATED BY DEFAULT AS IDENTITY; then run {}",
                self.spec.qualified(),
                migrate_command(&self.options)
            ))
        })
    }

    async fn sequence_state(&self, conn: &mut Conn) -> Result<SequenceState> {
        let failed = doing("comparing the sequence with the table");
        let sequence = self.sequence(conn).await?;
        let consumers = match self.options.shape {
            Shape::Queue => String::new(),
            Shape::Log => format!(
                ", (SELECT max(last_seq) FROM {} WHERE outbox = $1 AND {}), \
                 (SELECT floor FROM {} WHERE outbox = $1)",
                self.own("partition"),
                groups::is_kind("grp", GroupKind::Log),
                self.own("log")
            ),
        };
        let sql = format!(
            "SELECT CASE WHEN s.is_called THEN s.last_value ELSE s.last_value - 1 END, \
               coalesce(greatest((SELECT max(seq) FROM {}){consumers}), 0) FROM {sequence} s WHERE $1 <> ''",
            self.spec.qualified()
        );
        let row = sqlx::query(AssertSqlSafe(sql))
            .persistent(!self.pooled)
            .bind(self.spec.display_name())
            .fetch_one(conn.get())
            .await
            .map_err(&failed)?;
        Ok(SequenceState {
            stands: row.try_get(0).map_err(&failed)?,
            needed: row.try_get(1).map_err(&failed)?,
        })
    }

    /// Consumers beyond events that were stored after they had passed: younger than the last move of the offset above them,
    /// or than the event with the highest number.
    async fn passed(&self, conn: &mut Conn) -> Result<Vec<String>> {
        if self.options.shape != Shape::Log {
            return Ok(Vec::new());
        }
        let table = self.spec.qualified();
        let sql = format!(
            "SELECT c.name FROM {consumer} c WHERE c.outbox = $1 AND EXISTS (SELECT FROM {partition} p JOIN {table} o \
               ON o.seq <= p.last_seq AND (o.created_at >= p.moved_at \
                 OR o.created_at > (SELECT n.created_at FROM {table} n ORDER BY n.seq DESC LIMIT 1)) \
               WHERE p.outbox = c.outbox AND p.grp = {group}) ORDER BY 1",
            consumer = self.own("consumer"),
            partition = self.own("partition"),
            group = groups::stored(GroupKind::Log, "c.name"),
        );
        sqlx::query_scalar(AssertSqlSafe(sql))
            .persistent(!self.pooled)
            .bind(self.spec.display_name())
            .fetch_all(conn.get())
            .await
            .map_err(doing("looking for events below the offsets"))
    }

    /// What `check` says of it.
    pub(crate) async fn sequence_finding(&self, conn: &mut Conn) -> Result<Option<Finding>> {
        if self.options.spec.is_some() || self.options.shape != Shape::Log {
            return Ok(None);
        }
        let SequenceState { stands, needed } = self.sequence_state(conn).await?;
        Ok((stands < needed).then(|| {
            Finding::fatal(format!(
                "the sequence of {} is at {stands}, but seq {needed} is already used: new events are refused, or stored \
                 below the offsets of consumers",
                self.spec.display_name()
            ))
            .with_remedy(migrate_command(&self.options))
        }))
    }

    /// Aborts the transaction that a connection is in, so that nobody commits part of what was published.
    pub(crate) fn abort_sql(error: &Error) -> String {
        format!(
            "DO {}",
            literal(&format!(
                "BEGIN RAISE EXCEPTION USING ERRCODE = 'unique_violation', MESSAGE = {}; END",
                literal(&error.to_string())
            ))
        )
    }

    /// The constraint that a clash of numbers violates in a queue.
    pub(crate) fn primary_key(&self) -> String {
        format!("{}_pkey", self.options.table)
    }

    /// The expression that draws a log's next number.
    pub(crate) fn draw(&self) -> String {
        let sequence =
            format!("{}.{}", quote(&self.options.schema), quote(&format!("{}_seq", self.options.table)));
        let table = format!("{}.{}", quote(&self.options.schema), quote(&self.options.table));
        // In a table that airtight did not create, it may have another name.
        format!(
            "nextval((SELECT coalesce(pg_get_serial_sequence({}, 'seq'), {}))::regclass)",
            literal(&table),
            literal(&sequence)
        )
    }
}

impl SequenceState {
    fn is_behind(&self) -> bool {
        self.stands < self.needed
    }
}
