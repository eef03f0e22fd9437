//! Checks across several values of a config.

use super::{Pipeline, Reading};

/// Refuses two pipelines that conflict: those that read the same stream of a queue, because each event would go to only
/// one of them, by chance (through the WAL it would go to both, and one would mark it); and those that share a consumer
/// of a log, or a slot.
pub(crate) fn check_overlap(one: &Pipeline, other: &Pipeline) -> Result<(), String> {
    match (&one.read, &other.read) {
        (Reading::Queue(a), Reading::Queue(b)) => check_streams(one, &a.streams, other, &b.streams),
        (Reading::Log(a), Reading::Log(b)) if a.consumer == b.consumer => Err(format!(
            "pipelines `{}` and `{}` both use consumer `{}`, so each event would reach only one of them; give each \
             its own `consumer`",
            one.name, other.name, a.consumer
        )),
        (Reading::Cdc(a), Reading::Cdc(b))
            if a.log.consumer == b.log.consumer && !a.log.consumer.is_empty() =>
        {
            Err(format!(
                "pipelines `{}` and `{}` both read the slot `{}`, but only one can read it; give each its own `slot`",
                one.name, other.name, a.log.consumer
            ))
        }
        (Reading::Queue(a), Reading::Cdc(b)) => check_streams(one, &a.streams, other, &b.log.read.streams),
        (Reading::Cdc(a), Reading::Queue(b)) => check_streams(one, &a.log.read.streams, other, &b.streams),
        _ => Ok(()),
    }
}

fn check_streams(one: &Pipeline, a: &[String], other: &Pipeline, b: &[String]) -> Result<(), String> {
    let both = match (a.is_empty(), b.is_empty()) {
        (true, true) => "all streams".to_owned(),
        (true, false) => format!("stream `{}`", b[0]),
        (false, true) => format!("stream `{}`", a[0]),
        (false, false) => match a.iter().find(|stream| b.contains(stream)) {
            Some(stream) => format!("stream `{stream}`"),
            None => return Ok(()),
        },
    };
    Err(format!(
        "pipelines `{}` and `{}` both read {both}, so each event would reach only one of them; give each its own `streams`",
        one.name, other.name
    ))
}
