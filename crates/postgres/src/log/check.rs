//! Checks whether a table can be followed at all. A table that would break the rule for holes is refused, with the statement
//! that fixes it.

use airtight_core::{
    Code, Error, Result,
    table::{literal, quote},
};
use sqlx::Row;

use crate::{PgOutbox, columns::EventColumns, error::doing, outbox::Conn};

/// The sequence behind a log.
#[derive(Debug, Clone)]
pub(crate) struct Sequence {
    pub(crate) oid: i64,
    /// Quoted.
    pub(crate) name: String,
}

/// Finds the sequence and refuses a table that cannot be followed.
pub(crate) async fn check(outbox: &PgOutbox, conn: &mut Conn, c: &EventColumns) -> Result<Sequence> {
    let failed = doing("checking the log");
    let refuse = |code: Code, what: String| Error::permanent(code, format!("{} {what}", c.outbox));
    let Some(seq) = &c.spec.seq else {
        return Err(refuse(Code::NO_SEQ, "has no ascending column mapped: a log needs `seq`".into()));
    };
    // A table's own sequence (serial, identity), or the one that its default draws from.
    let sequences = sqlx::query(
        "SELECT s.oid::bigint AS oid, quote_ident(n.nspname) || '.' || quote_ident(s.relname) AS name, \
           q.seqincrement, q.seqcache, q.seqcycle, s.relpersistence::text AS persistence \
         FROM pg_depend d JOIN pg_class s ON s.relkind = 'S' AND s.oid = CASE WHEN d.classid = 'pg_attrdef'::regclass \
           THEN d.refobjid ELSE d.objid END \
         JOIN pg_namespace n ON n.oid = s.relnamespace JOIN pg_sequence q ON q.seqrelid = s.oid \
         JOIN pg_attribute a ON a.attrelid = to_regclass($1) AND a.attname = $2 \
         WHERE (d.classid = 'pg_class'::regclass AND d.refclassid = 'pg_class'::regclass \
             AND d.refobjid = a.attrelid AND d.refobjsubid = a.attnum AND d.deptype IN ('a', 'i')) \
           OR (d.classid = 'pg_attrdef'::regclass AND d.refclassid = 'pg_class'::regclass \
             AND d.objid = (SELECT f.oid FROM pg_attrdef f WHERE f.adrelid = a.attrelid AND f.adnum = a.attnum)) \
         GROUP BY 1, 2, 3, 4, 5, 6",
    )
    .persistent(!outbox.pooled)
    .bind(&c.table)
    .bind(seq)
    .fetch_all(conn.get())
    .await
    .map_err(&failed)?;
    let [row] = &sequences[..] else {
        let how_many =
            if sequences.is_empty() { "not backed by a sequence" } else { "fed by several sequences" };
        let name = format!("{}_{seq}_seq", c.spec.table);
        let own = c
            .spec
            .schema
            .as_ref()
            .map_or_else(|| quote(&name), |schema| format!("{}.{}", quote(schema), quote(&name)));
        return Err(refuse(
            Code::NO_SEQUENCE,
            format!(
                "cannot be followed: its column {seq} is {how_many}, so it cannot be known whether a missing value \
                 may still arrive. After the fix, publish without that column"
            ),
        )
        .with_remedy(format!(
            "LOCK TABLE {table} IN SHARE ROW EXCLUSIVE MODE; CREATE SEQUENCE {own} OWNED BY {table}.{column}; SELECT \
             setval({text}, (SELECT coalesce(max({column}), 0) + 1 FROM {table}), false); ALTER TABLE {table} ALTER COLUMN \
             {column} SET DEFAULT nextval({text})",
            table = c.table,
            column = quote(seq),
            text = literal(&own),
        )));
    };
    let sequence =
        Sequence { oid: row.try_get("oid").map_err(&failed)?, name: row.try_get("name").map_err(&failed)? };
    let (increment, cache): (i64, i64) =
        (row.try_get("seqincrement").map_err(&failed)?, row.try_get("seqcache").map_err(&failed)?);
    let cycle: bool = row.try_get("seqcycle").map_err(&failed)?;
    let name = &sequence.name;
    if increment != 1 || cache != 1 || cycle {
        let error = refuse(
            Code::BAD_SEQUENCE,
            format!(
                "cannot be followed: its sequence has INCREMENT {increment}, CACHE {cache}{}, so values would not be \
                 drawn in order",
                if cycle { " and CYCLE" } else { "" }
            ),
        )
        .with_remedy(format!("ALTER SEQUENCE {name} INCREMENT 1 CACHE 1 NO CYCLE"));
        return Err(error);
    }
    let table = sqlx::query(
        "SELECT pg_is_in_recovery() AS standby, quote_ident(current_user) AS me, row_security_active(c.oid) AS hidden, \
           (SELECT min(x.oid::regclass::text) FROM pg_class x WHERE x.relpersistence <> 'p' AND (x.oid = c.oid \
              OR x.oid IN (SELECT relid FROM pg_partition_tree(c.oid)) OR x.oid = $2::bigint::oid)) AS unlogged, \
           EXISTS (SELECT FROM pg_subscription_rel r WHERE r.srrelid = c.oid \
              OR r.srrelid IN (SELECT relid FROM pg_partition_tree(c.oid))) AS subscribed \
         FROM pg_class c WHERE c.oid = to_regclass($1)",
    )
    .persistent(!outbox.pooled)
    .bind(&c.table)
    .bind(sequence.oid)
    .fetch_one(conn.get())
    .await
    .map_err(&failed)?;
    let is = |column: &str| table.try_get::<bool, _>(column).map_err(&failed);
    let unlogged: Option<String> = table.try_get("unlogged").map_err(&failed)?;
    let error = if is("standby")? {
        Some(Error::unavailable(
            Code::READ_ONLY,
            format!(
                "{}: this server is a standby, which does not show who is publishing: follow the log on the primary",
                c.outbox
            ),
        ))
    } else if let Some(unlogged) = unlogged {
        Some(refuse(
            Code::UNLOGGED,
            format!(
                "cannot be followed: {unlogged} is not logged, and a crash would empty it below the consumers' offsets"
            ),
        )
        .with_remedy(format!("ALTER TABLE {unlogged} SET LOGGED")))
    } else if is("hidden")? {
        Some(refuse(
            Code::ROW_SECURITY,
            format!(
                "cannot be followed: row security hides rows of {} from this user, and they would look like holes",
                c.table
            ),
        )
        .with_remedy(format!(
            "ALTER ROLE {} BYPASSRLS",
            table.try_get::<String, _>("me").map_err(&failed)?
        )))
    } else if is("subscribed")? {
        Some(refuse(
            Code::SUBSCRIBED,
            format!(
                "cannot be followed: a subscription feeds it, with values that were drawn on another server. Follow the \
                 log there, or take the table out: ALTER SUBSCRIPTION … SET PUBLICATION …, without {}",
                c.table
            ),
        ))
    } else {
        None
    };
    error.map_or(Ok(sequence), Err)
}
