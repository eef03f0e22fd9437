//! The conformance suite for queue sources: what every outbox table must do, whatever database it is in.
//!
//! A backend implements [`SourceUnderTest`] and runs either [`conformance`], all checks in one test, or
//! [`crate::source_conformance!`], which makes a test of each. A check is an ordinary function whose name says
//! what it checks, and it gets its own empty outbox. A check that the outbox cannot run, by its [`SourceCapabilities`],
//! passes and is recorded in the [ledger](crate::ledger), which the summary of `scripts/test` shows.
//!
//! Checks never sleep to wait for something. Where something must *not* happen, they wait for what must happen
//! after it, or watch for as long as it could have happened.

mod basics;
mod groups;
pub(crate) mod hand;
mod leases;
mod retries;

use std::{future::Future, panic::AssertUnwindSafe, pin::Pin, sync::Arc, time::Duration};

use airtight_core::{NewEvent, Published, Source, admin::Admin, queue::QueueOptions};
use async_trait::async_trait;
use futures::FutureExt;

pub use self::{basics::*, groups::*, hand::Hand, leases::*, retries::*};

/// No check takes longer than this.
const CHECK_TIMEOUT: Duration = Duration::from_secs(60);

/// An outbox, and how to read it, for one check.
#[async_trait]
pub trait SourceUnderTest: Send + Sync {
    /// Publishes and commits.
    async fn publish(&self, events: &[NewEvent]) -> Vec<Published>;

    /// Publishes and rolls back.
    async fn publish_rolled_back(&self, events: &[NewEvent]);

    /// A relay's view of the outbox: a new one each time, not opened yet.
    fn queue(&self, options: QueueOptions) -> Arc<dyn Source>;

    /// The operator's side, if there is one.
    fn admin(&self) -> Option<Arc<dyn Admin>> {
        None
    }

    /// The operator's SQL: the status of this event back to pending, and nothing else changed.
    async fn set_back_by_hand(&self, id: &str);

    /// Makes every lease run out now, of relays and of claimed rows, as if that time had passed.
    async fn expire_leases(&self);

    /// What the source can do.
    fn capabilities(&self) -> SourceCapabilities {
        SourceCapabilities::default()
    }
}

/// What a source can do, and how long the suite may wait for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SourceCapabilities {
    /// Serves `order = none`.
    pub order_none: bool,
    /// Serves `order = total`.
    pub order_total: bool,
    /// Events come in the order of `seq`; without it only the order within a key is checked.
    pub seq_order: bool,
    /// Keeps a count of lost leases, and delivers suspects alone.
    pub counts_lost_leases: bool,
    /// Has the `unknown` state.
    pub unknown: bool,
    /// Publishing one id twice stores one event.
    pub unique_ids: bool,
    /// Distinguishes streams.
    pub streams: bool,
    /// Keeps bytes that are not JSON.
    pub bytes: bool,
    /// Keeps op, stream and an event's own limit of attempts.
    pub envelope_fields: bool,
    /// A claimed row shows it in its status, so that setting the status back voids the claim. A table without a
    /// word for processing cannot.
    pub shows_claims: bool,
    /// The short lease that takeovers are tested with.
    pub lease: Duration,
    /// The longest that the suite waits for something that must happen.
    pub patience: Duration,
}

impl Default for SourceCapabilities {
    fn default() -> Self {
        Self {
            order_none: true,
            order_total: true,
            seq_order: true,
            counts_lost_leases: true,
            unknown: true,
            unique_ids: true,
            streams: true,
            bytes: true,
            envelope_fields: true,
            shows_claims: true,
            lease: Duration::from_millis(800),
            patience: Duration::from_secs(15),
        }
    }
}

type Check = for<'a> fn(&'a dyn SourceUnderTest) -> Pin<Box<dyn Future<Output = ()> + 'a>>;

/// Runs every check, each on a fresh outbox from `make`, which gets the check's name. Where `make` returns none,
/// there is nothing to test on, and the check is skipped.
///
/// # Panics
///
/// At the end, with the names and messages of all checks that failed.
pub async fn conformance<S: SourceUnderTest>(make: impl AsyncFn(&'static str) -> Option<S>) {
    let mut failures = Vec::new();
    for (name, check) in checks() {
        let Some(sut) = make(name).await else { continue };
        let run = AssertUnwindSafe(tokio::time::timeout(CHECK_TIMEOUT, check(&sut))).catch_unwind();
        match run.await {
            Ok(Ok(())) => tracing::info!(check = name, "kept"),
            Ok(Err(_)) => failures.push(format!("{name}: not done after {CHECK_TIMEOUT:?}")),
            Err(panic) => failures.push(format!("{name}: {}", message(&*panic))),
        }
    }
    assert!(failures.is_empty(), "the source breaks its contract:\n  {}", failures.join("\n  "));
}

fn message(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().cloned();
    text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()))
        .unwrap_or_else(|| "panicked without a message".into())
}

macro_rules! collect_checks {
    (() $($name:ident)*) => {
        /// All checks with their names.
        fn checks() -> Vec<(&'static str, Check)> {
            vec![$((stringify!($name), (|sut| Box::pin($name(sut))) as Check)),*]
        }
    };
}
crate::source_checks!([collect_checks]);

/// Calls a macro with the names of all checks. This is the only list of them.
#[macro_export]
macro_rules! source_checks {
    ([$($callback:tt)*] $($args:tt)*) => {
        $($callback)*! {
            ($($args)*)
            committed_is_handed_out_and_rolled_back_never
            events_arrive_as_published
            one_id_is_stored_once
            the_limit_in_events_holds
            the_limit_in_bytes_holds_but_one_event_always_fits
            a_key_stays_in_order_across_calls
            a_payload_beyond_the_limit_is_rejected_unread
            only_the_streams_asked_for_are_read
            the_backlog_counts_what_is_left
            attempts_grow_at_claims_and_a_release_gives_back
            an_event_whose_destination_is_away_waits_at_no_cost
            an_events_own_limit_comes_with_it
            a_retry_waits_and_holds_its_key_only
            what_was_held_is_freed_in_order
            what_is_held_is_not_overtaken_while_its_head_is_tried
            a_release_behind_a_retry_waits_for_it
            dead_stays_dead_and_its_key_goes_on
            a_blocked_key_waits_for_the_operators_retry
            a_blocked_key_goes_on_after_a_discard
            a_blocked_backlog_is_told_apart
            unknown_is_out_of_reach_of_bulk_retry
            a_dead_row_set_back_by_hand_comes_again
            a_row_set_back_under_a_live_claim_fences_that_claim_only
            a_settle_after_a_takeover_is_fenced
            a_crashed_relay_is_taken_over
            a_crashed_relay_is_taken_over_without_order
            a_takeover_keeps_the_order_of_a_key
            a_late_settle_beside_a_takeover_keeps_the_order
            three_lost_leases_make_an_event_travel_alone
            a_graceful_close_gives_back_at_once
            renewal_keeps_a_slow_delivery
            renewal_keeps_a_slow_delivery_without_order
            no_event_is_held_twice
            overlapping_groups_are_refused
            relays_share_the_work_and_keep_the_order_of_keys
            total_order_is_kept_and_a_standby_takes_over
            in_total_order_a_retry_holds_everything
        }
    };
}

/// Makes a test of every check. The argument is an expression: an async function or closure that takes the
/// check's name and returns `Option<impl SourceUnderTest>`, none to skip.
///
/// ```text
/// airtight_testkit::source_conformance!(|name| async move { Some(MyOutbox::create(name).await) });
/// ```
#[macro_export]
macro_rules! source_conformance {
    ($($make:tt)*) => { $crate::source_checks!([$crate::source_tests] $($make)*); };
}

#[doc(hidden)]
#[macro_export]
macro_rules! source_tests {
    ($make:tt $($name:ident)*) => {
        $(
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $name() {
                let make = $make;
                let Some(sut) = make(stringify!($name)).await else { return };
                $crate::sources::$name(&sut).await;
            }
        )*
    };
}
