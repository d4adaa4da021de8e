"""What a machine says of itself."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from enginehouse.core.capability import capability_of
from enginehouse.host import hardware

GIB = 1024**3


def make_card(cards: Path, name: str, vendor: str, vram: int = 0) -> None:
    device = cards / name / "device"
    device.mkdir(parents=True)
    (device / "vendor").write_text(vendor + "\n")
    if vram:
        (device / "mem_info_vram_total").write_text(f"{vram}\n")


def test_no_card_is_no_vendor(tmp_path: Path) -> None:
    assert hardware.gpu(tmp_path) == ("", 0)
    assert hardware.gpu(tmp_path / "absent") == ("", 0)


def test_cards_are_read_from_sysfs_and_connectors_are_not_cards(tmp_path: Path) -> None:
    make_card(tmp_path, "card0", "0x1002", 8 * GIB)
    make_card(tmp_path, "card1", "0x1002", 8 * GIB)
    make_card(tmp_path, "card0-HDMI-A-1", "0x10de")
    make_card(tmp_path, "card2", "0x9999")
    (tmp_path / "card3").mkdir()
    assert hardware.gpu(tmp_path) == ("amd", 16 * GIB)


def test_of_several_vendors_the_one_of_localai_wins_and_an_integrated_one_is_no_gpu_build(tmp_path: Path) -> None:
    make_card(tmp_path, "card0", "0x8086")
    assert capability_of("linux/amd64", *hardware.gpu(tmp_path)) == "default"
    make_card(tmp_path, "card1", "0x10de")
    assert hardware.gpu(tmp_path)[0] == "nvidia"


@pytest.mark.parametrize(("quota", "most"), [("100000 100000", 1), ("50000 100000", 1), ("max 100000", 10**6)])
def test_a_container_quota_limits_the_cores(tmp_path: Path, quota: str, most: int) -> None:
    file = tmp_path / "cpu.max"
    file.write_text(quota)
    assert 1 <= hardware.cores(file) <= most
    assert hardware.cores(tmp_path / "absent") >= 1


def test_capacity_is_known(tmp_path: Path) -> None:
    capacity = hardware.capacity(tmp_path)
    assert 0 < capacity.available_ram <= capacity.total_ram
    assert 0 < capacity.available_disk <= capacity.total_disk
    assert capacity.cores >= 1
    assert "/" in hardware.platform()
    assert hardware.capability()


def test_a_port_is_free_when_a_server_could_have_it() -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        port = listening.getsockname()[1]
        assert not hardware.is_port_free("127.0.0.1", port)
    assert hardware.is_port_free("127.0.0.1", port)
    assert not hardware.is_port_free("127.0.0.1", 70000)
    assert not hardware.is_port_free("203.0.113.1", port)
