"""Token files and runs keep the end-of-document token with which they were made."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from megatron import tokenizer
from megatron.arguments import parse
from megatron.checkpoint.checkpoint_args import load_checkpoint_args
from megatron.config import Config
from megatron.data import dataset_metadata
from megatron.errors import DataError
from megatron.tokenizer import Tokenizer
from megatron.training.callbacks.metrics_writer import read_metrics
from megatron.training.end_of_document import choose_eod
from megatron.training.vocabulary import with_tokenizer
from tests.helpers.checkpoint_samples import world_group
from tests.helpers.harness import run_ranks
from tests.helpers.runs import train_ranks
from tests.helpers.trap import CORPUS_PREFIX, EXPECTED_LOSSES, FLAGS, FOLDER, TOKENIZER_PATH


def parse_config(*extra_args: object) -> Config:
    argv = [*FLAGS, "--tokenizer-path", str(TOKENIZER_PATH), *map(str, extra_args)]
    return parse(
        argv, world_size=1, env={}, checkpoint_args=lambda *loader_args: load_checkpoint_args(*loader_args, name="gpt2")
    )


def chosen_eod_token(*extra_args: object) -> str | None:
    return with_tokenizer(parse_config(*extra_args))[1].data.eod_token


def copy_corpus(folder: Path, **fields: Any) -> Path:
    """Return the prefix of a copy of the token file whose sidecar has these fields."""
    for suffix in (".bin", ".idx"):
        shutil.copy(f"{CORPUS_PREFIX}{suffix}", folder / f"copy{suffix}")
    sidecar = dataset_metadata.read(Path(f"{CORPUS_PREFIX}.meta.json"))
    assert sidecar is not None
    (folder / "copy.meta.json").write_bytes(dataclasses.replace(sidecar, **fields).to_json())
    return folder / "copy"


def test_run_uses_eod_token_of_token_files_or_tokenizer_folder(tmp_path: Path) -> None:
    assert chosen_eod_token("--data-path", CORPUS_PREFIX) == "</s>"
    assert (
        chosen_eod_token("--data-path", "mock") == "<eos>"
        and chosen_eod_token("--data-path", "mock", "--eod-token", "<bos>") == "<bos>"
    )
    corpus_without_eod = copy_corpus(tmp_path, has_eod=False, eod_id=None)
    assert chosen_eod_token("--data-path", corpus_without_eod) == "<eos>"
    assert (
        chosen_eod_token("--data-path", copy_corpus(tmp_path, tokenizer="another")) == "<eos>"
    )  # reported when the data are opened


def test_mismatched_eod_token_raises_naming_both_tokens(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"corpus end with </s> \(id 291\), but .* is <eos> \(id 1\). Set --eod-token"):
        chosen_eod_token("--data-path", CORPUS_PREFIX, "--eod-token", "<eos>")
    mismatched = copy_corpus(tmp_path, eod_id=1)
    with pytest.raises(DataError, match=r"copy end with <eos> \(id 1\), but .* is </s> \(id 291\)"):
        chosen_eod_token("--data-path", "1", CORPUS_PREFIX, "1", mismatched)


def corrupt_sidecars_after_rank_0(rank: int) -> None:
    """Make every rank but the first fail to read a sidecar, as on a host without the token files."""
    if rank:
        dataset_metadata.read = lambda path: dataset_metadata.parse(b"damaged", path)  # type: ignore[assignment]


def test_only_first_rank_reads_token_file_sidecars(tmp_path: Path) -> None:
    """The second tensor rank does not read the data either, as the middle stages of a pipeline."""
    argv = [
        *FLAGS,
        "--tokenizer-path",
        str(TOKENIZER_PATH),
        "--data-path",
        str(CORPUS_PREFIX),
        "--save",
        str(tmp_path / "run"),
    ]
    extra_args = ["--model-parallel-size", "2", "--exit-interval", "1"]
    assert train_ranks(2, [*argv, *extra_args], corrupt_sidecars_after_rank_0)[0] == [75, 75]


def tokenizer_error(rank: int, prefix: Path) -> str:
    """Return the error of a rank where only the first one has a damaged sidecar."""
    try:
        with_tokenizer(parse_config("--data-path", CORPUS_PREFIX if rank else prefix), world_group(rank, 3))
    except DataError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("is_folder", "problem"), [(True, "cannot be read (.*Is a directory"), (False, "cannot be read (Expecting value")]
)
def test_unreadable_sidecar_raises_on_all_ranks(is_folder: bool, problem: str, tmp_path: Path) -> None:
    prefix = copy_corpus(tmp_path)
    sidecar = tmp_path / "copy.meta.json"
    sidecar.unlink()
    sidecar.mkdir() if is_folder else sidecar.write_text("damaged")
    first_error, *other_errors = run_ranks(3, tokenizer_error, prefix)
    assert (
        re.search(problem.replace("(", r"\("), first_error)
        and str(sidecar) in first_error
        and other_errors == [first_error, first_error]
    )


def test_earlier_version_run_preserves_and_reports_eod_token(capsys: pytest.CaptureFixture[str]) -> None:
    assert chosen_eod_token("--data-path", "mock", "--load", FOLDER / "run") == "</s>"
    assert "documents end with </s> (id 291), as at the start of the run" in capsys.readouterr().err
    assert chosen_eod_token("--data-path", "mock", "--load", FOLDER / "run", "--finetune") == "<eos>"
    assert chosen_eod_token("--data-path", "mock", "--load", FOLDER / "run", "--eod-token", "<bos>") == "<bos>"


def test_saved_eod_token_missing_from_vocabulary_is_replaced() -> None:
    config = parse_config("--data-path", "mock")
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, eod_token="<nowhere>"))
    built: Tokenizer = tokenizer.build(tokenizer_path=TOKENIZER_PATH)
    choose_eod(built, config)
    assert built.eod_name == "<eos>"


def test_earlier_version_run_resumes_with_same_data_and_losses(tmp_path: Path) -> None:
    shutil.copytree(FOLDER / "run", tmp_path / "run")
    argv = [
        *FLAGS,
        "--tokenizer-path",
        str(TOKENIZER_PATH),
        "--data-path",
        str(CORPUS_PREFIX),
        "--load",
        str(tmp_path / "run"),
    ]
    codes, _ = train_ranks(1, [*argv, "--save", str(tmp_path / "run")])
    losses_by_step = {
        record["step"]: record["loss"]
        for record in read_metrics(tmp_path / "run" / "metrics.jsonl")
        if "loss" in record
    }
    assert codes == [0] and losses_by_step == pytest.approx(EXPECTED_LOSSES, abs=2e-4)
    first_line, other_lines = (
        next((tmp_path / "run" / "checkpoints").glob("*4/manifest.json")).read_bytes().split(b"\n", 1)
    )
    state = json.loads(first_line + other_lines)["state"]
    assert state["config"]["data"]["eod_token"] == "</s>"
    assert state["tokenizer"] == tokenizer.build(tokenizer_path=TOKENIZER_PATH).identity
