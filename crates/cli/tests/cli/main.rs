//! The real binary, run as a person or a script would run it, mostly on SQLite files.
//!
//! | file | what it shows |
//! | --- | --- |
//! | `usage` | help, completions, exit codes, a reader that goes away |
//! | `config` | complaints about config files and addresses, `${ENV}` |
//! | `brokers` | each broker from the command line alone, and `check --to` |
//! | `foreign` | a table of the application's own, mapped by `[table]` |
//! | `grants` | the least rights of each role, and what it can do with them |
//! | `tables` | the same in both stores, with what goes wrong there |
//! | `publish` | one event, NDJSON, bad lines |
//! | `relay` | `run`: drain, follow, signals, sinks |
//! | `process` | how a process of several pipelines, a signal or a reader that goes away ends |
//! | `operate` | status, lists, dead letters, tail, prune |
//! | `demo` | the demo and its audit |
//! | `log` | a log and its consumers: follow, replay, dead letters, retention |
//! | `cdc` | the WAL as the source: readers, dead letters, a lost slot, what `check` says |
//! | `readme` | the commands of README and docs/getting-started.md, top to bottom |
//! | `postgres` | what only a server can show: credentials, a server that is away |
//! | `waiting` | what a relay waits for on a server, in plain words |

mod brokers;
mod cdc;
mod config;
mod demo;
mod foreign;
mod grants;
mod log;
mod operate;
mod postgres;
mod process;
mod publish;
#[cfg(unix)]
mod readme;
mod relay;
mod support;
mod tables;
mod usage;
#[cfg(unix)]
mod waiting;
