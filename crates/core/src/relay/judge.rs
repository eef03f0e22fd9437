//! From what a sink said to what a source is told: the one table of policy.

use super::Policy;
use crate::{
    Class, Delivery, Error, Outcome, Verdict,
    queue::SUSPECT_AFTER,
    state::{Failed, Row},
};

/// The verdict on a delivery. *Unavailable* is not the event's fault: it is released, and the caller opens
/// the circuit.
pub(super) fn verdict(delivery: &Delivery, outcome: Outcome, policy: &Policy) -> Verdict {
    let row = Row::claimed(delivery.attempt, delivery.max_attempts);
    match outcome {
        Outcome::Delivered | Outcome::Duplicate => {
            row.deliver();
            Verdict::Delivered
        }
        Outcome::Committed => {
            row.deliver();
            Verdict::SettledInTransaction
        }
        Outcome::Skipped => {
            row.release();
            Verdict::Released
        }
        Outcome::Unknown(error) => {
            row.lose_track();
            Verdict::Unknown { error }
        }
        Outcome::Failed(error) => match error.class() {
            Class::Unavailable => {
                row.release();
                Verdict::Released
            }
            Class::Permanent => {
                row.give_up();
                Verdict::Dead { error }
            }
            Class::Retryable => match row.fail(policy.max_attempts) {
                Failed::Dead(_) => Verdict::Dead { error },
                Failed::Retry(row) => {
                    let backoff = policy.backoff.after(row.attempts());
                    Verdict::Retry { after: backoff.max(error.retry_after().unwrap_or_default()), error }
                }
            },
        },
    }
}

/// Whether an event has crashed so many relays while alone that it is not delivered again.
pub(super) fn crashed_too_often(delivery: &Delivery, policy: &Policy) -> Option<Error> {
    let limit = SUSPECT_AFTER + policy.crashes_alone;
    (delivery.lost_leases >= limit).then(|| {
        Error::permanent(
            "lost_leases",
            format!(
                "relays vanished {} times while they held this event, the last {} times while it was alone: it may crash them",
                delivery.lost_leases, policy.crashes_alone
            ),
        )
    })
}

/// Whether a verdict holds back the events behind it in the same lane.
pub(super) fn holds_lane(verdict: &Verdict, policy: &Policy) -> bool {
    match verdict {
        Verdict::Retry { .. } | Verdict::Released => true,
        Verdict::Dead { .. } | Verdict::Unknown { .. } => policy.block_on_dead,
        Verdict::Delivered | Verdict::SettledInTransaction => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Position, sinks::memory::sample_event};
    use std::time::Duration;

    fn delivery(attempt: u32, max_attempts: Option<u32>) -> Delivery {
        Delivery {
            event: sample_event(1, "k"),
            position: Position(1),
            attempt,
            max_attempts,
            lost_leases: 0,
            replay: None,
        }
    }

    #[test]
    fn classes_become_verdicts() {
        let policy = Policy { max_attempts: 5, ..Policy::default() };
        let retryable = || Outcome::Failed(Error::retryable("timeout", "too slow"));
        assert!(matches!(verdict(&delivery(4, None), retryable(), &policy), Verdict::Retry { .. }));
        assert!(matches!(verdict(&delivery(5, None), retryable(), &policy), Verdict::Dead { .. }));
        assert!(matches!(verdict(&delivery(5, Some(6)), retryable(), &policy), Verdict::Retry { .. }));
        assert!(matches!(verdict(&delivery(1, Some(1)), retryable(), &policy), Verdict::Dead { .. }));
        let permanent = Outcome::Failed(Error::permanent("http_422", "no"));
        assert!(matches!(verdict(&delivery(1, None), permanent, &policy), Verdict::Dead { .. }));
        let away = Outcome::Failed(Error::unavailable("refused", "no one there"));
        assert!(matches!(verdict(&delivery(5, None), away, &policy), Verdict::Released));
        let unknown = Outcome::Unknown(Error::retryable("timeout", "order may exist"));
        assert!(matches!(verdict(&delivery(1, None), unknown, &policy), Verdict::Unknown { .. }));
    }

    #[test]
    fn a_retry_waits_at_least_as_long_as_the_sink_asked() {
        let error = Error::retryable("http_429", "slow down").with_retry_after(Duration::from_secs(77));
        let judged = verdict(&delivery(1, None), Outcome::Failed(error), &Policy::default());
        assert!(matches!(judged, Verdict::Retry { after, .. } if after == Duration::from_secs(77)));
    }
}
