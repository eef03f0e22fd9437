//! Config files and addresses: what is wrong, where, and what to do.

use crate::support::{Shop, finish};

#[test]
fn an_unknown_key_is_refused_with_the_nearest_known_one() {
    let shop = Shop::new();
    shop.write("airtight.toml", "[pipelines.orders]\nto = \"stdout:\"\n\nmax_atempts = 3\n");
    for args in [&["run", "-c", "airtight.toml"] as &[&str], &["check", "--offline", "-c", "airtight.toml"]] {
        assert_eq!(
            shop.run(args).error(2),
            "error: airtight.toml:4: unknown key `max_atempts` in [pipelines.orders]; did you mean `max_attempts`?"
        );
    }
}

#[test]
fn an_unknown_word_is_refused_with_the_allowed_ones() {
    let shop = Shop::new();
    shop.write("airtight.toml", "[pipelines.orders]\nto = \"stdout:\"\norder = \"keys\"\n");
    assert_eq!(
        shop.run(&["run", "-c", "airtight.toml"]).error(2),
        "error: airtight.toml:3: pipelines.orders.order: unknown word `keys`; allowed words are `key`, `none` and `total` (did you mean `key`?)"
    );
}

#[test]
fn variables_are_expanded_and_missing_ones_named() {
    let shop = Shop::new();
    shop.publish("1", "{}");
    let text = "[database]\nurl = \"sqlite:${SHOP_DIR}/shop.db\"\n[pipelines.all]\nto = \"file:${OUT:-default.ndjson}\"\n";
    shop.write("airtight.toml", text);

    let mut command = shop.command(&["run", "-c", "airtight.toml", "--drain"]);
    command.env_remove("DATABASE_URL").env("SHOP_DIR", shop.path(""));
    finish(command, "").ok();
    assert_eq!(shop.lines("default.ndjson").len(), 1);

    assert_eq!(
        shop.run(&["run", "-c", "airtight.toml", "--drain"]).error(2),
        "error: airtight.toml:2: database.url: environment variable SHOP_DIR is not set; set it, or write ${SHOP_DIR:-…} to give a default"
    );
}

#[test]
fn two_pipelines_deliver_their_own_streams() {
    let shop = Shop::new();
    let line = |stream: &str| {
        format!("{{\"stream\":\"{stream}\",\"type\":\"T\",\"aggregateType\":\"A\",\"aggregateId\":\"1\"}}\n")
    };
    shop.run_with(&["publish"], &(line("a") + &line("b") + &line("a"))).ok();
    shop.write(
        "airtight.toml",
        "[pipelines.one]\nstreams = [\"a\"]\nto = \"file:a.ndjson\"\n[pipelines.two]\nstreams = [\"b\"]\nto = \"file:b.ndjson\"\n",
    );
    let summary = shop.run(&["run", "-c", "airtight.toml", "--drain", "--json"]).json();
    assert_eq!(summary["delivered"], 3);
    assert_eq!(summary["pipelines"][0]["name"], "one");
    assert_eq!(summary["pipelines"][0]["delivered"], 2);
    assert_eq!((shop.lines("a.ndjson").len(), shop.lines("b.ndjson").len()), (2, 1));
}

#[test]
fn pipelines_that_overlap_are_refused() {
    let shop = Shop::new();
    shop.write(
        "airtight.toml",
        "[pipelines.one]\nto = \"null:\"\n[pipelines.two]\nstreams = [\"b\"]\nto = \"null:\"\n",
    );
    let error = shop.run(&["run", "-c", "airtight.toml"]).error(2);
    assert!(
        error.starts_with(
            "error: airtight.toml:3: pipelines.two: pipelines `one` and `two` both read stream `b`"
        ),
        "{error}"
    );
}

#[test]
fn addresses_that_make_no_sense() {
    let shop = Shop::new();
    for (url, expected) in [
        (
            "mysql://root:hush@localhost/shop",
            "error: --url: `mysql://root:XXX@localhost/shop` is not a database that this version knows",
        ),
        ("postgres://app:hush@localhost", "names no database"),
        ("sqlite:", "needs a path"),
        ("shop", "is not a database"),
    ] {
        let error = shop.run(&["status", "--url", url]).error(2);
        assert!(error.contains(expected), "{url}: {error}");
        assert!(!error.contains("hush"), "{error}");
    }
    assert_eq!(
        shop.run(&["run", "--to", "gopher://x"]).error(2),
        "error: --to: unknown sink `gopher:`; known sinks are `stdout:`, `file:PATH`, `http(s)://…`, `kafka://…`, `nats://…`, `amqp://…`, `redis://…` and `null:`"
    );
    // What a broker's address says is read before anything connects.
    for (to, expected) in [
        ("kafka:localhost", "`kafka:` needs an address"),
        ("kafka://localhost/{nope}", "unknown field `{nope}`"),
        ("kafka://me:hush@localhost?formt=raw", "`formt` is not a setting"),
        ("kafka://localhost?acks.x=hush", "`acks.x` is not a setting of librdkafka"),
        ("nats://localhost/a b", "subject"),
        ("amqp://me:hush@localhost?format=xml", "`xml`"),
        ("redis://me:hush@localhost?key={nope}", "unknown field `{nope}`"),
    ] {
        let error = shop.run(&["run", "--to", to]).error(2);
        assert!(error.contains(expected), "{to}: {error}");
        assert!(!error.contains("hush"), "{error}");
    }
}

#[test]
fn a_config_that_is_not_there() {
    let shop = Shop::new();
    let error = shop.run(&["run", "-c", "nowhere.toml"]).error(2);
    assert!(error.starts_with("error: cannot read the config nowhere.toml: "), "{error}");
}

#[test]
fn check_finds_streams_that_nobody_reads() {
    let shop = Shop::new();
    shop.publish("1", "{}");
    shop.write("airtight.toml", "[pipelines.one]\nstreams = [\"other\"]\nto = \"null:\"\n");
    let found = shop.run(&["check", "-c", "airtight.toml", "--json"]).json();
    assert_eq!(found["ok"], true);
    let expected = "no pipeline of the config reads stream `shop.orders`, where 1 event is waiting";
    let findings = found["findings"].as_array().unwrap();
    assert!(findings.iter().any(|finding| finding["message"] == expected), "{found}");
}

#[test]
fn check_fails_on_an_outbox_that_is_not_there() {
    let shop = Shop::new();
    let ran = shop.run(&["check", "--url", "sqlite:nowhere.db"]);
    assert_eq!(ran.code, Some(1));
    assert!(ran.stdout.starts_with("fatal there is no file nowhere.db"), "{ran:?}");
}
