//! Tests that the documented defaults are those of the code: a key that is set to its default must make the same config
//! as a key that is left out.

use super::{Config, urls::SinkTarget};
use crate::wiring;

const CONFIGURATION: &str = include_str!("../../../../docs/configuration.md");
const CDC: &str = include_str!("../../../../docs/cdc.md");

/// A row of a table of keys: the key, and what stands under `default`.
struct Row {
    key: String,
    default: String,
}

/// The rows of the table that begins with this key.
fn table(document: &str, first: &str, heading: &str) -> Vec<Row> {
    let (_, behind) = document.split_once(heading).unwrap_or_else(|| panic!("no {heading:?}"));
    let cells = |line: &str| -> Vec<String> {
        // A literal may hold the separator of columns, escaped.
        line.trim_matches('|')
            .split(" | ")
            .map(|cell| cell.trim().trim_matches('|').trim().to_owned())
            .collect()
    };
    let begin = format!("| `{first}` |");
    let rows: Vec<Row> = behind
        .lines()
        .skip_while(|line| !line.starts_with(&begin))
        .take_while(|line| line.starts_with('|'))
        .map(|line| {
            let cells = cells(line);
            Row { key: cells[0].trim_matches('`').to_owned(), default: cells[2].clone() }
        })
        .collect();
    assert!(!rows.is_empty(), "no table that begins with `{first}` behind {heading:?}");
    rows
}

/// The value behind these words of a cell; the first one where there are no words.
fn literal<'a>(cell: &'a str, behind: &str) -> Option<&'a str> {
    let rest = if behind.is_empty() {
        cell.strip_prefix('`')?
    } else {
        cell.split_once(behind)?.1.strip_prefix('`')?
    };
    let (literal, _) = rest.split_once('`')?;
    // A name stands for something else: another key, or what a name is made of.
    let is_value = |first: char| first == '"' || first.is_ascii_digit();
    (literal.starts_with(is_value) || ["true", "false"].contains(&literal)).then_some(literal)
}

/// Everything that a config says, with its defaults filled in, as text.
fn effect(text: &str) -> String {
    let config =
        Config::parse("airtight.toml", text, &|_| None).unwrap_or_else(|error| panic!("{error}\n{text}"));
    let sinks: Vec<String> = config
        .pipelines
        .iter()
        .map(|pipeline| match &pipeline.sink {
            SinkTarget::Webhook(webhook) => format!("{:?}", wiring::webhook_config(webhook)),
            other => format!("{other:?}"),
        })
        .collect();
    let pipelines: Vec<String> =
        config.pipelines.iter().map(|one| format!("{:?} {:?}", one.read, one.policy)).collect();
    let database = wiring::pg_options(&config.database);
    let database = (
        database.schema,
        database.table,
        database.max_connections,
        database.listen,
        database.prepared_statements,
    );
    // Where it was set is not part of the value.
    let kept = &config.retention;
    let kept = (kept.done, kept.log, kept.inbox, kept.log_waits_for_consumers);
    format!("{database:?} {pipelines:#?} {sinks:?} {kept:?} {:?}", config.on_end)
}

/// Checks every literal of a table against a config with `begin` before the key and `end` behind it. Returns how many.
fn check(rows: &[Row], behind: &str, begin: &str, end: &str) -> usize {
    let mut checked = 0;
    for Row { key, default } in rows {
        let Some(literal) = literal(default, behind) else { continue };
        let (without, with) = (format!("{begin}{end}"), format!("{begin}{key} = {literal}\n{end}"));
        assert_eq!(effect(&with), effect(&without), "`{key}` is documented as {literal} by default");
        checked += 1;
    }
    checked
}

#[test]
fn the_documented_defaults_are_the_codes() {
    let pipelines = "## `[pipelines.NAME]`";
    let queue = table(CONFIGURATION, "to", pipelines);
    let one = "[pipelines.a]\n";
    let to = "to = \"null:\"\n";
    let log = format!("[database]\nshape = \"log\"\n{one}");
    assert!(check(&queue, "", one, to) >= 12);
    assert!(check(&queue, "on a log, ", &log, to) >= 1, "`partitions`");
    assert!(check(&queue, "where the config says that it is a log, ", &log, to) >= 1, "`read`");
    assert!(check(&table(CONFIGURATION, "consumer", pipelines), "", &log, to) >= 4);
    let cdc = format!("{one}read = \"cdc\"\n");
    assert!(check(&table(CONFIGURATION, "slot", pipelines), "", &cdc, to) >= 5);
    assert!(check(&table(CDC, "slot", "# "), "", &cdc, to) >= 5);

    let backoff = table(CONFIGURATION, "base", pipelines);
    assert!(check(&backoff, "", "[pipelines.a.backoff]\n", &format!("{one}{to}")) >= 4);
    assert!(check(&backoff, "circuit ", "[pipelines.a.circuit]\n", &format!("{one}{to}")) >= 1);

    let webhook = table(CONFIGURATION, "url", "### Webhooks");
    assert!(check(&webhook, "", "[pipelines.a.to]\nurl = \"http://h/\"\n", "") >= 3);

    assert!(check(&table(CONFIGURATION, "schema", "## `[database]`"), "", "[database]\n", "") >= 5);
    assert!(check(&table(CONFIGURATION, "done", "## `[retention]`"), "", "[retention]\n", "") >= 4);
    assert!(check(&table(CONFIGURATION, "on_pipeline_end", "## `[run]`"), "", "[run]\n", "") >= 1);
}
