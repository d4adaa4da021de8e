"""The figures of bench/scale.py and their bars, and the plot of them."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

COMPARED = 100  # nodes, whose CPU per node is compared
# The bars.
TIME_RATIO, TIME_MORE_SECONDS = 1.5, 2.0
CPU_RATIO = 1.5
WATCHER_BYTES_PER_NODE = 3000.0  # 3 MB at 1,000 nodes
NODES_RATIO = 3.0
IDLE_CORES, IDLE_POSTGRES_CORES = 0.1, 0.05
STATEMENTS_RATIO, SECOND_FRONTEND_RATIO = 3.0, 1.25
HEALTHY_SECONDS = 30.0
WARM_MORE_MS = 50.0


class Figure(Struct, frozen=True, kw_only=True):
    """A measured number. One with a bar holds if it is at most that."""

    name: str
    value: float
    unit: str = ""
    bar: float | None = None
    remark: str = ""

    @property
    def part(self) -> float:
        """Of its bar; 0 without one. A bar of 0 allows nothing."""
        if self.bar is None:
            return 0.0
        return self.value / self.bar if self.bar else (0.0 if self.value <= 0 else float("inf"))

    def __str__(self) -> str:
        bar = f" (bar {self.bar:.3g}{self.unit}: {self.part:.2f})" if self.bar is not None else ""
        remark = f"; {self.remark}" if self.remark else ""
        return f"{self.name}: {self.value:.3g}{self.unit}{bar}{remark}"


class Installed(Struct, frozen=True, kw_only=True):
    """One install to so many nodes."""

    nodes: int
    seconds: float  # until the operation and all watchers show it as done
    cpu_seconds: float  # of the frontend
    bytes_per_watcher: float
    nodes_ms: float  # GET /api/nodes?limit=100, the mean, meanwhile
    idle_nodes_ms: float  # and before
    cuts: int = 0  # watchers that were too slow and came back
    remark: str = ""

    @property
    def cpu_ms_per_node(self) -> float:
        return self.cpu_seconds * 1000 / self.nodes


class Idle(Struct, frozen=True, kw_only=True):
    """What an idle fleet uses: parts of a core, and per second."""

    nodes: int
    cores: float
    postgres_cores: float = 0.0
    statements: float = 0.0
    transactions: float = 0.0


def figures_of_installs(installs: list[Installed]) -> list[Figure]:
    small, compared, last = installs[0], next(one for one in installs if one.nodes == COMPARED), installs[-1]
    cpu = last.cpu_ms_per_node / compared.cpu_ms_per_node
    listed = last.nodes_ms / last.idle_nodes_ms
    return [
        Figure(
            name=f"shown as done, {last.nodes} nodes",
            value=last.seconds,
            unit=" s",
            bar=TIME_RATIO * small.seconds + TIME_MORE_SECONDS,
            remark=f"{small.nodes} nodes {small.seconds:.2f} s",
        ),
        Figure(
            name=f"CPU per node, {last.nodes} over {compared.nodes}",
            value=cpu,
            bar=CPU_RATIO,
            remark=f"{compared.cpu_ms_per_node:.2f} -> {last.cpu_ms_per_node:.2f} ms",
        ),
        Figure(
            name="per watcher",
            value=last.bytes_per_watcher / 1e6,
            unit=" MB",
            bar=WATCHER_BYTES_PER_NODE * last.nodes / 1e6,
        ),
        Figure(
            name="GET /api/nodes?limit=100, meanwhile over idle",
            value=listed,
            bar=NODES_RATIO,
            remark=f"{last.idle_nodes_ms:.1f} -> {last.nodes_ms:.1f} ms",
        ),
    ]


def figures_of_idle(few: Idle | None, many: Idle, two: Idle | None) -> list[Figure]:
    found = [Figure(name=f"idle, {many.nodes} nodes", value=many.cores, unit=" cores", bar=IDLE_CORES)]
    if few is not None:
        remark = f"{few.statements:.1f} -> {many.statements:.1f} per s, transactions {few.transactions:.1f} -> "
        found += [
            Figure(name="PostgreSQL, idle", value=many.postgres_cores, unit=" cores", bar=IDLE_POSTGRES_CORES),
            Figure(
                name=f"statements, {many.nodes} over {few.nodes} nodes",
                value=many.statements / few.statements,
                bar=STATEMENTS_RATIO,
                remark=f"{remark}{many.transactions:.1f}; frontend {few.cores:.3f} -> {many.cores:.3f} cores",
            ),
        ]
    if two is not None:
        alone, both = many.cores + many.postgres_cores, two.cores + two.postgres_cores
        found.append(
            Figure(
                name="statements, two frontends over one",
                value=two.statements / many.statements,
                bar=SECOND_FRONTEND_RATIO,
            )
        )
        remark = f"{alone:.3f} -> {both:.3f} cores of frontends and PostgreSQL"
        found.append(
            Figure(name="CPU, two frontends over one", value=both / alone, bar=SECOND_FRONTEND_RATIO, remark=remark)
        )
    return found


COLOURS = {"sqlite": "#07c", "postgresql": "#c60"}
WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 360, 300, 52, 44, 34


def plot(measured: Mapping[str, list[Installed]]) -> str:
    """Time until shown as done, and CPU of the frontend per node, over the number of nodes, side by side."""
    times = {kind: [(one.nodes, one.seconds) for one in some] for kind, some in measured.items()}
    spent = {kind: [(one.nodes, one.cpu_ms_per_node) for one in some] for kind, some in measured.items()}
    panels = _panel(times, "seconds until shown as done", 0) + _panel(spent, "CPU of the frontend per node, ms", WIDTH)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * WIDTH} {HEIGHT}" '
        f'font-family="sans-serif" font-size="12"><rect width="{2 * WIDTH}" height="{HEIGHT}" fill="white"/>'
        f"{panels}</svg>\n"
    )


def _panel(lines: Mapping[str, list[tuple[int, float]]], title: str, shift: int) -> str:
    points = [point for some in lines.values() for point in some]
    most, highest = max(count for count, _ in points), _round_up(max(value for _, value in points))

    def place(count: float, value: float) -> tuple[float, float]:
        across = shift + LEFT + (WIDTH - LEFT - 20) * count / most
        return across, HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * value / highest

    drawn = [f'<text x="{shift + LEFT}" y="18" font-weight="bold">{title}</text>']
    for step in range(5):
        value = highest * step / 4
        _, down = place(0, value)
        drawn.append(f'<path d="M{shift + LEFT} {down:.0f}H{shift + WIDTH - 20}" stroke="#ddd"/>')
        drawn.append(f'<text x="{shift + LEFT - 6}" y="{down + 4:.0f}" text-anchor="end">{value:g}</text>')
    for count in sorted({count for count, _ in points}):
        across, down = place(count, 0)
        drawn.append(f'<text x="{across:.0f}" y="{down + 16:.0f}" text-anchor="middle">{count}</text>')
    for number, (kind, some) in enumerate(lines.items()):
        colour = COLOURS.get(kind, "#333")
        path = " ".join("{:.0f},{:.0f}".format(*place(count, value)) for count, value in some)
        drawn.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2.5"/>')
        for across, down in (place(count, value) for count, value in some):
            drawn.append(f'<circle cx="{across:.0f}" cy="{down:.0f}" r="3" fill="{colour}"/>')
        drawn.append(f'<text x="{shift + LEFT + 12}" y="{TOP + 16 + 16 * number}" fill="{colour}">{kind}</text>')
    middle = shift + LEFT + (WIDTH - LEFT - 20) / 2
    drawn.append(f'<text x="{middle:.0f}" y="{HEIGHT - 8}" text-anchor="middle">nodes, one second of work each</text>')
    return "".join(drawn)


def _round_up(value: float) -> float:
    """To a number whose quarters are easy to read."""
    scale = 1.0
    while value / scale > 40:
        scale *= 10
    while value / scale <= 4:
        scale /= 10
    return next(step for step in (8, 12, 16, 20, 24, 32, 40) if step * scale >= value) * scale
