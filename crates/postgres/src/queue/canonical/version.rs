//! The version of a row: its `xmin`, the transaction that wrote it. A row that anybody has changed has another version.

use sqlx::{
    Decode, Encode, Postgres, Type,
    encode::IsNull,
    error::BoxDynError,
    postgres::{PgArgumentBuffer, PgHasArrayType, PgTypeInfo, PgValueRef},
};

/// An `xid`. It travels as text: the driver does not know the type, and would ask the server for it between two messages
/// of one statement, which fails behind a transaction pooler.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Version(u32);

impl Type<Postgres> for Version {
    fn type_info() -> PgTypeInfo {
        <str as Type<Postgres>>::type_info()
    }
}

impl PgHasArrayType for Version {
    fn array_type_info() -> PgTypeInfo {
        <&str as PgHasArrayType>::array_type_info()
    }
}

impl Encode<'_, Postgres> for Version {
    fn encode_by_ref(&self, buffer: &mut PgArgumentBuffer) -> Result<IsNull, BoxDynError> {
        buffer.extend(self.0.to_string().as_bytes());
        Ok(IsNull::No)
    }
}

impl<'r> Decode<'r, Postgres> for Version {
    fn decode(value: PgValueRef<'r>) -> Result<Self, BoxDynError> {
        Ok(Self(value.as_str()?.parse()?))
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
