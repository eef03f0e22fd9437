//! Which topic an event goes to.

use std::{borrow::Cow, fmt};

use airtight_core::{Event, Result, route::Template};
use airtight_debezium::RegexRoute;

/// Which topic an event goes to.
#[derive(Debug, Clone)]
pub enum Route {
    /// By its fields.
    Template(Template),
    /// As Debezium's outbox event router does.
    Regex(Box<RegexRoute>),
}

impl Route {
    /// A [`Template`].
    pub fn template(text: &str) -> Result<Self> {
        Template::parse(text).map(Self::Template)
    }

    /// By the stream alone: what every sink does unless told otherwise.
    pub fn stream() -> Self {
        Self::Template(Template::stream())
    }

    /// The topic of one event.
    pub fn render<'a>(&'a self, event: &'a Event) -> Result<Cow<'a, str>> {
        match self {
            Self::Template(template) => template.render(event),
            Self::Regex(route) => route.render(event),
        }
    }

    /// The topic, if it is the same for all events.
    pub fn constant(&self) -> Option<&str> {
        match self {
            Self::Template(template) => template.constant(),
            Self::Regex(_) => None,
        }
    }
}

impl fmt::Display for Route {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Template(template) => template.fmt(f),
            Self::Regex(route) => route.fmt(f),
        }
    }
}
