"""Engines from images through a whole cluster: a gallery, a registry, workers that are killed on the way."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
from tests.e2e.conftest import Cluster, Program, wait_for
from tests.fetch.faulty import Faulty, faulty
from tests.fetch.images import Image, write_image
from tests.fetch.real_registry import running_registry
from tests.worker.shelf import launcher, noise, said_by

from enginehouse.host import hardware

MEGABYTE = 1_000_000


@asynccontextmanager
async def published(root: Path) -> AsyncIterator[tuple[Faulty, Image, dict[str, str]]]:
    """An image behind a proxy, and the environment of a cluster whose gallery names it."""
    async with running_registry(root) as registry, faulty(registry.address) as proxy:
        layers = [{"first.so": noise(3 * MEGABYTE, 1)}, {"second.so": noise(12 * MEGABYTE, 2)}]
        image = write_image(root / "layout", [*layers, {"run.sh": launcher("one")}], platform=hardware.platform())
        await registry.push(image.directory, "engine:latest")
        gallery = root / "gallery.yaml"
        gallery.write_text(
            "- {name: engine, capabilities: {default: cpu-engine}}\n"
            f"- {{name: cpu-engine, uri: '{proxy.reference('engine:latest')}'}}\n"
        )
        environment = {
            "ENGINEHOUSE_BACKEND_GALLERIES": json.dumps([{"name": "lab", "url": f"file://{gallery}"}]),
            "ENGINEHOUSE_ALLOWED_HOSTS": "127.0.0.1",
            "ENGINEHOUSE_CAPABILITY": "default",
        }
        yield proxy, image, environment


def residue(backends: Path) -> list[str]:
    cluster = backends / ".enginehouse"
    return [path.name for place in ("staging", "replaced") for path in cluster.glob(f"{place}/*")]


async def test_a_worker_killed_in_the_middle_of_a_download_goes_on_where_it_was(tmp_path: Path) -> None:
    """F-001."""
    async with published(tmp_path) as (proxy, image, environment):
        cluster = Cluster(tmp_path)
        try:
            await asyncio.to_thread(cluster.up, environment=environment)
            await asyncio.to_thread(kill_in_the_middle, cluster, proxy, image)
        finally:
            await asyncio.to_thread(cluster.end)


def kill_in_the_middle(cluster: Cluster, proxy: Faulty, image: Image) -> None:
    backends = cluster.data / "backends"
    first, second = image.layers[0], image.layers[1]
    proxy.bytes_per_second = 2 * MEGABYTE
    operation = cluster.json("backends", "install", "engine", "--no-follow")
    verified = backends / ".enginehouse" / "blobs" / first.digest.removeprefix("sha256:")
    wait_for("the first layer to be verified", verified.exists)
    wait_for("half of the second layer", lambda: proxy.bytes_sent(second.digest) > second.size_bytes // 2)
    victim = cluster.child("worker")
    victim.send_signal(signal.SIGKILL)
    # Its sockets are closed by then: what the proxy wrote into them would count as fetched.
    wait_for("the worker to be gone", lambda: not victim.is_running() or victim.status() == psutil.STATUS_ZOMBIE)
    proxy.bytes_per_second = None
    taken = cluster.json("ops", "show", operation["jobID"])
    assert taken["status"] in ("queued", "running"), taken
    assert not (backends / "cpu-engine").exists()

    done: dict[str, Any] = wait_for("the install to be done", lambda: ended(cluster.operation(operation["jobID"])), 60)
    assert done["status"] == "succeeded", done
    assert said_by(backends / "cpu-engine") == "one"
    wait_for("the report", lambda: cluster.has_backend("first", "cpu-engine"))
    # What was here already was not fetched again; sockets may have held a little that nobody had read.
    assert proxy.bytes_sent(first.digest) == first.size_bytes
    assert proxy.bytes_sent(second.digest) < 1.3 * second.size_bytes
    assert not residue(backends)
    cluster.cli("backends", "delete", "engine", "--all")
    assert not (backends / "cpu-engine").exists()


def ended(operation: dict[str, Any]) -> dict[str, Any] | None:
    return operation if operation["status"] not in ("queued", "running") else None


async def test_all_nodes_get_the_image_and_an_upgrade_fetches_what_is_new(tmp_path: Path) -> None:
    async with published(tmp_path) as (proxy, _, environment):
        cluster = Cluster(tmp_path)
        try:
            await asyncio.to_thread(cluster.up, environment=environment)
            worker = await asyncio.to_thread(cluster.join, "second", environment)
            await asyncio.to_thread(approve, cluster, worker)
            told = await asyncio.to_thread(cluster.cli, "backends", "install", "engine", "--all")
            assert "first" in told.stdout
            assert "second" in told.stdout
            layers = [{"first.so": noise(3 * MEGABYTE, 1)}, {"second.so": noise(12 * MEGABYTE, 2)}]
            newer = write_image(
                tmp_path / "newer", [*layers, {"run.sh": launcher("two")}], platform=hardware.platform()
            )
            sent = proxy.bytes_sent()
            await push(newer, proxy)
            await asyncio.to_thread(cluster.cli, "backends", "upgrade", "engine", "--all")
            for data in (cluster.data, tmp_path / "second"):
                assert said_by(data / "backends" / "cpu-engine") == "two"
                assert said_by(data / "backends" / ".enginehouse" / "previous" / "cpu-engine") == "one"
            assert proxy.bytes_sent() - sent < 50_000
            listed = await asyncio.to_thread(cluster.json, "backends", "list")
            digests = {node["digest"] for one in listed if one["Name"] == "cpu-engine" for node in one["nodes"]}
            assert digests == {newer.digest}
        finally:
            await asyncio.to_thread(cluster.end)


def approve(cluster: Cluster, _: Program) -> None:
    wait_for("second to be known", lambda: cluster.node("second"))
    cluster.cli("nodes", "approve", "second")
    cluster.wait_for_status("second", "healthy")


async def push(image: Image, proxy: Faulty) -> None:
    """Through the proxy's registry, which is where the gallery points."""
    from tests.fetch.real_registry import Registry

    registry = Registry(proxy.upstream, False, image.directory)
    await registry.push(image.directory, "engine:latest")
