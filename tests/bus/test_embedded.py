"""Keys, configuration and port of the embedded server."""

from __future__ import annotations

import base64
import socket
import stat
from pathlib import Path

import msgspec
import nkeys
import pytest

from enginehouse.bus import credentials, embedded
from enginehouse.core import subjects
from enginehouse.core.errors import Conflict, Hopeless
from enginehouse.core.ids import NodeId

NODE = NodeId("a.b")


def claims(jwt: str) -> dict[str, object]:
    header, payload, signature = (part.encode() + b"==" for part in jwt.split("."))
    body = msgspec.json.decode(base64.urlsafe_b64decode(payload), type=dict[str, object])
    assert msgspec.json.decode(base64.urlsafe_b64decode(header)) == {"typ": "JWT", "alg": "ed25519-nkey"}
    assert len(base64.urlsafe_b64decode(signature)) == 64
    return body


def test_keys_are_made_once_and_only_the_owner_can_read_them(tmp_path: Path) -> None:
    first = credentials.load_or_create(tmp_path / "bus")
    second = credentials.load_or_create(tmp_path / "bus")
    assert (first.operator_seed, first.account_seed) == (second.operator_seed, second.account_seed)
    assert first.operator_seed.startswith("SO")
    assert first.account_seed.startswith("SA")
    for path in (tmp_path / "bus").iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("content", ["", "nonsense", "SUAMBKQ"])
def test_a_damaged_key_is_named_and_never_replaced(tmp_path: Path, content: str) -> None:
    credentials.load_or_create(tmp_path)
    (tmp_path / "account.seed").write_text(content)
    with pytest.raises(Hopeless) as caught:
        credentials.load_or_create(tmp_path)
    assert "account.seed" in caught.value.message
    assert (tmp_path / "account.seed").read_text() == content


def test_a_key_of_another_kind_is_refused(tmp_path: Path) -> None:
    accounts = credentials.load_or_create(tmp_path)
    (tmp_path / "account.seed").write_text(accounts.operator_seed)
    with pytest.raises(Hopeless):
        credentials.load_or_create(tmp_path)


def test_a_workers_credential_allows_its_own_commands_progress_and_answers(tmp_path: Path) -> None:
    accounts = credentials.load_or_create(tmp_path)
    made = credentials.mint_user(
        accounts.account_seed,
        credentials.worker_name(NODE),
        subjects.worker_permissions(NODE),
        life_seconds=99.9,
    )
    body = claims(made.jwt)
    assert body["name"] == "enginehouse-backend-a-b"
    assert made.expires_at is not None
    assert body["exp"] == int(made.expires_at)
    assert body["iss"] == accounts.account
    assert body["sub"] == nkeys.from_seed(made.seed.encode()).public_key.decode()
    granted = msgspec.convert(body["nats"], dict[str, object])
    assert granted["sub"] == {"allow": ["nodes.a-b.>"]}
    assert granted["pub"] == {
        "allow": [
            "nodes.a-b.backend.install.*.progress",
            "nodes.a-b.files.>",
            "_INBOX.eh.a-b.>",
            "_INBOX.eh-poll.a-b.>",
        ],
    }
    assert granted["resp"] == {"max": 1, "ttl": 3600 * 10**9}
    frontend = credentials.mint_user(accounts.account_seed, "x", subjects.frontend_permissions())
    assert "exp" not in claims(frontend.jwt)


def test_a_frontend_may_say_every_command_of_the_wire_and_progress_of_its_own_and_nothing_else() -> None:
    permissions = subjects.frontend_permissions()
    commands = {subjects.node_subject(NodeId("ID"), verb).replace("ID", "*") for verb in subjects.WORKER_SUBJECTS}
    assert set(permissions.publish) == {*commands, subjects.ALL_PROGRESS, subjects.ALL_IN_FLIGHT, subjects.ALL_CHANGED}
    assert subjects.ALL_PROGRESS in permissions.subscribe


def test_a_busy_default_port_moves_and_a_busy_request_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(Conflict) as caught:
            embedded.choose_port("127.0.0.1", port)
        assert str(port) in caught.value.message
        chosen = embedded.choose_port("127.0.0.1", None, port)
        assert chosen != port
        assert chosen >= embedded.DEFAULT_PORT
    for impossible in (-1, 65536):
        with pytest.raises(Conflict):
            embedded.choose_port("127.0.0.1", impossible)


def test_the_port_is_kept_for_the_next_start(tmp_path: Path) -> None:
    accounts = credentials.load_or_create(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    first = embedded.prepare(tmp_path, accounts, host="127.0.0.1", port=port, log_path=tmp_path / "log")
    second = embedded.prepare(tmp_path, accounts, host="127.0.0.1", port=None, log_path=tmp_path / "log")
    assert (first.port, second.port, second.url) == (port, port, f"nats://127.0.0.1:{port}")
    assert stat.S_IMODE((tmp_path / "nats.conf").stat().st_mode) == 0o600


def test_a_server_on_every_address_is_reached_over_loopback(tmp_path: Path) -> None:
    assert embedded.reachable_host("0.0.0.0") == "127.0.0.1"
    assert embedded.reachable_host("::") == "::1"
    assert embedded.reachable_host("10.0.0.1") == "10.0.0.1"


def test_the_servers_program_is_found() -> None:
    assert Path(embedded.find_program()).name.startswith("nats-server")
