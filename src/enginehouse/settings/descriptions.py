"""What each setting of a frontend is for, with its default in brackets: for `--help` and for the list of settings.

Nothing is imported here, because every `--help` imports this.
"""

from __future__ import annotations

# Intervals and timeouts, in the order in which they are shown.
TIMINGS = {
    "heartbeat_seconds": "Interval of the workers' heartbeats (10s).",
    "stale_seconds": "A node is unhealthy after this long without a heartbeat, offline after twice that (30s).",
    "lease_seconds": "Lease of a frontend on what it dispatched (30s).",
    "reconcile_seconds": "Interval at which open operations are compared with reports (5s).",
    "stall_seconds": "Mark an action as stalled after this long without progress (2m).",
    "backend_install_timeout_seconds": "Mark an install that never reported progress as stalled after this long (15m).",
    "backend_upgrade_timeout_seconds": "Mark an upgrade that never reported progress as stalled after this long (15m).",
    "model_load_wait_seconds": "How long a request waits for its model to load; 0 means no limit (60s).",
    "canary_seconds": "How long the first nodes of an upgrade must stay ready before the others follow (30s).",
    "canary_limit_seconds": "When an upgrade whose first nodes do not become ready is taken back (15m).",
    "session_seconds": "How long a person stays signed in to the web page (168h).",
    "audit_kept_seconds": "How long records of the audit are kept (2160h).",
    "bus_credential_seconds": "Lifetime of a worker's bus credential (1h).",
}
DESCRIPTIONS = {
    **TIMINGS,
    "model_credentials": 'A file of lines NAME = "SECRET", for sources of models.',
    "registry_credentials": 'A file of lines "HOST" = "USER:PASSWORD".',
    "node_networks": "Networks within which an approved node may move without another approval.",
    "host": "Address to listen on (127.0.0.1).",
    "port": "HTTP port; if not given, 8080 or the next free one.",
    "backend_galleries": "Galleries after the built-in one, in LocalAI's format; [] for none.",
    "schedules": "A YAML or JSON file with a list of schedules, stored at each start.",
    "hf_endpoint": "Hugging Face, or a mirror of it (https://huggingface.co).",
    "model_galleries": "Galleries of models, in LocalAI's format; [] for none.",
    "nats_url": "The NATS server.",
    "prefix_cache": "Requests that begin alike go to one replica; models may say otherwise (on).",
    "prefix_cache_ttl_seconds": "How long a replica is expected to remember a prompt (5m).",
    "queue_length": "Requests per model that wait while all replicas are full; 0: none (1024).",
    "queue_wait_seconds": "How long such a request waits before it gets 503 (60s).",
    "processes": "Equal frontends behind the port; needs PostgreSQL (1).",
    "database_url": "SQLite or PostgreSQL (SQLite in the data directory).",
    "store_timeout_seconds": "How long the database may take before requests get 503 (4s).",
    "start_wait_seconds": "How long a start waits for the database and the bus (5m).",
    "route_memory_seconds": "How long warm requests are served without the database (60s).",
    "approve_keys": "Public keys (`nodes key`) of machines that need no approval and no join token.",
    "advertise_nats": "Address of NATS as workers reach it.",
    "allowed_hosts": "A host or network that may be reached although it is not public; http://HOST allows HTTP.",
    "admin_token": "The admin token of the cluster; without one, the first frontend creates it.",
    "join_token": "The join token of the cluster; without one, the first frontend creates it.",
    "log_level": "Least severity that is logged: debug, info, warning or error (info).",
}
