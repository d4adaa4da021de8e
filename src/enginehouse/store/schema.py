"""The tables. Times are in seconds by the store's clock. Structured columns hold JSON text that only this program
reads.

A change here needs a migration in `migrations/versions`. New columns have server defaults, so that frontends of the
previous version keep working beside new ones.
"""

from __future__ import annotations

from sqlalchemy import (
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
    # A known name with another key is another node and needs its own approval.
    UniqueConstraint("name", "public_key", "claim", name="nodes_identity"),
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
