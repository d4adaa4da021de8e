"""One seed, expanded into everything a run is made of: fleet, rates of misfortune, what people wish and when, which
process is struck by what.

Pure: the same seed gives the same options for ever, and a failing run is made smaller by leaving parts of them out.
"""

from __future__ import annotations

from random import Random
from typing import Literal

from msgspec import Struct

WishKind = Literal["install", "upgrade", "delete", "cancel", "retry", "remove_node"]
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
BACKENDS = ("alpha", "beta", "gamma")
GALLERIES = ("one", "two")  # both have every backend, each its own version of it


WISHES: tuple[WishKind, ...] = (
    ("install",) * 6 + ("upgrade",) * 2 + ("delete",) * 3 + ("cancel",) * 3 + ("retry", "remove_node")
)


class Wish(Struct, frozen=True):
    """What a client asks for, at which frontend. `nodes` are numbers; none means all of them. To cancel and to retry
    are about the operation of an earlier wish, `about`. With a key the client asks until it is answered, and
    sometimes once more.
    """

    number: int
    at: float
    kind: WishKind
    name: str
    frontend: int
    nodes: tuple[int, ...] = ()
    force: bool = False
    about: int = 0
    is_keyed: bool = False
    max_parallel: int = 0


class Fault(Struct, frozen=True):
    at: float
    seconds: float
    kind: FaultKind
    target: int


class Options(Struct, frozen=True, kw_only=True):
    seed: int
    nodes: int
    frontends: int
    safety_seconds: float
    shuffle: float
    drop_rate: float
    duplicate_rate: float
    late_rate: float
    reorder_rate: float
    late_link_rate: float
    collision_rate: float
    unknown_rate: float
    install_seconds: float
    failing_rate: float  # of installs, in a way that heals
    hopeless_rate: float
    stalling_rate: float
    full_disk_rate: float
    wishes: tuple[Wish, ...]
    faults: tuple[Fault, ...]


def expand(seed: int) -> Options:
    chance = Random(seed)
    nodes = chance.choice((1, 1, 1, 2, 2, 3, 5))
    frontends = chance.choice((1, 1, 2, 2, 3))
    # Long enough for a lease and for a silence only now and then: idle seconds cost most of a run.
    safety = chance.uniform(14.0, 24.0) if chance.random() < 0.15 else chance.uniform(3.0, 10.0)
    is_calm = chance.random() < 0.1
    return Options(
        seed=seed,
        nodes=nodes,
        frontends=frontends,
        safety_seconds=safety,
        shuffle=chance.choice((0.0, 0.0, 0.2)),
        drop_rate=0.0 if is_calm else chance.choice((0.0, 0.02, 0.1, 0.3)),
        duplicate_rate=0.0 if is_calm else chance.choice((0.0, 0.05, 0.3)),
        late_rate=0.0 if is_calm else chance.choice((0.0, 0.05, 0.2)),
        reorder_rate=0.0 if is_calm else chance.choice((0.0, 0.3)),
        late_link_rate=0.0 if is_calm else chance.choice((0.0, 0.0, 0.2)),
        collision_rate=0.0 if is_calm else chance.choice((0.0, 0.0, 0.1)),
        unknown_rate=0.0 if is_calm else chance.choice((0.0, 0.0, 0.05)),
        install_seconds=chance.choice((0.05, 0.5, 2.0, 5.0, 10.0)),
        failing_rate=chance.choice((0.0, 0.0, 0.2, 0.5)),
        hopeless_rate=chance.choice((0.0, 0.0, 0.1)),
        stalling_rate=chance.choice((0.0, 0.0, 0.1)),
        full_disk_rate=chance.choice((0.0, 0.0, 0.1)),
        wishes=_wishes(chance, nodes, frontends, safety),
        faults=() if is_calm else _faults(chance, nodes, frontends, safety),
    )


def _wishes(chance: Random, nodes: int, frontends: int, safety: float) -> tuple[Wish, ...]:
    backends = BACKENDS[: chance.choice((1, 1, 2, 3))]
    made: list[Wish] = []
    for number in range(chance.randint(1, 10)):
        kind = chance.choice(WISHES)
        name = chance.choice(backends)
        about = chance.choice(made) if made else None
        at = chance.uniform(0.5, safety)
        if about is not None and (kind in ("cancel", "retry") or chance.random() < 0.3):
            # Soon after another: while that one is on its way, at work, or just done.
            at = about.at + chance.choice((0.01, 0.1, 1.0, 5.0)) * chance.random()
        made.append(
            Wish(
                number=number,
                at=at,
                kind=kind,
                name=name if kind == "delete" else f"{chance.choice(GALLERIES)}@{name}",
                frontend=chance.randrange(frontends),
                nodes=() if chance.random() < 0.6 else tuple(chance.sample(range(nodes), chance.randint(1, nodes))),
                force=kind == "install" and chance.random() < 0.2,
                about=about.number if about is not None else number,
                is_keyed=chance.random() < 0.4,
                max_parallel=chance.choice((0, 0, 0, 1)),
            )
        )
    return tuple(sorted(made, key=lambda wish: wish.at))


def _faults(chance: Random, nodes: int, frontends: int, safety: float) -> tuple[Fault, ...]:
    made: list[Fault] = []
    kinds = chance.sample(FAULTS, chance.randint(1, 5))  # few kinds, so that they meet themselves as well
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
