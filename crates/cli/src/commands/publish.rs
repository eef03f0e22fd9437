//! `airtight publish`: one event from arguments, or many from standard input.

use std::{
    io::{self, BufReader, IsTerminal, Read},
    path::Path,
    time::Instant,
};

use airtight::{NewEvent, Op, Payload, admin::Admin};
use serde_json::json;
use tokio::sync::mpsc;

use super::{
    counter,
    ndjson::{self, Chunk},
    open,
};
use crate::{
    args::PublishArgs,
    errors::{Failure, Outcome},
    output::{self, counted, rate},
};

pub(crate) async fn run(args: &PublishArgs) -> Outcome {
    if args.stream.is_some() {
        let event = from_args(args)?;
        return publish_one(args, &event).await;
    }
    if !args.stdin && io::stdin().is_terminal() {
        return Err(Failure::usage(
            "nothing to publish; give --stream, --type, --aggregate-type and --key, or NDJSON on standard input",
        ));
    }
    publish_many(args).await
}

async fn publish_one(args: &PublishArgs, event: &NewEvent) -> Outcome {
    let store = open(&args.database).await?;
    let published = store.admin().publish(std::slice::from_ref(event)).await?;
    let Some(published) = published.first() else {
        return Err(Failure::failed("the store returned no result for the published event"));
    };
    if args.output.json {
        return output::json(published);
    }
    let note = if published.is_new { "" } else { " already exists; nothing was stored" };
    output::line(format!("{} seq {}{note}", published.id, published.seq))
}

fn from_args(args: &PublishArgs) -> Outcome<NewEvent> {
    let text = |value: &Option<String>| value.clone().unwrap_or_default();
    let mut event = NewEvent::new(
        text(&args.stream),
        text(&args.event_type),
        text(&args.aggregate_type),
        text(&args.key),
    );
    event.id = args.id;
    event.payload = payload(args)?;
    for header in &args.headers {
        let (name, value) = header
            .split_once('=')
            .ok_or_else(|| Failure::usage(format!("--header: expected NAME=VALUE, found `{header}`")))?;
        event.headers.insert(name.to_owned(), value.to_owned());
    }
    if let Some(op) = &args.op {
        event.op = Op::parse(op)?;
    }
    event.validate().map_err(|error| Failure::usage(error.to_string()))?;
    Ok(event)
}

fn payload(args: &PublishArgs) -> Outcome<Payload> {
    let bytes = match (&args.payload, &args.payload_file) {
        (Some(text), _) if text != "-" => text.clone().into_bytes(),
        (Some(_), _) => read_all(io::stdin().lock(), "standard input")?,
        (None, Some(path)) if path == Path::new("-") => read_all(io::stdin().lock(), "standard input")?,
        (None, Some(path)) => {
            let name = path.display().to_string();
            let file = std::fs::File::open(path)
                .map_err(|error| Failure::failed(format!("cannot read {name}: {error}")))?;
            read_all(file, &name)?
        }
        (None, None) => return Ok(Payload::None),
    };
    Ok(if args.bytes { Payload::Bytes(bytes.into()) } else { Payload::Json(bytes.into()) })
}

fn read_all(mut input: impl Read, name: &str) -> Outcome<Vec<u8>> {
    let mut bytes = Vec::new();
    input.read_to_end(&mut bytes).map_err(|error| Failure::failed(format!("cannot read {name}: {error}")))?;
    Ok(bytes)
}

async fn publish_many(args: &PublishArgs) -> Outcome {
    let store = open(&args.database).await?;
    let start = Instant::now();
    // Reading and parsing overlap with the database; two batches ahead is enough.
    let (sender, receiver) = mpsc::channel(2);
    std::thread::spawn(move || {
        ndjson::read(BufReader::with_capacity(1 << 16, io::stdin().lock()), |chunk| {
            sender.blocking_send(chunk).is_ok()
        });
    });
    let bar = counter("events published");
    let done = publish_chunks(store.admin(), receiver, |events| bar.set_position(events)).await;
    bar.finish_and_clear();
    let Done { new, duplicates } = done?;
    let (seconds, speed) = (start.elapsed().as_secs_f64(), rate(new + duplicates, start.elapsed()));
    if args.output.json {
        return output::json(&json!({
            "published": new, "duplicates": duplicates, "seconds": seconds, "events_per_second": speed,
        }));
    }
    let repeated = match duplicates {
        0 => String::new(),
        _ => format!(" ({} already existed)", counted(duplicates, "event")),
    };
    output::line(format!(
        "published {}{repeated} in {seconds:.1} s, {speed:.0} a second",
        counted(new, "event")
    ))
}

struct Done {
    new: u64,
    duplicates: u64,
}

async fn publish_chunks(
    admin: &dyn Admin,
    mut chunks: mpsc::Receiver<Chunk>,
    progress: impl Fn(u64),
) -> Outcome<Done> {
    let mut done = Done { new: 0, duplicates: 0 };
    while let Some(chunk) = chunks.recv().await {
        let committed = counted(done.new + done.duplicates, "event");
        match chunk {
            Chunk::Events { events, first, last } => {
                let published = admin.publish(&events).await.map_err(|error| {
                    Failure::from(error).context(format!(
                        "lines {first} to {last} were not published (committed before them: {committed})"
                    ))
                })?;
                let new = published.iter().filter(|published| published.is_new).count() as u64;
                done.new += new;
                done.duplicates += published.len() as u64 - new;
                progress(done.new + done.duplicates);
            }
            Chunk::Bad { line, message } => {
                return Err(Failure::failed(format!(
                    "line {line}: {message} (committed before it: {committed}; after it: none)"
                )));
            }
        }
    }
    Ok(done)
}
