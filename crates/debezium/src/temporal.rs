//! PostgreSQL's dates and times, in ISO style and UTC, as the numbers and texts that Debezium makes of them.

/// `infinity` in microseconds, to Debezium.
const FOREVER: i64 = 9_223_372_036_825_200_000;
/// `-infinity`.
const NEVER: i64 = -9_223_372_036_832_400_000;
const DAY: i64 = 86_400_000_000;
/// The 30.4375 days that Debezium takes for a month.
const MONTH: i64 = 2_629_800_000_000;

/// Days since 1970. The infinities are what an overflow in Java has made of them.
pub(super) fn date(text: &str) -> Option<i64> {
    match text {
        "infinity" => Some(-2_147_472_692),
        "-infinity" => Some(-2_147_472_691),
        _ => days(text.strip_suffix(" BC").unwrap_or(text), text.ends_with(" BC")).map(|(days, _)| days),
    }
}

/// Microseconds since midnight, up to 24:00.
pub(super) fn time(text: &str) -> Option<i64> {
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    let mut seconds = 0_i64;
    let mut parts = 0;
    for part in whole.split(':') {
        seconds = seconds.checked_mul(60)?.checked_add(number(part)?)?;
        parts += 1;
    }
    if parts != 3 || fraction.len() > 6 {
        return None;
    }
    let micros = number(&format!("{fraction:0<6}"))?;
    seconds.checked_mul(1_000_000)?.checked_add(micros)
}

/// Digits and nothing else.
fn number(text: &str) -> Option<i64> {
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok())?
}

/// Microseconds since 1970.
pub(super) fn timestamp(text: &str) -> Option<i64> {
    micros(text, |clock| Some((clock, 0)))
}

/// Microseconds since 1970, of a time with an offset.
pub(super) fn instant(text: &str) -> Option<i64> {
    micros(text, offset)
}

/// `split` takes the offset from a time of day.
fn micros<'a>(text: &'a str, split: impl Fn(&'a str) -> Option<(&'a str, i64)>) -> Option<i64> {
    match text {
        "infinity" => Some(FOREVER),
        "-infinity" => Some(NEVER),
        _ => {
            let (text, is_bc) = bc(text);
            let (date, clock) = text.split_once(' ')?;
            let (clock, offset) = split(clock)?;
            days(date, is_bc)?.0.checked_mul(DAY)?.checked_add(time(clock)?)?.checked_sub(offset)
        }
    }
}

/// `2025-01-25T10:34:56.789012Z`, with as many decimals as the column has.
pub(super) fn zoned_timestamp(text: &str, precision: i32) -> Option<String> {
    if matches!(text, "infinity" | "-infinity") {
        return Some(text.to_owned());
    }
    let micros = instant(text)?;
    let (year, month, day) = civil(micros.div_euclid(DAY));
    let year = match year {
        10_000.. => format!("+{year}"),
        0..10_000 => format!("{year:04}"),
        _ => format!("-{:04}", -year),
    };
    let of_day = micros.rem_euclid(DAY);
    let digits = usize::try_from(precision).unwrap_or(6).min(6);
    let fraction = format!("{:06}", of_day % 1_000_000);
    let point = if digits == 0 { "" } else { "." };
    Some(format!("{year}-{month:02}-{day:02}T{}{point}{}Z", clock(of_day), &fraction[..digits]))
}

/// `10:34:56.5Z`, with as many decimals as it needs.
pub(super) fn zoned_time(text: &str) -> Option<String> {
    let (clock_text, offset) = offset(text)?;
    let of_day = time(clock_text)?.checked_sub(offset)?.rem_euclid(DAY);
    let fraction = format!("{:06}", of_day % 1_000_000);
    let fraction = fraction.trim_end_matches('0');
    let point = if fraction.is_empty() { "" } else { "." };
    Some(format!("{}{point}{fraction}Z", clock(of_day)))
}

fn clock(of_day: i64) -> String {
    let seconds = of_day / 1_000_000;
    format!("{:02}:{:02}:{:02}", seconds / 3_600, seconds / 60 % 60, seconds % 60)
}

/// Microseconds of `1 year 2 mons -3 days +04:05:06.7`.
pub(super) fn interval(text: &str) -> Option<i64> {
    let mut total = 0_i64;
    let mut words = text.split(' ').filter(|word| !word.is_empty());
    while let Some(word) = words.next() {
        if word.contains(':') {
            let (sign, clock) = match word.strip_prefix('-') {
                Some(rest) => (-1, rest),
                None => (1, word.strip_prefix('+').unwrap_or(word)),
            };
            total = total.checked_add(time(clock)?.checked_mul(sign)?)?;
            continue;
        }
        let count: i64 = word.parse().ok()?;
        let unit = match words.next()?.trim_end_matches('s') {
            "year" => 12 * MONTH,
            "mon" => MONTH,
            "day" => DAY,
            _ => return None,
        };
        total = total.checked_add(count.checked_mul(unit)?)?;
    }
    Some(total)
}

fn bc(text: &str) -> (&str, bool) {
    match text.strip_suffix(" BC") {
        Some(text) => (text, true),
        None => (text, false),
    }
}

/// The clock before `+02`, `-05:45` or `+00:00:30`, and the microseconds to take off.
fn offset(text: &str) -> Option<(&str, i64)> {
    let at = text.rfind(['+', '-'])?;
    let (clock, offset) = text.split_at(at);
    let (sign, offset) = (if offset.starts_with('-') { -1 } else { 1 }, &offset[1..]);
    let mut parts = offset.split(':').map(|part| number(part).filter(|number| *number < 100));
    let mut next = || parts.next().unwrap_or(Some(0));
    let seconds = next()? * 3_600 + next()? * 60 + next()?;
    Some((clock, sign * seconds * 1_000_000))
}

/// Days since 1970, in the calendar of today at all times, and the year.
fn days(text: &str, is_bc: bool) -> Option<(i64, i64)> {
    let mut parts = text.split('-').map(number);
    let (year, month, day) = (parts.next()??, parts.next()??, parts.next()??);
    // No database has more, and nothing below overflows with it.
    if year > 10_000_000 || !(1..=12).contains(&month) || !(1..=31).contains(&day) || parts.next().is_some() {
        return None;
    }
    // There is a year 0 in this count.
    let year = if is_bc { 1 - year } else { year };
    // Years that begin in March put the leap day at their end.
    let shifted = if month <= 2 { year - 1 } else { year };
    let era = shifted.div_euclid(400);
    let year_of_era = shifted.rem_euclid(400);
    let day_of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    let day_of_era = year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year;
    Some((era * 146_097 + day_of_era - 719_468, year))
}

/// The other way round.
fn civil(days: i64) -> (i64, i64, i64) {
    let shifted = days + 719_468;
    let era = shifted.div_euclid(146_097);
    let day_of_era = shifted.rem_euclid(146_097);
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    (year_of_era + era * 400 + i64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn days_go_both_ways() {
        for days in (-800_000..3_000_000).step_by(97) {
            let (year, month, day) = civil(days);
            let (text, is_bc) = match year {
                1.. => (format!("{year:04}-{month:02}-{day:02}"), false),
                _ => (format!("{:04}-{month:02}-{day:02}", 1 - year), true),
            };
            assert_eq!(super::days(&text, is_bc).unwrap().0, days, "{text}");
        }
        assert_eq!(date("1970-01-01"), Some(0));
        assert_eq!(date("2000-02-29"), Some(11_016));
    }

    #[test]
    fn what_is_no_time_is_refused() {
        for wrong in ["", "1:2", "x", "01:00:00.1234567"] {
            assert_eq!(time(wrong), None, "{wrong}");
        }
        assert_eq!(timestamp("2025-01-25"), None);
        assert_eq!(instant("2025-01-25 00:00:00"), None);
        assert_eq!(interval("1 fortnight"), None);
        assert_eq!(zoned_timestamp("2025-01-25 00:00:00+00", 0).as_deref(), Some("2025-01-25T00:00:00Z"));
    }
}
