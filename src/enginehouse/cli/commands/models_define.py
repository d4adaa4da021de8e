"""`enginehouse models add, show, copy, edit, import, export`: the definitions of models.

A terminal shows what was found, with the licence, and asks before anything is stored; a script is not asked.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

import click

from enginehouse.cli.client.connect import FrontendApi, connect, read, segment, waiting
from enginehouse.cli.client.upload import upload_file
from enginehouse.cli.commands.ops import finish
from enginehouse.cli.options.shared import command, emit, emit_json, no_follow_option, wants_json
from enginehouse.cli.terminal import output
from enginehouse.core.errors import Invalid
from enginehouse.core.model_answers import DefinedModel, ImportedModels
from enginehouse.core.name import check_model_name

FIND_SECONDS = 120.0  # the frontend asks hubs and registries
IMPORT_SECONDS = 600.0
MAX_FILE_BYTES = 1024**2
yes_option = click.option("--yes", "-y", is_flag=True, help="Do not ask, and show the licence only.")


@command(
    "add",
    examples=(
        "enginehouse models add llama hf:bartowski/Llama-3.2-1B-Instruct-GGUF --load",
        "enginehouse models add llama hf:bartowski/Llama-3.2-1B-Instruct-GGUF:Q8_0",
        "enginehouse models add gemma ollama://gemma3:1b",
        "enginehouse models add mine ./model.gguf --context-size 4096",
        "enginehouse models add shared file:///mnt/models/model.gguf",
        "enginehouse models add remote http://10.0.0.7:8000/v1 --credential their-key",
    ),
)
@click.argument("name")
@click.argument("sources", metavar="SOURCE…", nargs=-1, required=True)
@click.option("--backend", metavar="NAME", default="", help="The backend (llama-cpp for GGUF files).")
@click.option("--context-size", type=int, metavar="NUMBER", help="Tokens of context.")
@click.option("--replicas", type=click.IntRange(1, 1000), default=1, metavar="NUMBER", help="Wanted replicas.")
@click.option("--credential", metavar="NAME", default="", help="Name of the credential for the source.")
@click.option("--allow", multiple=True, metavar="PATTERN", help="Files to take of a repository; repeatable.")
@click.option("--ignore", multiple=True, metavar="PATTERN", help="Files to leave out; repeatable.")
@click.option("--dry-run", is_flag=True, help="Show what would be added.")
@click.option("--load", "is_loaded", is_flag=True, help="Load it too, and follow that.")
@yes_option
@no_follow_option
def add(name: str, sources: tuple[str, ...], yes: bool, is_loaded: bool, no_follow: bool, **given: Any) -> int:
    """Add the model NAME from SOURCE: a hub, a registry, a web server, a file here, or a server that runs elsewhere."""
    frontend = connect()
    body: dict[str, Any] = {"name": check_model_name(name)}
    texts = {"backend": given["backend"], "credential": given["credential"]}
    lists = {"allow_patterns": list(given["allow"]), "ignore_patterns": list(given["ignore"])}
    body |= {key: value for key, value in {**texts, **lists}.items() if value}
    if given["context_size"] is not None:
        body["config"] = {"context_size": given["context_size"]}
    if given["replicas"] != 1:
        body["replicas"] = given["replicas"]
    named, files = _split(sources)
    if named:
        body["sources"] = named
    if files:
        body["files"] = [_uploaded(frontend, path) for path in files]
    if given["dry_run"] or asks(yes):
        planned = frontend.request("POST", "/api/models", {**body, "dry_run": True}, timeout_seconds=FIND_SECONDS)
        if not emit_json(planned):
            show_model(_read(planned))
        if given["dry_run"]:
            return 0
        click.confirm(f"Add {name}?", default=True, abort=True, err=True)
    answer = frontend.request(
        "POST", "/api/models", {**body, **({"load": True} if is_loaded else {})}, timeout_seconds=FIND_SECONDS
    )
    return finish_added(frontend, answer, no_follow=no_follow)


def asks(yes: bool) -> bool:
    """Whether a person is there to be asked."""
    return not yes and not wants_json() and sys.stdin.isatty() and output.is_terminal(sys.stderr)


def _split(sources: tuple[str, ...]) -> tuple[list[str], list[Path]]:
    """Sources for the frontend, and files of this machine. A path begins with `.`, `/` or `~`, or exists."""
    named: list[str] = []
    files: list[Path] = []
    for source in sources:
        path = Path(source).expanduser()
        if source.startswith((".", "/", "~")) or (":" not in source and path.is_file()):
            if not path.is_file():
                why = "it is a directory; name a file in it" if path.is_dir() else "there is no such file"
                raise Invalid(f"cannot upload {source}: {why}", code="invalid_uri", param="source")
            files.append(path)
        else:
            named.append(source)
    return named, files


def _uploaded(frontend: FrontendApi, path: Path) -> dict[str, object]:
    sha256, size_bytes = upload_file(frontend, path)
    return {"name": path.name, "uri": f"upload:{sha256}", "sha256": sha256, "size_bytes": size_bytes}


def finish_added(frontend: FrontendApi, answer: object, *, no_follow: bool) -> int:
    """Show a model that was added, or follow its load."""
    if isinstance(answer, dict) and "jobID" in answer:
        told = _read(answer.get("model"))
        tell(told)
        return finish(frontend, answer, no_follow=no_follow)
    if wants_json():
        output.emit_json(answer)
        return 0
    added = _read(answer)
    tell(added)
    output.say(f"{added.name} was added; load it with: enginehouse models load {shlex.quote(added.name)}")
    return 0


def tell(model: DefinedModel) -> None:
    """Remarks, warnings and the licence, for people."""
    if wants_json():
        return
    for remark in model.remarks:
        output.remark(remark)
    if model.license:
        output.remark(f"licence: {model.license}")
    for warning in model.warnings:
        output.remark(f"warning: {warning}")


def _read(answer: object) -> DefinedModel:
    return read(answer, DefinedModel)


def show_model(model: DefinedModel) -> None:
    running = ", ".join(f"{one.node_name}{'' if one.is_current else ' (an older revision)'}" for one in model.running)
    output.emit_facts(
        [
            ("name", model.name),
            ("backend", model.backend),
            ("endpoint", model.endpoint),
            ("another name of", model.alias),
            ("licence", model.license),
            ("description", model.description),
            ("size", output.size(model.size_bytes)),
            ("replicas", str(model.replicas)),
            ("context", str(model.options.context_size or "")),
            ("revision", model.revision),
            ("running on", running),
            ("credential", model.credential),
            *(("file", f"{file.name}  {output.size(file.size_bytes)}  {file.uri}") for file in model.files),
            *(("chosen", remark) for remark in model.remarks),
            *(("warning", warning) for warning in model.warnings),
        ]
    )


@command("show", examples=("enginehouse models show tiny-chat", "enginehouse models show tiny-chat --json"))
@click.argument("name")
def show(name: str) -> None:
    """Show the model NAME: its files, their sources, its licence and where it runs."""
    answer = connect().get(f"/api/models/{segment(check_model_name(name))}")
    if not emit_json(answer):
        show_model(_read(answer))


@command("copy", examples=("enginehouse models copy tiny-chat tiny-chat-long",))
@click.argument("name")
@click.argument("new_name")
def copy(name: str, new_name: str) -> None:
    """Copy the model NAME to NEW_NAME; the files are shared."""
    body = {"name": check_model_name(new_name)}
    answer = connect().request("POST", f"/api/models/{segment(check_model_name(name))}/copy", body)
    is_same = _read(answer).was_there
    emit(answer, f"= {new_name} is already a copy of {name}" if is_same else f"{name} was copied to {new_name}")


@command("export", examples=("enginehouse models export tiny-chat > tiny-chat.yaml",))
@click.argument("name")
def export(name: str) -> None:
    """Print the configuration of the model NAME as LocalAI's YAML."""
    output.say(_exported(connect(), name).rstrip("\n"), lines=True)


def _exported(frontend: FrontendApi, name: str) -> str:
    path = f"/api/models/{segment(check_model_name(name))}/export"
    return frontend.client.request_bytes("GET", path).decode("utf-8", "replace")


@command("edit", examples=("enginehouse models edit tiny-chat", "EDITOR=nano enginehouse models edit tiny-chat"))
@click.argument("name")
def edit(name: str) -> None:
    """Edit the configuration of the model NAME in $EDITOR. Running replicas keep theirs until they are loaded again."""
    from enginehouse.fetch.galleries.documents import read_mappings

    frontend = connect()
    path = f"/api/models/{segment(check_model_name(name))}"
    before = _read(frontend.get(path))
    text = _exported(frontend, name)
    changed = click.edit(text, extension=".yaml")
    if changed is None or changed.strip() == text.strip():
        output.remark("nothing was changed")
        return
    found = read_mappings(changed.encode(), "the edited configuration")
    if len(found) != 1:
        raise Invalid("cannot use the edited configuration: it must be one mapping", code="unsupported", param="config")
    body = {"config": found[0], "revision": before.revision}
    answer = frontend.request("PUT", path, body, timeout_seconds=FIND_SECONDS)
    tell(_read(answer))
    emit(answer, f"{name} was changed")


@command(
    "import",
    examples=(
        "enginehouse models import models/llama.yaml",
        "enginehouse models import https://example.com/llama.yaml",
        "enginehouse models import - < llama.yaml",
    ),
)
@click.argument("place", metavar="FILE|URL")
def import_models(place: str) -> None:
    """Import models from LocalAI's model YAML: one, a list, or several documents; all of them or none."""
    from enginehouse.link.client import RawBody

    frontend = connect()
    if place.startswith(("http://", "https://", "github:")):
        path, raw = f"/models/import?url={segment(place)}", RawBody(b"")
    else:
        path, raw = "/models/import", RawBody(_document(place), {"Content-Type": "application/yaml"})
    with waiting("asking the sources"):
        answer = frontend.client.request("POST", path, raw, object, timeout_seconds=IMPORT_SECONDS)
    if emit_json(answer):
        return
    for model in read(answer, ImportedModels).models:
        tell(model)
        output.say(f"{model.name} was imported")


def _document(place: str) -> bytes:
    """The document at a path, with the templates that lie beside it as `NAME.tmpl` put into it."""
    if place == "-":
        return sys.stdin.buffer.read(MAX_FILE_BYTES)
    path = Path(place).expanduser()
    try:
        content = path.read_bytes()
        texts = {one.name.removesuffix(".tmpl"): one for one in path.parent.glob("*.tmpl")}
        return _with_templates(content, texts) if texts else content
    except OSError as error:
        raise Invalid(f"cannot read {place}: {error.strerror or error}", code="invalid_uri", param="file") from error


def _with_templates(content: bytes, texts: dict[str, Path]) -> bytes:
    from enginehouse.fetch.galleries.documents import read_mappings, write_mapping

    mappings = read_mappings(content, "the file")
    for mapping in mappings:
        template = mapping.get("template")
        named = [value for value in template.values() if isinstance(value, str)] if isinstance(template, dict) else []
        used = [
            {"name": name, "content": texts[name].read_text("utf-8", "replace")}
            for name in dict.fromkeys(named)
            if name in texts
        ]
        if used:
            mapping["prompt_templates"] = [*mapping.get("prompt_templates", []), *used]
    return "---\n".join(write_mapping(mapping) for mapping in mappings).encode()


COMMANDS = (add, show, copy, export, edit, import_models)
