//! Waits for a condition instead of for a time.

use std::time::Duration;

use tokio::time::Instant;

/// How often a condition is checked.
const LOOK: Duration = Duration::from_millis(4);

/// Waits until `condition` holds.
///
/// # Panics
///
/// After `deadline`, naming `what` was waited for.
#[track_caller]
pub fn eventually<'a>(
    deadline: Duration,
    what: &'a str,
    mut condition: impl AsyncFnMut() -> bool + 'a,
) -> impl Future<Output = ()> + 'a {
    let at = std::panic::Location::caller();
    async move {
        let end = Instant::now() + deadline;
        while !condition().await {
            assert!(Instant::now() < end, "{at}: waited {deadline:?} in vain for: {what}");
            tokio::time::sleep(LOOK).await;
        }
    }
}

/// Waits until `find` finds something, and returns it.
///
/// # Panics
///
/// After `deadline`, naming `what` was waited for.
#[track_caller]
pub fn eventually_some<'a, T: 'a>(
    deadline: Duration,
    what: &'a str,
    mut find: impl AsyncFnMut() -> Option<T> + 'a,
) -> impl Future<Output = T> + 'a {
    let at = std::panic::Location::caller();
    async move {
        let end = Instant::now() + deadline;
        loop {
            if let Some(found) = find().await {
                return found;
            }
            assert!(Instant::now() < end, "{at}: waited {deadline:?} in vain for: {what}");
            tokio::time::sleep(LOOK).await;
        }
    }
}
