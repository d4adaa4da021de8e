"""Validates what a machine reports about itself, before any of it is stored.

A join token only permits a registration, so nothing here is trusted: names, addresses and amounts have bounds that fit
every database. A registration out of bounds is refused. The values of a heartbeat are clamped, because an odd value
must not make a working node look dead.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from enginehouse.core.capacity import AMOUNTS, MAX_CORES, Capacity, GraphicsCard
from enginehouse.core.errors import Invalid
from enginehouse.core.name import check_name, shown
from enginehouse.core.node import NodeType
from enginehouse.core.node_api import HeartbeatRequest, RegisterRequest

MAX_LABELS = 64
MAX_LABELS_BYTES = 16 * 1024  # in total, so that rows of pending nodes stay small
MAX_LABEL = 256  # characters of a label's value
MAX_LABEL_KEY = 317  # of its key: a prefix, a slash and a name, as in Kubernetes
MAX_REPLICAS = 1_000_000
MAX_CARDS = 64
MAX_ADDRESS = 255
MAX_WORD = 64  # characters of the platform, capability and vendor
MAX_AMOUNT = 2**63 - 1  # bytes, cores
_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)
_ADDRESS = re.compile(r"(?:\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._-]+):[0-9]{1,5}")
_LABEL = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._/:-]{{0,{MAX_LABEL_KEY - 1}}}")
_KEY = re.compile(r"[0-9a-f]{64}")


def check_request(request: RegisterRequest) -> None:
    """Check that every field of a registration fits its column; `Invalid` names the first that does not."""
    check_name(request.name, "node")
    if _ID.fullmatch(request.name):
        raise refused(request.name, "its name looks like the id of a node", "name")
    if request.public_key and not _KEY.fullmatch(request.public_key):
        raise refused(request.name, "its key must be 64 hexadecimal digits", "public_key")
    for field in ("address", "http_address"):
        value = getattr(request, field)
        if value and (len(value) > MAX_ADDRESS or not _ADDRESS.fullmatch(value)):
            raise refused(request.name, f"its {field} must be HOST:PORT, of at most {MAX_ADDRESS} characters", field)
    for field in ("platform", "capability", "gpu_vendor", "gpu_compute_capability"):
        value = getattr(request, field)
        if len(value) > MAX_WORD or not value.isprintable():
            raise refused(request.name, f"its {field} must be at most {MAX_WORD} printable characters", field)
    for field in AMOUNTS:
        if not 0 <= getattr(request, field) <= MAX_AMOUNT:
            raise refused(request.name, f"its {field} must be a number from 0 to {MAX_AMOUNT}", field)
    if request.used_cores is not None and not 0 <= request.used_cores <= MAX_CORES:
        raise refused(request.name, f"its used_cores must be a number from 0 to {MAX_CORES:.0f}", "used_cores")
    if len(request.gpu_cards) > MAX_CARDS or request.gpu_cards != bounded_cards(request.gpu_cards):
        why = f"it may have {MAX_CARDS} cards, with names of at most {MAX_WORD} printable characters"
        raise refused(request.name, f"its gpu_cards are out of bounds: {why}", "gpu_cards")
    if request.max_replicas_per_model > MAX_REPLICAS:  # less than one means one, as in LocalAI
        raise refused(
            request.name, f"its max_replicas_per_model must be at most {MAX_REPLICAS}", "max_replicas_per_model"
        )
    check_labels(f"cannot register {request.name}", request.labels)


def check_labels(task: str, labels: Mapping[str, str]) -> None:
    """Raise `Invalid` for labels that a node cannot have."""

    def wrong(why: str) -> Invalid:
        return Invalid(f"{task}: {why}", code="invalid_name", param="labels")

    if len(labels) > MAX_LABELS:
        raise wrong(f"it has more than {MAX_LABELS} labels")
    if sum(len(key.encode()) + len(value.encode()) for key, value in labels.items()) > MAX_LABELS_BYTES:
        raise wrong(f"its labels have more than {MAX_LABELS_BYTES} bytes")
    for key, value in labels.items():
        if not _LABEL.fullmatch(key):
            raise wrong(f"its label {shown(key)} must be at most {MAX_LABEL_KEY} letters, digits and any of . _ - / :")
        if len(value) > MAX_LABEL or not value.isprintable():
            raise wrong(f"its label {key} must be at most {MAX_LABEL} printable characters")


def refused(name: str, why: str, param: str) -> Invalid:
    return Invalid(f"cannot register {name}: {why}", code="invalid_name", param=param)


def node_type_of(value: str) -> NodeType:
    if value in ("", "backend"):
        return "backend"
    if value == "agent":
        return "agent"
    raise Invalid(
        f"cannot register a node of type {shown(value)}: use 'backend' or 'agent'",
        code="unsupported",
        param="node_type",
    )


def capacity_after(capacity: Capacity, request: HeartbeatRequest) -> Capacity:
    """Return the capacity after a heartbeat. An absent key keeps the stored value; an explicit 0 is stored. The cores
    in use are those of this heartbeat, or unknown.
    """
    amounts = {field: getattr(request, field, None) for field in AMOUNTS}
    given = {field: min(max(amount, 0), MAX_AMOUNT) for field, amount in amounts.items() if amount is not None}
    vendor = capacity.gpu_vendor if request.gpu_vendor is None else request.gpu_vendor[:MAX_WORD]
    cards = capacity.gpu_cards if request.gpu_cards is None else bounded_cards(request.gpu_cards)
    used = None if request.used_cores is None else min(max(request.used_cores, 0.0), MAX_CORES)
    return msgspec.structs.replace(capacity, **given, used_cores=used, gpu_vendor=vendor, gpu_cards=cards)


def bounded_cards(cards: tuple[GraphicsCard, ...]) -> tuple[GraphicsCard, ...]:
    """The cards with every value within its bounds."""
    return tuple(
        GraphicsCard(
            index=min(max(card.index, 0), MAX_REPLICAS),
            name="".join(one for one in card.name if one.isprintable())[:MAX_WORD],
            total_vram=_bounded(card.total_vram),
            available_vram=_bounded(card.available_vram),
        )
        for card in cards[:MAX_CARDS]
    )


def _bounded(amount: int | None) -> int | None:
    return None if amount is None else min(max(amount, 0), MAX_AMOUNT)
