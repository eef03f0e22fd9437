//! `airtight tail`: follows the outbox and changes nothing.
//!
//! A seq is assigned before its transaction commits, so 6 can be visible while 5 is not committed yet. Missing seqs are
//! remembered for a while and looked for again; an event that becomes visible late is printed late.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use airtight::{
    admin::{Admin, EventRow, Filter},
    envelope,
};

use crate::{
    args::{FilterArgs, TailArgs},
    errors::{Failure, Outcome},
    output::{self, printable, time},
    signals,
    wiring::Target,
};

/// Rows per query.
const PAGE: usize = 1_000;
/// How long a missing seq is looked for.
const PATIENCE: Duration = Duration::from_secs(60);
/// The maximum number of missing seqs to remember.
const MAX_HOLES: usize = 10_000;

pub(crate) async fn run(args: &TailArgs) -> Outcome {
    let target = Target::from_args(&args.database)?;
    if target.database.spec.as_ref().is_some_and(|spec| spec.seq.is_none()) {
        return Err(Failure::usage(
            "`airtight tail` needs an ascending column, and the config's [table] maps none; map one as `seq`",
        ));
    }
    let store = target.open().await?;
    let admin = store.admin();
    let shutdown = signals::shutdown(|| {});
    let mut seen = SeenSeqs::default();
    if !args.from_start {
        let newest = Filter { newest_first: true, limit: PAGE, ..Filter::default() };
        let mut rows = admin.list(&newest).await?;
        rows.reverse();
        for row in &rows {
            seen.is_new(row.seq);
        }
        // An empty outbox has no last seq to start from: every event will be new.
        seen.cursor = Some(seen.cursor.unwrap_or(i64::MIN));
    }
    loop {
        look(admin, args, &mut seen).await?;
        if args.no_follow {
            return Ok(());
        }
        tokio::select! {
            () = shutdown.cancelled() => return Ok(()),
            () = tokio::time::sleep(Duration::from_millis(args.poll)) => {}
        }
    }
}

async fn look(admin: &dyn Admin, args: &TailArgs, seen: &mut SeenSeqs) -> Outcome {
    seen.forget_old();
    let mut after = seen.look_after();
    loop {
        let rows = admin.list(&Filter { after_seq: after, limit: PAGE, ..Filter::default() }).await?;
        let Some(last) = rows.last() else { return Ok(()) };
        after = Some(last.seq);
        for row in &rows {
            if seen.is_new(row.seq) && matches(row, &args.filter) {
                print(admin, row, args.output.json).await?;
            }
        }
        if rows.len() < PAGE {
            return Ok(());
        }
    }
}

/// Filters here and not in the query: a seq that the filter hides must not look like a missing one.
fn matches(row: &EventRow, filter: &FilterArgs) -> bool {
    let same = |wanted: &Option<String>, found: &str| wanted.as_ref().is_none_or(|wanted| wanted == found);
    same(&filter.stream, &row.stream)
        && same(&filter.event_type, &row.event_type)
        && same(&filter.key, &row.aggregate_id)
        && same(&filter.error_code, row.error_code.as_deref().unwrap_or_default())
}

async fn print(admin: &dyn Admin, row: &EventRow, json: bool) -> Outcome {
    if !json {
        return output::line(printable(&format!(
            "{}  {}  {}  {}  {} {}  {}",
            time(row.created_at),
            row.seq,
            row.stream,
            row.event_type,
            row.aggregate_type,
            row.aggregate_id,
            row.state
        )));
    }
    // A list has no payloads. An event that was pruned or discarded in the meantime is not printed.
    let Some(detail) = admin.show(&row.seq.to_string()).await? else { return Ok(()) };
    match detail.event {
        Ok(event) => {
            let mut line = Vec::new();
            envelope::write_line(&mut line, &event);
            output::raw(&line)
        }
        Err(problem) => {
            tracing::warn!(eventId = row.id, seq = row.seq, problem, "the row is not a valid event");
            Ok(())
        }
    }
}

/// The newest seq that was seen, and the recent seqs before it that are missing.
#[derive(Debug, Default)]
struct SeenSeqs {
    cursor: Option<i64>,
    holes: BTreeMap<i64, Instant>,
}

impl SeenSeqs {
    /// Records a seq. Returns whether it was not seen before.
    fn is_new(&mut self, seq: i64) -> bool {
        let Some(cursor) = self.cursor else {
            self.cursor = Some(seq);
            return true;
        };
        if seq <= cursor {
            return self.holes.remove(&seq).is_some();
        }
        if cursor != i64::MIN {
            let now = Instant::now();
            let room = MAX_HOLES.saturating_sub(self.holes.len());
            // Only the newest seqs of a long gap: older ones are the least likely to appear.
            self.holes.extend((cursor + 1..seq).rev().take(room).map(|hole| (hole, now)));
        }
        self.cursor = Some(seq);
        true
    }

    fn forget_old(&mut self) {
        self.holes.retain(|_, since| since.elapsed() < PATIENCE);
    }

    /// Where the next query begins: before the first hole, else at the newest seq.
    fn look_after(&self) -> Option<i64> {
        match self.holes.keys().next() {
            Some(hole) => Some(hole - 1),
            None => self.cursor,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_late_commit_is_seen_once() {
        let mut seen = SeenSeqs::default();
        let new: Vec<i64> = [1, 2, 6, 4, 4, 6, 7, 3].into_iter().filter(|seq| seen.is_new(*seq)).collect();
        assert_eq!(new, [1, 2, 6, 4, 7, 3]);
        assert_eq!(seen.look_after(), Some(4), "5 may still come");
        seen.holes.clear();
        assert_eq!(seen.look_after(), Some(7));
    }

    #[test]
    fn an_empty_outbox_has_no_holes_before_its_first_event() {
        let mut seen = SeenSeqs { cursor: Some(i64::MIN), ..SeenSeqs::default() };
        assert!(seen.is_new(900));
        assert!(seen.holes.is_empty());
    }
}
