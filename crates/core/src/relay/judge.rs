//! From what a sink said to what a source is told: the one table of policy.

use std::time::Duration;

use super::Policy;
use crate::{
    Class, Delivery, Error, Outcome, Rules, Verdict,
    queue::SUSPECT_AFTER,
    state::{Failed, Row},
};

/// The verdict on a delivery. *Unavailable* is not the event's fault: it is released, and the caller opens
/// the circuit; or it waits, for as long as `away` says, where that is about its destination alone.
pub(super) fn verdict(
    delivery: &Delivery,
    outcome: Outcome,
    away: Option<Duration>,
    policy: &Policy,
) -> Verdict {
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
                match away {
                    Some(after) => waits(after, &error),
                    None => Verdict::Released,
                }
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

/// The verdict on an event whose destination is away.
pub(super) fn waits(after: Duration, error: &Error) -> Verdict {
    Verdict::Away { after, error: error.waiting() }
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
pub(super) fn holds_lane(verdict: &Verdict, rules: Rules) -> bool {
    match verdict {
        Verdict::Retry { .. } | Verdict::Away { .. } | Verdict::Released => true,
        Verdict::Dead { .. } | Verdict::Unknown { .. } => rules.block_on_dead,
        Verdict::Delivered | Verdict::SettledInTransaction => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Position, sinks::memory::sample_event};

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
        assert!(matches!(verdict(&delivery(4, None), retryable(), None, &policy), Verdict::Retry { .. }));
        assert!(matches!(verdict(&delivery(5, None), retryable(), None, &policy), Verdict::Dead { .. }));
        assert!(matches!(verdict(&delivery(5, Some(6)), retryable(), None, &policy), Verdict::Retry { .. }));
        assert!(matches!(verdict(&delivery(1, Some(1)), retryable(), None, &policy), Verdict::Dead { .. }));
        let permanent = Outcome::Failed(Error::permanent("http_422", "no"));
        assert!(matches!(verdict(&delivery(1, None), permanent, None, &policy), Verdict::Dead { .. }));
        let away = Outcome::Failed(Error::unavailable("refused", "no one there"));
        assert!(matches!(verdict(&delivery(5, None), away, None, &policy), Verdict::Released));
        let missing = || Outcome::Failed(Error::unavailable("no_topic", "missing").at("topic t"));
        let judged = verdict(&delivery(5, None), missing(), Some(Duration::from_secs(3)), &policy);
        let Verdict::Away { after, error } = judged else { panic!("{judged:?}") };
        assert_eq!(
            (after.as_secs(), error.code(), error.message()),
            (3, "away:no_topic", "topic t is away: missing")
        );
        let unknown = Outcome::Unknown(Error::retryable("timeout", "order may exist"));
        assert!(matches!(verdict(&delivery(1, None), unknown, None, &policy), Verdict::Unknown { .. }));
    }

    #[test]
    fn a_retry_waits_at_least_as_long_as_the_sink_asked() {
        let error = Error::retryable("http_429", "slow down").with_retry_after(Duration::from_secs(77));
        let judged = verdict(&delivery(1, None), Outcome::Failed(error), None, &Policy::default());
        assert!(matches!(judged, Verdict::Retry { after, .. } if after == Duration::from_secs(77)));
    }
}
