"""The lab in which LocalAI was recorded, built anew on loopback: a real registry with small images, and the gallery
`lab` that names them.

The tag `latest` is the old image until a test moves it. Two digests of the recordings stand for the two images here.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from msgspec import Struct
from tests.engine.localai.stub_backend import in_one_file
from tests.fetch.galleries.gallery_server import GalleryServer, serving
from tests.fetch.images import OCI_MANIFEST, Image, write_image
from tests.fetch.real_registry import Registry, running_registry
from tests.replay.recordings import GALLERY_URL, NEW_DIGEST, OLD_DIGEST, REGISTRY
from tests.worker.shelf import noise

from enginehouse.host import hardware

# As sample 08 tells them; of six entries it shows three, the others follow from what the workers listed.
ENTRIES = (
    {
        "name": "mock",
        "description": "lab backend that answers with canned text",
        "license": "mit",
        "urls": ["https://example.org/mock"],
        "tags": ["text-to-text", "CPU"],
        "capabilities": {"default": "cpu-mock"},
    },
    {
        "name": "cpu-mock",
        "description": "lab backend that answers with canned text",
        "alias": "mock",
        "uri": f"{REGISTRY}/lab/mock:latest",
    },
    {"name": "broken", "description": "its image does not exist", "capabilities": {"default": "cpu-broken"}},
    {"name": "cpu-broken", "alias": "broken", "uri": f"{REGISTRY}/lab/missing:latest"},
    {"name": "other", "capabilities": {"default": "cpu-other"}},
    {"name": "cpu-other", "alias": "other", "uri": f"{REGISTRY}/lab/mock:latest"},
)
# Says which version it is; started as an engine it answers that it is healthy, which is all that a worker looks at.
_NOISE_BYTES = 300_000  # more than one read, so that a download has a middle


def _launcher(says: str) -> bytes:
    """An engine that speaks LocalAI's protocol, as the recorded one did; without an address it only says who it is."""
    first, rest = in_one_file().split(b"\n", 1)
    answer = f"import sys\nif '--addr' not in sys.argv:\n    print({says!r})\n    sys.exit()\n"
    return b"\n".join((first, answer.encode() + rest))


class Lab(Struct, frozen=True):
    registry: Registry
    server: GalleryServer
    old: Image
    new: Image

    @property
    def gallery_url(self) -> str:
        return self.server.url("/index.yaml")

    @property
    def galleries(self) -> str:
        """As a Go frontend writes them: a document within a string."""
        return json.dumps([{"url": self.gallery_url, "name": "lab"}], separators=(",", ":"))

    @property
    def replacements(self) -> dict[str, str]:
        return {
            GALLERY_URL: self.gallery_url,
            REGISTRY: self.registry.address,
            OLD_DIGEST: self.old.digest,
            NEW_DIGEST: self.new.digest,
        }

    @property
    def environment(self) -> dict[str, str]:
        return {
            "ENGINEHOUSE_BACKEND_GALLERIES": self.galleries,
            "ENGINEHOUSE_ALLOWED_HOSTS": "127.0.0.1",
            "ENGINEHOUSE_CAPABILITY": "default",
        }

    def reference(self, tag: str = "latest") -> str:
        return self.registry.reference(f"lab/mock:{tag}")

    async def move_tag(self, image: Image) -> None:
        """`latest` is this image from now on."""
        await self.registry.put_manifest("lab/mock", "latest", image.document, OCI_MANIFEST)


@asynccontextmanager
async def open_lab(directory: Path) -> AsyncIterator[Lab]:
    images = []
    async with running_registry(directory) as registry:
        for tag, says in (("v1", "old"), ("v2", "new")):
            layers = [{"lib.so": noise(_NOISE_BYTES)}, {"run.sh": _launcher(says)}]
            image = write_image(directory / tag, layers, platform=hardware.platform())
            await registry.push(image.directory, f"lab/mock:{tag}")
            images.append(image)
        with serving() as server:
            lab = Lab(registry, server, images[0], images[1])
            index = json.dumps(ENTRIES).replace(REGISTRY, registry.address)
            server.documents["/index.yaml"] = index.encode()  # JSON is YAML
            yield lab
