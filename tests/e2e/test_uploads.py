"""A file of a person's own: uploaded by the command line, placed on a node by its digest, loaded, and asked."""

from __future__ import annotations

import shutil

from tests.e2e.conftest import Cluster


def test_a_file_that_is_uploaded_is_loaded_and_answers(cluster: Cluster) -> None:
    question = "What is the capital of France?"
    cluster.cli("run", "tiny-chat", "--prompt", question)
    (known,) = cluster.data.rglob("models/tiny-chat/*.gguf")
    own = cluster.root / "my-own.gguf"
    shutil.copyfile(known, own)
    cluster.cli("models", "delete", "tiny-chat")
    cluster.cli("models", "add", "mine", str(own), "--load")
    own.unlink()
    (file,) = cluster.json("models", "show", "mine")["files"]
    assert file["uri"] == f"upload:{file['sha256']}"
    done = cluster.cli("run", "mine", "--prompt", question)
    assert done.stdout.strip() == "The capital of France is Paris."
    (placed,) = cluster.data.rglob("models/mine/*.gguf")
    assert placed.stat().st_size == file["size_bytes"]
