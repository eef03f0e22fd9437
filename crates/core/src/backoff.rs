//! How long to wait after the nth failure.

use std::time::Duration;

/// The wait after the nth failure is `base × multiplierⁿ⁻¹`, with jitter, and limited by `cap`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Backoff {
    /// The wait after the first failure.
    pub base: Duration,
    /// The factor by which each further failure multiplies the wait.
    pub multiplier: f64,
    /// No wait is longer than this, including jitter.
    pub cap: Duration,
    /// Spread as a share of the wait: 0.2 means ±20 %.
    pub jitter: f64,
}

impl Default for Backoff {
    fn default() -> Self {
        Self { base: Duration::from_secs(1), multiplier: 2.0, cap: Duration::from_secs(300), jitter: 0.2 }
    }
}

impl Backoff {
    /// The wait after the `failures`-th failure, counted from one.
    pub fn after(&self, failures: u32) -> Duration {
        let spread = if self.jitter > 0.0 { (fastrand::f64() * 2.0 - 1.0) * self.jitter } else { 0.0 };
        self.after_with(failures, spread)
    }

    /// The same with the jitter given, from -1 to 1 as a share of the wait.
    fn after_with(&self, failures: u32, spread: f64) -> Duration {
        let exponent = failures.saturating_sub(1).min(1_000);
        // f64 saturates to infinity, which `min` limits to the cap.
        let wait = self.base.as_secs_f64() * self.multiplier.max(1.0).powi(exponent.cast_signed());
        let cap = self.cap.as_secs_f64();
        Duration::from_secs_f64((wait.min(cap) * (1.0 + spread)).clamp(0.0, cap))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn doubles_from_the_base_up_to_the_cap() {
        let backoff = Backoff {
            base: Duration::from_secs(2),
            multiplier: 2.0,
            cap: Duration::from_secs(600),
            jitter: 0.0,
        };
        let waits: Vec<u64> = (1..=10).map(|n| backoff.after(n).as_secs()).collect();
        assert_eq!(waits, [2, 4, 8, 16, 32, 64, 128, 256, 512, 600]);
    }

    proptest! {
        #[test]
        fn never_above_the_cap_and_never_far_from_the_formula(failures in 0u32..10_000, jitter in 0.0f64..0.9) {
            let backoff = Backoff { jitter, ..Backoff::default() };
            let wait = backoff.after(failures).as_secs_f64();
            let plain = Backoff { jitter: 0.0, ..backoff }.after(failures).as_secs_f64();
            prop_assert!(wait <= backoff.cap.as_secs_f64());
            prop_assert!(wait >= plain * (1.0 - jitter) - 1e-6);
        }
    }
}
