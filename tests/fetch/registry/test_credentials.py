"""Credentials from the files of docker and podman, from their programs, and from the operator."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from enginehouse.core.reference import parse_image
from enginehouse.fetch.registry.credentials import Credentials, RegistryCredential


def encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def written(path: Path, document: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document))
    return path


def auths(**entries: str) -> dict[str, object]:
    return {"auths": {host: {"auth": encoded(text)} for host, text in entries.items()}}


def helper(directory: Path, name: str, script: str) -> None:
    directory.mkdir(exist_ok=True)
    program = directory / f"docker-credential-{name}"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)


async def find(
    environment: dict[str, str], image: str, settings: dict[str, str] | None = None
) -> RegistryCredential | None:
    return await Credentials(environment, settings or {}).find(parse_image(image))


async def test_without_files_we_are_anonymous(tmp_path: Path) -> None:
    assert await find({}, "quay.io/a/b") is None
    assert await find({"HOME": str(tmp_path)}, "quay.io/a/b") is None


async def test_every_place_is_looked_at_in_its_order(tmp_path: Path) -> None:
    home, runtime = tmp_path / "home", tmp_path / "runtime"
    written(runtime / "containers" / "auth.json", auths(**{"quay.io": "podman:1"}))
    environment = {"HOME": str(home), "XDG_RUNTIME_DIR": str(runtime)}
    assert await find(environment, "quay.io/a/b") == RegistryCredential("podman", "1")
    environment["REGISTRY_AUTH_FILE"] = str(written(tmp_path / "auth.json", auths(**{"quay.io": "file:2"})))
    assert await find(environment, "quay.io/a/b") == RegistryCredential("file", "2")
    written(home / ".docker" / "config.json", auths(**{"quay.io": "docker:3"}))
    assert await find(environment, "quay.io/a/b") == RegistryCredential("docker", "3")
    written(tmp_path / "other" / "config.json", auths(**{"quay.io": "other:4"}))
    environment["DOCKER_CONFIG"] = str(tmp_path / "other")
    assert await find(environment, "quay.io/a/b") == RegistryCredential("other", "4")
    assert await find(environment, "quay.io/a/b", {"quay.io": "set:with:colon"}) == RegistryCredential(
        "set", "with:colon"
    )
    assert await find(environment, "ghcr.io/a/b") is None


@pytest.mark.parametrize(
    ("key", "image"),
    [
        ("https://index.docker.io/v1/", "ubuntu"),
        ("docker.io", "ubuntu"),
        ("index.docker.io", "a/b"),
        ("https://quay.io", "quay.io/a/b"),
        ("https://quay.io/v2/", "quay.io/a/b"),
        ("quay.io/a", "quay.io/a/b"),
        ("quay.io/a/b", "quay.io/a/b"),
        ("localhost:5000", "localhost:5000/x"),
    ],
)
async def test_a_credential_is_found_under_every_name_it_is_kept_by(tmp_path: Path, key: str, image: str) -> None:
    written(tmp_path / "config.json", auths(**{key: "me:secret"}))
    assert await find({"DOCKER_CONFIG": str(tmp_path)}, image) == RegistryCredential("me", "secret")


@pytest.mark.parametrize("image", ["quay.io/b/a", "quay.io.evil.com/a/b", "evil.com/quay.io/a", "quay.io:5000/a/b"])
async def test_a_credential_is_for_its_own_registry_only(tmp_path: Path, image: str) -> None:
    written(tmp_path / "config.json", auths(**{"quay.io/a": "me:secret"}))
    assert await find({"DOCKER_CONFIG": str(tmp_path)}, image) is None


async def test_the_most_specific_name_wins(tmp_path: Path) -> None:
    written(tmp_path / "config.json", auths(**{"quay.io": "all:1", "quay.io/a": "some:2", "quay.io/a/b": "one:3"}))
    environment = {"DOCKER_CONFIG": str(tmp_path)}
    assert await find(environment, "quay.io/a/b") == RegistryCredential("one", "3")
    assert await find(environment, "quay.io/a/c") == RegistryCredential("some", "2")
    assert await find(environment, "quay.io/c") == RegistryCredential("all", "1")


async def test_identity_tokens_and_plain_entries(tmp_path: Path) -> None:
    entries = {
        "a.io": {"auth": encoded("me:"), "identitytoken": "long"},
        "b.io": {"username": "u", "password": "p"},
        "c.io": {"auth": "%%%"},
        "d.io": {},
    }
    written(tmp_path / "config.json", {"auths": entries, "HttpHeaders": {"x": "y"}})
    environment = {"DOCKER_CONFIG": str(tmp_path)}
    assert await find(environment, "a.io/x") == RegistryCredential(identity_token="long")
    assert await find(environment, "b.io/x") == RegistryCredential("u", "p")
    assert await find(environment, "c.io/x") is None
    assert await find(environment, "d.io/x") is None


async def test_programs_that_keep_credentials_are_asked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bin_directory = tmp_path / "bin"
    helper(bin_directory, "echo", 'read host; printf \'{"Username":"u-%s","Secret":"s"}\' "$host"')
    helper(bin_directory, "token", 'printf \'{"Username":"<token>","Secret":"long"}\'')
    helper(bin_directory, "none", "echo 'credentials not found'; exit 1")
    helper(bin_directory, "noise", "echo '<html>'")
    environment = {"DOCKER_CONFIG": str(tmp_path), "PATH": f"{bin_directory}:/usr/bin:/bin"}
    helpers = {"t.io": "token", "n.io": "none", "x.io": "noise", "m.io": "missing", "b.io": "../../bin/sh"}
    written(tmp_path / "config.json", {"credHelpers": helpers, "credsStore": "echo"})
    assert await find(environment, "t.io/a") == RegistryCredential(identity_token="long")
    assert await find(environment, "ghcr.io/a/b") == RegistryCredential("u-ghcr.io", "s")
    assert await find(environment, "ubuntu") == RegistryCredential("u-https://index.docker.io/v1/", "s")
    for image in ("n.io/a", "x.io/a", "m.io/a", "b.io/a"):
        assert await find(environment, image) is None
    assert "credentials.helper_missing helper=missing" in caplog.text
    assert "credentials.helper_refused" in caplog.text


@pytest.mark.parametrize("text", ["", "{", "[]", '{"auths": 7}', "\xff"])
async def test_a_file_that_cannot_be_read_is_passed_over(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    other = written(tmp_path / "auth.json", auths(**{"quay.io": "me:secret"}))
    environment = {"DOCKER_CONFIG": str(tmp_path), "REGISTRY_AUTH_FILE": str(other)}
    assert await find(environment, "quay.io/a") == RegistryCredential("me", "secret")
    assert "credentials.file_unreadable" in caplog.text
    assert "secret" not in caplog.text


def test_a_credential_does_not_show_itself() -> None:
    credential = RegistryCredential("me", "hunter2", "hunter3")
    assert "hunter" not in repr(credential) + str(credential) + f"{credential}"
