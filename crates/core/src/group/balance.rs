//! Which relay owns which partitions: a pure function that every relay of a group computes for itself.

use std::collections::{BTreeMap, BTreeSet};

use uuid::Uuid;

/// What a relay should do next to reach its fair share.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Plan {
    /// Owned, but more than the share: to be drained and given up.
    pub(crate) give: Vec<u16>,
    /// Not owned by a live relay, and within the share.
    pub(crate) take: Vec<u16>,
}

/// The plan for `me` among `members`, given the present owners.
///
/// Shares differ by one at most; the first relays in the order of their ids have the larger ones. A relay gives up only
/// what is more than its share, so a join or a leave moves as few partitions as possible. If there are not enough
/// partitions for all relays, the present owners keep theirs, and relays that join later stand by.
pub(crate) fn plan(me: Uuid, members: &[Uuid], owners: &BTreeMap<u16, Uuid>, partitions: u16) -> Plan {
    let alive: BTreeSet<Uuid> = members.iter().copied().chain([me]).collect();
    let (total, count) = (usize::from(partitions), alive.len());
    let mut ranked: Vec<Uuid> = alive.iter().copied().collect();
    if total < count {
        ranked.sort_by_key(|member| !owners.values().any(|owner| owner == member));
    }
    let rank = ranked.iter().position(|member| *member == me).unwrap_or(0);
    let share = total / count + usize::from(rank < total % count);

    let mine: Vec<u16> = owners.iter().filter(|(_, owner)| **owner == me).map(|(n, _)| *n).collect();
    if mine.len() > share {
        return Plan { give: mine[share..].to_vec(), take: Vec::new() };
    }
    let free = (0..partitions).filter(|n| owners.get(n).is_none_or(|owner| !alive.contains(owner)));
    Plan { give: Vec::new(), take: free.take(share - mine.len()).collect() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_only_partition_stays_when_others_come() {
        let ids: Vec<Uuid> = (0..3u128).map(Uuid::from_u128).collect();
        for owner in &ids {
            let owners = BTreeMap::from([(0, *owner)]);
            for me in &ids {
                assert_eq!(plan(*me, &ids, &owners, 1), Plan::default());
            }
        }
    }

    proptest! {
        /// Relays come, go and act on their plans in any order: nobody ever takes what a live one owns, and
        /// when nothing more happens all partitions are owned and shares differ by one at most.
        #[test]
        fn settles_on_fair_shares(
            steps in proptest::collection::vec((0usize..6, any::<bool>()), 1..30),
            partitions in 1u16..100,
        ) {
            let ids: Vec<Uuid> = (0..6u128).map(Uuid::from_u128).collect();
            let mut alive: BTreeSet<Uuid> = [ids[0]].into();
            let mut owners = BTreeMap::new();
            let act = |me: Uuid, alive: &BTreeSet<Uuid>, owners: &mut BTreeMap<u16, Uuid>| {
                let members: Vec<Uuid> = alive.iter().copied().collect();
                let plan = plan(me, &members, owners, partitions);
                for n in plan.give { owners.remove(&n); }
                for n in plan.take {
                    assert!(owners.get(&n).is_none_or(|owner| !alive.contains(owner)));
                    owners.insert(n, me);
                }
            };
            for (who, join) in steps {
                if join { alive.insert(ids[who]); } else if alive.len() > 1 { alive.remove(&ids[who]); }
                if alive.contains(&ids[who]) { act(ids[who], &alive, &mut owners); }
            }
            for _ in 0..2 { for me in alive.clone() { act(me, &alive, &mut owners); } }
            let mut counts: BTreeMap<Uuid, usize> = alive.iter().map(|id| (*id, 0)).collect();
            for n in 0..partitions { *counts.get_mut(&owners[&n]).unwrap() += 1; }
            let (min, max) = (counts.values().min().unwrap(), counts.values().max().unwrap());
            prop_assert!(max - min <= 1, "{:?}", counts);
        }
    }
}
