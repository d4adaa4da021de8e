"""LocalAI's two messages that stop processes without an intent: `backend.stop`, whose name has four meanings, and
`model.unload`.

Both act only on processes and remove nothing. They take no backend lock, so that they also stop processes that hang.
A name is only compared with running processes, so an invalid one is harmless.
"""

from __future__ import annotations

import asyncio
import logging

from enginehouse.core import wire
from enginehouse.core.errors import EnginehouseError, Unavailable
from enginehouse.core.intent import Outcome
from enginehouse.core.replica import process_key
from enginehouse.worker.commands.ports import CommandPorts
from enginehouse.worker.commands.work import outcome_of
from enginehouse.worker.engines.process_table import Stopped, is_at
from enginehouse.worker.protocol.names import plain_name

log = logging.getLogger(__name__)


async def stop_backend(parts: CommandPorts, payload: bytes) -> None:
    """Stop the processes whose key, backend, alias or model is the name; without one, all. May raise `Malformed`."""
    is_empty = payload.strip() in (b"", b"null")
    request = wire.decode(b"{}" if is_empty else payload, wire.BackendStopRequest, "the stop request")
    supervisor = parts.supervisor
    if not request.backend:
        ends = [await supervisor.stop_all()]
    else:
        directories = await _directories(parts, request.backend)
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(_stop_one(parts, request.backend)),
                group.create_task(supervisor.stop_model(request.backend)),
                *(group.create_task(supervisor.stop_from(directory)) for directory in directories),
            ]
        ends = [task.result() for task in tasks]
    stopped = sorted({key for end in ends for key in end.keys})
    survivors = sorted({key for end in ends for key in end.survivors})
    log.info("backend_stop.done name=%r stopped=%s survivors=%s", request.backend[:100], stopped, survivors)


async def unload(parts: CommandPorts, payload: bytes) -> Outcome:
    """Stop the replicas of a model, or the one at an address. Succeeds if there is none."""
    try:
        request = wire.decode(payload, wire.ModelUnloadRequest, "the unload request")
    except EnginehouseError as error:
        return outcome_of(error)
    if request.address:
        ends = [
            await _stop_one(parts, process_key(replica.model_id, replica.replica_index))
            for replica in parts.supervisor.running()
            if is_at(replica, request.address) and request.model_name in ("", replica.model_id)
        ]
    else:
        ends = [await parts.supervisor.stop_model(request.model_name)]
    stopped = tuple(key for end in ends for key in end.keys)
    survivors = [key for end in ends for key in end.survivors]
    if survivors:
        left = f"cannot unload {request.model_name}: {', '.join(survivors)} did not end after SIGKILL"
        return outcome_of(Unavailable(left, code="process_survived"))
    return Outcome(stopped=stopped)


async def _stop_one(parts: CommandPorts, key: str) -> Stopped:
    try:
        return Stopped((key,)) if await parts.supervisor.stop(key) else Stopped()
    except Unavailable:
        return Stopped(survivors=(key,))


async def _directories(parts: CommandPorts, name: str) -> set[str]:
    """The directories that a name may stand for; on an unreadable disk, only the name itself."""
    plain = plain_name(name)
    found = {name, plain}
    try:
        for backend in await parts.trees.list_installed():
            if backend.is_meta and backend.name in (name, plain):
                found.add(backend.meta_backend_for)
        found.update((await parts.trees.aliases()).get(plain, ()))
    except OSError as error:
        log.warning("backend_stop.names_unknown error=%s", error)
    return found
