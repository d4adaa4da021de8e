"""Model rows: added, imported, shown, changed, copied and exported by people.

What is outside is asked before the transaction; the rows, and the load if one is wanted, are written in one. A refusal
means that nothing was stored. Replicas that run keep their revision; the reconciler replaces them one after the other,
and the answer says so. Only this module and the loader write model rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from enginehouse.core.errors import Conflict, EnginehouseError, Invalid
from enginehouse.core.ids import OperationId
from enginehouse.core.model import Model
from enginehouse.core.model_answers import AddModel, DefinedModel, DefinedReplica, ReplaceModel
from enginehouse.core.model_definition import (
    MAX_MODELS,
    check_nesting,
    exported,
    needs_of,
    patched,
    with_templates,
)
from enginehouse.core.name import check_model_name, shown
from enginehouse.frontend.acceptance import Requester, once
from enginehouse.frontend.galleries import Galleries
from enginehouse.frontend.serving.drafts import Draft, Drafts, Kept
from enginehouse.frontend.serving.loader import Loader
from enginehouse.frontend.serving.router import model_not_found
from enginehouse.frontend.watching.board import Board
from enginehouse.store import db, models, nodes, replicas
from enginehouse.store.db import Connection, Store

_LATER = "replicas that run with the old configuration are replaced one after the other"


class DefinitionParts(Struct, frozen=True, kw_only=True):
    """What definitions are built on."""

    store: Store
    board: Board
    galleries: Galleries
    loader: Loader
    drafts: Drafts
    wake: Callable[[], None]


class Definitions:
    def __init__(self, parts: DefinitionParts) -> None:
        self._store = parts.store
        self._board = parts.board
        self._galleries = parts.galleries
        self._loader = parts.loader
        self._drafts = parts.drafts
        self._wake = parts.wake

    # Requests ----------------------------------------------------------------------------------

    async def add(self, asked: AddModel, requester: Requester) -> tuple[DefinedModel, OperationId]:
        """Add a model. The id is that of its load; "" if none was asked for."""
        check_model_name(asked.name)
        draft = await self._drafts.of_request(asked)
        if asked.dry_run:
            return defined(draft, is_stored=False), OperationId("")
        return await self.store_drafts([draft], requester, asked, is_loaded=asked.load)

    async def import_all(self, mappings: Sequence[Mapping[str, Any]]) -> list[DefinedModel]:
        """Add every configuration, or none if one cannot be used or its name is taken."""
        if not mappings or len(mappings) > MAX_MODELS:
            raise Invalid(
                f"cannot import {len(mappings)} models: give 1 to {MAX_MODELS} of them",
                code="unsupported",
                param="name",
            )
        drafts = []
        for number, mapping in enumerate(mappings, start=1):
            name = mapping.get("name")
            if not isinstance(name, str):
                raise Invalid(
                    f"cannot import model {number} of {len(mappings)}: it has no `name`",
                    code="invalid_name",
                    param="name",
                )
            drafts.append(await self._drafts.of_config(mapping))
        names = [draft.model.name for draft in drafts]
        if twice := next((name for name in names if names.count(name) > 1), ""):
            raise Conflict(f"cannot import {shown(twice)} twice: give each model its own name", param="name")
        await self._store.transaction(lambda connection: self._insert(connection, drafts))
        self._wake()
        return [defined(draft) for draft in drafts]

    async def show(self, name: str) -> DefinedModel:
        """Return a model that is served, or that the built-in gallery offers."""

        def work(connection: Connection) -> DefinedModel:
            model = models.get(connection, name)
            if model is None:
                offered = self._galleries.model(name)
                if offered is None:
                    raise model_not_found(name)
                return defined(Draft(model=offered), is_stored=False)
            return _shown(connection, model, self._doubts(connection, model))

        return await self._store.read(work)

    async def change(self, name: str, asked: ReplaceModel, *, is_patch: bool) -> DefinedModel:
        """Replace the configuration of a model, or with `is_patch` change the given keys of it."""
        known = await self._store.read(lambda connection: models.get(connection, name))
        if known is None:
            raise model_not_found(name)
        if known.endpoint:
            raise Invalid(
                f"cannot change {shown(name)}: it runs elsewhere and has no configuration; delete and add it",
                code="unsupported",
                param="name",
            )
        check_nesting(asked.config)
        before = exported(known)
        _check_kind(known, asked.config)
        config = with_templates(patched(before, asked.config) if is_patch else asked.config or before)
        if config.get("name", name) != name:
            raise Invalid(
                f"cannot rename {shown(name)}: copy it to the new name and delete the old one",
                code="invalid_name",
                param="name",
            )
        config = {"name": name, **config}
        old, new = needs_of(before), needs_of(config)
        gone = {need.name for need in old if need not in new} - {""}
        kept = [file for file in known.files if file.name not in gone]
        replicas = known.replicas if asked.replicas is None else asked.replicas
        kept_parts = Kept(
            files=tuple(kept), needs=tuple(need for need in new if need not in old), replicas=replicas, before=known
        )
        draft = await self._drafts.of_needs(config, kept_parts)

        def work(connection: Connection) -> DefinedModel:
            current = models.get(connection, name, lock=True)
            if current is None:
                raise model_not_found(name)
            if current.revision != (asked.revision or known.revision):
                raise Conflict(
                    f"cannot change {shown(name)}: it was changed meanwhile; read it again and repeat the change",
                    param="revision",
                )
            models.replace(connection, draft.model)
            if draft.model.alias:
                self._check_alias(connection, draft.model)
            shown_now = _shown(connection, draft.model, draft.warnings)
            is_late = any(not one.is_current for one in shown_now.running)
            return replace(shown_now, remarks=(*draft.remarks, *((_LATER,) if is_late else ())))

        changed = await self._store.transaction(work)
        self._wake()
        return changed

    async def copy(self, name: str, new_name: str) -> DefinedModel:
        """Add a model with the configuration and the files of another one."""
        check_model_name(new_name)

        def work(connection: Connection) -> DefinedModel:
            model = models.get(connection, name) or self._galleries.model(name)
            if model is None:
                raise model_not_found(name)
            config = {**model.config, "name": new_name} if model.config else {}
            draft = Draft(model=replace(model, name=new_name, config=config))
            there = self._insert(connection, [draft])
            return replace(defined(draft), was_there=new_name in there)

        copied = await self._store.transaction(work)
        self._wake()
        return copied

    async def export(self, name: str) -> dict[str, Any]:
        """Return the configuration of a model, to be written as YAML."""
        model = await self._store.read(lambda connection: models.get(connection, name))
        model = model or self._galleries.model(name)
        if model is None:
            raise model_not_found(name)
        if model.endpoint:
            raise Invalid(
                f"cannot export {shown(name)}: it runs elsewhere and has no configuration",
                code="unsupported",
                param="name",
            )
        return exported(model)

    async def store_drafts(
        self, drafts: Sequence[Draft], requester: Requester, body: object, *, is_loaded: bool
    ) -> tuple[DefinedModel, OperationId]:
        """Insert models, and begin the load of the first if it is wanted, in one transaction."""
        first = drafts[0].model

        def work(connection: Connection) -> OperationId | None:
            self._insert(connection, drafts)
            is_local = is_loaded and first.runs_here
            return self._loader.begin(connection, first, requester.author) if is_local else None

        operation_id = await self._store.transaction(once(work, requester, body))
        self._wake()
        if operation_id is not None:
            await self._board.operations_changed([operation_id])
        return defined(drafts[0]), operation_id or OperationId("")

    def _insert(self, connection: Connection, drafts: Sequence[Draft]) -> set[str]:
        """Insert every model, then look whether aliases name models that there are. Returns what was there already."""
        there = _insert_all(connection, drafts)
        for model in (draft.model for draft in drafts if draft.model.alias):
            self._check_alias(connection, model)
        return there

    def _check_alias(self, connection: Connection, model: Model) -> None:
        target = models.get(connection, model.alias) or self._galleries.model(model.alias)
        if target is None:
            raise model_not_found(model.alias)
        if target.alias:
            raise Invalid(
                f"cannot add {shown(model.name)} as an alias of {shown(model.alias)}, which is an alias itself; name "
                f"{shown(target.alias)}",
                code="unsupported",
                param="alias",
            )

    def _doubts(self, connection: Connection, model: Model) -> tuple[str, ...]:
        if not model.runs_here:
            return ()
        try:
            return tuple(self._drafts.about_backend(model, nodes.every(connection)))
        except EnginehouseError as error:
            return (error.message,)


def _check_kind(known: Model, changes: Mapping[str, Any]) -> None:
    """An alias stays one, and another model does not become one: its replicas and files would be nobody's."""
    if changes and bool(changes.get("alias", known.alias)) != bool(known.alias):
        raise Invalid(
            f"cannot change {shown(known.name)} into {'a model' if known.alias else 'an alias'}: delete it, and add it",
            code="unsupported",
            param="alias",
        )


def _insert_all(connection: Connection, drafts: Sequence[Draft]) -> set[str]:
    """Insert every model. One that is there already with the same definition is left as it is, and returned."""
    now, there = db.now(connection), set[str]()
    for draft in drafts:
        if models.add(connection, draft.model, now):
            continue
        known = models.get(connection, draft.model.name, lock=True)
        if known is None or not _is_same(known, draft.model):
            raise Conflict(
                f"cannot add {shown(draft.model.name)}: there is a model of that name with another definition; choose "
                "another name, change it, or delete it first",
                code="conflict",
                param="name",
            )
        there.add(known.name)
    return there


def _is_same(known: Model, wanted: Model) -> bool:
    """Whether two definitions are equal; a digest that was recorded at the first download is no difference."""
    digests = {file.name: file.sha256 for file in known.files}
    files = tuple(replace(file, sha256=file.sha256 or digests.get(file.name, "")) for file in wanted.files)
    return msgspec.json.encode(known) == msgspec.json.encode(replace(wanted, files=files))


def defined(draft: Draft, *, is_stored: bool = True) -> DefinedModel:
    """The view of a draft."""
    model = draft.model
    return DefinedModel(
        name=model.name,
        revision=model.revision,
        backend=model.backend,
        license=model.license,
        description=model.description,
        size_bytes=model.size_bytes,
        replicas=model.replicas,
        endpoint=model.endpoint,
        alias=model.alias,
        credential=model.credential,
        options=model.options,
        files=model.files,
        config=model.config,
        is_stored=is_stored,
        remarks=draft.remarks,
        warnings=draft.warnings,
    )


def _shown(connection: Connection, model: Model, warnings: Sequence[str]) -> DefinedModel:
    found = replicas.of_model(connection, model.name)
    names, _, _ = nodes.named(connection, {one.node_id for one in found})
    running = tuple(
        DefinedReplica(
            node_name=names.get(one.node_id, one.node_id),
            slot=one.slot,
            is_current=one.revision in ("", model.revision),
        )
        for one in found
    )
    view = defined(Draft(model=model, warnings=tuple(warnings)))
    return replace(view, running=running, created_at=models.created_at(connection, model.name))
