//! Versioned migrations: plain SQL, applied once each, in one transaction, one process at a time.

use airtight_core::{
    Error, Result,
    table::{Shape, literal, quote},
};
use sqlx::AssertSqlSafe;

use crate::{PgOptions, PgOutbox, error::doing};

/// (version, scope, name, SQL). A version is applied per schema or per outbox.
const MIGRATIONS: [(i32, Scope, &str, &str); 8] = [
    (1, Scope::Schema, "what all outboxes share", include_str!("../migrations/0000_shared.sql")),
    (2, Scope::Outbox(Shape::Queue), "the outbox", include_str!("../migrations/0001_outbox.sql")),
    (3, Scope::Schema, "consumers", include_str!("../migrations/0002_consumers.sql")),
    (4, Scope::Outbox(Shape::Log), "the log", include_str!("../migrations/0003_log.sql")),
    (5, Scope::Schema, "slots, and events without a table", include_str!("../migrations/0004_cdc.sql")),
    (6, Scope::Schema, "by what consumers know their log", include_str!("../migrations/0005_witness.sql")),
    (10, Scope::Schema, "replays", include_str!("../migrations/0009_replays.sql")),
    (11, Scope::Schema, "what publications had", include_str!("../migrations/0010_published.sql")),
];

/// Stored generated columns came with 12, `gen_random_uuid` with 13.
const OLDEST_SERVER: i32 = 130_000;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Scope {
    Schema,
    /// An outbox of this shape.
    Outbox(Shape),
}

/// What a migration's placeholders stand for.
struct Names<'a> {
    schema: &'a str,
    table: &'a str,
}

impl Names<'_> {
    fn fill(&self, sql: &str) -> String {
        let schema = quote(self.schema);
        let object = |suffix: &str| quote(&format!("{}_{suffix}", self.table));
        // The plain names are the default outbox's; another outbox in the schema has functions of its own.
        let function = |name: &str| {
            let own = if self.table == "outbox" { name.to_owned() } else { format!("{name}_{}", self.table) };
            format!("{schema}.{}", quote(&own))
        };
        let mut sql = sql
            .replace("{outbox}", &format!("{schema}.{}", quote(self.table)))
            .replace("{schema}", &schema)
            .replace("{literal:channel}", &literal(&channel(self.schema, self.table)))
            .replace("{literal:outbox}", &literal(&format!("{}.{}", self.schema, self.table)))
            .replace("{literal:sequence}", &literal(&format!("{schema}.{}", object("seq"))))
            .replace("{sequence}", &format!("{schema}.{}", object("seq")))
            .replace("{outbox:default}", &format!("{schema}.{}", object("default")))
            .replace("{outbox:first}", &format!("{schema}.{}", object("1")));
        for index in [
            "claim",
            "claim_stream",
            "waiting",
            "waiting_stream",
            "waiting_key",
            "held",
            "dead",
            "created",
            "default_id",
            "first_id",
        ] {
            sql = sql.replace(&format!("{{index:{index}}}"), &object(index));
        }
        for name in ["publish", "publish_bytes", "notify", "backlog"] {
            sql = sql.replace(&format!("{{function:{name}}}"), &function(name));
        }
        sql
    }

    fn scope(&self, scope: Scope) -> &str {
        match scope {
            Scope::Schema => "",
            Scope::Outbox(_) => self.table,
        }
    }

    fn bookkeeping(&self) -> String {
        let schema = quote(self.schema);
        format!(
            "CREATE SCHEMA IF NOT EXISTS {schema};\n\
             CREATE TABLE IF NOT EXISTS {schema}.migration (\n    \
                 outbox text NOT NULL,\n    version integer NOT NULL,\n    \
                 applied_at timestamptz NOT NULL DEFAULT now(),\n    PRIMARY KEY (outbox, version)\n);\n"
        )
    }

    fn record(&self, version: i32, scope: Scope) -> String {
        format!(
            "INSERT INTO {}.migration (outbox, version) VALUES ({}, {version});\n",
            quote(self.schema),
            literal(self.scope(scope))
        )
    }

    fn notify(&self, on: bool) -> String {
        let schema = quote(self.schema);
        let (table, trigger) = (quote(self.table), quote(&format!("{}_notify", self.table)));
        let drop = format!("DROP TRIGGER IF EXISTS {trigger} ON {schema}.{table};\n");
        if !on {
            return drop;
        }
        self.fill(&format!(
            "{drop}CREATE TRIGGER {trigger} AFTER INSERT ON {{outbox}} FOR EACH STATEMENT EXECUTE FUNCTION {{function:notify}}();\n"
        ))
    }
}

/// The channel that an outbox notifies on. The server refuses names of more than 63 bytes; two outboxes whose
/// names are cut to the same wake each other up, which does no harm.
pub(crate) fn channel(schema: &str, table: &str) -> String {
    let name = format!("{schema}_{table}");
    let end = (0..=name.len().min(63)).rev().find(|end| name.is_char_boundary(*end)).unwrap_or(0);
    name[..end].to_owned()
}

impl PgOutbox {
    /// Everything `migrate` would run on an empty database, for those who apply SQL by hand.
    pub fn migration_sql(options: &PgOptions) -> String {
        let names = Names { schema: &options.schema, table: &options.table };
        let mut sql = format!("BEGIN;\n\n{}\n", names.bookkeeping());
        for (version, scope, name, text) in MIGRATIONS {
            if !scope.concerns(options) {
                continue;
            }
            sql.push_str(&format!("-- {version}: {name}\n{}\n", names.fill(text)));
            sql.push_str(&names.record(version, scope));
            sql.push('\n');
        }
        if options.notify == Some(true) {
            sql.push_str(&format!("{}\n", names.notify(true)));
        }
        sql.push_str("COMMIT;\n");
        sql
    }

    /// Applies what is missing. Returns a line for each thing done.
    pub(crate) async fn apply_migrations(&self) -> Result<Vec<String>> {
        let names = Names { schema: &self.options.schema, table: &self.options.table };
        let mut conn = self.begin().await?;
        self.refuse_old_server(&mut conn).await?;
        // One process at a time; the others find everything done.
        sqlx::query("SELECT pg_advisory_xact_lock(hashtextextended('airtight migrate ' || $1, 0))")
            .persistent(!self.pooled)
            .bind(&self.options.schema)
            .execute(conn.get())
            .await
            .map_err(doing("waiting for other migrations"))?;
        run(&mut conn, names.bookkeeping(), "preparing migrations").await?;

        let applied = self.applied(&mut conn).await?;
        refuse_newer(&applied, &self.options.schema)?;
        if let (None, Some(shape)) = (&self.options.spec, shape_of(&applied, &self.options.table)) {
            self.refuse_other(shape)?;
        }

        let mut done = Vec::new();
        for (version, scope, name, text) in MIGRATIONS {
            let key = (names.scope(scope).to_owned(), version);
            if applied.contains(&key) || !scope.concerns(&self.options) {
                continue;
            }
            run(&mut conn, names.fill(text), "migrating").await?;
            run(&mut conn, names.record(version, scope), "migrating").await?;
            done.push(format!("{}: applied {version} ({name})", self.options.schema));
        }
        if let (None, Some(wanted)) = (&self.options.spec, self.options.notify)
            && self.is_notifying(&mut conn).await? != wanted
        {
            run(&mut conn, names.notify(wanted), "setting up NOTIFY").await?;
            let what = if wanted { "notifies on every insert" } else { "no longer notifies" };
            done.push(format!("{} {what}", self.spec.display_name()));
        }
        conn.commit().await?;
        Ok(done)
    }
}

impl PgOutbox {
    /// The same outbox, of the shape that the database says it has. For tools, which are not told; before
    /// `migrate` there is nothing to go by, and it stays as it was.
    pub async fn detect(mut self) -> Result<Self> {
        if self.options.spec.is_some() {
            return Ok(self);
        }
        let mut conn = self.acquire().await?;
        let there: bool = sqlx::query_scalar("SELECT to_regclass($1) IS NOT NULL")
            .persistent(!self.pooled)
            .bind(self.own("migration"))
            .fetch_one(conn.get())
            .await
            .map_err(doing("looking for migrations"))?;
        let applied = if there { self.applied(&mut conn).await? } else { Vec::new() };
        conn.commit().await?;
        if let Some(shape) = shape_of(&applied, &self.options.table) {
            let options = PgOptions { shape, ..(*self.options).clone() };
            self = Self::build(self.pool, options, self.pooled)?;
        }
        Ok(self)
    }

    async fn applied(&self, conn: &mut crate::outbox::Conn) -> Result<Vec<(String, i32)>> {
        let sql = format!("SELECT outbox, version FROM {}", self.own("migration"));
        sqlx::query_as(AssertSqlSafe(sql))
            .persistent(!self.pooled)
            .fetch_all(conn.get())
            .await
            .map_err(doing("reading applied migrations"))
    }

    fn refuse_other(&self, shape: Shape) -> Result<()> {
        if shape == self.options.shape {
            return Ok(());
        }
        let (name, is, wanted) = (self.spec.display_name(), shape.as_str(), self.options.shape.as_str());
        Err(Error::permanent(
            "other_shape",
            format!("{name} is a {is} already; for a {wanted} give another table (`--table NAME`) or schema"),
        ))
    }

    async fn refuse_old_server(&self, conn: &mut crate::outbox::Conn) -> Result<()> {
        let version: i32 = sqlx::query_scalar("SELECT current_setting('server_version_num')::int")
            .persistent(!self.pooled)
            .fetch_one(conn.get())
            .await
            .map_err(doing("reading the server's version"))?;
        if version < OLDEST_SERVER {
            return Err(Error::permanent(
                "server_too_old",
                format!("this server is PostgreSQL {}; airtight needs 13 or newer", version / 10_000),
            ));
        }
        Ok(())
    }

    /// Whether the outbox has the trigger that wakes relays up.
    pub(crate) async fn is_notifying(&self, conn: &mut crate::outbox::Conn) -> Result<bool> {
        let trigger = format!("{}_notify", self.options.table);
        sqlx::query_scalar(
            "SELECT EXISTS (SELECT FROM pg_trigger g JOIN pg_class c ON c.oid = g.tgrelid \
             JOIN pg_namespace n ON n.oid = c.relnamespace \
             WHERE n.nspname = $1 AND c.relname = $2 AND g.tgname = $3)",
        )
        .persistent(!self.pooled)
        .bind(&self.options.schema)
        .bind(&self.options.table)
        .bind(trigger)
        .fetch_one(conn.get())
        .await
        .map_err(doing("looking for the NOTIFY trigger"))
    }
}

impl Scope {
    /// A foreign table needs airtight's own tables, but no outbox beside it.
    fn concerns(self, options: &PgOptions) -> bool {
        match self {
            Self::Schema => true,
            Self::Outbox(shape) => options.spec.is_none() && options.shape == shape,
        }
    }
}

/// The shape that an outbox was made with, by the migrations that were applied to it.
fn shape_of(applied: &[(String, i32)], table: &str) -> Option<Shape> {
    MIGRATIONS.iter().find_map(|(version, scope, ..)| match scope {
        Scope::Outbox(shape) if applied.contains(&(table.to_owned(), *version)) => Some(*shape),
        _ => None,
    })
}

/// A schema that a newer airtight has migrated may mean things that this one does not know.
fn refuse_newer(applied: &[(String, i32)], schema: &str) -> Result<()> {
    let known = MIGRATIONS.iter().map(|(version, ..)| *version).max().unwrap_or(0);
    match applied.iter().map(|(_, version)| *version).max() {
        Some(newest) if newest > known => Err(Error::permanent(
            "schema_too_new",
            format!(
                "schema {schema} is at version {newest}, this program knows up to {known}: use a newer airtight"
            ),
        )),
        _ => Ok(()),
    }
}

/// Runs a script of several statements.
async fn run(conn: &mut crate::outbox::Conn, sql: String, what: &'static str) -> Result<()> {
    sqlx::raw_sql(AssertSqlSafe(sql)).execute(conn.get()).await.map_err(doing(what))?;
    Ok(())
}
