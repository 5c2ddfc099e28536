"""The files for Kubernetes by its own schemas, in which no field is unknown."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

KUBERNETES_DIR = Path(__file__).resolve().parents[2] / "examples" / "launch" / "kubernetes"
FILES = sorted(KUBERNETES_DIR.glob("*.yaml"))
VERSIONS = ("1.31", "1.36")
"""The first in which podFailurePolicy is stable, and a late one."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("kubernetes_validate") is None,
        reason="kubernetes_validate is not installed: pip install -e '.[kubernetes]'",
    ),
]
"""The small siblings are the tests of these files in test_examples.py."""


def iter_objects(file: Path) -> Iterator[dict[str, Any]]:
    """Yield what Kubernetes knows of a file: its objects, of a PyTorchJob the templates of pods."""
    for document in yaml.safe_load_all(file.read_text()):
        if document["kind"] != "PyTorchJob":
            yield document
            continue
        for name, replica in document["spec"]["pytorchReplicaSpecs"].items():
            metadata = {"name": name.lower()}
            yield {"apiVersion": "v1", "kind": "PodTemplate", "metadata": metadata, "template": replica["template"]}


def validate(manifests: dict[str, Any], version: str) -> None:
    import kubernetes_validate

    kubernetes_validate.validate(manifests, version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("file", FILES, ids=lambda path: path.name)
def test_files_match_kubernetes_schema(file: Path, version: str) -> None:
    manifests = list(iter_objects(file))
    assert len(manifests) == 2, "a service and a job, or two templates"
    for manifest in manifests:
        validate(manifest, version)


def get_pod(manifests: dict[str, Any]) -> Any:
    return (manifests["spec"]["template"] if manifests["kind"] == "Job" else manifests["template"])["spec"]


MISTAKES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "an unknown field": lambda pod: pod.update(subDomain="gpt2"),
    "a field of another object": lambda pod: pod.update(backoffLimit=3),
    "a number as a variable": lambda pod: pod["containers"][0].update(env=[{"name": "NNODES", "value": 2}]),
    "a container without a name": lambda pod: pod["containers"][0].pop("name"),
    "a word as a port": lambda pod: pod["containers"][0].update(ports=[{"containerPort": "29500"}]),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("file", FILES, ids=lambda path: path.name)
def test_schema_rejects_mistakes(file: Path, mistake: str) -> None:
    import kubernetes_validate

    manifests = copy.deepcopy(list(iter_objects(file))[-1])
    MISTAKES[mistake](get_pod(manifests))
    with pytest.raises(kubernetes_validate.ValidationError):
        validate(manifests, VERSIONS[-1])
