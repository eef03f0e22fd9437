//! The partition of a key: the only formula in Rust.
//!
//! A key has a hash that never changes. Its partition is that hash modulo the number of partitions, so that the number
//! can change. In Rust, the hash is [`hash_of`]. A database that computes the hash has its own expression for it, in one
//! place of its crate, and takes the same modulo.

/// Hashes are below this.
const HASHES: u64 = 1 << 15;

/// The hash of a key: FNV-1a, which is the same in every version of this program. SQLite stores it.
pub fn hash_of(key: &[u8]) -> i64 {
    let hash = key.iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    (hash % HASHES).cast_signed()
}

/// The partition of a key with this hash, out of this many.
pub fn partition_of(hash: i64, partitions: u16) -> u16 {
    let partition = hash.rem_euclid(i64::from(partitions.max(1)));
    u16::try_from(partition).expect("less than a u16")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Databases hold these.
    #[test]
    fn the_hash_of_a_key_never_changes() {
        assert_eq!(hash_of(b""), 0x2325);
        assert_eq!(hash_of(b"order-42"), 25_300);
        assert!(
            (0..1000).map(|n| hash_of(format!("{n}").as_bytes())).all(|hash| (0..1 << 15).contains(&hash))
        );
    }

    #[test]
    fn every_hash_has_a_partition() {
        assert_eq!([0, 5, 63, 64, -1].map(|hash| partition_of(hash, 64)), [0, 5, 63, 0, 63]);
        assert_eq!([7, 8].map(|hash| partition_of(hash, 3)), [1, 2]);
        assert_eq!([0, 1].map(|count| partition_of(25_300, count)), [0, 0]);
    }
}
