# shellcheck shell=bash disable=SC2154  # $state comes from scripts/services
# Apache Kafka in KRaft mode: one node that is broker and controller. It begins afresh at each start, as
# tests leave their topics behind, unless AIRTIGHT_KAFKA_KEEP is set. If it is not available, Kafka's tests
# use librdkafka's mock cluster.

kafka_version=4.1.1
slf4j_version=1.7.36 # the one that Kafka is built with
plugin=org.apache.maven.plugins:maven-dependency-plugin:3.6.1:copy-dependencies

# Outside of the checkout, since jars outlive it. With the tests' private servers in mind, all that a JVM
# needs to be told is in one file:  java @java.options kafka.Kafka server.properties
home=${XDG_CACHE_HOME:-$HOME/.cache}/airtight/kafka-$kafka_version
config=$state/server.properties

running() { ours "$(recorded pid)" "$config"; }

# --- installing -------------------------------------------------------------------------------------

java() {
    local program
    for program in "${JAVA_HOME:-/nowhere}/bin/java" "$(type -P java)" \
        $(printf '%s\n' /usr/lib/jvm/*/bin/java | sort -rV); do
        [[ -x $program ]] && [[ $(java_major "$program") -ge 17 ]] && printf '%s\n' "$program" && return
    done
    return 1
}

# openjdk version "17.0.15" 2025-04-15; Java 8 calls itself 1.8
java_version() { "$1" -version 2>&1 | sed -n 's/.* version "\([^"]*\)".*/\1/p'; }
java_major() { java_version "$1" | sed 's/[^0-9].*//' | grep . || echo 0; }

install() {
    java >/dev/null || apt_install openjdk-17-jre-headless || apt_install default-jre-headless
    java >/dev/null || die "a Java runtime is installed, but none of version 17 or later was found"
    mkdir -p "$home"
    # Other checkouts share the jars, and may be about to fetch them too.
    if command -v flock >/dev/null; then
        exec 7<"$home"
        flock 7
    fi
    [[ -d $home/lib ]] || fetch
    write_options
    exec 7<&-
}

# Into a directory that gets its name when all is there.
fetch() {
    local partial
    command -v mvn >/dev/null || apt_install maven
    say "fetching Kafka $kafka_version with Maven (54 MB)"
    rm -rf "$home"/partial.*
    partial=$(mktemp -d "$home/partial.XXXXXX")
    {
        echo '<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion>'
        echo '<groupId>airtight</groupId><artifactId>kafka</artifactId><version>1</version><dependencies>'
        dependency org.apache.kafka kafka_2.13 "$kafka_version"
        dependency org.apache.kafka kafka-tools "$kafka_version" # its command line: topics, consumer, …
        dependency org.slf4j slf4j-simple "$slf4j_version"
        echo '</dependencies></project>'
    } >"$partial/pom.xml"
    # A silent registry is given up on after a minute, by either of Maven's transports.
    mvn --batch-mode --quiet --file "$partial/pom.xml" "$plugin" -DincludeScope=runtime \
        -DoutputDirectory="$partial/lib" -Dmaven.wagon.rto=60000 -Daether.connector.requestTimeout=60000 \
        >"$home/maven.log" 2>&1 ||
        die "Maven cannot fetch Kafka $kafka_version; $home/maven.log says why"
    mv "$partial/lib" "$home/lib"
    rm -rf "$partial"
}

dependency() { # GROUP ARTIFACT VERSION
    printf '<dependency><groupId>%s</groupId><artifactId>%s</artifactId><version>%s</version></dependency>\n' "$@"
}

# An archive of loaded classes halves the time and the work of a start (2.0 s to 1.0 s). It fits one
# Java only; another one would leave it unused.
write_options() {
    local archive
    archive=$home/classes-$(java_version "$(java)").jsa
    options "-XX:SharedArchiveFile=$archive" -Xlog:cds=off >"$home/java.options.new"
    [[ -e $archive ]] || archive_classes "$archive" || true # it works without, too
    mv "$home/java.options.new" "$home/java.options"
}

options() { # OPTION...
    printf '"%s"\n' -Xmx512m -XX:+UseSerialGC -XX:TieredStopAtLevel=1 "$@" \
        -Dorg.slf4j.simpleLogger.showDateTime=true '-Dorg.slf4j.simpleLogger.dateTimeFormat=HH:mm:ss.SSS' \
        -Dorg.slf4j.simpleLogger.log.org.apache.kafka.common.config=warn \
        -cp "$home/lib/*"
}

# The archive is written at the exit of a server that has seen its start and its end.
archive_classes() { # FILE
    local state config broker controller made=1
    state=$(mktemp -d "$home/training.XXXXXX")
    config=$state/server.properties
    options "-XX:ArchiveClassesAtExit=$state/archive" -Xlog:cds=off >"$state/options"
    draw_port broker
    draw_port controller
    configure "$broker" "$controller"
    if launch "$home/java.options.new" "$state/options"; then
        end_process "$(recorded pid)" "$config" TERM KILL
        mv "$state/archive" "$1" && made=0
    fi
    rm -rf "$state"
    return $made
}

# What the tests that compare with Debezium need, where they are wanted. Kafka does without.
want_debezium() {
    [[ ${AIRTIGHT_WITH_DEBEZIUM:-} == 1 || ${CI:-false} == true ]] || return 0
    (fetch_debezium) || say "the tests that need Debezium will be skipped"
}

# --- running ----------------------------------------------------------------------------------------

# One node has one replica of everything. The small buffers save 130 MB; the rest saves waiting.
configure() { # PORT CONTROLLER_PORT
    cat >"$config" <<CONF
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:$2
listeners=PLAINTEXT://127.0.0.1:$1,CONTROLLER://127.0.0.1:$2
controller.listener.names=CONTROLLER
log.dirs=$state/data
auto.create.topics.enable=false
offsets.topic.num.partitions=1
offsets.topic.replication.factor=1
transaction.state.log.num.partitions=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
share.coordinator.state.topic.num.partitions=1
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
group.initial.rebalance.delay.ms=0
log.cleaner.dedupe.buffer.size=4194304
log.cleaner.io.buffer.size=131072
num.network.threads=2
num.io.threads=4
background.threads=2
CONF
}

# Returns when the broker serves, or fails when it has ended.
launch() { # FORMAT_OPTIONS OPTIONS
    local detach=()
    [[ -n ${AIRTIGHT_KAFKA_KEEP:-} ]] || rm -rf "$state/data"
    "$(java)" "@$1" kafka.tools.StorageTool format --ignore-formatted --cluster-id AAAAAAAAAAAAAAAAAAAAAQ \
        --config "$config" >"$state/log" 2>&1 || return
    ! command -v setsid >/dev/null || detach=(setsid)
    "${detach[@]}" "$(java)" "@$2" kafka.Kafka "$config" >>"$state/log" 2>&1 </dev/null 7<&- &
    printf '%s\n' $! >"$state/pid"
    disown
    for _ in {1..600}; do
        # Logged when clients are served, not when the port is open.
        ! grep -qF 'Kafka Server started' "$state/log" || return 0
        kill -0 "$(recorded pid)" 2>/dev/null || return 1
        sleep 0.1
    done
    end_process "$(recorded pid)" "$config" KILL
    return 1
}

start() {
    local port controller attempt
    if already_running; then
        want_debezium
        return
    fi
    install
    want_debezium
    state_for_caller
    config=$state/server.properties
    for attempt in {1..3}; do
        pick_port port
        pick_port controller controller-port
        [[ $port != "$controller" ]] || continue
        configure "$port" "$controller"
        if launch "$home/java.options" "$home/java.options"; then
            printf '%s\n' "$controller" >"$state/controller-port"
            started "$port"
            return
        fi
        [[ $attempt -eq 3 ]] || sleep 1
    done
    not_started
}

# Kafka does not mind being root, and another user could not read root's cache.
state_for_caller() {
    prepare_state
    [[ $EUID -ne 0 ]] || chown -R root "$state"
}

stop() { stop_process "$config" TERM KILL; }
status() { show_status echo "$kafka_version"; }

env() {
    running || die "not running"
    printf 'export AIRTIGHT_TEST_KAFKA=%q\n' "127.0.0.1:$(recorded port)"
    # For tests that stop a server of their own.
    printf 'export AIRTIGHT_TEST_KAFKA_HOME=%q AIRTIGHT_TEST_JAVA=%q\n' "$home" "$(java)"
    # For those that compare with Debezium.
    [[ ! -d $(debezium_jars) ]] || printf 'export AIRTIGHT_TEST_DEBEZIUM=%q\n' "$(debezium_jars)"
}
