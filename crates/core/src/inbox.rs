//! Which events an inbox takes for the same, so that a repeated event is a no-op.
//!
//! The table of the inbox is in the consumer's database, since it is written in the handler's transaction: see the
//! `Inbox` of each store.

use std::time::Duration;

use crate::{Code, Error, Event, Result};

/// How long an inbox remembers an event by default.
pub const KEEP: Duration = Duration::from_secs(30 * 24 * 3_600);

/// Which events count as the same.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum DedupeKey {
    /// Events with the same id.
    #[default]
    EventId,
    /// Events with the same id and op, for producers where an upsert and a later delete share the id.
    EventIdAndOp,
    /// Events with the same aggregate (type and id) and version. The version is read from this header, or from an extra
    /// column of this name.
    AggregateVersion(String),
}

impl DedupeKey {
    /// The key of an event. A missing version is a permanent error: a guess could lose the event.
    pub fn of(&self, event: &Event) -> Result<String> {
        match self {
            Self::EventId => Ok(event.id.clone()),
            Self::EventIdAndOp => Ok(format!("{}:{}", event.id, event.op.as_str())),
            Self::AggregateVersion(name) => {
                let extra = event.extra.get(name).filter(|value| !value.is_null());
                let version =
                    event.headers.get(name).cloned().or_else(|| {
                        extra.map(|value| value.as_str().map_or(value.to_string(), str::to_owned))
                    });
                let version = version.ok_or_else(|| {
                    Error::permanent(
                        Code::NO_VERSION,
                        format!("the event has no header or column `{name}`, which the inbox compares"),
                    )
                })?;
                Ok(format!("{}/{}@{version}", event.aggregate_type, event.aggregate_id))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Op, event::sample_event};

    #[test]
    fn keys_tell_apart_what_they_should() {
        let mut upsert = sample_event(1, "k");
        let mut delete = upsert.clone();
        delete.op = Op::Delete;
        assert_eq!(DedupeKey::EventId.of(&upsert).unwrap(), DedupeKey::EventId.of(&delete).unwrap());
        assert_ne!(
            DedupeKey::EventIdAndOp.of(&upsert).unwrap(),
            DedupeKey::EventIdAndOp.of(&delete).unwrap()
        );

        let by_version = DedupeKey::AggregateVersion("version".into());
        assert_eq!(by_version.of(&upsert).unwrap_err().code(), "no_version");
        upsert.extra.insert("version".into(), 7.into());
        delete.headers.insert("version".into(), "7".into());
        assert_eq!(by_version.of(&upsert).unwrap(), by_version.of(&delete).unwrap());
    }
}
