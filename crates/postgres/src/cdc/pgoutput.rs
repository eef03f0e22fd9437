//! The messages of PostgreSQL's plugin `pgoutput`, as they come out of the WAL.
//!
//! Protocol version 1. Later versions write the same messages, except inside a transaction that is streamed
//! while it runs or prepared in two phases. airtight does not request those, so they are refused by name. Input from
//! the network is checked once, here: a [`Tuple`] that exists can be read without another check.

use std::fmt;

use airtight_core::{Code, Error};
use bytes::Bytes;

use super::lsn::Lsn;

/// One message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Message {
    /// A transaction begins. `commit_time` is in microseconds since 2000-01-01, UTC, here and in a commit.
    Begin {
        final_lsn: Lsn,
        commit_time: i64,
        xid: u32,
    },
    /// It was committed: `end_lsn` is what to acknowledge.
    Commit {
        lsn: Lsn,
        end_lsn: Lsn,
        commit_time: i64,
    },
    /// It came from another server.
    Origin {
        lsn: Lsn,
        name: String,
    },
    /// A table, before its first row and whenever it has changed.
    Relation(Relation),
    /// A type that is not built in. For a domain, schema and name are those of the type below it.
    Type {
        oid: u32,
        schema: String,
        name: String,
    },
    Insert {
        relation: u32,
        tuple: Tuple,
    },
    Update {
        relation: u32,
    },
    Delete {
        relation: u32,
    },
    Truncate {
        relations: Vec<u32>,
    },
    /// What `pg_logical_emit_message` wrote.
    Logical {
        transactional: bool,
        lsn: Lsn,
        prefix: String,
        content: Bytes,
    },
}

/// A table as the WAL knows it. Generated columns are not in there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Relation {
    pub(crate) id: u32,
    /// Empty for `pg_catalog`.
    pub(crate) schema: String,
    pub(crate) name: String,
    pub(crate) columns: Vec<RelationColumn>,
}

/// A column of a [`Relation`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RelationColumn {
    pub(crate) name: String,
    pub(crate) type_oid: u32,
    pub(crate) type_modifier: i32,
    /// Whether it is part of the replica identity.
    pub(crate) key: bool,
}

/// A row, still as it came.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Tuple {
    raw: Bytes,
    columns: usize,
}

impl Tuple {
    /// How many columns it has.
    pub(crate) fn len(&self) -> usize {
        self.columns
    }

    /// How many bytes it takes.
    pub(crate) fn size(&self) -> usize {
        self.raw.len()
    }

    /// What the columns hold, in order: slices of the message.
    pub(crate) fn values(&self) -> impl Iterator<Item = Value> {
        let mut cursor = Cursor::new(self.raw.clone(), 0);
        // The structure was checked when the tuple was made, so this ends after the last column only.
        std::iter::from_fn(move || cursor.value().ok()).take(self.columns)
    }
}

/// What a column holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Value {
    Null,
    /// Stored out of line and not changed, so not written again; never in an insert.
    Unchanged,
    Text(Bytes),
    Binary(Bytes),
}

/// A message that is none.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Malformed {
    /// The byte that says what message it is meant to be; none in an empty one.
    pub(crate) kind: Option<u8>,
    /// Where in the message it goes wrong.
    pub(crate) at: usize,
    what: String,
}

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind {
            Some(kind) => write!(f, "pgoutput message `{}`", kind.escape_ascii())?,
            None => f.write_str("pgoutput message")?,
        }
        write!(f, ", byte {}: {}", self.at, self.what)
    }
}

impl std::error::Error for Malformed {}

impl From<Malformed> for Error {
    /// No event is to blame: the stream is.
    fn from(malformed: Malformed) -> Self {
        Self::unavailable(Code::BAD_WAL, malformed.to_string())
    }
}

/// Reads one message, whole: nothing may be missing, and nothing left over. What is allocated is in proportion to
/// what came, whatever lengths it claims.
pub(crate) fn parse(message: Bytes) -> Result<Message, Malformed> {
    let Some(&kind) = message.first() else {
        return Err(Malformed { kind: None, at: 0, what: "it is empty".into() });
    };
    let mut cursor = Cursor::new(message, 1);
    let malformed = |(at, what)| Malformed { kind: Some(kind), at, what };
    let message = cursor.message(kind).map_err(malformed)?;
    match cursor.left() {
        0 => Ok(message),
        left => Err(malformed(cursor.wrong(format_args!("{left} bytes are left over")))),
    }
}

/// Where it goes wrong, and how.
type Wrong = (usize, String);

struct Cursor {
    buffer: Bytes,
    at: usize,
}

impl Cursor {
    fn new(buffer: Bytes, at: usize) -> Self {
        Self { buffer, at }
    }

    fn message(&mut self, kind: u8) -> Result<Message, Wrong> {
        Ok(match kind {
            b'B' => Message::Begin {
                final_lsn: self.lsn("final LSN")?,
                commit_time: self.i64("commit time")?,
                xid: self.u32("transaction id")?,
            },
            b'C' => {
                self.u8("flags")?;
                Message::Commit {
                    lsn: self.lsn("commit LSN")?,
                    end_lsn: self.lsn("end LSN")?,
                    commit_time: self.i64("commit time")?,
                }
            }
            b'O' => Message::Origin { lsn: self.lsn("LSN")?, name: self.string("origin")? },
            b'R' => Message::Relation(self.relation()?),
            b'Y' => Message::Type {
                oid: self.u32("type")?,
                schema: self.string("schema")?,
                name: self.string("name")?,
            },
            b'I' => {
                let relation = self.u32("relation")?;
                self.expect(b"N", "new row")?;
                Message::Insert { relation, tuple: self.tuple()? }
            }
            b'U' => {
                let relation = self.u32("relation")?;
                if self.expect(b"KON", "old or new row")? != b'N' {
                    self.tuple()?;
                    self.expect(b"N", "new row")?;
                }
                self.tuple()?;
                Message::Update { relation }
            }
            b'D' => {
                let relation = self.u32("relation")?;
                self.expect(b"KO", "old row")?;
                self.tuple()?;
                Message::Delete { relation }
            }
            b'T' => self.truncate()?,
            b'M' => self.logical()?,
            b'S' | b'E' | b'c' | b'A' => {
                return Err((0, "it streams a transaction that still runs, which was not asked for".into()));
            }
            b'b' | b'P' | b'K' | b'r' | b'p' => {
                return Err((0, "it is about a prepared transaction, which was not asked for".into()));
            }
            _ => return Err((0, "no such kind is known".into())),
        })
    }

    fn relation(&mut self) -> Result<Relation, Wrong> {
        let id = self.u32("relation")?;
        let schema = self.string("schema")?;
        let name = self.string("name")?;
        self.u8("replica identity")?;
        let count = self.count16("columns")?;
        // Not allocated ahead: the count is only a claim.
        let mut columns = Vec::new();
        for _ in 0..count {
            columns.push(RelationColumn {
                key: self.u8("column's flags")? & 1 != 0,
                name: self.string("column")?,
                type_oid: self.u32("column's type")?,
                type_modifier: self.i32("column's type modifier")?,
            });
        }
        Ok(Relation { id, schema, name, columns })
    }

    fn truncate(&mut self) -> Result<Message, Wrong> {
        let count = self.count32("relations")?;
        self.u8("options")?;
        let mut relations = Vec::new();
        for _ in 0..count {
            relations.push(self.u32("relation")?);
        }
        Ok(Message::Truncate { relations })
    }

    fn logical(&mut self) -> Result<Message, Wrong> {
        let transactional = self.u8("flags")? & 1 != 0;
        let lsn = self.lsn("LSN")?;
        let prefix = self.string("prefix")?;
        let length = self.count32("content")?;
        let content = self.take(length, "content")?;
        Ok(Message::Logical { transactional, lsn, prefix, content })
    }

    /// A row, checked to its last column.
    fn tuple(&mut self) -> Result<Tuple, Wrong> {
        let columns = self.count16("columns")?;
        let begin = self.at;
        for _ in 0..columns {
            self.pass_value()?;
        }
        Ok(Tuple { raw: self.buffer.slice(begin..self.at), columns })
    }

    /// Checks what [`Self::value`] would, and makes nothing of it.
    fn pass_value(&mut self) -> Result<(), Wrong> {
        if matches!(self.expect(b"nutb", "column's kind")?, b't' | b'b') {
            let length = self.count32("column's length")?;
            self.pass(length, "column")?;
        }
        Ok(())
    }

    fn value(&mut self) -> Result<Value, Wrong> {
        Ok(match self.expect(b"nutb", "column's kind")? {
            b'n' => Value::Null,
            b'u' => Value::Unchanged,
            kind => {
                let length = self.count32("column's length")?;
                let bytes = self.take(length, "column")?;
                if kind == b't' { Value::Text(bytes) } else { Value::Binary(bytes) }
            }
        })
    }

    fn left(&self) -> usize {
        self.buffer.len() - self.at
    }

    fn wrong(&self, what: impl fmt::Display) -> Wrong {
        (self.at, what.to_string())
    }

    /// The next bytes, without a copy.
    fn take(&mut self, length: usize, what: &str) -> Result<Bytes, Wrong> {
        let begin = self.pass(length, what)?;
        Ok(self.buffer.slice(begin..self.at))
    }

    /// Goes past the next bytes; where they begin.
    fn pass(&mut self, length: usize, what: &str) -> Result<usize, Wrong> {
        if length > self.left() {
            return Err(self.wrong(format_args!("{what}: {length} bytes wanted, {} left", self.left())));
        }
        let begin = self.at;
        self.at += length;
        Ok(begin)
    }

    fn fixed<const N: usize>(&mut self, what: &str) -> Result<[u8; N], Wrong> {
        let Some(bytes) = self.buffer[self.at..].first_chunk::<N>().copied() else {
            return Err(self.wrong(format_args!("{what}: {N} bytes wanted, {} left", self.left())));
        };
        self.at += N;
        Ok(bytes)
    }

    fn u8(&mut self, what: &str) -> Result<u8, Wrong> {
        self.fixed::<1>(what).map(|[byte]| byte)
    }

    fn u32(&mut self, what: &str) -> Result<u32, Wrong> {
        self.fixed(what).map(u32::from_be_bytes)
    }

    fn i32(&mut self, what: &str) -> Result<i32, Wrong> {
        self.fixed(what).map(i32::from_be_bytes)
    }

    fn i64(&mut self, what: &str) -> Result<i64, Wrong> {
        self.fixed(what).map(i64::from_be_bytes)
    }

    fn lsn(&mut self, what: &str) -> Result<Lsn, Wrong> {
        self.fixed(what).map(|bytes| Lsn(u64::from_be_bytes(bytes)))
    }

    fn count16(&mut self, what: &str) -> Result<usize, Wrong> {
        let at = self.at;
        let count = self.fixed(what).map(i16::from_be_bytes)?;
        usize::try_from(count).map_err(|_| (at, format!("{what}: the count {count} is negative")))
    }

    fn count32(&mut self, what: &str) -> Result<usize, Wrong> {
        let at = self.at;
        let count = self.i32(what)?;
        usize::try_from(count).map_err(|_| (at, format!("{what}: the count {count} is negative")))
    }

    /// A byte that must be one of these.
    fn expect(&mut self, any: &[u8], what: &str) -> Result<u8, Wrong> {
        let at = self.at;
        let byte = self.u8(what)?;
        if any.contains(&byte) {
            return Ok(byte);
        }
        Err((at, format!("{what}: found `{}`, want one of `{}`", byte.escape_ascii(), any.escape_ascii())))
    }

    /// Text up to a NUL.
    fn string(&mut self, what: &str) -> Result<String, Wrong> {
        let rest = &self.buffer[self.at..];
        let Some(length) = rest.iter().position(|byte| *byte == 0) else {
            return Err(self.wrong(format_args!("{what}: it has no end")));
        };
        let text = match std::str::from_utf8(&rest[..length]) {
            Ok(text) => text.to_owned(),
            Err(error) => {
                return Err((self.at + error.valid_up_to(), format!("{what}: it is not UTF-8")));
            }
        };
        self.at += length + 1;
        Ok(text)
    }
}

#[cfg(test)]
mod tests;
