//! Every column and status word of a query, taken from the [`TableSpec`].
//!
//! The other modules write statements in terms of these expressions; none names a column of an outbox. What
//! the table has no column for is read from and written to `airtight_side`, joined as `{alias}s`.
//!
//! The canonical table's columns are used bare, because a partial index serves a query only when the query
//! repeats the index's predicate literally. Foreign columns are normalised first: times to the canonical
//! form, keys to text.

use airtight_core::table::{
    Condition, Count, Field, Role, Shape, StatusSpec, TableSpec, Test, literal, quote,
};

/// The database's clock, in the form all times have.
pub(crate) const NOW: &str = "strftime('%Y-%m-%dT%H:%M:%fZ','now')";

/// The retry time of an event that is held back behind another: never due by itself.
pub(crate) const HELD: &str = "9999-12-31T00:00:00.000Z";

/// A field of a row that statements change. It is kept in the table or in the side table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RowField {
    Count,
    NextRetryAt,
    LockedUntil,
    ClaimToken,
    LostLeases,
    ErrorCode,
    ErrorMessage,
    FinishedAt,
    LastAttemptAt,
    Unknown,
}

/// A table's spec as SQL.
#[derive(Debug, Clone)]
pub(crate) struct Sql {
    pub(crate) spec: TableSpec,
    /// The table is airtight's own, with its indexes and its form of times.
    pub(crate) canonical: bool,
    /// What it can be read as: a table without states is a log.
    pub(crate) shape: Shape,
    /// Something about a row is kept in the side table.
    pub(crate) side: bool,
    status: StatusSpec,
    name: String,
}

impl Sql {
    pub(crate) fn new(spec: TableSpec) -> Self {
        // Without a status there are no states to ask for; `SqliteOutbox::queue_sql` refuses before anybody does.
        let status = spec.status.clone().unwrap_or_else(no_status);
        let shape = if spec.status.is_some() { Shape::Queue } else { Shape::Log };
        let canonical = spec == TableSpec::of_shape(shape, spec.schema.as_deref(), &spec.table);
        // What a log's consumers must remember of an event is with the consumer.
        let side = shape == Shape::Queue && (!spec.is_self_contained() || status.unknown.is_none());
        let name = literal(&spec.display_name());
        Self { spec, canonical, shape, side, status, name }
    }

    /// The outbox's name as a literal: what airtight's own tables know it by.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    // --- reading ----------------------------------------------------------------------------------------

    /// The table under an alias, with its side rows where it has any.
    pub(crate) fn from(&self, a: &str) -> String {
        let table = self.spec.qualified();
        if !self.side {
            return format!("{table} AS {a}");
        }
        format!(
            "{table} AS {a} LEFT JOIN airtight_side AS {a}s ON {a}s.outbox = {} AND {a}s.event = CAST({} AS TEXT)",
            self.name,
            self.identity(a)
        )
    }

    pub(crate) fn identity(&self, a: &str) -> String {
        column(a, &self.spec.identity)
    }

    /// The column that ascends, if there is one.
    pub(crate) fn seq(&self, a: &str) -> Option<String> {
        self.spec.seq.as_deref().map(|name| column(a, name))
    }

    /// When the row was written, in a form that sorts.
    pub(crate) fn created(&self, a: &str) -> String {
        match &self.spec.created_at {
            Some(name) if self.canonical => column(a, name),
            Some(name) => {
                let raw = column(a, name);
                format!("COALESCE({}, CAST({raw} AS TEXT), '')", time(&raw))
            }
            None => "''".into(),
        }
    }

    /// `ORDER BY` for the outbox's order.
    pub(crate) fn order_by(&self, a: &str, direction: &str) -> String {
        match self.seq(a) {
            Some(seq) => format!("ORDER BY {seq} {direction}"),
            None => format!("ORDER BY {} {direction}, {} {direction}", self.created(a), self.identity(a)),
        }
    }

    /// The same by sorting what another index finds. Given the choice, SQLite walks along the whole table in
    /// seq order, finished events first, because it then need not sort.
    pub(crate) fn sorted(&self, a: &str, direction: &str) -> String {
        match self.seq(a) {
            Some(seq) => format!("ORDER BY +{seq} {direction}"),
            None => self.order_by(a, direction),
        }
    }

    /// Whether row `a` comes before row `b`.
    pub(crate) fn before(&self, a: &str, b: &str) -> String {
        match (self.seq(a), self.seq(b)) {
            (Some(left), Some(right)) => format!("{left} < {right}"),
            _ => format!(
                "({}, {}) < ({}, {})",
                self.created(a),
                self.identity(a),
                self.created(b),
                self.identity(b)
            ),
        }
    }

    /// The three columns of a row's order key: see `candidate::OrderKey`.
    pub(crate) fn order_key(&self, a: &str) -> String {
        match self.seq(a) {
            Some(seq) if self.canonical => format!("{seq}, NULL, {}", self.identity(a)),
            // In a foreign column there may be anything.
            Some(seq) => format!("CAST({seq} AS INTEGER), NULL, {}", self.identity(a)),
            None => format!("NULL, {}, {}", self.created(a), self.identity(a)),
        }
    }

    pub(crate) fn field(&self, a: &str, field: &Field) -> String {
        match field {
            Field::Column(name) if self.canonical => column(a, name),
            Field::Column(name) => format!("COALESCE(CAST({} AS TEXT), '')", column(a, name)),
            Field::Constant(text) => literal(text),
            Field::FirstOf(names) => {
                let columns: Vec<String> =
                    names.iter().map(|name| format!("CAST({} AS TEXT)", column(a, name))).collect();
                format!("COALESCE({}, '')", columns.join(", "))
            }
        }
    }

    /// The ordering key.
    pub(crate) fn key(&self, a: &str) -> String {
        self.field(a, &self.spec.aggregate_id)
    }

    pub(crate) fn stream(&self, a: &str) -> String {
        self.field(a, &self.spec.stream)
    }

    /// When the row is due again; NULL for now.
    pub(crate) fn retry(&self, a: &str) -> String {
        self.time_of(a, self.spec.next_retry_at.as_deref(), "next_retry_at")
    }

    pub(crate) fn locked(&self, a: &str) -> String {
        self.time_of(a, self.spec.locked_until.as_deref(), "locked_until")
    }

    pub(crate) fn token(&self, a: &str) -> String {
        self.kept(a, self.spec.claim_token.as_deref(), "claim_token")
    }

    pub(crate) fn lost(&self, a: &str) -> String {
        let kept = self.kept(a, self.spec.lost_leases.as_deref(), "lost_leases");
        // In a foreign column there may be anything.
        if self.canonical { kept } else { format!("CAST(COALESCE({kept}, 0) AS INTEGER)") }
    }

    /// Attempts or retries, as the table counts.
    pub(crate) fn count(&self, a: &str) -> String {
        format!("CAST(COALESCE({}, 0) AS INTEGER)", self.kept(a, self.spec.count_column(), "attempts"))
    }

    pub(crate) fn error_code(&self, a: &str) -> String {
        self.kept(a, self.spec.error_code.as_deref(), "error_code")
    }

    pub(crate) fn error_message(&self, a: &str) -> String {
        self.kept(a, self.spec.error_message.as_deref(), "error_message")
    }

    /// Whether the count grows at the claim rather than at a failure.
    pub(crate) fn counts_attempts(&self) -> bool {
        !matches!(self.spec.count, Some(Count::Retries(_)))
    }

    fn kept(&self, a: &str, name: Option<&str>, side: &str) -> String {
        match name {
            Some(name) => column(a, name),
            None if self.side => format!("{a}s.{side}"),
            None => "NULL".into(),
        }
    }

    fn time_of(&self, a: &str, name: Option<&str>, side: &str) -> String {
        match name {
            Some(name) if !self.canonical => time(&column(a, name)),
            other => self.kept(a, other, side),
        }
    }

    // --- states -----------------------------------------------------------------------------------------

    /// Not finished: pending or processing.
    pub(crate) fn open(&self, a: &str) -> String {
        match &self.spec.phase {
            Some(phase) => format!("{} = 0", column(a, phase)),
            None => {
                let mut roles = vec![&self.status.new, &self.status.retrying];
                roles.extend(&self.status.processing);
                format!("({} AND {})", self.any(a, &roles), self.is_identified(a))
            }
        }
    }

    /// Whether the identity can tell the row from others. Most primary keys of SQLite take NULL, and all take bytes.
    fn is_identified(&self, a: &str) -> String {
        format!("typeof({}) IN ('integer', 'text', 'real')", self.identity(a))
    }

    /// Whether the status means nothing to us, or nothing tells the row from others.
    pub(crate) fn unexplained(&self, a: &str) -> String {
        let known = [self.open(a), self.closed(a), self.done(a)];
        format!("NOT COALESCE({}, 0)", known.join(" OR "))
    }

    /// Dead or unknown.
    pub(crate) fn closed(&self, a: &str) -> String {
        match &self.spec.phase {
            Some(phase) => format!("{} = 1", column(a, phase)),
            None => {
                let mut roles = vec![&self.status.dead];
                roles.extend(&self.status.unknown);
                self.any(a, &roles)
            }
        }
    }

    pub(crate) fn done(&self, a: &str) -> String {
        match &self.spec.phase {
            Some(phase) => format!("{} = 2", column(a, phase)),
            None => self.any(a, &[&self.status.done]),
        }
    }

    /// Dead, and known to be so.
    pub(crate) fn dead(&self, a: &str) -> String {
        let dead = self.any(a, &[&self.status.dead]);
        match self.status.unknown {
            Some(_) => dead,
            None => format!("({dead} AND COALESCE({a}s.unknown, 0) = 0)"),
        }
    }

    pub(crate) fn unknown(&self, a: &str) -> String {
        match &self.status.unknown {
            Some(role) => self.any(a, &[role]),
            None => format!("({} AND {a}s.unknown = 1)", self.any(a, &[&self.status.dead])),
        }
    }

    pub(crate) fn pending(&self, a: &str) -> String {
        let waits = self.any(a, &[&self.status.new, &self.status.retrying]);
        match self.status.processing {
            Some(_) => waits,
            None => format!("({waits} AND {} IS NULL)", self.token(a)),
        }
    }

    pub(crate) fn processing(&self, a: &str) -> String {
        match &self.status.processing {
            Some(role) => self.any(a, &[role]),
            None => {
                let waits = self.any(a, &[&self.status.new, &self.status.retrying]);
                format!("({waits} AND {} IS NOT NULL)", self.token(a))
            }
        }
    }

    /// The canonical word for the row's state, or the table's own where nobody knows what it means.
    pub(crate) fn state(&self, a: &str) -> String {
        format!(
            "CASE WHEN {} THEN 'processing' WHEN {} THEN 'pending' WHEN {} THEN 'done' WHEN {} THEN 'unknown' \
             WHEN {} THEN 'dead' ELSE CAST({} AS TEXT) END",
            self.processing(a),
            self.pending(a),
            self.done(a),
            self.unknown(a),
            self.dead(a),
            column(a, &self.status.column)
        )
    }

    fn any(&self, a: &str, roles: &[&Role]) -> String {
        let mut tests: Vec<String> = roles.iter().map(|role| self.role(a, role)).collect();
        tests.dedup();
        if tests.len() == 1 { tests.remove(0) } else { format!("({})", tests.join(" OR ")) }
    }

    fn role(&self, a: &str, role: &Role) -> String {
        let word = format!("{} = {}", column(a, &self.status.column), literal(&role.word));
        match &role.when {
            None => word,
            Some(when) => format!(
                "({word} AND COALESCE({}, 0) {} {})",
                column(a, &when.column),
                when.test.sql(),
                when.value
            ),
        }
    }

    pub(crate) fn role_new(&self) -> Option<&Role> {
        Some(&self.status.new)
    }

    pub(crate) fn role_retrying(&self) -> Option<&Role> {
        Some(&self.status.retrying)
    }

    pub(crate) fn role_processing(&self) -> Option<&Role> {
        self.status.processing.as_ref()
    }

    pub(crate) fn role_done(&self) -> Option<&Role> {
        Some(&self.status.done)
    }

    pub(crate) fn role_dead(&self) -> Option<&Role> {
        Some(&self.status.dead)
    }

    pub(crate) fn role_unknown(&self) -> Option<&Role> {
        self.status.unknown.as_ref().or(Some(&self.status.dead))
    }

    // --- changing ---------------------------------------------------------------------------------------

    /// Statements that put the rows of `?1` (a JSON array of objects, the identity under `k`) into a role and
    /// set the given fields, in the table or in the side table, wherever each is kept. Expressions may read
    /// the row's object as `j.value`, and further parameters.
    pub(crate) fn change(&self, role: Option<&Role>, set: &[(RowField, &str)]) -> Vec<String> {
        let mut own: Vec<(String, String)> = Vec::new();
        let mut side: Vec<(&str, &str)> = Vec::new();
        for (field, value) in set {
            match self.storage(*field) {
                Kept::Table(name) => own.push((quote(name), (*value).to_owned())),
                Kept::Side(name) => side.push((name, value)),
                Kept::Nowhere => {}
            }
        }
        if let Some(role) = role {
            own.push((quote(&self.status.column), literal(&role.word)));
            if let Some(when) = &role.when {
                satisfy(&mut own, when);
            }
        }
        if let (Some(name), false) = (&self.spec.updated_at, own.is_empty()) {
            own.push((quote(name), NOW.into()));
        }
        let mut statements = Vec::new();
        if !own.is_empty() {
            let sets: Vec<String> = own.iter().map(|(name, value)| format!("{name} = {value}")).collect();
            statements.push(format!(
                "UPDATE {} AS o SET {} FROM json_each(?1) AS j WHERE {} = j.value->>'k'",
                self.spec.qualified(),
                sets.join(", "),
                self.identity("o")
            ));
        }
        if !side.is_empty() {
            let names: Vec<&str> = side.iter().map(|(name, _)| *name).collect();
            let values: Vec<&str> = side.iter().map(|(_, value)| *value).collect();
            let updates: Vec<String> = names.iter().map(|name| format!("{name} = excluded.{name}")).collect();
            statements.push(format!(
                "INSERT INTO airtight_side (outbox, event, {}) \
                 SELECT {}, CAST(j.value->>'k' AS TEXT), {} FROM json_each(?1) AS j WHERE true \
                 ON CONFLICT (outbox, event) DO UPDATE SET {}",
                names.join(", "),
                self.name,
                values.join(", "),
                updates.join(", ")
            ));
        }
        statements
    }

    /// Forgets what the side table knows of the rows of `?1`.
    pub(crate) fn forget(&self) -> Option<String> {
        self.side.then(|| {
            format!(
                "DELETE FROM airtight_side WHERE outbox = {} \
                 AND event IN (SELECT CAST(j.value->>'k' AS TEXT) FROM json_each(?1) AS j)",
                self.name
            )
        })
    }

    fn storage(&self, field: RowField) -> Kept<'_> {
        let spec = &self.spec;
        let (name, side) = match field {
            RowField::Count => (spec.count_column(), "attempts"),
            RowField::NextRetryAt => (spec.next_retry_at.as_deref(), "next_retry_at"),
            RowField::LockedUntil => (spec.locked_until.as_deref(), "locked_until"),
            RowField::ClaimToken => (spec.claim_token.as_deref(), "claim_token"),
            RowField::LostLeases => (spec.lost_leases.as_deref(), "lost_leases"),
            RowField::ErrorCode => (spec.error_code.as_deref(), "error_code"),
            RowField::ErrorMessage => (spec.error_message.as_deref(), "error_message"),
            RowField::FinishedAt => (spec.finished_at.as_deref(), ""),
            RowField::LastAttemptAt => (spec.last_attempt_at.as_deref(), ""),
            RowField::Unknown if self.status.unknown.is_none() => (None, "unknown"),
            RowField::Unknown => return Kept::Nowhere,
        };
        match name {
            Some(name) => Kept::Table(name),
            None if self.side && !side.is_empty() => Kept::Side(side),
            None => Kept::Nowhere,
        }
    }
}

enum Kept<'a> {
    Table(&'a str),
    Side(&'static str),
    Nowhere,
}

fn no_status() -> StatusSpec {
    let none = || Role::word("");
    StatusSpec {
        column: String::new(),
        new: none(),
        retrying: none(),
        processing: None,
        done: none(),
        dead: none(),
        unknown: Some(none()),
    }
}

/// Makes a role's condition true along with its word: a word that two roles share would mean the other one.
fn satisfy(own: &mut Vec<(String, String)>, when: &Condition) {
    let name = quote(&when.column);
    let at = own.iter().position(|(column, _)| *column == name);
    let now = at.map_or_else(|| format!("COALESCE(o.{name}, 0)"), |at| own[at].1.clone());
    let value = match when.test {
        // One that has failed too often is what the table's own words make of it.
        Test::Less => return,
        Test::AtLeast => format!("MAX({now}, {})", when.value),
        Test::Equal => when.value.to_string(),
    };
    match at {
        Some(at) => own[at].1 = value,
        None => own.push((name, value)),
    }
}

fn column(alias: &str, name: &str) -> String {
    format!("{alias}.{}", quote(name))
}

/// A foreign time in the canonical form; NULL when it is none.
pub(crate) fn time(expression: &str) -> String {
    format!("strftime('%Y-%m-%dT%H:%M:%fZ', {expression})")
}
