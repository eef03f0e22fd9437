//! The outbox in one SQLite file: the embedded default.
//!
//! An application publishes events in the transaction that writes its own rows. A relay, in the same process or in
//! another process on the same machine, claims the events and delivers them. The processes share only the file.
//!
//! ```no_run
//! # async fn example() -> airtight_core::Result<()> {
//! use airtight_core::{NewEvent, admin::Admin, queue::QueueOptions};
//! use airtight_sqlite::SqliteOutbox;
//!
//! let outbox = SqliteOutbox::open("sqlite:shop.db").await?;
//! outbox.migrate().await?;
//!
//! let mut tx = outbox.pool().begin_with("BEGIN IMMEDIATE").await.expect("a transaction");
//! // ... the application's own statements on `tx` ...
//! let event = NewEvent::new("shop.orders", "OrderPlaced", "Order", "42").json(&"body")?;
//! outbox.publish(&mut tx, &event).await?;
//! tx.commit().await.expect("committed: the event will be delivered");
//!
//! let source = outbox.queue(QueueOptions::default());
//! # Ok(()) }
//! ```
//!
//! Begin transactions that write with `BEGIN IMMEDIATE`. If a transaction has read, and another one has written since,
//! SQLite cannot let the first one write: it fails the transaction instead of waiting.
//!
//! | module | contents |
//! | --- | --- |
//! | `outbox` | opening the file; the outbox handle |
//! | `file` | whether the file is still the one that was opened |
//! | `publish` | publishing events in the caller's transaction |
//! | `schema` | airtight's tables and their migrations |
//! | `sql` | every column and status word, taken from the `TableSpec` |
//! | `members`, `watch` | which relays are members and which partitions they own; waking an idle relay |
//! | `queue` | the methods of `QueueStore` |
//! | `candidate`, `claim`, `hold`, `settle` | which rows may be claimed, which must wait, and storing verdicts |
//! | `log` | the methods of `LogStore`: offsets, parked events, replay, retention |
//! | `inbox`, `handlers` | what makes a repeated event a no-op; handlers that commit with the offset |
//! | `decode` | from a row to an event |
//! | `admin`, `inspect` | changes by operators, and reads for them |

mod admin;
mod candidate;
mod claim;
mod decode;
mod error;
mod file;
mod fits;
mod handlers;
mod hold;
mod inbox;
mod inspect;
mod log;
mod members;
mod outbox;
#[cfg(test)]
mod plans;
mod publish;
mod queue;
mod schema;
mod settle;
mod sql;
mod watch;

pub use self::{
    handlers::SqliteHandlers, inbox::Inbox, log::SqliteLog, outbox::SqliteOutbox, queue::SqliteQueue,
};
