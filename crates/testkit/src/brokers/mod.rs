//! Brokers of a test's own: real servers on loopback, to be stopped, killed and started again at will.
//!
//! One file per broker says how that one is started; [`process`] is what they share.

pub mod connect;
pub mod kafka;
pub mod nats;
pub mod process;
pub mod rabbitmq;
pub mod redis;
