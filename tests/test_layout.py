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
        others = {user: text for user, text in texts.items() if name in text and path.parent not in user.parents}
        users = [user for user, text in others.items() if used.search(text)]
        misplaced += [f"{path.relative_to(ROOT)}: {user.relative_to(ROOT)}" for user in users]
    assert misplaced == []


ACROSS = ("cuda", "docs", "golden", "gpu", "helpers", "migration", "mutants", "parity", "reliability")
"""Folders of tests that are of no one package."""
BESIDE = ("benchmarks", "examples", "tds", "tools")
"""Of the repository's root; all other folders of tests are named after packages of megatron."""
STARTED = (
    "launch/test_signals.py",
    "models/common/test_recompute.py",
    "training/test_deepspeed_format.py",
    "training/test_pretrained.py",
)
"""Files that reach what they test by a program that they start, or through tests/helpers."""
OURS = re.compile(r"^\s*(?:from|import) ((?:benchmarks|megatron|tds|tools)(?:\.\w+)*)", re.MULTILINE)


def misplaced(tests: Path) -> list[str]:
    """Return the test files in whose place there is no package, or that import from packages but not from theirs."""
    found = []
    for path in sorted(tests.rglob("test_*.py")):
        name = path.relative_to(tests)
        if name.parts[0] in ACROSS or name.as_posix() in STARTED:
            continue
        source = name.parent if name.parts[0] in BESIDE else "megatron" / name.parent
        package = ".".join(source.parts)
        imported = set(OURS.findall(path.read_text(encoding="utf-8")))
        near = {each for each in imported if f"{each}.".startswith(f"{package}.") or each == package.rpartition(".")[0]}
        if not (ROOT / source).is_dir():
            found.append(f"{name}: there is no {source}")
        elif imported and not near and source.parts[0] != "examples":
            found.append(f"{name}: imports {', '.join(sorted(imported))}")
    return found


def test_tests_lie_where_their_sources_lie() -> None:
    assert misplaced(ROOT / "tests") == []
    assert [name for name in STARTED if not (ROOT / "tests" / name).is_file()] == []


def test_a_test_in_another_place_is_told(tmp_path: Path) -> None:
    for name, line in (
        ("mpu/test_a.py", "from megatron.optim import GradScaler"),
        ("optim/zero/test_b.py", "from megatron.optim import GradScaler"),
        ("tds/test_c.py", "import tds as deepspeed"),
        ("test_d.py", "from megatron import files"),
        ("launch/other/test_e.py", "import json"),
        ("tools/test_f.py", "    from benchmarks.plan import Case"),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{line}\n")
    assert misplaced(tmp_path) == [
        "launch/other/test_e.py: there is no megatron/launch/other",
        "mpu/test_a.py: imports megatron.optim",
        "tools/test_f.py: imports benchmarks.plan",
    ]


def test_the_files_that_are_tested_first_are_there() -> None:
    assert [file for file in LONGEST_FIRST if not (ROOT / "tests" / file).is_file()] == []


MOVED = [
    ("megatron.model", "DecoderModel"),
    ("megatron.model", "Place"),
    ("megatron.model", "Sizes"),
    ("megatron.model", "T5Model"),
    ("megatron.pipe", "DecoderPipe"),
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
    with pytest.warns(DeprecationWarning, match=rf"{path}.{name} is (\S+) now") as caught:
        found = getattr(importlib.import_module(path), name)
    module, _, new = str(caught[0].message).split(" is ")[1].removesuffix(" now").rpartition(".")
    assert getattr(importlib.import_module(module), new) is found


def test_a_former_package_is_an_attribute_of_megatron_too() -> None:
    assert megatron.model is sys.modules["megatron.model"]
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        getattr(megatron.model, "Nothing")  # noqa: B009 - mypy would know


PLACE = re.compile(r"(?<![\w./])((?:megatron|tds)(?:\.[A-Za-z_]\w*)+)")
MODULES = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in FILES}
ELSEWHERE = {"tds.X", "tds.ops.adam", "tds.ops", "megatron.fp16.loss_scaler", "megatron.optimizer.grad_scaler"}
ELSEWHERE |= {"megatron.core.enums.ModelType", "megatron.core.transformer.enums.AttnBackend"}
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
