//! From a delivery to a request: headers, body, signature.
//!
//! Nothing here can fail. Every event in an outbox can be delivered, whatever characters its key has. What a header cannot
//! carry is encoded or left out; the body is complete.

use airtight_core::{
    Delivery, Event, Format, Payload, Result,
    format::{Carrier, Encoder, Message, percent_encode},
};
use base64::{
    Engine, alphabet,
    engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig, general_purpose::STANDARD},
};
use bytes::Bytes;
use hmac::{Hmac, Mac};
use reqwest::header::{CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue};
use sha2::Sha256;
use time::{OffsetDateTime, format_description::well_known::Rfc3339};

use crate::config::bad;

/// HTTP has no keys and no tombstones, and CloudEvents its own binding.
const CARRIER: Carrier = Carrier { has_key: false, has_tombstones: false, cloudevents_prefix: "ce-" };

/// What the metadata headers may take together. Common servers refuse requests with more than 8 KiB of
/// headers, and a refusal for that reason would kill an event that is fine.
const METADATA_BYTES: usize = 6 * 1024;

/// Whoever pasted a secret may have lost its padding on the way.
const LENIENT: GeneralPurpose = GeneralPurpose::new(
    &alphabet::STANDARD,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

/// A request but for what is the same in all of them.
pub(crate) struct Encoded {
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
}

/// Encodes one attempt, sent at `now`.
pub(crate) fn encode(
    delivery: &Delivery,
    format: Format,
    signer: Option<&Signer>,
    now: OffsetDateTime,
) -> Encoded {
    let event = &delivery.event;
    let (message, content_type) = body(event, format);
    let body = message.body.unwrap_or_default();
    let mut headers = HeaderMap::new();
    if let Some(content_type) = content_type {
        headers.insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    }
    // The signature is over the id as the receiver sees it.
    let id = percent_encode(&event.id);
    let timestamp = now.unix_timestamp();
    if let Some(signer) = signer {
        set(&mut headers, "webhook-signature", &signer.sign(&id, timestamp, &body));
    }
    set(&mut headers, "webhook-id", &id);
    set(&mut headers, "webhook-timestamp", &timestamp.to_string());
    set(&mut headers, "idempotency-key", &id);
    if format == Format::CloudEventsBinary {
        for (name, value) in &message.headers {
            set(&mut headers, name, &percent_encode(value));
        }
    }
    metadata(&mut headers, delivery, format);
    Encoded { headers, body }
}

/// The body and what it is.
fn body<'a>(event: &'a Event, format: Format) -> (Message<'a>, Option<&'static str>) {
    let message = Encoder::new(format, CARRIER).encode(event);
    // Some formats say nothing of their bodies; HTTP should.
    let content_type = message.content_type.or(match &event.payload {
        Payload::Json(_) => Some("application/json"),
        Payload::Bytes(_) => Some("application/octet-stream"),
        // Nothing is no JSON: servers that parse by content type would refuse it.
        Payload::None => None,
    });
    (message, content_type)
}

fn metadata(headers: &mut HeaderMap, delivery: &Delivery, format: Format) {
    let event = &delivery.event;
    let mut room = METADATA_BYTES;
    let mut put = |name: &str, value: &str, encoded: bool| {
        let value = if encoded { value.into() } else { percent_encode(value) };
        let cost = name.len() + value.len() + 4;
        if cost <= room && set(headers, name, &value) {
            room -= cost;
        }
    };
    put("airtight-seq", &event.seq.to_string(), true);
    put("airtight-attempt", &delivery.attempt.to_string(), true);
    put("airtight-op", event.op.as_str(), true);
    put("airtight-stream", &event.stream, false);
    put("airtight-event-type", &event.event_type, false);
    put("airtight-aggregate-type", &event.aggregate_type, false);
    put("airtight-aggregate-id", &event.aggregate_id, false);
    for name in ["traceparent", "tracestate"] {
        // Encoded, these would mean something else: as they are, or not at all.
        if let Some(value) = event.headers.get(name) {
            put(name, value, true);
        }
    }
    if matches!(format, Format::Raw | Format::Event | Format::Custom(_)) {
        put("airtight-occurred-at", &event.occurred_at.format(&Rfc3339).unwrap_or_default(), true);
        put("airtight-schema-version", &event.schema_version.to_string(), true);
        for (name, value) in &event.headers {
            put(&format!("airtight-header-{name}"), value, false);
        }
    }
}

/// Sets a header if HTTP allows it.
fn set(headers: &mut HeaderMap, name: &str, value: &str) -> bool {
    match (HeaderName::from_bytes(name.as_bytes()), HeaderValue::from_str(value)) {
        (Ok(name), Ok(value)) => {
            headers.insert(name, value);
            true
        }
        _ => false,
    }
}

/// Signs as Standard Webhooks say, with each of its secrets.
pub(crate) struct Signer(Vec<Hmac<Sha256>>);

impl Signer {
    /// Reads secrets, separated by spaces.
    pub(crate) fn parse(secrets: &str) -> Result<Self> {
        let keys: Vec<_> = secrets.split_whitespace().map(key).collect::<Result<_>>()?;
        if keys.is_empty() {
            // Most often an environment variable that is not set; sending unsigned would be the wrong guess.
            return Err(bad("secret", "is empty")
                .with_remedy("give one, or remove the key to send unsigned requests"));
        }
        Ok(Self(keys))
    }

    /// The value of `webhook-signature`.
    fn sign(&self, id: &str, timestamp: i64, body: &[u8]) -> String {
        let mut signatures = String::new();
        for key in &self.0 {
            let mut mac = key.clone();
            mac.update(format!("{id}.{timestamp}.").as_bytes());
            mac.update(body);
            if !signatures.is_empty() {
                signatures.push(' ');
            }
            signatures.push_str("v1,");
            STANDARD.encode_string(mac.finalize().into_bytes(), &mut signatures);
        }
        signatures
    }
}

fn key(secret: &str) -> Result<Hmac<Sha256>> {
    let key = match secret.strip_prefix("whsec_") {
        None => secret.as_bytes().to_vec(),
        Some("") => return Err(bad("secret", "has nothing after `whsec_`: the key in base64 belongs there")),
        Some(text) => LENIENT.decode(text).map_err(|_| {
            bad("secret", "begins with `whsec_` but is not base64 after that: copy it again, or give plain text without `whsec_`")
        })?,
    };
    Hmac::new_from_slice(&key).map_err(|_| bad("secret", "is not usable as a key"))
}

#[cfg(test)]
mod tests {
    use airtight_core::Position;
    use airtight_testkit::deliveries::sample_event;

    use super::*;

    const ID: &str = "msg_p5jXN8AQM9LWM0D4loKWxJek";
    const BODY: &[u8] = br#"{"test": 2432232314}"#;

    fn delivery(event: Event) -> Delivery {
        Delivery {
            event,
            position: Position(1),
            attempt: 3,
            max_attempts: None,
            lost_leases: 0,
            replay: None,
        }
    }

    fn encoded(event: Event, format: Format) -> Encoded {
        encode(&delivery(event), format, None, OffsetDateTime::UNIX_EPOCH)
    }

    /// The vector that the libraries of Standard Webhooks are tested with, and the same message under a
    /// plain-text secret by Python's `hmac`.
    #[test]
    fn signatures_are_those_of_standard_webhooks() {
        let published = "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=";
        let sign = |secret| Signer::parse(secret).unwrap().sign(ID, 1_614_265_330, BODY);
        assert_eq!(sign("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"), published);
        assert_eq!(sign("plain-text-secret"), "v1,/5K4wOUz2W70ITy7ouF7HIz+6cXIVitDKDProiHWfSc=");
        assert_eq!(
            sign(" plain-text-secret  whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw "),
            format!("v1,/5K4wOUz2W70ITy7ouF7HIz+6cXIVitDKDProiHWfSc= {published}")
        );
    }

    #[test]
    fn odd_keys_are_encoded_and_huge_ones_left_out() {
        let headers = encoded(sample_event(1, " grün\r\nx: 50% "), Format::Envelope).headers;
        assert_eq!(headers["airtight-aggregate-id"], "%20gr%C3%BCn%0D%0Ax: 50%25%20");
        let mut event = sample_event(1, &"k".repeat(100_000));
        event.headers.insert("traceparent".into(), "00-a\n".into());
        event.headers.insert("tracestate".into(), "a=1".into());
        let headers = encoded(event, Format::Envelope).headers;
        assert!(!headers.contains_key("airtight-aggregate-id") && !headers.contains_key("traceparent"));
        assert_eq!(headers["airtight-seq"], "1");
        assert_eq!(headers["airtight-attempt"], "3");
        assert_eq!(headers["tracestate"], "a=1");
    }

    #[test]
    fn cloudevents_are_bound_to_http_as_their_specification_says() {
        let event = sample_event(1, "grün");
        let structured = encoded(event.clone(), Format::CloudEvents);
        assert_eq!(structured.headers[CONTENT_TYPE], "application/cloudevents+json; charset=UTF-8");
        let binary = encoded(event.clone(), Format::CloudEventsBinary);
        assert_eq!(binary.headers[CONTENT_TYPE], "application/json");
        assert_eq!(binary.headers["ce-subject"], "gr%C3%BCn");
        assert_eq!(binary.headers["ce-specversion"], "1.0");
        assert_eq!(binary.body[..], *event.payload.as_bytes());
    }

    #[test]
    fn raw_sends_the_payload_as_stored_and_the_rest_in_headers() {
        let mut event = sample_event(1, "k");
        event.payload = Payload::Bytes(Bytes::from_static(&[0, 255]));
        event.headers.insert("source".into(), "checkout".into());
        event.headers.insert("not a name".into(), "x".into());
        let Encoded { headers, body } = encoded(event.clone(), Format::Raw);
        assert_eq!(body[..], [0, 255]);
        assert_eq!(headers[CONTENT_TYPE], "application/octet-stream");
        assert_eq!(headers["airtight-header-source"], "checkout");
        assert_eq!(headers["airtight-occurred-at"], "1970-01-01T00:00:00Z");
        event.payload = Payload::None;
        let Encoded { headers, body } = encoded(event.clone(), Format::Raw);
        assert!(body.is_empty() && !headers.contains_key(CONTENT_TYPE));
        event.payload = Payload::Json("{ }".into());
        let Encoded { headers, body } = encoded(event, Format::Raw);
        assert_eq!(body[..], *b"{ }");
        assert_eq!(headers[CONTENT_TYPE], "application/json");
    }
}
