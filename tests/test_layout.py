"""The files: how long one may be, where tests are, and that names in comments exist."""

from __future__ import annotations

import re
from pathlib import Path

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


PLACE = re.compile(r"(?<![\w./])((?:megatron|tds)(?:\.[A-Za-z_]\w*)+)")
MODULES = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in FILES}
ELSEWHERE = {"tds.X", "tds.ops.adam", "tds.ops", "megatron.fp16.loss_scaler", "megatron.optimizer.grad_scaler"}
ELSEWHERE |= {
    "megatron.model.enums.ModelType",
    "megatron.core.enums.ModelType",
    "megatron.core.transformer.enums.AttnBackend",
}
"""DeepSpeed's by our name, and Megatron-LM's."""


def test_what_a_comment_or_docstring_names_is_there() -> None:
    missing = []
    for path in FILES:
        for name in PLACE.findall(path.read_text(encoding="utf-8")):
            known = next(n for n in (name.rsplit(".", k)[0] for k in range(name.count(".") + 1)) if n in MODULES)
            rest = name.removeprefix(known).lstrip(".").partition(".")[0]
            text = MODULES[known].read_text(encoding="utf-8")
            if rest not in ("", "py") and not re.search(rf"\b{rest}\b", text) and name not in ELSEWHERE:
                missing.append(f"{path.relative_to(ROOT)}: {name}")
    assert missing == []
