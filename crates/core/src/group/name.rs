//! The name of the group that a relay belongs to, and how it is stored.

use std::fmt;

/// How the relays of a group read their outbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum GroupKind {
    /// They claim rows.
    Queue,
    /// They follow the table as one consumer.
    Log,
    /// They follow the WAL through one slot.
    Cdc,
}

impl GroupKind {
    /// The prefix of the stored name of such a group. The name of a queue's group begins with its order, so it has neither
    /// of the other prefixes.
    pub const fn prefix(self) -> &'static str {
        match self {
            Self::Queue => "",
            Self::Log => "log:",
            Self::Cdc => "cdc:",
        }
    }
}

/// The name of a group. Relays with the same name share its partitions.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct GroupName {
    kind: GroupKind,
    stored: String,
}

impl GroupName {
    /// A group of this kind. For a log the name is the consumer's, for CDC the slot's.
    pub fn new(kind: GroupKind, name: &str) -> Self {
        Self { kind, stored: format!("{}{name}", kind.prefix()) }
    }

    /// The group of a log's consumer.
    pub fn log(consumer: &str) -> Self {
        Self::new(GroupKind::Log, consumer)
    }

    /// The group of the relays that read a slot.
    pub fn cdc(slot: &str) -> Self {
        Self::new(GroupKind::Cdc, slot)
    }

    /// What the relays of the group do.
    pub fn kind(&self) -> GroupKind {
        self.kind
    }

    /// The name without its kind.
    pub fn name(&self) -> &str {
        &self.stored[self.kind.prefix().len()..]
    }

    /// The text in the database: kind and name in one.
    pub fn stored(&self) -> &str {
        &self.stored
    }
}

impl fmt::Display for GroupName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.stored)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Databases hold these: another text would be another group, and its offsets would be gone.
    #[test]
    fn the_stored_names_of_groups_never_change() {
        let queue = GroupName::new(GroupKind::Queue, "key/64/block:orders");
        for (group, stored, name) in [
            (GroupName::log("mail"), "log:mail", "mail"),
            (GroupName::cdc("airtight_shop"), "cdc:airtight_shop", "airtight_shop"),
            (queue, "key/64/block:orders", "key/64/block:orders"),
        ] {
            assert_eq!((group.stored(), group.name(), group.to_string().as_str()), (stored, name, stored));
        }
    }
}
