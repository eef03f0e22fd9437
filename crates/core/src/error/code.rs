//! The codes of errors: one list for all backends.
//!
//! One cause has one code in all backends, so that a dashboard or a script need not know the backend.
//! docs/errors.md shows the list, and what to do about each code; `crates/core/tests/error_codes.rs` compares the two.

use std::{borrow::Cow, fmt};

use super::Class;

/// The short word for an error's cause, for machines: logs, tables, filters.
///
/// A code is one of the constants below, the status of an HTTP answer ([`Code::http`]), or a word that the embedding
/// program defines ([`Code::custom`]).
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Code(Cow<'static, str>);

/// A line of the list of codes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KnownCode {
    /// The word.
    pub code: &'static str,
    /// The class that an error with this code has most often. The backend may set another.
    pub usually: Class,
    /// The cause, in one line.
    pub meaning: &'static str,
}

impl Code {
    /// The code of an HTTP answer: `http_404`.
    pub fn http(status: u16) -> Self {
        Self(format!("http_{status}").into())
    }

    /// The HTTP status, if [`Code::http`] made this code.
    pub fn http_status(&self) -> Option<u16> {
        self.0.strip_prefix("http_")?.parse().ok()
    }

    /// A code that the program defines, for handlers and sinks that are not part of airtight: a short snake_case word. If
    /// the list has the cause, use its constant.
    pub fn custom(code: impl Into<Cow<'static, str>>) -> Self {
        Self(code.into())
    }

    /// The word, as it is stored and logged.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

macro_rules! codes {
    ($($name:ident = $code:literal, $usually:ident, $meaning:literal;)+) => {
        impl Code {
            $(
                #[doc = $meaning]
                pub const $name: Self = Self(Cow::Borrowed($code));
            )+

            /// All codes except those of HTTP and of embedding programs, in alphabetical order.
            pub const ALL: &'static [KnownCode] = &[
                $(KnownCode { code: $code, usually: Class::$usually, meaning: $meaning },)+
            ];
        }
    };
}

codes! {
    ADVERTISED = "advertised", Unavailable, "The Kafka cluster answers, but nothing answers at the addresses that it gives for its brokers.";
    AMBIGUOUS = "ambiguous", Permanent, "A time was given instead of an id, and several events were written at that time.";
    BAD_COLUMN = "bad_column", Permanent, "The mapping names a column that the table does not have, or one of a type that does not fit.";
    BAD_CONFIG = "bad_config", Permanent, "A setting is missing, unknown or has a value that cannot be used.";
    BAD_CONNECTOR = "bad_connector", Permanent, "The file of a Debezium connector is not a JSON object.";
    BAD_EVENT = "bad_event", Permanent, "A field of an event that is being published cannot be stored.";
    BAD_FORMAT = "bad_format", Permanent, "There is no message format of this name.";
    BAD_HEADERS = "bad_headers", Permanent, "The stored headers of an event are not a JSON object of strings.";
    BAD_LSN = "bad_lsn", Permanent, "A text is not a position in PostgreSQL's WAL.";
    BAD_MESSAGE = "bad_message", Permanent, "A message that was read from Kafka is not in the expected format.";
    BAD_NAME = "bad_name", Permanent, "A name is not allowed: a consumer, slot, schema, topic, subject, exchange or routing key.";
    BAD_OFFSET = "bad_offset", Permanent, "A consumer cannot be moved to this place: it is negative or in the future.";
    BAD_OP = "bad_op", Permanent, "The operation of an event is neither `upsert` nor `delete`.";
    BAD_PATH = "bad_path", Permanent, "The path of a file is not valid UTF-8.";
    BAD_PAYLOAD = "bad_payload", Permanent, "A payload is not valid JSON, or not what its handler expects.";
    BAD_PUBLICATION = "bad_publication", Permanent, "The PostgreSQL publication would leave out events.";
    BAD_REGEX = "bad_regex", Permanent, "The regular expression of a route cannot be used.";
    BAD_REPLACEMENT = "bad_replacement", Permanent, "The replacement of a route's regular expression cannot be used.";
    BAD_ROW = "bad_row", Permanent, "A row of the outbox cannot be read as an event.";
    BAD_SEQUENCE = "bad_sequence", Permanent, "The sequence of a log does not count up by one, caches values, or cycles.";
    BAD_SLOT = "bad_slot", Permanent, "The PostgreSQL replication slot of this name is of another kind or another database.";
    BAD_STATUS = "bad_status", Permanent, "A row has a status word that the mapping does not explain.";
    BAD_STATUS_WORDS = "bad_status_words", Permanent, "Two roles of the status column cannot be told apart.";
    BAD_TABLE = "bad_table", Permanent, "The table does not fit its mapping.";
    BAD_TEMPLATE = "bad_template", Permanent, "The template of a destination cannot be used.";
    BAD_URL = "bad_url", Permanent, "A URL cannot be used.";
    BAD_WAL = "bad_wal", Permanent, "A message of PostgreSQL's replication stream cannot be read.";
    BAD_ZONE = "bad_zone", Permanent, "CDC cannot read times in this time zone.";
    BEFORE_RETENTION = "before_retention", Permanent, "A consumer cannot be moved to this place: retention has removed the events.";
    BEHIND_RETENTION = "behind_retention", Permanent, "Retention has removed events that the consumer had not read.";
    BLOCKED = "blocked", Unavailable, "RabbitMQ has an alarm (memory or disk) and takes no messages.";
    BUSY = "busy", Retryable, "The server is busy with other work.";
    CANNOT_OPEN = "cannot_open", Permanent, "The SQLite file cannot be opened.";
    CHANNEL_CLOSED = "channel_closed", Retryable, "A RabbitMQ channel was closed, and no reason was given.";
    CLIENT_ENDED = "client_ended", Unavailable, "The Kafka client in this process has ended.";
    CLUSTER = "cluster", Unavailable, "The server is part of a Redis Cluster, which is not supported.";
    CONFLICT = "conflict", Permanent, "A unique index other than that of the event's id refused the event.";
    CONNECTION_LOST = "connection_lost", Unavailable, "An open connection broke.";
    CONSTRAINT = "constraint", Permanent, "The database refused a statement because of a constraint.";
    CORRUPT = "corrupt", Permanent, "The SQLite file is damaged, or is no database.";
    CREDENTIALS = "credentials", Unavailable, "The server does not accept the user, password, token or key.";
    DEADLOCK = "deadlock", Retryable, "The database ended a transaction because two waited for each other.";
    DEBEZIUM_COLUMN = "debezium_column", Permanent, "The Debezium format needs a column that the event does not have.";
    DEBEZIUM_CONVERTER = "debezium_converter", Permanent, "The Debezium converter writes bytes only, and the value is of another type.";
    DEBEZIUM_EXPAND = "debezium_expand", Permanent, "Debezium would find a schema for this JSON payload and then fail to fill it.";
    DEBEZIUM_PARTITION = "debezium_partition", Permanent, "The Debezium partition column is below 0.";
    DEBEZIUM_TIMESTAMP = "debezium_timestamp", Permanent, "The Debezium timestamp column holds no usable time.";
    DEBEZIUM_TOPIC = "debezium_topic", Permanent, "The Debezium route column is empty.";
    DEBEZIUM_TYPE = "debezium_type", Permanent, "A column is of a type that the Debezium format cannot write.";
    DEBEZIUM_VALUE = "debezium_value", Permanent, "A value does not fit the type of its column in the Debezium format.";
    DECLARED_DIFFERENTLY = "declared_differently", Unavailable, "The RabbitMQ exchange or queue exists with other settings.";
    DESTINATION_AWAY = "destination_away", Unavailable, "A drain ended while events still wait for a destination that is unavailable.";
    DISK_FULL = "disk_full", Retryable, "The disk is full.";
    DIVERGED = "diverged", Permanent, "The PostgreSQL server does not continue the history of the server that was read before.";
    EARLIER_RELAYS = "earlier_relays", Retryable, "Relays of an earlier version still read the same events.";
    EVICTED = "evicted", Retryable, "The relay's lease ran out, and another relay evicted it.";
    FENCED = "fenced", Retryable, "Another relay owns these events now.";
    FILE_REPLACED = "file_replaced", Permanent, "The SQLite file was removed or replaced while it was open.";
    FOREIGN_TABLE = "foreign_table", Permanent, "The table belongs to the application: airtight does not write events to it.";
    HALTED = "halted", Permanent, "The consumer is set to halt at an event that fails, and one failed.";
    HANDLER_TIMEOUT = "handler_timeout", Retryable, "A handler took longer than its time limit.";
    IN_USE = "in_use", Permanent, "A running relay uses the consumer or the slot.";
    IO = "io", Retryable, "Reading or writing a file or standard output failed.";
    LOADING = "loading", Unavailable, "Redis is loading its data.";
    LOCKED = "locked", Retryable, "Another transaction holds a lock for longer than this one could wait.";
    LOST_LEASES = "lost_leases", Permanent, "Relays ended repeatedly while they held this event: it may crash them.";
    MISCONF = "misconf", Unavailable, "Redis cannot save to its disk and takes no writes.";
    MISSING_FIELD = "missing_field", Permanent, "The event lacks a field that the template of its destination needs.";
    MOVED = "moved", Retryable, "An operator moved the reader, which starts again from the new position.";
    NACK = "nack", Unavailable, "RabbitMQ could not store the message.";
    NO_ACK = "no_ack", Unavailable, "The NATS stream is set to acknowledge nothing.";
    NO_DATABASE = "no_database", Unavailable, "The server has no database of this name or number.";
    NO_DEAD_LETTER_TOPIC = "no_dead_letter_topic", Permanent, "An event from Kafka cannot be handled, and no dead-letter topic is set.";
    NO_EVENT = "no_event", Permanent, "The database returned nothing for an event that was published.";
    NO_EXCHANGE = "no_exchange", Unavailable, "The RabbitMQ exchange does not exist.";
    NO_FILE = "no_file", Permanent, "The SQLite file does not exist, or none is named.";
    NO_HANDLER = "no_handler", Permanent, "There is no handler for this type of event.";
    NO_JETSTREAM = "no_jetstream", Unavailable, "JetStream is not enabled at the NATS server or for the account.";
    NO_LEADER = "no_leader", Unavailable, "A partition of the Kafka topic has no leader.";
    NO_LOOKUP = "no_lookup", Permanent, "The payloads are in another table, which CDC cannot join.";
    NO_OUTCOME = "no_outcome", Retryable, "The sink returned no outcome for an event.";
    NO_PARTITION = "no_partition", Permanent, "The event asks for a Kafka partition that its topic does not have.";
    NO_PUBLICATION = "no_publication", Permanent, "The PostgreSQL publication does not exist and cannot be created.";
    NO_QUEUE = "no_queue", Unavailable, "The RabbitMQ queue does not exist.";
    NO_REPLICATION = "no_replication", Permanent, "The PostgreSQL role may not replicate.";
    NO_SEQ = "no_seq", Permanent, "The mapping has no ascending column, which a log needs.";
    NO_SEQUENCE = "no_sequence", Permanent, "The ascending column of a log is not filled from one sequence.";
    NO_SLOTS = "no_slots", Permanent, "PostgreSQL has no replication slot left.";
    NO_STATUS = "no_status", Permanent, "The mapping has no status column, which a queue needs.";
    NO_STREAM = "no_stream", Unavailable, "No NATS stream takes the subject.";
    NO_TABLE = "no_table", Permanent, "A table of the application or of airtight does not exist.";
    NO_THREAD = "no_thread", Retryable, "The operating system could not create the thread that polls Kafka.";
    NO_TIME = "no_time", Permanent, "The mapping has no column with the time that the command needs.";
    NO_TOPIC = "no_topic", Unavailable, "The Kafka topic does not exist.";
    NO_VERSION = "no_version", Permanent, "The event lacks the version that the inbox compares.";
    NO_VHOST = "no_vhost", Unavailable, "RabbitMQ has no such virtual host, or this user may not use it.";
    NO_WAL = "no_wal", Permanent, "CDC was asked for on SQLite, which has no WAL to follow.";
    NOT_JETSTREAM = "not_jetstream", Unavailable, "Something other than a stream answers on the NATS subject.";
    NOT_OPEN = "not_open", Permanent, "A source was used before it was opened or after it was closed.";
    NOT_PERMITTED = "not_permitted", Unavailable, "The server knows the user, but does not permit the operation.";
    OTHER_SERVER = "other_server", Permanent, "The position was stored on another PostgreSQL server.";
    OUT_OF_MEMORY = "out_of_memory", Unavailable, "Redis has reached its `maxmemory`.";
    OVERLAP = "overlap", Permanent, "A running relay reads the same events with other settings.";
    PANIC = "panic", Retryable, "A sink, a handler or a relay panicked.";
    PAUSED = "paused", Permanent, "The consumer is paused.";
    POOL_EXHAUSTED = "pool_exhausted", Retryable, "All connections of this process's pool are in use.";
    POOLER = "pooler", Permanent, "A transaction pooler is between airtight and the database, and prepared statements are enabled.";
    PROMOTED = "promoted", Retryable, "A PostgreSQL standby was promoted; reading starts again there.";
    PUBLICATION_CHANGED = "publication_changed", Permanent, "The PostgreSQL publication was changed while the relay was not running.";
    PUBLICATION_LOST = "publication_lost", Permanent, "The PostgreSQL publication did not have the table for a while.";
    QUEUE_FULL = "queue_full", Unavailable, "The send queue of the Kafka client in this process is full.";
    READ_ONLY = "read_only", Unavailable, "The server is a standby or replica, or the file is not writable.";
    READER_GONE = "reader_gone", Unavailable, "The reader of standard output has closed the pipe.";
    REFUSED = "refused", Permanent, "The server refuses this statement or message as invalid.";
    ROW_SECURITY = "row_security", Permanent, "Row security hides rows of the table from this user.";
    SCHEMA_TOO_NEW = "schema_too_new", Permanent, "airtight's tables are newer than this program.";
    SEALED = "sealed", Unavailable, "The NATS stream is sealed.";
    SEQUENCE_BEHIND = "sequence_behind", Permanent, "The sequence gives out numbers that were used before: the table was truncated or restored.";
    SERVER_ERROR = "server_error", Retryable, "The server reported an error that has no code of its own in this list.";
    SERVER_TOO_OLD = "server_too_old", Permanent, "The server is older than the oldest supported version.";
    SET_BACK = "set_back", Retryable, "The PostgreSQL server is behind what was read from it: it was restored to an earlier state.";
    SHUTTING_DOWN = "shutting_down", Retryable, "The PostgreSQL server is shutting down or starting.";
    SKIPPED = "skipped", Retryable, "The sink skipped an event although none before it had failed.";
    SLOT_GONE = "slot_gone", Retryable, "The PostgreSQL replication slot vanished while the stream was starting.";
    SLOT_LOST = "slot_lost", Permanent, "The PostgreSQL replication slot is gone, or has lost WAL.";
    SLOT_MOVED = "slot_moved", Permanent, "The PostgreSQL replication slot is past the stored position.";
    STOPPING = "stopping", Retryable, "This process is stopping.";
    STREAM_FULL = "stream_full", Unavailable, "The NATS stream has reached its limits.";
    SUBJECT_FULL = "subject_full", Retryable, "The NATS subject has reached its limit of messages.";
    SUBSCRIBED = "subscribed", Permanent, "A subscription fills the table with numbers that another server assigned.";
    TIMEOUT = "timeout", Retryable, "The server did not answer in time.";
    TLS = "tls", Unavailable, "TLS with the server failed.";
    TOO_FEW_REPLICAS = "too_few_replicas", Unavailable, "Fewer replicas than required have the data.";
    TOO_LARGE = "too_large", Permanent, "The event is larger than a limit.";
    TOO_MANY_CHANNELS = "too_many_channels", Unavailable, "RabbitMQ allows no more channels on the connection.";
    TOO_MANY_CONNECTIONS = "too_many_connections", Retryable, "The server allows no more connections.";
    TOO_MANY_PARTITIONS = "too_many_partitions", Permanent, "More partitions were asked for than the table can have.";
    UNKNOWN_CONSUMER = "unknown_consumer", Permanent, "There is no consumer or reader of this name.";
    UNLOGGED = "unlogged", Permanent, "The table is not logged: a crash would empty it.";
    UNREACHABLE = "unreachable", Unavailable, "No connection to the server could be made.";
    UNROUTABLE = "unroutable", Unavailable, "No RabbitMQ queue is bound for the message.";
    WAL_LEVEL = "wal_level", Permanent, "PostgreSQL's `wal_level` is not `logical`.";
    WRONG_PROTOCOL = "wrong_protocol", Unavailable, "The server does not speak the expected protocol.";
    WRONG_SHAPE = "wrong_shape", Permanent, "A queue was asked for where the table is a log, or a log where it is a queue.";
    WRONG_STREAM = "wrong_stream", Unavailable, "The NATS subject belongs to another stream than the one in the config.";
    WRONG_TYPE = "wrong_type", Unavailable, "The Redis key cannot be used as a stream.";
}
