//! What Debezium's outbox event router writes under Kafka Connect, byte for byte.
//!
//! [`DebeziumEncoder`] does the work of the router (`io.debezium.transforms.outbox.EventRouter`) and of the converters after
//! it. It encodes the row that an event came from ([`airtight_core::Event::row`]). `tests/golden/records` has the recorded
//! messages of the real Debezium that it is compared with; `docs/debezium.md` lists them and the deviations.
//!
//! Sinks without topics, partitions and null headers use [`FORMAT`], the part of the format that fits into a body and
//! headers.
//!
//! # Events without a row
//!
//! A queue or a log hands out events without their row. Then the event's own fields replace the columns: id, key,
//! type, payload, time (`table.field.event.timestamp` need only be set) and schema version replace the columns that the
//! options name, the aggregate type replaces `route.by.field`, and extra columns and headers replace all others. Text and
//! JSON are written the same. Two things are approximate, because only the table knows them: the types of other columns (a
//! number is an `int64` or a double, dates and decimals are text), and which columns may be null, which only schemas show.
//! The `StringConverter` writes a payload of bytes unchanged.
//!
//! | module | contents |
//! | --- | --- |
//! | `encoder` | the router and the converters |
//! | `format` | the format `debezium` for sinks that have only a body and headers |
//! | `options` | the router's options and the converters, by their names |
//! | `route` | the router's regex and replacement |
//! | `connector` | a connector's config file, read and written |
//! | `schema`, `value`, `temporal`, `number` | PostgreSQL's text to Connect's values |
//! | `json`, `text` | Connect's values to bytes |
//! | `expand` | JSON payloads to structures |

pub mod connector;
mod encoder;
mod expand;
mod format;
mod json;
mod number;
mod options;
mod route;
mod schema;
mod temporal;
mod text;
mod value;

pub use self::{
    encoder::{Address, Content, DebeziumEncoder, Record},
    format::FORMAT,
    options::{Additional, Converter, Converters, DebeziumOptions, Delegate, InvalidOperation, Placement},
    route::RegexRoute,
};
