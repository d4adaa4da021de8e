"""Upgrades that fail while what they were to replace serves: nobody who asks notices."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from tests.e2e.conftest import wait_for
from tests.fetch.faults import Answer, Fault, Flip, Stall
from tests.fleet.cluster import Fleet
from tests.fleet.engines import PER_SECOND, Serving, ask, asking, ports
from tests.fleet.guests import guest_worker, row_of
from tests.fleet.warehouse import Warehouse
from tests.fleet.wheels import PACKAGE, PACKAGED, environment_of, write_wheel


def digest_on(fleet: Fleet, name: str, worker: str) -> str:
    listed = next(one for one in fleet.second.get("/backends") if one["Name"] == name)
    return next(str(node["digest"]) for node in listed["nodes"] if node["node_name"] == worker)


def test_an_upgrade_that_fails_costs_not_one_request(
    fleet: Fleet, warehouse: Warehouse, serving: Serving, name: str
) -> None:
    """F-017."""
    old = serving.offer(name, "one")
    serving.add_model("speaker", name)
    serving.load("speaker", "worker-1")
    _, said = ask(fleet.first.port, serving.token, "speaker")
    pid = int(said.removeprefix("one "))
    misfortunes: list[tuple[Fault, str]] = [(Answer(404), "failed"), (Flip(10), "failed"), (Stall(10), "cancelled")]
    with asking(ports(fleet), serving.token, "speaker") as load:
        for number, (fault, end) in enumerate(misfortunes):
            new = serving.offer(name, f"never {number}")
            assert new.digest != old.digest
            warehouse.proxy.plan(fault, path=new.layers[1].digest, times=None)
            fleet.first.post("/backends/upgrades/check")
            operation = fleet.request("upgrade", name, ["worker-1"], frontend=fleet.first)
            if end == "cancelled":
                wait_for("the download", partial(warehouse.proxy.asked, new.layers[1].digest))
                fleet.second.post(f"/api/operations/{operation['jobID']}/cancel", {})
            assert fleet.ended(operation)["status"] == end, fault
            assert digest_on(fleet, name, "worker-1") == old.digest
            load.until_more()
        assert load.per_second >= PER_SECOND
    assert load.failures == []
    assert {said for _, said in load.answers} == {f"one {pid}"}, "the same process all the time"
    assert fleet.began("worker-1", f"upgrade {name}") == len(misfortunes)


def test_a_package_whose_new_version_has_another_hash_than_was_promised_costs_not_one_request(
    fleet: Fleet, serving: Serving, tmp_path: Path
) -> None:
    """F-017. The gallery names the second version, with a hash that no file has."""
    for version, says in (("1.0", "one"), ("2.0", "never")):
        write_wheel(tmp_path, version, says)
    with guest_worker(fleet, "packer", environment=environment_of(tmp_path)):
        try:
            fleet.done("install", PACKAGED, ["packer"], uri=f"pypi:{PACKAGE}==1.0")
            serving.add_model("packaged-speaker", PACKAGED)
            serving.load("packaged-speaker", "packer")
            _, said = ask(fleet.first.port, serving.token, "packaged-speaker")
            before = digest_on(fleet, PACKAGED, "packer")
            tree = (fleet.backends_of("packer") / PACKAGED).stat().st_ino
            with asking(ports(fleet), serving.token, "packaged-speaker") as load:
                ended = fleet.ended(fleet.request("upgrade", PACKAGED, ["packer"]))
                load.until_more(40)
                assert load.per_second >= PER_SECOND
            assert ended["status"] == "failed", ended
            assert row_of(ended, "packer")["reason"] == "digest_mismatch", ended
            assert load.failures == []
            assert {answer for _, answer in load.answers} == {said}, "the same process all the time"
            assert digest_on(fleet, PACKAGED, "packer") == before
            assert (fleet.backends_of("packer") / PACKAGED).stat().st_ino == tree
            assert fleet.residue_of("packer") == []
        finally:
            serving.end()
