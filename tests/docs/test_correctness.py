"""docs/correctness.md: the tests, mutants and flags that it names exist, and its commands print what it shows."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from megatron import data
from tests.helpers.documented_layouts import PREFIX, run_command
from tests.helpers.runs import TOKENIZER, write_corpus
from tests.mutants.mutant import load_mutants
from tools import check_layout

ROOT = Path(__file__).resolve().parents[2]
ENGLISH = (ROOT / "docs" / "correctness.md").read_text(encoding="utf-8")
CHINESE = (ROOT / "docs" / "zh" / "correctness.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^    (.+)$", re.sub(r"^```.*?^```$", "", ENGLISH, flags=re.M | re.S), flags=re.M)
LAYOUT_COMMANDS = [command for command in COMMANDS if command.startswith(PREFIX)]


def find_mutants(text: str) -> list[str]:
    """Return the mutants named in paragraphs that list them."""
    lists = re.findall(r"(?:Mutants?: |变异：)(.*?)(?:\n\n|\Z)", text, flags=re.S)
    return [name for paragraph in lists for name in re.findall(r"`(\w+\.\w+)`", paragraph)]


def test_tests_named_in_commands_exist() -> None:
    test_ids = [word for line in COMMANDS if " -m pytest " in line for word in shlex.split(line) if "::" in word]
    assert test_ids
    for word in test_ids:
        file, _, test = word.partition("::")
        assert f"\ndef {test.partition('[')[0]}(" in (ROOT / file).read_text(encoding="utf-8"), word


def test_every_section_names_existing_mutants() -> None:
    assert find_mutants(ENGLISH) == find_mutants(CHINESE)
    assert set(find_mutants(ENGLISH)) <= load_mutants().keys()
    sections = re.split(r"^#{2,3} ", ENGLISH.partition("## Installing")[0], flags=re.M)[1:]
    checked = [section for section in sections if re.search(r"^    (python|GPUS_PER_NODE)", section, flags=re.M)]
    assert len(checked) >= 20
    for section in checked:
        assert find_mutants(section), section.partition("\n")[0]


@pytest.mark.parametrize("command", LAYOUT_COMMANDS)
def test_layout_commands_have_valid_flags_and_shown_output(command: str) -> None:
    """The default run only parses the flags; ``test_layout_commands_print_equal`` runs the command."""
    args, flags = check_layout.make_tool_parser().parse_known_args(shlex.split(command.removeprefix(PREFIX)))
    layout = check_layout.Layout(
        args.model_parallel_size, max(args.pipe_parallel_size, 1), args.data_parallel_size, args.context_parallel_size
    )
    layout_flags = [
        word for name in check_layout.LAYOUT_FLAGS if (value := getattr(args, name)) for word in (name, value)
    ]
    all_flags = [*flags, *layout_flags, "--fp64", "--device", "cpu", *check_layout.NO_DROPOUT_FLAGS]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEGATRON_DEFAULTS", check_layout.default_flags(args.model, flags))
        check_layout.check_flags(all_flags, layout, args.model)
    output = ENGLISH.partition(f"    {command}\n\n```\n")[2].partition("\n```\n")[0]
    assert output.count("│ ok │") == 4 and output.endswith("verdict: equal")


@pytest.mark.slow
@pytest.mark.parametrize("command", LAYOUT_COMMANDS)
def test_layout_commands_print_equal(command: str) -> None:
    output = run_command(command)
    assert output.endswith("verdict: equal\n0\n"), output


def test_lock_file_has_no_source_packages() -> None:
    [line] = [line for line in COMMANDS if line.startswith("grep ")]
    result = subprocess.run(shlex.split(line), cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert result.stdout == "0\n" and "\n```\n0\n```\n" in ENGLISH


def test_opening_corpus_creates_no_files(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path)
    before = sorted(path.name for path in tmp_path.rglob("*"))
    train, _, _ = data.build_train_valid_test(
        data.BlendPaths(data_path=str(prefix), split="90,5,5"), seq_length=16, seed=1, vocab_size=10**6
    )
    assert len(train[0]) == 17 and TOKENIZER.is_file()
    assert sorted(path.name for path in tmp_path.rglob("*")) == before
