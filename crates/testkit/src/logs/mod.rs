//! The conformance suite for logs: what every store that is followed as a log must do.
//!
//! A backend implements [`LogUnderTest`] and runs [`crate::log_conformance!`], which makes a test of each check. A
//! check is an ordinary function whose name says what it checks, and it gets its own empty log. A check that the
//! log cannot run, by its [`LogCapabilities`], passes and is recorded in the [ledger](crate::ledger).
//!
//! As in the queue's suite, checks never sleep to wait for something. Where something must *not* happen, they wait
//! for what must happen after it, or watch for as long as it could have happened.

mod basics;
mod failures;
mod flaky;
mod groups;
mod offsets;
mod replay;

use std::{sync::Arc, time::Duration};

use airtight_core::{
    Delivery, NewEvent, Order, Published, Source, Verdict,
    admin::AwayStatus,
    log::{Consumer, LogAdmin, LogOptions, Parked, ParkedFilter},
};
use async_trait::async_trait;

pub use self::{
    basics::*,
    failures::*,
    flaky::{Flaky, LostAnswers},
    groups::*,
    offsets::*,
    replay::*,
};
use crate::{sources::Hand, wait::eventually};

/// The consumer of most checks.
const C: &str = "c";

/// A log, and how to follow it, for one check.
#[async_trait]
pub trait LogUnderTest: Send + Sync {
    /// Publishes in this order and commits.
    async fn publish(&self, events: &[NewEvent]) -> Vec<Published>;

    /// Publishes and rolls back.
    async fn publish_rolled_back(&self, events: &[NewEvent]);

    /// Publishes in a transaction that stays open; none where a transaction keeps all others from publishing.
    async fn publish_open(&self, events: &[NewEvent]) -> Option<Box<dyn OpenPublish>> {
        let _ = events;
        None
    }

    /// Inserts a row of this key, in the stream `s`, that cannot be an event; returns its `seq`, or none where the
    /// table refuses such rows.
    async fn publish_bad(&self, key: &str) -> Option<i64> {
        let _ = key;
        None
    }

    /// A relay's view of the log: a new one each time, not opened yet.
    fn log(&self, options: LogOptions) -> Arc<dyn Source>;

    /// The same through a connection that loses answers when told to:
    /// `Some(Arc::new(Log::new(Flaky::new(store, answers), options)))`. None to leave those checks out.
    fn flaky_log(&self, options: LogOptions, answers: LostAnswers) -> Option<Arc<dyn Source>> {
        let _ = (options, answers);
        None
    }

    /// The operator's side.
    fn admin(&self) -> Arc<dyn LogAdmin>;

    /// What the status says about destinations that are unavailable; none if there is no status.
    async fn away(&self) -> Option<Vec<AwayStatus>> {
        None
    }

    /// Makes the lease of every relay run out now, as if that time had passed.
    async fn expire_leases(&self);

    /// What the log can do.
    fn capabilities(&self) -> LogCapabilities {
        LogCapabilities::default()
    }
}

/// Events that were written and are not committed.
#[async_trait]
pub trait OpenPublish: Send {
    /// Commits them.
    async fn commit(self: Box<Self>);

    /// Rolls them back.
    async fn rollback(self: Box<Self>);
}

/// What a log can do, and how long the suite may wait for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogCapabilities {
    /// Several instances share a consumer's key partitions; without it a consumer has one partition.
    pub groups: bool,
    /// Distinguishes streams.
    pub streams: bool,
    /// Keeps bytes that are not JSON.
    pub bytes: bool,
    /// Keeps op, stream, time, schema version and an event's own limit of attempts.
    pub envelope_fields: bool,
    /// `prune_log` with nothing to keep removes everything. A table that drops whole partitions may be coarser.
    pub prunes_at_once: bool,
    /// The short lease that takeovers are tested with.
    pub lease: Duration,
    /// The longest that the suite waits for something that must happen.
    pub patience: Duration,
}

impl Default for LogCapabilities {
    fn default() -> Self {
        Self {
            groups: true,
            streams: true,
            bytes: true,
            envelope_fields: true,
            prunes_at_once: true,
            lease: Duration::from_millis(800),
            patience: Duration::from_secs(15),
        }
    }
}

/// Options for the consumer `c`: one partition, and the short lease, so that it looks often at what operators say.
fn options(sut: &dyn LogUnderTest, order: Order) -> LogOptions {
    LogOptions::consumer(C).reading(|read| {
        read.order = order;
        read.lease = sut.capabilities().lease;
    })
}

/// The same with several partitions, where that is possible.
fn grouped(sut: &dyn LogUnderTest) -> LogOptions {
    let partitions = if sut.capabilities().groups { 8 } else { 1 };
    options(sut, Order::Key).reading(|read| read.partitions = partitions)
}

async fn open(sut: &dyn LogUnderTest, options: LogOptions) -> Hand {
    Hand::over(sut.log(options), sut.capabilities().patience).await
}

/// A consumer as its operator sees it.
async fn consumer(sut: &dyn LogUnderTest, name: &str) -> Consumer {
    let consumers = sut.admin().consumers().await.expect("consumers");
    let found = consumers.into_iter().find(|consumer| consumer.name == name);
    found.unwrap_or_else(|| panic!("there is a consumer `{name}`"))
}

async fn offset(sut: &dyn LogUnderTest, name: &str) -> i64 {
    consumer(sut, name).await.offset
}

/// Waits until a consumer's offset has this value.
async fn reaches(sut: &dyn LogUnderTest, name: &str, seq: i64) {
    let what = format!("the offset of {name} to reach {seq}");
    eventually(sut.capabilities().patience, &what, async || offset(sut, name).await >= seq).await;
}

async fn parked(sut: &dyn LogUnderTest) -> Vec<Parked> {
    let filter = ParkedFilter { consumer: Some(C.into()), ..ParkedFilter::default() };
    sut.admin().parked(&filter).await.expect("parked")
}

fn only(seqs: &[i64]) -> ParkedFilter {
    ParkedFilter { consumer: Some(C.into()), seqs: seqs.to_vec(), ..ParkedFilter::default() }
}

fn seqs(deliveries: &[Delivery]) -> Vec<i64> {
    deliveries.iter().map(|delivery| delivery.event.seq).collect()
}

fn published(events: &[Published]) -> Vec<i64> {
    events.iter().map(|event| event.seq).collect()
}

/// Delivers so many after a seek: until the relay has heard of it, what it settles is fenced, and that comes again.
async fn deliver_again(sut: &dyn LogUnderTest, relay: &Hand, count: usize) -> Vec<Delivery> {
    let mut delivered = Vec::new();
    let what = format!("{count} events to be delivered again");
    eventually(sut.capabilities().patience, &what, async || {
        let batch = relay.next(count).await.deliveries;
        let settled = relay.settle(&batch, &Verdict::Delivered).await;
        assert!(settled.fenced == 0 || settled.applied == 0, "one seek, one answer: {settled:?}");
        if settled.fenced == 0 {
            delivered.extend(batch);
        }
        delivered.len() >= count
    })
    .await;
    delivered
}

/// Watches for as long as it takes a relay to hear of everything: nothing may be handed out.
async fn assert_still(sut: &dyn LogUnderTest, relay: &Hand, why: &str) {
    let end = tokio::time::Instant::now() + sut.capabilities().lease * 3 / 4;
    while tokio::time::Instant::now() < end {
        let batch = relay.next(100).await;
        assert!(batch.is_empty(), "{why}: {:?}", seqs(&batch.deliveries));
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Calls a macro with the names of all checks. This is the only list of them.
#[macro_export]
macro_rules! log_checks {
    ([$($callback:tt)*] $($args:tt)*) => {
        $($callback)*! {
            ($($args)*)
            committed_events_come_in_the_order_of_seq
            log_events_arrive_as_published
            batches_stay_within_the_limits
            a_large_payload_is_rejected_unread
            a_row_that_cannot_be_an_event_is_rejected_and_parked
            a_filtered_consumer_sees_its_streams_and_moves_on
            consumers_are_independent
            a_new_consumer_may_begin_at_the_end
            an_open_transaction_is_waited_for_and_nothing_is_skipped
            what_is_left_is_counted
            a_drain_delivers_everything_and_ends
            a_restart_goes_on_at_the_offset
            the_offset_moves_over_the_settled_prefix_only
            released_comes_again_before_anything_newer_and_costs_nothing
            reading_ahead_is_bounded
            an_idle_partition_moves_on
            what_is_parked_beyond_the_offset_does_not_come_from_the_log
            a_lost_answer_to_a_settle_neither_loses_nor_wedges
            a_consumer_behind_retention_is_told_and_never_skips
            retention_waits_for_the_slowest_consumer
            a_retry_is_parked_and_comes_again
            an_event_whose_destination_is_away_is_parked_at_no_cost
            a_retry_holds_its_key_and_no_other
            order_none_holds_nothing
            total_order_holds_everything
            held_events_come_when_the_order_is_dropped
            a_dead_event_stays_parked_and_its_key_goes_on
            a_key_blocked_by_a_dead_event_waits_for_a_retry
            a_key_blocked_by_a_dead_event_goes_on_after_a_discard
            an_unknown_outcome_is_out_of_reach_of_bulk_retry
            an_unknown_outcome_does_not_come_again_after_a_crash
            a_parked_event_survives_retention_as_a_whole
            so_many_parked_events_hold_back_reading
            halting_lets_nothing_pass_a_failing_event
            halting_ends_with_an_error_once_the_event_is_dead
            a_release_gives_a_halted_attempt_back
            two_failures_at_once_halt_with_both_counted
            instances_of_a_consumer_read_the_same_streams
            instances_share_partitions_and_keep_the_order_of_keys
            a_stale_owner_is_fenced
            a_dead_instance_is_replaced_within_its_lease
            another_partition_count_restarts_from_the_smallest_offset
            a_seek_while_a_relay_works_fences_it_and_comes_again
            a_seek_reaches_a_relay_that_has_nothing_to_do
            a_seek_drops_parked_events_beyond_the_target
            a_seek_ahead_skips
            a_replay_has_a_number_of_its_own_and_nothing_else_has
            a_seek_to_a_time_goes_to_its_first_event
            a_dry_run_changes_nothing
            a_paused_consumer_stands_still
            bad_targets_are_errors_and_nothing_moves
            an_unknown_consumer_is_an_error
            a_consumer_is_removed_once_nobody_works_for_it
        }
    };
}

/// Makes a test of every check. The argument is an expression: an async function or closure that takes the
/// check's name and returns `Option<impl LogUnderTest>`, none to skip.
///
/// ```text
/// airtight_testkit::log_conformance!(|name| async move { Some(MyLog::create(name).await) });
/// ```
#[macro_export]
macro_rules! log_conformance {
    ($($make:tt)*) => { $crate::log_checks!([$crate::log_tests] $($make)*); };
}

#[doc(hidden)]
#[macro_export]
macro_rules! log_tests {
    ($make:tt $($name:ident)*) => {
        $(
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $name() {
                let make = $make;
                let Some(sut) = make(stringify!($name)).await else { return };
                $crate::logs::$name(&sut).await;
            }
        )*
    };
}
