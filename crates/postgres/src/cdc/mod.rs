//! CDC: the WAL as the source.

mod lsn;
mod wire;

pub use self::lsn::Lsn;
