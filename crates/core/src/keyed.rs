//! For sinks whose broker may accept a later message although it refused an earlier one: several keys at the same time,
//! one event of a key at a time.

use std::sync::atomic::{AtomicBool, Ordering};

use futures::{StreamExt, stream};

use crate::{
    Class, Delivery, Outcome,
    hash::{Map, Seed},
};

/// Delivers a batch. At most one event of each key is being sent at a time, and at most `window` keys.
///
/// `send` delivers the event at an index and returns its outcome. After the first event of a key that is not delivered,
/// the rest of that key is [`Outcome::Skipped`], unsent: what is delivered is a prefix per key
/// ([`crate::Capabilities::prefix_per_key`]). After the first [`Class::Unavailable`] error nothing more is sent for any
/// key, unless the error is about one destination ([`crate::Error::at`]).
pub async fn deliver_keyed<F, Fut>(batch: &[Delivery], window: usize, send: F) -> Vec<Outcome>
where
    F: Fn(usize) -> Fut,
    Fut: Future<Output = Outcome>,
{
    let away = AtomicBool::new(false);
    let deliver = async |events: Vec<usize>| {
        let mut answered = Vec::with_capacity(events.len());
        for at in events {
            if away.load(Ordering::Relaxed) {
                break;
            }
            let outcome = send(at).await;
            if matches!(&outcome, Outcome::Failed(error)
                if error.class() == Class::Unavailable && error.destination().is_none())
            {
                away.store(true, Ordering::Relaxed);
            }
            let goes_on = outcome.is_delivered();
            answered.push((at, outcome));
            if !goes_on {
                break;
            }
        }
        answered
    };
    let mut outcomes = vec![Outcome::Skipped; batch.len()];
    let mut answers = stream::iter(by_key(batch)).map(deliver).buffer_unordered(window.max(1));
    while let Some(answered) = answers.next().await {
        for (at, outcome) in answered {
            outcomes[at] = outcome;
        }
    }
    outcomes
}

/// The indexes of each key's events, in order; keys in the order in which they first occur.
pub fn by_key(batch: &[Delivery]) -> Vec<Vec<usize>> {
    let mut of_key: Map<&str, usize> = Map::with_capacity_and_hasher(batch.len(), Seed::default());
    let mut chains: Vec<Vec<usize>> = Vec::new();
    for (at, delivery) in batch.iter().enumerate() {
        let chain = *of_key.entry(&delivery.event.aggregate_id).or_insert(chains.len());
        match chains.get_mut(chain) {
            Some(events) => events.push(at),
            None => chains.push(vec![at]),
        }
    }
    chains
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;
    use crate::{Code, Error, Position, event::sample_event};

    fn batch(keys: &str) -> Vec<Delivery> {
        let delivery = |(at, key): (usize, char)| Delivery {
            event: sample_event(1 + i64::try_from(at).unwrap(), &key.to_string()),
            position: Position(at as u64),
            attempt: 1,
            max_attempts: None,
            lost_leases: 0,
            replay: None,
        };
        keys.chars().enumerate().map(delivery).collect()
    }

    fn words(outcomes: &[Outcome]) -> String {
        let word = |outcome: &Outcome| match outcome {
            Outcome::Delivered => 'd',
            Outcome::Failed(_) => 'f',
            Outcome::Skipped => 's',
            _ => '?',
        };
        outcomes.iter().map(word).collect()
    }

    #[tokio::test]
    async fn a_failure_skips_the_rest_of_its_key_and_nothing_else() {
        let sent = Mutex::new(Vec::new());
        let batch = batch("abaabb");
        let outcomes = deliver_keyed(&batch, 8, async |at| {
            sent.lock().unwrap().push(at);
            tokio::task::yield_now().await;
            match at {
                2 => Outcome::Failed(Error::permanent(Code::custom("no"), "no")),
                _ => Outcome::Delivered,
            }
        })
        .await;
        assert_eq!(words(&outcomes), "ddfsdd");
        let sent = sent.into_inner().unwrap();
        assert!(!sent.contains(&3), "{sent:?}");
        let of_b: Vec<usize> = sent.into_iter().filter(|at| [1, 4, 5].contains(at)).collect();
        assert_eq!(of_b, [1, 4, 5]);
    }

    #[tokio::test]
    async fn a_destination_that_is_away_stops_its_key_and_nobody_else() {
        let outcomes = deliver_keyed(&batch("aabc"), 1, async |at| match at {
            0 => Outcome::Failed(Error::unavailable(Code::NO_TOPIC, "missing").at("topic t")),
            _ => Outcome::Delivered,
        })
        .await;
        assert_eq!(words(&outcomes), "fsdd");
    }

    #[tokio::test]
    async fn nothing_is_sent_to_a_broker_that_is_away() {
        let sent = Mutex::new(0);
        let batch = batch("abcdef");
        let outcomes = deliver_keyed(&batch, 1, async |_| {
            *sent.lock().unwrap() += 1;
            Outcome::Failed(Error::unavailable(Code::custom("away"), "nobody there"))
        })
        .await;
        assert_eq!((words(&outcomes).as_str(), *sent.lock().unwrap()), ("fsssss", 1));
    }
}
