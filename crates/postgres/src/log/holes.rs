//! The rule for holes: when is a `seq` that is missing missing for ever?
//!
//! `seq` is drawn before its transaction commits, so 6 can be visible while 5 is still in flight; a reader that
//! goes by `seq > last` alone would lose 5. A reader here stops at the first hole, and passes it only once it is
//! certain that nobody can fill it any more.
//!
//! # The rule
//!
//! 1. Read ascending on the plain `seq`, before any filter on stream or partition, and stop at the first hole.
//!    Then let `top` be the newest value of the sequence.
//! 2. In a *later* statement, note who holds `RowExclusiveLock` on the **sequence** behind `seq`.
//! 3. Wait until none of these is left. Then note the holders that have no process, which are prepared
//!    transactions, and wait for them, too.
//! 4. Read again, in a statement of its own. Of the holes up to `top`, what is missing now never was.
//!
//! # Why it misses nothing
//!
//! Take a hole `h ≤ top` and the transaction `T` that drew it. The sequence hands values out in ascending order,
//! one at a time (`CACHE 1`, `INCREMENT 1`, no `CYCLE`; [`super::check`] refuses others), and `top` had been drawn
//! when it was read: so `T` had drawn `h` before step 1 ended. `nextval` locks the sequence before it draws
//! and keeps that lock until its transaction ends; a transaction that ends becomes visible first and releases its
//! locks afterwards. So at step 2 there are two cases:
//!
//! - `T` has ended. Then the read in step 4, whose snapshot is younger, sees what it committed.
//! - `T` holds the lock. Then it is noted, under its *virtual transaction*, which it keeps until it ends, or
//!   until it is prepared. When the noted ones are gone, `T` has ended (as above), or it was prepared. A prepared
//!   transaction still holds the lock, but under another name and without a process: hence the second half of
//!   step 3, in a statement after the first half was seen to be true. When these are gone, too, `T` has ended.
//!   (Newer servers keep the name through PREPARE, and lose it only when they restart. Both are right here.)
//!
//! # What would be wrong
//!
//! - *The lock on the table.* A value can be drawn ahead of the INSERT, and an INSERT straight into a partition
//!   does not lock the parent.
//! - *The process id.* PREPARE takes it away, and a pooled session has one for many transactions.
//! - *Looking at the locks in the same statement as the rows.* A transaction that began after the statement's
//!   snapshot, drew and committed in between would be neither visible nor a holder.
//! - *`pg_snapshot_xmin`.* It is right, but an unrelated transaction that is left open stops every reader.
//!
//! A value that is drawn in one transaction and inserted by another breaks the rule, and is not supported. A
//! crash of the server aborts what was not prepared, and what was prepared comes back with its locks; the values
//! that a sequence skips then are holes that nobody holds. On another server, or after a restart, the
//! reader notes the holders again.

use airtight_core::{Code, Error, Result};
use sqlx::Row;

use crate::{PgOutbox, error::doing};

/// What is known of holes: up to where none can be filled any more, and who might fill those behind.
#[derive(Debug, Default)]
pub(super) struct Holes {
    /// A hole up to here never was an event.
    decided_to: i64,
    pending: Option<PendingHole>,
}

#[derive(Debug)]
struct PendingHole {
    /// Holes up to here are decided when none of `noted` is left.
    top: i64,
    /// Virtual transactions that may still fill one.
    noted: Vec<String>,
    /// The noted ones are those without a process, noted after the others had ended.
    prepared: bool,
    /// When the server that gave these names was started.
    server: String,
}

impl PendingHole {
    fn new(top: i64, holders: &Holders) -> Self {
        Self { top, noted: holders.all.clone(), prepared: false, server: holders.server.clone() }
    }
}

/// Those who hold the sequence, as one statement saw them.
#[derive(Debug)]
pub(super) struct Holders {
    /// All of them.
    all: Vec<String>,
    /// Those without a process.
    prepared: Vec<String>,
    server: String,
}

/// How far a read may go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Reach {
    /// How many of the rows come before the first hole that may still be filled.
    pub(super) rows: usize,
    /// Up to where everything is in these rows, or never was.
    pub(super) through: i64,
    /// There is a hole that stops it.
    pub(super) blocked: bool,
    /// It passes holes that were decided, so that retention must be asked whether it made them.
    pub(super) passes_holes: bool,
}

impl Holes {
    /// Up to where holes are decided. For a read that begins afterwards, not for one that is under way: what was
    /// read before a hole was decided does not have what filled it.
    pub(super) fn decided_to(&self) -> i64 {
        self.decided_to
    }

    /// Whether a transaction is waited for. If not, the next look notes who holds the sequence then.
    pub(super) fn is_watching(&self) -> bool {
        self.pending.is_some()
    }

    /// Takes in who holds the sequence, as seen after `top` had been drawn. Returns whether holes were decided, so that reading again leads further.
    pub(super) fn look(&mut self, top: i64, holders: Holders) -> bool {
        let mut pending = match self.pending.take() {
            // Names of another server, or of another life of this one, mean nothing.
            Some(pending) if pending.server == holders.server => pending,
            // It has no `top`: nothing is decided by it, and the next one begins with a `top`.
            Some(_) => PendingHole::new(0, &holders),
            None => PendingHole::new(top, &holders),
        };
        pending.noted.retain(|noted| holders.all.contains(noted));
        if pending.noted.is_empty() && !pending.prepared {
            // They have ended, or were prepared meanwhile: this statement is younger than their end.
            (pending.noted, pending.prepared) = (holders.prepared, true);
        }
        if pending.noted.is_empty() {
            self.decided_to = self.decided_to.max(pending.top);
            return true;
        }
        self.pending = Some(pending);
        false
    }

    /// Forgets everything: offsets were moved, or the connection was lost.
    pub(super) fn forget(&mut self) {
        *self = Self::default();
    }
}

/// How far one may go among rows that were read from `after` on, in a statement that began when holes were
/// decided up to `decided_to`.
pub(super) fn reach(after: i64, decided_to: i64, seqs: impl Iterator<Item = i64>) -> Reach {
    let mut reach = Reach { rows: 0, through: after, blocked: false, passes_holes: false };
    for seq in seqs {
        if seq > reach.through + 1 {
            // The hole ends at seq - 1.
            if seq - 1 > decided_to {
                reach.blocked = true;
                // The part of it that is decided can be left behind, not more.
                if decided_to > reach.through {
                    (reach.through, reach.passes_holes) = (decided_to, true);
                }
                break;
            }
            reach.passes_holes = true;
        }
        reach.rows += 1;
        reach.through = seq;
    }
    reach
}

/// Who holds the sequence right now. A statement of its own, after the one that read the rows.
pub(super) async fn holders(outbox: &PgOutbox, sequence: i64) -> Result<Holders> {
    let failed = doing("looking for open publishers");
    let mut conn = outbox.acquire().await?;
    let row = sqlx::query(
        "SELECT coalesce(array_agg(l.virtualtransaction), '{}') AS held, \
           coalesce(array_agg(l.virtualtransaction) FILTER (WHERE l.pid IS NULL), '{}') AS prepared, \
           pg_postmaster_start_time()::text AS server, pg_is_in_recovery() AS standby \
         FROM pg_locks l WHERE l.locktype = 'relation' AND l.relation = $1::bigint::oid \
           AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database()) \
           AND l.mode = 'RowExclusiveLock' AND l.granted",
    )
    .persistent(!outbox.pooled)
    .bind(sequence)
    .fetch_one(conn.get())
    .await
    .map_err(&failed)?;
    conn.commit().await?;
    if row.try_get("standby").map_err(&failed)? {
        return Err(Error::unavailable(
            Code::READ_ONLY,
            "this server is a standby, which does not show who is publishing: follow the log on the primary",
        ));
    }
    Ok(Holders {
        all: row.try_get("held").map_err(&failed)?,
        prepared: row.try_get("prepared").map_err(&failed)?,
        server: row.try_get("server").map_err(&failed)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn holders(all: &[&str], prepared: &[&str]) -> Holders {
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        Holders { all: names(all), prepared: names(prepared), server: "s".into() }
    }

    fn far(holes: &Holes, after: i64, seqs: &[i64]) -> (usize, i64, bool) {
        let reach = super::reach(after, holes.decided_to, seqs.iter().copied());
        (reach.rows, reach.through, reach.blocked)
    }

    #[test]
    fn a_read_stops_at_the_first_hole_that_is_not_decided() {
        let mut holes = Holes::default();
        assert_eq!(far(&holes, 0, &[1, 2, 3]), (3, 3, false));
        assert_eq!(far(&holes, 0, &[1, 2, 5, 6]), (2, 2, true));
        assert_eq!(far(&holes, 0, &[3]), (0, 0, true));
        assert!(holes.look(6, holders(&[], &[])));
        assert_eq!(far(&holes, 2, &[5, 6, 7]), (3, 7, false));
        assert_eq!(far(&holes, 2, &[5, 6, 9]), (2, 6, true), "7 and 8 are not decided");
        assert_eq!(far(&holes, 4, &[9]), (0, 6, true), "5 and 6 never were, 7 and 8 may be");
    }

    #[test]
    fn whoever_was_noted_is_waited_for_and_nobody_else() {
        let mut holes = Holes::default();
        assert!(!holes.look(10, holders(&["3/1", "4/1"], &[])));
        assert!(!holes.look(20, holders(&["4/1", "5/1"], &[])), "4/1 was noted");
        assert!(holes.look(20, holders(&["5/1", "6/1"], &[])), "5/1 came later");
        assert!(holes.decided_to() == 10, "decided up to what the first look was about");
    }

    #[test]
    fn one_that_was_prepared_meanwhile_is_waited_for_under_its_new_name() {
        let mut holes = Holes::default();
        assert!(!holes.look(10, holders(&["3/1"], &[])));
        assert!(!holes.look(10, holders(&["-1/77"], &["-1/77"])), "3/1 became this");
        assert!(!holes.look(10, holders(&["-1/77", "-1/78"], &["-1/77", "-1/78"])));
        assert!(holes.look(10, holders(&["-1/78"], &["-1/78"])), "78 was prepared later");
    }

    #[test]
    fn another_life_of_the_server_starts_over() {
        let mut holes = Holes::default();
        assert!(!holes.look(10, holders(&["3/1"], &[])));
        let mut other = holders(&["9/9"], &[]);
        other.server = "t".into();
        assert!(!holes.look(12, other));
        assert!(holes.decided_to() == 0);
    }
}
