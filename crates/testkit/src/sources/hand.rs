//! A relay without an engine: the checks fetch and settle themselves, so that they decide what happens when.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use airtight_core::{
    Batch, Capabilities, Code, Delivery, Error, Limits, NewEvent, Order, Settlement, Source, Verdict,
    queue::QueueOptions, source::Settled,
};

use super::SourceUnderTest;
use crate::wait::eventually_some;

/// A source that is open, with short ways to use it.
pub struct Hand {
    source: Arc<dyn Source>,
    patience: Duration,
}

/// Options with the short lease of the outbox under test.
pub(super) fn short(sut: &dyn SourceUnderTest, order: Order) -> QueueOptions {
    QueueOptions { order, lease: sut.capabilities().lease, partitions: 16, ..QueueOptions::default() }
}

/// Options with a lease that no check outlives.
pub(super) fn long(order: Order) -> QueueOptions {
    QueueOptions { order, lease: Duration::from_secs(30), partitions: 16, ..QueueOptions::default() }
}

/// An event of stream `s` for a key, numbered so that its order can be told.
pub(crate) fn event(key: &str, n: usize) -> NewEvent {
    NewEvent::new("s", "Tested", "Test", key).json_text(format!("{{\"n\":{n}}}"))
}

/// `count` events for a key.
pub(crate) fn events(key: &str, count: usize) -> Vec<NewEvent> {
    (0..count).map(|n| event(key, n)).collect()
}

pub(crate) fn ids(deliveries: &[Delivery]) -> Vec<&str> {
    deliveries.iter().map(|delivery| delivery.event.id.as_str()).collect()
}

pub(crate) fn failure() -> Error {
    Error::retryable(Code::REFUSED, "the check says so")
}

pub(crate) fn retry(after: Duration) -> Verdict {
    Verdict::Retry { after, error: failure() }
}

pub(crate) fn away(after: Duration) -> Verdict {
    // As the relay words it.
    let error =
        Error::unavailable(Code::custom("away:no_topic"), "topic t is away: the check says so").at("topic t");
    Verdict::Away { after, error }
}

pub(crate) fn dead() -> Verdict {
    Verdict::Dead { error: Error::permanent(Code::custom("hopeless"), "the check says so") }
}

impl Hand {
    /// A new relay on the outbox, opened.
    ///
    /// # Panics
    ///
    /// If it cannot be opened.
    pub async fn open(sut: &dyn SourceUnderTest, options: QueueOptions) -> Self {
        Self::over(sut.queue(options), sut.capabilities().patience).await
    }

    /// A relay on any source, which it opens.
    ///
    /// # Panics
    ///
    /// If it cannot be opened.
    pub async fn over(source: Arc<dyn Source>, patience: Duration) -> Self {
        source.open(&Capabilities::default()).await.expect("the source opens");
        Self { source, patience }
    }

    /// What can be had right now, at most so many.
    pub async fn next(&self, events: usize) -> Batch {
        self.next_within(Limits { events, bytes: 1 << 20 }).await
    }

    /// The same with a bound in bytes.
    ///
    /// # Panics
    ///
    /// If the source fails.
    pub async fn next_within(&self, limits: Limits) -> Batch {
        self.source.next(limits).await.expect("next succeeds")
    }

    /// Waits for a batch with at least one event.
    pub async fn some(&self, events: usize) -> Batch {
        eventually_some(self.patience, "an event to be handed out", async || {
            let batch = self.next(events).await;
            (!batch.is_empty()).then_some(batch)
        })
        .await
    }

    /// Fetches until so many events are held, all unsettled.
    pub async fn collect(&self, count: usize) -> Vec<Delivery> {
        let mut held = Vec::new();
        let what = format!("{count} events to be handed out");
        eventually_some(self.patience, &what, async || {
            held.extend(self.next(count - held.len()).await.deliveries);
            (held.len() >= count).then(|| std::mem::take(&mut held))
        })
        .await
    }

    /// Settles all of them alike.
    ///
    /// # Panics
    ///
    /// If the source fails.
    pub async fn settle(&self, deliveries: &[Delivery], verdict: &Verdict) -> Settled {
        let settlements: Vec<Settlement> = deliveries
            .iter()
            .map(|delivery| Settlement { position: delivery.position, verdict: verdict.clone() })
            .collect();
        self.source.settle(&settlements).await.expect("settle succeeds")
    }

    /// Fetches and delivers until so many events were delivered; returns them in the order they came.
    pub async fn deliver(&self, count: usize) -> Vec<Delivery> {
        let mut delivered = Vec::new();
        let what = format!("{count} events to be delivered");
        eventually_some(self.patience, &what, async || {
            let batch = self.next(count - delivered.len()).await;
            if !batch.deliveries.is_empty() {
                let settled = self.settle(&batch.deliveries, &Verdict::Delivered).await;
                assert_eq!(settled.fenced, 0, "nobody else is there to fence a settle");
                delivered.extend(batch.deliveries);
            }
            (delivered.len() >= count).then(|| std::mem::take(&mut delivered))
        })
        .await
    }

    /// The source itself.
    pub fn source(&self) -> &dyn Source {
        &*self.source
    }

    /// Leaves as a relay does at shutdown.
    ///
    /// # Panics
    ///
    /// If the source fails.
    pub async fn close(self) {
        self.source.close().await.expect("close succeeds");
    }

    /// Vanishes as a killed process does: nothing is given back, nothing is renewed any more.
    pub fn crash(self) {
        assert_eq!(Arc::strong_count(&self.source), 1, "a crash takes all of the relay along");
    }
}

/// Asserts that the seqs of each key ascend.
pub(crate) fn assert_key_order(deliveries: &[Delivery]) {
    let mut last: BTreeMap<&str, i64> = BTreeMap::new();
    for delivery in deliveries {
        let event = &delivery.event;
        let before = last.insert(&event.aggregate_id, event.seq).unwrap_or(i64::MIN);
        assert!(before < event.seq, "key {}: seq {} came after {before}", event.aggregate_id, event.seq);
    }
}
