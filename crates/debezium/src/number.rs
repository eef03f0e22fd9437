//! Numbers as Java writes them, and as Connect puts them into bytes.

use super::schema::Decimal;

/// `Double.toString`.
pub(super) fn double(value: f64) -> String {
    special(value).unwrap_or_else(|| java(&format!("{value:e}"), &format!("{value:.1e}")))
}

/// `Float.toString`.
pub(super) fn float(value: f32) -> String {
    special(f64::from(value)).unwrap_or_else(|| java(&format!("{value:e}"), &format!("{value:.1e}")))
}

fn special(value: f64) -> Option<String> {
    match value {
        v if v.is_nan() => Some("NaN".into()),
        v if v.is_infinite() => Some(if v > 0.0 { "Infinity" } else { "-Infinity" }.into()),
        v if v == 0.0 => Some(if v.is_sign_negative() { "-0.0" } else { "0.0" }.into()),
        _ => None,
    }
}

/// The shortest digits that mean the number, of which Java wants two: where one is enough, the nearest two are taken
/// (`4.9E-324`). From 10⁻³ to 10⁷ without an exponent.
fn java(shortest: &str, two_digits: &str) -> String {
    let one_digit =
        shortest.trim_start_matches('-').split('e').next().is_some_and(|digits| digits.len() == 1);
    let text = if one_digit { two_digits } else { shortest };
    let (mantissa, exponent) = text.split_once('e').unwrap_or((text, "0"));
    let exponent: i32 = exponent.parse().unwrap_or_default();
    let (sign, mantissa) = match mantissa.strip_prefix('-') {
        Some(rest) => ("-", rest),
        None => ("", mantissa),
    };
    let digits: String = mantissa.chars().filter(char::is_ascii_digit).collect();
    let digits = digits.trim_end_matches('0');
    let digits = if digits.is_empty() { "0" } else { digits };
    if (-3..7).contains(&exponent) {
        return format!("{sign}{}", plain(digits, exponent));
    }
    let (first, rest) = digits.split_at(1);
    let rest = if rest.is_empty() { "0" } else { rest };
    format!("{sign}{first}.{rest}E{exponent}")
}

/// `d.ddd × 10^exponent` in full, with a digit on either side of the point.
fn plain(digits: &str, exponent: i32) -> String {
    let Ok(whole) = usize::try_from(exponent + 1) else {
        let zeros = usize::try_from(-exponent - 1).unwrap_or_default();
        return format!("0.{}{digits}", "0".repeat(zeros));
    };
    if whole == 0 {
        return format!("0.{digits}");
    }
    if digits.len() <= whole {
        return format!("{digits}{}.0", "0".repeat(whole - digits.len()));
    }
    format!("{}.{}", &digits[..whole], &digits[whole..])
}

impl Decimal {
    /// Reads PostgreSQL's text of a number; none for `NaN` and the infinities.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let (negative, text) = match text.strip_prefix('-') {
            Some(rest) => (true, rest),
            None => (false, text),
        };
        let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
        let all = format!("{whole}{fraction}");
        if all.is_empty() || !all.bytes().all(|digit| digit.is_ascii_digit()) {
            return None;
        }
        Some(Self { negative, digits: trimmed(&all), scale: i32::try_from(fraction.len()).ok()? }.signed())
    }

    /// The same number with another scale; none where that would lose digits.
    pub(super) fn with_scale(mut self, scale: i32) -> Option<Self> {
        while self.scale < scale {
            if self.digits != "0" {
                self.digits.push('0');
            }
            self.scale += 1;
        }
        while self.scale > scale {
            if self.digits != "0" && self.digits.pop() != Some('0') {
                return None;
            }
            self.scale -= 1;
        }
        Some(self)
    }

    /// `stripTrailingZeros`, and a scale of 0 at least.
    pub(super) fn stripped(mut self) -> Self {
        while self.scale > 0 && self.digits.ends_with('0') && self.digits != "0" {
            self.digits.pop();
            self.scale -= 1;
        }
        if self.digits == "0" {
            self.scale = 0;
        }
        self
    }

    fn signed(mut self) -> Self {
        self.negative &= self.digits != "0";
        self
    }

    /// `BigDecimal.toString`.
    pub(super) fn text(&self) -> String {
        let sign = if self.negative { "-" } else { "" };
        let length = i32::try_from(self.digits.len()).unwrap_or(i32::MAX);
        let adjusted = length - 1 - self.scale;
        if self.scale == 0 {
            return format!("{sign}{}", self.digits);
        }
        if self.scale > 0 && adjusted >= -6 {
            let scale = usize::try_from(self.scale).unwrap_or_default();
            let padded = format!("{:0>width$}", self.digits, width = scale + 1);
            let (whole, fraction) = padded.split_at(padded.len() - scale);
            return format!("{sign}{whole}.{fraction}");
        }
        let (first, rest) = self.digits.split_at(1);
        let point = if rest.is_empty() { "" } else { "." };
        format!("{sign}{first}{point}{rest}E{adjusted:+}")
    }

    /// The unscaled number in two's complement, highest byte first, in as few bytes as hold it.
    pub(super) fn unscaled(&self) -> Vec<u8> {
        // Lowest byte first.
        let mut bytes: Vec<u8> = vec![0];
        for digit in self.digits.bytes() {
            let mut carry = u16::from(digit - b'0');
            for byte in &mut bytes {
                let next = u16::from(*byte) * 10 + carry;
                let [low, high] = next.to_le_bytes();
                (*byte, carry) = (low, u16::from(high));
            }
            if carry > 0 {
                bytes.push(carry.to_le_bytes()[0]);
            }
        }
        if self.negative {
            let mut carry = true;
            for byte in &mut bytes {
                let (next, more) = (!*byte).overflowing_add(u8::from(carry));
                (*byte, carry) = (next, more);
            }
            if bytes.last().is_some_and(|high| *high < 0x80) {
                bytes.push(0xff);
            }
        } else if bytes.last().is_some_and(|high| *high >= 0x80) {
            bytes.push(0);
        }
        let filler = if self.negative { 0xff } else { 0 };
        let same_sign = |next: u8| (next >= 0x80) == self.negative;
        while bytes.len() > 1 && bytes[bytes.len() - 1] == filler && same_sign(bytes[bytes.len() - 2]) {
            bytes.pop();
        }
        bytes.reverse();
        bytes
    }
}

fn trimmed(digits: &str) -> String {
    let digits = digits.trim_start_matches('0');
    if digits.is_empty() { "0".into() } else { digits.into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn doubles_are_javas() {
        for (value, text) in [
            (1.0, "1.0"),
            (0.001, "0.001"),
            (0.00099, "9.9E-4"),
            (9_999_999.0, "9999999.0"),
            (1e7, "1.0E7"),
            (12_345.678, "12345.678"),
            (123_456_789.123, "1.23456789123E8"),
            (5e-324, "4.9E-324"),
            (f64::MAX, "1.7976931348623157E308"),
            (-0.25, "-0.25"),
            (0.5, "0.5"),
            (100.0, "100.0"),
        ] {
            assert_eq!(double(value), text);
        }
        assert_eq!(float(1e-45), "1.4E-45");
        assert_eq!(float(16_777_216.0), "1.6777216E7");
    }

    #[test]
    fn decimals_are_javas() {
        for (text, bytes) in [
            ("0", vec![0]),
            ("127", vec![127]),
            ("128", vec![0, 128]),
            ("-128", vec![0x80]),
            ("-129", vec![0xff, 0x7f]),
            ("-1", vec![0xff]),
            ("-256", vec![0xff, 0]),
            ("256", vec![1, 0]),
            ("65535", vec![0, 255, 255]),
        ] {
            assert_eq!(Decimal::parse(text).unwrap().unscaled(), bytes, "{text}");
        }
        for (text, shown) in [
            ("0.000000001", "1E-9"),
            ("0.000001", "0.000001"),
            ("-12.30", "-12.30"),
            ("0.0000000", "0E-7"),
            ("-0.00", "0.00"),
        ] {
            assert_eq!(Decimal::parse(text).unwrap().text(), shown);
        }
        let hundreds = Decimal::parse("123400").unwrap().with_scale(-2).unwrap();
        assert_eq!((hundreds.text().as_str(), hundreds.unscaled()), ("1.234E+5", vec![4, 210]));
        assert!(Decimal::parse("NaN").is_none());
    }
}
