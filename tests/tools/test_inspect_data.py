"""``tools/inspect_data.py`` shows what is trained on, and refuses with code 2 what cannot be."""

from __future__ import annotations

import contextlib
import itertools
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron.data import BlendPaths, DataLoader, build_train_valid_test, gpt2_fields
from megatron.data.inspect import statistics
from tests.helpers import small_corpora
from tests.helpers.harness import run_ranks
from tools import inspect_data

TOOLS = Path(inspect_data.__file__).parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a vocabulary ``t.json`` and the corpora ``a`` and ``b``."""
    place = tmp_path_factory.mktemp("corpora")
    vocabulary = small_corpora.make_tokenizer(place)
    small_corpora.write(place / "a", small_corpora.TEXTS * 3, vocabulary)
    small_corpora.write(place / "b", small_corpora.TEXTS[::-1] * 2, vocabulary)
    return place


def tell(rank: int, line: str, out: str) -> int:
    """Run the tool in this process with its output in the file ``out``."""
    with open(out, "w") as file, contextlib.redirect_stdout(file):
        return inspect_data.main(shlex.split(line))


def output_of(folder: Path, line: str) -> str:
    """Return what the tool prints, run in a process of its own: it forms a world of one rank."""
    line = line.replace("DIR", str(folder))
    assert run_ranks(1, tell, f"{line} --tokenizer-path {folder}/t.json", str(folder / "out"), init=False) == [0]
    return (folder / "out").read_text()


def cells(text: str) -> list[list[str]]:
    """Return the rows of the tables of samples in ``text`` but the skipped ones."""
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if line.startswith("│")]
    return [row for row in rows if row[0].isdecimal()]


def test_what_is_shown_is_what_the_training_reads(folder: Path) -> None:
    flags = "--seq-length 7 --seed 5 --split 1,0,0 --eod-mask-loss --reset-attention-mask --reset-position-ids"
    text = output_of(folder, f"DIR/a --samples 3 --first 4 --rows 99 {flags}")
    samples = build_train_valid_test(
        BlendPaths(data_path=str(folder / "a"), split="1,0,0"),
        seq_length=7, seed=5, vocab_size=10_000, needed=(True, False, False),
    )[0]  # fmt: skip
    batches = DataLoader(samples, micro_batch_size=3, num_micro_batches=1, data_rank=0, data_size=1, samples_consumed=4)
    eod = {"eod_id": 0, "eod_mask_loss": True, "reset_attention_mask": True, "reset_position_ids": True}
    fields = gpt2_fields(next(iter(batches))["text"], **eod)
    columns = [fields[name] for name in ("tokens", "labels", "loss_mask", "position_ids", "segment_ids")]
    expected = torch.stack([column.long() for column in columns], dim=-1).reshape(-1, 5).tolist()
    assert fields["loss_mask"].min() == 0.0 and fields["segment_ids"].max() > 0
    assert [[int(cell.split()[0]) for cell in row[1:]] for row in cells(text)] == expected
    assert "sample 4 of train" in text and "sample 6 of train" in text and "[no loss: <|endoftext|>]" in text


def test_samples_of_a_mixture_name_their_corpus(folder: Path) -> None:
    text = output_of(folder, "--data-path 0.75 DIR/a 0.25 DIR/b --samples 4 --seq-length 7 --split 1,0,0 --rows 0")
    order = text.split("samples: ")[1].split()[0]
    assert order.count("a") == 48 and order.count("b") == 16
    names = [line for line in text.splitlines() if line.startswith("sample ")]
    used = {letter: itertools.count() for letter in "ab"}
    for index, (line, letter) in enumerate(zip(names, order, strict=False)):
        assert f"sample {index} of train: " in line and f"{letter}, its sample {next(used[letter])} " in line


def test_t5_is_shown_with_its_spans(folder: Path) -> None:
    text = output_of(folder, "DIR/a --model t5 --samples 1 --enc-seq-length 20 --subset valid --split 1,1,0 --rows 0")
    _, inputs, late, targets = re.split("\n(?:inputs|decoder inputs|targets), ", text)
    assert "<1>" in inputs and "<1>" in targets and "<1>" in late and "sample 0 of valid" in text


def test_facts_need_no_tokenizer_and_all_lengths_go_into_one_picture(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn = {}
    monkeypatch.setattr(statistics, "draw", lambda lengths, path: drawn.update({path.name: lengths}))
    assert inspect_data.main(f"{folder}/a {folder}/b --top 2 --picture {folder}/l.png".split()) == 0
    text = capsys.readouterr().out
    assert "100.0% of 12 documents" in text and "100.0% of 8 documents" in text and "most frequent tokens" in text
    assert [lengths.num_documents for lengths in drawn["l.png"].values()] == [12, 8]


@pytest.mark.parametrize(
    "line, expected",
    [
        ("DIR/a DIR/b --samples 1", "requires weights"),
        ("DIR/a --data-path DIR/b", "either PREFIX arguments or --data-path"),
        ("--samples 1", "neither"),
        ("DIR/a --picture l.jpg", ".png"),
        ("DIR/a --samples -1", "at least 0"),
        ("DIR/none", "none.idx"),
        ("DIR/a --seq-lenght 5", "did you mean --seq-length"),
    ],
)
def test_what_cannot_be_ends_with_code_2_and_says_why(
    folder: Path, capsys: pytest.CaptureFixture[str], line: str, expected: str
) -> None:
    try:
        code = inspect_data.main(line.replace("DIR", str(folder)).split())
    except SystemExit as error:
        code = int(error.code or 0)
    assert code == 2 and expected in capsys.readouterr().err


def test_help_of_the_three_tools_loads_no_torch() -> None:
    program = (
        "import sys; sys.argv = ['x', '--help']; from tools import count_tokens, inspect_data, merge_data\n"
        "for tool in (count_tokens, inspect_data, merge_data):\n"
        "    try: tool.main()\n"
        "    except SystemExit as error: assert error.code == 0\n"
        "assert not {'torch', 'matplotlib', 'deepspeed'} & set(sys.modules), 'slow'"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=TOOLS.parent, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout.count("usage:") == 3, done.stderr


@pytest.mark.slow
def test_facts_load_no_torch_and_samples_no_compiler(folder: Path) -> None:
    program = f"""
import sys
from tools import inspect_data
assert inspect_data.main(["{folder}/a", "--tokenizer-path", "{folder}/t.json", "--top", "2"]) == 0
from megatron.models.t5.data import t5_fields
assert "torch" not in sys.modules, "a second"
assert inspect_data.main("{folder}/a --tokenizer-path {folder}/t.json --samples 1 --seq-length 7".split()) == 0
assert "torch" in sys.modules and not {{"torch._dynamo", "deepspeed"}} & set(sys.modules), "a second more"
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=TOOLS.parent, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "sample 0 of train" in done.stdout, done.stderr
