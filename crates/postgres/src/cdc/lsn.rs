//! A position in the WAL.

use std::{fmt, str::FromStr};

use airtight_core::{Code, Error};

/// A log sequence number, written like PostgreSQL writes it: `16/B374D848`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Lsn(pub u64);

impl Lsn {
    /// How many bytes of WAL are between `from` and this position; 0 if `from` is ahead.
    pub fn since(self, from: Self) -> u64 {
        self.0.saturating_sub(from.0)
    }
}

impl fmt::Display for Lsn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:X}/{:X}", self.0 >> 32, self.0 & 0xFFFF_FFFF)
    }
}

impl FromStr for Lsn {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let parse = || {
            let (high, low) = text.split_once('/')?;
            let part = |digits: &str| u32::from_str_radix(digits, 16).ok();
            Some(Self(u64::from(part(high)?) << 32 | u64::from(part(low)?)))
        };
        parse().ok_or_else(|| {
            Error::permanent(
                Code::BAD_LSN,
                format!("`{text}` is not a position in the WAL; a position looks like 16/B374D848"),
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_it_writes() {
        for (text, value) in [("0/0", 0), ("16/B374D848", 0x16_B374_D848), ("FFFFFFFF/FFFFFFFF", u64::MAX)] {
            assert_eq!(text.parse::<Lsn>().unwrap(), Lsn(value));
            assert_eq!(Lsn(value).to_string(), text);
        }
        for text in ["", "16", "16/", "/1", "1/2/3", "x/1", "100000000/0", "-1/0"] {
            assert!(text.parse::<Lsn>().is_err(), "{text}");
        }
        assert_eq!(Lsn(5).since(Lsn(3)), 2);
        assert_eq!(Lsn(3).since(Lsn(5)), 0);
    }
}
