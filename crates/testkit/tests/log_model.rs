//! The conformance suite for logs, on the model. What fails here is wrong in the suite, in the model or in
//! `airtight_core::log`; what fails only on a database is wrong in that store.

use std::sync::Arc;

use airtight_core::{
    NewEvent, Published, Source,
    log::{Log, LogAdmin, LogOptions},
};
use airtight_testkit::{
    logs::{Flaky, LogUnderTest, LostAnswers, OpenPublish},
    memory_log::{MemoryLogStore, MemoryLogTransaction},
};
use async_trait::async_trait;

struct Model(MemoryLogStore);

struct Open(MemoryLogTransaction);

#[async_trait]
impl OpenPublish for Open {
    async fn commit(self: Box<Self>) {
        self.0.commit();
    }

    async fn rollback(self: Box<Self>) {
        self.0.rollback();
    }
}

impl Model {
    fn begin(&self, events: &[NewEvent]) -> MemoryLogTransaction {
        let mut transaction = self.0.begin();
        events.iter().for_each(|event| transaction.publish(event));
        transaction
    }
}

#[async_trait]
impl LogUnderTest for Model {
    async fn publish(&self, events: &[NewEvent]) -> Vec<Published> {
        self.0.publish(events)
    }

    async fn publish_rolled_back(&self, events: &[NewEvent]) {
        self.begin(events).rollback();
    }

    async fn publish_open(&self, events: &[NewEvent]) -> Option<Box<dyn OpenPublish>> {
        Some(Box::new(Open(self.begin(events))))
    }

    async fn publish_bad(&self, key: &str) -> Option<i64> {
        Some(self.0.publish_bad(key))
    }

    fn log(&self, options: LogOptions) -> Arc<dyn Source> {
        Arc::new(Log::new(self.0.connection(), options))
    }

    fn flaky_log(&self, options: LogOptions, answers: LostAnswers) -> Option<Arc<dyn Source>> {
        Some(Arc::new(Log::new(Flaky::new(self.0.connection(), answers), options)))
    }

    fn admin(&self) -> Arc<dyn LogAdmin> {
        Arc::new(self.0.clone())
    }

    async fn expire_leases(&self) {
        self.0.expire_leases();
    }
}

impl Drop for Model {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("offsets {:?}, parked {:#?}", self.0.offsets("c"), self.0.parked_of("c"));
        } else {
            assert_eq!(self.0.violations(), Vec::<String>::new());
        }
    }
}

airtight_testkit::log_conformance!(|_: &'static str| async { Some(Model(MemoryLogStore::new())) });
