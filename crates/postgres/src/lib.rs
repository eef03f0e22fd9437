//! airtight on PostgreSQL: the outbox, publishing into it, and reading it as a queue.
//!
//! | module | what lives there |
//! | --- | --- |
//! | `outbox` | [`PgOutbox`]: a database, a table, and what can be done with them |
//! | `schema` | versioned migrations |
//! | `publish` | one event or many, in the caller's transaction: sqlx, tokio-postgres |
//! | `columns` | from a `TableSpec` to SQL expressions |
//! | `queue` | claims, settles and leases: the statements behind [`airtight_core::queue::Queue`] |
//! | `admin` | counts, lists, retries, retention |
//! | `listen` | being woken up by NOTIFY |
//! | `error` | what a PostgreSQL error means |

mod admin;
mod columns;
mod decode;
mod error;
mod listen;
mod outbox;
mod publish;
#[cfg(feature = "tokio-postgres")]
mod publish_tokio;
mod queue;
mod schema;

pub use self::{
    outbox::{PgOptions, PgOutbox},
    queue::PgQueue,
};
