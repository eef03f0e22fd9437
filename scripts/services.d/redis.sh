# shellcheck shell=bash disable=SC2154  # $state, $user come from scripts/services
# Redis, for tests that share one; those that stop, fill or lock it start their own.

config=$state/redis.conf

# Redis rewrites its command line to its address, so that is what tells it from others.
mark() { printf 'redis-server 127.0.0.1:%s' "$(recorded port)"; }
running() { ours "$(recorded pid)" "$(mark)"; }
binary() { command -v redis-server; }
version() { "$(binary)" --version | grep -oE 'v=[0-9.]+' | cut -c3-; }

install() {
    binary >/dev/null || apt_install redis-server
    binary >/dev/null || die "the package redis-server is installed, but the program was not found"
}

# Every write is fsynced before it is answered: what is reported delivered survives.
configure() { # PORT
    cat >"$config" <<CONF
bind 127.0.0.1
port $1
daemonize yes
dir $state
pidfile $state/redis.pid
logfile $state/log
appendonly yes
appendfsync always
save ""
CONF
    chmod 644 "$config"
}

start() {
    local port attempt
    if running; then
        say "already running on 127.0.0.1:$(recorded port)"
        return
    fi
    install
    prepare_state
    config=$state/redis.conf
    for attempt in {1..5}; do
        port=$(pick_port)
        configure "$port"
        rm -f "$state/redis.pid"
        if as_user "$(binary)" "$config" && answers "$port"; then
            cat "$state/redis.pid" >"$state/pid"
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
        if [[ -s $state/redis.pid ]] && ! port_is_free "$1"; then return 0; fi
        sleep 0.1
    done
    return 1
}

stop() {
    if running; then
        end_process "$(recorded pid)" "$(mark)" TERM KILL
        say "stopped"
    else
        say "not running"
    fi
}

status() {
    if running; then
        printf 'redis      running   %s  127.0.0.1:%s  pid %s  %s\n' \
            "$(version)" "$(recorded port)" "$(recorded pid)" "$state"
    else
        echo 'redis      stopped'
        return 1
    fi
}

env() {
    running || die "not running"
    printf 'export AIRTIGHT_TEST_REDIS=%q\n' "redis://127.0.0.1:$(recorded port)"
    # For tests that stop a server of their own.
    printf 'export AIRTIGHT_TEST_REDIS_BIN=%q\n' "$(binary)"
}
