"""The routes that workers call (`/api/node/…`, singular, as in LocalAI): register, heartbeat, deregister."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from enginehouse.api.auth import bearer, host_of
from enginehouse.api.requests import caller_of, json_response, read_body
from enginehouse.core.errors import Denied, RateLimited
from enginehouse.core.ids import NodeId
from enginehouse.core.node_api import ChallengeReply, HeartbeatReply, HeartbeatRequest, RegisterReply, RegisterRequest
from enginehouse.core.node_identity import JoinOrigin, may_speak_for
from enginehouse.frontend.delivery.reports import WorkerReports
from enginehouse.frontend.fleet.bus_credentials import BusCredentials
from enginehouse.frontend.fleet.nodes import Nodes
from enginehouse.frontend.fleet.sign_in_limit import SignInLimit
from enginehouse.frontend.fleet.tokens import Keys
from enginehouse.frontend.localai.worker_tokens import WorkerTokens
from enginehouse.frontend.watching.views import render_time


class WorkerRoutes:
    def __init__(
        self,
        nodes: Nodes,
        reports: WorkerReports,
        keys: Keys,
        credentials: BusCredentials,
        worker_tokens: WorkerTokens | None = None,
        *,
        heartbeat_seconds: float,
    ) -> None:
        self._worker_tokens = worker_tokens
        self._nodes = nodes
        self._reports = reports
        self._keys = keys
        self._credentials = credentials
        self._heartbeat_seconds = heartbeat_seconds
        self._strangers = SignInLimit()

    async def challenge(self, _request: Request) -> Response:
        return json_response(ChallengeReply(challenge=await self._nodes.challenge(self._keys.now())))

    async def register(self, request: Request) -> Response:
        asked = await read_body(request, RegisterRequest)
        origin = _origin(request)
        if _is_invited(request):
            registered = await self._nodes.register(asked, origin)
        else:
            # By its key alone. Each attempt costs a transaction, and anybody may try.
            wait = self._strangers.begin(origin.host, self._keys.now())
            if wait:
                error = RateLimited("cannot register: this address was refused too often; wait a minute")
                error.retry_after_seconds = self._strangers.retry_seconds(wait)
                raise error
            registered = await self._nodes.register(asked, origin, is_invited=False)
            self._strangers.forgive(origin.host)
        node = registered.node
        if node.is_localai and not await self._credentials.is_refresh(node.id):
            # A LocalAI worker: registering is its only sign that it was restarted.
            await self._reports.restarted(node.id)
        if not node.public_key:
            await self._learn(request, node.id)
        self._keys.learn_node(node.id, node.name, registered.token)  # it is used right after this answer
        reply = RegisterReply(
            id=node.id,
            name=node.name,
            node_type=node.node_type,
            status=node.status,
            created_at=render_time(node.created_at),
            node_token=registered.token,
            heartbeat_seconds=self._heartbeat_seconds,
            mark=registered.now,
        )
        if node.approved:
            given = await self._credentials.issue(node, _asked_host(request))
            reply = msgspec.structs.replace(reply, **msgspec.structs.asdict(given))
        return json_response(reply, 201)

    async def heartbeat(self, request: Request) -> Response:
        node_id = await self.own_node(request)
        said = await read_body(request, HeartbeatRequest)
        answer = await self._reports.heartbeat(node_id, said)
        if caller_of(request).role == "join":
            await self._learn(request, node_id)
        reply = HeartbeatReply(message="heartbeat received", **msgspec.structs.asdict(answer))
        caller = caller_of(request)
        if caller.has_previous:
            await self._nodes.forget_previous_token(node_id)
            await self._keys.read_node(node_id)
        if said.renew:
            reply = await self._renewed(request, node_id, reply)
        return json_response(reply)

    async def _learn(self, request: Request, node_id: NodeId) -> None:
        """Keep the token of a LocalAI worker: it expects the same of a frontend."""
        if self._worker_tokens is not None and caller_of(request).role == "join":
            await self._worker_tokens.learn(node_id, bearer(request.scope))

    async def _renewed(self, request: Request, node_id: NodeId, reply: HeartbeatReply) -> HeartbeatReply:
        """The reply with a new bus credential and a new token; the node itself does not change."""
        node, _ = await self._nodes.get(node_id)
        if not node.approved:
            return reply
        reply = msgspec.structs.replace(reply, credential=await self._credentials.issue(node, _asked_host(request)))
        if caller_of(request).role != "node":
            return reply  # a LocalAI worker, which has only the join token
        token = await self._nodes.rotate_token(node_id, bearer(request.scope))
        await self._keys.read_node(node_id)
        return msgspec.structs.replace(reply, node_token=token)

    async def deregister(self, request: Request) -> Response:
        await self._nodes.set_health(await self.own_node(request), "offline")
        return json_response({"message": "node set to offline"})

    async def own_node(self, request: Request) -> NodeId:
        """The node of the path, if the caller may act for it. A join token may act only for nodes without a key."""
        node_id = NodeId(request.path_params["id"])
        caller = caller_of(request)
        if caller.role == "node" and caller.node_id == node_id:
            return node_id
        if caller.role == "join":
            node, _ = await self._nodes.get(node_id)
            if node.id == node_id and may_speak_for(_origin(request), node):
                return node_id
        raise Denied("cannot act for another node: use the token that this node got when it registered")

    async def leaving(self, request: Request) -> Response:
        # Not the operator's drain: that would outlast the restart which this announces.
        await self._nodes.set_health(await self.own_node(request), "unhealthy")
        return json_response({"message": "node set to draining"})

    async def staying(self, request: Request) -> Response:
        await self._reports.heartbeat(await self.own_node(request), HeartbeatRequest())
        return json_response({"message": "node resumed"})

    async def models(self, request: Request) -> Response:
        node, _ = await self._nodes.get(await self.own_node(request))
        running = [
            {"node_id": node.id, "model_name": one.model_id, "replica_index": one.replica_index, "state": "loaded"}
            for one in node.report.replicas
        ]
        return json_response(running)


def _is_invited(request: Request) -> bool:
    """Whether a machine comes with a join token; without one it may be a node that has only its key."""
    return caller_of(request).role != "stranger"


def _origin(request: Request) -> JoinOrigin:
    """The token and the host that a request comes from. Headers of proxies are not trusted."""
    caller = caller_of(request)
    return JoinOrigin(caller.token_id, caller.only_node, request.client.host if request.client else "")


def _asked_host(request: Request) -> str:
    """The host name by which the worker reached this frontend; it reaches the bus by the same name."""
    return host_of("//" + request.headers.get("host", "")) or "127.0.0.1"
