"""What a machine says of itself."""

from __future__ import annotations

import socket
from pathlib import Path

import msgspec
import psutil
import pytest

from enginehouse.core.capability import Decision
from enginehouse.core.capacity import GraphicsCard
from enginehouse.core.errors import Invalid
from enginehouse.host import graphics, hardware
from enginehouse.host.graphics import MIB, DevicePaths, Graphics, Watch, observe

GIB = 1024**3


def make_card(cards: Path, name: str, vendor: str, vram: int = 0) -> None:
    device = cards / name / "device"
    device.mkdir(parents=True)
    (device / "vendor").write_text(vendor + "\n")
    if vram:
        (device / "mem_info_vram_total").write_text(f"{vram}\n")


def make_tool(directory: Path, name: str, script: str) -> Path:
    """A program that really runs: what a vendor's tool would print."""
    directory.mkdir(exist_ok=True)
    tool = directory / name
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    return tool


@pytest.fixture
def places(tmp_path: Path) -> DevicePaths:
    """A machine without anything; tests put in what it has."""

    def find_tool(name: str) -> str | None:
        tool = tmp_path / "bin" / name
        return str(tool) if tool.exists() else None

    return DevicePaths(cards=tmp_path / "drm", board=tmp_path / "model", find_tool=find_tool)


def test_no_card_is_no_vendor(places: DevicePaths) -> None:
    assert observe(places) == Graphics()
    places.cards.mkdir()
    assert observe(places) == Graphics()


def test_cards_are_read_from_sysfs_and_connectors_are_not_cards(places: DevicePaths) -> None:
    make_card(places.cards, "card0", "0x1002", 8 * GIB)
    make_card(places.cards, "card1", "0x1002", 8 * GIB)
    make_card(places.cards, "card0-HDMI-A-1", "0x10de")
    make_card(places.cards, "card2", "0x9999")
    (places.cards / "card3").mkdir()
    assert observe(places) == Graphics(
        vendor="amd",
        total_bytes=16 * GIB,
        free_bytes=16 * GIB,
        cards=(GraphicsCard(total_vram=8 * GIB), GraphicsCard(index=1, total_vram=8 * GIB)),
    )


def test_a_driver_that_tells_what_is_used_tells_what_is_free(places: DevicePaths) -> None:
    make_card(places.cards, "card0", "0x1002", 8 * GIB)
    make_card(places.cards, "card1", "0x1002", 8 * GIB)
    make_card(places.cards, "card10", "0x1002", 8 * GIB)
    for name, used in (("card0", 3 * GIB), ("card1", 0), ("card10", 9 * GIB)):
        (places.cards / name / "device" / "mem_info_vram_used").write_text(f"{used}\n")
    seen = observe(places)
    assert [card.available_vram for card in seen.cards] == [5 * GIB, 8 * GIB, 0]
    assert (seen.total_bytes, seen.free_bytes) == (24 * GIB, 13 * GIB)


def test_of_several_vendors_the_one_of_localai_wins_and_an_integrated_one_is_no_gpu_build(places: DevicePaths) -> None:
    make_card(places.cards, "card0", "0x8086")
    assert observe(places) == Graphics(vendor="intel")
    make_card(places.cards, "card1", "0x10de")
    assert observe(places) == Graphics(vendor="nvidia")


def test_nvidia_memory_and_driver_come_from_the_tool(places: DevicePaths, tmp_path: Path) -> None:
    make_card(places.cards, "card0", "0x10de")
    two = "printf '0, NVIDIA RTX A, 24564, 20000, 580.65.06\\n1, NVIDIA RTX A, 24564, 24000, 580.65.06\\n'"
    make_tool(tmp_path / "bin", "nvidia-smi", two)
    seen = observe(places)
    first = GraphicsCard(index=0, name="NVIDIA RTX A", total_vram=24564 * MIB, available_vram=20000 * MIB)
    second = GraphicsCard(index=1, name="NVIDIA RTX A", total_vram=24564 * MIB, available_vram=24000 * MIB)
    assert seen == Graphics(
        vendor="nvidia", total_bytes=49128 * MIB, free_bytes=44000 * MIB, driver=580, cards=(first, second)
    )


@pytest.mark.parametrize(("knows", "compute"), [("echo 12.1", "12.1"), ("echo '[N/A]'", ""), ("exit 2", "")])
def test_the_compute_capability_is_asked_for_apart(
    places: DevicePaths, tmp_path: Path, knows: str, compute: str
) -> None:
    """An older tool refuses a whole query for a field that it does not know."""
    card = "echo '0, NVIDIA RTX A, 24564, 20000, 580.65.06'"
    make_tool(tmp_path / "bin", "nvidia-smi", f'case "$1" in *compute_cap*) {knows};; *) {card};; esac')
    seen = observe(places)
    assert (seen.total_bytes, seen.compute_capability) == (24564 * MIB, compute)


@pytest.mark.parametrize("name", ["NVIDIA GB10", "NVIDIA Thor"])
def test_a_chip_without_memory_of_its_own_has_that_of_the_machine(
    places: DevicePaths, tmp_path: Path, name: str
) -> None:
    make_tool(tmp_path / "bin", "nvidia-smi", f"echo '0, {name}, [N/A], [N/A], 580.95.05'")
    seen = observe(places)
    assert (seen.vendor, seen.total_bytes, seen.driver) == ("nvidia", psutil.virtual_memory().total, 580)
    assert seen.cards == (), "it is the machine's memory"


def test_a_jetson_is_known_by_its_board(places: DevicePaths) -> None:
    places.board.write_bytes(b"NVIDIA Jetson AGX Orin Developer Kit\0")
    assert observe(places).vendor == "nvidia"
    assert observe(places).total_bytes == psutil.virtual_memory().total
    places.board.write_bytes(b"Raspberry Pi 5\0")
    assert observe(places) == Graphics()


@pytest.mark.parametrize("script", ["exit 9", "echo nonsense", "echo 'No devices were found'", "printf '\\377\\376'"])
def test_a_tool_that_finds_no_card_makes_no_vendor(places: DevicePaths, tmp_path: Path, script: str) -> None:
    make_tool(tmp_path / "bin", "nvidia-smi", script)
    assert observe(places) == Graphics()
    make_card(places.cards, "card0", "0x10de")
    assert observe(places) == Graphics(vendor="nvidia")


def test_a_tool_that_hangs_is_given_up(places: DevicePaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphics, "TOOL_SECONDS", 0.2)
    make_tool(tmp_path / "bin", "nvidia-smi", "exec tail -f /dev/null")
    assert observe(places) == Graphics()


def test_tools_on_the_path_tell_the_vendor_where_sysfs_does_not(places: DevicePaths, tmp_path: Path) -> None:
    make_tool(tmp_path / "bin", "vulkaninfo", "exit 0")
    assert observe(places) == Graphics(vendor="vulkan")
    make_tool(tmp_path / "bin", "rocm-smi", "exit 0")
    assert observe(places) == Graphics(vendor="amd")


def test_a_look_is_kept_for_a_while(places: DevicePaths, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(places)
    assert watch.look().vendor == ""
    make_card(places.cards, "card0", "0x1002", 8 * GIB)
    assert watch.look().vendor == ""
    monkeypatch.setattr(graphics, "KEPT_SECONDS", -1.0)
    assert watch.look().vendor == "amd"


def test_a_capability_is_forced_by_our_variable_localais_or_the_file_in_this_order(tmp_path: Path) -> None:
    file = tmp_path / "capability"
    environment = {hardware.RUN_FILE_VARIABLE: str(file)}
    assert "forced" not in hardware.detect(environment).reason
    file.write_text(" nvidia-l4t \n")
    assert hardware.detect(environment) == Decision("nvidia-l4t", f"forced by {file}")
    environment["LOCALAI_FORCE_META_BACKEND_CAPABILITY"] = "intel"
    assert hardware.detect(environment).capability == "intel"
    environment["ENGINEHOUSE_CAPABILITY"] = "disable"
    assert hardware.detect(environment) == Decision("disable", "forced by ENGINEHOUSE_CAPABILITY")


@pytest.mark.parametrize("word", ["a b", "../x", "ä", "x" * 300, "nvida"])
def test_a_forced_capability_that_cannot_be_one_is_refused_with_its_place(word: str) -> None:
    with pytest.raises(Invalid) as caught:
        hardware.detect({"ENGINEHOUSE_CAPABILITY": word})
    assert caught.value.message.startswith("cannot use ")
    assert "from ENGINEHOUSE_CAPABILITY: " in caught.value.message


def test_cuda_directories_decide_the_release(
    places: DevicePaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tool(tmp_path / "bin", "nvidia-smi", "echo '0, NVIDIA RTX A, 24564, 20000, 580.65.06'")
    monkeypatch.setattr(hardware, "_graphics", Watch(places))
    monkeypatch.setattr(hardware, "platform", lambda: "linux/amd64")
    none = {hardware.RUN_FILE_VARIABLE: str(tmp_path / "absent")}
    assert hardware.detect(none, tmp_path).capability == "nvidia-cuda-13"  # the driver says so
    (tmp_path / "cuda-12").mkdir()
    assert hardware.detect(none, tmp_path).capability == "nvidia-cuda-12"
    (tmp_path / "cuda-13").mkdir()
    assert hardware.detect(none, tmp_path).capability == "nvidia-cuda-13"
    assert hardware.capacity(tmp_path).available_vram == 20000 * MIB


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


def test_the_memory_device_of_nvidia_is_made_before_a_confined_engine_needs_it(
    places: DevicePaths, tmp_path: Path
) -> None:
    driver, device = tmp_path / "nvidia", tmp_path / "nvidia-uvm"
    there = msgspec.structs.replace(places, nvidia=driver, nvidia_memory=device)
    make_tool(tmp_path / "bin", "nvidia-modprobe", f'echo "$@" >> {device}')
    graphics.make_devices(there)
    assert not device.exists()
    driver.mkdir()
    graphics.make_devices(there)
    graphics.make_devices(there)
    assert device.read_text() == "-u -c 0\n"
