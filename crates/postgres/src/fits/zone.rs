//! Times without a zone: does the server know the zone, and do the writers use it?
//!
//! `TIMESTAMP … DEFAULT now()` is the time in the zone of the writer's session, and the row does not store that zone. If
//! rows are read in another zone, events are due hours late, or look hours old.

use airtight_core::{
    Result,
    admin::Finding,
    table::{StatusSpec, literal},
};
use sqlx::Row;

use super::{row, rows, trial};
use crate::{
    PgOutbox,
    columns::{EventColumns, col, open_roles},
    error::doing,
};

/// Clocks of hosts may differ by this; zones differ by more.
const TOLERANCE_SECONDS: f64 = 300.0;

/// How many of the newest rows are checked.
const NEWEST: u32 = 100;

/// A zone that the server does not know.
pub(super) async fn unknown(outbox: &PgOutbox, c: &EventColumns) -> Result<Option<Finding>> {
    let zone = &c.spec.zone;
    let known = trial(outbox, format!("SELECT now() AT TIME ZONE {} IS NULL", literal(zone))).await?;
    Ok(known.err().map(|why| {
        Finding::fatal(format!("{}: the server does not know the zone `{zone}`: {why}", c.outbox))
            .with_remedy("set `zone` in [table] to a name in pg_timezone_names, such as `Asia/Seoul`")
    }))
}

/// What suggests that the writers' zone is another than the mapping's.
pub(super) async fn suspicion(
    outbox: &PgOutbox,
    c: &EventColumns,
    status: Option<&StatusSpec>,
) -> Result<Option<Finding>> {
    let Some(created) = c.spec.created_at.as_deref().filter(|column| c.is_without_zone(column)) else {
        return Ok(None);
    };
    let zone = &c.spec.zone;
    let theirs = databases_zone(outbox, zone).await?;
    let ahead = ahead(outbox, c, status, created, theirs.as_deref()).await?;
    let remedy = match &theirs {
        Some(theirs) => format!("zone = \"{theirs}\" in [table], if that is where {created} is written"),
        None => format!("set `zone` in [table] to the zone in which {created} is written"),
    };
    if let Some(seconds) = ahead.ours.filter(|seconds| *seconds > TOLERANCE_SECONDS) {
        let fits = ahead.theirs.is_some_and(|seconds| seconds <= TOLERANCE_SECONDS);
        let note = Finding::note(format!(
            "{}: the newest {created} is {} in the future if it is read in the zone `{zone}`; events that wait for a \
             time would wait that much longer{}",
            c.outbox,
            hours(seconds),
            if fits { "; in the database's own zone, it is not in the future" } else { "" },
        ));
        return Ok(Some(note.with_remedy(remedy)));
    }
    if let Some(theirs) = &theirs
        && is_filled_by_now(outbox, c, created).await?
    {
        let note = Finding::note(format!(
            "{}: {created} has no zone and is filled by now(), which is the time in the zone of the writer's \
             session; the database's own zone is `{theirs}`, but rows are read in the zone `{zone}`",
            c.outbox
        ));
        return Ok(Some(note.with_remedy(remedy)));
    }
    Ok(None)
}

/// The zone that sessions have in this database, if it is set for it and differs from ours. Our own session has none
/// of it: its driver asks for UTC.
async fn databases_zone(outbox: &PgOutbox, ours: &str) -> Result<Option<String>> {
    let sql = "SELECT split_part(s, '=', 2) FROM pg_db_role_setting r CROSS JOIN unnest(r.setconfig) AS s \
         WHERE r.setdatabase IN (0, (SELECT oid FROM pg_database WHERE datname = current_database())) \
           AND lower(split_part(s, '=', 1)) = 'timezone' \
         ORDER BY r.setrole = 0 DESC, r.setdatabase DESC LIMIT 1";
    let found: Vec<(String,)> = rows(outbox, sql.into(), &[]).await?;
    let Some((theirs,)) = found.into_iter().next() else { return Ok(None) };
    let differs =
        format!("SELECT now() AT TIME ZONE {} <> now() AT TIME ZONE {}", literal(&theirs), literal(ours));
    // What cannot be compared says nothing.
    let differs = trial(outbox, differs).await?;
    Ok(Some(theirs).filter(|_| differs == Ok(Some(true))))
}

/// How far the newest row is ahead of now, in seconds.
struct Ahead {
    ours: Option<f64>,
    theirs: Option<f64>,
}

async fn ahead(
    outbox: &PgOutbox,
    c: &EventColumns,
    status: Option<&StatusSpec>,
    created: &str,
    theirs: Option<&str>,
) -> Result<Ahead> {
    // Along an index where there is one. Else among the open rows, all of which a claim looks at as well.
    let newest = match (&c.spec.seq, status) {
        (Some(seq), _) => format!("FROM {} t ORDER BY {} DESC LIMIT {NEWEST}", c.table, col(seq)),
        (None, Some(status)) => format!("FROM {} t WHERE {}", c.table, open_roles(status)),
        (None, None) => return Ok(Ahead { ours: None, theirs: None }),
    };
    let seconds = |zone: &str| {
        format!("extract(epoch FROM max({} AT TIME ZONE {}) - now())::float8", col(created), literal(zone))
    };
    let sql = format!(
        // What is further ahead than any zone is a bad row, or meant so.
        "SELECT {} AS ours, {} AS theirs FROM (SELECT {2} {newest}) AS t \
         WHERE {2} BETWEEN timestamp '1970-01-02' AND (now() AT TIME ZONE 'UTC') + interval '2 days'",
        seconds(&c.spec.zone),
        theirs.map_or_else(|| "NULL::float8".to_owned(), seconds),
        col(created)
    );
    let row = row(outbox, sql, &[]).await?;
    let failed = doing("comparing the newest row with now");
    Ok(Ahead { ours: row.try_get("ours").map_err(&failed)?, theirs: row.try_get("theirs").map_err(&failed)? })
}

/// Whether the column's default is the present time in whatever zone the session has.
async fn is_filled_by_now(outbox: &PgOutbox, c: &EventColumns, column: &str) -> Result<bool> {
    let defaults: Vec<(String,)> = rows(
        outbox,
        "SELECT lower(pg_get_expr(d.adbin, d.adrelid)) FROM pg_attrdef d JOIN pg_attribute a \
         ON a.attrelid = d.adrelid AND a.attnum = d.adnum WHERE d.adrelid = to_regclass($1) AND a.attname = $2"
            .into(),
        &[&c.table, column],
    )
    .await?;
    let now = ["now()", "current_timestamp", "localtimestamp", "_timestamp()"];
    Ok(defaults.iter().any(|(default,)| {
        now.iter().any(|word| default.contains(word))
            && !default.contains("at time zone")
            && !default.contains("timezone(")
    }))
}

fn hours(seconds: f64) -> String {
    let minutes = (seconds / 60.0).round();
    format!("{}h {}m", (minutes / 60.0).floor(), minutes % 60.0)
}
