"""One seed, expanded into everything a run is made of: fleet, rates of misfortune, what people request and when, which
process is struck by what.

Pure: the same seed gives the same options for ever, and a failing run is made smaller by leaving parts of them out.
"""

from __future__ import annotations

from random import Random
from typing import Literal

import msgspec
from msgspec import Struct

BackendKind = Literal["install", "upgrade", "delete", "cancel", "retry", "remove_node"]
RequestKind = BackendKind | Literal["load", "unload", "delete_model", "drain", "resume"]
FaultKind = Literal[
    "kill_frontend",
    "pause_frontend",
    "kill_worker",
    "power_cut",
    "stop_worker",
    "pause_worker",
    "cut_bus_of_frontend",
    "cut_bus_of_worker",
    "cut_link",
    "store_away",
    "store_away_for_one",
    "store_slow",
    "crash_engine",
    "lose_engines",
    "lose_worker",
]
FAULTS: tuple[FaultKind, ...] = (
    "kill_frontend",
    "pause_frontend",
    "kill_worker",
    "power_cut",
    "stop_worker",
    "pause_worker",
    "cut_bus_of_frontend",
    "cut_bus_of_worker",
    "cut_link",
    "store_away",
    "store_away_for_one",
    "store_slow",
)
ENDS_OF_A_LEASE: tuple[FaultKind, ...] = ("kill_frontend", "pause_frontend", "store_away_for_one")
# The usual one has the relations of the defaults. Short ones end often enough within a run that is not long.
LEASE_SECONDS = 7.5
SHORT_LEASES = (2.0, 3.0)
SHORT_LEASE_RATE = 0.42  # of the runs that do not outlive a usual one: a quarter of all runs then have a take-over
READ_ERROR_RATES = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.03, 0.15)
BACKENDS = ("alpha", "beta", "gamma")
METAS = ("engine", "motor")  # two more names for the first backend
META_RATE = 0.3  # of the requests about it that use one of them
GALLERIES = ("one", "two")  # both have every backend, each its own version of it
MODELS = ("small", "large")  # of the first and the second backend


WISHES: tuple[RequestKind, ...] = (
    ("install",) * 6 + ("upgrade",) * 2 + ("delete",) * 3 + ("cancel",) * 3 + ("retry", "remove_node")
)
MODEL_WISHES: tuple[RequestKind, ...] = ("load",) * 6 + ("unload", "delete_model", "delete_model", "drain", "resume")
OLD_WISHES: tuple[RequestKind, ...] = ("upgrade",) * 6  # what such a worker may not know
ABOUT_MODELS = frozenset({"load", "unload", "delete_model"})


class SimRequest(Struct, frozen=True):
    """What a client asks for, at which frontend. `nodes` are numbers; none means all of them. To cancel and to retry
    are about the operation of an earlier request, `about`. With a key the client asks until it is answered, and
    sometimes once more.
    """

    number: int
    at: float
    kind: RequestKind
    name: str
    frontend: int
    nodes: tuple[int, ...] = ()
    force: bool = False
    about: int = 0
    is_keyed: bool = False
    max_parallel: int = 0


# Of one model, so that later requests meet an engine that runs.
FIRST_LOAD = (SimRequest(number=100, at=0.5, kind="load", name=MODELS[0], frontend=0),)


class Fault(Struct, frozen=True):
    at: float
    seconds: float
    kind: FaultKind
    target: int


class Options(Struct, frozen=True, kw_only=True):
    seed: int
    nodes: int
    old_nodes: int  # of these so many are LocalAI's
    frontends: int
    safety_seconds: float
    lease_seconds: float = LEASE_SECONDS
    shuffle: float
    drop_rate: float
    duplicate_rate: float
    late_rate: float
    late_seconds: float
    reorder_rate: float
    late_link_rate: float
    collision_rate: float
    unknown_rate: float
    install_seconds: float
    failing_rate: float  # of installs, in a way that heals
    hopeless_rate: float
    stalling_rate: float
    full_disk_rate: float
    disk_error_rate: float
    read_error_rate: float = 0.0
    tag_moves_at: float = 0.0
    requests: tuple[SimRequest, ...]
    faults: tuple[Fault, ...]


def expand(seed: int) -> Options:
    chance = Random(seed)
    # Few, and long enough for a lease and for a silence only now and then: both are what a run costs.
    outlives_lease = chance.random() < 0.12
    nodes = chance.choice((1, 1, 2) if outlives_lease else (1, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 5))
    frontends = chance.choice((2, 2, 3) if outlives_lease else (1, 1, 2, 2, 3))
    safety = chance.uniform(13.0, 20.0) if outlives_lease else chance.uniform(3.0, 10.0)
    is_calm = not outlives_lease and chance.random() < 0.1
    has_models = chance.random() < 0.2
    old_nodes = 1 if chance.random() < 0.15 else 0
    more = 2 * MODEL_WISHES if has_models else old_nodes * OLD_WISHES
    options = Options(
        seed=seed,
        nodes=nodes,
        old_nodes=old_nodes,
        frontends=frontends,
        safety_seconds=safety,
        shuffle=chance.choice((0.0, 0.0, 0.2)),
        drop_rate=0.0 if is_calm else chance.choice((0.0, 0.02, 0.1, 0.3)),
        duplicate_rate=0.0 if is_calm else chance.choice((0.0, 0.05, 0.3)),
        late_rate=0.0 if is_calm else chance.choice((0.0, 0.05, 0.2)),
        late_seconds=chance.choice((5.0, 5.0, 5.0, 12.0)),
        reorder_rate=0.0 if is_calm else chance.choice((0.0, 0.3)),
        late_link_rate=0.0 if is_calm else chance.choice((0.0, 0.0, 0.2)),
        collision_rate=0.0 if is_calm else chance.choice((0.0, 0.0, 0.0, 0.05, 0.05, 0.3)),
        unknown_rate=0.0 if is_calm else chance.choice((0.0, 0.0, 0.05)),
        install_seconds=chance.choice((0.05, 0.5, 2.0, 5.0, 10.0)),
        failing_rate=chance.choice((0.0, 0.0, 0.2, 0.5)),
        hopeless_rate=chance.choice((0.0, 0.0, 0.1)),
        stalling_rate=chance.choice((0.0, 0.0, 0.1)),
        full_disk_rate=chance.choice((0.0, 0.0, 0.0, 0.1)),
        disk_error_rate=chance.choice((0.0, 0.0, 0.0, 0.1)),
        requests=(*(FIRST_LOAD if has_models else ()), *_requests(chance, nodes, frontends, safety, more)),
        faults=() if is_calm else _faults(chance, nodes, frontends, safety, has_models),
    )
    if outlives_lease:
        return _outliving(chance, options)
    # Sources of their own: what is drawn for these runs makes no other one different.
    options = msgspec.structs.replace(options, tag_moves_at=Random(f"{seed}/tags").uniform(0.5, safety))
    if not is_calm:
        rate = Random(f"{seed}/reads").choice(READ_ERROR_RATES)
        options = msgspec.structs.replace(options, read_error_rate=rate)
    options = msgspec.structs.replace(options, requests=_renamed(Random(f"{seed}/names"), options.requests))
    of_lease = Random(f"{seed}/lease")
    if not is_calm and of_lease.random() < SHORT_LEASE_RATE:
        return _outliving(of_lease, msgspec.structs.replace(options, lease_seconds=of_lease.choice(SHORT_LEASES)))
    return options


def _requests(
    chance: Random, nodes: int, frontends: int, safety: float, more: tuple[RequestKind, ...]
) -> tuple[SimRequest, ...]:
    backends = BACKENDS[: chance.choice((1, 1, 2, 3))]
    kinds = (*WISHES, *more)
    made: list[SimRequest] = []
    for number in range(chance.randint(1, 10)):
        kind = chance.choice(kinds)
        name = chance.choice(backends)
        about = chance.choice(made) if made else None
        at = chance.uniform(0.5, safety)
        if about is not None and (kind in ("cancel", "retry") or chance.random() < 0.3):
            # Soon after another: while that one is on its way, at work, or just done.
            at = about.at + chance.choice((0.01, 0.1, 1.0, 5.0)) * chance.random()
        if kind in ABOUT_MODELS:
            name = chance.choice(MODELS)
        elif kind != "delete":
            name = f"{chance.choice(GALLERIES)}@{name}"
        made.append(
            SimRequest(
                number=number,
                at=at,
                kind=kind,
                name=name,
                frontend=chance.randrange(frontends),
                nodes=() if chance.random() < 0.6 else tuple(chance.sample(range(nodes), chance.randint(1, nodes))),
                force=kind == "install" and chance.random() < 0.2,
                about=about.number if about is not None else number,
                is_keyed=chance.random() < 0.4,
                max_parallel=chance.choice((0, 0, 0, 1)),
            )
        )
    return tuple(sorted(made, key=lambda request: request.at))


def _renamed(chance: Random, requests: tuple[SimRequest, ...]) -> tuple[SimRequest, ...]:
    """The same requests, some of them for the first backend by another name of it."""
    renamed: list[SimRequest] = []
    for request in requests:
        gallery, at, plain = request.name.rpartition("@")
        if plain == BACKENDS[0] and request.kind in ("install", "upgrade", "delete") and chance.random() < META_RATE:
            request = msgspec.structs.replace(request, name=f"{gallery}{at}{chance.choice(METAS)}")
        renamed.append(request)
    return tuple(renamed)


def _faults(chance: Random, nodes: int, frontends: int, safety: float, has_models: bool) -> tuple[Fault, ...]:
    made: list[Fault] = []
    # Few kinds, so that they meet themselves as well.
    kinds = chance.sample((*FAULTS, "crash_engine") if has_models else FAULTS, chance.randint(1, 5))
    for _ in range(chance.randint(0, 6)):
        kind = chance.choice(kinds)
        at = chance.uniform(0.2, safety)
        made.append(
            Fault(
                at=at,
                seconds=min(chance.choice((0.05, 0.5, 3.0, 10.0)) * chance.uniform(0.5, 1.5), safety - at + 1.0),
                kind=kind,
                target=chance.randrange(frontends if "frontend" in kind or "store" in kind else nodes),
            )
        )
    return tuple(sorted(made, key=lambda fault: fault.at))


def _outliving(chance: Random, options: Options) -> Options:
    """The same, with a frontend that is away for longer than its leases last while what it sent is under way."""
    lease, replace = options.lease_seconds, msgspec.structs.replace
    sent = [
        request for request in options.requests if request.kind == "install" and request.at < options.safety_seconds / 2
    ]
    if not sent:
        at = chance.uniform(0.8, 2.0)
        name = f"{chance.choice(GALLERIES)}@{chance.choice(BACKENDS)}"
        sent = [SimRequest(number=200, at=at, kind="install", name=name, frontend=chance.randrange(options.frontends))]
        options = replace(options, requests=tuple(sorted((*options.requests, *sent), key=lambda request: request.at)))
    request = chance.choice(sent)
    at = max(request.at, 0.7) + chance.uniform(0.05, 0.8)
    seconds = lease * chance.uniform(1.2, 1.5) + 0.3  # and what a look at it may take
    # A lone frontend that wakes keeps what it had; one that is started again is somebody else.
    kind = chance.choice(ENDS_OF_A_LEASE) if options.frontends > 1 else "kill_frontend"
    away = Fault(at=at, seconds=seconds, kind=kind, target=request.frontend)
    return replace(
        options,
        safety_seconds=max(options.safety_seconds, at + seconds),
        install_seconds=chance.choice((1.8, 2.5, 4.0)) * lease,
        faults=tuple(sorted((*options.faults, away), key=lambda fault: fault.at)),
    )
