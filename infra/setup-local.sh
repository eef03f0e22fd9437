#!/usr/bin/env bash
# Runs the whole stack on this machine: in containers if a Docker engine runs, otherwise from packages.
set -euo pipefail

infra=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
# shellcheck source-path=SCRIPTDIR source=../scripts/services
source "$infra/../scripts/services" # root, say, die, ours, end_process, port_is_free, recorded

local_dir=${IVM_LOCAL_DIR:-$root/target/local}
cache=${XDG_CACHE_HOME:-$HOME/.cache}/airtight
export IVM_PG_PORT=${IVM_PG_PORT:-5432} IVM_KAFKA_PORT=${IVM_KAFKA_PORT:-9092}
export IVM_CONNECT_PORT=${IVM_CONNECT_PORT:-8083} IVM_UI_PORT=${IVM_UI_PORT:-8080}
export IVM_PG_PASSWORD=${IVM_PG_PASSWORD:-ivm}
with=airtight packages=no service=setup-local

usage() {
    cat <<'USAGE'
usage: infra/setup-local.sh [up|down|status] [--debezium] [--packages]

  up       start what is not running yet, and print the addresses (the default)
  down     stop the stack; data is kept
  status   print what runs; exit 0 only if everything runs

  --debezium   Debezium relays the outbox, instead of airtight
  --packages   use packages, even if Docker runs

  IVM_PG_PORT, IVM_KAFKA_PORT, IVM_CONNECT_PORT, IVM_UI_PORT   instead of 5432, 9092, 8083 and 8080
  IVM_PG_PASSWORD   the password of the user ivm, instead of "ivm"
  IVM_AIRTIGHT      the path of an airtight binary to run, instead of building one
  IVM_LOCAL_DIR     the directory for data and logs without Docker, instead of target/local
USAGE
}

# --- with Docker ------------------------------------------------------------------------------------

docker_runs() {
    [[ $packages == no ]] && docker info >/dev/null 2>&1 && docker compose version >/dev/null 2>&1
}

compose() { docker compose --file "$infra/compose.yaml" --profile "$with" "$@"; }

up_with_docker() {
    case $with in
    airtight)
        docker compose --file "$infra/compose.yaml" --profile debezium rm --stop --force connect connector
        compose up --detach --build --wait
        ;;
    debezium)
        docker compose --file "$infra/compose.yaml" --profile airtight rm --stop --force airtight
        # By name, because --wait would treat the end of the registering container as a failure.
        compose up --detach --build --wait postgres kafka kafka-ui connect
        compose run --rm connector >/dev/null
        until_connector_runs
        ;;
    esac
}

# --- without Docker ---------------------------------------------------------------------------------

# PostgreSQL and Kafka as for the tests, but on well-known ports and with data that is kept.
services() {
    env -u DATABASE_URL AIRTIGHT_SERVICES_DIR="$local_dir" AIRTIGHT_KAFKA_KEEP=1 \
        AIRTIGHT_POSTGRES_PORT="$IVM_PG_PORT" AIRTIGHT_KAFKA_PORT="$IVM_KAFKA_PORT" "$self" "$@"
}

need_port() { # SERVICE VARIABLE
    services status "$1" >/dev/null 2>&1 || port_is_free "${!2}" || die "port ${!2} is in use; set $2 to another"
}

up_with_packages() {
    need_port postgres IVM_PG_PORT
    need_port kafka IVM_KAFKA_PORT
    services start postgres kafka
    eval "$(services env postgres kafka)"
    # Servers that run already may use other ports than the defaults.
    IVM_PG_PORT=$(<"$local_dir/postgres/port")
    IVM_KAFKA_PORT=$(<"$local_dir/kafka/port")
    export IVM_PG_HOST=127.0.0.1 IVM_KAFKA=127.0.0.1:$IVM_KAFKA_PORT
    make_database
    case $with in
    airtight)
        stop_program connect
        start_airtight
        ;;
    debezium)
        stop_program airtight
        start_connect
        register_connector
        until_connector_runs
        ;;
    esac
}

psql_here() { # USER DATABASE ARGUMENT...
    local psql
    psql=$(command -v psql) || psql=$AIRTIGHT_TEST_PG_BINDIR/psql
    "$psql" --no-psqlrc --quiet --set ON_ERROR_STOP=1 \
        "postgres://$1:$IVM_PG_PASSWORD@127.0.0.1:$IVM_PG_PORT/$2" "${@:3}"
}

# As in the container: `ivm` may do everything. A slot without a reader must not fill the disk.
make_database() {
    psql_here airtight postgres --set password="$IVM_PG_PASSWORD" <<'SQL'
SELECT 'CREATE ROLE ivm SUPERUSER LOGIN' WHERE NOT EXISTS (SELECT FROM pg_roles WHERE rolname = 'ivm') \gexec
ALTER ROLE ivm PASSWORD :'password';
SELECT 'CREATE DATABASE ivmlite OWNER ivm' WHERE NOT EXISTS (SELECT FROM pg_database WHERE datname = 'ivmlite') \gexec
ALTER SYSTEM SET max_slot_wal_keep_size = '2GB';
SELECT pg_reload_conf() \g /dev/null
SQL
    psql_here ivm ivmlite --file "$infra/init.sql" 2>&1 | sed '/already exists, skipping$/d' >&2
}

start_airtight() {
    local state=$local_dir/airtight program=${IVM_AIRTIGHT:-}
    ! running airtight || return 0
    if [[ -z $program ]]; then
        say "building airtight"
        export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$cache/target}
        (cd "$root" && cargo build --release --locked --quiet -p airtight-cli)
        program=$CARGO_TARGET_DIR/release/airtight
    fi
    # The path of this copy of the config identifies our process: other processes may also run `airtight run`.
    mkdir -p "$state"
    cp "$infra/airtight.toml" "$state/airtight.toml"
    "$program" migrate -c "$state/airtight.toml" >"$state/log" 2>&1 || give_up airtight
    "$program" check -c "$state/airtight.toml" >>"$state/log" 2>&1 || give_up airtight
    launch airtight "$program" run -c "$state/airtight.toml"
    until_up airtight grep -q relaying "$state/log"
}

start_connect() {
    local state=$local_dir/connect
    ! running connect || return 0
    port_is_free "$IVM_CONNECT_PORT" || die "port $IVM_CONNECT_PORT is in use; set IVM_CONNECT_PORT to another"
    fetch_debezium
    mkdir -p "$state"
    {
        cat "$infra/debezium/connect.properties"
        printf '%s\n' "bootstrap.servers=$IVM_KAFKA" "plugin.path=$(dirname "$(debezium_jars)")" \
            "listeners=http://127.0.0.1:$IVM_CONNECT_PORT"
    } >"$state/connect.properties"
    # Kafka Connect is part of kafka-tools.
    launch connect "$AIRTIGHT_TEST_JAVA" "@$AIRTIGHT_TEST_KAFKA_HOME/java.options" \
        org.apache.kafka.connect.cli.ConnectDistributed "$state/connect.properties"
    until_up connect curl --silent --fail --output /dev/null "$(connect_url)"
    printf '%s\n' "$IVM_CONNECT_PORT" >"$state/port"
}

connect_url() { printf 'http://127.0.0.1:%s/connectors%s\n' "$IVM_CONNECT_PORT" "${1:-}"; }

register_connector() {
    local answer
    answer=$(curl --silent --show-error --fail-with-body --request PUT --header 'Content-Type: application/json' \
        --data "@$infra/debezium/ivm-outbox-connector.json" "$(connect_url /ivm-outbox-connector/config)") ||
        die "Kafka Connect refuses the connector: $answer"
}

# The connector itself and its task.
until_connector_runs() {
    local status
    for _ in {1..120}; do
        status=$(curl --silent "$(connect_url /ivm-outbox-connector/status)" || true)
        [[ $(grep -o '"state":"RUNNING"' <<<"$status" | wc -l) -lt 2 ]] || return 0
        [[ $status != *'"state":"FAILED"'* ]] || break
        sleep 0.5
    done
    die "the connector is not running: ${status:0:2000}"
}

# --- the programs that this script starts: airtight and Connect -------------------------------------

running() { # NAME
    local state=$local_dir/$1
    ours "$(recorded pid)" "$state/"
}

launch() { # NAME COMMAND...: its command line names a file in its directory
    local detach=()
    ! command -v setsid >/dev/null || detach=(setsid)
    "${detach[@]}" "${@:2}" >>"$local_dir/$1/log" 2>&1 </dev/null &
    printf '%s\n' $! >"$local_dir/$1/pid"
    disown
}

until_up() { # NAME COMMAND...: until the command succeeds
    for _ in {1..600}; do
        ! "${@:2}" 2>/dev/null || return 0
        running "$1" || give_up "$1"
        sleep 0.1
    done
    give_up "$1"
}

give_up() { # NAME
    tail -n 20 "$local_dir/$1/log" >&2
    stop_program "$1"
    die "$1 did not start; see $local_dir/$1/log"
}

stop_program() { # NAME
    local state=$local_dir/$1
    running "$1" || return 0
    end_process "$(recorded pid)" "$state/" TERM KILL
    say "$1 stopped"
}

# --- commands ---------------------------------------------------------------------------------------

up() {
    if docker_runs; then
        up_with_docker
    else
        say "no Docker engine: using packages (data and logs in $local_dir)"
        up_with_packages
    fi
    echo
    echo "PostgreSQL   psql -h localhost -p $IVM_PG_PORT -U ivm -d ivmlite     (password $IVM_PG_PASSWORD)"
    echo "Kafka        localhost:$IVM_KAFKA_PORT, topics ivm.events.{aggregatetype}"
    if docker_runs; then
        echo "Kafka UI     http://localhost:$IVM_UI_PORT"
    else
        echo "Kafka UI     only with Docker"
    fi
    case $with in
    airtight) echo "relay        airtight (infra/airtight.toml)" ;;
    debezium) echo "relay        Debezium: curl http://localhost:$IVM_CONNECT_PORT/connectors/ivm-outbox-connector/status | jq" ;;
    esac
}

down() {
    if docker_runs; then
        docker compose --file "$infra/compose.yaml" --profile airtight --profile debezium down
    fi
    [[ -e $local_dir ]] || return 0
    stop_program airtight
    stop_program connect
    services stop kafka postgres
}

status() {
    local failed=0 name
    if docker_runs && [[ -n $(docker compose --file "$infra/compose.yaml" ps --quiet) ]]; then
        docker compose --file "$infra/compose.yaml" --profile airtight --profile debezium ps
        return
    fi
    services status postgres kafka || failed=1
    for name in airtight connect; do
        if running "$name"; then
            printf '%-10s running   pid %s  %s\n' "$name" "$(<"$local_dir/$name/pid")" "$local_dir/$name"
        else
            printf '%-10s stopped\n' "$name"
        fi
    done
    running airtight || running connect || failed=1
    return $failed
}

command=up
for argument in "$@"; do
    case $argument in
    up | down | status) command=$argument ;;
    --debezium) with=debezium ;;
    --packages) packages=yes ;;
    -h | --help)
        usage
        exit
        ;;
    *)
        usage >&2
        exit 2
        ;;
    esac
done
"$command"
