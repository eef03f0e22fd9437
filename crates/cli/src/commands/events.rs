//! `airtight events`: lists, shows, retries and discards single events of the outbox.

use airtight::{
    Event, Payload,
    admin::{Acted, Detail, EventRow},
    envelope,
    state::State,
};
use serde::Serialize;
use serde_json::value::RawValue;

use super::{filter, open};
use crate::{
    args::{BlockedArgs, IdsArgs, ListArgs, PageArgs, ShowArgs},
    errors::{Failure, Outcome, complain},
    output::{self, Table, line, printable, short, time},
    wiring::Store,
};

pub(crate) async fn list(args: &ListArgs) -> Outcome {
    let mut wanted = filter(&args.filter);
    // The parser has checked the words.
    wanted.states = args.states.iter().filter_map(|word| State::parse(word)).collect();
    page(&mut wanted, &args.page);
    let rows = open(&args.database).await?.admin().list(&wanted).await?;
    print_rows(&rows, args.output.json, "no events")
}

pub(super) fn page(filter: &mut airtight::admin::Filter, args: &PageArgs) {
    filter.after_seq = args.after;
    filter.newest_first = args.newest;
    filter.limit = args.limit as usize;
}

pub(super) fn print_rows(rows: &[EventRow], json: bool, none: &str) -> Outcome {
    if json {
        return output::json(rows);
    }
    if rows.is_empty() {
        return line(none);
    }
    let mut table =
        Table::new(&["seq", "id", "stream", "type", "key", "state", "attempts", "created", "error"]);
    for row in rows {
        table.row(vec![
            row.seq.to_string(),
            row.id.clone(),
            row.stream.clone(),
            row.event_type.clone(),
            row.aggregate_id.clone(),
            if row.held { format!("{} (held)", row.state) } else { row.state.clone() },
            row.attempts.to_string(),
            time(row.created_at),
            short(&error_text(row), 60),
        ]);
    }
    table.print()
}

/// The last error, for a list.
pub(super) fn error_text(row: &EventRow) -> String {
    match (&row.error_code, &row.error_message) {
        (Some(code), Some(message)) => format!("{code}: {message}"),
        (code, message) => code.clone().or_else(|| message.clone()).unwrap_or_else(|| "-".into()),
    }
}

pub(crate) async fn show(args: &ShowArgs) -> Outcome {
    show_one(&open(&args.database).await?, &args.id, args.output.json).await
}

pub(super) async fn show_one(store: &Store, id: &str, json: bool) -> Outcome {
    match store.admin().show(id).await? {
        Some(detail) => show_detail(detail, None, json),
        None => Err(Failure::failed(format!("there is no event `{id}`; give an id or a seq"))),
    }
}

/// Prints an event in full, with the consumer that has parked it.
pub(super) fn show_detail(detail: Detail, consumer: Option<&str>, json: bool) -> Outcome {
    let Detail { row, event } = detail;
    if json {
        return show_json(&row, consumer, event.as_ref());
    }
    if let Some(consumer) = consumer {
        line(format!("{:<12}{}", "consumer", printable(consumer)))?;
    }
    let fields: [(&str, String); 12] = [
        ("id", row.id),
        ("seq", row.seq.to_string()),
        ("stream", row.stream),
        ("type", row.event_type),
        ("aggregate", format!("{} {}", row.aggregate_type, row.aggregate_id)),
        ("state", if row.held { format!("{} (held behind an earlier event)", row.state) } else { row.state }),
        ("attempts", row.attempts.to_string()),
        ("lost leases", row.lost_leases.to_string()),
        ("created", time(row.created_at)),
        ("next retry", time(row.next_retry_at)),
        ("error code", row.error_code.unwrap_or_else(|| "-".into())),
        ("error", row.error_message.unwrap_or_else(|| "-".into())),
    ];
    for (name, value) in fields {
        line(format!("{name:<12}{}", printable(&value)))?;
    }
    match event {
        Ok(event) => show_event(&event),
        Err(message) => line(format!("{:<12}this row is not a valid event: {}", "note", printable(&message))),
    }
}

fn show_event(event: &Event) -> Outcome {
    line(format!("{:<12}{}", "op", event.op.as_str()))?;
    line(format!("{:<12}{}", "occurred", time(Some(event.occurred_at))))?;
    for (name, value) in &event.headers {
        line(format!("{:<12}{}", "header", printable(&format!("{name}: {value}"))))?;
    }
    match &event.payload {
        Payload::None => line(format!("{:<12}none", "payload")),
        Payload::Bytes(bytes) => line(format!("{:<12}{} bytes", "payload", bytes.len())),
        Payload::Json(text) => {
            let value: Result<serde_json::Value, _> = serde_json::from_slice(text);
            let pretty = value.and_then(|value| serde_json::to_string_pretty(&value));
            line("payload")?;
            line(pretty.unwrap_or_else(|_| printable(&String::from_utf8_lossy(text))))
        }
    }
}

fn show_json(row: &EventRow, consumer: Option<&str>, event: Result<&Event, &String>) -> Outcome {
    #[derive(Serialize)]
    struct Shown<'a> {
        #[serde(skip_serializing_if = "Option::is_none")]
        consumer: Option<&'a str>,
        #[serde(flatten)]
        row: &'a EventRow,
        event: Option<Box<RawValue>>,
        problem: Option<&'a str>,
    }
    let (event, problem) = match event {
        // Byte for byte as the sink would receive it.
        Ok(event) => {
            let text = String::from_utf8_lossy(&envelope::to_vec(event)).into_owned();
            (RawValue::from_string(text).ok(), None)
        }
        Err(message) => (None, Some(message.as_str())),
    };
    output::json(&Shown { consumer, row, event, problem })
}

pub(crate) async fn retry(args: &IdsArgs) -> Outcome {
    act(&open(&args.database).await?, &args.ids, Act::Retry, args.output.json).await
}

pub(crate) async fn discard(args: &IdsArgs) -> Outcome {
    act(&open(&args.database).await?, &args.ids, Act::Discard, args.output.json).await
}

/// The action on single events.
#[derive(Debug, Clone, Copy)]
pub(super) enum Act {
    Retry,
    Discard,
}

/// Acts on each id and prints the result; fails if any event was refused or not found.
pub(super) async fn act(store: &Store, ids: &[String], act: Act, json: bool) -> Outcome {
    let mut acting = Acting::new(act, json);
    for id in ids {
        let acted = match act {
            Act::Retry => store.admin().retry(id).await?,
            Act::Discard => store.admin().discard(id).await?,
        };
        acting.note(id, acted)?;
    }
    acting.finish()
}

/// The result for each event, printed as it happens or, as JSON, at the end.
pub(super) struct Acting<'a> {
    act: Act,
    json: bool,
    results: Vec<ActedOn<'a>>,
}

#[derive(Serialize)]
struct ActedOn<'a> {
    id: &'a str,
    result: &'static str,
    state: Option<&'static str>,
}

impl<'a> Acting<'a> {
    pub(super) fn new(act: Act, json: bool) -> Self {
        Self { act, json, results: Vec::new() }
    }

    pub(super) fn note(&mut self, id: &'a str, acted: Acted) -> Outcome {
        let (result, state) = match acted {
            Acted::Yes => ("ok", None),
            Acted::NotFound => ("not_found", None),
            Acted::Refused(state) => ("refused", Some(state.as_str())),
        };
        self.results.push(ActedOn { id, result, state });
        if self.json {
            return Ok(());
        }
        match (acted, self.act) {
            (Acted::Yes, Act::Retry) => line(format!("{id}: due now"))?,
            (Acted::Yes, Act::Discard) => line(format!("{id}: discarded"))?,
            (Acted::NotFound, _) => complain(format_args!("error: {id}: there is no such event")),
            (Acted::Refused(state), _) => {
                complain(format_args!("error: {id}: refused, the event is {}", state.as_str()));
            }
        }
        Ok(())
    }

    /// Fails if any event was refused or not found.
    pub(super) fn finish(self) -> Outcome {
        if self.json {
            output::json(&self.results)?;
        }
        if self.results.iter().all(|one| one.result == "ok") { Ok(()) } else { Err(Failure::Reported) }
    }
}

pub(crate) async fn blocked(args: &BlockedArgs) -> Outcome {
    let keys = open(&args.database).await?.admin().blocked(args.limit as usize).await?;
    if args.output.json {
        return output::json(&keys);
    }
    if keys.is_empty() {
        return line("no key is blocked");
    }
    let mut table = Table::new(&["key", "waiting", "behind", "which is"]);
    for key in keys {
        table.row(vec![key.aggregate_id, key.held.to_string(), key.behind_id, key.behind_state]);
    }
    table.print()
}
