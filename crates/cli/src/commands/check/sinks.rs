//! Checks sinks: whether a sink answers, and what a message would look like.

use std::sync::Arc;

use airtight::{
    Class, Event, Op, Payload, Preview, Sink,
    admin::{Filter, Finding},
    event::Headers,
};
use base64::{Engine, prelude::BASE64_STANDARD};
use serde_json::{Value, json};
use time::OffsetDateTime;
use uuid::Uuid;

use crate::{
    config::urls::SinkTarget,
    errors::{Failure, Outcome},
    output,
    wiring::{self, Store},
};

/// How much of a body is shown.
const SHOWN_BYTES: usize = 4_000;

/// A sink to check.
pub(super) struct Destination {
    /// The key or option that names the sink: `pipelines.orders.to`, or `--to`.
    name: String,
    target: SinkTarget,
    /// The streams that the sink receives; empty for all.
    streams: Vec<String>,
    sink: Arc<dyn Sink>,
}

impl Destination {
    /// Makes the sink, which connects to nothing.
    pub(super) fn new(name: &str, target: SinkTarget, streams: &[String]) -> Outcome<Self> {
        let sink = wiring::sink(&target).map_err(|error| Failure::usage(format!("{name}: {error}")))?;
        Ok(Self { name: name.to_owned(), target, streams: streams.to_vec(), sink })
    }

    /// Whether a broker answers and accepts the credentials. Other sinks are not opened: that would create a file.
    pub(super) async fn reach(&self) -> Option<Result<String, Finding>> {
        let SinkTarget::Broker(_) = self.target else { return None };
        let opened = self.sink.open().await;
        // Nothing was sent, so a failure to close loses nothing.
        let _ = self.sink.close().await;
        Some(match opened {
            Ok(()) => Ok(format!("{} answers", self.target)),
            Err(error) => {
                let wait = if error.class() == Class::Permanent { "" } else { "; a relay would wait for it" };
                Err(error.map_message(|message| format!("{}: {message}{wait}", self.name)).into())
            }
        })
    }

    /// A message as it would be sent: of the newest event in the outbox, or of an invented one.
    pub(super) async fn sample(&self, store: Option<&Store>) -> Option<Result<Sample, Finding>> {
        let newest = match store {
            Some(store) => self.newest(store).await,
            None => None,
        };
        let made_up = newest.is_none();
        let event = newest.unwrap_or_else(|| self.make_up());
        let message = match self.sink.preview(&event) {
            Ok(message) => message?,
            Err(error) => {
                let which = if made_up { "an invented event".into() } else { format!("event {}", event.id) };
                let found = Finding::from(error.context(format!("{}: {which} could not be sent", self.name)));
                return Some(Err(Finding { fatal: false, ..found }));
            }
        };
        Some(Ok(Sample { name: self.name.clone(), to: self.target.to_string(), made_up, message }))
    }

    async fn newest(&self, store: &Store) -> Option<Event> {
        let streams = match self.streams.as_slice() {
            [] => vec![None],
            names => names.iter().cloned().map(Some).collect(),
        };
        for stream in streams {
            let filter = Filter { stream, newest_first: true, limit: 1, ..Filter::default() };
            // Problems of the database were found before.
            let row = store.admin().list(&filter).await.ok()?.pop();
            if let Some(row) = row {
                return store.admin().show(&row.id).await.ok()??.event.ok();
            }
        }
        None
    }

    fn make_up(&self) -> Event {
        Event {
            id: Uuid::now_v7().to_string(),
            seq: 1,
            stream: self.streams.first().cloned().unwrap_or_else(|| "shop.orders".into()),
            event_type: "OrderPlaced".into(),
            aggregate_type: "Order".into(),
            aggregate_id: "42".into(),
            op: Op::Upsert,
            payload: Payload::Json(r#"{"total": 1200}"#.into()),
            headers: Headers::new(),
            occurred_at: OffsetDateTime::now_utc(),
            schema_version: 1,
            extra: serde_json::Map::new(),
            row: None,
        }
    }
}

/// The message that one sink would receive.
pub(super) struct Sample {
    name: String,
    to: String,
    made_up: bool,
    message: Preview,
}

impl Sample {
    pub(super) fn json(&self) -> Value {
        let Preview { destination, key, headers, body } = &self.message;
        let text = body.as_deref().map(std::str::from_utf8);
        json!({
            "name": self.name,
            "to": self.to,
            "madeUp": self.made_up,
            "destination": destination,
            "key": key,
            "headers": headers.iter().cloned().collect::<std::collections::BTreeMap<_, _>>(),
            "body": text.and_then(Result::ok),
            "bodyBase64": body.as_deref().filter(|_| matches!(text, Some(Err(_)))).map(|body| BASE64_STANDARD.encode(body)),
        })
    }

    pub(super) fn print(&self) -> Outcome {
        let of = if self.made_up { "an invented event" } else { "the newest event" };
        output::line(format!("\n{}: {} would receive {of} as:", self.name, self.to))?;
        output::line(format!("  {}", self.message.destination))?;
        if let Some(key) = &self.message.key {
            output::line(format!("  key {key}"))?;
        }
        for (name, value) in &self.message.headers {
            output::line(format!("  {name}: {value}"))?;
        }
        let body = match &self.message.body {
            None => "(no value: a tombstone)".to_owned(),
            Some(body) => shown(body),
        };
        output::line(format!("\n  {body}"))
    }
}

fn shown(body: &[u8]) -> String {
    let cut = &body[..body.len().min(SHOWN_BYTES)];
    let more = if cut.len() < body.len() { format!("… ({} bytes)", body.len()) } else { String::new() };
    match std::str::from_utf8(cut) {
        Ok(text) => format!("{text}{more}"),
        // Bytes, or text that was cut in the middle of a character.
        Err(_) => format!("{}{more}", String::from_utf8_lossy(cut)),
    }
}
