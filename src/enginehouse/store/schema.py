"""The tables. Times are in seconds by the store's clock. Structured columns hold JSON text that only this program
reads.

A change here needs a migration in `migrations/versions`. New columns have server defaults, so that frontends of the
previous version keep working beside new ones.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
    false,
    true,
)

metadata = MetaData()

nodes = Table(
    "nodes",
    metadata,
    Column("id", String(36), primary_key=True),
    Column("name", String(128), nullable=False),
    Column("public_key", String(64), nullable=False),
    Column("node_type", String(16), nullable=False),
    Column("approved", Boolean, nullable=False),
    Column("health", String(16), nullable=False),
    Column("drained", Boolean, nullable=False),
    Column("address", String(512), nullable=False),
    Column("http_address", String(512), nullable=False),
    Column("capability", String(64), nullable=False),
    Column("platform", String(64), nullable=False),
    Column("labels", Text, nullable=False),
    Column("max_replicas_per_model", Integer, nullable=False),
    Column("capacity", Text, nullable=False),
    Column("report", Text, nullable=False),
    Column("token_hash", String(64), nullable=False),
    Column("created_at", Double, nullable=False),
    Column("updated_at", Double, nullable=False),
    Column("last_heartbeat", Double, nullable=False),
    Column("bus_away", Boolean, nullable=False, server_default=false()),
    # Distinguishes machines of the same name without a key: the token or the address with which the node joined.
    Column("claim", String(64), nullable=False, server_default=""),
    # Why a formerly approved node waits for approval again.
    Column("waits_for", String(512), nullable=False, server_default=""),
    # When the challenge of the last registration was issued: an older registration that arrives late is refused.
    Column("registered_at", Double, nullable=False, server_default="0"),
    # Valid until the node has used the token that replaces it.
    Column("previous_token_hash", String(64), nullable=False, server_default=""),
    # The registration token of a LocalAI worker, sealed with a secret that is not in the store; "" if unknown.
    Column("sealed_token", String(1024), nullable=False, server_default=""),
    # A known name with another key is another node and needs its own approval.
    UniqueConstraint("name", "public_key", "claim", name="nodes_identity"),
    Index("nodes_health", "approved", "health", "bus_away"),
    # For changes and their checksum: without it SQLite reads every report to get to these columns.
    Index("nodes_updated", "updated_at", "id"),
    # For tokens that another frontend has just issued.
    Index("nodes_token", "token_hash"),
    Index("nodes_previous_token", "previous_token_hash"),
)

# What every heartbeat changes, beside the wide rows of nodes and written for many at once. `capacity` and `heard_at`
# count before the columns in `nodes`, which frontends of the previous version use, unless those are newer.
node_liveness = Table(
    "node_liveness",
    metadata,
    Column("node_id", String(36), ForeignKey("nodes.id", ondelete="CASCADE"), primary_key=True),
    Column("heard_at", Double, nullable=False),
    Column("capacity", Text, nullable=False),
    # Of the report in `nodes`; "" if unknown.
    Column("report_digest", String(64), nullable=False, server_default=""),
    Column("boot_id", String(64), nullable=False, server_default=""),
    # When that report was last taken: it may have been confirmed many times since it was stored.
    Column("sequence", BigInteger, nullable=False, server_default="0"),
    Column("mark", Double, nullable=False, server_default="0"),
    # How many commands and processes it lists.
    Column("running", Integer, nullable=False, server_default="0"),
    Column("processes", Integer, nullable=False, server_default="0"),
)

operations = Table(
    "operations",
    metadata,
    Column("id", String(36), primary_key=True),
    Column("kind", String(16), nullable=False),
    Column("name", String(255), nullable=False),
    Column("author", String(128), nullable=False),
    Column("created_at", Double, nullable=False),
    Column("targets", Text, nullable=False),
    Column("excluded", Text, nullable=False),
    Column("is_steered", Boolean, nullable=False),
    Column("error_code", String(64), nullable=False),
    Column("error_message", Text, nullable=False),
    # Columns added later have server defaults, so that frontends of the previous version can still write rows.
    Column("asked", Text, nullable=False, server_default="{}"),
    Column("retry_of", String(36), nullable=False, server_default=""),
    Column("dismissed", Boolean, nullable=False, server_default=false()),
    # How the operation ended; "" while it is open. An index for searching only: the status is computed from the
    # intents.
    Column("ended_as", String(16), nullable=False, server_default=""),
    Column("replaces", Text, nullable=False, server_default="null"),
    # The canary phase of an upgrade, and which phase that is: "" for none. Those that are watched are looked for often.
    Column("canary", Text, nullable=False, server_default="null"),
    Column("canary_phase", String(16), nullable=False, server_default=""),
    Index("operations_canary", "canary_phase"),
    Index("operations_ended", "ended_as", "created_at"),
    Index("operations_created", "created_at"),
    Index("operations_name", "kind", "name", "created_at"),
    Index("operations_steered", "is_steered"),
)

intents = Table(
    "intents",
    metadata,
    Column("id", String(36), primary_key=True),
    Column("node_id", String(36), nullable=False),
    Column("subject", String(512), nullable=False),
    Column("generation", Integer, nullable=False),
    Column("action", Text, nullable=False),
    Column("state", String(16), nullable=False),
    Column("created_at", Double, nullable=False),
    Column("updated_at", Double, nullable=False),
    Column("due_at", Double, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("failures", Integer, nullable=False),
    Column("fence", Integer, nullable=False),
    Column("owner", String(64), nullable=False),
    Column("lease_until", Double, nullable=False),
    Column("dispatched_at", Double, nullable=False),
    Column("reason", String(64), nullable=False),
    Column("message", Text, nullable=False),
    Column("progress", Text, nullable=True),
    Column("outcome", Text, nullable=True),
    Column("version", Integer, nullable=False),
    Column("lane", String(36), nullable=False, server_default=""),
    Column("lane_width", Integer, nullable=False, server_default="0"),
    # The tag of the action, so that an unknown kind is never claimed; "" in rows of the first schema.
    Column("kind", String(32), nullable=False, server_default=""),
    Index("intents_due", "state", "due_at"),
    Index("intents_node", "node_id", "state", "due_at"),
    Index("intents_lane", "lane", "state"),
    Index("intents_updated", "updated_at"),
    UniqueConstraint("node_id", "subject", "generation", name="intents_generation"),
)

# An intent may serve several operations: a request equal to an open intent joins it.
operation_intents = Table(
    "operation_intents",
    metadata,
    Column("operation_id", String(36), ForeignKey("operations.id", ondelete="CASCADE"), primary_key=True),
    Column("intent_id", String(36), ForeignKey("intents.id", ondelete="CASCADE"), primary_key=True),
    Column("position", Integer, nullable=False),
    # The operation was cancelled while the intent continues for another one.
    Column("detached", Boolean, nullable=False, server_default=false()),
    # The meta name that the operation requested; if it joined an install of another name, its pointer is added later.
    Column("meta", String(128), nullable=False, server_default=""),
    Index("operation_intents_intent", "intent_id"),
)

# Idempotency keys: the same key with the same request is the same operation.
idempotency_keys = Table(
    "idempotency_keys",
    metadata,
    Column("author", String(128), primary_key=True),
    Column("key", String(255), primary_key=True),
    Column("body_hash", String(64), nullable=False),
    Column("operation_id", String(36), nullable=False),
    Column("created_at", Double, nullable=False),
    Index("idempotency_keys_created", "created_at"),
)

# Commands that a worker without cancellation may still carry out after their intent ended or was given back.
lingering_commands = Table(
    "lingering_commands",
    metadata,
    Column("intent_id", String(36), primary_key=True),
    Column("node_id", String(36), nullable=False),
    Column("subject", String(512), nullable=False),
    Column("sent_at", Double, nullable=False),
    # When the worker is known to have the command; 0 if unknown, because the worker may have been frozen or
    # unreachable.
    Column("received_at", Double, nullable=False, server_default="0"),
)

# The last generation per (node, subject). Frontends lock this row to order their requests.
subjects = Table(
    "subjects",
    metadata,
    Column("node_id", String(36), primary_key=True),
    Column("subject", String(512), primary_key=True),
    Column("generation", Integer, nullable=False),
)

models = Table(
    "models",
    metadata,
    Column("name", String(255), primary_key=True),
    Column("definition", Text, nullable=False),
    Column("created_at", Double, nullable=False),
    # Of the definition: whether a server elsewhere or another model serves it. Those are looked for often, and rows of
    # other models are not read then.
    Column("has_endpoint", Boolean, nullable=False, server_default=false()),
    Index("models_endpoint", "has_endpoint"),
)

replicas = Table(
    "replicas",
    metadata,
    Column("node_id", String(36), primary_key=True),
    Column("model", String(255), primary_key=True),
    Column("slot", Integer, primary_key=True),
    Column("revision", String(64), nullable=False),
    Column("address", String(255), nullable=False),
    Column("nonce", String(64), nullable=False),
    Column("backend", String(128), nullable=False),
    Column("key", String(128), nullable=False),
    Column("created_at", Double, nullable=False),
    Column("checks_key", Boolean, nullable=False, server_default=true()),
    Column("protocol", String(32), nullable=False, server_default="openai-http"),
    # The model as it was loaded, where requests are translated by its configuration.
    Column("definition", Text, nullable=False, server_default=""),
    Column("used_at", Double, nullable=False, server_default="0"),  # written in batches, seconds late
    # It gets no more requests, because it is about to be stopped.
    Column("leaving", Boolean, nullable=False, server_default=false()),
    # For the replicas of a model, and checksums per model.
    Index("replicas_model", "model", "created_at", "leaving"),
)

# How many replicas of a model are wanted, and where.
schedules = Table(
    "schedules",
    metadata,
    Column("model_name", String(255), primary_key=True),
    Column("node_selector", Text, nullable=False),
    Column("min_replicas", Integer, nullable=False),
    Column("max_replicas", Integer, nullable=False),
    Column("spread_all", Boolean, nullable=False),
    Column("route_policy", String(32), nullable=False),
    Column("balance_abs_threshold", Integer, nullable=False),
    Column("balance_rel_threshold", Double, nullable=False),
    Column("min_prefix_match", Double, nullable=False),
    Column("idle_seconds", Double, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("updated_at", Double, nullable=False),
)

# What is known of a model beyond its replicas; outlives them.
load_infos = Table(
    "load_infos",
    metadata,
    Column("model", String(255), primary_key=True),
    Column("revision", String(64), nullable=False),
    Column("memory_bytes", BigInteger, nullable=False),
    Column("kept", Text, nullable=False),
    Column("author", String(128), nullable=False),
    Column("scaled_at", Double, nullable=False),
    Column("failures", Integer, nullable=False),
    Column("retry_at", Double, nullable=False),
    Column("reason", Text, nullable=False),
)

# Memory and slots of loads under way. A row without a lease does not count.
reservations = Table(
    "reservations",
    metadata,
    Column("operation_id", String(36), primary_key=True),
    Column("node_id", String(36), nullable=False),
    Column("model", String(255), nullable=False),
    Column("slot", Integer, nullable=False),
    Column("memory_bytes", BigInteger, nullable=False),
    Column("until", Double, nullable=False),
    Column("settled_at", Double, nullable=False),  # when the replica was ready; 0 before
    UniqueConstraint("node_id", "model", "slot", name="reservations_slot"),
)

tokens = Table(
    "tokens",
    metadata,
    Column("id", String(36), primary_key=True),
    Column("role", String(16), nullable=False),
    Column("name", String(128), nullable=False),
    Column("hash", String(64), nullable=False, unique=True),
    Column("created_at", Double, nullable=False),
    # Set for a join token that is valid for this node only.
    Column("node", String(128), nullable=False, server_default=""),
    Column("revoked_at", Double, nullable=False, server_default="0"),  # 0 while the token is valid
    # What the token may use (`core.allowance`): names and patterns of models as JSON, and 0 where there is no limit.
    Column("models", Text, nullable=False, server_default="[]"),
    Column("requests_per_minute", BigInteger, nullable=False, server_default="0"),
    Column("tokens_per_minute", BigInteger, nullable=False, server_default="0"),
    Column("expires_at", Double, nullable=False, server_default="0"),  # 0 if it never expires
    # Sessions of people and login codes are rows with the roles `session` and `login` (`store.sessions`): the role that
    # they grant, the token they came from, and the address of who signed in.
    Column("grants", String(16), nullable=False, server_default=""),
    Column("parent", String(36), nullable=False, server_default=""),
    Column("address", String(64), nullable=False, server_default=""),
    Column("used_at", Double, nullable=False, server_default="0"),  # written in batches; 0 if never
    # The secret before a rotation, and until when it is valid.
    Column("previous_hash", String(64), nullable=False, server_default=""),
    Column("previous_until", Double, nullable=False, server_default="0"),
)

# Keys of machines that an operator does not want.
rejected_keys = Table(
    "rejected_keys",
    metadata,
    Column("public_key", String(64), primary_key=True),
    Column("name", String(128), nullable=False),
    Column("rejected_at", Double, nullable=False),
)

# Names of nodes that are gone, for what is told of the past.
removed_nodes = Table(
    "removed_nodes",
    metadata,
    Column("node_id", String(36), primary_key=True),
    Column("name", String(128), nullable=False),
    Column("removed_at", Double, nullable=False),
)

# What limited tokens used in the last minute, in steps of some seconds (`core.rate`); all frontends add to it.
rate_counts = Table(
    "rate_counts",
    metadata,
    Column("token_id", String(36), primary_key=True),
    Column("step", BigInteger, primary_key=True, autoincrement=False),
    Column("requests", BigInteger, nullable=False),
    Column("tokens", BigInteger, nullable=False),
)

# What was used, per hour. A token may be deleted, so its name is kept here.
usage_counts = Table(
    "usage_counts",
    metadata,
    Column("hour", BigInteger, primary_key=True, autoincrement=False),  # its beginning, in seconds
    Column("token_id", String(36), primary_key=True),
    Column("model", String(255), primary_key=True),
    Column("node", String(512), primary_key=True),
    Column("token_name", String(128), nullable=False),
    Column("requests", BigInteger, nullable=False),
    Column("errors", BigInteger, nullable=False),
    # Those of the errors that were no fault of the client.
    Column("failures", BigInteger, nullable=False, server_default="0"),
    Column("prompt_tokens", BigInteger, nullable=False),
    Column("completion_tokens", BigInteger, nullable=False),
)

# Who changed what, and who was refused (`core.audit`). Written in batches.
audit = Table(
    "audit",
    metadata,
    Column("id", String(36), primary_key=True),
    Column("at", Double, nullable=False),
    Column("who", String(128), nullable=False),
    Column("role", String(16), nullable=False),
    Column("token_id", String(36), nullable=False),
    Column("session_id", String(36), nullable=False),
    Column("address", String(64), nullable=False),
    Column("method", String(16), nullable=False),
    Column("path", String(512), nullable=False),
    Column("summary", String(255), nullable=False),
    Column("target", String(512), nullable=False),
    Column("status", Integer, nullable=False),
    Column("error", String(64), nullable=False),
    Column("operation_id", String(64), nullable=False),
    Column("count", Integer, nullable=False, server_default="1"),
    Index("audit_at", "at", "id"),
)

# Each challenge is valid once. A row is deleted when the challenge would have expired anyway.
used_challenges = Table(
    "used_challenges",
    metadata,
    Column("hash", String(64), primary_key=True),
    Column("until", Double, nullable=False),
)

# Public keys of the bus credentials issued to nodes, kept while they are valid.
bus_credentials = Table(
    "bus_credentials",
    metadata,
    Column("user", String(64), primary_key=True),
    Column("node_id", String(36), nullable=False),
    Column("issued_at", Double, nullable=False),
    Column("expires_at", Double, nullable=False),  # in seconds since 1970: compared by the bus server
    Column("revoked", Boolean, nullable=False, server_default=false()),
    Index("bus_credentials_node", "node_id"),
)

cluster_values = Table(
    "cluster_values",
    metadata,
    Column("name", String(64), primary_key=True),
    Column("value", Text, nullable=False),
)

leases = Table(
    "leases",
    metadata,
    Column("name", String(512), primary_key=True),
    Column("owner", String(64), nullable=False),
    Column("until", Double, nullable=False),
)

# SQLite only: one row, written once per boot of the machine (`store.clock`).
clock = Table(
    "clock",
    metadata,
    Column("boot", String(64), primary_key=True),
    Column("began_at", Double, nullable=False),  # the store's time at which the boot clock was zero
    Column("written_at", Double, nullable=False),
)
