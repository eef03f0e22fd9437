//! The publication: created before the slot, or checked if it exists already. This module also checks whether the
//! publication has always had what it must have.
//!
//! The server decodes WAL with the catalogs as they were when the WAL was written. So what is committed while a publication
//! lacks the table, its inserts, its rows or its columns is skipped silently, and a later fix does not bring it back. For this
//! reason its [`Contents`] are stored with the position. They are compared in the statement that moves the position, and by a
//! check every few seconds. A difference is a gap.

use airtight_core::{
    Class, Code, Error, Result,
    table::{literal, quote},
};
use serde::{Deserialize, Serialize};
use sqlx::{AssertSqlSafe, Row};

use super::{
    slot,
    state::{Phase, Stored},
};
use crate::{
    PgOutbox,
    columns::EventColumns,
    error::{doing, sqlstate},
};

/// The first version whose publications can have schemas.
const SCHEMAS: i32 = 150_000;

/// What a publication has of the outbox, by the numbers of the catalogues: they change with every change, also with one that
/// was taken back before anybody looked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Contents {
    publication: i64,
    /// The transaction that has last written its options.
    version: i64,
    owner: i64,
    table: Option<i64>,
    /// By which it has the table: another one with every filter and every list of columns.
    entries: Vec<i64>,
    schemas: Vec<i64>,
}

impl Contents {
    /// What has changed since, if that may have left something out; `None` if it has not.
    fn missed(&self, now: &Self, shown: &str) -> Option<String> {
        if self.table != now.table {
            return Some(format!("{shown} is not the table that was read before: it was replaced"));
        }
        let what = if self.publication != now.publication {
            "was recreated, or is not the one that was read before"
        } else if (&self.entries, &self.schemas) != (&now.entries, &now.schemas) {
            "was changed: it publishes something else of the table"
        } else if self.version != now.version && self.owner == now.owner {
            "was altered"
        } else {
            return None;
        };
        Some(format!("the publication {what}"))
    }
}

/// [`Contents`] as an expression of SQL, over the reader's row `s`: NULL where there is no publication. A table that was
/// renamed is the one that is known.
pub(super) fn contents(c: &EventColumns, publication: &str, version: i32) -> String {
    let schemas = if version >= SCHEMAS {
        "(SELECT coalesce(jsonb_agg(e.oid::bigint ORDER BY e.oid), '[]') FROM pg_publication_namespace e \
           JOIN pg_class r ON r.relnamespace = e.pnnspid WHERE e.pnpubid = p.oid AND r.oid = t.oid)"
    } else {
        "'[]'::jsonb"
    };
    format!(
        "(SELECT jsonb_build_object('publication', p.oid::bigint, 'version', p.xmin::text::bigint, \
           'owner', p.pubowner::bigint, 'table', t.oid::bigint, \
           'entries', (SELECT coalesce(jsonb_agg(e.oid::bigint ORDER BY e.oid), '[]') FROM pg_publication_rel e \
             WHERE e.prpubid = p.oid AND (e.prrelid = t.oid OR e.prrelid IN (SELECT relid FROM pg_partition_ancestors(t.oid)))), \
           'schemas', {schemas}) \
         FROM pg_publication p, \
           (SELECT coalesce(to_regclass({table})::oid, (s.published ->> 'table')::bigint::oid) AS oid) t \
         WHERE p.pubname = {name})",
        table = literal(&c.table),
        name = literal(publication),
    )
}

/// A reader and its publication.
pub(super) struct Reader<'a> {
    pub(super) outbox: &'a PgOutbox,
    pub(super) columns: &'a EventColumns,
    /// Its name, and the slot's.
    pub(super) name: &'a str,
    pub(super) publication: &'a str,
    /// See [`contents`].
    pub(super) contents: &'a str,
    /// Whether a row `t` of the table is not finished, as an expression.
    pub(super) open: String,
}

/// The stored contents of the publication, and the current ones.
struct PublicationState {
    stored: Option<Contents>,
    found: Option<Contents>,
    /// Rows of the table, or of a partition, are not in the WAL.
    unlogged: bool,
}

impl Reader<'_> {
    /// Refuses a publication that has, or may have, left something out since the position was stored. Cheap while nothing
    /// has changed.
    pub(super) async fn verify(&self, stored: &Stored) -> Result<()> {
        match self.judge(stored).await? {
            Some(contents) => self.adopt(&contents).await,
            None => Ok(()),
        }
    }

    /// The same, without writing. Returns what is to be stored from now on, if that is something else.
    pub(super) async fn judge(&self, stored: &Stored) -> Result<Option<Contents>> {
        let Some(state) = self.state().await? else { return Ok(None) };
        if state.stored.is_some() && state.stored == state.found && !state.unlogged {
            return Ok(None);
        }
        let shown = &self.columns.outbox;
        // A statement that carries over what only the table has that was read before.
        let left = match (&state.stored, &state.found) {
            (Some(before), Some(now)) if before.table != now.table => self.left_behind(before).await?,
            _ => None,
        };
        match check(self.outbox, self.columns, self.publication).await? {
            Publication::Missing => {
                let what = format!(
                    "the publication `{}` is gone, and events that were committed without it are in no stream",
                    self.publication
                );
                Err(self.gap(Code::PUBLICATION_LOST, what, None, stored).await)
            }
            Publication::Unfit(unfit) => {
                let mend = left.map_or(unfit.mend.clone(), |sql| format!("{sql}; {}", unfit.mend));
                Err(self.gap(unfit.code, unfit.what, Some(mend), stored).await)
            }
            Publication::Fits => {
                let missed = state
                    .stored
                    .zip(state.found.as_ref())
                    .and_then(|(before, now)| before.missed(now, shown));
                let Some(what) = missed else { return Ok(state.found) };
                let what = format!(
                    "{what} (`{}` of {shown}). Events that were committed in the meantime may be missing",
                    self.publication
                );
                Err(self.gap(Code::PUBLICATION_CHANGED, what, left, stored).await)
            }
        }
    }

    /// What the table that was read is called now, if it has another name.
    pub(super) async fn name_now(&self) -> Result<Option<String>> {
        let sql = format!(
            "SELECT format('%I.%I', n.nspname, o.relname) FROM {} s JOIN pg_class o ON o.oid = (s.published ->> 'table')::bigint::oid \
               JOIN pg_namespace n ON n.oid = o.relnamespace WHERE s.outbox = $1 AND s.name = $2",
            self.outbox.own("slot")
        );
        let mut conn = self.outbox.acquire().await?;
        let name = sqlx::query_scalar(AssertSqlSafe(sql))
            .persistent(!self.outbox.pooled)
            .bind(&self.columns.outbox)
            .bind(self.name)
            .fetch_optional(conn.get())
            .await
            .map_err(doing("looking up the table"))?;
        conn.commit().await?;
        Ok(name)
    }

    /// The statement that copies rows from the table that was read before into the one that has its name now: those that are
    /// not finished, and not there already. None where there are none.
    async fn left_behind(&self, before: &Contents) -> Result<Option<String>> {
        let failed = doing("looking up the table that was read before");
        let spec = &self.columns.spec;
        let mut conn = self.outbox.acquire().await?;
        // Numbers are assigned again: those of the old table may be used in the new one.
        let found: Option<(String, Option<String>)> = sqlx::query_as(
            "SELECT format('%I.%I', n.nspname, o.relname), (SELECT string_agg(format('%I', a.attname), ', ' ORDER BY a.attnum) \
               FROM pg_attribute a JOIN pg_attribute b ON b.attname = a.attname WHERE a.attrelid = o.oid AND a.attnum > 0 \
               AND NOT a.attisdropped AND b.attrelid = to_regclass($2) AND NOT b.attisdropped AND b.attgenerated = '' \
               AND NOT (a.attname = $3 AND (b.atthasdef OR b.attidentity <> ''))) \
             FROM pg_class o JOIN pg_namespace n ON n.oid = o.relnamespace WHERE o.oid = $1::bigint::oid",
        )
        .persistent(!self.outbox.pooled)
        .bind(before.table)
        .bind(&self.columns.table)
        .bind(spec.seq.as_deref())
        .fetch_optional(conn.get())
        .await
        .map_err(&failed)?;
        let Some((old, Some(columns))) = found else { return Ok(None) };
        let (new, id) = (&self.columns.table, quote(&spec.id));
        let rows = format!(
            "FROM {old} t WHERE {open} AND NOT EXISTS (SELECT FROM {new} n WHERE n.{id} = t.{id})",
            open = self.open
        );
        let sql = format!("SELECT EXISTS (SELECT {rows})");
        let any: bool = sqlx::query_scalar(AssertSqlSafe(sql))
            .persistent(!self.outbox.pooled)
            .fetch_one(conn.get())
            .await
            .map_err(&failed)?;
        conn.commit().await?;
        Ok(any.then(|| format!("INSERT INTO {new} ({columns}) SELECT {columns} {rows}")))
    }

    /// The same for a first start, with a slot that exists already: what was committed before the publication had
    /// the table cannot be read from it.
    pub(super) async fn verify_given(&self, stored: &Stored) -> Result<()> {
        match check(self.outbox, self.columns, self.publication).await? {
            Publication::Fits => Ok(()),
            Publication::Missing => {
                let what = format!(
                    "the slot `{}` exists, but its publication `{}` does not: the slot cannot be read without it",
                    self.name, self.publication
                );
                Err(self.gap(Code::PUBLICATION_LOST, what, None, stored).await)
            }
            Publication::Unfit(unfit) => {
                Err(self.gap(unfit.code, unfit.what, Some(unfit.mend), stored).await)
            }
        }
    }

    /// What the publication has now.
    pub(super) async fn contents_now(&self) -> Result<Option<Contents>> {
        Ok(self.state().await?.and_then(|state| state.found))
    }

    async fn state(&self) -> Result<Option<PublicationState>> {
        let failed = doing("reading the publication");
        let sql = format!(
            "SELECT s.published::text AS stored, {}::text AS found, \
               EXISTS (SELECT FROM pg_class l WHERE l.relpersistence = 'u' AND (l.oid = to_regclass($3) \
                 OR l.oid IN (SELECT relid FROM pg_partition_tree(to_regclass($3))))) AS unlogged \
             FROM {} s WHERE s.outbox = $1 AND s.name = $2",
            self.contents,
            self.outbox.own("slot")
        );
        let mut conn = self.outbox.acquire().await?;
        let row = sqlx::query(AssertSqlSafe(sql))
            .persistent(!self.outbox.pooled)
            .bind(&self.columns.outbox)
            .bind(self.name)
            .bind(&self.columns.table)
            .fetch_optional(conn.get())
            .await
            .map_err(&failed)?;
        conn.commit().await?;
        let Some(row) = row else { return Ok(None) };
        let read = |name: &str| {
            let text: Option<String> = row.try_get(name).map_err(&failed)?;
            // What another version has written is compared with nothing.
            Ok::<_, Error>(text.and_then(|text| serde_json::from_str(&text).ok()))
        };
        Ok(Some(PublicationState {
            stored: read("stored")?,
            found: read("found")?,
            unlogged: row.try_get("unlogged").map_err(&failed)?,
        }))
    }

    async fn adopt(&self, contents: &Contents) -> Result<()> {
        let sql = format!(
            "UPDATE {} SET published = $3::jsonb WHERE outbox = $1 AND name = $2",
            self.outbox.own("slot")
        );
        let mut conn = self.outbox.acquire().await?;
        sqlx::query(AssertSqlSafe(sql))
            .persistent(!self.outbox.pooled)
            .bind(&self.columns.outbox)
            .bind(self.name)
            .bind(to_json(Some(contents)))
            .execute(conn.get())
            .await
            .map_err(doing("storing the contents of the publication"))?;
        conn.commit().await
    }

    pub(super) async fn gap(&self, code: Code, what: String, mend: Option<String>, stored: &Stored) -> Error {
        let advice = slot::recovery(self.outbox, self.columns, self.name, stored).await;
        match mend {
            Some(sql) => Error::permanent(
                code,
                format!("{what}. {advice}. Before that, run the fix at the end of this message"),
            )
            .with_remedy(sql),
            None => Error::permanent(code, format!("{what}. {advice}")),
        }
    }

    /// Creates the publication if it does not exist, or refuses one that would leave something out. Returns whether it was created.
    pub(super) async fn ensure(&self) -> Result<bool> {
        match check(self.outbox, self.columns, self.publication).await? {
            Publication::Fits => Ok(false),
            Publication::Unfit(unfit) => Err(unfit.error()),
            Publication::Missing => self.create().await,
        }
    }

    async fn create(&self) -> Result<bool> {
        let sql = create(self.columns, self.publication);
        match self.run(&sql, "creating the publication").await {
            Ok(()) => {}
            // Another relay was faster.
            Err(error) if error.sqlstate() == Some(sqlstate::DUPLICATE_OBJECT) => return Ok(false),
            Err(error) if error.class() == Class::Retryable => return Err(error),
            Err(error) => {
                let message =
                    format!("{}. A role that has this right must create the publication", error.message());
                return Err(Error::permanent(Code::NO_PUBLICATION, message).with_remedy(sql));
            }
        }
        tracing::info!(
            publication = self.publication,
            table = self.columns.outbox,
            "created the publication"
        );
        Ok(true)
    }

    /// Drops what [`Reader::ensure`] has created, because the start was refused later.
    pub(super) async fn take_back(&self) {
        let sql = PgOutbox::drop_publication(self.publication);
        if let Err(error) = self.run(&sql, "dropping the publication").await {
            tracing::warn!(publication = self.publication, %error, "the publication could not be dropped. To drop it: {sql}");
        }
    }

    async fn run(&self, sql: &str, what: &'static str) -> Result<()> {
        let mut conn = self.outbox.acquire().await?;
        sqlx::query(AssertSqlSafe(sql.to_owned()))
            .persistent(!self.outbox.pooled)
            .execute(conn.get())
            .await
            .map_err(doing(what))?;
        conn.commit().await
    }
}

/// As it is stored.
pub(super) fn to_json(contents: Option<&Contents>) -> Option<String> {
    contents.and_then(|contents| serde_json::to_string(contents).ok())
}

/// Refuses at the start what would be refused later, before anything is written.
pub(super) async fn refuse(reader: &Reader<'_>, stored: Option<&Stored>, has_slot: bool) -> Result<()> {
    match stored {
        Some(stored) if stored.has_position() => reader.verify(stored).await,
        // Refused once the reader is known, so that it can be recovered.
        _ if has_slot => Ok(()),
        _ => match check(reader.outbox, reader.columns, reader.publication).await? {
            Publication::Unfit(unfit) => Err(unfit.error()),
            Publication::Missing | Publication::Fits => Ok(()),
        },
    }
}

impl Stored {
    /// Whether something was read from the slot, or may have been.
    pub(super) fn has_position(&self) -> bool {
        match self.phase {
            Phase::New => false,
            Phase::Snapshot => self.lsn.is_some(),
            Phase::Streaming => true,
        }
    }
}

/// The statement that makes it.
pub(crate) fn create(c: &EventColumns, name: &str) -> String {
    format!(
        "CREATE PUBLICATION {} FOR TABLE {} WITH (publish = 'insert', publish_via_partition_root = true)",
        quote(name),
        c.table
    )
}

/// Whether a publication will do.
#[derive(Debug)]
pub(crate) enum Publication {
    Missing,
    Unfit(Unfit),
    Fits,
}

/// What is wrong with a publication, and the statement against it.
#[derive(Debug)]
pub(crate) struct Unfit {
    code: Code,
    what: String,
    mend: String,
}

impl Unfit {
    /// For a start that has lost nothing yet.
    pub(crate) fn error(&self) -> Error {
        Error::permanent(self.code.clone(), &self.what).with_remedy(&self.mend)
    }
}

/// Looks at a publication.
pub(crate) async fn check(outbox: &PgOutbox, c: &EventColumns, name: &str) -> Result<Publication> {
    let failed = doing("checking the publication");
    let mut conn = outbox.acquire().await?;
    let row = sqlx::query(
        "SELECT p.pubinsert, concat_ws(', ', 'insert', CASE WHEN p.pubupdate THEN 'update' END, \
             CASE WHEN p.pubdelete THEN 'delete' END, CASE WHEN p.pubtruncate THEN 'truncate' END) AS publishes, \
           p.pubviaroot, c.relkind = 'p' AS partitioned, \
           coalesce((SELECT format('%I.%I', m.nspname, l.relname) FROM pg_partition_tree(c.oid) f \
               JOIN pg_class l ON l.oid = f.relid JOIN pg_namespace m ON m.oid = l.relnamespace \
               WHERE l.relpersistence = 'u' LIMIT 1), \
             CASE c.relpersistence WHEN 'u' THEN format('%I.%I', n.nspname, c.relname) END) AS unlogged, \
           EXISTS (SELECT FROM pg_publication_tables t WHERE t.pubname = p.pubname AND t.schemaname = n.nspname \
             AND t.tablename = c.relname) AS listed, \
           current_setting('server_version_num')::int >= 150000 AS has_filters \
         FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace \
           LEFT JOIN pg_publication p ON p.pubname = $2 WHERE c.oid = to_regclass($1)",
    )
    .persistent(!outbox.pooled)
    .bind(&c.table)
    .bind(name)
    .fetch_optional(conn.get())
    .await
    .map_err(&failed)?;
    // Renamed: it is read on under its number, until a connection must find it by its name.
    let Some(row) = row else { return Ok(Publication::Fits) };
    let flag = |name: &str| row.try_get::<Option<bool>, _>(name).map_err(&failed);
    let unfit = |code: Code, what: String, mend: String| Ok(Publication::Unfit(Unfit { code, what, mend }));
    let (table, shown, publication) = (&c.table, &c.outbox, quote(name));
    // Not SET TABLE: the publication may have other tables.
    let again = format!(
        "ALTER PUBLICATION {publication} DROP TABLE {table}; ALTER PUBLICATION {publication} ADD TABLE {table}"
    );
    if let Some(unlogged) = row.try_get::<Option<String>, _>("unlogged").map_err(&failed)? {
        return unfit(
            Code::UNLOGGED,
            format!("{unlogged} is unlogged, so the WAL does not contain its rows"),
            format!("ALTER TABLE {unlogged} SET LOGGED"),
        );
    }
    let Some(publishes_inserts) = flag("pubinsert")? else { return Ok(Publication::Missing) };
    if !publishes_inserts {
        // Another program may need what it publishes besides.
        let publishes: String = row.try_get("publishes").map_err(&failed)?;
        return unfit(
            Code::BAD_PUBLICATION,
            format!("the publication `{name}` does not publish inserts"),
            format!("ALTER PUBLICATION {publication} SET (publish = '{publishes}')"),
        );
    }
    if flag("partitioned")? == Some(true) && flag("pubviaroot")? != Some(true) {
        return unfit(
            Code::BAD_PUBLICATION,
            format!(
                "{shown} is partitioned, and the publication `{name}` would publish its partitions under their own names"
            ),
            format!("ALTER PUBLICATION {publication} SET (publish_via_partition_root = true)"),
        );
    }
    if flag("listed")? != Some(true) {
        return unfit(
            Code::BAD_PUBLICATION,
            format!("the publication `{name}` does not contain the table {shown}"),
            format!("ALTER PUBLICATION {publication} ADD TABLE {table}"),
        );
    }
    if flag("has_filters")? == Some(true) {
        let row = sqlx::query(
            "SELECT t.rowfilter IS NOT NULL AS filtered, t.attnames::text[] AS columns FROM pg_publication_tables t \
             JOIN pg_class c ON c.oid = to_regclass($1) JOIN pg_namespace n ON n.oid = c.relnamespace \
             WHERE t.pubname = $2 AND t.schemaname = n.nspname AND t.tablename = c.relname",
        )
        .persistent(!outbox.pooled)
        .bind(table)
        .bind(name)
        .fetch_optional(conn.get())
        .await
        .map_err(&failed)?;
        // Changed since the statement above.
        let Some(row) = row else { return Ok(Publication::Missing) };
        if row.try_get("filtered").map_err(&failed)? {
            return unfit(
                Code::BAD_PUBLICATION,
                format!("the publication `{name}` filters rows of {shown}"),
                again,
            );
        }
        let published: Vec<String> = row.try_get("columns").map_err(&failed)?;
        let missing: Vec<&str> = c
            .spec
            .event_columns()
            .into_iter()
            .filter(|column| !published.iter().any(|name| name == column))
            .collect();
        if !missing.is_empty() {
            return unfit(
                Code::BAD_PUBLICATION,
                format!(
                    "the publication `{name}` leaves out columns of {shown} that the mapping needs: {}",
                    missing.join(", ")
                ),
                again,
            );
        }
    }
    conn.commit().await?;
    Ok(Publication::Fits)
}
