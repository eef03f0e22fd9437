//! CDC: the WAL as the source.

mod lsn;

pub use self::lsn::Lsn;
