//! The least privileges that each role needs, as SQL.

use airtight_core::{
    Code, Error, Result,
    table::{Shape, literal, quote},
};

use crate::{PgOptions, PgOutbox, columns::qualified, schema::function_name};

/// The role that gets privileges.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Grantee {
    /// An application that publishes.
    Producer,
    /// A relay of a queue, and the operator of its events.
    Relay,
    /// A consumer of a log, and its operator.
    Consumer,
    /// A reader of the WAL, and its operator.
    Cdc,
    /// A person or program that reads, and changes nothing.
    Viewer,
}

impl Grantee {
    /// The word for it, which is also the name of the role unless another is given.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Producer => "producer",
            Self::Relay => "relay",
            Self::Consumer => "consumer",
            Self::Cdc => "cdc",
            Self::Viewer => "viewer",
        }
    }
}

const ALL: &str = "SELECT, INSERT, UPDATE, DELETE";

/// The script while it is written.
struct Script<'a> {
    options: &'a PgOptions,
    role: String,
    lines: Vec<String>,
}

impl Script<'_> {
    fn own(&self, name: &str) -> String {
        format!("{}.{}", readable(&self.options.schema), readable(name))
    }

    fn say(&mut self, text: &str) {
        self.lines.push(format!("-- {text}"));
    }

    fn grant(&mut self, rights: &str, on: &str) {
        self.lines.push(format!("GRANT {rights} ON {on} TO {};", self.role));
    }

    /// Rights on airtight's own tables.
    fn tables(&mut self, rights: &str, names: &[&str]) {
        let names: Vec<String> = names.iter().map(|name| self.own(name)).collect();
        self.grant(rights, &names.join(", "));
    }

    fn is_canonical(&self) -> bool {
        self.options.spec.is_none()
    }

    /// Whether the outbox is airtight's own log.
    fn is_log(&self) -> bool {
        self.is_canonical() && self.options.shape == Shape::Log
    }

    /// The table of events, quoted.
    fn outbox(&self) -> String {
        match &self.options.spec {
            None => self.own(&self.options.table),
            Some(spec) => spec.qualified(),
        }
    }

    /// The sequence of a canonical outbox: a log has a plain one, a queue that of its identity column.
    fn sequence(&self) -> String {
        let suffix = if self.is_log() { "seq" } else { "seq_seq" };
        format!("SEQUENCE {}", self.own(&format!("{}_{suffix}", self.options.table)))
    }

    /// What everybody needs: to find the tables, and what they are for.
    fn begin(&mut self) {
        let mut schemas = vec![self.options.schema.clone()];
        if let Some(schema) = self.options.spec.as_ref().and_then(|spec| spec.schema.clone())
            && !schemas.contains(&schema)
        {
            schemas.push(schema);
        }
        for schema in schemas {
            self.grant("USAGE", &format!("SCHEMA {}", readable(&schema)));
        }
        self.tables("SELECT", &["migration"]);
    }

    /// To read the outbox, its partitions that are read by name, its sequence, and the offsets where they have a table.
    fn outbox_with(&mut self, rights: &str, on_offsets: &str) {
        self.grant(rights, &self.outbox());
        if self.is_log() {
            let net = format!("{}_default", self.options.table);
            self.tables("SELECT", &[&net]);
        }
        if self.is_canonical() {
            self.grant("SELECT", &self.sequence());
        }
        let Some(spec) = &self.options.spec else { return };
        if let Some(offsets) = &spec.log.offsets {
            self.grant(on_offsets, &qualified(offsets.schema.as_deref(), &offsets.table));
        }
    }
}

/// airtight's own names need no quotes; other names may be anything.
fn readable(name: &str) -> String {
    const WORDS: [&str; 22] = [
        "airtight",
        "outbox",
        "outbox_seq",
        "outbox_seq_seq",
        "mark",
        "outbox_default",
        "migration",
        "relay",
        "partition",
        "side",
        "log",
        "consumer",
        "parked",
        "inbox",
        "slot",
        "uuid_v7",
        "publish",
        "publish_bytes",
        "backlog",
        "emit",
        "refuse_event",
        "refuse_clash",
    ];
    if WORDS.contains(&name) { name.to_owned() } else { quote(name) }
}

impl PgOutbox {
    /// The statements that give a role the privileges it needs, and no more. The owner of the tables runs them; the role
    /// must exist. For [`Grantee::Cdc`], `publication` is the publication that is created.
    pub fn grants_sql(options: &PgOptions, to: Grantee, role: &str, publication: &str) -> Result<String> {
        let mut script = Script { options, role: quote(role), lines: Vec::new() };
        let outbox = script.outbox();
        let shape = if script.is_log() { "log" } else { "queue" };
        let wrong = |advice: &str| {
            let name = outbox.replace('"', "");
            Error::permanent(Code::WRONG_SHAPE, format!("{name} is a {shape}: {advice}"))
        };
        match to {
            Grantee::Producer => {
                if !script.is_canonical() {
                    return Err(Error::permanent(
                        Code::FOREIGN_TABLE,
                        format!(
                            "{} is the application's own table: the application writes to it with its own INSERT, and needs no grant from airtight",
                            outbox.replace('"', "")
                        ),
                    ));
                }
                script.say("publishes: writes events, and reads back their ids and numbers, but no payload");
                script.begin();
                script.grant("INSERT, SELECT (id, seq)", &outbox);
                let mut functions = vec!["uuid_v7".to_owned()];
                let own = |name: &str| function_name(&options.table, name);
                functions.extend(["publish", "publish_bytes"].map(own));
                if script.is_log() {
                    functions.extend(["backlog", "refuse_clash"].map(own));
                    script.grant("USAGE, SELECT", &script.sequence());
                    let partition = script.own("partition");
                    script.grant("SELECT (outbox, grp, last_seq)", &partition);
                }
                functions.extend(["emit", "refuse_event"].map(str::to_owned));
                let slot = script.own("slot");
                script.grant("SELECT (name, prefix)", &slot);
                let functions: Vec<String> = functions.iter().map(|name| script.own(name)).collect();
                script.grant("EXECUTE", &format!("FUNCTION {}", functions.join(", ")));
            }
            Grantee::Relay => {
                if script.is_log() {
                    return Err(wrong("it is read by consumers (`consumer`), or through the WAL (`cdc`)"));
                }
                script.say("reads events and settles them; lists, retries, discards and prunes");
                script.begin();
                script.outbox_with("SELECT, UPDATE, DELETE", "SELECT");
                script.tables(ALL, &["relay", "partition", "mark", "side"]);
                script.tables("SELECT", &["log", "consumer", "parked", "slot"]);
            }
            Grantee::Consumer => {
                if script.is_canonical() && !script.is_log() {
                    return Err(wrong("it is read by relays (`relay`), or through the WAL (`cdc`)"));
                }
                script.say(
                    "follows the log; lists, retries, discards, seeks and pauses. The owner of the table",
                );
                script.say(
                    "creates and drops partitions: run `airtight migrate` and `airtight prune` regularly as the owner",
                );
                script.begin();
                script.outbox_with("SELECT", ALL);
                script.tables(ALL, &["relay", "partition", "consumer", "parked", "log", "inbox"]);
                script.tables("SELECT", &["side", "slot"]);
            }
            Grantee::Cdc => {
                script.say("follows the WAL; lists, retries and discards. It needs `REPLICATION`, which only a superuser can give; a");
                script.say("managed database has a role to grant instead, such as rds_replication");
                script.lines.push(format!("ALTER ROLE {} REPLICATION;", script.role));
                script.begin();
                let has_status = options.spec.as_ref().map_or(!script.is_log(), |spec| spec.status.is_some());
                script.outbox_with(if has_status { "SELECT, UPDATE, DELETE" } else { "SELECT" }, "SELECT");
                script.tables(
                    ALL,
                    &["relay", "partition", "mark", "side", "consumer", "parked", "slot", "inbox"],
                );
                script.tables("SELECT", &["log"]);
                script.say("the owner of the table creates the publication, once; a reader with another `--publication` needs");
                script.say(
                    "another one. If this role owns the table and may CREATE in the database, the relay creates the publication",
                );
                let create = format!(
                    "CREATE PUBLICATION {} FOR TABLE {outbox} WITH (publish = 'insert', publish_via_partition_root = true)",
                    quote(publication)
                );
                script.lines.push(format!(
                    "DO $do$ BEGIN IF NOT EXISTS (SELECT FROM pg_publication WHERE pubname = {}) THEN {create}; END IF; END $do$;",
                    literal(publication)
                ));
            }
            Grantee::Viewer => {
                script.say("only reads: status, lists, tail, check");
                script.begin();
                script.outbox_with("SELECT", "SELECT");
                script.tables(
                    "SELECT",
                    &["relay", "partition", "mark", "side", "log", "consumer", "parked", "inbox", "slot"],
                );
            }
        }
        Ok(script.lines.join("\n") + "\n")
    }
}
