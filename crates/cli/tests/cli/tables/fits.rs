//! What `check` says of columns, types and other tables, and how an event is named.

use serde_json::json;

use crate::support::Shop;

#[test]
fn a_config_that_cannot_run_does_not_pass_offline() {
    let shop = Shop::new();
    for (text, words) in [
        ("[database]\nurl = \"sqlite:shop.db\"\n", "no pipeline"),
        (
            "[pipelines.a]\nread = \"cdc\"\nto = \"null:\"\n[database]\nurl = \"sqlite:shop.db\"\n",
            "SQLite has no WAL",
        ),
        ("[pipelines.a]\nread = \"cdc\"\nto = \"null:\"\n", "SQLite has no WAL"),
    ] {
        shop.write("airtight.toml", text);
        for args in [
            &["check", "-c", "airtight.toml", "--offline", "--json"][..],
            &["check", "-c", "airtight.toml", "--json"],
        ] {
            let ran = shop.run(args);
            assert_eq!(ran.code, Some(1), "{ran:?}");
            let report: serde_json::Value = serde_json::from_str(&ran.stdout).unwrap();
            assert_eq!(report["ok"], json!(false), "{report}");
            assert!(report["findings"][0]["message"].as_str().unwrap().contains(words), "{report}");
        }
    }
}

#[test]
fn all_keys_that_a_connectors_file_lacks_are_named_at_once() {
    let shop = Shop::new();
    shop.write("connector.json", "{\"name\": \"c\", \"config\": {\"connector.class\": \"io.debezium.connector.postgresql.PostgresConnector\"}}");
    let error = shop.run(&["run", "--debezium", "connector.json", "--to", "kafka://localhost"]).error(2);
    for key in ["database.hostname", "database.user", "database.dbname", "transforms"] {
        assert!(error.contains(&format!("`{key}`")), "{key}: {error}");
    }
}
