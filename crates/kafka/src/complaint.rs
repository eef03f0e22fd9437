//! What librdkafka says beside its answers, to a producer and to a consumer alike: its log and its complaints.

use std::sync::{Mutex, MutexGuard, PoisonError};

use rdkafka::{
    config::RDKafkaLogLevel,
    error::{KafkaError, RDKafkaErrorCode as KafkaCode},
};

/// A line of its log. Whatever is wrong with a connection reaches the operator once, as an error of the caller's.
pub(crate) fn log(level: RDKafkaLogLevel, facility: &str, message: &str) {
    match level {
        RDKafkaLogLevel::Emerg | RDKafkaLogLevel::Alert | RDKafkaLogLevel::Critical => {
            tracing::error!(target: "airtight::kafka", facility, "{message}");
        }
        _ => tracing::debug!(target: "airtight::kafka", facility, "{message}"),
    }
}

/// What was wrong last, as a code and in librdkafka's words.
#[derive(Debug, Default)]
pub(crate) struct Complaint(Mutex<Option<(KafkaCode, String)>>);

impl Complaint {
    pub(crate) fn note(&self, error: &KafkaError, reason: &str) {
        tracing::debug!(target: "airtight::kafka", %error, "{reason}");
        let mut last = self.lock();
        // That all brokers are down says less than the complaint before it, which says why.
        if let Some(code) = error.rdkafka_error_code()
            && (code != KafkaCode::AllBrokersDown || last.is_none())
        {
            *last = Some((code, reason.to_owned()));
        }
    }

    pub(crate) fn forget(&self) {
        *self.lock() = None;
    }

    pub(crate) fn last(&self) -> Option<(KafkaCode, String)> {
        self.lock().clone()
    }

    fn lock(&self) -> MutexGuard<'_, Option<(KafkaCode, String)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
