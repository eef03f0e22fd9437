//! Sinks without dependencies.

pub mod file;
pub mod memory;
pub mod stdout;

pub use self::{
    file::FileSink,
    memory::MemorySink,
    stdout::{StdoutSink, reader_gone},
};
