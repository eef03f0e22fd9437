//! A connection that loses answers: the store did what it was asked to do, but the relay does not learn of it.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use airtight_core::{
    Backlog, Capabilities, Code, Error, Result,
    group::{GroupKind, Member, Members, Pulse},
    log::{Changes, ConsumerState, Due, LogRow, LogStore, Read, ReadRequest, Standing, Start},
};
use async_trait::async_trait;

/// How many answers to settles are to be lost. All clones share the number.
#[derive(Debug, Clone, Default)]
pub struct LostAnswers(Arc<AtomicUsize>);

impl LostAnswers {
    /// The next answer to a settle is lost.
    pub fn lose_one(&self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }

    fn lost(&self) -> bool {
        self.0.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1)).is_ok()
    }
}

/// Any [`LogStore`] behind a connection that loses answers to settles.
#[derive(Debug, Clone)]
pub struct Flaky<S> {
    store: S,
    answers: LostAnswers,
}

impl<S> Flaky<S> {
    /// A connection to `store`.
    pub fn new(store: S, answers: LostAnswers) -> Self {
        Self { store, answers }
    }
}

#[async_trait]
impl<S: LogStore> LogStore for Flaky<S> {
    fn members(&self) -> &dyn Members {
        self.store.members()
    }

    fn kind(&self) -> GroupKind {
        self.store.kind()
    }

    fn renewed(&self, member: &Member, pulse: &Pulse) {
        self.store.renewed(member, pulse);
    }

    async fn before_giving(&self, member: &Member) -> Result<()> {
        self.store.before_giving(member).await
    }

    async fn before_leaving(&self, member: &Member) -> Result<()> {
        self.store.before_leaving(member).await
    }

    async fn open(&self, sink: &Capabilities) -> Result<()> {
        self.store.open(sink).await
    }

    async fn attach(&self, member: &Member, start: Start) -> Result<()> {
        self.store.attach(member, start).await
    }

    async fn positions(&self, member: &Member, partitions: &[u16]) -> Result<Vec<Standing>> {
        self.store.positions(member, partitions).await
    }

    async fn consumer_state(&self, member: &Member) -> Result<ConsumerState> {
        self.store.consumer_state(member).await
    }

    async fn read(&self, request: &ReadRequest<'_>) -> Result<Read> {
        self.store.read(request).await
    }

    async fn reread(&self, request: &ReadRequest<'_>, seqs: &[i64]) -> Result<Vec<LogRow>> {
        self.store.reread(request, seqs).await
    }

    async fn due(&self, request: &ReadRequest<'_>, except: &[i64]) -> Result<Due> {
        self.store.due(request, except).await
    }

    async fn settle(&self, member: &Member, changes: &Changes) -> Result<Vec<u16>> {
        let refused = self.store.settle(member, changes).await?;
        if self.answers.lost() {
            return Err(Error::retryable(Code::custom("broken_connection"), "the answer was lost"));
        }
        Ok(refused)
    }

    async fn unhold(&self, member: &Member, partitions: &[u16]) -> Result<u64> {
        self.store.unhold(member, partitions).await
    }

    async fn backlog(&self, member: &Member) -> Result<Backlog> {
        self.store.backlog(member).await
    }

    async fn wait(&self, at_most: Duration) {
        self.store.wait(at_most).await;
    }
}
