//! Hash tables for what is looked up with every event: several times as fast as the standard library's, seeded anew for
//! each table, and not made to withstand somebody who sees the hashes. Nobody does.

use std::collections::{HashMap, HashSet};

pub(crate) type Seed = foldhash::fast::RandomState;
pub(crate) type Map<K, V> = HashMap<K, V, Seed>;
pub(crate) type Set<K> = HashSet<K, Seed>;
