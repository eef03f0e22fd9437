# shellcheck shell=bash disable=SC2154  # $state, $user come from scripts/services
# pgbouncer in transaction mode, before the PostgreSQL of postgres.sh: nothing that lives in a session
# survives it. That airtight works regardless is for the tests to show.

config=$state/pgbouncer.ini

external() { [[ -n ${DATABASE_URL:-} ]]; }
running() { ours "$(recorded pid)" "$config"; }
# /usr/sbin is not in everybody's PATH.
binary() { PATH=$PATH:/usr/sbin:/usr/local/sbin command -v pgbouncer; }
postgres_port() { cat "$state/../postgres/port"; }

install() {
    binary >/dev/null || apt_install pgbouncer
    binary >/dev/null || die "the package pgbouncer is installed, but the program was not found"
}

# Small pools, so that clients do share connections and session state would show. Users are those of
# PostgreSQL, by way of auth_query. Only extra_float_digits is ignored, as in most installations.
configure() { # PORT
    cat >"$config" <<CONF
[databases]
* = host=127.0.0.1 port=$(postgres_port)

[pgbouncer]
listen_addr = 127.0.0.1
listen_port = $1
unix_socket_dir =
pidfile = $state/pgbouncer.pid
logfile = $state/log
auth_type = trust
auth_file = $state/users
auth_user = airtight
admin_users = airtight
pool_mode = transaction
default_pool_size = 4
max_client_conn = 500
server_idle_timeout = 5
ignore_startup_parameters = extra_float_digits
CONF
    # Later versions can carry prepared statements over; the older ones in the field cannot.
    if version_from 1.21; then echo 'max_prepared_statements = 0' >>"$config"; fi
    echo '"airtight" ""' >"$state/users"
    postgres_port >"$state/backend"
    chmod 644 "$config" "$state/users"
}

version() { "$(binary)" --version | awk 'NR == 1 { print $2 }'; }
version_from() { printf '%s\n' "$1" "$(version)" | sort -CV; }

start() {
    local port attempt
    if external; then
        say "DATABASE_URL is set: not started"
        return
    fi
    needs postgres
    if running && [[ $(recorded backend) == "$(postgres_port)" ]]; then
        say "already running on 127.0.0.1:$(recorded port)"
        return
    fi
    ! running || stop
    install
    prepare_state
    config=$state/pgbouncer.ini
    for attempt in {1..5}; do
        port=$(pick_port)
        configure "$port"
        rm -f "$state/pgbouncer.pid" # it refuses to start beside one, stale or not
        if as_user "$(binary)" --quiet --daemon "$config" && answers "$port"; then
            cat "$state/pgbouncer.pid" >"$state/pid"
            printf '%s\n' "$port" >"$state/port"
            say "started on 127.0.0.1:$port"
            return
        fi
        [[ $attempt -eq 5 ]] || sleep 1
    done
    tail -n 20 "$state/log" >&2
    die "does not start; see $state/log"
}

answers() { # PORT
    for _ in {1..50}; do
        if [[ -s $state/pgbouncer.pid ]] && ! port_is_free "$1"; then return 0; fi
        sleep 0.1
    done
    return 1
}

stop() {
    if running; then
        # From 1.23 on, TERM waits for clients to leave.
        end_process "$(recorded pid)" "$config" TERM QUIT
        say "stopped"
    else
        say "not running"
    fi
}

status() {
    if running; then
        printf 'pgbouncer  running   %s  127.0.0.1:%s  pid %s  %s\n' \
            "$(version)" "$(recorded port)" "$(recorded pid)" "$state"
    else
        echo 'pgbouncer  stopped'
        external # none is expected then
    fi
}

env() {
    if external; then return; fi
    running || die "not running"
    printf 'export AIRTIGHT_TEST_PGBOUNCER=%q\n' "postgres://airtight@127.0.0.1:$(recorded port)"
}
