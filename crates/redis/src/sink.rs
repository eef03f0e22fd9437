//! The sink: it sends a batch in requests of many events, and each request is one script that keeps the order.
//!
//! Redis continues after a command that failed, so a later event of a key could be stored although an earlier one was
//! refused. The script prevents this: after an event that was refused, it skips the rest of that key. The next request is
//! sent after the answer to the last one, and leaves out the keys that have failed. So a prefix of each key is stored, with
//! one round trip for each request, whether a batch has one key or a thousand.

use std::{
    collections::{HashMap, HashSet},
    fmt,
};

use airtight_core::{
    Capabilities, Class, Code, Delivery, Error, Event, Outcome, Preview, Result, Sink, format::Encoder,
    route::Template,
};
use async_trait::async_trait;
use redis::Value;

use crate::{
    check,
    client::{Client, Connection},
    config::RedisConfig,
    encode::{self, CARRIER, Entry, Trim, script},
    errors::{Refusal, destination},
};

/// The most events in one request, so that nobody else waits long for the server: a millisecond or two.
const REQUEST_EVENTS: usize = 250;
/// The most bytes in one request, but for an event that is larger. No server has a limit below this one, so when a
/// request of several events fails, none of them was too large.
const REQUEST_BYTES: usize = 1 << 20;
/// The most words that one event brings into the script; Lua's stack ends at some thousands.
const SCRIPT_WORDS: usize = 2_000;

/// Adds each event to a stream; see the crate's documentation for what an entry looks like and what an error means.
pub struct RedisSink {
    client: Client,
    key: Template,
    encoder: Encoder,
}

impl RedisSink {
    /// Checks the config, templates and files included, and nothing on the network. A permanent error names the key
    /// that is wrong.
    pub fn new(config: RedisConfig) -> Result<Self> {
        let key = Template::parse(&config.key).map_err(|error| error.context("`key`"))?;
        let encoder = Encoder::new(config.format, CARRIER);
        Ok(Self { client: Client::new(config)?, key, encoder })
    }

    fn entry<'a>(&'a self, event: &'a Event) -> Result<Entry<'a>> {
        let entry = Entry::new(&self.key, &self.encoder, event)?;
        let (size, limit) = (entry.largest_part(), self.client.largest());
        if size > limit {
            Err(self.too_large(size, &format!("`proto-max-bulk-len` is {limit} bytes")))
        } else {
            Ok(entry)
        }
    }

    fn too_large(&self, size: usize, limit: &str) -> Error {
        let address = &self.client.address;
        Error::permanent(
            Code::TOO_LARGE,
            format!("the event has a field of {size} bytes, which is too large for {address}: {limit}"),
        )
    }

    /// Sends one request and answers for each of its entries. An error is about all of them, and then the
    /// connection is of no more use.
    async fn send(
        &self,
        connection: &mut Connection,
        request: &[(usize, Entry<'_>)],
    ) -> Result<Vec<Outcome>> {
        let mut outcomes = match request {
            // One event needs no script, and may be as large as it likes.
            [(_, only)] => vec![self.send_one(connection, only).await?],
            several => self.send_several(connection, several).await?,
        };
        let is_any_in = outcomes.iter().any(|outcome| matches!(outcome, Outcome::Delivered));
        if self.client.config.wait_replicas > 0 && is_any_in {
            self.wait_for_replicas(connection, &mut outcomes).await?;
        }
        Ok(outcomes)
    }

    async fn send_one(&self, connection: &mut Connection, entry: &Entry<'_>) -> Result<Outcome> {
        let command = entry.command(self.trim(connection));
        let refusal = match self.client.ask(connection, &command, self.client.config.timeout).await? {
            Ok(answer) if is_id(&answer) => return Ok(Outcome::Delivered),
            Ok(_) => return Err(self.client.stranger()),
            Err(refusal) => refusal,
        };
        let error = if refusal.is_too_large() {
            self.too_large(entry.largest_part(), "the server refuses the entry because of its size")
        } else {
            refusal.of_entry(&self.client.address, &entry.key)
        };
        if refusal.is_last_word() { Err(error) } else { Ok(Outcome::Failed(error)) }
    }

    async fn send_several(
        &self,
        connection: &mut Connection,
        request: &[(usize, Entry<'_>)],
    ) -> Result<Vec<Outcome>> {
        let command = script(self.trim(connection), request.iter().map(|(_, entry)| entry));
        match self.client.ask(connection, &command, self.client.config.timeout).await? {
            Ok(Value::Array(answers)) if answers.len() == request.len() => {
                let each = answers.iter().zip(request);
                each.map(|(answer, (_, entry))| self.judge(answer, entry)).collect()
            }
            Ok(_) => Err(self.client.stranger()),
            // Redis refuses a script for one key that it names, and does not say which.
            Err(refusal) if refusal.is_about_key() => self.send_one_by_one(connection, request).await,
            Err(refusal) => {
                let error = refusal.of_server(&self.client.address);
                if refusal.is_last_word() {
                    return Err(error);
                }
                Ok(vec![Outcome::Failed(error); request.len()])
            }
        }
    }

    async fn send_one_by_one(
        &self,
        connection: &mut Connection,
        request: &[(usize, Entry<'_>)],
    ) -> Result<Vec<Outcome>> {
        let mut outcomes = Vec::with_capacity(request.len());
        let (mut stopped, mut refused) = (HashSet::new(), HashMap::<&str, Error>::new());
        for (_, entry) in request {
            let outcome = if stopped.contains(entry.chain) {
                Outcome::Skipped
            } else if let Some(error) = refused.get(&*entry.key) {
                Outcome::Failed(error.clone())
            } else {
                self.send_one(connection, entry).await?
            };
            if let Outcome::Failed(error) = &outcome
                && error.destination().is_some()
            {
                refused.insert(&entry.key, error.clone());
            }
            if !matches!(outcome, Outcome::Delivered) {
                stopped.insert(entry.chain);
            }
            outcomes.push(outcome);
        }
        Ok(outcomes)
    }

    /// Whether nobody gets in because of this, or only those for one stream of several.
    fn is_whole(&self, error: &Error) -> bool {
        let is_everybodys = error.destination().is_none() || self.key.constant().is_some();
        error.class() == Class::Unavailable && is_everybodys
    }

    /// What the script says of one entry.
    fn judge(&self, answer: &Value, entry: &Entry<'_>) -> Result<Outcome> {
        match answer {
            Value::Int(1) => Ok(Outcome::Delivered),
            Value::Int(0) => Ok(Outcome::Skipped),
            Value::BulkString(text) => {
                let refusal = Refusal::from_script(&String::from_utf8_lossy(text));
                Ok(Outcome::Failed(refusal.of_entry(&self.client.address, &entry.key)))
            }
            _ => Err(self.client.stranger()),
        }
    }

    /// What no replica has yet is not delivered, though it is in the stream: it comes again.
    async fn wait_for_replicas(&self, connection: &mut Connection, outcomes: &mut [Outcome]) -> Result<()> {
        let config = &self.client.config;
        let wanted = config.wait_replicas;
        let mut wait = redis::cmd("WAIT");
        // Less than the request's own deadline, or it would never be Redis that says how many there are.
        wait.arg(wanted).arg(u64::try_from(config.timeout.as_millis() / 2).unwrap_or(u64::MAX).max(1));
        let error = match self.client.ask(connection, &wait, config.timeout).await? {
            Ok(Value::Int(have)) if have >= i64::from(wanted) => return Ok(()),
            Ok(Value::Int(have)) => check::too_few_replicas(&self.client.address, have, wanted),
            Ok(_) => return Err(self.client.stranger()),
            Err(refusal) => refusal.of_server(&self.client.address),
        };
        for outcome in outcomes.iter_mut().filter(|outcome| matches!(outcome, Outcome::Delivered)) {
            *outcome = Outcome::Failed(error.clone());
        }
        Ok(())
    }

    /// How to trim the stream, by the server's clock where it goes by age.
    fn trim(&self, connection: &Connection) -> Trim {
        match (self.client.config.max_len, self.client.config.max_age) {
            (Some(length), _) => Trim::ToLength(length),
            (None, Some(age)) => {
                let age = i64::try_from(age.as_millis()).unwrap_or(i64::MAX);
                Trim::Before(connection.server_time().saturating_sub(age).max(0))
            }
            (None, None) => Trim::Never,
        }
    }
}

impl fmt::Debug for RedisSink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisSink").field("config", &self.client.config).finish_non_exhaustive()
    }
}

#[async_trait]
impl Sink for RedisSink {
    fn capabilities(&self) -> Capabilities {
        Capabilities { prefix_per_key: true, concurrency: 4, ..Capabilities::default() }
    }

    fn destinations(&self, event: &Event) -> Vec<String> {
        match (self.key.constant(), self.key.render(event)) {
            (None, Ok(key)) => vec![destination(&key)],
            _ => Vec::new(),
        }
    }

    async fn open(&self) -> Result<()> {
        check::open(&self.client).await
    }

    async fn deliver(&self, batch: &[Delivery]) -> Vec<Outcome> {
        if batch.is_empty() {
            return Vec::new();
        }
        // First, because nothing need be encoded for a server that is away.
        let connection = match self.client.connection().await {
            Ok(connection) => connection,
            Err(error) => return vec![Outcome::Failed(error); batch.len()],
        };
        let mut run = Run::new(self, connection, batch.len());
        for (at, delivery) in batch.iter().enumerate() {
            run.add(at, &delivery.event).await;
        }
        run.flush().await;
        if let Some(connection) = run.connection {
            self.client.keep(connection);
        }
        run.outcomes
    }

    fn preview(&self, event: &Event) -> Result<Option<Preview>> {
        let key = self.key.render(event)?;
        Ok(Some(Preview::new(format!("stream {key}"), None, encode::message(&self.encoder, event))))
    }

    async fn close(&self) -> Result<()> {
        self.client.forget();
        Ok(())
    }
}

/// One batch on its way.
struct Run<'a> {
    sink: &'a RedisSink,
    outcomes: Vec<Outcome>,
    /// Keys of which an event was not delivered: the rest stays here.
    stopped: HashSet<&'a str>,
    /// Nobody gets in: nothing more is sent.
    is_away: bool,
    /// None after it broke, until the next request.
    connection: Option<Connection>,
    request: Vec<(usize, Entry<'a>)>,
    bytes: usize,
}

impl<'a> Run<'a> {
    fn new(sink: &'a RedisSink, connection: Connection, events: usize) -> Self {
        Self {
            sink,
            outcomes: vec![Outcome::Skipped; events],
            stopped: HashSet::new(),
            is_away: false,
            connection: Some(connection),
            request: Vec::new(),
            bytes: 0,
        }
    }

    /// Puts an event into the request, and sends that first where it has no room.
    async fn add(&mut self, at: usize, event: &'a Event) {
        if self.is_stopped(&event.aggregate_id) {
            return;
        }
        let entry = match self.sink.entry(event) {
            Ok(entry) => entry,
            Err(error) => {
                // Those before it go first: only then is it known that it is this one's turn.
                self.flush().await;
                if !self.is_stopped(&event.aggregate_id) {
                    self.settle(at, &event.aggregate_id, Outcome::Failed(error));
                }
                return;
            }
        };
        let is_small = entry.size() <= REQUEST_BYTES && entry.fields().count() * 2 <= SCRIPT_WORDS;
        if !is_small || self.request.len() == REQUEST_EVENTS || self.bytes + entry.size() > REQUEST_BYTES {
            self.flush().await;
            if self.is_stopped(&event.aggregate_id) {
                return;
            }
        }
        self.bytes += entry.size();
        self.request.push((at, entry));
        if !is_small {
            self.flush().await;
        }
    }

    /// Sends what there is, and waits for the answers.
    async fn flush(&mut self) {
        let request = std::mem::take(&mut self.request);
        let bytes = std::mem::take(&mut self.bytes);
        if request.is_empty() {
            return;
        }
        let sent = match self.connection.take() {
            Some(connection) => Ok(connection),
            None => self.sink.client.connection().await,
        };
        let outcomes = match sent {
            Err(error) => vec![Outcome::Failed(error); request.len()],
            Ok(mut connection) => match self.sink.send(&mut connection, &request).await {
                Ok(outcomes) => {
                    self.connection = Some(connection);
                    outcomes
                }
                Err(error) => vec![Outcome::Failed(perhaps_its_own_fault(error, bytes)); request.len()],
            },
        };
        for ((at, entry), outcome) in request.into_iter().zip(outcomes) {
            self.settle(at, entry.chain, outcome);
        }
    }

    fn settle(&mut self, at: usize, chain: &'a str, outcome: Outcome) {
        match &outcome {
            Outcome::Delivered => {}
            other => {
                self.stopped.insert(chain);
                self.is_away |= matches!(other, Outcome::Failed(error) if self.sink.is_whole(error));
            }
        }
        self.outcomes[at] = outcome;
    }

    fn is_stopped(&self, chain: &str) -> bool {
        self.is_away || self.stopped.contains(chain)
    }
}

/// Whether this is what `XADD` answers: `1700000000000-0`. Anything else is no receipt.
fn is_id(answer: &Value) -> bool {
    let Value::BulkString(text) = answer else { return false };
    let parts = std::str::from_utf8(text).ok().and_then(|text| text.split_once('-'));
    parts.is_some_and(|(time, number)| time.parse::<u64>().is_ok() && number.parse::<u64>().is_ok())
}

/// A large event travels alone, and a server that finds it too large hangs up, often before it can say why. So a
/// connection that breaks under one may be the event's doing: it costs an attempt, or it would keep all others
/// waiting for ever.
fn perhaps_its_own_fault(error: Error, bytes: usize) -> Error {
    if error.class() != Class::Unavailable || bytes <= REQUEST_BYTES {
        return error;
    }
    error
        .with_class(Class::Retryable)
        .map_message(|message| format!("{message}; the event may be too large: it has {bytes} bytes"))
}
