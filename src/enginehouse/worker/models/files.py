"""Stores the files of models: fetched to a hidden place, verified, renamed. The only writer below `models/`, beside
uploads of LocalAI's frontends.

A file under its final name has the requested sha256, or, where the request knew none, the one that is reported back to
be pinned. `model.json` records the verified files with their size and time, so that later pulls and reports need no
hashing. A file whose size or time has changed since no longer counts as verified. Models with the same file share its
bytes where no engine can write to them.
"""

from __future__ import annotations

import asyncio
import glob
import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
from msgspec import Struct

from enginehouse.core.errors import Hopeless, Invalid
from enginehouse.core.file_name import check_file_names, check_file_source
from enginehouse.core.model import HeldModel, Model, ModelFile, PinnedFile
from enginehouse.core.name import check_model_name, model_directory, model_in
from enginehouse.core.peer import FilePeer
from enginehouse.core.progress import ReportProgress
from enginehouse.host import disk
from enginehouse.host.blocking import in_thread
from enginehouse.worker.locks import Locks
from enginehouse.worker.models.fetching import FetchedFile, FileFetcher, ReportBytes, check_room

log = logging.getLogger(__name__)

MANIFEST = "model.json"
DOWNLOADS = ".downloads"  # partial files of all models
_INCOMING = ".incoming"  # whole files on their way to their names, in the directory of a model
_GOING = "."  # prefix of a directory that is being removed; no model's directory starts with it


class HeldFile(Struct, frozen=True):
    name: str
    sha256: str
    size_bytes: int
    changed_at: int  # modification time of the file system, in nanoseconds
    uri: str = ""  # where it came from


class Manifest(Struct, frozen=True, kw_only=True):
    name: str
    files: tuple[HeldFile, ...]
    generation: int = 0


class ModelFiles:
    """The files of all models below one directory."""

    def __init__(self, models: Path, fetcher: FileFetcher, *, may_link: bool = False) -> None:
        """`may_link`: engines cannot write to the files, so models may share them by hard links."""
        self._models = models
        self._fetcher = fetcher
        self._may_link = may_link
        self._locks = Locks()  # by digest
        self._coming: dict[str, int] = {}  # digest of a file that is being fetched → how often it has moved

    def path_of(self, model: Model) -> Path:
        return self._models / model_directory(check_model_name(model.name))

    async def pull(
        self, model: Model, generation: int | None, report: ReportProgress, peers: Sequence[FilePeer] = ()
    ) -> tuple[PinnedFile, ...]:
        """Fetch and verify the files of `model`, from `peers` where they have them. Verified files are not fetched
        again. Returns the digests of the files for which the model has none.

        `generation` None keeps the recorded generation.
        """
        directory = self.path_of(model)
        check_model_files(model)
        incoming = directory / _INCOMING
        try:
            async with AsyncExitStack() as held:
                await in_thread(directory.mkdir, 0o750, True, True)
                before = await in_thread(_read, directory, model.name)
                missing = await in_thread(_missing, directory, model, before)
                await self._announce(held, missing)
                await in_thread(self._check_room, missing)
                if missing:
                    await in_thread(_make_empty, incoming)
                fetched = await self._obtain_all(model, missing, incoming, report, peers)
                report("extracting", "", model.size_bytes, model.size_bytes)
                return _pins(model, await _place_all(directory, model, fetched, before, generation))
        except OSError as error:
            raise disk.storage_error(error, f"place the files of {model.name}") from error
        finally:
            await in_thread(disk.remove_tree, incoming)

    async def _announce(self, held: AsyncExitStack, missing: Sequence[ModelFile]) -> None:
        """Let other nodes see that these files are coming, and other models of this node wait for them: a file is
        fetched once. The order of the locks is the same for all.
        """
        for sha256 in sorted({file.sha256 for file in missing} - {""}):
            await held.enter_async_context(self._locks.hold(sha256))
            self._coming[sha256] = 0
            held.callback(self._coming.pop, sha256)

    async def _obtain_all(
        self,
        model: Model,
        missing: Sequence[ModelFile],
        incoming: Path,
        report: ReportProgress,
        peers: Sequence[FilePeer],
    ) -> dict[str, tuple[Path, FetchedFile]]:
        placed: dict[str, tuple[Path, FetchedFile]] = {}
        done_bytes = sum(file.size_bytes for file in model.files if file not in missing)
        for number, file in enumerate(missing):
            progress = self._noted(_shifted(report, file.name, done_bytes, model.size_bytes), missing)
            found = await self._obtain(file, incoming / str(number), progress, peers, model.name)
            placed[file.name] = (incoming / str(number), found)
            done_bytes += file.size_bytes or found.size_bytes
        return placed

    def _noted(self, report: ReportBytes, missing: Sequence[ModelFile]) -> ReportBytes:
        """Also tell other nodes that this fetch moves: all files of a model appear together. The report may come from a
        thread.
        """

        def report_and_note(done: int, size: int) -> None:
            for file in missing:
                if file.sha256 in self._coming:
                    self._coming[file.sha256] += 1
            report(done, size)

        return report_and_note

    def _check_room(self, missing: list[ModelFile]) -> None:
        outside = [file for file in missing if not file.uri.startswith("file:")]
        check_room(self._models, sum(file.size_bytes - self._fetcher.held_bytes(file) for file in outside))

    async def _obtain(
        self, file: ModelFile, target: Path, report: ReportBytes, peers: Sequence[FilePeer], owner: str
    ) -> FetchedFile:
        """The file, from another model of this node, from another node or from its source."""
        if file.sha256 and not file.uri.startswith("file:"):
            found = await in_thread(self._share, file, target)
            if found is not None:
                return found
        return await self._fetcher.fetch(file, target, report, peers, owner=owner)

    def _share(self, file: ModelFile, target: Path) -> FetchedFile | None:
        """Use the bytes of another model's verified file: shared, or copied where that is not possible. Blocks."""
        for source, held in self._verified(file.sha256):
            if disk.share_file(source, target, may_link=self._may_link):
                return FetchedFile(held.sha256, held.size_bytes)
            shutil.copyfile(source, target)
            if disk.sha256_of(target) == file.sha256:
                return FetchedFile(held.sha256, held.size_bytes)
            target.unlink()
        return None

    def path_by_digest(self, sha256: str) -> Path | None:
        """The path of a verified file of any model. Blocks."""
        return next((path for path, _ in self._verified(sha256)), None)

    def moved(self, sha256: str) -> int | None:
        """A number that grows while the file is being fetched; None if it is not."""
        return self._coming.get(sha256)

    def _verified(self, sha256: str) -> Iterator[tuple[Path, HeldFile]]:
        """The verified files with this digest in the directories of models; not those on shared storage."""
        for directory in sorted(self._models.iterdir()):
            if directory.name.startswith(_GOING) or not (directory / MANIFEST).is_file():
                continue
            for held in _read(directory, "").files:
                path = directory / held.name
                if held.sha256 == sha256 and _is_untouched(directory, held) and not path.is_symlink():
                    yield path, held

    async def restore(self, model: Model, report: ReportProgress) -> None:
        """Download missing or truncated files again; only a check if all files are there.

        Reports show such files, too, but a start may come before the next report.
        """
        try:
            await in_thread(self.check_files, model)
        except Hopeless:
            await self.pull(model, None, report)

    async def remove(self, name: str) -> bool:
        """Remove a model's files, and return whether there were any. Reports omit the model from the first step on.
        What was fetched of it so far goes, too.
        """
        try:
            await in_thread(self._fetcher.forget, name)
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
        check_model_files(model)
        for file in model.files:
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

    def shared_storage(self, model: Model) -> tuple[Path, ...]:
        """The files of a model that lie elsewhere and are read in place. Blocks."""
        directory = self.path_of(model)
        links = (directory / file.name for file in model.files if file.uri.startswith("file:"))
        return tuple(Path(os.path.realpath(link)) for link in links)

    def recover(self) -> None:
        """Finish removals of a killed worker; downloads are kept to be continued. Blocks."""
        for directory in list(self._models.iterdir()):
            if directory.name == DOWNLOADS:
                continue
            if directory.name.startswith(_GOING):
                disk.remove_tree(directory)
            for path in directory.iterdir() if directory.is_dir() else ():
                if path.name.endswith(".part") or path.name.startswith("."):
                    disk.remove_tree(path)
        self._fetcher.recover()


def check_model_files(model: Model) -> None:
    """The bus is not trusted: check all names and addresses before the first is used."""
    check_file_names(file.name for file in model.files)
    for file in model.files:
        check_file_source(file.name, file.uri, file.sha256)


async def _place_all(
    directory: Path,
    model: Model,
    fetched: dict[str, tuple[Path, FetchedFile]],
    before: Manifest,
    generation: int | None,
) -> Manifest:
    """Rename all fetched files and write the manifest. A cancellation leaves the old version or the new one."""
    made: Manifest | None = None

    def place() -> None:
        nonlocal made
        uris = {file.name: file.uri for file in model.files}
        known = {file.name: file for file in before.files}
        for name, (incoming, found) in fetched.items():
            known[name] = _put(directory, name, incoming, found, uris[name])
        _remove_others(directory, before, uris)
        disk.sync_directory(directory)
        manifest = Manifest(
            name=model.name,
            files=tuple(known[file.name] for file in model.files),
            generation=before.generation if generation is None else generation,
        )
        disk.write_atomic(directory / MANIFEST, msgspec.json.encode(manifest))
        made = manifest

    try:
        await in_thread(place)
    except asyncio.CancelledError:
        # The cancellation came after the last step, so the pull has succeeded.
        if made is None:
            raise
    assert made is not None
    return made


def _put(directory: Path, name: str, incoming: Path, found: FetchedFile, uri: str) -> HeldFile:
    final = directory / name
    if not os.path.realpath(final.parent).startswith(os.path.realpath(directory)):
        raise Invalid(f"cannot place {name}: a directory on its way is a link", code="invalid_name")
    final.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
    if final.is_dir() and not final.is_symlink():
        disk.remove_tree(final)
    incoming.rename(final)
    if final.parent != directory:
        disk.sync_directory(final.parent)
    status = final.stat()
    return HeldFile(name, found.sha256, status.st_size, status.st_mtime_ns, uri)


def _remove_others(directory: Path, before: Manifest, wanted: dict[str, str]) -> None:
    """Remove the files of the version before that this one does not have."""
    for file in before.files:
        if file.name not in wanted and not any(name.startswith(f"{file.name}/") for name in wanted):
            (directory / file.name).unlink(missing_ok=True)


def _pins(model: Model, manifest: Manifest) -> tuple[PinnedFile, ...]:
    found = {file.name: file for file in manifest.files}
    return tuple(
        PinnedFile(file.name, found[file.name].sha256, found[file.name].size_bytes)
        for file in model.files
        if not file.sha256
    )


def _is_held(directory: Path, file: ModelFile, known: HeldFile | None) -> bool:
    """Whether a verified file is the requested one: by its digest, or by its address where no digest is known."""
    if known is None or not _is_untouched(directory, known):
        return False
    return known.sha256 == file.sha256 if file.sha256 else bool(known.uri) and known.uri == file.uri


def _missing(directory: Path, model: Model, before: Manifest) -> list[ModelFile]:
    known = {file.name: file for file in before.files}
    return [file for file in model.files if not _is_held(directory, file, known.get(file.name))]


def _make_empty(directory: Path) -> None:
    disk.remove_tree(directory)
    directory.mkdir(mode=0o750)


def _shifted(report: ReportProgress, name: str, before: int, total: int) -> ReportBytes:
    """Report the progress of one file as progress of the whole model."""
    loop = asyncio.get_running_loop()

    def report_model(done: int, size: int) -> None:
        loop.call_soon_threadsafe(report, "downloading", name, before + done, max(total, before + size))

    return report_model


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
