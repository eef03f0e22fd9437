//! The summary of a drain, for people and as JSON.

use std::time::Duration;

use airtight::{Error, relay::Summary, relays::Ended};
use serde::Serialize;

use crate::{
    errors::{self, Outcome},
    output,
};

/// The summary of a drain.
#[derive(Serialize)]
pub(super) struct Report {
    #[serde(flatten)]
    pub(super) total: Counts,
    seconds: f64,
    events_per_second: f64,
    pipelines: Vec<PipelineReport>,
}

#[derive(Serialize)]
struct PipelineReport {
    name: String,
    #[serde(flatten)]
    counts: Counts,
    /// Why the pipeline ended before its backlog was empty.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<ErrorReport>,
}

/// An error, as JSON.
#[derive(Serialize)]
struct ErrorReport {
    code: String,
    class: &'static str,
    scope: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    destination: Option<String>,
    message: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    remedy: Option<String>,
}

impl From<&Error> for ErrorReport {
    fn from(error: &Error) -> Self {
        Self {
            code: error.code().to_owned(),
            class: error.class().as_str(),
            scope: error.scope().as_str(),
            destination: error.destination().map(str::to_owned),
            message: error.message().to_owned(),
            remedy: error.remedy().map(str::to_owned),
        }
    }
}

#[derive(Clone, Copy, Default, Serialize)]
pub(super) struct Counts {
    pub(super) delivered: u64,
    duplicates: u64,
    retried: u64,
    pub(super) dead: u64,
    unknown: u64,
    released: u64,
    fenced: u64,
    circuit_opened: u64,
}

impl Counts {
    fn add(&mut self, summary: &Summary) {
        self.delivered += summary.delivered;
        self.duplicates += summary.duplicates;
        self.retried += summary.retried;
        self.dead += summary.dead;
        self.unknown += summary.unknown;
        self.released += summary.released;
        self.fenced += summary.fenced;
        self.circuit_opened += summary.circuit_opened;
    }
}

impl Report {
    pub(super) fn new(mut all: Vec<Ended>, elapsed: Duration) -> Self {
        all.sort_by(|one, other| one.name.cmp(&other.name));
        let mut total = Counts::default();
        let mut pipelines = Vec::new();
        for Ended { name, summary, error } in all {
            total.add(&summary);
            let mut counts = Counts::default();
            counts.add(&summary);
            let error = error.as_ref().map(ErrorReport::from);
            pipelines.push(PipelineReport { name, counts, error });
        }
        let events_per_second = output::rate(total.delivered, elapsed);
        Self { total, seconds: elapsed.as_secs_f64(), events_per_second, pipelines }
    }

    /// On standard output, unless events go there.
    pub(super) fn print(&self, json: bool, stdout_taken: bool) -> Outcome {
        let text = if json { serde_json::to_string(self)? } else { self.sentence() };
        if stdout_taken {
            errors::complain(text);
            return Ok(());
        }
        output::line(text)
    }

    fn sentence(&self) -> String {
        let mut text = format!(
            "delivered {} in {:.1} s, {:.0} a second",
            output::counted(self.total.delivered, "event"),
            self.seconds,
            self.events_per_second
        );
        let rest = [
            (self.total.duplicates, "already at the sink"),
            (self.total.retried, "retried"),
            (self.total.dead, "dead"),
            (self.total.unknown, "with an unknown outcome"),
            (self.total.fenced, "taken over by another relay"),
        ];
        for (number, what) in rest.into_iter().filter(|(number, _)| *number > 0) {
            text.push_str(&format!("; {} {what}", output::count(number)));
        }
        if self.total.dead + self.total.unknown > 0 {
            text.push_str("; see `airtight dead list`");
        }
        text
    }
}
