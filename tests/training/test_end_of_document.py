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
from megatron.checkpoint.checkpoint_args import bring
from megatron.config import Config
from megatron.data import dataset_metadata
from megatron.errors import DataError
from megatron.tokenizer import Tokenizer
from megatron.training.callbacks.metrics_writer import read_metrics
from megatron.training.end_of_document import choose_eod
from megatron.training.vocabulary import with_tokenizer
from tests.helpers.checkpoint_samples import world_of
from tests.helpers.harness import run_ranks
from tests.helpers.runs import train_ranks
from tests.helpers.trap import CORPUS, FLAGS, FOLDER, LOSSES, TRAP


def parsed(*words: object) -> Config:
    argv = [*FLAGS, "--tokenizer-path", str(TRAP), *map(str, words)]
    return parse(argv, world_size=1, env={}, checkpoint_args=lambda *given: bring(*given, name="gpt2"))


def chosen(*words: object) -> str | None:
    return with_tokenizer(parsed(*words))[1].data.eod_token


def copied(folder: Path, **fields: Any) -> Path:
    """Return the prefix of a copy of the token file whose sidecar has these fields."""
    for suffix in (".bin", ".idx"):
        shutil.copy(f"{CORPUS}{suffix}", folder / f"copy{suffix}")
    sidecar = dataset_metadata.read(Path(f"{CORPUS}.meta.json"))
    assert sidecar is not None
    (folder / "copy.meta.json").write_bytes(dataclasses.replace(sidecar, **fields).to_json())
    return folder / "copy"


def test_a_run_takes_the_token_of_its_token_files_and_else_that_of_the_folder(tmp_path: Path) -> None:
    assert chosen("--data-path", CORPUS) == "</s>"
    assert chosen("--data-path", "mock") == "<eos>" and chosen("--data-path", "mock", "--eod-token", "<bos>") == "<bos>"
    without = copied(tmp_path, has_eod=False, eod_id=None)
    assert chosen("--data-path", without) == "<eos>"
    assert chosen("--data-path", copied(tmp_path, tokenizer="another")) == "<eos>"  # reported when the data are opened


def test_documents_that_end_with_another_token_are_an_error_that_names_both(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"corpus end with </s> \(id 291\), but .* is <eos> \(id 1\). Give --eod-token"):
        chosen("--data-path", CORPUS, "--eod-token", "<eos>")
    other = copied(tmp_path, eod_id=1)
    with pytest.raises(DataError, match=r"copy end with <eos> \(id 1\), but .* is </s> \(id 291\)"):
        chosen("--data-path", "1", CORPUS, "1", other)


def lack_sidecars(rank: int) -> None:
    """Make every rank but the first fail to read a sidecar, as on a host without the token files."""
    if rank:
        dataset_metadata.read = lambda path: dataset_metadata.parse(b"damaged", path)  # type: ignore[assignment]


def test_only_the_first_rank_needs_the_sidecars_of_token_files(tmp_path: Path) -> None:
    """The second tensor rank does not read the data either, as the middle stages of a pipeline."""
    argv = [*FLAGS, "--tokenizer-path", str(TRAP), "--data-path", str(CORPUS), "--save", str(tmp_path / "run")]
    more = ["--model-parallel-size", "2", "--exit-interval", "1"]
    assert train_ranks(2, [*argv, *more], lack_sidecars)[0] == [75, 75]


def failure_of(rank: int, prefix: Path) -> str:
    """Return the error of a rank where only the first one has a damaged sidecar."""
    try:
        with_tokenizer(parsed("--data-path", CORPUS if rank else prefix), world_of(rank, 3))
    except DataError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("is_folder", "problem"), [(True, "cannot be read (.*Is a directory"), (False, "cannot be read (Expecting value")]
)
def test_a_sidecar_that_cannot_be_read_is_an_error_of_all_ranks(is_folder: bool, problem: str, tmp_path: Path) -> None:
    prefix = copied(tmp_path)
    sidecar = tmp_path / "copy.meta.json"
    sidecar.unlink()
    sidecar.mkdir() if is_folder else sidecar.write_text("damaged")
    first, *others = run_ranks(3, failure_of, prefix)
    assert re.search(problem.replace("(", r"\("), first) and str(sidecar) in first and others == [first, first]


def test_a_run_of_an_earlier_version_keeps_its_token_and_reports_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert chosen("--data-path", "mock", "--load", FOLDER / "run") == "</s>"
    assert "documents end with </s> (id 291), as at the start of the run" in capsys.readouterr().err
    assert chosen("--data-path", "mock", "--load", FOLDER / "run", "--finetune") == "<eos>"
    assert chosen("--data-path", "mock", "--load", FOLDER / "run", "--eod-token", "<bos>") == "<bos>"


def test_a_saved_token_that_another_vocabulary_lacks_is_chosen_anew() -> None:
    config = parsed("--data-path", "mock")
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, eod_token="<nowhere>"))
    built: Tokenizer = tokenizer.build(tokenizer_path=TRAP)
    choose_eod(built, config)
    assert built.eod_name == "<eos>"


def test_a_run_of_an_earlier_version_is_continued_with_its_data_and_losses(tmp_path: Path) -> None:
    shutil.copytree(FOLDER / "run", tmp_path / "run")
    argv = [*FLAGS, "--tokenizer-path", str(TRAP), "--data-path", str(CORPUS), "--load", str(tmp_path / "run")]
    codes, _ = train_ranks(1, [*argv, "--save", str(tmp_path / "run")])
    found = {one["step"]: one["loss"] for one in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in one}
    assert codes == [0] and found == pytest.approx(LOSSES, abs=2e-4)
    first, rest = next((tmp_path / "run" / "checkpoints").glob("*4/manifest.json")).read_bytes().split(b"\n", 1)
    state = json.loads(first + rest)["state"]
    assert state["config"]["data"]["eod_token"] == "</s>"
    assert state["tokenizer"] == tokenizer.build(tokenizer_path=TRAP).identity
