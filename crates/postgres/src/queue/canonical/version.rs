//! The version of a row: its `xmin`, the transaction that wrote it. A row that anybody has changed has another version.

use sqlx::{
    Decode, Encode, Postgres, Type,
    encode::IsNull,
    error::BoxDynError,
    postgres::{PgArgumentBuffer, PgHasArrayType, PgTypeInfo, PgValueFormat, PgValueRef, types::Oid},
};

/// An `xid`, which the driver does not know.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Version(u32);

/// The numbers of `xid` and `xid[]` in every server.
const XID: Oid = Oid(28);
const XIDS: Oid = Oid(1011);

impl Type<Postgres> for Version {
    fn type_info() -> PgTypeInfo {
        PgTypeInfo::with_oid(XID)
    }
}

impl PgHasArrayType for Version {
    fn array_type_info() -> PgTypeInfo {
        PgTypeInfo::with_oid(XIDS)
    }
}

impl Encode<'_, Postgres> for Version {
    fn encode_by_ref(&self, buffer: &mut PgArgumentBuffer) -> Result<IsNull, BoxDynError> {
        buffer.extend(&self.0.to_be_bytes());
        Ok(IsNull::No)
    }
}

impl<'r> Decode<'r, Postgres> for Version {
    fn decode(value: PgValueRef<'r>) -> Result<Self, BoxDynError> {
        Ok(Self(match value.format() {
            PgValueFormat::Binary => u32::from_be_bytes(value.as_bytes()?.try_into()?),
            PgValueFormat::Text => value.as_str()?.parse()?,
        }))
    }
}

impl Version {
    /// The version that a transaction of this number writes.
    pub(super) fn of(number: i64) -> Self {
        // Numbers go round; the server's are the low half.
        Self(u32::try_from(number & i64::from(u32::MAX)).unwrap_or(0))
    }

    /// Whether it was written by one of the next million transactions from `first` on. Numbers go round, so that it cannot
    /// be told from all later ones whether a number is larger.
    pub(super) fn is_after(self, first: Self) -> bool {
        self.0.wrapping_sub(first.0) < 1_000_000
    }
}

#[cfg(test)]
impl Version {
    pub(super) fn test(number: u32) -> Self {
        Self(number)
    }
}
