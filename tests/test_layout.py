"""The files: how long one may be, and where names are found that have moved."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest

import megatron
from tests.conftest import LONGEST as LONGEST_FIRST

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted(path for folder in ("megatron", "tds") for path in (ROOT / folder).rglob("*.py"))
LONGEST = 600


def test_a_file_has_at_most_600_lines() -> None:
    programs = [path for folder in ("benchmarks", "tools") for path in (ROOT / folder).rglob("*.py")]
    long = [p for p in [*FILES, *programs] if len(p.read_text(encoding="utf-8").splitlines()) > LONGEST]
    assert not [str(p.relative_to(ROOT)) for p in long]


def test_what_tests_of_several_folders_use_lies_in_helpers() -> None:
    """A module of tests that is no test, and not in tests/helpers, is imported from its own folder and those below."""
    tests = ROOT / "tests"
    texts = {path: path.read_text(encoding="utf-8") for path in tests.rglob("*.py")}
    elsewhere = ("helpers", "mutants", "golden")
    misplaced = []
    for path in texts:
        folder = path.parent.relative_to(tests)
        if path.name.startswith(("test_", "__init__", "conftest")) or folder.parts[:1] in [
            (each,) for each in elsewhere
        ]:
            continue
        package, name = ".".join(("tests", *folder.parts)), path.stem
        used = re.compile(rf"^\s*from {package}(?:\.{name} import|\simport (?:\w+, )*{name}\b)", re.MULTILINE)
        users = [user for user, text in texts.items() if path.parent not in user.parents and used.search(text)]
        misplaced += [f"{path.relative_to(ROOT)}: {user.relative_to(ROOT)}" for user in users]
    assert misplaced == []


def test_the_files_that_are_tested_first_are_there() -> None:
    assert [file for file in LONGEST_FIRST if not (ROOT / "tests" / file).is_file()] == []


MOVED = [
    ("megatron.model", "GPT2Model"),
    ("megatron.model", "Place"),
    ("megatron.model", "Sizes"),
    ("megatron.model", "T5Model"),
    ("megatron.pipe", "GPT2ModelPipe"),
    ("megatron.pipe", "pipe_topology"),
    ("megatron.cost", "of"),
    ("megatron.cost", "BYTES"),
    ("megatron.cost", "T5Costs"),
    ("megatron.adaptors", "Adaptor"),
    ("megatron.data", "T5Samples"),
    ("megatron.data", "bert_fields"),
    ("megatron.mpu", "CountedDropout"),
    ("megatron.optim", "Arrival"),
    ("megatron.optim", "LearningRate"),
    ("megatron.optim", "LossScaler"),
    ("megatron.optim", "Offload"),
    ("megatron.checkpoint", "BackgroundSaver"),
    ("megatron.checkpoint", "Durable"),
    ("megatron.training", "settle"),
    ("megatron.training.metrics", "read_metrics"),
    ("megatron.training.metrics", "StragglerDetector"),
    ("megatron.training.stability_guard", "StabilityGuard"),
    ("megatron.training.evaluate", "perplexity"),
    ("tds.boundary", "Boundary"),
    ("tds.peers", "PeerLost"),
    ("tds.data_agreement", "DataEnded"),
    ("tds.host_copies", "register"),
]


@pytest.mark.parametrize(("path", "name"), MOVED)
def test_a_former_path_gives_the_name_and_says_where_it_is_now(path: str, name: str) -> None:
    with pytest.warns(DeprecationWarning, match=rf"{path}.{name} is (\S+) now") as told:
        found = getattr(importlib.import_module(path), name)
    module, _, new = str(told[0].message).split(" is ")[1].removesuffix(" now").rpartition(".")
    assert getattr(importlib.import_module(module), new) is found


def test_a_former_package_is_an_attribute_of_megatron_too() -> None:
    assert megatron.model is sys.modules["megatron.model"]
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        getattr(megatron.model, "Nothing")  # noqa: B009 - mypy would know


PLACE = re.compile(r"(?<![\w./])((?:megatron|tds)(?:\.[A-Za-z_]\w*)+)")
MODULES = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in FILES}
ELSEWHERE = {"tds.X", "tds.ops.adam", "tds.ops", "megatron.fp16.loss_scaler", "megatron.optimizer.grad_scaler"}
"""DeepSpeed's by our name, and Megatron-LM's."""


def test_what_a_comment_or_docstring_names_is_there() -> None:
    missing = []
    for path in FILES:
        if path.name == "deprecated_paths.py" or path == ROOT / "megatron" / "__init__.py":
            continue
        for name in PLACE.findall(path.read_text(encoding="utf-8")):
            known = next(n for n in (name.rsplit(".", k)[0] for k in range(name.count(".") + 1)) if n in MODULES)
            rest = name.removeprefix(known).lstrip(".").partition(".")[0]
            text = MODULES[known].read_text(encoding="utf-8")
            if rest not in ("", "py") and not re.search(rf"\b{rest}\b", text) and name not in ELSEWHERE:
                missing.append(f"{path.relative_to(ROOT)}: {name}")
    assert missing == []
