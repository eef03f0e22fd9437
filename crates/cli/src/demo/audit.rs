//! The audit: compares the transfers in the database with the events that arrived.

use std::{collections::HashSet, fmt::Write, time::Duration};

use serde::Serialize;

use super::{Totals, bank::Bank, sink::Received};
use crate::{
    errors::Outcome,
    output::{count, rate},
};

/// The result of the comparison.
#[derive(Debug, Serialize)]
pub(super) struct Audit {
    /// Events whose transaction committed, by the transfers in the database.
    committed: u64,
    /// Events that were published in transactions that rolled back.
    rolled_back: u64,
    /// Events that arrived, each counted once.
    delivered: u64,
    /// Further arrivals of events that had arrived before.
    duplicates: u64,
    /// Committed, never arrived.
    lost: u64,
    /// Arrived, never committed.
    phantom: u64,
    /// Given up on.
    dead: u64,
    /// First arrivals that came after a later one of their account.
    out_of_order: u64,
    events_per_second: f64,
    #[serde(skip)]
    balanced: bool,
    #[serde(skip)]
    retried: u64,
    #[serde(skip)]
    absences: u64,
    #[serde(skip)]
    seconds: f64,
}

impl Audit {
    pub(super) async fn compare(
        bank: &Bank,
        received: &Received,
        absences: u64,
        totals: Totals,
        elapsed: Duration,
    ) -> Outcome<Self> {
        let committed: HashSet<String> = bank.committed().await?.into_iter().collect();
        let rolled_back = bank.tally().rolled_back.load(std::sync::atomic::Ordering::Acquire);
        Ok(Self {
            committed: committed.len() as u64,
            rolled_back,
            delivered: received.ids.len() as u64,
            duplicates: received.duplicates,
            lost: committed.difference(&received.ids).count() as u64,
            phantom: received.ids.difference(&committed).count() as u64,
            dead: totals.dead,
            out_of_order: received.out_of_order,
            events_per_second: rate(received.ids.len() as u64, elapsed),
            balanced: bank.balances().await?,
            retried: totals.retried,
            absences,
            seconds: elapsed.as_secs_f64(),
        })
    }

    /// Whether every promise was kept.
    pub(super) fn is_clean(&self) -> bool {
        self.lost == 0 && self.phantom == 0 && self.out_of_order == 0 && self.balanced
    }

    pub(super) fn complaint(&self) -> String {
        let money = if self.balanced { "" } else { ", and the balances do not add up" };
        format!(
            "the audit failed: {} lost, {} phantom, {} out of order{money}",
            self.lost, self.phantom, self.out_of_order
        )
    }

    /// The result for people, with an explanation of each number.
    pub(super) fn report(&self, seed: u64, paced: bool) -> String {
        let mut text =
            String::from("\nThe audit compares the bank's tables with the events that arrived\n\n");
        for (name, number, what) in [
            ("committed", self.committed, "transfers in the database"),
            ("rolled back", self.rolled_back, "published, then undone with their transaction"),
            ("delivered", self.delivered, "arrived at least once"),
            ("duplicates", self.duplicates, "arrived again, because an answer was lost: at least once"),
            ("dead", self.dead, "given up on"),
            ("lost", self.lost, "committed and never arrived"),
            ("phantom", self.phantom, "arrived and never committed"),
            ("out of order", self.out_of_order, "arrived before an earlier transfer of the same account"),
        ] {
            // Writing to a String cannot fail.
            let _ = writeln!(text, "  {name:<14}{:>9}   {what}", count(number));
        }
        let _ = write!(
            text,
            "\n{} events in {:.1} s, {}, to a sink that failed {} events and was unavailable {}\n\
             (--seed {seed} repeats these transfers, rollbacks and faults).\n\n",
            count(self.delivered),
            self.seconds,
            if paced {
                "slowed down so that you can watch (--headless runs at full speed)".to_owned()
            } else {
                format!("{:.0} a second", self.events_per_second)
            },
            count(self.retried),
            if self.absences == 1 { "once".to_owned() } else { format!("{} times", count(self.absences)) },
        );
        text.push_str(if self.is_clean() {
            "Four writers moved money in SQLite and published each transfer in the transaction that made it.\n\
             A relay delivered what was committed, in order for each account, and retried what failed.\n\
             What was rolled back never left the database.\n\n\
             Try next:\n  \
             airtight migrate --url sqlite:shop.db\n  \
             airtight publish --url sqlite:shop.db --stream shop.orders --type OrderPlaced \\\n    \
             --aggregate-type Order --key 42 --payload '{\"total\":1200}' \\\n    \
             && airtight run --from sqlite:shop.db --to stdout: --drain\n"
        } else {
            "This is a bug in airtight. Please report it with the seed above.\n"
        });
        text
    }
}
