# shellcheck shell=bash disable=SC2154  # $state, $user come from scripts/services
# NATS with JetStream on disk. Tests that stop, break or configure a server start their own.

config=$state/nats.conf

running() { ours "$(recorded pid)" "$config"; }
# /usr/sbin is not in everybody's PATH.
binary() { PATH=$PATH:/usr/sbin:/usr/local/sbin command -v nats-server; }
version() { "$(binary)" --version | sed 's/.*v//'; }

install() { program_of nats-server; }

configure() { # PORT
    cat >"$config" <<CONF
listen: "127.0.0.1:$1"
pid_file: "$state/nats.pid"
jetstream { store_dir: "$state/data" }
CONF
    chmod 644 "$config"
}

# It has no way to go into the background by itself. In a session of its own, a Ctrl-C in the terminal is not for it.
detached() { # COMMAND...
    if command -v setsid >/dev/null; then
        as_user setsid --fork "$@" </dev/null >"$state/log" 2>&1
    else
        # The shell that waits for it must not hold the lock of `locked` either.
        as_user nohup "$@" </dev/null >"$state/log" 2>&1 9<&- &
    fi
}

start() {
    if already_running; then return; fi
    install
    prepare_state
    config=$state/nats.conf
    start_daemon nats.pid detached "$(binary)" --config "$config"
}

stop() { stop_process "$config" TERM KILL; }
status() { show_status version; }

env() {
    running || die "not running"
    # The program is for tests that start a server of their own.
    printf 'export AIRTIGHT_TEST_NATS=%q AIRTIGHT_TEST_NATS_BIN=%q\n' \
        "nats://127.0.0.1:$(recorded port)" "$(binary)"
}
