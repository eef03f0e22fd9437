//! The promises under violence: the real binary, killed, suspended and restarted while transactions commit and
//! roll back, on both stores. Each test is bounded in count and time.
//!
//! | file | what it shows |
//! | --- | --- |
//! | `bank` | the business side: serialised writers per key, some rolling back, and what they committed |
//! | `brokers` | PostgreSQL to each broker: relays killed, brokers restarted, brokers that stay away |
//! | `cdc` | the WAL as the source: kills and crashes, a change of the way to read, WAL that is not pinned, memory |
//! | `kill` | one relay, killed with SIGKILL at least 50 times |
//! | `relays` | three relays joining, leaving, killed and suspended past their lease, before a flaky webhook |

#![allow(clippy::unwrap_used, reason = "all of it is test code, its helpers included")]

mod bank;
mod brokers;
mod cdc;
mod kill;
mod process;
mod relays;
