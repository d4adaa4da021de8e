"""One seed, expanded into a run about serving: machines with memory and slots, models that take some of it, what
operators and callers ask for, and what goes wrong.

Pure: the same seed gives the same options for ever. `weather` is what the other runs have as well; its requests are
empty, because operators here ask for other things.
"""

from __future__ import annotations

from random import Random
from typing import Literal

from msgspec import Struct
from tests.sim.options import Fault, FaultKind, Options

MIB = 1024**2
WishKind = Literal[
    "load",
    "unload",
    "schedule",
    "unschedule",
    "drain",
    "resume",
    "label",
    "unlabel",
    "edit",
    "delete_model",
    "cancel",
]
WISHES: tuple[WishKind, ...] = (
    *("load",) * 5,
    *("unload",) * 2,
    *("schedule",) * 6,
    "unschedule",
    *("drain", "resume", "label", "unlabel", "edit", "delete_model", "cancel"),
)
FAULTS: tuple[FaultKind, ...] = (
    "kill_frontend",
    "pause_frontend",
    "kill_worker",
    "stop_worker",
    "pause_worker",
    "cut_bus_of_frontend",
    "cut_bus_of_worker",
    "cut_link",
    "store_away",
    "store_away_for_one",
    "store_slow",
    "crash_engine",
    "crash_engine",
    "lose_engines",
    "lose_worker",
)
LABEL = "pool"  # the key of the only label that is ever set
CHOSEN = {LABEL: "a"}
LEASE_SECONDS = 7.5


class SimModel(Struct, frozen=True):
    """A model that the galleries offer. One whose demand is not known is placed anywhere the first time."""

    name: str
    backend: str
    memory_bytes: int
    is_known: bool = True
    checks_key: bool = True


MODELS = (
    SimModel("small", "alpha", 300 * MIB),
    SimModel("middle", "beta", 450 * MIB, checks_key=False),
    SimModel("large", "alpha", 700 * MIB),
    SimModel("riddle", "beta", 350 * MIB, is_known=False),
)
# Never a sum of demands: free memory of exactly nothing would be called unknown.
MEMORIES = (370 * MIB, 820 * MIB, 820 * MIB, 1210 * MIB, 1660 * MIB)


class Wanted(Struct, frozen=True):
    """The replicas that a schedule asks for."""

    least: int = 0
    most: int = 0
    spread: bool = False
    is_labelled: bool = False
    idle_seconds: float = 0.0


class Wish(Struct, frozen=True):
    """What an operator asks for. `node` is a number, -1 for none; to cancel is about an earlier wish."""

    number: int
    at: float
    kind: WishKind
    model: str
    frontend: int
    node: int = -1
    wanted: Wanted = Wanted()
    about: int = -1


class Asking(Struct, frozen=True):
    """A request for an answer, which takes the engine so long."""

    number: int
    at: float
    model: str
    frontend: int
    seconds: float


class ServingOptions(Struct, frozen=True, kw_only=True):
    weather: Options
    memories: tuple[int, ...]
    slots: tuple[int, ...]
    models: tuple[SimModel, ...] = MODELS
    wishes: tuple[Wish, ...]
    askings: tuple[Asking, ...]
    restarts: bool = True  # workers start engines again that ended by themselves
    calm_seconds: float = 25.0  # in which nothing may change any more


def expand_serving(seed: int) -> ServingOptions:
    chance = Random(f"serving/{seed}")
    nodes, frontends = chance.choice((1, 2, 2, 3, 3, 4)), chance.choice((1, 2, 2, 3))
    safety = chance.uniform(6.0, 22.0)
    is_calm = chance.random() < 0.15
    models = tuple(chance.sample([one.name for one in MODELS], chance.choice((1, 2, 2, 3))))
    return ServingOptions(
        weather=_weather(chance, seed, nodes, frontends, safety, is_calm=is_calm),
        memories=tuple(chance.choice(MEMORIES) for _ in range(nodes)),
        slots=tuple(chance.choice((1, 1, 1, 2, 3)) for _ in range(nodes)),
        wishes=_wishes(chance, nodes, frontends, safety, models),
        askings=_askings(chance, frontends, safety, models),
        restarts=chance.random() < 0.6,
        calm_seconds=100.0 if seed % 10 == 0 else 25.0,
    )


def _weather(chance: Random, seed: int, nodes: int, frontends: int, safety: float, *, is_calm: bool) -> Options:
    return Options(
        seed=seed,
        nodes=nodes,
        old_nodes=0,
        frontends=frontends,
        safety_seconds=safety,
        lease_seconds=chance.choice((3.0, LEASE_SECONDS)),
        shuffle=chance.choice((0.0, 0.0, 0.2)),
        drop_rate=0.0 if is_calm else chance.choice((0.0, 0.02, 0.2)),
        duplicate_rate=0.0 if is_calm else chance.choice((0.0, 0.1)),
        late_rate=0.0 if is_calm else chance.choice((0.0, 0.1)),
        late_seconds=5.0,
        reorder_rate=0.0 if is_calm else chance.choice((0.0, 0.3)),
        late_link_rate=0.0 if is_calm else chance.choice((0.0, 0.2)),
        collision_rate=0.0 if is_calm else chance.choice((0.0, 0.0, 0.1)),
        unknown_rate=0.0 if is_calm else chance.choice((0.0, 0.0, 0.0, 0.05)),
        install_seconds=chance.choice((0.05, 0.5, 2.0)),
        failing_rate=chance.choice((0.0, 0.0, 0.2)),
        hopeless_rate=0.0,
        stalling_rate=0.0,
        full_disk_rate=0.0,
        disk_error_rate=0.0,
        requests=(),
        faults=() if is_calm else _faults(chance, nodes, frontends, safety),
    )


def _faults(chance: Random, nodes: int, frontends: int, safety: float) -> tuple[Fault, ...]:
    kinds = chance.sample(FAULTS, chance.randint(1, 4))
    made: list[Fault] = []
    for _ in range(chance.randint(0, 5)):
        kind, at = chance.choice(kinds), chance.uniform(1.0, safety)
        # Some outlast STALE, some also twice that: then the node is offline.
        seconds = min(chance.choice((0.1, 1.0, 5.0, 12.0, 20.0)) * chance.uniform(0.6, 1.4), safety - at + 4.0)
        number = frontends if "frontend" in kind or "store" in kind else nodes
        made.append(Fault(at=at, seconds=seconds, kind=kind, target=chance.randrange(number)))
    return tuple(sorted(made, key=lambda fault: fault.at))


def _wishes(chance: Random, nodes: int, frontends: int, safety: float, models: tuple[str, ...]) -> tuple[Wish, ...]:
    made: list[Wish] = []
    for number in range(chance.randint(1, 7)):
        kind = chance.choice(WISHES)
        has_node = kind not in ("load", "unload") or chance.random() < 0.3
        made.append(
            Wish(
                number=number,
                at=chance.uniform(0.3, safety),
                kind=kind,
                model=chance.choice(models),
                frontend=chance.randrange(frontends),
                node=chance.randrange(nodes) if has_node else -1,
                wanted=_wanted(chance),
                about=chance.randrange(number) if number else -1,
            )
        )
    return tuple(sorted(made, key=lambda wish: wish.at))


def _wanted(chance: Random) -> Wanted:
    is_labelled = chance.random() < 0.3
    if chance.random() < 0.25:
        return Wanted(spread=True, is_labelled=is_labelled)
    least = chance.choice((0, 1, 1, 2, 2, 3))
    most = chance.choice((0, 0, least, least + 1)) if least else chance.choice((0, 1, 2))
    return Wanted(least=least, most=most, is_labelled=is_labelled, idle_seconds=chance.choice((0.0, 0.0, 6.0)))


def _askings(chance: Random, frontends: int, safety: float, models: tuple[str, ...]) -> tuple[Asking, ...]:
    made: list[Asking] = []
    for _ in range(chance.randint(0, 3)):
        at, model = chance.uniform(0.5, safety), chance.choice(models)
        # Several at once, on several frontends: one load serves them all.
        for _ in range(chance.choice((1, 2, 5))):
            made.append(
                Asking(
                    number=len(made),
                    at=at + chance.choice((0.0, 0.01, 0.5, 3.0)) * chance.random(),
                    model=model,
                    frontend=chance.randrange(frontends),
                    seconds=chance.choice((0.02, 0.5, 3.0, 12.0)),
                )
            )
    return tuple(sorted(made, key=lambda asking: asking.at))
