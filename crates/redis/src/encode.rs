//! From an event to the entry of a stream, and from entries to the command that adds them.
//!
//! An entry is a list of fields and values, and both may be any bytes: nothing needs encoding. Names come in the
//! same order for every event, because Redis stores the names of like entries once.

use std::borrow::Cow;

use airtight_core::{
    Event, Result,
    format::{Carrier, Encoder, Message},
    route::Template,
};
use redis::Cmd;

/// Entries have no key of their own, and nothing means that a key is gone.
pub(crate) const CARRIER: Carrier =
    Carrier { has_key: false, has_tombstones: false, cloudevents_prefix: "ce_" };

/// The field with the body. A message without one has no such field, and one with an empty body has it empty.
const PAYLOAD: &str = "payload";

/// Adds the events in turn. Answers for each: 1 is in, 0 was left out, a text is why it was refused.
///
/// `KEYS` has the stream of each event; `ARGV` has for each event its key, how many words follow, and the words of
/// its `XADD`.
const SCRIPT: &str = "\
local answers, failed, at = {}, {}, 1
for i = 1, #KEYS do
  local chain, words = ARGV[at], tonumber(ARGV[at + 1])
  if failed[chain] then
    answers[i] = 0
  else
    local answer = redis.pcall('XADD', KEYS[i], unpack(ARGV, at + 2, at + 1 + words))
    if type(answer) == 'table' and answer.err then
      failed[chain] = true
      answers[i] = answer.err
    else
      answers[i] = 1
    end
  end
  at = at + 2 + words
end
return answers";

/// How much of a stream stays, about.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Trim {
    Never,
    ToLength(u64),
    /// What is older than this, in unix milliseconds.
    Before(i64),
}

impl Trim {
    /// What stands between a stream's key and the fields, the `*` for an id of the server's making included.
    fn words(self) -> Vec<String> {
        let words = |by: &str, limit: String| vec![by.into(), "~".into(), limit, "*".into()];
        match self {
            Self::Never => vec!["*".into()],
            Self::ToLength(length) => words("MAXLEN", length.to_string()),
            Self::Before(time) => words("MINID", time.to_string()),
        }
    }
}

/// What an entry carries. An empty body that nothing is said of is none, and has no field.
pub(crate) fn message<'a>(encoder: &Encoder, event: &'a Event) -> Message<'a> {
    let mut message = encoder.encode(event);
    let is_said = message.content_type.is_some();
    message.body = message.body.filter(|body| is_said || !body.is_empty());
    message
}

/// An entry, and the key of its stream.
pub(crate) struct Entry<'a> {
    pub(crate) key: Cow<'a, str>,
    /// What airtight keeps in order: the event's aggregate id.
    pub(crate) chain: &'a str,
    message: Message<'a>,
}

impl<'a> Entry<'a> {
    /// The entry for an event; permanent where the template asks for a field that it does not have.
    pub(crate) fn new(template: &'a Template, encoder: &Encoder, event: &'a Event) -> Result<Self> {
        let (key, message) = (template.render(event)?, message(encoder, event));
        Ok(Self { key, chain: &event.aggregate_id, message })
    }

    /// Names and values, in order.
    pub(crate) fn fields(&self) -> impl Iterator<Item = (&[u8], &[u8])> {
        let headers = self.message.headers.iter().map(|(name, value)| (name.as_bytes(), value.as_bytes()));
        let content_type = self.message.content_type.map(|text| ("content-type".as_bytes(), text.as_bytes()));
        let body = self.message.body.as_ref().map(|body| (PAYLOAD.as_bytes(), &body[..]));
        headers.chain(content_type).chain(body)
    }

    /// The command that adds it alone.
    pub(crate) fn command(&self, trim: Trim) -> Cmd {
        let mut command = Cmd::with_capacity(32, self.size() + 256);
        command.arg("XADD").arg(self.key.as_bytes()).arg(trim.words());
        self.put_fields(&mut command);
        command
    }

    fn put_fields(&self, command: &mut Cmd) {
        for (name, value) in self.fields() {
            command.arg(name).arg(value);
        }
    }

    /// Roughly what it takes on the wire.
    pub(crate) fn size(&self) -> usize {
        self.message.size() + self.key.len() + self.chain.len()
    }

    /// The largest of its parts: Redis has a limit for each.
    pub(crate) fn largest_part(&self) -> usize {
        let fields = self.fields().map(|(name, value)| name.len().max(value.len()));
        fields.chain([self.key.len(), self.chain.len()]).max().unwrap_or_default()
    }
}

/// The command that adds them in turn; see [`SCRIPT`].
pub(crate) fn script<'a>(trim: Trim, entries: impl Iterator<Item = &'a Entry<'a>> + Clone) -> Cmd {
    let trim = trim.words();
    let (count, bytes) =
        entries.clone().fold((0, 0), |(count, bytes), entry| (count + 1, bytes + entry.size() + 128));
    let mut command = Cmd::with_capacity(count * 32, SCRIPT.len() + bytes);
    command.arg("EVAL").arg(SCRIPT).arg(count);
    for entry in entries.clone() {
        command.arg(entry.key.as_bytes());
    }
    for entry in entries {
        let words = trim.len() + 2 * entry.fields().count();
        command.arg(entry.chain.as_bytes()).arg(words).arg(&trim);
        entry.put_fields(&mut command);
    }
    command
}

#[cfg(test)]
mod tests {
    use airtight_core::{Payload, format::Format};
    use airtight_testkit::deliveries::sample_event;

    use super::*;

    fn fields(event: &Event, format: Format) -> Vec<(String, String)> {
        let template = Template::parse("{stream}").unwrap();
        let entry = Entry::new(&template, &Encoder::new(format, CARRIER), event).unwrap();
        let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
        entry.fields().map(|(name, value)| (text(name), text(value))).collect()
    }

    #[test]
    fn no_body_and_an_empty_one_can_be_told_apart() {
        let body = |payload| {
            let mut event = sample_event(1, "k");
            event.payload = payload;
            let fields = fields(&event, Format::Raw);
            fields.into_iter().find(|(name, _)| name == "payload").map(|(_, value)| value)
        };
        assert_eq!(body(Payload::None), None);
        assert_eq!(body(Payload::Bytes(bytes::Bytes::new())), Some(String::new()));
        assert_eq!(body(Payload::Json("{ }".into())), Some("{ }".into()));
    }

    #[test]
    fn a_header_of_the_name_payload_does_not_become_the_body() {
        for format in Format::ALL.into_iter().chain([airtight_debezium::FORMAT]) {
            let mut event = sample_event(1, "k");
            event.headers.insert("payload".into(), "not the body".into());
            event.headers.insert("content-type".into(), "x/y".into());
            let mut names: Vec<String> = fields(&event, format).into_iter().map(|(name, _)| name).collect();
            let all = names.len();
            names.sort();
            names.dedup();
            assert_eq!(names.len(), all, "{format:?} names a field twice");
        }
    }
}
