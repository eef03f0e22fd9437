//! The names of groups in SQL: the kind of a stored name, and the name without its kind. [`airtight_core::group::GroupName`]
//! defines what is stored.

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
