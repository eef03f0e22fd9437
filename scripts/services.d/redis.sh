# shellcheck shell=bash disable=SC2154  # $state, $user come from scripts/services
# Redis, for tests that share one; those that stop, fill or lock it start their own.

config=$state/redis.conf

# Redis rewrites its command line to its address, so that is what tells it from others.
mark() { printf 'redis-server 127.0.0.1:%s' "$(recorded port)"; }
running() { ours "$(recorded pid)" "$(mark)"; }
binary() { command -v redis-server; }
version() { "$(binary)" --version | grep -oE 'v=[0-9.]+' | cut -c3-; }

install() { program_of redis-server; }

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
    if already_running; then return; fi
    install
    prepare_state
    config=$state/redis.conf
    start_daemon redis.pid as_user "$(binary)" "$config"
}

stop() { stop_process "$(mark)" TERM KILL; }
status() { show_status version; }

env() {
    running || die "not running"
    printf 'export AIRTIGHT_TEST_REDIS=%q\n' "redis://127.0.0.1:$(recorded port)"
    # For tests that stop a server of their own.
    printf 'export AIRTIGHT_TEST_REDIS_BIN=%q\n' "$(binary)"
}
