"""LocalAI's workers as a frontend sees them: they join without a key and say what they have when they are asked."""

from __future__ import annotations

from tests.frontend.world import World

from enginehouse.core import subjects, wire
from enginehouse.core.backend import InstalledBackend
from enginehouse.core.node import Node
from enginehouse.ports import Message

NOBODY = b""


def listed(*backends: tuple[str, str], at: str = "") -> wire.BackendListReply:
    """Names with their digests, all put in place at the same time."""
    found = tuple(
        InstalledBackend(name=name, is_system=False, is_meta=False, digest=digest, installed_at=at)
        for name, digest in backends
    )
    return wire.BackendListReply(backends=found or None)


def pointing(pointer: str, *backends: tuple[str, str]) -> wire.BackendListReply:
    """A listing with a pointer, of which LocalAI's workers do not say where it leads."""
    found = InstalledBackend(name=pointer, is_system=False, is_meta=True)
    return wire.BackendListReply(backends=(found, *(listed(*backends).backends or ())))


async def joined(world: World) -> Node:
    return await world.join("go", is_localai=True)


async def answer_polls(world: World, listing: wire.BackendListReply, running: bytes = b'{"models":[]}') -> list[str]:
    """Ask, answer, and take the answers; the verbs that were asked for."""
    await world.poller.step()
    asked = [one for one in world.bus.take() if one.reply.startswith(subjects.POLLS)]
    for one in asked:
        is_list = one.subject.endswith(subjects.LIST)
        payload = wire.encode(listing) if is_list else running
        world.bus.deliver(Message(one.reply, payload, no_responders=not payload))
    await world.poller.step()
    world.bus.take()
    return [one.subject.split(".", 2)[2] for one in asked]
