//! Versioned migrations: plain SQL, applied once each, in one transaction, one process at a time.
//!
//! A recorded version is not trusted: the objects that its statements create are looked up, and created again if they were
//! dropped. So a statement must be of a kind that `statements` knows.
//!
//! | module | what lives there |
//! | --- | --- |
//! | `statements` | a migration's statements, and the object that each creates |
//! | `missing` | objects that do not exist any more |
//! | `sequence` | a sequence that is behind its table |

mod missing;
pub(crate) mod sequence;
mod statements;

use std::{collections::HashSet, time::Duration};

use airtight_core::{
    Code, Error, Result,
    group::GroupKind,
    table::{Shape, literal, quote},
};
use sqlx::AssertSqlSafe;

use self::{
    missing::{Later, There},
    statements::{Makes, On, statements},
};
use crate::{PgOptions, PgOutbox, error::doing, groups, log::table_partitions::is_locked};

/// (version, scope, name, SQL). A version is applied per schema or per outbox.
const MIGRATIONS: [(i32, Scope, &str, &str); 13] = [
    (1, Scope::Schema, "what all outboxes share", include_str!("../migrations/0000_shared.sql")),
    (2, Scope::Outbox(Shape::Queue), "the outbox", include_str!("../migrations/0001_outbox.sql")),
    (3, Scope::Schema, "consumers", include_str!("../migrations/0002_consumers.sql")),
    (4, Scope::Outbox(Shape::Log), "the log", include_str!("../migrations/0003_log.sql")),
    (5, Scope::Schema, "slots, and events without a table", include_str!("../migrations/0004_cdc.sql")),
    (6, Scope::Schema, "by what consumers know their log", include_str!("../migrations/0005_witness.sql")),
    (7, Scope::Schema, "what is refused", include_str!("../migrations/0006_refuse.sql")),
    (
        8,
        Scope::Outbox(Shape::Queue),
        "the outbox refuses it",
        include_str!("../migrations/0007_queue_refuse.sql"),
    ),
    (9, Scope::Outbox(Shape::Log), "the log refuses it", include_str!("../migrations/0008_log_refuse.sql")),
    (10, Scope::Schema, "replays", include_str!("../migrations/0009_replays.sql")),
    (11, Scope::Schema, "what publications had", include_str!("../migrations/0010_published.sql")),
    (12, Scope::Schema, "how far relays have read", include_str!("../migrations/0011_marks.sql")),
    (13, Scope::Outbox(Shape::Queue), "relays read the queue", include_str!("../migrations/0012_reads.sql")),
];

/// DDL that waits for an open publisher would make everybody behind it wait: it lets go, and comes again.
const LOCK_TIMEOUT: &str = "SET LOCAL lock_timeout = '1s'";

/// How often `migrate` comes again: for about half a minute.
const TRIES: u32 = 16;

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
    /// The command that migrates this outbox, as a message says it.
    migrate: String,
}

impl<'a> Names<'a> {
    fn of(options: &'a PgOptions) -> Self {
        Self { schema: &options.schema, table: &options.table, migrate: migrate_command(options) }
    }

    /// What a name in a migration's text stands for, without its schema.
    fn plain(&self, name: &str) -> String {
        let inner = name.strip_prefix('{').and_then(|name| name.strip_suffix('}')).unwrap_or_default();
        match inner.split_once(':') {
            Some(("function", name)) => function_name(self.table, name),
            Some(("outbox", "first")) => format!("{}_1", self.table),
            Some((_, suffix)) => format!("{}_{suffix}", self.table),
            None if inner == "outbox" => self.table.to_owned(),
            None if inner == "sequence" => format!("{}_seq", self.table),
            None => name.strip_prefix("{schema}.").unwrap_or(name).to_owned(),
        }
    }

    fn fill(&self, sql: &str) -> String {
        let schema = quote(self.schema);
        let object = |suffix: &str| quote(&format!("{}_{suffix}", self.table));
        let function = |name: &str| format!("{schema}.{}", quote(&function_name(self.table, name)));
        let mut sql = sql
            .replace("{outbox}", &format!("{schema}.{}", quote(self.table)))
            .replace("{schema}", &schema)
            .replace("{literal:schema}", &literal(self.schema))
            .replace("{literal:channel}", &literal(&channel(self.schema, self.table)))
            .replace("{literal:outbox}", &literal(&format!("{}.{}", self.schema, self.table)))
            .replace("{literal:sequence}", &literal(&format!("{schema}.{}", object("seq"))))
            .replace("{sequence}", &format!("{schema}.{}", object("seq")))
            .replace("{literal:migrate}", &literal(&self.migrate))
            .replace("{trigger:refuse}", &object("refuse"))
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
        for name in ["publish", "publish_bytes", "notify", "backlog", "refuse_clash"] {
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
            "INSERT INTO {}.migration (outbox, version) VALUES ({}, {version}) ON CONFLICT DO NOTHING;\n",
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

/// A function's name. The plain names are the default outbox's; another outbox in the schema has functions of its own.
pub(crate) fn function_name(table: &str, name: &str) -> String {
    if table == "outbox" { name.to_owned() } else { format!("{name}_{table}") }
}

/// The command that migrates an outbox, as a message says it.
pub(crate) fn migrate_command(options: &PgOptions) -> String {
    if options.spec.is_some() {
        return "`airtight migrate -c FILE`".to_owned();
    }
    let mut command = "airtight migrate".to_owned();
    for (flag, value, default) in
        [("schema", &options.schema, "airtight"), ("table", &options.table, "outbox")]
    {
        if value != default {
            command.push_str(&format!(" --{flag} {}", for_shell(value)));
        }
    }
    if options.shape == Shape::Log {
        command.push_str(" --shape log");
    }
    format!("`{command}`")
}

fn for_shell(word: &str) -> String {
    if word.chars().all(|letter| letter.is_ascii_alphanumeric() || "_-.".contains(letter)) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

impl PgOutbox {
    /// Everything that `migrate` would run on an empty database, for those who apply SQL themselves.
    pub fn migration_sql(options: &PgOptions) -> String {
        let names = Names::of(options);
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

    /// Applies what is missing, and makes again what was dropped. Returns a line for each thing done.
    pub(crate) async fn apply_migrations(&self) -> Result<Vec<String>> {
        let mut wait = Duration::from_millis(100);
        for _ in 0..TRIES {
            if let Some((mut done, later)) = self.try_migrations().await? {
                done.extend(self.make_indexes(later).await?);
                done.extend(self.mend_sequence().await?);
                return Ok(done);
            }
            tokio::time::sleep(wait).await;
            wait = (wait * 2).min(Duration::from_secs(1));
        }
        Err(self.kept_locked())
    }

    /// The error for a lock that could not be had.
    fn kept_locked(&self) -> Error {
        Error::retryable(
            Code::LOCKED,
            format!(
                "open transactions have kept {} locked for half a minute: end them (SELECT pid, xact_start, query FROM \
                 pg_stat_activity WHERE xact_start IS NOT NULL ORDER BY xact_start), and run {} again",
                self.spec.display_name(),
                migrate_command(&self.options)
            ),
        )
    }

    /// One try: what was done, and what is to be done when that is committed. None when a lock could not be had.
    async fn try_migrations(&self) -> Result<Option<(Vec<String>, Vec<Later>)>> {
        let names = Names::of(&self.options);
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
        let there = There::load(self, &mut conn).await?;
        let shape = shape_of(&applied, &self.options.table).or_else(|| there.shape(&self.options.table));
        if let (None, Some(shape)) = (&self.options.spec, shape) {
            self.refuse_other(shape)?;
        }

        let (mut script, mut done, later) = self.plan(&names, &applied, &there);
        if let (None, Some(wanted)) = (&self.options.spec, self.options.notify)
            && self.is_notifying(&mut conn).await? != wanted
        {
            script.push(names.notify(wanted));
            let what = if wanted { "notifies on every insert" } else { "no longer notifies" };
            done.push(format!("{} {what}", self.spec.display_name()));
        }
        if !script.is_empty() {
            script.insert(0, LOCK_TIMEOUT.to_owned());
        }
        for sql in script {
            match sqlx::raw_sql(AssertSqlSafe(sql)).execute(conn.get()).await {
                Ok(_) => {}
                Err(error) if is_locked(&error) => return Ok(None),
                Err(error) => return Err(doing("migrating")(error)),
            }
        }
        conn.commit().await?;
        Ok(Some((done, later)))
    }

    /// The statements that are to be run, a line for each thing they do, and indexes that come after.
    fn plan(
        &self,
        names: &Names<'_>,
        applied: &[(String, i32)],
        there: &There,
    ) -> (Vec<String>, Vec<String>, Vec<Later>) {
        let (mut script, mut done, mut later) = (Vec::new(), Vec::new(), Vec::new());
        let mut made: HashSet<String> = HashSet::new();
        for (version, scope, name, text) in MIGRATIONS {
            if !scope.concerns(&self.options) {
                continue;
            }
            let known = applied.contains(&(names.scope(scope).to_owned(), version));
            for statement in statements(text) {
                let filled = names.fill(statement.text);
                let lacks = there.lacks(&statement, names);
                // Concurrently, because writers would wait for it otherwise. Not on the partitioned table of a log, where this is not possible.
                let beside = |table: &str| {
                    let over_partitions = there.partitioned && table == "{outbox}";
                    !over_partitions && !made.contains(&names.plain(table))
                };
                match (&statement.makes, lacks) {
                    (Makes::Once, _) if !known => script.push(filled),
                    (Makes::Index(index, On(table)), Some(what)) if beside(table) => {
                        later.push(Later::index(there, names, &names.plain(index), &filled, &what));
                    }
                    (Makes::Floor, Some(what)) => {
                        script.push(names.fill(FLOOR));
                        if known {
                            done.push(format!("created {}, which was missing", what.what));
                        }
                    }
                    (Makes::Columns(..), Some(what)) => {
                        script.push(filled.replace("ADD COLUMN ", "ADD COLUMN IF NOT EXISTS "));
                        if known {
                            done.push(format!("created {}, which was missing", what.what));
                        }
                    }
                    (makes, Some(what)) => {
                        if known {
                            let gone =
                                if matches!(makes, Makes::Table(_)) { ": its contents are lost" } else { "" };
                            done.push(format!("created {}, which was missing{gone}", what.what));
                        }
                        script.push(filled);
                        if let Makes::Table(name) | Makes::Sequence(name) | Makes::Function(name) = makes {
                            made.insert(names.plain(name));
                        }
                    }
                    (Makes::Function(function), None)
                        if statement.replaces && (!known || made.contains(&names.plain(function))) =>
                    {
                        script.push(filled);
                    }
                    (Makes::Along, None) if made.contains(names.table) => script.push(filled),
                    // Columns and the row of a table that is made just now.
                    (Makes::Columns(On(table), _), None) if made.contains(&names.plain(table)) => {
                        script.push(filled);
                    }
                    (Makes::Floor, None) if made.contains("log") => script.push(names.fill(FLOOR)),
                    _ => {}
                }
            }
            if !known {
                script.push(names.record(version, scope));
                done.push(format!("{}: applied {version} ({name})", self.options.schema));
            }
        }
        for (column, default) in there.defaults(self) {
            script.push(
                names.fill(&format!("ALTER TABLE {{outbox}} ALTER COLUMN {column} SET DEFAULT {default}")),
            );
            if column == "seq" {
                script.push(names.fill("ALTER SEQUENCE {sequence} OWNED BY {outbox}.seq"));
            }
            done.push(format!(
                "created the default of {column} in {}, which was missing",
                self.spec.display_name()
            ));
        }
        if self.options.spec.is_none() && self.options.shape == Shape::Log && made.contains(names.table) {
            // Nobody knows what the table held. Consumers that were behind others have missed it.
            script.push(names.fill(&floor_of_consumers()));
        }
        (script, done, later)
    }
}

/// Up to where events may have been removed, if the floor is not stored: before the oldest event that exists.
const FLOOR: &str = "INSERT INTO {schema}.log (outbox, floor) SELECT {literal:outbox}, coalesce((SELECT min(seq) - 1 FROM {outbox}), \
     (SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM {sequence})) ON CONFLICT DO NOTHING";

fn floor_of_consumers() -> String {
    format!(
        "UPDATE {{schema}}.log SET floor = greatest(floor, (SELECT max(last_seq) FROM {{schema}}.partition \
         WHERE outbox = {{literal:outbox}} AND {})) WHERE outbox = {{literal:outbox}}",
        groups::is_kind("grp", GroupKind::Log)
    )
}

impl PgOutbox {
    /// The same outbox, with the shape that the database has recorded. For tools, which have no configured shape. Before
    /// `migrate` nothing is recorded, and the shape stays as it was.
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
        let mut shape = shape_of(&applied, &self.options.table);
        if shape.is_none() {
            shape = There::load(&self, &mut conn).await?.shape(&self.options.table);
        }
        conn.commit().await?;
        if let Some(shape) = shape {
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
            Code::WRONG_SHAPE,
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
                Code::SERVER_TOO_OLD,
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
    /// A foreign table needs airtight's own tables, but no second outbox.
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
            Code::SCHEMA_TOO_NEW,
            format!("schema {schema} is at version {newest}, this program knows up to {known}"),
        )
        .with_remedy("use a newer airtight")),
        _ => Ok(()),
    }
}

/// Runs a script of several statements.
async fn run(conn: &mut crate::outbox::Conn, sql: String, what: &'static str) -> Result<()> {
    sqlx::raw_sql(AssertSqlSafe(sql)).execute(conn.get()).await.map_err(doing(what))?;
    Ok(())
}
