"""The route table: every route of the frontend with its method, path, role and summary.

A route that is not in this table does not exist, and a row cannot be written without a role. The application
(`app.build`) and the OpenAPI document (`openapi.document`) are both made from this table. The order matters where two
paths match the same request: the first one wins.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from enginehouse.api.audit import AuditRoutes
from enginehouse.api.auth import RouteRole
from enginehouse.api.backend_jobs import Apply, BackendJobRoutes
from enginehouse.api.backends import BackendRoutes
from enginehouse.api.doctor import DoctorRoutes
from enginehouse.api.events import EventRoutes
from enginehouse.api.history import HistoryRoutes
from enginehouse.api.model_definitions import ApplyRequest, DefinitionRoutes
from enginehouse.api.models import ModelRoutes, ModelTarget
from enginehouse.api.node_logs import NodeLogRoutes
from enginehouse.api.nodes import ApprovalRequest, NodeBackend, NodeRoutes
from enginehouse.api.openai import OpenAI
from enginehouse.api.operations import OperationRoutes, OperationTarget
from enginehouse.api.pages import PageRoutes
from enginehouse.api.program import ProgramRoutes
from enginehouse.api.program_logs import ProgramLogRoutes
from enginehouse.api.replicas import ReplicaRoutes
from enginehouse.api.schedules import ScheduleRoutes
from enginehouse.api.sessions import LinkRequest, SessionRequest, SessionRoutes
from enginehouse.api.settings import SettingRoutes
from enginehouse.api.system import SystemRoutes
from enginehouse.api.tokens import RotateRequest, TokenRequest, TokenRoutes
from enginehouse.api.uploads import UploadRoutes
from enginehouse.api.usage import UsageRoutes
from enginehouse.api.workers import WorkerRoutes
from enginehouse.core.model_answers import AddModel, CopyModel, ReplaceModel
from enginehouse.core.node_api import HeartbeatRequest, RegisterRequest
from enginehouse.core.operation import BackendRequest
from enginehouse.core.schedule import ScheduleRequest

# Summaries that are too long for a row of the table.
_OPERATIONS = "List operations, newest first: open and failed ones, or `all=true`. `before` takes the page's `next`."
_HISTORY = "List ended operations, newest first. `before` takes the page's `next`."
_ROTATE = "Give a token a new secret; the old one ends at once, or after `keep_seconds`."
_REMOVE_NODE = "Remove a node and cancel its waiting intents; a healthy one only with `force=true`."
_CANCEL = "Cancel the open intents of an operation, on every node or on one."
_RETRY = "Retry what failed or was cancelled, on every node or on one."
_RELEASE = "Let the nodes of an upgrade follow that wait for its canaries."
_EVENTS = "Stream every change as server-sent events; `operation=ID` selects one operation."
_PAST = "Show the last hour of requests, nodes and models; `nodes=ID,ID` or `nodes=none` selects."
_LOAD = "Load a model; installs what it needs."
_ADD_MODEL = "Add a model from sources, a configuration or files; with `load`, answers 202 with the operation."
_IMPORT = "Import LocalAI's model YAML or JSON from the body, or from `url`."
_UNLOAD = "Stop the replicas of a model."
_ENGINE_CALL = "Make any call of LocalAI's protocol to the engine of a model, with the message as JSON."
_SCHEDULE = "Store the schedule of a model: minimum, maximum, selector, one per node."
_EXPLAIN = "Explain where another replica would go, and per node why not."
_NODE_LOGS = "Show what the engine of a model has logged; with `follow=1` as events."
_WORKER_LOG = "Show the log of a worker itself; with `follow=1` as events."
_PROGRAM_LOG = "Show the log of `frontend` (the one that answers) or `nats`; with `follow=1` as events."
_USAGE = "What was used from `from` to `to`, summed by `by` (token,model,node,hour,day); a user token sees its own."
_AUDIT = "List who changed what and who was refused, newest first. `before` takes the page's `next`."
_LINK = "Make a login link, for one sign-in with this role within ten minutes."
_DELETE_MODEL = "Stop serving a model and remove its files from every node."


class ApiRoute(Struct, frozen=True):
    """One row of the table. Either `call` or `raw` is set; `raw` is a plain ASGI callable."""

    method: str
    path: str
    role: RouteRole
    summary: str
    call: Callable[[Request], Awaitable[Response]] | None = None
    raw: ASGIApp | None = None
    body: type | None = None
    status: int = 200
    is_plan: bool = False  # it changes nothing, although it is no GET

    @property
    def is_audited(self) -> bool:
        """Whether its requests change something that people answer for: neither inference nor what workers send."""
        is_change = self.method not in ("GET", "HEAD") and not self.is_plan
        return is_change and self.raw is None and self.role not in ("node", "machine")


class RouteObjects(Struct, frozen=True, kw_only=True):
    """The objects whose methods the table calls, one per resource."""

    pages: PageRoutes
    program: ProgramRoutes
    system: SystemRoutes
    workers: WorkerRoutes
    nodes: NodeRoutes
    operations: OperationRoutes
    events: EventRoutes
    history: HistoryRoutes
    backends: BackendRoutes
    jobs: BackendJobRoutes
    models: ModelRoutes
    definitions: DefinitionRoutes
    uploads: UploadRoutes
    schedules: ScheduleRoutes
    replicas: ReplicaRoutes
    tokens: TokenRoutes
    sessions: SessionRoutes
    audit: AuditRoutes
    settings: SettingRoutes
    usage: UsageRoutes
    node_logs: NodeLogRoutes
    program_logs: ProgramLogRoutes
    doctor: DoctorRoutes
    inference: OpenAI


def make_routes(of: RouteObjects) -> list[ApiRoute]:
    get, post, delete = partial(ApiRoute, "GET"), partial(ApiRoute, "POST"), partial(ApiRoute, "DELETE")
    plan = partial(ApiRoute, "POST", is_plan=True)
    system, nodes, operations = of.system, of.nodes, of.operations
    backends, jobs, scheduled = of.backends, of.jobs, of.schedules
    return [
        # The frontend itself.
        get("/", "public", "The web page.", of.pages.index),
        get("/web/{path:path}", "public", "A file of the web page.", of.pages.file),
        get("/join.sh", "public", "The script that makes another machine a node.", of.program.script),
        get("/join/{name}", "public", "A file that the script fetches: the wheel of this program.", of.program.file),
        get("/healthz", "public", "Liveness.", system.alive),
        get("/readyz", "public", "Readiness, with the reasons if not ready.", system.ready),
        get("/version", "reader", "The version of this frontend.", system.version),
        get("/metrics", "viewer", "Statistics for Prometheus.", system.statistics),
        get("/api/settings", "viewer", "List the settings of this frontend; secrets are omitted.", of.settings.every),
        get("/openapi.json", "viewer", "The OpenAPI document of this API.", system.document),
        *_worker_routes(of.workers),
        # Nodes.
        get("/api/nodes", "viewer", "List nodes, by name.", nodes.every),
        get("/api/nodes/scheduling", "viewer", "List schedules: the wanted replicas of models.", scheduled.every),
        post("/api/nodes/scheduling", "admin", _SCHEDULE, scheduled.put, body=ScheduleRequest),
        get("/api/nodes/scheduling/{model:path}", "viewer", "Show the schedule of a model.", scheduled.one),
        delete("/api/nodes/scheduling/{model:path}", "admin", "Remove it.", scheduled.remove, status=204),
        *_rejection_routes(nodes),
        get("/api/nodes/{id}", "viewer", "Show a node, by id or name.", nodes.one),
        delete("/api/nodes/{id}", "admin", _REMOVE_NODE, nodes.remove),
        post("/api/nodes/{id}/approve", "admin", "Approve a pending node.", nodes.approve, body=ApprovalRequest),
        post("/api/nodes/{id}/drain", "admin", "Drain a node and stop its replicas.", nodes.drain, status=202),
        post("/api/nodes/{id}/resume", "admin", "Give a drained node work again.", nodes.resume),
        get("/api/nodes/{id}/labels", "viewer", "Show the labels of a node.", nodes.labels),
        *(
            ApiRoute(method, "/api/nodes/{id}/labels", "admin", summary, nodes.set_labels, body=dict[str, str])
            for method, summary in (("PUT", "Set the labels of a node."), ("PATCH", "Add labels to a node."))
        ),
        delete("/api/nodes/{id}/labels/{key}", "admin", "Remove a label.", nodes.remove_label, status=204),
        get("/api/nodes/{id}/logs/{model:path}", "viewer", _NODE_LOGS, of.node_logs.logs),
        get("/api/nodes/{id}/backends", "viewer", "List a node's backends, as last reported.", nodes.backends),
        *(
            post(f"/api/nodes/{{id}}/backends/{kind}", "admin", summary, call, body=NodeBackend, status=202)
            for kind, summary, call in (
                ("install", "Install a backend on one node.", nodes.install),
                ("upgrade", "Upgrade a backend on one node.", nodes.upgrade),
                ("delete", "Delete a backend from one node.", nodes.delete),
            )
        ),
        # Operations and the event stream.
        post("/api/operations", "admin", "Request an operation.", operations.request, body=BackendRequest, status=202),
        plan("/api/operations/plan", "viewer", "Plan a request.", operations.plan, body=BackendRequest),
        get("/api/operations", "viewer", _OPERATIONS, operations.every),
        get("/api/operations/history", "viewer", _HISTORY, operations.history),
        get("/api/operations/{id}", "viewer", "Show an operation.", operations.one),
        post("/api/operations/{id}/cancel", "admin", _CANCEL, operations.cancel, body=OperationTarget),
        post("/api/operations/{id}/retry", "admin", _RETRY, operations.retry, body=OperationTarget, status=202),
        post("/api/operations/{id}/release", "admin", _RELEASE, operations.release),
        post("/api/operations/{id}/dismiss", "admin", "Take a failure off the open list.", operations.dismiss),
        get("/api/events", "viewer", _EVENTS, raw=of.events.events),
        # Backends and galleries; LocalAI's paths.
        get("/backends", "viewer", "List installed backends over all nodes.", backends.installed),
        get("/backends/available", "viewer", "List the backends that the galleries offer.", backends.available),
        get("/backends/galleries", "viewer", "List galleries: age and unusable entries.", backends.galleries),
        get("/backends/upgrades", "viewer", "List available upgrades, as of the last check.", backends.upgrades),
        post("/backends/upgrades/check", "admin", "Check the registries for upgrades now.", backends.check_upgrades),
        post("/backends/apply", "admin", "Install a backend on every compatible node.", jobs.apply, body=Apply),
        post("/backends/upgrade/{name}", "admin", "Upgrade a backend wherever it is installed.", jobs.upgrade),
        post("/backends/delete/{name}", "admin", "Delete a backend wherever it is installed.", jobs.delete),
        get("/backends/jobs/{id}", "viewer", "Show such an operation as a job of LocalAI's.", jobs.job),
        *_looking_routes(of),
        *_model_routes(of),
        *_access_routes(of),
        *_inference_routes(of),
    ]


def _worker_routes(workers: WorkerRoutes) -> list[ApiRoute]:
    """LocalAI's paths: `node`, singular."""
    get, post, delete = partial(ApiRoute, "GET"), partial(ApiRoute, "POST"), partial(ApiRoute, "DELETE")
    return [
        post("/api/node/challenge", "machine", "Get a challenge to sign at registration.", workers.challenge),
        post("/api/node/register", "machine", "Register a node.", workers.register, body=RegisterRequest, status=201),
        post("/api/node/{id}/heartbeat", "node", "Send a heartbeat.", workers.heartbeat, body=HeartbeatRequest),
        post("/api/node/{id}/deregister", "node", "Set the own node offline.", workers.deregister),
        delete("/api/node/{id}", "node", "LocalAI's alias of deregister.", workers.deregister),
        post("/api/node/{id}/drain", "node", "Announce that the worker is about to stop.", workers.leaving),
        post("/api/node/{id}/resume", "node", "Withdraw that announcement.", workers.staying),
        get("/api/node/{id}/models", "node", "List the replicas on the own node.", workers.models),
    ]


def _rejection_routes(nodes: NodeRoutes) -> list[ApiRoute]:
    back = "Let a rejected machine register again."
    return [
        ApiRoute("GET", "/api/nodes/rejected", "viewer", "List the machines that were rejected.", nodes.rejected),
        ApiRoute("DELETE", "/api/nodes/rejected/{id}", "admin", back, nodes.take_back, status=204),
        ApiRoute("POST", "/api/nodes/{id}/reject", "admin", "Remove a pending node and refuse its key.", nodes.reject),
    ]


def _looking_routes(of: RouteObjects) -> list[ApiRoute]:
    """What is wrong, and what the programs have logged."""
    get = partial(ApiRoute, "GET")
    return [
        get("/api/history", "viewer", _PAST, of.history.last_hour),
        get("/api/doctor", "viewer", "Check database, NATS, clock, disk and nodes; what to do.", of.doctor.look),
        get("/api/node/{id}/reach", "node", "Whether this frontend reaches the own node.", of.doctor.reach),
        get("/api/nodes/{id}/worker-log", "admin", _WORKER_LOG, of.node_logs.of_worker),
        get("/api/logs/{program}", "admin", _PROGRAM_LOG, of.program_logs.logs),
    ]


def _access_routes(of: RouteObjects) -> list[ApiRoute]:
    """Sessions of people, tokens, and what was done and used with them."""
    get, post, delete = partial(ApiRoute, "GET"), partial(ApiRoute, "POST"), partial(ApiRoute, "DELETE")
    sessions, tokens = of.sessions, of.tokens
    return [
        # Whoever has a code or a token may sign in.
        post("/api/session", "public", "Sign in: sets the cookie.", sessions.sign_in, body=SessionRequest, status=201),
        get("/api/session", "viewer", "Show who asks, by session or token.", sessions.present),
        delete("/api/session", "viewer", "Sign out: end this session everywhere.", sessions.sign_out, status=204),
        post("/api/session/links", "admin", _LINK, sessions.make_link, body=LinkRequest, status=201),
        get("/api/sessions", "admin", "List the sessions of all people.", sessions.every),
        delete("/api/sessions/{id}", "admin", "End a session.", sessions.end, status=204),
        post("/api/tokens", "admin", "Create a token.", tokens.create, body=TokenRequest, status=201),
        get("/api/tokens", "viewer", "List tokens; secrets are omitted.", tokens.every),
        post("/api/tokens/{id}/rotate", "admin", _ROTATE, tokens.rotate, body=RotateRequest),
        delete("/api/tokens/{id}", "admin", "Revoke a token, by id or name, within a second.", tokens.revoke),
        get("/api/audit", "admin", _AUDIT, of.audit.every),
        get("/api/usage", "reader", _USAGE, of.usage.summed),
    ]


def _model_routes(of: RouteObjects) -> list[ApiRoute]:
    """Models: rows, loads, LocalAI's routes, and uploads of their files."""
    get, post, delete = partial(ApiRoute, "GET"), partial(ApiRoute, "POST"), partial(ApiRoute, "DELETE")
    plan = partial(ApiRoute, "POST", is_plan=True)
    put, patch, head = partial(ApiRoute, "PUT"), partial(ApiRoute, "PATCH"), partial(ApiRoute, "HEAD")
    models, defined, uploads = of.models, of.definitions, of.uploads
    one, upload = "/api/models/{name:path}", "/api/uploads/{sha256}"
    return [
        get("/api/models", "viewer", "List served models and those that a gallery offers.", models.every),
        post("/api/models", "admin", _ADD_MODEL, defined.add, body=AddModel, status=201),
        post(f"{one}/load", "admin", _LOAD, models.load, body=ModelTarget, status=202),
        post(f"{one}/unload", "admin", _UNLOAD, models.unload, body=ModelTarget, status=202),
        post(f"{one}/copy", "admin", "Copy a model under another name.", defined.copy, body=CopyModel, status=201),
        get(f"{one}/explain", "viewer", _EXPLAIN, of.schedules.explain),
        get(f"{one}/load-status", "viewer", "How far the load of a model is.", of.schedules.load_status),
        get(f"{one}/export", "admin", "A model's configuration as LocalAI's YAML.", defined.export),
        get(one, "viewer", "Show a model: files, configuration, revision, replicas.", defined.show),
        put(one, "admin", "Replace the configuration of a model.", defined.replace, body=ReplaceModel),
        patch(one, "admin", "Change keys of a model's configuration; null removes.", defined.patch, body=ReplaceModel),
        delete(one, "admin", _DELETE_MODEL, models.delete, status=202),
        get("/api/replicas", "viewer", "List the replicas of all models.", of.replicas.every),
        post("/models/import", "admin", _IMPORT, defined.import_all, status=201),
        post("/models/apply", "admin", "Add a model of a gallery and load it.", defined.apply, body=ApplyRequest),
        plan("/models/plan", "viewer", "Show what such a request would add.", defined.plan, body=ApplyRequest),
        get("/models/jobs/{id}", "viewer", "Show such an operation as a job of LocalAI's.", defined.job),
        post("/models/delete/{name:path}", "admin", _DELETE_MODEL, defined.delete),
        get("/models/available", "viewer", "List the models that galleries offer; `term` searches.", defined.available),
        get("/models/galleries", "viewer", "List galleries of models: age and unusable entries.", defined.galleries),
        head(upload, "admin", "How far an upload is (`Upload-Offset`).", uploads.state),
        put(upload, "admin", "Append the part of a file that Content-Range names.", uploads.write, status=201),
        get(upload, "node", "An uploaded file, or a range of it, for workers.", uploads.read),
    ]


def _inference_routes(of: RouteObjects) -> list[ApiRoute]:
    """What applications call. The last two take whatever no other route takes."""
    get, post = partial(ApiRoute, "GET"), partial(ApiRoute, "POST")
    models = of.models
    return [
        get("/v1/models", "reader", "OpenAI: list models.", models.listed),
        get("/v1/models/{name:path}", "reader", "OpenAI: show a model.", models.described),
        *(
            post(f"{prefix}/{name}", "user", summary, raw=of.inference.at(f"/v1/{name}"))
            for prefix in ("/v1", "")  # LocalAI has most of them without the prefix too
            for name, summary in (
                ("chat/completions", "OpenAI: chat completion."),
                ("completions", "OpenAI: completion."),
                ("embeddings", "OpenAI: embeddings of texts."),
                ("rerank", "Jina: rank documents by a query."),
                ("tokenize", "LocalAI: the tokens of a text."),
                ("detokenize", "LocalAI: the text of tokens."),
            )
        ),
        post("/v1/{path:path}", "user", "Any other route that the engine of the model has.", raw=of.inference.passed),
        post("/api/engines/{model:path}/{call}", "admin", _ENGINE_CALL, raw=of.inference.engine_call),
    ]
