"""The full-screen view: the line of truth, what needs a person, and one of four pages.

The state is changed in one place (`_tick`), in batches of what arrived from other threads; every draw is a function of
the state, the page and the width. What a key does to the cluster is in `acts`. Text of others is never markup.
"""

from __future__ import annotations

import asyncio
import queue
import time
from collections.abc import Callable, Sequence
from typing import ClassVar
from urllib.parse import quote

import msgspec
from rich.segment import Segments
from rich.text import Text
from rich.traceback import Traceback
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.events import Key, Resize
from textual.screen import ModalScreen
from textual.widgets import Input, Static

from enginehouse.cli.answers import ShownExplanation
from enginehouse.cli.terminal.fleet_state import Arrival, FleetState
from enginehouse.cli.terminal.fleet_words import counted, needs, nothing
from enginehouse.cli.terminal.top import engines, fleet, operations
from enginehouse.cli.terminal.top.acts import ACTING, Act, act_of, keys_of
from enginehouse.cli.terminal.top.dialogs import Prompt, Sheet, paragraphs
from enginehouse.cli.terminal.top.door import ClusterDoor
from enginehouse.cli.terminal.top.drawing import BAD, MUTED, OK, WARN, Row, Target, joined, plain
from enginehouse.cli.terminal.top.head import ROOMY, need_rows, truth_lines
from enginehouse.cli.terminal.top.help import HELP
from enginehouse.cli.terminal.top.row_list import MARGIN, RowList
from enginehouse.core.errors import EnginehouseError
from enginehouse.core.views import FleetPlan, OperationView

TICK_SECONDS = 0.1
DRAW_SECONDS = 0.25  # at most this often, however many events arrive
CLOCK_SECONDS = 1.0  # ages move without an event
MESSAGE_SECONDS = 10.0
INTERRUPTED = 130

Rows = Callable[[FleetState, float, int], Sequence[Row]]
PAGES: dict[str, tuple[str, Rows, str]] = {
    "f": ("Fleet", fleet.rows, fleet.EMPTY),
    "o": ("Operations", operations.rows, operations.EMPTY),
    "b": ("Backends", engines.backend_rows, engines.NO_BACKENDS),
    "m": ("Models", engines.model_rows, engines.NO_MODELS),
}
DETAILS = {"node": fleet.details, "operation": operations.details, "backend": engines.backend_details}
_ELSEWHERE = {"c": "chat", "l": "logs", "a": "access", "s": "settings"}  # pages that only the web page has


class TopApp(App[int]):
    CSS = """
    Screen { background: transparent; }
    #truth, #tabs, #foot { height: auto; padding: 0 1; }
    #needs { height: auto; margin: 0 0 1 0; }
    #view { height: 1fr; }
    #filter { display: none; height: 1; border: none; padding: 0 1; background: transparent; }
    #tabs { margin: 0 0 1 0; }
    """
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [Binding("ctrl+c", "interrupt", priority=True)]

    def __init__(self, door: ClusterDoor, monotonic: Callable[[], float] = time.monotonic) -> None:
        # From the start, because it decides how NO_COLOR is obeyed.
        super().__init__(ansi_color=True)
        self.state = FleetState()
        self._door = door
        self._monotonic = monotonic
        self._inbox: queue.SimpleQueue[Arrival] = queue.SimpleQueue()
        self._page = "f"
        self._opened: list[Target] = []  # what Enter opened, one in the other
        self._filter = ""
        self._after_g = False
        self._message: tuple[str, str, float] = ("", "", 0.0)
        self._drawn_at = 0.0

    # The screen ----------------------------------------------------------------------------------

    def compose(self) -> ComposeResult:
        yield Static(id="truth", markup=False)
        yield RowList(id="needs")
        yield Static(id="tabs", markup=False)
        yield RowList(id="view")
        yield Input(id="filter", placeholder="search")
        yield Static(id="foot", markup=False)

    def on_mount(self) -> None:
        self.theme = "ansi-dark"  # the terminal's own colours, on its own background
        self.view.focus()
        self._door.start(self._inbox.put)
        self.set_interval(TICK_SECONDS, self._tick)
        self.draw()

    def on_unmount(self) -> None:
        self._door.stop()

    def on_resize(self, _event: Resize) -> None:
        self.call_after_refresh(self.draw)

    @property
    def view(self) -> RowList:
        return self.screen_stack[0].query_one("#view", RowList)

    @property
    def needs(self) -> RowList:
        return self.screen_stack[0].query_one("#needs", RowList)

    def _tick(self) -> None:
        now = self._monotonic()
        is_changed = False
        while not self._inbox.empty():
            arrived = self._inbox.get_nowait()
            self.state.take(arrived)
            is_changed = True
            if arrived.what == "refused":
                self.say(arrived.name, BAD)
        if (heard := self._door.heard_at()) is not None:
            self.state.heard(heard)
        self._door.read(self.state.wanted_lists(now))
        if now - self._drawn_at >= (DRAW_SECONDS if is_changed else CLOCK_SECONDS):
            self.draw()
        elif is_changed:
            self._drawn_at = min(self._drawn_at, now - CLOCK_SECONDS + DRAW_SECONDS)  # soon, with what comes until then

    def draw(self) -> None:
        now = self._drawn_at = self._monotonic()
        width = self.size.width
        base = self.screen_stack[0]
        base.query_one("#truth", Static).update(truth_lines(self.state, now, width - 2))
        wanted = needs(self.state, now)
        self.needs.styles.height = max(1, min(len(wanted), self.size.height // 5))
        self.needs.can_focus = bool(wanted)
        if not wanted and self.focused is self.needs:
            self.view.focus()
        waiting = f"Waiting for the first answer of {self._door.url} …"
        self.needs.show_rows(need_rows(wanted, nothing(self.state, now) if self.state.has_lists else waiting))
        name, rows, empty = PAGES[self._page]
        self.view.empty = f"Nothing matches {self._filter!r}." if self._filter else empty
        if self._opened:
            found = DETAILS[self._opened[-1].kind](self.state, self._opened[-1].id, now, width - 2 * MARGIN)
        else:
            words = self._filter.casefold()
            found = [row for row in rows(self.state, now, width - 2 * MARGIN) if words in row.words.casefold()]
        self.view.show_rows(found)
        base.query_one("#tabs", Static).update(self._tabs(name))
        base.query_one("#foot", Static).update(self._foot(now))

    def _tabs(self, name: str) -> Text:
        parts = []
        for key, (page, _, _) in PAGES.items():
            is_here = page == name
            parts.append(
                Text.assemble((f"[{page}]" if is_here else f" {page} ", "bold" if is_here else MUTED), (key, MUTED))
            )
        if self._opened:
            parts.append(plain(f"> {self._opened[-1].kind}, Esc goes back", MUTED))
        elif self._filter:
            parts.append(plain(f"/{self._filter}", WARN))
        return joined(*parts, gap="  ")

    def _foot(self, now: float) -> Text:
        text, style, until = self._message
        if text and now < until:
            return Text(plain(text).plain, style=style)  # may take several lines
        keys = keys_of(self._selected().kind)
        more = ("Enter opens", "/ search") if self.size.width >= ROOMY else ()
        return plain(" · ".join(part for part in (keys, *more, "? help", "q quit") if part), MUTED)

    def say(self, text: str, style: str = "") -> None:
        """One sentence at the bottom; it stays for a while, or until the next one."""
        self._message = (text, style, self._monotonic() + MESSAGE_SECONDS)
        if self.is_running and self.is_mounted(self.view):
            self.draw()

    def _fatal_error(self) -> None:
        """A fault of this program, as Textual shows it, but without the values of variables: a token may be in them."""
        self._exit_renderables.append(Segments(self.console.render(Traceback(show_locals=False))))
        self._close_messages_no_wait()

    # Keys ----------------------------------------------------------------------------------------

    def on_key(self, event: Key) -> None:
        if isinstance(self.screen, ModalScreen):
            return
        key = event.character if event.is_printable and event.character else event.key
        if isinstance(self.focused, Input):
            if key in ("escape", "down", "up"):
                self._end_search(is_kept=key != "escape")
                event.stop()
            return
        self._press(key)
        event.stop()
        event.prevent_default()

    def _press(self, key: str) -> None:
        after_g, self._after_g = self._after_g, False
        steps = {
            "j": 1,
            "down": 1,
            "k": -1,
            "up": -1,
            "pagedown": 10,
            "pageup": -10,
            "home": -9999,
            "end": 9999,
            "G": 9999,
        }
        if after_g and key in _ELSEWHERE:
            self.say(f"The {_ELSEWHERE[key]} page is only in the browser: {self._door.url}")
        elif key in PAGES:
            self.go(key)
        elif key == "g":
            self._after_g = True
        elif key in steps:
            self._move(steps[key])
        elif key in ("enter", "right"):
            self.open(self._selected())
        elif key in ("escape", "left", "backspace"):
            self._back()
        elif key == "tab":
            self._switch()
        elif key == "/":
            self._search()
        elif key == "?":
            self.push_screen(Sheet("Keys", paragraphs(*HELP)))
        elif key == "q":
            self.exit(0)
        elif key in ACTING:
            self._act(key)

    def action_interrupt(self) -> None:
        self.exit(INTERRUPTED)

    def go(self, page: str) -> None:
        self._page, self._filter = page, ""
        self._opened.clear()
        self.view.focus()
        self.draw()
        self.view.to_start()

    def open(self, target: Target) -> None:
        """Everything about one thing. What a node does in an operation is part of the operation."""
        if target.kind == "model":
            self.run_worker(self._explain(target.id))
        elif target.kind in DETAILS and not (self._opened and self._opened[-1][:2] == target[:2]):
            if self.focused is self.needs:
                self._page = {"node": "f", "operation": "o"}.get(target.kind, self._page)
                self._opened.clear()
            self._opened.append(Target(target.kind, target.id))
            self.view.focus()
            self.draw()
            self.view.to_start()

    def _back(self) -> None:
        if self._opened:
            left = self._opened.pop()
            self.draw()
            self.view.select(left)
        elif self._filter:
            self._end_search(is_kept=False)

    def _selected(self) -> Target:
        return self.needs.target if self.focused is self.needs else self.view.target

    def _move(self, step: int) -> None:
        """Within the list; past its edge into the other one."""
        listed = self.needs if self.focused is self.needs else self.view
        is_past = not listed.move(step) and abs(step) == 1
        if is_past and (listed is self.needs) == (step > 0):
            self._switch()
        self.draw()

    def _switch(self) -> None:
        if self.focused is self.needs:
            self.view.focus()
        elif self.needs.can_focus:
            self.needs.focus()
        self.draw()

    def _search(self) -> None:
        self._opened.clear()
        field = self.query_one("#filter", Input)
        field.display = True
        field.value = self._filter
        field.focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        if event.input.id == "filter":
            self._filter = event.value.strip()
            self.draw()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        if event.input.id == "filter":
            self._end_search(is_kept=True)

    def _end_search(self, *, is_kept: bool) -> None:
        field = self.query_one("#filter", Input)
        field.display = False
        self._filter = self._filter if is_kept else ""
        self.view.focus()
        self.draw()

    # What acts -----------------------------------------------------------------------------------

    def _act(self, key: str) -> None:
        found = act_of(key, self._selected(), self.state)
        if isinstance(found, str):
            self.say(found)
        else:
            self.run_worker(self._carry_out(found))

    async def _carry_out(self, act: Act) -> None:
        try:
            body = await self._confirmed(act)
            if body is not None:
                self._accepted(act, await self._ask(act.method, act.path, body or None))
        except EnginehouseError as error:
            self.say(error.message, BAD)

    async def _confirmed(self, act: Act) -> dict[str, object] | None:
        """The body of the request, after whatever must be said and asked before; None if it is not to be done."""
        body = dict(act.body or {})
        if act.plan is not None:
            return body if await self._is_plan_wanted(act) else None
        if act.typed:
            return body if await self.push_screen_wait(Prompt(" ".join(act.says), act.typed)) else None
        if act.number:
            given = await self.push_screen_wait(Prompt(act.number))
            if given and not (given.isascii() and given.isdecimal() and len(given) < 5):
                self.say(f"cannot use {given!r} as a number of replicas: type a number such as 2", BAD)
                return None
            return body | {"min_replicas": int(given), "max_replicas": int(given)} if given else None
        if act.question and not await self._is_agreed(Sheet(act.heading, paragraphs(*act.says), act.question)):
            return None
        return body

    async def _is_agreed(self, sheet: Sheet) -> bool:
        return await self.push_screen_wait(sheet)

    async def _is_plan_wanted(self, act: Act) -> bool:
        self.say("Planning …")
        plan = msgspec.convert(await self._ask("POST", "/api/operations/plan", dict(act.plan or {})), FleetPlan)
        self.say("")
        changed = sum(one.does not in ("", "nothing") for one in plan.nodes)
        question = f"Do it on {counted(changed, 'node')}?" if changed else ""
        title = act.heading if changed else f"{act.heading}: there is nothing to do"
        return await self._is_agreed(Sheet(title, lambda width: engines.planned(plan, width), question))

    def _accepted(self, act: Act, answer: object) -> None:
        operation_id = answer.get("jobID") if isinstance(answer, dict) else None
        if isinstance(operation_id, str):
            self.state.note_operation(msgspec.convert(answer, OperationView), self._monotonic())
        self.state.want(*act.reads)
        self.say(act.done + (f" ({operation_id[:8]})" if isinstance(operation_id, str) else ""), OK)

    async def _explain(self, model: str) -> None:
        try:
            found = msgspec.convert(
                await self._ask("GET", f"/api/models/{quote(model, safe='')}/explain"), ShownExplanation
            )
        except EnginehouseError as error:
            self.say(error.message, BAD)
        else:
            self.push_screen(Sheet(f"Where {model} can be", lambda width: engines.explained(found, width)))

    async def _ask(self, method: str, path: str, body: object = None) -> object:
        return await asyncio.to_thread(self._door.request, method, path, body)
