//! Tables for people, and JSON for machines. All output goes through a writer that reports a closed pipe, because
//! `println!` would panic on `airtight events list | head -1`.

use std::{
    fmt::Display,
    io::{self, Write},
    time::Duration,
};

use serde::Serialize;
use time::{OffsetDateTime, macros::format_description};

use crate::errors::Outcome;

/// Prints one line.
pub(crate) fn line(text: impl Display) -> Outcome {
    let mut out = io::stdout().lock();
    writeln!(out, "{text}")?;
    out.flush()?;
    Ok(())
}

/// Prints bytes unchanged; lines already end in a line feed.
pub(crate) fn raw(bytes: &[u8]) -> Outcome {
    let mut out = io::stdout().lock();
    out.write_all(bytes)?;
    out.flush()?;
    Ok(())
}

/// Prints one JSON document on one line.
pub(crate) fn json<T: Serialize + ?Sized>(value: &T) -> Outcome {
    let mut text = serde_json::to_vec(value)?;
    text.push(b'\n');
    raw(&text)
}

/// A table with a header; columns that contain only numbers are aligned to the right.
pub(crate) struct Table {
    header: Vec<&'static str>,
    rows: Vec<Vec<String>>,
}

impl Table {
    pub(crate) fn new(header: &[&'static str]) -> Self {
        Self { header: header.to_vec(), rows: Vec::new() }
    }

    pub(crate) fn row(&mut self, cells: Vec<String>) {
        // A terminal must not obey what an event's producer wrote.
        self.rows.push(cells.iter().map(|cell| printable(cell)).collect());
    }

    pub(crate) fn print(&self) -> Outcome {
        raw(self.render().as_bytes())
    }

    fn render(&self) -> String {
        let columns = self.header.len();
        let width = |column: usize| {
            let cells = self.rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count());
            cells.chain([self.header[column].len()]).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..columns).map(width).collect();
        let numeric: Vec<bool> = (0..columns)
            .map(|column| {
                let mut cells = self.rows.iter().filter_map(|row| row.get(column));
                cells.all(|cell| !cell.is_empty() && cell.chars().all(|c| c.is_ascii_digit()))
            })
            .collect();
        let header: Vec<String> = self.header.iter().map(|name| (*name).to_owned()).collect();
        let mut text = String::new();
        for row in std::iter::once(&header).chain(&self.rows) {
            let mut rendered = String::new();
            for (column, cell) in row.iter().enumerate() {
                let pad = " ".repeat(widths[column].saturating_sub(cell.chars().count()));
                let gap = if column == 0 { "" } else { "  " };
                let (left, right) = if numeric[column] { (pad.as_str(), "") } else { ("", pad.as_str()) };
                rendered.extend([gap, left, cell, right]);
            }
            text.push_str(rendered.trim_end());
            text.push('\n');
        }
        text
    }
}

/// Text without control characters, for terminals.
pub(crate) fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

/// Cuts long text.
pub(crate) fn short(text: &str, at_most: usize) -> String {
    if text.chars().count() <= at_most {
        return text.to_owned();
    }
    let mut cut: String = text.chars().take(at_most.saturating_sub(1)).collect();
    cut.push('…');
    cut
}

/// A time for people.
pub(crate) fn time(at: Option<OffsetDateTime>) -> String {
    let format = format_description!("[year]-[month]-[day] [hour]:[minute]:[second]Z");
    at.and_then(|at| at.to_offset(time::UtcOffset::UTC).format(&format).ok()).unwrap_or_else(|| "-".into())
}

/// An age for people: `3.2s`, `4m 10s`, `2h 5m`, `3d 4h`.
pub(crate) fn age(seconds: f64) -> String {
    let seconds = seconds.max(0.0);
    let whole = Duration::try_from_secs_f64(seconds).unwrap_or_default().as_secs();
    match whole {
        0..60 => format!("{seconds:.1}s"),
        60..3_600 => format!("{}m {}s", whole / 60, whole % 60),
        3_600..86_400 => format!("{}h {}m", whole / 3_600, whole % 3_600 / 60),
        _ => format!("{}d {}h", whole / 86_400, whole % 86_400 / 3_600),
    }
}

/// A count with its digits in groups: `50,000`.
pub(crate) fn count(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// A number of bytes, for people.
pub(crate) fn bytes(number: u64) -> String {
    const UNITS: [&str; 4] = ["kB", "MB", "GB", "TB"];
    if number < 1_000 {
        return format!("{number} B");
    }
    let mut size = number as f64;
    let mut unit = "B";
    for next in UNITS {
        if size < 1_000.0 {
            break;
        }
        (size, unit) = (size / 1_000.0, next);
    }
    format!("{size:.1} {unit}")
}

/// `1 event`, `2 events`.
pub(crate) fn counted(number: u64, what: &str) -> String {
    format!("{} {what}{}", count(number), if number == 1 { "" } else { "s" })
}

/// Events per second, zero when no time has passed.
pub(crate) fn rate(events: u64, elapsed: Duration) -> f64 {
    let seconds = elapsed.as_secs_f64();
    // A count of events is far below 2^52.
    if seconds > 0.0 { (events as f64 / seconds * 10.0).round() / 10.0 } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_lines_up_and_hides_control_characters() {
        let mut table = Table::new(&["stream", "pending"]);
        table.row(vec!["shop.orders".into(), "7".into()]);
        table.row(vec!["a\x1b[2J".into(), "1200".into()]);
        assert_eq!(table.render(), "stream       pending\nshop.orders        7\na [2J           1200\n");
    }

    #[test]
    fn numbers_and_ages_for_people() {
        assert_eq!((count(7), count(1_234_567)), ("7".into(), "1,234,567".into()));
        assert_eq!(counted(1, "event"), "1 event");
        assert_eq!((age(3.21), age(250.0), age(90_000.0)), ("3.2s".into(), "4m 10s".into(), "1d 1h".into()));
        assert_eq!(short("abcdef", 4), "abc…");
    }
}
