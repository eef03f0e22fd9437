//! CDC: the WAL as the source.

#[allow(dead_code, reason = "the source that reads these is on its way")]
mod emitted;
mod lsn;
#[allow(dead_code, reason = "the source that reads these is on its way")]
mod pgoutput;
#[allow(dead_code, reason = "the source that reads these is on its way")]
mod row;
#[allow(dead_code, unused_imports, reason = "the source that reads these is on its way")]
mod values;

pub use self::lsn::Lsn;

#[cfg(test)]
mod drift;
