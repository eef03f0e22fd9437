//! What Debezium's outbox event router writes under Kafka Connect, byte for byte.
//!
//! [`DebeziumEncoder`] is the router (`io.debezium.transforms.outbox.EventRouter`) and the converters behind it in one.
//! It works on the row that an event came from ([`airtight_core::Event::row`]); the recorded messages of the real Debezium that
//! it is compared with are in `tests/golden/records`, and `docs/debezium.md` lists them and the deviations.
//!
//! A sink without topics, partitions and null headers has less to fill: for those there is [`FORMAT`], the part of the
//! format that fits into a body and headers.
//!
//! # Events without a row
//!
//! A queue or a log hands out events without their row. Then the event's own fields stand for the columns: id, key,
//! type, payload, time (`table.field.event.timestamp` need only be set) and schema version for those that the options
//! name, the aggregate type for `route.by.field`, and extra columns and headers for anything else. Text and JSON come out
//! the same; what is approximate is what only a table knows: the types of other columns (a number is an `int64` or a
//! double, dates and decimals are text), and which columns may be null, which shows in schemas alone. A payload of
//! bytes passes the `StringConverter` as it is.
//!
//! | module | what lives there |
//! | --- | --- |
//! | `encoder` | the router and the converters |
//! | `format` | the format `debezium` for sinks that have no more than a body and headers |
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
