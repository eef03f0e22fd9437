//! Durations and sizes as people write them.

use std::time::Duration;

use airtight::settings::parse_duration;

const SIZES: [(&str, u64); 7] = [
    ("B", 1),
    ("KB", 1_000),
    ("MB", 1_000_000),
    ("GB", 1_000_000_000),
    ("KiB", 1 << 10),
    ("MiB", 1 << 20),
    ("GiB", 1 << 30),
];

/// `500ms`, `30s`, `5m`, `2h`, `7d`, `1w`.
pub(crate) fn duration(text: &str) -> Result<Duration, String> {
    parse_duration(text).ok_or_else(|| {
        format!("`{text}` is not a duration; write it like `500ms`, `30s`, `5m`, `2h` or `7d`")
    })
}

/// Formats a duration in the largest unit that fits.
pub(crate) fn shown(duration: Duration) -> String {
    let seconds = duration.as_secs();
    match (duration.subsec_millis(), seconds) {
        (0, 0) => "0s".into(),
        (0, _) => {
            let units = [("d", 86_400), ("h", 3_600), ("m", 60), ("s", 1)];
            let fits = |(_, of): &&(&str, u64)| seconds.is_multiple_of(*of);
            units.iter().find(fits).map_or_else(String::new, |(unit, of)| format!("{}{unit}", seconds / of))
        }
        _ => format!("{}ms", duration.as_millis()),
    }
}

/// `1000`, `64KiB`, `32MiB`, `1GB`.
pub(crate) fn size(text: &str) -> Result<usize, String> {
    let (number, unit) = split(text);
    let factor = if unit.is_empty() { Some(1) } else { find_size(unit) };
    number
        .parse::<u64>()
        .ok()
        .zip(factor)
        .and_then(|(number, factor)| usize::try_from(number.checked_mul(factor)?).ok())
        .ok_or_else(|| format!("`{text}` is not a size; write it like `64KiB`, `32MiB` or `1GiB`"))
}

fn find_size(unit: &str) -> Option<u64> {
    SIZES.iter().find(|(name, _)| name.eq_ignore_ascii_case(unit)).map(|(_, factor)| *factor)
}

fn split(text: &str) -> (&str, &str) {
    let text = text.trim();
    let at = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    (&text[..at], text[at..].trim())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations() {
        assert_eq!(duration("500ms"), Ok(Duration::from_millis(500)));
        assert_eq!(duration("1.5 s"), Ok(Duration::from_millis(1_500)));
        assert_eq!(duration("7d"), Ok(Duration::from_secs(604_800)));
        for bad in ["", "30", "s", "-1s", "1y", "1e9s", "1.2.3s", "99999999999999999999d"] {
            assert!(duration(bad).unwrap_err().contains("is not a duration"), "{bad}");
        }
    }

    #[test]
    fn sizes() {
        assert_eq!(size("32MiB"), Ok(32 << 20));
        assert_eq!(size("64kb"), Ok(64_000));
        assert_eq!(size("10"), Ok(10));
        for bad in ["", "MiB", "1.5MiB", "1TB", "99999999999GiB"] {
            assert!(size(bad).is_err(), "{bad}");
        }
    }
}
