"""From a name to the build for one machine: by our rules over LocalAI's real index, and over small odd ones."""

from __future__ import annotations

from collections import Counter

import pytest
from tests.core.localai import SHARED, localai, needs_index

from enginehouse.core.errors import EnginehouseError, Hopeless, NotFound
from enginehouse.core.gallery import Catalogue, resolve
from enginehouse.core.gallery_entry import Gallery, GalleryEntry

AMD64, ARM64 = "linux/amd64", "linux/arm64"
NUMBERS = {
    "entries": 1033,
    "meta": 140,
    "release meta": 74,
    "concrete": 893,
    "development": 511,
    "with alias": 811,
    "aliases": 66,
    "concrete with capabilities": 891,
    "with mirrors": 892,
    "latest": 448,
    "master": 445,
}
CUDA_ONLY = "faster-qwen3-tts"  # its general key leads to a CUDA build
CPU_ONLY_LACKS = {"vllm-omni", "longcat-video", "rerankers", "transformers", "coqui"}


def gallery(name: str, *entries: GalleryEntry, **fields: bool | str) -> Gallery:
    return Gallery(name=name, url=f"https://{name}/", backends=entries, **fields)  # type: ignore[arg-type]


def build(name: str, **fields: object) -> GalleryEntry:
    return GalleryEntry(name=name, **({"uri": f"quay.io/x/y:{name}"} | fields))  # type: ignore[arg-type]


def meta(name: str, **targets: str) -> GalleryEntry:
    return GalleryEntry(name=name, capabilities={key.replace("_", "-"): target for key, target in targets.items()})


def refused(galleries: list[Gallery], name: str, capability: str = "default", platform: str = AMD64) -> Hopeless:
    with pytest.raises(Hopeless) as caught:
        resolve(galleries, name, capability, platform)
    return caught.value


def test_what_stands_beside_the_project_has_the_index() -> None:
    if SHARED.is_dir():
        assert localai().backends


@needs_index
def test_the_whole_index_is_read_and_its_entries_are_told_apart() -> None:
    entries = localai().backends
    concrete = [entry for entry in entries if not entry.is_meta]
    aliases = {entry.alias for entry in concrete if entry.alias}
    assert localai().skipped == ()
    assert {
        "entries": len(entries),
        "meta": sum(entry.is_meta for entry in entries),
        "release meta": sum(entry.is_meta and not entry.is_development for entry in entries),
        "concrete": len(concrete),
        "development": sum(entry.is_development for entry in entries),
        "with alias": sum(bool(entry.alias) for entry in concrete),
        "aliases": len(aliases),
        "concrete with capabilities": sum(bool(entry.capabilities) for entry in concrete),
        "with mirrors": sum(bool(entry.mirrors) for entry in concrete),
        "latest": sum(entry.uri.partition(":")[2].startswith("latest-") for entry in concrete),
        "master": sum(entry.uri.partition(":")[2].startswith("master-") for entry in concrete),
    } == NUMBERS
    twice = {name for name, count in Counter(entry.name for entry in entries).items() if count > 1}
    assert len(twice) == 5
    assert len(list(Catalogue([localai()]).entries())) == 1033 - 5


@needs_index
@pytest.mark.parametrize(
    ("capability", "platform", "lacking"),
    [
        ("default", AMD64, CPU_ONLY_LACKS | {CUDA_ONLY}),
        ("nvidia", AMD64, set()),
        ("nvidia-cuda-12", AMD64, set()),
        ("nvidia-cuda-13", AMD64, set()),
        ("nvidia-l4t", ARM64, CPU_ONLY_LACKS),
        ("nvidia-l4t-cuda-12", ARM64, CPU_ONLY_LACKS),
        ("nvidia-l4t-cuda-13", ARM64, {"rerankers", "transformers", "coqui"}),
        ("amd", AMD64, {"longcat-video", CUDA_ONLY}),
        ("intel", AMD64, {"vllm-omni", "longcat-video", CUDA_ONLY}),
        ("vulkan", AMD64, CPU_ONLY_LACKS | {CUDA_ONLY}),
        ("metal", "darwin/arm64", {"vllm-omni", "longcat-video", CUDA_ONLY}),
        ("darwin-x86", "darwin/amd64", CPU_ONLY_LACKS | {CUDA_ONLY}),
    ],
)
def test_all_that_has_a_build_for_a_machine_can_be_installed_on_it(
    capability: str, platform: str, lacking: set[str]
) -> None:
    catalogue = Catalogue([localai()])
    missing: set[str] = set()
    reasons: list[str] = []
    for entry in localai().backends:
        if entry.is_meta and not entry.is_development:
            try:
                choice = catalogue.explain(entry.name, capability, platform)
            except Hopeless as error:
                missing.add(entry.name)
                reasons.append(error.message)
                continue
            assert choice.resolved.meta == entry.name
            assert choice.resolved.uri.startswith("quay.io/go-skynet/local-ai-backends:")
            assert choice.resolved.mirrors[0].startswith("localai/localai-backends:")
            assert choice.resolved.digest == ""
            *_, last = (one for one in choice.reasons if one != choice.resolved.remark)
            assert last.endswith(choice.resolved.directory)
    assert missing == lacking
    for reason in reasons:
        told = "it needs an NVIDIA" if CUDA_ONLY in reason else f"none for {capability}"
        assert told in reason


@needs_index
@pytest.mark.parametrize(
    ("name", "capability", "directory", "told"),
    [
        ("llama-cpp", "nvidia-cuda-12", "cuda12-llama-cpp", "key nvidia-cuda-12 → cuda12-llama-cpp"),
        ("rerankers", "nvidia-cuda-13", "cuda12-rerankers", "key nvidia → cuda12-rerankers"),
        ("ds4", "nvidia-cuda-12", "cpu-ds4", "cuda13-ds4, and it is built for CUDA 13, this machine has 12"),
        ("ds4", "nvidia", "cuda13-ds4", "key nvidia → cuda13-ds4"),
        ("voxtral", "metal", "metal-voxtral", "key metal-darwin-arm64 → metal-voxtral"),
        ("rfdetr", "nvidia-l4t-cuda-13", "nvidia-l4t-arm64-rfdetr", "key nvidia-l4t →"),
        ("vllm-cpp", "nvidia-l4t-cuda-12", "cpu-vllm-cpp", "CUDA 13"),
        ("coqui", "nvidia-cuda-13", "cuda12-coqui", "key nvidia →"),
        ("mlx", "default", "cpu-mlx", "key default → cpu-mlx"),
        ("faster-qwen3-tts", "nvidia-cuda-12", "cuda12-faster-qwen3-tts", "cuda12-faster-qwen3-tts"),
        ("faster-qwen3-tts", "disable", "cuda12-faster-qwen3-tts", "key default →"),
        ("vllm", "default", "cpu-vllm", "key cpu → cpu-vllm"),
        ("tinygrad", "default", "tinygrad", "concrete build"),
        ("localai@CPU-llama-cpp", "default", "cpu-llama-cpp", "concrete build"),
    ],
)
def test_a_choice_says_how_it_was_made(name: str, capability: str, directory: str, told: str) -> None:
    choice = Catalogue([localai()]).explain(name, capability, AMD64)
    assert choice.resolved.directory == choice.entry.name == directory
    assert choice.gallery == choice.resolved.source == "localai"
    assert choice.resolved.gallery_url == localai().url
    assert told in "; ".join(choice.reasons)


@needs_index
def test_a_cuda_build_asked_for_by_name_is_refused_where_it_cannot_run_and_given_to_whoever_insists() -> None:
    error = refused([localai()], "cuda12-llama-cpp")
    assert error.code == "unsupported"
    assert "NVIDIA" in error.message
    assert "default" in error.message
    for word in ("nvidia", "disable"):
        assert resolve([localai()], "cuda12-llama-cpp", word, AMD64).directory == "cuda12-llama-cpp"


@needs_index
@pytest.mark.parametrize("capability", ["default", "amd", "intel", "vulkan", "metal"])
def test_a_general_key_that_leads_to_a_build_for_other_machines_is_refused_with_the_reason(capability: str) -> None:
    error = refused([localai()], "faster-qwen3-tts", capability)
    assert error.code == "unsupported"
    assert "it needs an NVIDIA graphics card" in error.message
    assert f"the capability of this machine is {capability}" in error.message


@pytest.mark.parametrize(
    ("key", "capability", "target", "fits"),
    [
        ("default", "default", "cuda12-engine", False),
        ("default", "amd", "cuda12-engine", False),
        ("default", "nvidia-l4t-cuda-12", "cuda12-engine", False),
        ("default", "default", "metal-engine", False),
        ("cpu", "default", "rocm-engine", False),
        ("cpu", "nvidia", "intel-sycl-f16-engine", False),
        ("default", "nvidia-cuda-12", "cuda12-engine", True),
        ("default", "disable", "cuda12-engine", True),
        ("default", "default", "cpu-mlx", True),
        ("default", "vulkan", "vulkan-engine", True),
        ("default", "default", "engine-of-no-kind", True),
        ("nvidia", "nvidia", "rocm-engine", True),  # the key of this very capability is the gallery's own word
    ],
)
def test_general_keys_are_held_against_the_machine(key: str, capability: str, target: str, fits: bool) -> None:
    one = gallery("one", GalleryEntry(name="engine", capabilities={key: target}), build(target))
    if fits:
        assert resolve([one], "engine", capability, AMD64).directory == target
        return
    error = refused([one], "engine", capability)
    assert f"key {key} → {target}, and it needs" in error.message
    assert "disable" in error.message


def test_a_general_key_that_does_not_fit_gives_way_to_the_other() -> None:
    one = gallery(
        "one", meta("engine", default="cuda12-engine", cpu="cpu-engine"), build("cuda12-engine"), build("cpu-engine")
    )
    choice = Catalogue([one]).explain("engine", "default", AMD64)
    assert choice.resolved.directory == "cpu-engine"
    assert "NVIDIA" in choice.reasons[0]


def test_every_key_that_was_tried_is_in_the_refusal() -> None:
    one = gallery(
        "one",
        meta("engine", nvidia_cuda_12="gone", nvidia="cuda13-engine", default="odd", cpu="policy"),
        build("cuda13-engine"),
        build("odd", platforms=("linux/s390x",)),
        GalleryEntry(name="policy"),
    )
    error = refused([one], "engine", "nvidia-cuda-12")
    for told in (
        "key nvidia-cuda-12 → gone, which is in no gallery",
        "key nvidia → cuda13-engine, and it is built for CUDA 13",
        "odd has builds for linux/s390x, none for linux/amd64",
        "policy has neither a uri nor capabilities",
    ):
        assert told in error.message
    assert error.code == "unsupported"
    assert "\n" not in error.message


def test_only_where_nothing_but_the_platform_is_wrong_the_code_says_so() -> None:
    one = gallery("one", meta("engine", default="odd"), build("odd", platforms=("linux/s390x",)))
    assert refused([one], "engine").code == "unsupported_platform"
    assert resolve([one], "engine", "default", "linux/s390x").directory == "odd"


def test_a_build_that_does_not_fit_gives_way_to_the_next_key() -> None:
    one = gallery(
        "one",
        meta("engine", nvidia="fast", default="slow"),
        build("fast", platforms=("linux/s390x",)),
        build("slow"),
    )
    choice = Catalogue([one]).explain("engine", "nvidia", AMD64)
    assert choice.resolved.directory == "slow"
    assert "fast has builds for linux/s390x" in choice.reasons[0]


def test_meta_entries_lead_to_meta_entries_but_never_in_a_circle() -> None:
    good = gallery("good", meta("a", default="b"), meta("b", default="c"), build("c"))
    assert resolve([good], "a", "default", AMD64).directory == "c"
    assert resolve([good], "a", "default", AMD64).meta == "a"
    round_trip = gallery("bad", meta("a", default="b"), meta("b", default="c"), meta("c", default="a"))
    assert "circular reference" in refused([round_trip], "a").message
    assert "circular reference" in refused([gallery("self", meta("a", default="a"))], "a").message
    way_out = gallery("out", meta("a", nvidia="b", default="c"), meta("b", nvidia="a"), build("c"))
    assert resolve([way_out], "a", "nvidia", AMD64).directory == "c"


def test_of_two_entries_with_one_name_the_first_wins_in_a_gallery_and_between_galleries() -> None:
    one = gallery("one", build("x", version="1"), build("x", version="2"))
    two = gallery("two", build("X", version="3"), build("y"))
    assert resolve([one, two], "x", "default", AMD64).version == "1"
    assert resolve([one, two], "two@x", "default", AMD64).version == "3"
    assert [entry.version for _, entry in Catalogue([one, two]).entries()] == ["1", "3", ""]


def test_a_refusal_names_the_other_gallery_that_has_something_of_that_name() -> None:
    one = gallery("one", build("x", platforms=("linux/s390x",)))
    two = gallery("two", build("x"))
    assert "two@x has the same name" in refused([one, two], "x").message
    assert resolve([one, two], "two@x", "default", AMD64).source == "two"


def test_a_meta_entry_means_an_entry_of_its_own_gallery_and_only_then_one_of_another() -> None:
    one = gallery("one", build("fast", version="one"), build("far", version="one"))
    two = gallery("two", meta("engine", default="fast"), build("fast", version="two"), meta("other", default="far"))
    assert resolve([one, two], "engine", "default", AMD64).version == "two"
    assert resolve([one, two], "other", "default", AMD64).version == "one"


@pytest.mark.parametrize(
    ("capability", "directory"),
    [
        ("default", "cpu-engine"),
        ("nvidia-cuda-12", "cuda12-engine"),
        ("nvidia-cuda-13", "cuda13-engine"),
        ("amd", "vulkan-engine"),
        ("intel", "cpu-engine"),
        ("disable", "cpu-engine"),
    ],
)
def test_an_alias_stands_for_the_best_of_the_builds_that_can_run(capability: str, directory: str) -> None:
    names = ("cuda12-engine-development", "cuda12-engine", "cuda13-engine", "vulkan-engine", "cpu-engine")
    one = gallery("one", *(build(name, alias="engine") for name in names))
    choice = Catalogue([one]).explain("Engine", capability, AMD64)
    assert choice.resolved.directory == directory
    assert choice.resolved.alias == "engine"
    assert "alias" in choice.reasons[-1]
    with pytest.raises(NotFound):
        Catalogue([one]).find("engine")


def test_an_entry_of_that_name_comes_before_builds_of_that_alias() -> None:
    one = gallery("one", build("cpu-x", alias="engine"), build("engine"))
    assert resolve([one], "engine", "default", AMD64).directory == "engine"


def test_an_alias_without_a_build_that_fits_gives_the_reason_of_each() -> None:
    one = gallery("one", build("cuda12-x", alias="engine"), build("metal-x", alias="engine"))
    error = refused([one], "engine")
    assert "cuda12-x" in error.message
    assert "metal-x" in error.message


def test_images_of_a_gallery_that_demands_signatures_are_refused_and_other_things_are_not() -> None:
    one = gallery("one", build("x"), build("y", uri="oci://h/y"), build("z", uri="pypi:z==1"), demands_signatures=True)
    for name in ("x", "y"):
        assert "requires signatures" in refused([one], name).message
    assert resolve([one], "z", "default", AMD64).digest.startswith("sha256:")


def test_a_gallery_that_is_not_loaded_is_named_where_a_name_is_not_found() -> None:
    away = gallery("away", problem="cannot reach it")
    for name, is_told in (("x", True), ("away@x", True), ("one@x", False)):
        with pytest.raises(NotFound) as caught:
            resolve([gallery("one", build("y")), away], name, "default", AMD64)
        assert ("the gallery away is not loaded: cannot reach it" in caught.value.message) is is_told


def test_a_gallery_that_nobody_configured_is_told_apart_from_a_name_that_it_has_not() -> None:
    with pytest.raises(NotFound, match=r"cannot find a gallery named 'other'\. Known galleries: one, two"):
        resolve([gallery("one", build("x")), gallery("two")], "other@x", "default", AMD64)


def test_what_was_resolved_carries_all_that_an_install_needs_and_no_digest_that_nobody_knows() -> None:
    entry = build("x", mirrors=("h/x:1",), sha256="a" * 64, version="2", alias="engine")
    resolved = resolve([gallery("one", meta("m", default="x"), entry)], "m", "default", AMD64)
    assert (resolved.uri, resolved.mirrors, resolved.sha256) == (entry.uri, ("h/x:1",), "a" * 64)
    assert (resolved.meta, resolved.alias, resolved.version, resolved.platform) == ("m", "engine", "2", AMD64)
    assert (resolved.source, resolved.gallery_url, resolved.digest) == ("one", "https://one/", "")


@pytest.mark.parametrize("name", ["", "@", "one@", "@x", "one@@x"])
def test_odd_names_are_not_found(name: str) -> None:
    with pytest.raises(EnginehouseError):
        resolve([gallery("one", build("y"))], name, "default", AMD64)


@pytest.mark.parametrize("uri", ["/etc", "file:///etc", "ocifile:///var/lib/image.tar"])
def test_a_gallery_from_elsewhere_cannot_name_files_of_this_machine(uri: str) -> None:
    entry = build("engine", uri=uri)
    assert "is remote and may not name local files" in refused([gallery("far", entry)], "engine").message
    near = Gallery(name="near", url="file:///here.yaml", backends=(entry,))
    assert resolve([near], "engine", "default", AMD64).uri == uri


def test_a_mirror_that_names_files_of_this_machine_is_left_out_where_the_gallery_is_from_elsewhere() -> None:
    entry = build("engine", mirrors=("m/x:y", "/etc"))
    assert resolve([gallery("far", entry)], "engine", "default", AMD64).mirrors == ("m/x:y",)


OURS = gallery("ours", meta("llama", default="plain"), build("plain", alias="llama"), build("tool"))
THEIRS = gallery(
    "theirs", meta("llama", default="cpu-llama", nvidia="cuda12-llama"), build("cpu-llama"), build("cuda12-llama")
)


@pytest.mark.parametrize(
    ("galleries", "name", "capability", "remark"),
    [
        (
            [OURS, THEIRS],
            "llama",
            "nvidia-cuda-12",
            "for the nvidia graphics: enginehouse backends install theirs@llama",
        ),
        ([OURS, THEIRS], "llama", "amd", "no gallery has a build of it for amd graphics"),
        ([OURS], "llama", "nvidia", "no gallery has a build of it for nvidia graphics"),
        ([OURS, THEIRS], "llama", "default", ""),
        ([OURS, THEIRS], "llama", "metal", ""),
        ([THEIRS, OURS], "llama", "nvidia", ""),
        ([OURS, THEIRS], "theirs@llama", "nvidia", ""),
        ([OURS, THEIRS], "tool", "nvidia", ""),
    ],
)
def test_a_machine_whose_graphics_a_build_does_not_use_is_told_where_one_is_that_does(
    galleries: list[Gallery], name: str, capability: str, remark: str
) -> None:
    chosen = Catalogue(galleries).explain(name, capability, AMD64)
    assert chosen.resolved.remark.endswith(remark)
    assert bool(chosen.resolved.remark) == bool(remark)
    assert (chosen.resolved.remark in chosen.reasons) == bool(remark)
