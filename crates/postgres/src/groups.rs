//! The names of groups in SQL: which kind a stored name is of, and what it is without that. What is stored is
//! [`airtight_core::group::GroupName`]'s to say.

use airtight_core::{group::GroupKind, table::literal};

/// Whether a column with the name of a group is of this kind. Not for queues, whose names have no prefix.
pub(crate) fn is_kind(column: &str, kind: GroupKind) -> String {
    format!("starts_with({column}, {})", literal(kind.prefix()))
}

/// The name of a group without its kind.
pub(crate) fn name_of(column: &str, kind: GroupKind) -> String {
    format!("substr({column}, {})", kind.prefix().len() + 1)
}

/// The stored name of the group with this kind and name.
pub(crate) fn stored(kind: GroupKind, name: &str) -> String {
    format!("{} || {name}", literal(kind.prefix()))
}
