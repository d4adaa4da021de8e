"""Builds backends from Python packages: a virtual environment, a launcher and a run file.

The launcher is one of the worker's own, named by the gallery, or the console entry point of the package. A new tree is
started once with `--check` before it may replace a working version.
"""

from __future__ import annotations

import configparser
import re
import signal
from collections.abc import Mapping
from contextlib import ExitStack
from importlib.resources import files
from pathlib import Path

from enginehouse.core.backend import Resolved, package_digest
from enginehouse.core.errors import Hopeless, Invalid, Unavailable
from enginehouse.core.installation import RUN_FILE
from enginehouse.core.name import check_name
from enginehouse.core.progress import ReportProgress
from enginehouse.core.replica import LOCALAI_GRPC
from enginehouse.engine import localai
from enginehouse.fetch.galleries.sources import builtin_directory
from enginehouse.fetch.pypi import Python, check_package, check_requirement
from enginehouse.host import processes
from enginehouse.host.blocking import in_thread
from enginehouse.worker.enclosures import Enclosures

MESSAGES = "backend_pb2.py"
STARTUP = "startup"  # every launcher imports it
CHECK_SECONDS = 60.0  # an import takes 0.1 s, but much longer on a cold disk under load
_RUN_SCRIPT = b"""#!/bin/sh
# Made by enginehouse at install; the engine must replace this shell, so that signals reach it.
here=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd -P) || exit 1
if [ -d "$here/lib" ]; then
    LD_LIBRARY_PATH="$here/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
    export LD_LIBRARY_PATH
fi
exec "$here/venv/bin/python" -I "$here/launcher.py" "$@"
"""
_ENTRY_POINT = """# Made by enginehouse at install: starts the console entry point {name!r} of the package.
import os
import sys

# The tree cannot be written to, and -I keeps Python from reading the variable itself.
sys.pycache_prefix = os.environ.get("PYTHONPYCACHEPREFIX")
if "--check" in sys.argv:
    from importlib.util import find_spec

    sys.exit(0 if find_spec({module!r}) else "cannot find the module {module}")
sys.argv[0] = {name!r}
from {module} import {root}

sys.exit({function}())
"""
_DOTTED = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z_][A-Za-z0-9_]*)*")


class Packages:
    def __init__(self, python: Python, environment: Mapping[str, str], enclosures: Enclosures) -> None:
        """`environment` is the worker's own; engines get only the variables they need."""
        self._python = python
        self._enclosures = enclosures
        self._environment = processes.engine_environment(environment)

    async def build(self, resolved: Resolved, tree: Path, report: ReportProgress) -> None:
        """Fill the empty directory `tree` with a complete backend and check that it runs."""
        requirements = requirements_of(resolved)
        await self._python.make_environment(tree / "venv")
        venv, size_bytes = tree / "venv", resolved.size_bytes

        def report_download(done: int, total: int) -> None:
            report("downloading", resolved.uri, done, total)

        if requirements:
            await self._python.install(venv, requirements, size_bytes=size_bytes, progress=report_download)
        else:
            await self._python.install_package(
                venv, _package(resolved), size_bytes=size_bytes, progress=report_download
            )
        report("extracting", resolved.uri, resolved.size_bytes, resolved.size_bytes)
        await in_thread(_write_files, tree, resolved)
        await self._check_runs(tree, resolved)

    async def _check_runs(self, tree: Path, resolved: Resolved) -> None:
        code, reason = await self._run_check(tree)
        # A minimal system lacks libgomp. The copy in a package is used only then, because the system updates its own.
        if code and "libgomp" in reason and await in_thread(link_libgomp, tree):
            code, reason = await self._run_check(tree)
        if not code:
            return
        if code == -signal.SIGILL:
            reason = "it needs a processor with AVX2, which this machine does not have"
        elif code < 0:
            reason = f"its check was ended by {signal.Signals(-code).name}"
        reason = self._enclosures.explain(reason or f"its check ended with code {code}", [reason])
        raise Hopeless(
            f"cannot install {resolved.directory}: {reason}",
            code="unsupported_platform",
        )

    async def _run_check(self, tree: Path) -> tuple[int, str]:
        try:
            with ExitStack() as stack:
                enclosure = await in_thread(stack.enter_context, self._enclosures.for_check(tree))
                confined = await in_thread(stack.enter_context, self._enclosures.confined(enclosure))
                return await processes.run_briefly(
                    [str(tree / RUN_FILE), "--check"],
                    directory=tree,
                    environment=self._environment | enclosure.environment,
                    limit_seconds=CHECK_SECONDS,
                    confined=confined,
                )
        except TimeoutError as error:
            raise Unavailable(
                f"cannot install {tree.name}: its check did not end within {CHECK_SECONDS:.0f} s", code="stalled"
            ) from error


def check_described(resolved: Resolved) -> None:
    """The bus is not trusted: the description must match its digest and name only packages."""
    check_package(_package(resolved))
    if resolved.requirements or resolved.sha256:
        for line in requirements_of(resolved):
            check_requirement(line)
    digest = package_digest(resolved.uri, resolved.requirements, resolved.launcher, resolved.version)
    if digest != resolved.digest:
        raise Hopeless(
            f"cannot install {resolved.directory}: its description has the digest {digest}, not {resolved.digest}; "
            "request it again",
            code="digest_mismatch",
        )
    if resolved.launcher:
        _launcher(resolved.launcher)


def requirements_of(resolved: Resolved) -> tuple[str, ...]:
    """The pinned and hashed requirements; empty if the build has no hashes."""
    sha256 = resolved.sha256.removeprefix("sha256:").lower()
    single = (f"{_package(resolved)} --hash=sha256:{sha256}",) if sha256 else ()
    return resolved.requirements or single


def _package(resolved: Resolved) -> str:
    return resolved.uri.removeprefix("pypi:").partition("#")[0]


def _launcher(name: str) -> bytes:
    check_name(name, "launcher")
    file = builtin_directory().joinpath("launchers", f"{name}.py")
    if not file.is_file():
        raise Invalid(f"cannot use the launcher {name!r}: this worker does not have it", code="unsupported")
    return file.read_bytes()


def _write_files(tree: Path, resolved: Resolved) -> None:
    if resolved.launcher:
        (tree / f"{STARTUP}.py").write_bytes(_launcher(STARTUP))
        (tree / "launcher.py").write_bytes(_launcher(resolved.launcher))
    else:
        (tree / "launcher.py").write_text(_entry_point(tree, resolved))
    if resolved.protocol == LOCALAI_GRPC:
        # Its launcher imports the messages of the protocol; LocalAI's own Python backends have the same file.
        (tree / MESSAGES).write_bytes(files(localai).joinpath(MESSAGES).read_bytes())
    (tree / RUN_FILE).write_bytes(_RUN_SCRIPT)
    (tree / RUN_FILE).chmod(0o750)


def _entry_point(tree: Path, resolved: Resolved) -> str:
    """A launcher for a console entry point: chosen by `#NAME`, named as the package, or the only one."""
    package = _package(resolved).partition("==")[0]
    chosen = resolved.uri.partition("#")[2]
    scripts = _console_scripts(tree, package)
    same = [name for name in scripts if _plain(name) == _plain(package)]
    name = chosen or (same[0] if same else next(iter(scripts)) if len(scripts) == 1 else "")
    if name not in scripts:
        offered, plain_uri = ", ".join(sorted(scripts)) or "none", resolved.uri.partition("#")[0]
        missing = f"console entry point {name}" if name else "unambiguous console entry point"
        raise Hopeless(
            f"cannot start {resolved.directory}: {package} has no {missing} (it has: {offered}); "
            f"choose one with {plain_uri}#NAME",
            code="unsupported",
        )
    module, _, function = scripts[name].partition("[")[0].strip().partition(":")
    if not _DOTTED.fullmatch(module.strip()) or not _DOTTED.fullmatch(function.strip()):
        raise Hopeless(f"cannot start {resolved.directory}: its entry point {name} is malformed", code="unsupported")
    function = function.strip()
    return _ENTRY_POINT.format(name=name, module=module.strip(), root=function.partition(".")[0], function=function)


def _console_scripts(tree: Path, package: str) -> dict[str, str]:
    for path in sorted(tree.glob("venv/lib/python*/site-packages/*.dist-info/entry_points.txt")):
        if _plain(path.parent.name.partition("-")[0]) == _plain(package):
            parser = configparser.ConfigParser(delimiters=("=",), interpolation=None, strict=False)
            parser.optionxform = str  # type: ignore[assignment,method-assign]
            try:
                parser.read_string(path.read_text())
            except (configparser.Error, UnicodeDecodeError):
                return {}
            return dict(parser["console_scripts"]) if parser.has_section("console_scripts") else {}
    return {}


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def link_libgomp(tree: Path) -> bool:
    """Link the libgomp of a package into `lib`; a relative link, so that it survives the rename of `tree`."""
    for library in sorted(tree.glob("venv/lib/python*/site-packages/*.libs/libgomp-*.so*")):
        (tree / "lib").mkdir(exist_ok=True)
        (tree / "lib" / "libgomp.so.1").symlink_to(Path("..") / library.relative_to(tree))
        return True
    return False
