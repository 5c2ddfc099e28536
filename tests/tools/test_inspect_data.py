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
    path = tmp_path_factory.mktemp("corpora")
    vocabulary = small_corpora.make_tokenizer(path)
    small_corpora.write_token_files(path / "a", small_corpora.TEXTS * 3, vocabulary)
    small_corpora.write_token_files(path / "b", small_corpora.TEXTS[::-1] * 2, vocabulary)
    return path


def run_tool(rank: int, command_line: str, out: str) -> int:
    """Run the tool in this process with its output in the file ``out``."""
    with open(out, "w") as file, contextlib.redirect_stdout(file):
        return inspect_data.main(shlex.split(command_line))


def get_output(folder: Path, command_line: str) -> str:
    """Return what the tool prints, run in a process of its own: it forms a world of one rank."""
    command_line = command_line.replace("DIR", str(folder))
    assert run_ranks(
        1, run_tool, f"{command_line} --tokenizer-path {folder}/t.json", str(folder / "out"), init=False
    ) == [0]
    return (folder / "out").read_text()


def parse_table(text: str) -> list[list[str]]:
    """Return the rows of the tables of samples in ``text`` but the skipped ones."""
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if line.startswith("│")]
    return [row for row in rows if row[0].isdecimal()]


def test_shown_samples_equal_training_samples(folder: Path) -> None:
    flags = "--seq-length 7 --seed 5 --split 1,0,0 --eod-mask-loss --reset-attention-mask --reset-position-ids"
    text = get_output(folder, f"DIR/a --samples 3 --first 4 --rows 99 {flags}")
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
    assert [[int(cell.split()[0]) for cell in row[1:]] for row in parse_table(text)] == expected
    assert "sample 4 of train" in text and "sample 6 of train" in text and "[no loss: <|endoftext|>]" in text


def test_blend_samples_name_their_corpus(folder: Path) -> None:
    text = get_output(folder, "--data-path 0.75 DIR/a 0.25 DIR/b --samples 4 --seq-length 7 --split 1,0,0 --rows 0")
    order = text.split("samples: ")[1].split()[0]
    assert order.count("a") == 48 and order.count("b") == 16
    names = [line for line in text.splitlines() if line.startswith("sample ")]
    counters = {letter: itertools.count() for letter in "ab"}
    for index, (line, letter) in enumerate(zip(names, order, strict=False)):
        assert f"sample {index} of train: " in line and f"{letter}, its sample {next(counters[letter])} " in line


def test_samples_in_megatron_order_are_those_of_the_run(folder: Path) -> None:
    line = "--data-path 0.7 DIR/a 0.3 DIR/b --samples 2 --rows 0 --split 1,0,0 --seq-length 16 --data-order megatron"
    text = get_output(folder, f"{line} --train-iters 5 --batch-size 2 --eval-iters 0")
    assert "corpora of the first 10 samples: abaabaabaa" in text


def test_t5_samples_show_corrupted_spans(folder: Path) -> None:
    text = get_output(folder, "DIR/a --model t5 --samples 1 --enc-seq-length 20 --subset valid --split 1,1,0 --rows 0")
    _, inputs, decoder_inputs, targets = re.split("\n(?:inputs|decoder inputs|targets), ", text)
    assert "<1>" in inputs and "<1>" in targets and "<1>" in decoder_inputs and "sample 0 of valid" in text


def test_statistics_work_without_tokenizer(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn = {}
    monkeypatch.setattr(statistics, "plot_lengths", lambda lengths, path: drawn.update({path.name: lengths}))
    assert inspect_data.main(f"{folder}/a {folder}/b --top 2 --picture {folder}/l.png".split()) == 0
    text = capsys.readouterr().out
    assert "100.0% of 12 examined documents" in text and "100.0% of 8 examined documents" in text
    assert "most frequent tokens" in text
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
def test_invalid_arguments_exit_with_code_2(
    folder: Path, capsys: pytest.CaptureFixture[str], line: str, expected: str
) -> None:
    try:
        code = inspect_data.main(line.replace("DIR", str(folder)).split())
    except SystemExit as error:
        code = int(error.code or 0)
    assert code == 2 and expected in capsys.readouterr().err


def test_help_of_data_tools_does_not_import_torch() -> None:
    program = (
        "import sys; sys.argv = ['x', '--help']; from tools import count_tokens, inspect_data, merge_data\n"
        "for tool in (count_tokens, inspect_data, merge_data):\n"
        "    try: tool.main()\n"
        "    except SystemExit as error: assert error.code == 0\n"
        "assert not {'torch', 'matplotlib', 'deepspeed'} & set(sys.modules), 'slow'"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=TOOLS.parent, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0 and result.stdout.count("usage:") == 3, result.stderr


@pytest.mark.slow
def test_statistics_do_not_import_torch(folder: Path) -> None:
    program = f"""
import sys
from tools import inspect_data
assert inspect_data.main(["{folder}/a", "--tokenizer-path", "{folder}/t.json", "--top", "2"]) == 0
from megatron.models.t5.data import t5_fields
assert "torch" not in sys.modules, "a second"
assert inspect_data.main("{folder}/a --tokenizer-path {folder}/t.json --samples 1 --seq-length 7".split()) == 0
assert "torch" in sys.modules and not {{"torch._dynamo", "deepspeed"}} & set(sys.modules), "a second more"
"""
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=TOOLS.parent, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0 and "sample 0 of train" in result.stdout, result.stderr
