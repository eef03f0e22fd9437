//! Sinks that need no other crate: memory, stdout, file.

pub mod file;
pub mod memory;
pub mod stdout;

pub use self::{
    file::FileSink,
    memory::MemorySink,
    stdout::{StdoutSink, reader_gone},
};
