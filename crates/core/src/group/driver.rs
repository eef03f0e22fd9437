//! Being a member of a group: joining, renewing, coming back after an eviction, and moving towards the fair share of
//! partitions. A queue and a log do this in the same way; what differs between them is in [`Membered`].

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use async_trait::async_trait;
use tokio::{sync::Notify, task::JoinHandle};
use tokio_util::sync::CancellationToken;

use super::{Group, Member, Members, Pulse, plan};
use crate::{Class, Error, Result};

/// What a member of a group adds to the common way of being one.
#[async_trait]
pub(crate) trait Membered: Send + Sync + 'static {
    /// The group in the database.
    fn members(&self) -> &dyn Members;

    /// What the driver keeps for this member.
    fn membership(&self) -> &Membership;

    /// Changes or asks what this relay knows of its group, under its lock. Whatever else it knows of partitions that are
    /// no longer its own is forgotten under the same lock.
    fn group<T>(&self, act: impl FnOnce(&mut Group) -> T) -> T;

    /// This relay under a new id.
    fn new_member(&self) -> Member;

    /// Renews the lease, and says when that was sent.
    async fn heartbeat(&self, member: &Member) -> Result<(Pulse, Instant)>;

    /// The group has a new member id: whatever the old one held is no longer this relay's.
    fn evicted(&self) {}

    /// Checks that a relay may come back, before it joins under its new id.
    async fn before_joining_again(&self, _member: &Member) -> Result<()> {
        Ok(())
    }

    /// Stops reading from these partitions, and returns those that nothing is in flight of: see [`Group::start_giving`].
    fn start_giving(&self, give: &[u16]) -> Vec<u16>;

    /// Called with every heartbeat before partitions are given and taken.
    async fn before_moving(&self) -> Result<()> {
        Ok(())
    }

    /// Called before partitions are given up.
    async fn before_giving(&self, _member: &Member) -> Result<()> {
        Ok(())
    }

    /// The rest of a heartbeat, once partitions were given and taken.
    async fn after_moving(&self, member: &Member) -> Result<()>;
}

/// What the driver keeps for one member.
#[derive(Debug, Default)]
pub(crate) struct Membership {
    /// One at a time renews or joins: an answer that belongs to a former membership, or that another one has
    /// overtaken, would make us claim from partitions that are not ours.
    alone: tokio::sync::Mutex<()>,
    /// Something changed that a fetch may have been waiting for.
    pub(crate) changed: Notify,
    failed: Mutex<Option<Error>>,
}

impl Membership {
    /// Why leases are no longer renewed and never will be again, if that is so.
    pub(crate) fn failure(&self) -> Option<Error> {
        self.failed().clone()
    }

    fn failed(&self) -> MutexGuard<'_, Option<Error>> {
        self.failed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The background task that keeps a member alive. Dropped, it ends.
#[derive(Debug, Default)]
pub(crate) struct Heartbeat {
    stop: CancellationToken,
    task: Mutex<Option<JoinHandle<()>>>,
}

impl Heartbeat {
    /// Begins to renew.
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

    /// Ends, after a heartbeat that is under way.
    pub(crate) async fn stop(&self) {
        self.stop.cancel();
        let task = self.task.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(task) = task {
            // A panic in it has been reported already; leaving is still right.
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

/// Comes back under a new id after the membership with this generation was found to be over; does nothing if that
/// has happened already.
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

/// Ticks until stopped. An error that will not pass ends it and is returned: trying on would keep the relay on
/// the list without its ever delivering.
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
                tracing::warn!(%error, "cannot renew leases; trying on");
            }
            Err(error) => tracing::debug!(%error, "still cannot renew leases"),
        }
    }
}

/// How often leases are renewed and peers looked at.
fn beat(lease: Duration) -> Duration {
    (lease / 4).clamp(Duration::from_millis(20), Duration::from_secs(2))
}
