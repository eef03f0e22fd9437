//! What no single value can show.

use super::Pipeline;

/// Refuses two pipelines that read the same stream: each event would go to one of them only, and by chance.
pub(crate) fn check_overlap(one: &Pipeline, other: &Pipeline) -> Result<(), String> {
    let (a, b) = (&one.queue.streams, &other.queue.streams);
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
