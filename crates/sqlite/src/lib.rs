//! airtight in one SQLite file: the embedded default.
//!
//! An application publishes into the transaction that writes its own rows; a relay, in the same process or in
//! any other on the same machine, claims the events and delivers them. Nothing but the file is shared.
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
//! Begin transactions that write with `BEGIN IMMEDIATE`: SQLite cannot upgrade a transaction that has read
//! once another one has written, and fails it instead of waiting.
//!
//! | module | what lives there |
//! | --- | --- |
//! | `outbox` | opening the file; the handle everything starts from |
//! | `file` | whether the file is still the one that was opened |
//! | `publish` | events into the caller's transaction |
//! | `schema` | airtight's tables and their migrations |
//! | `sql` | every column and status word, taken from the `TableSpec` |
//! | `members`, `watch` | who is there and who owns what; when to look again |
//! | `queue` | the verbs of `QueueStore` |
//! | `candidate`, `claim`, `hold`, `settle` | which rows may go out, which must wait, what became of them |
//! | `log` | the verbs of `LogStore`: offsets, parked events, replay, retention |
//! | `inbox`, `handlers` | what makes a repeated event a no-op; handlers that commit with the offset |
//! | `decode` | from a row to an event |
//! | `admin`, `inspect` | what an operator does, and asks |

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
