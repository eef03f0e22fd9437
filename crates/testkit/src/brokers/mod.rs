//! Brokers for one test each: real servers on loopback, which the test can stop, kill and start again.
//!
//! One file per broker says how it is started; [`process`] has what they share.

pub mod connect;
pub mod kafka;
pub mod nats;
pub mod process;
pub mod rabbitmq;
pub mod redis;
