//! What every sink with several destinations must do when one of them is unavailable: events for the others continue, no
//! attempt is spent, and the waiting events can be listed and discarded. The check runs against the real broker, since
//! the sink must distinguish an unavailable destination from an unavailable broker.

use std::{sync::Arc, time::Duration};

use airtight_core::{
    Backoff, CancellationToken, NewEvent, Policy, Relay, Sink,
    admin::{Acted, Admin},
    queue::{Queue, QueueOptions},
    state::State,
};

use crate::{memory_queue::MemoryStore, wait::eventually};

/// How long the deliveries to the healthy destination may take, on a busy machine.
const PATIENCE: Duration = Duration::from_secs(25);
const GOOD: usize = 300;
const BAD: usize = 30;

/// One destination that is unavailable, and one that works, by the streams of the events that go there.
pub struct OneAway<'a> {
    /// The stream of the events that can be delivered.
    pub good: &'a str,
    /// The stream of the events that cannot.
    pub bad: &'a str,
    /// The code of the sink's error.
    pub code: &'a str,
    /// What the status must say about the destination.
    pub named: &'a str,
}

/// Publishes to both, expects that the healthy one gets its events, then has the other one fixed and expects the rest.
///
/// # Panics
///
/// If the sink or the relay behaves differently.
pub async fn one_away(sink: impl Sink, case: OneAway<'_>, mend: impl AsyncFnOnce()) {
    let event = |stream: &str, n: usize| {
        NewEvent::new(stream, "Tested", "Test", format!("{stream}-{}", n % 10)).json_text("{}")
    };
    let store = MemoryStore::new();
    let bad = store.publish(&(0..BAD).map(|n| event(case.bad, n)).collect::<Vec<_>>());
    let queue = Queue::new(store.clone(), QueueOptions::default());
    let base = Duration::from_millis(200);
    let policy = Policy {
        circuit: Backoff { base, cap: Duration::from_secs(1), ..Backoff::default() },
        poll: Duration::from_millis(50),
        ..Policy::default()
    };
    let relay = Relay::from_parts(Arc::new(queue), Arc::new(sink)).policy(policy);
    let (stats, shutdown) = (relay.stats(), CancellationToken::new());
    let task = tokio::spawn(relay.run(shutdown.clone()));

    eventually(PATIENCE, "the destination to be found away", async || stats.summary().destinations_away == 1)
        .await;
    store.publish(&(0..GOOD).map(|n| event(case.good, n)).collect::<Vec<_>>());
    eventually(PATIENCE, "the healthy ones", async || store.count(State::Done) == GOOD).await;
    assert_eq!(stats.summary().circuit_opened, 0, "the sink as a whole is not away");
    let status = Admin::status(&store).await.expect("a status");
    let [away] = &status.away[..] else { panic!("{:?}", status.away) };
    assert_eq!(away.code, format!("away:{}", case.code), "{}", away.message);
    assert!(away.message.starts_with(&format!("{} is away: ", case.named)), "{}", away.message);
    assert!(store.rows().iter().all(|row| row.attempts <= 1 && row.state != State::Dead), "nothing is spent");
    eventually(PATIENCE, "one of them to be discarded", async || {
        store.discard(&bad[0].id).await.expect("discard") == Acted::Yes
    })
    .await;

    mend().await;
    eventually(PATIENCE, "the others", async || store.count(State::Done) == GOOD + BAD - 1).await;
    assert_eq!(stats.summary().dead, 0);
    assert_eq!(store.violations(), Vec::<String>::new());
    shutdown.cancel();
    task.await.expect("the relay does not panic").expect("the relay stops");
}
