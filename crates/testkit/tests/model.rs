//! The conformance suite for sources, on the model. What fails here is wrong in the suite, in the model or in
//! `airtight_core::queue`; what fails only on a database is wrong in that store.

use std::sync::Arc;

use airtight_core::{
    NewEvent, Published, Source,
    admin::Admin,
    queue::{Queue, QueueOptions},
};
use airtight_testkit::{memory_queue::MemoryStore, sources::SourceUnderTest};
use async_trait::async_trait;

struct Model(MemoryStore);

#[async_trait]
impl SourceUnderTest for Model {
    async fn publish(&self, events: &[NewEvent]) -> Vec<Published> {
        self.0.publish(events)
    }

    async fn publish_rolled_back(&self, events: &[NewEvent]) {
        let mut transaction = self.0.begin();
        events.iter().for_each(|event| transaction.publish(event));
        transaction.rollback();
    }

    fn queue(&self, options: QueueOptions) -> Arc<dyn Source> {
        Arc::new(Queue::new(self.0.connection(), options))
    }

    fn admin(&self) -> Option<Arc<dyn Admin>> {
        Some(Arc::new(self.0.clone()))
    }

    async fn set_back_by_hand(&self, id: &str) {
        self.0.set_back_by_hand(id);
    }

    async fn expire_leases(&self) {
        self.0.expire_leases();
    }
}

impl Drop for Model {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let left = self.0.rows().into_iter().filter(|row| row.state != airtight_core::state::State::Done);
            eprintln!("not done: {:#?}", left.collect::<Vec<_>>());
        } else {
            assert_eq!(self.0.violations(), Vec::<String>::new());
        }
    }
}

airtight_testkit::source_conformance!(|_: &'static str| async { Some(Model(MemoryStore::new())) });
