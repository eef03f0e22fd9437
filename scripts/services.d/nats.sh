# shellcheck shell=bash disable=SC2154  # $state, $user come from scripts/services
# NATS with JetStream on disk. Tests that stop, break or configure a server start their own.

config=$state/nats.conf

running() { ours "$(recorded pid)" "$config"; }
# /usr/sbin is not in everybody's PATH.
binary() { PATH=$PATH:/usr/sbin:/usr/local/sbin command -v nats-server; }
version() { "$(binary)" --version | sed 's/.*v//'; }

install() {
    binary >/dev/null || apt_install nats-server
    binary >/dev/null || die "the package nats-server is installed, but the program was not found"
}

configure() { # PORT
    cat >"$config" <<CONF
listen: "127.0.0.1:$1"
pid_file: "$state/nats.pid"
logfile: "$state/log"
jetstream { store_dir: "$state/data" }
CONF
    chmod 644 "$config"
}

# It has no way to go into the background by itself. In a session of its own, a Ctrl-C in the terminal is not for it.
detached() { # COMMAND...
    if command -v setsid >/dev/null; then
        as_user setsid --fork "$@" </dev/null >"$state/out" 2>&1
    else
        # The shell that waits for it must not hold the lock of `locked` either.
        as_user nohup "$@" </dev/null >"$state/out" 2>&1 9<&- &
    fi
}

start() {
    local port attempt
    if running; then
        say "already running on 127.0.0.1:$(recorded port)"
        return
    fi
    install
    prepare_state
    config=$state/nats.conf
    for attempt in {1..5}; do
        port=$(pick_port)
        configure "$port"
        rm -f "$state/nats.pid"
        detached "$(binary)" --config "$config"
        if answers "$port"; then
            cat "$state/nats.pid" >"$state/pid"
            printf '%s\n' "$port" >"$state/port"
            say "started on 127.0.0.1:$port"
            return
        fi
        [[ $attempt -eq 5 ]] || sleep 1
    done
    cat "$state/out" >&2
    tail -n 20 "$state/log" >&2
    die "does not start; see $state/log"
}

answers() { # PORT
    for _ in {1..50}; do
        if [[ -s $state/nats.pid ]] && ! port_is_free "$1"; then return 0; fi
        sleep 0.1
    done
    return 1
}

stop() {
    if running; then
        end_process "$(recorded pid)" "$config" TERM KILL
        say "stopped"
    else
        say "not running"
    fi
}

status() {
    if running; then
        printf 'nats       running   %s  127.0.0.1:%s  pid %s  %s\n' \
            "$(version)" "$(recorded port)" "$(recorded pid)" "$state"
    else
        echo 'nats       stopped'
        return 1
    fi
}

env() {
    running || die "not running"
    # The program is for tests that start a server of their own.
    printf 'export AIRTIGHT_TEST_NATS=%q AIRTIGHT_TEST_NATS_BIN=%q\n' \
        "nats://127.0.0.1:$(recorded port)" "$(binary)"
}
