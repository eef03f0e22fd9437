//! Objects that a migration has created and that were dropped later.

use std::collections::{HashMap, HashSet};

use airtight_core::{
    Result,
    admin::Finding,
    table::{Shape, quote},
};
use sqlx::{AssertSqlSafe, Row};

use super::{
    MIGRATIONS, Names, migrate_command,
    statements::{Makes, On, Statement, statements},
};
use crate::{PgOutbox, error::doing, outbox::Conn};

/// Something that is not there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Missing {
    /// In words, with its name.
    pub(super) what: String,
    /// Whether anything works without it.
    pub(super) fatal: bool,
}

/// What a schema holds, as far as its migrations make it.
#[derive(Debug, Default)]
pub(super) struct There {
    /// Whether an index can be used; true of all that is no index.
    relations: HashMap<String, bool>,
    pub(super) partitioned: bool,
    functions: HashSet<String>,
    triggers: HashSet<(String, String)>,
    columns: HashSet<(String, String)>,
    defaults: HashSet<(String, String)>,
    floor: bool,
}

impl There {
    /// Asks the catalogue alone, but for the log's row: it needs no right on what it looks for.
    pub(super) async fn load(outbox: &PgOutbox, conn: &mut Conn) -> Result<Self> {
        let failed = doing("checking what migrations have created");
        let rows = sqlx::query(
            "WITH c AS (SELECT c.oid, c.relname::text AS name, c.relkind, c.relispartition FROM pg_class c \
               JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = $1) \
             SELECT 'r' AS kind, c.name, c.relkind::text AS of, coalesce(i.indisvalid, true) AS good \
               FROM c LEFT JOIN pg_index i ON i.indexrelid = c.oid \
             UNION ALL SELECT 'f', p.proname::text, '', true FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace \
               WHERE n.nspname = $1 \
             UNION ALL SELECT 't', g.tgname::text, c.name, true FROM c JOIN pg_trigger g ON g.tgrelid = c.oid \
               WHERE NOT c.relispartition AND NOT g.tgisinternal \
             UNION ALL SELECT 'c', a.attname::text, c.name, a.atthasdef FROM c JOIN pg_attribute a ON a.attrelid = c.oid \
               WHERE c.relkind IN ('r', 'p') AND NOT c.relispartition AND a.attnum > 0 AND NOT a.attisdropped",
        )
        .persistent(!outbox.pooled)
        .bind(&outbox.options.schema)
        .fetch_all(conn.get())
        .await
        .map_err(&failed)?;
        let mut there = Self::default();
        for row in rows {
            let (kind, name, of): (String, String, String) = (
                row.try_get(0).map_err(&failed)?,
                row.try_get(1).map_err(&failed)?,
                row.try_get(2).map_err(&failed)?,
            );
            let good: bool = row.try_get(3).map_err(&failed)?;
            match kind.as_str() {
                "f" => _ = there.functions.insert(name),
                "t" => _ = there.triggers.insert((of, name)),
                "c" => {
                    if good {
                        there.defaults.insert((of.clone(), name.clone()));
                    }
                    there.columns.insert((of, name));
                }
                _ => {
                    there.partitioned |= of == "p" && name == outbox.options.table;
                    there.relations.insert(name, good);
                }
            }
        }
        if there.relations.contains_key("log") {
            let sql = format!("SELECT EXISTS (SELECT FROM {} WHERE outbox = $1)", outbox.own("log"));
            there.floor = sqlx::query_scalar(AssertSqlSafe(sql))
                .persistent(!outbox.pooled)
                .bind(outbox.spec.display_name())
                .fetch_one(conn.get())
                .await
                .map_err(&failed)?;
        }
        Ok(there)
    }

    /// Whether a relation of that name exists; an index that cannot be used does not count.
    pub(super) fn has(&self, name: &str) -> bool {
        self.relations.get(name).copied().unwrap_or(false)
    }

    /// Whether an index exists that cannot be used.
    pub(super) fn is_broken(&self, name: &str) -> bool {
        self.relations.get(name) == Some(&false)
    }

    /// The shape of the outbox, by its table.
    pub(super) fn shape(&self, table: &str) -> Option<Shape> {
        let has_status = self.columns.contains(&(table.to_owned(), "status".to_owned()));
        self.has(table).then_some(if has_status { Shape::Queue } else { Shape::Log })
    }

    /// The object that a statement would create and that does not exist; none if one statement alone cannot tell.
    pub(super) fn lacks(&self, statement: &Statement<'_>, names: &Names<'_>) -> Option<Missing> {
        let of_schema = |name: &str| format!("{}.{name}", names.schema);
        let missing = |what: String, fatal: bool| Some(Missing { what, fatal });
        match &statement.makes {
            Makes::Table(name) => {
                // Without the DEFAULT partition a log still works, while partitions are created in advance.
                let fatal = *name != "{outbox:default}";
                let name = names.plain(name);
                if self.has(&name) { None } else { missing(format!("the table {}", of_schema(&name)), fatal) }
            }
            Makes::Sequence(name) => {
                let name = names.plain(name);
                if self.has(&name) {
                    None
                } else {
                    missing(format!("the sequence {}", of_schema(&name)), true)
                }
            }
            Makes::Index(name, _) => {
                let name = names.plain(name);
                if self.has(&name) { None } else { missing(format!("the index {}", of_schema(&name)), false) }
            }
            Makes::Function(name) => {
                let name = names.plain(name);
                if self.functions.contains(&name) {
                    None
                } else {
                    missing(format!("the function {}", of_schema(&name)), false)
                }
            }
            Makes::Trigger(name, On(table)) => {
                let (name, table) = (names.plain(name), names.plain(table));
                let key = (table, name);
                if self.triggers.contains(&key) {
                    None
                } else {
                    missing(format!("the trigger {} on {}", key.1, of_schema(&key.0)), false)
                }
            }
            Makes::Columns(On(table), columns) => {
                let table = names.plain(table);
                let lacks = |column: &&&str| !self.columns.contains(&(table.clone(), (**column).to_owned()));
                let lacking: Vec<&str> = columns.iter().filter(lacks).copied().collect();
                // A table that is missing is named itself.
                if lacking.is_empty() || !self.has(&table) {
                    None
                } else {
                    missing(format!("{} of {}", lacking.join(" and "), of_schema(&table)), true)
                }
            }
            Makes::Floor => {
                if self.floor || !self.has("log") {
                    None
                } else {
                    missing(format!("the row of {} in {}", of_schema(names.table), of_schema("log")), true)
                }
            }
            Makes::Once | Makes::Along => None,
        }
    }

    /// Defaults of the outbox that went with what they called: the column, and what it should be.
    pub(super) fn defaults(&self, outbox: &PgOutbox) -> Vec<(&'static str, &'static str)> {
        let table = &outbox.options.table;
        if outbox.options.spec.is_some() || !self.has(table) {
            return Vec::new();
        }
        let mut wanted = vec![("id", "{schema}.uuid_v7()")];
        if outbox.options.shape == Shape::Log {
            wanted.push(("seq", "nextval({literal:sequence})"));
        }
        wanted.retain(|(column, _)| !self.defaults.contains(&(table.clone(), (*column).to_owned())));
        wanted
    }
}

impl PgOutbox {
    /// What is missing of what migrations make, and how to get it back.
    pub(crate) async fn missing(&self, conn: &mut Conn) -> Result<Vec<Finding>> {
        let names = Names::of(&self.options);
        let there = There::load(self, conn).await?;
        let mut missing: Vec<Missing> = Vec::new();
        if !there.has("migration") {
            missing.push(Missing { what: format!("the table {}.migration", names.schema), fatal: true });
        }
        for (_, scope, _, text) in MIGRATIONS {
            if scope.concerns(&self.options) {
                missing.extend(statements(text).filter_map(|statement| there.lacks(&statement, &names)));
            }
        }
        for (column, _) in there.defaults(self) {
            let what = format!("the default of {column} in {}", self.spec.display_name());
            missing.push(Missing { what, fatal: true });
        }
        for (schema, leaf) in self.leaves_without_ids(conn).await? {
            missing.push(Missing {
                what: format!("the unique index on id of the partition {schema}.{leaf}"),
                fatal: false,
            });
        }
        let mut seen = HashSet::new();
        missing.retain(|one| seen.insert(one.what.clone()));
        let command = migrate_command(&self.options);
        Ok(missing
            .into_iter()
            .map(|Missing { what, fatal }| Finding {
                fatal,
                message: format!("{what} is missing"),
                remedy: Some(format!("run {command}")),
            })
            .collect())
    }

    /// Partitions of a log that would take an id twice: schema and name.
    async fn leaves_without_ids(&self, conn: &mut Conn) -> Result<Vec<(String, String)>> {
        if self.options.spec.is_some() || self.options.shape != Shape::Log {
            return Ok(Vec::new());
        }
        sqlx::query_as(
            "SELECT n.nspname::text, c.relname::text FROM pg_inherits h \
             JOIN pg_class p ON p.oid = h.inhparent JOIN pg_namespace pn ON pn.oid = p.relnamespace \
             JOIN pg_class c ON c.oid = h.inhrelid JOIN pg_namespace n ON n.oid = c.relnamespace \
             JOIN pg_attribute a ON a.attrelid = c.oid AND a.attname = 'id' \
             WHERE pn.nspname = $1 AND p.relname = $2 AND c.relkind = 'r' \
               AND NOT EXISTS (SELECT FROM pg_index x WHERE x.indrelid = c.oid AND x.indisunique AND x.indisvalid \
                 AND x.indpred IS NULL AND x.indkey::text = a.attnum::text) ORDER BY 1, 2",
        )
        .persistent(!self.pooled)
        .bind(&self.options.schema)
        .bind(&self.options.table)
        .fetch_all(conn.get())
        .await
        .map_err(doing("reading the indexes of the partitions"))
    }

    /// Creates indexes of tables that are in use, without blocking their writers. Returns a line for each.
    pub(super) async fn make_indexes(&self, later: Vec<Later>) -> Result<Vec<String>> {
        let mut done = Vec::new();
        for Later { what, script } in later {
            self.alone(&script).await?;
            done.push(what);
        }
        let mut conn = self.acquire().await?;
        let leaves = self.leaves_without_ids(&mut conn).await?;
        conn.commit().await?;
        for (schema, leaf) in leaves {
            let name = match leaf.strip_prefix(&self.options.table) {
                Some("_default") => quote(&format!("{leaf}_id")),
                _ => String::new(),
            };
            let on = format!("{}.{}", quote(&schema), quote(&leaf));
            self.alone(&[format!("CREATE UNIQUE INDEX CONCURRENTLY {name} ON {on} (id)")]).await?;
            done.push(format!(
                "created the unique index on id of the partition {schema}.{leaf}, which was missing"
            ));
        }
        Ok(done)
    }

    /// Runs statements that bear no transaction around them.
    async fn alone(&self, script: &[String]) -> Result<()> {
        let mut conn = self.pool.acquire().await.map_err(doing("connecting"))?;
        for sql in script {
            sqlx::raw_sql(AssertSqlSafe(sql.clone()))
                .execute(&mut *conn)
                .await
                .map_err(doing("creating an index"))?;
        }
        Ok(())
    }
}

/// An index that is made when everything else is committed.
pub(super) struct Later {
    what: String,
    script: Vec<String>,
}

impl Later {
    pub(super) fn index(there: &There, names: &Names<'_>, name: &str, filled: &str, what: &Missing) -> Self {
        let mut script = Vec::new();
        if there.is_broken(name) {
            script.push(format!("DROP INDEX CONCURRENTLY IF EXISTS {}.{}", quote(names.schema), quote(name)));
        }
        script.push(filled.replacen(" INDEX ", " INDEX CONCURRENTLY IF NOT EXISTS ", 1));
        let state = if there.is_broken(name) { "not valid" } else { "missing" };
        Self { what: format!("created {}, which was {state}", what.what), script }
    }
}
