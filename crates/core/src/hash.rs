//! Hash tables for lookups that happen with every event. They are several times as fast as those of the standard
//! library. Each table has its own random seed. They do not resist an attacker who sees the hashes; nothing shows them.

use std::collections::{HashMap, HashSet};

pub(crate) type Seed = foldhash::fast::RandomState;
pub(crate) type Map<K, V> = HashMap<K, V, Seed>;
pub(crate) type Set<K> = HashSet<K, Seed>;
