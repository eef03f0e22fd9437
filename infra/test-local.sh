#!/usr/bin/env bash
# Tests setup-local.sh without Docker, on free ports: committed events are on their topic, rolled-back ones are not.
# With --debezium, Debezium is the relay.
set -euo pipefail

infra=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
# shellcheck source-path=SCRIPTDIR source=../scripts/services
source "$infra/../scripts/services" # draw_port, ours

setup() { "$infra/setup-local.sh" "$1" --packages "${relay[@]}"; }

relay=()
[[ ${1:-} != --debezium ]] || relay=(--debezium)

fail() {
    echo "FAILED: $*" >&2
    tail -n 30 "$IVM_LOCAL_DIR"/{airtight,connect}/log >&2 2>/dev/null || true
    exit 1
}

expect() { # WHAT PATTERN TEXT
    [[ $3 =~ $2 ]] || fail "$1: expected $2, found: $3"
    echo "ok    $1"
}

sql() { psql --no-psqlrc -Atq --set ON_ERROR_STOP=1 "postgres://ivm:ivm@localhost:$IVM_PG_PORT/ivmlite" "$@"; }

# One transaction: a row, and the event that reports it.
ingest() { # VERSION commit|rollback
    sql <<SQL
BEGIN;
INSERT INTO raw_data (tenant_id, entity_key, version, payload) VALUES ('tenant-1', 'product-123', $1, '{"name": "빵"}');
INSERT INTO outbox (id, aggregatetype, aggregateid, type, payload)
VALUES (gen_random_uuid(), 'raw_data', 'tenant-1:product-123', 'RawDataIngested',
    '{"tenantId": "tenant-1", "entityKey": "product-123", "version": $1}');
$2;
SQL
}

# Kafka's own tools, which are independent of airtight.
tool() { # CLASS ARGUMENT...
    "$AIRTIGHT_TEST_JAVA" "@$AIRTIGHT_TEST_KAFKA_HOME/java.options" -Dorg.slf4j.simpleLogger.defaultLogLevel=off \
        "org.apache.kafka.tools.$1" --bootstrap-server "localhost:$IVM_KAFKA_PORT" "${@:2}" 2>/dev/null
}

consume() { # MESSAGES
    tool consumer.ConsoleConsumer --topic ivm.events.raw_data --from-beginning --max-messages "$1" \
        --timeout-ms 60000 --property print.key=true --property print.headers=true
}

messages_in_all() { tool GetOffsetShell --topic ivm.events.raw_data | awk -F: '{ sum += $3 } END { print sum }'; }

main() {
    local messages pids pid
    IVM_LOCAL_DIR=$(mktemp -d)
    chmod 755 "$IVM_LOCAL_DIR" # the server's user must get through
    draw_port IVM_PG_PORT
    draw_port IVM_KAFKA_PORT
    draw_port IVM_CONNECT_PORT
    export IVM_LOCAL_DIR IVM_PG_PORT IVM_KAFKA_PORT IVM_CONNECT_PORT
    trap 'setup down; rm -rf "$IVM_LOCAL_DIR"' EXIT

    setup up
    eval "$(AIRTIGHT_SERVICES_DIR=$IVM_LOCAL_DIR "$self" env kafka)"
    expect "wal_level" '^logical$' "$(sql -c 'SHOW wal_level')"
    ingest 1 ROLLBACK
    ingest 2 COMMIT
    ingest 3 COMMIT
    messages=$(consume 2)
    echo "$messages"
    expect "key and eventType, on ivm.events.raw_data" \
        'eventType:RawDataIngested.*'$'\t''tenant-1:product-123'$'\t' "$(head -n 1 <<<"$messages")"
    expect "the payload" '"entityKey": ?"product-123"' "$messages"
    expect "the first committed event comes first" '"version": ?2' "$(head -n 1 <<<"$messages")"
    expect "the second committed event comes second" '"version": ?3' "$(tail -n 1 <<<"$messages")"
    expect "there are no other messages" '^2$' "$(messages_in_all)"

    case ${relay[*]} in
    --debezium)
        expect "the connector" '"connector":\{"state":"RUNNING".*"tasks":\[\{"id":0,"state":"RUNNING"' \
            "$(curl --silent "http://localhost:$IVM_CONNECT_PORT/connectors/ivm-outbox-connector/status")"
        ;;
    *)
        for _ in {1..100}; do
            [[ $(sql -c "SELECT count(*) FROM outbox WHERE status = 'PROCESSED'") != 2 ]] || break
            sleep 0.1
        done
        expect "the outbox rows are marked as processed" '^PROCESSED\|t\|0$' \
            "$(sql -c 'SELECT DISTINCT status, processed_at IS NOT NULL, retry_count FROM outbox')"
        ;;
    esac

    pids=$(cat "$IVM_LOCAL_DIR"/*/pid)
    setup up >/dev/null
    expect "a second up changes nothing" "^$pids\$" "$(cat "$IVM_LOCAL_DIR"/*/pid)"
    setup status
    setup down
    for pid in $pids; do
        ! ours "$pid" "$IVM_LOCAL_DIR" || fail "process $pid still runs"
    done
    echo "ok    down leaves nothing running"
}

main
