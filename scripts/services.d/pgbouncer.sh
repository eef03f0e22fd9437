# shellcheck shell=bash disable=SC2154  # $state, $user come from scripts/services
# pgbouncer in transaction mode, before the PostgreSQL of postgres.sh: nothing that lives in a session
# survives it. That airtight works regardless is for the tests to show.

config=$state/pgbouncer.ini

external() { [[ -n ${DATABASE_URL:-} ]]; }
running() { ours "$(recorded pid)" "$config"; }
# /usr/sbin is not in everybody's PATH.
binary() { PATH=$PATH:/usr/sbin:/usr/local/sbin command -v pgbouncer; }
postgres_port() { cat "$state/../postgres/port"; }

install() { program_of pgbouncer; }

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
    if external; then
        say "DATABASE_URL is set: not started"
        return
    fi
    needs postgres
    if running && [[ $(recorded backend) == "$(postgres_port)" ]] && already_running; then return; fi
    ! running || stop
    install
    prepare_state
    config=$state/pgbouncer.ini
    start_daemon pgbouncer.pid as_user "$(binary)" --quiet --daemon "$config"
}

# From 1.23 on, TERM waits for clients to leave.
stop() { stop_process "$config" TERM QUIT; }

status() { show_status version || external; } # none is expected then

env() {
    if external; then return; fi
    running || die "not running"
    printf 'export AIRTIGHT_TEST_PGBOUNCER=%q\n' "postgres://airtight@127.0.0.1:$(recorded port)"
}
