//! airtight on PostgreSQL: the outbox, publishing into it, and reading it as a queue or as a log.
//!
//! | module | what lives there |
//! | --- | --- |
//! | `outbox` | [`PgOutbox`]: a database, a table, and what can be done with them |
//! | `schema` | versioned migrations, and the repair of what was dropped |
//! | `grants` | the least privileges of each role |
//! | `publish` | one event or many, in the caller's transaction: sqlx, tokio-postgres |
//! | `columns` | from a `TableSpec` to SQL expressions |
//! | `queue` | claims, settles and leases: the statements behind [`airtight_core::queue::Queue`] |
//! | `log` | following the outbox as a log: holes, offsets, parked events, retention, replay |
//! | `cdc` | following the outbox through the WAL |
//! | `members` | which relays are alive, and which relay owns which partition |
//! | `inbox`, `handlers` | the consumer's side: repeated events, handlers in a transaction |
//! | `admin` | counts, lists, retries, retention |
//! | `listen` | wakes a relay up on NOTIFY |
//! | `session` | a connection with a deadline for every statement |
//! | `error` | what a PostgreSQL error means |

mod admin;
mod cdc;
mod columns;
mod decode;
mod error;
mod fits;
mod grants;
mod groups;
mod handlers;
mod inbox;
mod listen;
mod log;
mod members;
mod outbox;
mod publish;
#[cfg(feature = "tokio-postgres")]
mod publish_tokio;
mod queue;
mod schema;
mod session;
mod slots;

pub use self::{
    cdc::{CdcOptions, Lsn, PgCdc, Snapshot},
    grants::Grantee,
    handlers::{Handled, HandlerError, PgHandlers},
    inbox::Inbox,
    log::PgLog,
    outbox::{PgOptions, PgOutbox},
    queue::PgQueue,
};
