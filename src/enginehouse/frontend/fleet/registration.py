"""What a machine says about itself, checked before any of it reaches a row.

A join token only lets a machine ask, so nothing here is trusted: names, addresses and amounts have bounds that every
database takes. A registration out of bounds is refused; a heartbeat is brought into them, because an odd figure must
not make a working node look dead.
"""

from __future__ import annotations

import re

import msgspec

from enginehouse.core.errors import Invalid
from enginehouse.core.name import check_name, shown
from enginehouse.core.node import Capacity, NodeType
from enginehouse.core.node_api import HeartbeatRequest, RegisterRequest

MAX_LABELS = 64
MAX_LABELS_BYTES = 16 * 1024  # in all: rows of machines that nobody approved stay small
MAX_LABEL = 256  # characters of a label's value
MAX_LABEL_KEY = 317  # of its name: a prefix, a slash and a name, as Kubernetes has them
MAX_REPLICAS = 1_000_000
MAX_ADDRESS = 255
MAX_WORD = 64  # of what a machine says about its kind: platform, capability, vendor
MAX_AMOUNT = 2**63 - 1  # bytes, cores
_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)
_ADDRESS = re.compile(r"(?:\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._-]+):[0-9]{1,5}")
_LABEL = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._/:-]{{0,{MAX_LABEL_KEY - 1}}}")
_KEY = re.compile(r"[0-9a-f]{64}")
_AMOUNTS = ("available_vram", "total_vram", "available_ram", "available_disk", "total_disk")


def check_request(request: RegisterRequest) -> None:
    """Everything that a machine says about itself fits its column; `Invalid` names what does not."""
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
    for field in (*_AMOUNTS, "total_ram", "cores"):
        if not 0 <= getattr(request, field) <= MAX_AMOUNT:
            raise refused(request.name, f"its {field} is not an amount", field)
    if request.max_replicas_per_model > MAX_REPLICAS:  # less than one is read as one, as LocalAI does
        raise refused(request.name, "its max_replicas_per_model is not an amount", "max_replicas_per_model")
    if len(request.labels) > MAX_LABELS:
        raise refused(request.name, f"more than {MAX_LABELS} labels", "labels")
    if sum(len(key.encode()) + len(value.encode()) for key, value in request.labels.items()) > MAX_LABELS_BYTES:
        raise refused(request.name, f"its labels have more than {MAX_LABELS_BYTES} bytes", "labels")
    for key, value in request.labels.items():
        if not _LABEL.fullmatch(key):
            why = f"its label {shown(key)} must be at most {MAX_LABEL_KEY} letters, digits and any of . _ - / :"
            raise refused(request.name, why, "labels")
        if len(value) > MAX_LABEL or not value.isprintable():
            raise refused(request.name, f"its label {key} must be at most {MAX_LABEL} printable characters", "labels")


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


def capacity_of(request: RegisterRequest) -> Capacity:
    return Capacity(
        cores=request.cores,
        total_vram=request.total_vram,
        available_vram=request.available_vram,
        total_ram=request.total_ram,
        available_ram=request.available_ram,
        total_disk=request.total_disk,
        available_disk=request.available_disk,
        gpu_vendor=request.gpu_vendor,
        gpu_compute_capability=request.gpu_compute_capability,
    )


def capacity_after(capacity: Capacity, request: HeartbeatRequest) -> Capacity:
    """An absent key keeps the stored value; an explicit 0 is stored."""
    said = {field: getattr(request, field) for field in _AMOUNTS if getattr(request, field) is not None}
    said = {field: min(max(amount, 0), MAX_AMOUNT) for field, amount in said.items()}
    vendor = capacity.gpu_vendor if request.gpu_vendor is None else request.gpu_vendor[:MAX_WORD]
    return msgspec.structs.replace(capacity, **said, gpu_vendor=vendor)
