//! Turns a sink's outcome into the verdict for the source. This is the only table of policy.

use std::time::Duration;

use super::Policy;
use crate::{Class, Code, Delivery, Error, Outcome, Rules, Verdict, queue::SUSPECT_AFTER};

/// The verdict on a delivery. *Unavailable* is not the event's fault: the event is released, and the caller opens
/// the circuit. If only the event's destination is unavailable, the event waits for as long as `away` says.
pub(super) fn verdict(
    delivery: &Delivery,
    outcome: Outcome,
    away: Option<Duration>,
    policy: &Policy,
) -> Verdict {
    match outcome {
        Outcome::Delivered | Outcome::Duplicate => Verdict::Delivered,
        Outcome::Committed => Verdict::SettledInTransaction,
        Outcome::Skipped => Verdict::Released,
        Outcome::Unknown(error) => Verdict::Unknown { error },
        Outcome::Failed(error) => match error.class() {
            Class::Unavailable => away.map_or(Verdict::Released, |after| waits(after, &error)),
            Class::Permanent => Verdict::Dead { error },
            Class::Retryable if is_last_attempt(delivery, policy) => Verdict::Dead { error },
            Class::Retryable => {
                let backoff = policy.backoff.after(delivery.attempt);
                Verdict::Retry { after: backoff.max(error.retry_after().unwrap_or_default()), error }
            }
        },
    }
}

/// Whether this attempt is the last: by the event's own limit, or else by the pipeline's.
fn is_last_attempt(delivery: &Delivery, policy: &Policy) -> bool {
    delivery.attempt >= delivery.max_attempts.unwrap_or(policy.max_attempts)
}

/// The verdict on an event whose destination is unavailable.
pub(super) fn waits(after: Duration, error: &Error) -> Verdict {
    Verdict::Away { after, error: error.waiting() }
}

/// An error if so many relays vanished while they delivered this event alone that it is not delivered again.
pub(super) fn crashed_too_often(delivery: &Delivery, policy: &Policy) -> Option<Error> {
    let limit = SUSPECT_AFTER + policy.crashes_alone;
    (delivery.lost_leases >= limit).then(|| {
        Error::permanent(
            Code::LOST_LEASES,
            format!(
                "relays vanished {} times while they held this event, the last {} times while it was alone: it may crash them",
                delivery.lost_leases, policy.crashes_alone
            ),
        )
    })
}

/// Whether a verdict holds back the later events of the same key.
pub(super) fn holds_key(verdict: &Verdict, rules: Rules) -> bool {
    match verdict {
        Verdict::Retry { .. } | Verdict::Away { .. } | Verdict::Released => true,
        Verdict::Dead { .. } | Verdict::Unknown { .. } => rules.block_on_dead,
        Verdict::Delivered | Verdict::SettledInTransaction => false,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{Position, event::sample_event};

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
        let retryable = || Outcome::Failed(Error::retryable(Code::TIMEOUT, "too slow"));
        assert!(matches!(verdict(&delivery(4, None), retryable(), None, &policy), Verdict::Retry { .. }));
        assert!(matches!(verdict(&delivery(5, None), retryable(), None, &policy), Verdict::Dead { .. }));
        assert!(matches!(verdict(&delivery(5, Some(6)), retryable(), None, &policy), Verdict::Retry { .. }));
        assert!(matches!(verdict(&delivery(1, Some(1)), retryable(), None, &policy), Verdict::Dead { .. }));
        let permanent = Outcome::Failed(Error::permanent(Code::http(422), "no"));
        assert!(matches!(verdict(&delivery(1, None), permanent, None, &policy), Verdict::Dead { .. }));
        let away = Outcome::Failed(Error::unavailable(Code::REFUSED, "no one there"));
        assert!(matches!(verdict(&delivery(5, None), away, None, &policy), Verdict::Released));
        let missing = || Outcome::Failed(Error::unavailable(Code::NO_TOPIC, "missing").at("topic t"));
        let judged = verdict(&delivery(5, None), missing(), Some(Duration::from_secs(3)), &policy);
        let Verdict::Away { after, error } = judged else { panic!("{judged:?}") };
        assert_eq!(
            (after.as_secs(), error.code(), error.message()),
            (3, "away:no_topic", "topic t is away: missing")
        );
        let unknown = Outcome::Unknown(Error::retryable(Code::TIMEOUT, "order may exist"));
        assert!(matches!(verdict(&delivery(1, None), unknown, None, &policy), Verdict::Unknown { .. }));
    }

    #[test]
    fn a_retry_waits_at_least_as_long_as_the_sink_asked() {
        let error = Error::retryable(Code::http(429), "slow down").with_retry_after(Duration::from_secs(77));
        let judged = verdict(&delivery(1, None), Outcome::Failed(error), None, &Policy::default());
        assert!(matches!(judged, Verdict::Retry { after, .. } if after == Duration::from_secs(77)));
    }

    proptest! {
        /// A model of any sequence of claims, failures, releases and crashes, with the count that a store keeps: a claim
        /// counts an attempt, and only a retry leaves it counted. A takeover after a crash is the same attempt.
        #[test]
        fn only_failures_use_up_attempts(steps in proptest::collection::vec(0u8..4, 1..40), limit in 1u32..8) {
            let policy = Policy { max_attempts: limit, ..Policy::default() };
            let mut attempts = 0;
            let mut failures = 0;
            for step in steps {
                let claimed = delivery(attempts + 1, None);
                let outcome = match step {
                    0 => Some(Outcome::Skipped),
                    1 => Some(Outcome::Failed(Error::unavailable(Code::UNREACHABLE, "no one there"))),
                    2 => None,
                    _ => Some(Outcome::Failed(Error::retryable(Code::TIMEOUT, "too slow"))),
                };
                let Some(outcome) = outcome else { continue };
                match verdict(&claimed, outcome, None, &policy) {
                    Verdict::Released => prop_assert!(step < 2),
                    Verdict::Retry { .. } => {
                        failures += 1;
                        attempts = claimed.attempt;
                        prop_assert!(failures < limit);
                    }
                    Verdict::Dead { .. } => {
                        prop_assert_eq!(failures + 1, limit);
                        return Ok(());
                    }
                    other => prop_assert!(false, "{:?}", other),
                }
                prop_assert_eq!(attempts, failures);
            }
        }
    }
}
