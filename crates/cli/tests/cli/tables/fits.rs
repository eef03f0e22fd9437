//! What `check` says of columns, types and other tables, and how an event is named.

use crate::support::Shop;

#[test]
fn all_keys_that_a_connectors_file_lacks_are_named_at_once() {
    let shop = Shop::new();
    shop.write("connector.json", "{\"name\": \"c\", \"config\": {\"connector.class\": \"io.debezium.connector.postgresql.PostgresConnector\"}}");
    let error = shop.run(&["run", "--debezium", "connector.json", "--to", "kafka://localhost"]).error(2);
    for key in ["database.hostname", "database.user", "database.dbname", "transforms"] {
        assert!(error.contains(&format!("`{key}`")), "{key}: {error}");
    }
}
