//! A [`Status`] in Prometheus's text format: gauges, to be served over HTTP or written to a file.

use std::fmt::{Display, Write as _};

use crate::admin::Status;

/// Renders the status in Prometheus's text format. Names begin with `prefix`, `airtight` by default.
pub fn prometheus(status: &Status, prefix: &str) -> String {
    let mut page = Page { prefix, text: String::new() };
    let outbox = ("outbox", status.outbox.as_str());
    for (name, help, value) in [
        ("outbox_relays", "Relays whose lease is valid.", status.relays.len() as u64),
        ("outbox_blocked_keys", "Keys that wait behind a failed or dead event.", status.blocked_keys),
    ] {
        page.family(name, help, [(vec![outbox], Some(value))]);
    }
    page.family(
        "outbox_waiting_for_destination",
        "Events that wait for a destination that is unavailable.",
        status.away.iter().map(|one| {
            let mut of = vec![outbox, ("destination", one.message.as_str())];
            of.extend(one.consumer.as_deref().map(|consumer| ("consumer", consumer)));
            (of, Some(one.events))
        }),
    );
    let streams = || status.streams.iter().map(|one| (one, vec![outbox, ("stream", one.stream.as_str())]));
    page.family("outbox_pending", "Due, never failed.", streams().map(|(s, of)| (of, Some(s.pending))));
    page.family(
        "outbox_failed",
        "Waiting for another attempt.",
        streams().map(|(s, of)| (of, Some(s.retrying))),
    );
    page.family("outbox_processing", "Claimed.", streams().map(|(s, of)| (of, Some(s.processing))));
    page.family("outbox_done", "Delivered and still kept.", streams().map(|(s, of)| (of, Some(s.done))));
    page.family("outbox_dead", "Given up on.", streams().map(|(s, of)| (of, Some(s.dead))));
    page.family("outbox_unknown", "Outcome not known.", streams().map(|(s, of)| (of, Some(s.unknown))));
    page.family(
        "outbox_unexplained",
        "Rows whose status airtight does not know, and does not touch.",
        streams().map(|(s, of)| (of, Some(s.unexplained))),
    );
    page.family(
        "outbox_oldest_pending_seconds",
        "Age of the oldest event that is not finished; zero if there is none.",
        streams().map(|(s, of)| (of, Some(s.oldest_pending_seconds.unwrap_or(0.0)))),
    );
    let consumers =
        || status.consumers.iter().map(|one| (one, vec![outbox, ("consumer", one.name.as_str())]));
    page.family(
        "consumer_lag_events",
        "Events that are not settled.",
        consumers().map(|(c, of)| (of, Some(c.lag_events))),
    );
    page.family(
        "consumer_lag_seconds",
        "Age of the first of them.",
        consumers().map(|(c, of)| (of, Some(c.lag_seconds))),
    );
    page.family("consumer_dead", "Given up on.", consumers().map(|(c, of)| (of, Some(c.dead + c.unknown))));
    let slots = || status.slots.iter().map(|one| (one, vec![outbox, ("slot", one.name.as_str())]));
    page.family(
        "slot_active",
        "Whether a relay is connected to the slot.",
        slots().map(|(s, of)| (of, Some(u8::from(s.active)))),
    );
    page.family(
        "slot_lag_bytes",
        "WAL written after the settled position.",
        slots().map(|(s, of)| (of, s.lag_bytes)),
    );
    page.family(
        "slot_lag_seconds",
        "For how long there has been something that is not settled.",
        slots().map(|(s, of)| (of, s.lag_seconds)),
    );
    page.family(
        "slot_retained_bytes",
        "WAL that the server keeps for the slot.",
        slots().map(|(s, of)| (of, s.retained_bytes)),
    );
    page.family(
        "slot_safe_bytes",
        "WAL that the server will keep beyond that; absent if there is no limit.",
        slots().map(|(s, of)| (of, s.safe_bytes)),
    );
    page.family("slot_waiting", "Parked for another try.", slots().map(|(s, of)| (of, Some(s.waiting))));
    page.family("slot_dead", "Given up on.", slots().map(|(s, of)| (of, Some(s.dead + s.unknown))));
    page.text
}

struct Page<'a> {
    prefix: &'a str,
    text: String,
}

impl Page<'_> {
    /// One metric with its values. None is an unknown value; a metric without values is left out.
    fn family<'v, V: Display>(
        &mut self,
        name: &str,
        help: &str,
        values: impl IntoIterator<Item = (Vec<(&'static str, &'v str)>, Option<V>)>,
    ) {
        let mut is_first = true;
        for (labels, value) in values {
            let Some(value) = value else { continue };
            let prefix = self.prefix;
            // Writing to a string does not fail.
            if std::mem::take(&mut is_first) {
                let _ = writeln!(self.text, "# HELP {prefix}_{name} {help}\n# TYPE {prefix}_{name} gauge");
            }
            let labels: Vec<String> =
                labels.iter().map(|(label, value)| format!("{label}=\"{}\"", escaped(value))).collect();
            let _ = writeln!(self.text, "{prefix}_{name}{{{}}} {value}", labels.join(","));
        }
    }
}

fn escaped(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::admin::{SlotStatus, StreamStatus};

    #[test]
    fn a_status_is_a_page_of_gauges() {
        let stream = StreamStatus { stream: "a \"b\"\n".into(), pending: 3, ..StreamStatus::default() };
        let slot = SlotStatus {
            name: "shop".into(),
            publication: "shop".into(),
            phase: "streaming".into(),
            lsn: None,
            confirmed_lsn: None,
            active: true,
            wal_status: None,
            lag_bytes: Some(4_096),
            lag_seconds: Some(1.5),
            retained_bytes: None,
            safe_bytes: None,
            paused: false,
            waiting: 0,
            dead: 1,
            unknown: 1,
        };
        let status = Status {
            outbox: "airtight.outbox".into(),
            streams: vec![stream],
            slots: vec![slot],
            ..Status::default()
        };
        let page = prometheus(&status, "airtight");
        for line in [
            "# TYPE airtight_outbox_pending gauge",
            r#"airtight_outbox_pending{outbox="airtight.outbox",stream="a \"b\"\n"} 3"#,
            r#"airtight_outbox_oldest_pending_seconds{outbox="airtight.outbox",stream="a \"b\"\n"} 0"#,
            r#"airtight_slot_active{outbox="airtight.outbox",slot="shop"} 1"#,
            r#"airtight_slot_lag_bytes{outbox="airtight.outbox",slot="shop"} 4096"#,
            r#"airtight_slot_lag_seconds{outbox="airtight.outbox",slot="shop"} 1.5"#,
            r#"airtight_slot_dead{outbox="airtight.outbox",slot="shop"} 2"#,
        ] {
            assert!(page.lines().any(|known| known == line), "{line}\n{page}");
        }
        assert!(!page.contains("retained") && !page.contains("consumer"), "{page}");
        assert!(prometheus(&status, "everbit").starts_with("# HELP everbit_outbox_relays"));
    }
}
