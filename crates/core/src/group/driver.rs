//! The membership of a relay in a group: join, renew, join again after an eviction, and move towards the fair share of
//! partitions. Queue and log do this in the same way; [`Membered`] has the differences.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use async_trait::async_trait;
use tokio::{sync::Notify, task::JoinHandle};
use tokio_util::sync::CancellationToken;

use super::{Group, Member, Members, Pulse, plan};
use crate::{Class, Error, Result};

/// What queue and log add to the common membership driver.
#[async_trait]
pub(crate) trait Membered: Send + Sync + 'static {
    /// The group in the database.
    fn members(&self) -> &dyn Members;

    /// What the driver keeps for this member.
    fn membership(&self) -> &Membership;

    /// Reads or changes what this relay knows about its group, under its lock. The same lock covers the removal of
    /// everything else that the relay knows about partitions that it no longer owns.
    fn group<T>(&self, act: impl FnOnce(&mut Group) -> T) -> T;

    /// This relay under a new id.
    fn new_member(&self) -> Member;

    /// Renews the lease, and returns when the statement was sent.
    async fn heartbeat(&self, member: &Member) -> Result<(Pulse, Instant)>;

    /// Called when this relay has a new member id: it no longer owns what it held under the old one.
    fn evicted(&self) {}

    /// Checks that a relay may join again, before it joins under its new id.
    async fn before_joining_again(&self, _member: &Member) -> Result<()> {
        Ok(())
    }

    /// Stops reading from these partitions, and returns those that have nothing in flight: see [`Group::start_giving`].
    fn start_giving(&self, give: &[u16]) -> Vec<u16>;

    /// Called with every heartbeat, before partitions are given up and taken.
    async fn before_moving(&self) -> Result<()> {
        Ok(())
    }

    /// Called before partitions are given up.
    async fn before_giving(&self, _member: &Member) -> Result<()> {
        Ok(())
    }

    /// The rest of a heartbeat, after partitions were given up and taken.
    async fn after_moving(&self, member: &Member) -> Result<()>;
}

/// What the driver keeps for one member.
#[derive(Debug, Default)]
pub(crate) struct Membership {
    /// Held while the relay renews or joins: with the answer to an earlier membership or an earlier renewal, the relay
    /// would claim from partitions that it does not own.
    alone: tokio::sync::Mutex<()>,
    /// Something changed that a fetch may have been waiting for.
    pub(crate) changed: Notify,
    failed: Mutex<Option<Error>>,
}

impl Membership {
    /// The permanent error that ended the renewal of leases, if there was one.
    pub(crate) fn failure(&self) -> Option<Error> {
        self.failed().clone()
    }

    fn failed(&self) -> MutexGuard<'_, Option<Error>> {
        self.failed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The background task that keeps a member alive. The task ends when this value is dropped.
#[derive(Debug, Default)]
pub(crate) struct Heartbeat {
    stop: CancellationToken,
    task: Mutex<Option<JoinHandle<()>>>,
}

impl Heartbeat {
    /// Starts to renew the lease.
    pub(crate) fn start<M: Membered>(&self, lease: Duration, member: Arc<M>) {
        let stop = self.stop.clone();
        let task = tokio::spawn(async move {
            if let Some(error) = keep_alive(&stop, lease, &*member).await {
                // The next fetch reports it.
                *member.membership().failed() = Some(error);
                member.membership().changed.notify_one();
            }
        });
        *self.task.lock().unwrap_or_else(PoisonError::into_inner) = Some(task);
    }

    /// Ends the task, after a heartbeat that is running.
    pub(crate) async fn stop(&self) {
        self.stop.cancel();
        let task = self.task.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(task) = task {
            // A panic in the task was already reported; the relay can still leave.
            let _ = task.await;
        }
    }
}

impl Drop for Heartbeat {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

/// Becomes a member.
pub(crate) async fn join(member: &impl Membered) -> Result<()> {
    let me = member.group(|group| group.member.clone());
    let sent = Instant::now();
    member.members().join(&me).await?;
    member.group(|group| group.joined(sent));
    Ok(())
}

/// Joins again under a new id, after the membership with this generation has ended; does nothing if the relay has
/// already joined again.
pub(crate) async fn rejoin(member: &impl Membered, evicted: u64) -> Result<()> {
    let _alone = member.membership().alone.lock().await;
    if join_again(member, evicted).await? { beat_once(member).await } else { Ok(()) }
}

/// One heartbeat: renews, then moves one step towards the fair share of partitions.
pub(crate) async fn tick(member: &impl Membered) -> Result<()> {
    let _alone = member.membership().alone.lock().await;
    beat_once(member).await
}

/// With `alone` locked.
async fn join_again(member: &impl Membered, evicted: u64) -> Result<bool> {
    let new = member.new_member();
    let is_over = member.group(|group| {
        let is_over = group.generation == evicted;
        if is_over {
            group.reborn(new);
        }
        is_over
    });
    if is_over {
        member.evicted();
        let me = member.group(|group| group.member.clone());
        member.before_joining_again(&me).await?;
        join(member).await?;
    }
    Ok(is_over)
}

/// With `alone` locked.
async fn beat_once(member: &impl Membered) -> Result<()> {
    let changed = &member.membership().changed;
    let (me, pulse, sent) = loop {
        let (me, generation) = member.group(|group| (group.member.clone(), group.generation));
        let (pulse, sent) = member.heartbeat(&me).await?;
        if pulse.alive {
            break (me, pulse, sent);
        }
        join_again(member, generation).await?;
    };
    if member.group(|group| group.renewed(&pulse, sent)) {
        changed.notify_one();
    }
    let plan = plan(me.id, &pulse.members, &pulse.owners, me.partitions);
    let givable = member.start_giving(&plan.give);
    member.before_moving().await?;
    if !givable.is_empty() {
        member.before_giving(&me).await?;
        member.members().give(&me, &givable).await?;
        member.group(|group| group.gave(&givable));
    }
    if !plan.take.is_empty() {
        let taken = member.members().take(&me, &plan.take).await?;
        if !taken.is_empty() {
            tracing::debug!(relay = %me.id, partitions = taken.len(), "took partitions");
            member.group(|group| group.owned.extend(taken));
            changed.notify_one();
        }
    }
    member.after_moving(&me).await
}

/// Sends heartbeats until stopped. A permanent error ends this and is returned: with further heartbeats, the relay would
/// stay in the group without delivering anything.
async fn keep_alive(stop: &CancellationToken, lease: Duration, member: &impl Membered) -> Option<Error> {
    let mut failing = false;
    loop {
        tokio::select! {
            () = stop.cancelled() => return None,
            () = tokio::time::sleep(beat(lease)) => {}
        }
        match tick(member).await {
            Ok(()) => failing = false,
            Err(error) if error.class() == Class::Permanent => return Some(error),
            Err(error) if !failing => {
                failing = true;
                tracing::warn!(%error, "cannot renew leases; trying again");
            }
            Err(error) => tracing::debug!(%error, "still cannot renew leases"),
        }
    }
}

/// How often the relay renews its lease and looks at its peers.
fn beat(lease: Duration) -> Duration {
    (lease / 4).clamp(Duration::from_millis(20), Duration::from_secs(2))
}
