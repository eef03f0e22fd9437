//! Times. The text of a time may have a year that no calendar type of Rust can hold.

use std::fmt::Write;

use ::time::OffsetDateTime;
use airtight_core::{Code, Error, Result};

use super::{bad, integer, oid, quoted, text};

/// 2000-01-01 in seconds since 1970: where PostgreSQL begins to count.
const PG_EPOCH: i64 = 946_684_800;
/// What [`crate::columns::EventColumns::show_time`] allows: 0001-01-01 00:00:00 to 9999-12-31 23:59:59, in seconds.
const FIRST: i128 = -62_135_596_800;
const LAST: i128 = 253_402_300_799;
const NANOS: i128 = 1_000_000_000;

/// The zone of timestamps that carry none: the seconds that lead from them to UTC.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Zone(i64);

impl Zone {
    pub(crate) const UTC: Self = Self(0);

    /// Reads the zone of a spec. An offset has the sign that it has for the queue, in `AT TIME ZONE`: PostgreSQL
    /// counts it as POSIX does, westwards, so that `-09:00` is the zone of Seoul.
    pub(crate) fn parse(zone: &str) -> Result<Self> {
        const UTC: [&str; 8] = ["UTC", "GMT", "Z", "Zulu", "UCT", "Etc/UTC", "Etc/GMT", "Universal"];
        if UTC.iter().any(|name| name.eq_ignore_ascii_case(zone)) {
            return Ok(Self::UTC);
        }
        let mut scan = Scan(zone.as_bytes());
        scan.offset().filter(|_| scan.0.is_empty()).map(Self).ok_or_else(|| {
            Error::permanent(
                Code::BAD_ZONE,
                format!(
                    "cdc reads timestamps without a zone in UTC or at an offset, not in `{zone}`: set `zone` to UTC, or to an \
                     offset as PostgreSQL counts them, westwards (-09:00 is nine hours ahead of UTC)"
                ),
            )
        })
    }
}

/// A time, brought into the years 1 to 9999. A whole number is taken for seconds since 1970; what carries no zone
/// is in `zone`, except a date, which the queue compares in UTC.
pub(crate) fn time(type_oid: u32, value: &[u8], zone: Zone) -> Result<OffsetDateTime> {
    if matches!(type_oid, oid::INT2 | oid::INT4 | oid::INT8) {
        return Ok(clamped(i128::from(integer(type_oid, value)?) * NANOS));
    }
    let text = text(value)?;
    match text {
        "infinity" => return Ok(clamped(i128::MAX)),
        "-infinity" => return Ok(clamped(i128::MIN)),
        _ => {}
    }
    let zone = if type_oid == oid::DATE { Zone::UTC } else { zone };
    let mut scan = Scan(text.as_bytes());
    let nanos = scan.time(zone).filter(|_| scan.0.is_empty());
    nanos.map(clamped).ok_or_else(|| bad(format!("not a time in ISO form: {}", quoted(text))))
}

/// The time that a message gives in microseconds since 2000.
pub(crate) fn from_pg_micros(micros: i64) -> OffsetDateTime {
    clamped(i128::from(PG_EPOCH) * NANOS + i128::from(micros) * 1000)
}

fn clamped(nanos: i128) -> OffsetDateTime {
    let nanos = nanos.clamp(FIRST * NANOS, LAST * NANOS);
    // Cannot fail within these bounds.
    OffsetDateTime::from_unix_timestamp_nanos(nanos).unwrap_or(OffsetDateTime::UNIX_EPOCH)
}

/// Text that is read from its beginning.
struct Scan<'a>(&'a [u8]);

impl Scan<'_> {
    /// Nanoseconds since 1970: `2026-11-16 05:47:43.123456+00`, or just the date, and perhaps ` BC`.
    fn time(&mut self, zone: Zone) -> Option<i128> {
        let year = self.number(4, 6)?;
        let month = self.after(b'-').then(|| self.number(2, 2))??;
        let day = self.after(b'-').then(|| self.number(2, 2))??;
        let (mut seconds, mut nanos, mut shift) = (0, 0, zone.0);
        if self.0.get(1).is_some_and(u8::is_ascii_digit) && (self.after(b' ') || self.after(b'T')) {
            let hour = self.number(2, 2).filter(|hour| *hour < 24)?;
            let minute = self.after(b':').then(|| self.number(2, 2))?.filter(|minute| *minute < 60)?;
            let second = self.after(b':').then(|| self.number(2, 2))?.filter(|second| *second < 60)?;
            seconds = hour * 3600 + minute * 60 + second;
            if self.after(b'.') {
                nanos = self.fraction()?;
            }
            if self.after(b'Z') {
                shift = 0;
            } else if let Some(offset) = self.offset() {
                shift = -offset;
            }
        }
        let year = match self.0.strip_prefix(b" BC") {
            Some(rest) => {
                self.0 = rest;
                1 - year
            }
            None => year,
        };
        if !(1..=12).contains(&month) || !(1..=days_of(year, month)).contains(&day) {
            return None;
        }
        let seconds = days(year, month, day) * 86400 + seconds + shift;
        Some(i128::from(seconds) * NANOS + i128::from(nanos))
    }

    fn after(&mut self, byte: u8) -> bool {
        match self.0.split_first() {
            Some((first, rest)) if *first == byte => {
                self.0 = rest;
                true
            }
            _ => false,
        }
    }

    /// A number of so many digits.
    fn number(&mut self, least: usize, most: usize) -> Option<i64> {
        let length = self.0.iter().take_while(|byte| byte.is_ascii_digit()).count();
        if !(least..=most).contains(&length) {
            return None;
        }
        let (digits, rest) = self.0.split_at(length);
        self.0 = rest;
        Some(digits.iter().fold(0, |number, digit| number * 10 + i64::from(digit - b'0')))
    }

    /// What follows the point, in nanoseconds. PostgreSQL writes up to six digits, others up to nine.
    fn fraction(&mut self) -> Option<i64> {
        let before = self.0.len();
        let number = self.number(1, 9)?;
        let digits = before - self.0.len();
        (digits..9).try_fold(number, |number, _| number.checked_mul(10))
    }

    /// `+09`, `-03:30`, `+00:19:32`, in seconds.
    fn offset(&mut self) -> Option<i64> {
        let sign = match self.0.first()? {
            b'+' => 1,
            b'-' => -1,
            _ => return None,
        };
        self.0 = &self.0[1..];
        let mut seconds = self.number(1, 2).filter(|hours| *hours < 24)? * 3600;
        for unit in [60, 1] {
            if !self.after(b':') {
                break;
            }
            seconds += self.number(2, 2).filter(|number| *number < 60)? * unit;
        }
        Some(sign * seconds)
    }
}

fn days_of(year: i64, month: i64) -> i64 {
    let leap = year.rem_euclid(4) == 0 && (year.rem_euclid(100) != 0 || year.rem_euclid(400) == 0);
    match month {
        2 if leap => 29,
        2 => 28,
        4 | 6 | 9 | 11 => 30,
        _ => 31,
    }
}

/// Days since 1970. Years begin in March here, so that the odd day of a leap year is the last one.
fn days(year: i64, month: i64, day: i64) -> i64 {
    let (year, month) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let leap_days = year.div_euclid(4) - year.div_euclid(100) + year.div_euclid(400);
    // Months of 31 and 30 days in turn, but for July and August: 153 days in every five.
    year * 365 + leap_days + (month * 153 + 2) / 5 + day - 1 - 719_468
}

/// The date of a day since 1970.
fn date(day: i64) -> (i64, i64, i64) {
    let since = day + 719_468;
    let (era, in_era) = (since.div_euclid(146_097), since.rem_euclid(146_097));
    let in_era_year = (in_era - in_era / 1460 + in_era / 36_524 - in_era / 146_096) / 365;
    let in_year = in_era - (in_era_year * 365 + in_era_year / 4 - in_era_year / 100);
    let month = (in_year * 5 + 2) / 153;
    let day = in_year - (month * 153 + 2) / 5 + 1;
    let year = era * 400 + in_era_year + i64::from(month > 9);
    (year, if month > 9 { month - 9 } else { month + 3 }, day)
}

/// The text that the server would write for microseconds since 2000.
pub(super) fn text_of_micros(micros: i64, zone: &str) -> String {
    match micros {
        i64::MAX => return "infinity".into(),
        i64::MIN => return "-infinity".into(),
        _ => {}
    }
    let (seconds, micros) = (micros.div_euclid(1_000_000), micros.rem_euclid(1_000_000));
    let seconds = seconds + PG_EPOCH;
    let (year, month, day) = date(seconds.div_euclid(86400));
    let second = seconds.rem_euclid(86400);
    let (shown, era) = if year > 0 { (year, "") } else { (1 - year, " BC") };
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    let mut text = format!("{shown:04}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02}");
    if micros != 0 {
        let fraction = format!("{micros:06}");
        // Writing to a string cannot fail.
        let _ = write!(text, ".{}", fraction.trim_end_matches('0'));
    }
    text + zone + era
}

#[cfg(test)]
mod tests {
    use ::time::macros::datetime;
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn reads_what_the_server_writes() {
        let first = datetime!(0001-01-01 00:00 UTC);
        let last = datetime!(9999-12-31 23:59:59 UTC);
        for (text, expected) in [
            ("2026-11-16 05:47:43+00", datetime!(2026-11-16 05:47:43 UTC)),
            ("2026-11-16 05:47:43.1+00", datetime!(2026-11-16 05:47:43.1 UTC)),
            ("2026-11-16 05:47:43.123456+00", datetime!(2026-11-16 05:47:43.123456 UTC)),
            ("2026-11-16 05:47:43.123456+05:30", datetime!(2026-11-16 00:17:43.123456 UTC)),
            ("2026-11-16 05:47:43-03", datetime!(2026-11-16 08:47:43 UTC)),
            ("1890-01-01 00:19:32+00:19:32", datetime!(1890-01-01 00:00 UTC)),
            ("2026-11-16T05:47:43.123456789Z", datetime!(2026-11-16 05:47:43.123456789 UTC)),
            ("2000-02-29 00:00:00+00", datetime!(2000-02-29 00:00 UTC)),
            ("1969-12-31 23:59:59.5+00", datetime!(1969-12-31 23:59:59.5 UTC)),
            ("2026-11-16", datetime!(2026-11-16 00:00 UTC)),
            ("infinity", last),
            ("-infinity", first),
            ("9999-12-31 23:59:59.5+00", last),
            ("294276-12-31 23:59:59.999999+00", last),
            ("0044-03-15 12:00:00+00 BC", first),
            ("4713-01-01 BC", first),
        ] {
            assert_eq!(time(oid::TIMESTAMPTZ, text.as_bytes(), Zone::UTC).unwrap(), expected, "{text}");
        }
        for text in [
            "",
            "now",
            "16.11.2026",
            "2026-13-01",
            "2026-02-29",
            "0001-02-29 BC BC",
            "2026-11-16 24:00:00",
            "2026-11-16 05:47",
            "2026-11-16 05:47:43.+00",
            "2026-11-16 05:47:43+00x",
            "2026-11-16 05:47:43 CET",
        ] {
            assert!(time(oid::TIMESTAMPTZ, text.as_bytes(), Zone::UTC).is_err(), "{text}");
        }
        assert_eq!(time(oid::INT8, b"1", Zone::UTC).unwrap(), datetime!(1970-01-01 00:00:01 UTC));
        assert_eq!(time(oid::INT8, b"9223372036854775807", Zone::UTC).unwrap(), last);
        assert_eq!(from_pg_micros(-1), datetime!(1999-12-31 23:59:59.999999 UTC));
        assert_eq!(from_pg_micros(i64::MAX), last);
    }

    #[test]
    fn a_zone_is_utc_or_an_offset_as_the_server_counts_it() {
        let noon =
            |zone: &str| time(oid::TIMESTAMP, b"2026-01-01 12:00:00", Zone::parse(zone).unwrap()).unwrap();
        assert_eq!(noon("utc"), datetime!(2026-01-01 12:00 UTC));
        assert_eq!(noon("-09:00"), datetime!(2026-01-01 03:00 UTC));
        assert_eq!(noon("+03:30"), datetime!(2026-01-01 15:30 UTC));
        // Within the bounds only after the shift.
        let zone = Zone::parse("-9").unwrap();
        let shifted = time(oid::TIMESTAMP, b"10000-01-01 02:00:00", zone).unwrap();
        assert_eq!(shifted, datetime!(9999-12-31 17:00 UTC));
        // A date has no zone, and the queue compares it in its session's, which is UTC.
        assert_eq!(time(oid::DATE, b"2026-01-01", zone).unwrap(), datetime!(2026-01-01 00:00 UTC));

        let error = Zone::parse("Asia/Seoul").unwrap_err();
        assert!(error.message().contains("UTC or at an offset, not in `Asia/Seoul`"), "{error}");
        for zone in ["", "+", "+9:", "+09:60", "+24", "9", "UTC+9", "+0900"] {
            assert!(Zone::parse(zone).is_err(), "{zone}");
        }
    }

    proptest! {
        #[test]
        fn times_come_back(micros in -63_082_281_600_000_000_i64..252_455_615_999_000_000) {
            let text = text_of_micros(micros, "+00");
            prop_assert_eq!(time(oid::TIMESTAMPTZ, text.as_bytes(), Zone::UTC).unwrap(), from_pg_micros(micros));
        }

        #[test]
        fn dates_come_back(day in -3_000_000_i64..110_000_000) {
            let (year, month, of_month) = date(day);
            prop_assert!((1..=12).contains(&month) && (1..=days_of(year, month)).contains(&of_month));
            prop_assert_eq!(days(year, month, of_month), day);
        }
    }
}
