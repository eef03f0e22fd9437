//! What librdkafka reports apart from its answers, for producers and consumers: its log and its errors.

use std::sync::{Mutex, MutexGuard, PoisonError};

use rdkafka::{
    config::RDKafkaLogLevel,
    error::{KafkaError, RDKafkaErrorCode as KafkaCode},
};

/// Writes a line of librdkafka's log. Problems of a connection are reported to the operator once, as an error of the caller.
pub(crate) fn log(level: RDKafkaLogLevel, facility: &str, message: &str) {
    match level {
        RDKafkaLogLevel::Emerg | RDKafkaLogLevel::Alert | RDKafkaLogLevel::Critical => {
            tracing::error!(target: "airtight::kafka", facility, "{message}");
        }
        _ => tracing::debug!(target: "airtight::kafka", facility, "{message}"),
    }
}

/// The last error that librdkafka reported: its code and its text.
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
