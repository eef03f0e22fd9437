# shellcheck shell=bash disable=SC2154  # $state, $user come from scripts/services
# RabbitMQ: one node of its own, with an epmd of its own, so that no other Erlang node is met.

running() { ours "$(recorded pid)" "$state"; }
epmd_running() { ours "$(recorded epmd.pid)" "$state"; }

# Not the wrapper in /usr/sbin, which insists on the system's node and the user rabbitmq.
binary() {
    local file
    for file in $(printf '%s\n' /usr/lib/rabbitmq/lib/rabbitmq_server-*/sbin/rabbitmq-server | sort -rV) \
        /opt/homebrew/opt/rabbitmq/sbin/rabbitmq-server /usr/local/opt/rabbitmq/sbin/rabbitmq-server; do
        [[ -x $file ]] && printf '%s\n' "$file" && return
    done
    return 1
}

install() {
    program_of rabbitmq-server
    command -v epmd >/dev/null || die "rabbitmq-server is installed, but Erlang's epmd was not found"
}

# The dist port is for rabbitmqctl. All three are on loopback only.
configure() { # PORT EPMD_PORT DIST_PORT
    cat >"$state/rabbitmq.conf" <<CONF
listeners.tcp.1 = 127.0.0.1:$1
default_user = airtight
default_pass = airtight
log.console = true
log.file = false
CONF
    echo '[].' >"$state/enabled_plugins"
    # What the node and rabbitmqctl must agree on; the rest would be looked for in /etc and /var.
    node=(HOME="$state" ERL_EPMD_PORT="$2" ERL_EPMD_ADDRESS=127.0.0.1
        RABBITMQ_NODENAME="airtight_$1@localhost" RABBITMQ_DIST_PORT="$3"
        RABBITMQ_CONF_ENV_FILE="$state/none" RABBITMQ_CONFIG_FILE="$state/rabbitmq.conf"
        RABBITMQ_ADVANCED_CONFIG_FILE="$state/none.config" RABBITMQ_ENABLED_PLUGINS_FILE="$state/enabled_plugins"
        RABBITMQ_MNESIA_BASE="$state/mnesia" RABBITMQ_LOG_BASE="$state/logs"
        RABBITMQ_GENERATED_CONFIG_DIR="$state/generated"
        # The flag means nothing to Erlang: it is how we know our process again.
        RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS="-kernel inet_dist_use_interface {127,0,0,1} -airtight $state"
        # Makes the script replace itself by the server instead of waiting for it.
        detached=yes)
}

# Leaves the command running and notes its pid; the name holds $state, since epmd takes no flag for it.
launch() { # PIDFILE LOG NAME COMMAND...
    local pidfile=$1 log=$2 name=$3
    shift 3
    # shellcheck disable=SC2016  # meant for the inner shell
    as_user /usr/bin/env "${node[@]}" bash -c '(exec -a "$1" "${@:2}") & echo $! >"$0"' \
        "$state/$pidfile" "$name" "$@" </dev/null >"$state/$log" 2>&1
}

start() {
    local server port epmd_port dist_port
    if already_running; then return; fi
    install
    server=$(binary)
    prepare_state
    # Again, because a port can be taken in between.
    for _ in 1 2 3; do
        end_epmd
        rm -f "$state/pid" "$state/epmd.pid"
        pick_port port
        draw_port epmd_port
        draw_port dist_port
        configure "$port" "$epmd_port" "$dist_port"
        launch epmd.pid epmd.log "epmd of $state" epmd -port "$epmd_port" -address 127.0.0.1
        # Not finding it, the server would start one as a daemon, which nobody would end.
        up "$epmd_port" epmd.pid || continue
        launch pid log "$server" "$server"
        if up "$port" pid; then
            started "$port"
            return
        fi
        ! running || end_process "$(recorded pid)" "$state" TERM KILL
    done
    end_epmd
    not_started
}

up() { # PORT PIDFILE: it listens once it is ready, which takes the server seconds
    for _ in {1..600}; do
        ! listens_on "$(recorded "$2")" "$1" || return 0
        [[ ! -s $state/$2 ]] || kill -0 "$(recorded "$2")" 2>/dev/null || return 1
        sleep 0.1
    done
    return 1
}

end_epmd() {
    ! epmd_running || end_process "$(recorded epmd.pid)" "$state" TERM KILL
}

stop() {
    stop_process "$state" TERM KILL
    end_epmd
}

url() { printf 'amqp://airtight:airtight@127.0.0.1:%s/%%2F\n' "$(recorded port)"; }

server_version() { [[ $(binary) =~ rabbitmq_server-([0-9.]+) ]] && printf '%s\n' "${BASH_REMATCH[1]}"; }

status() { show_status server_version; }

env() {
    running || die "not running"
    printf 'export AIRTIGHT_TEST_RABBITMQ=%q\n' "$(url)"
    # For tests that stop a server of their own.
    printf 'export AIRTIGHT_TEST_RABBITMQ_BIN=%q\n' "$(binary)"
}
