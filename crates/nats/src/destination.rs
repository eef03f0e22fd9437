//! The stream that events go to: the sink checks that it exists and fits, and creates it if that is allowed.

use std::sync::Arc;

use airtight_core::{Code, Error, Result};
use async_nats::Request;
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::{Value, json};

use crate::{
    client::{Client, Connection, Unanswered},
    errors::{self, Refusal, code, printable},
    resolved::Created,
};

/// Either what was asked for or a refusal.
#[derive(Deserialize)]
#[serde(untagged)]
enum Reply<T> {
    Refused { error: Refusal },
    Given(T),
}

#[derive(Deserialize)]
struct Stream {
    config: StreamConfig,
}

#[derive(Deserialize)]
struct StreamConfig {
    #[serde(default)]
    storage: String,
    #[serde(default)]
    no_ack: bool,
    #[serde(default)]
    max_msg_size: i64,
}

#[derive(Deserialize)]
struct Names {
    #[serde(default)]
    streams: Option<Vec<String>>,
}

impl Client {
    /// Finds the stream, or creates it. If the user may not look it up, the first event shows whether it exists.
    pub(crate) async fn check_destination(&self, connection: &Arc<Connection>) -> Result<()> {
        match (&self.config().stream, self.config().subject.constant()) {
            (Some(name), _) => self.check_stream(connection, name).await,
            (None, Some(subject)) => self.check_subject(connection, subject).await,
            // Which subjects there will be, events decide.
            (None, None) => Ok(()),
        }
    }

    async fn check_stream(&self, connection: &Arc<Connection>, name: &str) -> Result<()> {
        let created = self.config().created.as_ref();
        let found = self.api::<Stream>(connection, &format!("STREAM.INFO.{name}"), &json!({})).await;
        match found {
            Ok(Reply::Given(stream)) => fit(name, &stream.config),
            Ok(Reply::Refused { error }) if error.err_code == code::STREAM_NOT_FOUND => match created {
                Some(created) => self.create(connection, name, created).await,
                None => Err(Error::unavailable(
                    Code::NO_STREAM,
                    format!("the stream `{name}` for the subject `{}` does not exist", self.config().subject),
                )
                .with_remedy("create it, or set `create=true` to let airtight create it")),
            },
            Ok(Reply::Refused { error }) => Err(refused(name, &error)),
            Err(Unanswered::Denied(_)) if created.is_none() => Ok(()),
            Err(unanswered) => Err(self.no_answer(unanswered)),
        }
    }

    async fn check_subject(&self, connection: &Arc<Connection>, subject: &str) -> Result<()> {
        match self.api::<Names>(connection, "STREAM.NAMES", &json!({ "subject": subject })).await {
            Ok(Reply::Given(names)) if names.streams.as_ref().is_none_or(Vec::is_empty) => {
                Err(errors::no_stream(subject, None))
            }
            Ok(Reply::Given(_)) | Err(Unanswered::Denied(_)) => Ok(()),
            Ok(Reply::Refused { error }) => Err(refused(subject, &error)),
            Err(unanswered) => Err(self.no_answer(unanswered)),
        }
    }

    /// On disk, without limits: what is discarded is for the operator to decide.
    async fn create(&self, connection: &Arc<Connection>, name: &str, created: &Created) -> Result<()> {
        let config = json!({
            "name": name,
            "subjects": created.subjects,
            "num_replicas": created.replicas,
            "storage": "file",
            "retention": "limits",
            "discard": "old",
            "max_consumers": -1,
            "max_msgs": -1,
            "max_bytes": -1,
            "max_msg_size": -1,
            "max_age": 0,
        });
        match self.api::<Stream>(connection, &format!("STREAM.CREATE.{name}"), &config).await {
            Ok(Reply::Given(_)) => {
                tracing::info!(stream = name, subjects = ?created.subjects, "created a stream");
                Ok(())
            }
            // Another relay was quicker.
            Ok(Reply::Refused { error }) if error.err_code == code::NAME_IN_USE => Ok(()),
            Ok(Reply::Refused { error }) => {
                let what = refused(name, &error);
                Err(what.context("the stream does not exist and cannot be created"))
            }
            Err(unanswered) => Err(self.no_answer(unanswered)),
        }
    }

    /// The largest message that the stream of a refusal takes; none where nobody says.
    pub(crate) async fn stream_limit(&self, connection: &Arc<Connection>, refusal: &[u8]) -> Option<usize> {
        let name = errors::stream_of(refusal).or_else(|| self.config().stream.clone())?;
        match self.api::<Stream>(connection, &format!("STREAM.INFO.{name}"), &json!({})).await {
            Ok(Reply::Given(stream)) => {
                usize::try_from(stream.config.max_msg_size).ok().filter(|size| *size > 0)
            }
            _ => None,
        }
    }

    async fn api<T: DeserializeOwned>(
        &self,
        connection: &Arc<Connection>,
        name: &str,
        request: &Value,
    ) -> std::result::Result<Reply<T>, Unanswered> {
        let request = Request::new().payload(request.to_string().into());
        let message = self.ask(connection, &format!("$JS.API.{name}"), request).await?;
        serde_json::from_slice(&message.payload).map_err(|_| {
            Unanswered::Lost(format!("an answer is not JetStream's: {}", printable(&message.payload)))
        })
    }

    fn no_answer(&self, unanswered: Unanswered) -> Error {
        let shown = &self.config().shown;
        match unanswered {
            Unanswered::NoResponders => Error::unavailable(
                Code::NO_JETSTREAM,
                format!("JetStream is not enabled at {shown}, or not for this account"),
            ),
            Unanswered::Denied(complaint) => self.denied(&complaint),
            Unanswered::Lost(why) => self.lost(&why),
            Unanswered::Late | Unanswered::TooLarge(_) => Error::unavailable(
                Code::TIMEOUT,
                format!(
                    "JetStream at {shown} did not answer within {:?}: the server is stuck, or has no leader",
                    self.config().timeout
                ),
            ),
        }
    }
}

fn fit(name: &str, config: &StreamConfig) -> Result<()> {
    if config.no_ack {
        let what = format!(
            "the stream `{name}` is set to `no_ack`, so it never acknowledges an event: turn `no_ack` off"
        );
        return Err(Error::unavailable(Code::NO_ACK, what));
    }
    if config.storage == "memory" {
        tracing::warn!(
            stream = name,
            "the stream is kept in memory: a restart of its server loses its events"
        );
    }
    Ok(())
}

fn refused(name: &str, refusal: &Refusal) -> Error {
    let Refusal { code, err_code, description } = refusal;
    let said = printable(description.as_bytes());
    Error::unavailable(
        Code::SERVER_ERROR,
        format!("JetStream reports about the stream `{name}`: {said} ({code}, {err_code})"),
    )
}
