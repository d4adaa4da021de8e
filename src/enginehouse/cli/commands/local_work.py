"""What the commands without a server share: resolving a name, opening the directory, showing progress.

`worker.local` does the work. Ctrl-C stops it in order: downloaded data is kept, and the next run continues there.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

from enginehouse.build_worker import installer_options, open_local
from enginehouse.cli.options.galleries import load_galleries, local_settings
from enginehouse.cli.options.names import checked_backend
from enginehouse.cli.options.shared import emit_json, wants_json
from enginehouse.cli.terminal import output
from enginehouse.cli.terminal.progress import View, choose_view
from enginehouse.core.backend import Resolved
from enginehouse.core.errors import EnginehouseError, Invalid, NotFound, exit_code
from enginehouse.core.external import external_build
from enginehouse.core.gallery import Catalogue
from enginehouse.core.ids import IntentId, NodeId
from enginehouse.core.progress import Phase, format_bytes
from enginehouse.core.reference import parse_uri
from enginehouse.core.views import NodeRow
from enginehouse.host import hardware
from enginehouse.worker.backends.installer import Installed, InstallRequest
from enginehouse.worker.backends.plan import InstallPlan
from enginehouse.worker.local import Local, resolved_from

T = TypeVar("T")


def chosen(
    backend: str, name: str | None, flags: dict[str, Any], *, alias: str = "", sha256: str = ""
) -> tuple[Resolved, tuple[str, ...]]:
    """Resolve BACKEND for this machine, with reasons: the name of a gallery entry, or an address."""
    if _is_address(backend):
        return _external(backend, name, alias, sha256), ()
    if name or alias or sha256:
        raise Invalid(
            f"cannot use --name, --alias or --sha256 with {backend}: they are for images, archives and directories, "
            "and a gallery entry has its own",
            code="invalid_name",
            param="name",
        )
    catalogue = Catalogue(load_galleries(_gallery_flags(flags))[0])
    choice = catalogue.explain(checked_backend(backend), hardware.detect().capability, hardware.platform())
    return choice.resolved, choice.reasons


def install(resolved: Resolved, flags: dict[str, Any], *, force: bool) -> None:
    async def work(local: Local) -> None:
        request = InstallRequest(resolved=resolved, force=force)
        installed = await _shown("install", resolved, lambda report: local.install(request, report))
        if not emit_json({"directory": resolved.directory, **_as_dict(installed)}):
            _tell(resolved.directory, installed)

    run(work, flags, doing=f"install {resolved.directory}")


def upgrade(names: tuple[str, ...], flags: dict[str, Any], *, check: bool) -> int:
    """Upgrade or check backends; returns 3 if only some succeeded. The error of a single name is raised."""
    catalogue = Catalogue(load_galleries(_gallery_flags(flags))[0])
    failed: list[EnginehouseError] = []
    results: list[dict[str, object]] = []

    async def one(local: Local, directory: str) -> None:
        resolved = _known(local, directory, catalogue)
        known = local.metadata_of(directory)
        if check:
            newest = resolved.digest or await local.newest_digest(resolved)
            changed = known is None or newest not in (known.digest, known.index_digest)
            results.append({"directory": directory, "upgrade": changed, "digest": newest})
            state = f"another version is available, {newest[:19]}" if changed else "up to date"
            if not wants_json():
                output.say(f"{directory}: {state}")
            return
        installed = await _shown("upgrade", resolved, lambda report: local.upgrade(resolved, report))
        results.append({"directory": directory, **_as_dict(installed)})
        if not wants_json():
            _tell(directory, installed)

    async def work(local: Local) -> None:
        everything = [backend.name for backend in local.list_backends() if backend.kind in ("installed", "broken")]
        if not (names or everything):
            output.remark("nothing is installed here")
        for name in names or everything:
            try:
                await one(local, local.directory_of(name))
            except EnginehouseError as error:
                if len(names) == 1:
                    raise
                failed.append(error)
                output.remark(f"{name}: {error.message}")

    run(work, flags, doing="upgrade backends")
    if wants_json():
        output.emit_json(results)
    codes = {exit_code(error) for error in failed}
    return 0 if not failed else 3 if results else codes.pop() if len(codes) == 1 else 1


def plan(resolved: Resolved, flags: dict[str, Any]) -> InstallPlan:
    async def work(local: Local) -> InstallPlan:
        return await local.plan(resolved)

    return run(work, flags, doing="make a plan", is_locked=False)


def run(work: Callable[[Local], Awaitable[T]], flags: dict[str, Any], *, doing: str, is_locked: bool = True) -> T:
    """Run `work` on the directory; Ctrl-C stops it in order."""
    settings = local_settings(flags)
    options = installer_options(settings, settings.data, settings.backends)
    # The command prints its own messages; without a handler, warnings of the log would be printed too.
    logging.getLogger("enginehouse").addHandler(logging.NullHandler())

    async def main() -> T:
        task = asyncio.current_task()
        assert task is not None
        # SIGTERM cancels the task, as Ctrl-C does, so that the clean-up runs.
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        async with open_local(options, os.environ, doing=doing, is_locked=is_locked) as local:
            return await work(local)

    try:
        return asyncio.run(main())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


async def _shown(
    kind: str, resolved: Resolved, work: Callable[[Callable[[Phase, str, int, int], None]], Awaitable[T]]
) -> T:
    """Run `work` and show its progress; the bytes shown never decrease."""
    view = choose_view(as_json=False) if not wants_json() else None
    if view is None:
        return await work(lambda *_: None)
    with view:
        progress = _InstallProgress(view, kind, resolved.directory)
        progress.report("resolving", resolved.uri, 0, 0)
        return await work(progress.report)


class _InstallProgress:
    def __init__(self, view: View, kind: str, name: str) -> None:
        self._view = view
        self._kind = kind
        self._name = name
        self._done = 0
        self._at = 0.0
        self._phase = ""

    def report(self, phase: Phase, file: str, done_bytes: int, total_bytes: int) -> None:
        self._done = max(self._done, done_bytes)
        now = time.monotonic()
        if phase == self._phase and now - self._at < 0.1 and done_bytes < total_bytes:
            return
        self._phase, self._at = phase, now
        row = NodeRow(
            node_id=NodeId("here"),
            node_name=self._name,
            action="",
            kind=self._kind,
            intent=IntentId("here"),
            state="running",
            attempt=1,
            status="downloading",
            phase=phase,
            file_name=file if phase != "downloading" else "",
            current_bytes=self._done,
            total_bytes=total_bytes,
            percentage=100.0 * self._done / total_bytes if total_bytes else 0.0,
        )
        self._view.show([row], None)


def _is_address(backend: str) -> bool:
    return "/" in backend or ":" in backend or (os.path.isdir(backend) and backend in (".", ".."))


def _external(backend: str, name: str | None, alias: str, sha256: str) -> Resolved:
    uri = backend
    if backend.startswith((".", "~")) or (os.path.isdir(backend) and not backend.startswith("/")):
        uri = str(Path(backend).expanduser().absolute())
    source = parse_uri(uri)
    stem = Path(source.path).name.partition(".")[0] if source.kind in ("directory", "ocifile") else ""
    if source.kind == "package":
        stem = source.package.partition("==")[0]
    if not (name or stem):
        raise Invalid(
            f"cannot choose a directory for {backend}: give one with --name",
            code="invalid_name",
            param="name",
        )
    return external_build(uri, name or stem, alias=alias, sha256=sha256)


def _known(local: Local, directory: str, catalogue: Catalogue) -> Resolved:
    """What an installed directory is upgraded to: the entry of a gallery, otherwise its own source."""
    try:
        decision = hardware.detect()
        resolved = catalogue.explain(directory, decision.capability, hardware.platform()).resolved
        if resolved.directory == directory:
            return resolved
    except EnginehouseError:
        pass  # no gallery has it, or none has it for this machine
    metadata = local.metadata_of(directory)
    if metadata is None or not metadata.uri:
        raise NotFound(
            f"cannot upgrade {directory}: no gallery has it, and its source is not recorded",
            code="not_found",
        )
    return resolved_from(metadata, directory)


def _tell(directory: str, installed: Installed) -> None:
    output.say(_sentence(directory, installed))
    if installed.dropped:
        output.remark(f"{directory}: dropped, because only root can set it: {installed.dropped}")


def _sentence(directory: str, installed: Installed) -> str:
    if not installed.changed:
        return f"{directory} is already installed"
    figures = [
        (installed.fetched_bytes, "fetched"),
        (installed.reused_bytes, "reused"),
        (installed.shared_bytes, f"shared with other versions by {installed.sharing}s"),
    ]
    told = ", ".join(f"{format_bytes(count)} {what}" for count, what in figures if count)
    return f"installed {directory}" + (f" ({told})" if told else "")


def _as_dict(installed: Installed) -> dict[str, object]:
    return {name: getattr(installed, name) for name in installed.__struct_fields__}


def _gallery_flags(flags: dict[str, Any]) -> dict[str, Any]:
    return {name: flags.get(name) for name in ("backend_galleries", "allowed_hosts")}
