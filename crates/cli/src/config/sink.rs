//! `to`: the sink of a pipeline, as an address or as a table with more settings.

use super::{
    file::{Result, Section, Value},
    parsed,
    urls::{Broker, Secret, SinkTarget, Webhook},
};
use crate::wiring;

/// The keys that only webhooks have.
const ABOUT_WEBHOOKS: [&str; 7] = ["secret", "headers", "timeout", "concurrency", "format", "ca", "proxy"];

/// `to = "URL"`, or `to = { url = "URL", … }`.
pub(super) fn read(value: &Value<'_>) -> Result<SinkTarget> {
    if value.is_text() {
        return parsed(value, SinkTarget::parse);
    }
    match parsed(&value.names()?.require("url")?, SinkTarget::parse)? {
        SinkTarget::Webhook(webhook) => read_webhook(value, webhook),
        SinkTarget::Broker(broker) => read_broker(value, broker),
        target => {
            let section = value.names()?;
            if let Some((_, value)) = section.entries().iter().find(|(key, _)| key != "url") {
                return Err(value.error(format!("`{target}` does not have this key; its only key is `url`")));
            }
            Ok(target)
        }
    }
}

fn read_webhook(value: &Value<'_>, webhook: Webhook) -> Result<SinkTarget> {
    let known: Vec<&str> = ["url"].into_iter().chain(ABOUT_WEBHOOKS).collect();
    let section = value.section(&known)?;
    let mut headers = webhook.headers;
    if let Some(value) = section.get("headers") {
        for (name, value) in value.names()?.entries() {
            headers.insert(name, Secret::new(value.text()?));
        }
    }
    Ok(SinkTarget::Webhook(Webhook {
        url: webhook.url,
        secret: section.get("secret").map(|value| value.name()).transpose()?.map(Secret::new),
        headers,
        timeout: section.duration("timeout")?,
        concurrency: section.number("concurrency", 1)?,
        format: match section.get("format") {
            Some(value) => {
                let words: Vec<_> = wiring::FORMATS.all().map(|format| (format.as_str(), format)).collect();
                value.word(&words)?
            }
            None => webhook.format,
        },
        ca: section.get("ca").map(|value| value.name()).transpose()?.map(Into::into),
        proxy: section.get("proxy").map(|value| value.name()).transpose()?.map(Secret::new),
    }))
}

/// The keys are those of the broker's crate, which reads their values when the sink is made. `settings` is a table
/// of names with dots, for clients that have many.
fn read_broker(value: &Value<'_>, mut broker: Broker) -> Result<SinkTarget> {
    let known: Vec<&str> =
        ["url", "settings"].into_iter().chain(wiring::broker_keys(broker.kind).iter().copied()).collect();
    let section = value.section(&known)?;
    for (key, value) in section.entries() {
        match key.as_str() {
            "url" => {}
            "settings" => read_settings(&value.names()?, "", &mut broker.settings)?,
            _ => broker.settings.push((key, Secret::new(value.scalar()?))),
        }
    }
    Ok(SinkTarget::Broker(broker))
}

/// `"linger.ms" = 5` and `linger.ms = 5` are two things in TOML, and mean the same here.
fn read_settings(section: &Section<'_>, above: &str, settings: &mut Vec<(String, Secret)>) -> Result<()> {
    for (key, value) in section.entries() {
        let name = if above.is_empty() { key } else { format!("{above}.{key}") };
        if value.is_table() {
            read_settings(&value.names()?, &name, settings)?;
        } else if name.contains('.') {
            settings.push((name, Secret::new(value.scalar()?)));
        } else {
            return Err(value.error("the name of a client setting contains a dot, like `linger.ms`"));
        }
    }
    Ok(())
}
