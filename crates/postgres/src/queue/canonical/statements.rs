//! The statements of the canonical table: plain SQL files, with the names of the tables filled in.
//!
//! | placeholder | stands for |
//! | --- | --- |
//! | `{outbox}` | the table |
//! | `{sequence}` | the sequence behind `seq` |
//! | `{relay}`, `{mark}` | airtight's tables of relays and of their marks |
//! | `{event:ROW:LIMIT}` | the columns that [`crate::decode`] reads, of a row, without payloads above a limit |
//! | `{suspect_after}`, `{most}` | how many lost leases make a suspect; the largest count that can still grow |

use airtight_core::queue::SUSPECT_AFTER;

use crate::columns::EventColumns;

/// A count that is larger by one still fits; one that did not would fail the settle of all rows.
const MOST: i32 = i32::MAX - 1;

macro_rules! statements {
    ($($name:ident),*) => {
        /// The statements of one table, each from the file of its name.
        #[derive(Debug)]
        pub(super) struct Statements {
            $(pub(super) $name: String,)*
        }

        impl Statements {
            pub(super) fn new(names: &Names<'_>) -> Self {
                Self { $($name: names.fill(include_str!(concat!("sql/", stringify!($name), ".sql"))),)* }
            }
        }
    };
}

statements![
    top,
    publishers,
    page,
    net,
    mark,
    hold,
    due,
    alone,
    done,
    delete,
    failed,
    release,
    lost_fresh,
    lost_waiting
];

/// What the placeholders stand for.
pub(super) struct Names<'a> {
    columns: &'a EventColumns,
    /// Quoted; empty while it is not known.
    sequence: &'a str,
}

impl<'a> Names<'a> {
    pub(super) fn new(columns: &'a EventColumns, sequence: &'a str) -> Self {
        Self { columns, sequence }
    }

    fn fill(&self, sql: &str) -> String {
        // The comments are for the reader of the file. The server would get them with every statement that is not prepared.
        let lines = sql.lines().filter(|line| !line.trim_start().starts_with("--"));
        let mut sql = lines.collect::<Vec<_>>().join("\n");
        while let Some((start, end)) = placeholder(&sql, "{event:") {
            let inner = &sql[start + "{event:".len()..end];
            let (row, limit) = inner.split_once(':').unwrap_or((inner, "0"));
            let columns = event(row, limit);
            sql.replace_range(start..=end, &columns);
        }
        sql.replace("{outbox}", &self.columns.table)
            .replace("{sequence}", self.sequence)
            .replace("{relay}", &self.columns.relay)
            .replace("{mark}", &self.columns.mark)
            .replace("{suspect_after}", &SUSPECT_AFTER.to_string())
            .replace("{most}", &MOST.to_string())
    }
}

fn placeholder(sql: &str, opening: &str) -> Option<(usize, usize)> {
    let start = sql.find(opening)?;
    Some((start, start + sql[start..].find('}')?))
}

/// What [`crate::decode`] turns into an event, in its order: the same as [`EventColumns::event_columns`]
/// says for any table.
fn event(row: &str, max_payload: &str) -> String {
    let size = format!(
        "(coalesce(pg_column_size({row}.payload), 0) + coalesce(pg_column_size({row}.payload_bytes), 0))"
    );
    format!(
        "{row}.id::text AS e_id, {row}.seq AS e_seq, {row}.stream AS e_stream, {row}.event_type AS e_type,
            {row}.aggregate_type AS e_aggregate_type, {row}.aggregate_id AS e_aggregate_id, {row}.op AS e_op,
            CASE WHEN {size} <= {max_payload} THEN {row}.payload::text END AS e_payload,
            CASE WHEN {size} <= {max_payload} THEN {row}.payload_bytes END AS e_payload_bytes,
            {size}::bigint AS e_size, {row}.headers::text AS e_headers,
            least(greatest({row}.occurred_at, timestamptz '0001-01-01 00:00:00+00'),
                  timestamptz '9999-12-31 23:59:59+00') AS e_occurred_at,
            {row}.schema_version AS e_schema_version, {row}.max_attempts::bigint AS e_max_attempts,
            NULL::text AS e_extra"
    )
}
