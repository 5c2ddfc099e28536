"""``pretrain_gpt2.py --model`` trains as the programs named after a family, and each resumes the runs of the other."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

import pytest

from megatron.training.callbacks.metrics_writer import read_metrics
from tests.helpers.harness import fork_ranks
from tests.helpers.runs import BASE_FLAGS, LENGTH_FLAGS, ROOT, _rendezvous_by_file, disable_slow_features, write_corpus

ENTRY = "pretrain_gpt2.py"
SHORT_RUN = "--train-iters 4 --eval-iters 0"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def start(program: str, extra_args: str, corpus: Path, folder: Path, family: str = "llama") -> tuple[int, str]:
    """Run ``program`` in ``folder`` as one rank; return its exit code and its output."""
    folder.mkdir(exist_ok=True)
    argv = [
        *BASE_FLAGS,
        *LENGTH_FLAGS[family].split(),
        "--data-path",
        str(corpus),
        *f"{SHORT_RUN} {extra_args}".split(),
    ]
    log = folder / "log"
    log.unlink(missing_ok=True)
    (code,), _, _ = fork_ranks(1, _run, program, argv, folder, log, init=False, deadline_s=100.0)
    return code, log.read_text()


def _run(rank: int, program: str, argv: list[str], folder: Path, log: Path) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    os.chdir(folder)
    store = folder / "store"
    store.unlink(missing_ok=True)
    _rendezvous_by_file(store)
    disable_slow_features()
    sys.argv = [program, *argv]
    runpy.run_path(str(ROOT / program), run_name="__main__")
    sys.exit(0)


def losses(folder: Path, family: str = "llama") -> list[float]:
    """Return the training losses of the one run in ``folder``."""
    (run,) = (folder / "runs").glob(f"{family}-*")
    return [record["loss"] for record in read_metrics(run / "metrics.jsonl") if record["kind"] == "train"]


@pytest.mark.parametrize("family", ["llama", pytest.param("mpt", marks=pytest.mark.slow)])
def test_entry_program_equals_family_program_losses(family: str, corpus: Path, tmp_path: Path) -> None:
    for program, extra_args in ((f"examples/{family}/pretrain_{family}.py", ""), (ENTRY, f"--model {family}")):
        code, output = start(program, extra_args, corpus, tmp_path / Path(program).stem, family)
        assert code == 0, output
    entry_losses = losses(tmp_path / "pretrain_gpt2", family)
    assert len(entry_losses) == 4 and entry_losses == losses(tmp_path / f"pretrain_{family}", family)


@pytest.mark.parametrize("is_swapped", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_entry_and_family_programs_resume_each_other(is_swapped: bool, corpus: Path, tmp_path: Path) -> None:
    """The run is found by its name, and a setting that only the first start gave comes from the checkpoint."""
    programs = [("examples/llama/pretrain_llama.py", ""), (ENTRY, "--model llama")]
    (first_program, extra_args), (second_program, second_args) = programs[::-1] if is_swapped else programs
    code, output = start(first_program, f"{extra_args} --qk-norm head", corpus, tmp_path / "whole")
    assert code == 0, output
    code, output = start(first_program, f"{extra_args} --qk-norm head --exit-interval 2", corpus, tmp_path / "parts")
    assert code == 75, output
    code, output = start(second_program, f"{second_args} --resume", corpus, tmp_path / "parts")
    assert code == 0, output
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")


def test_model_family_mismatch_with_checkpoint_raises(corpus: Path, tmp_path: Path) -> None:
    code, output = start(ENTRY, "--model llama --save llama --train-iters 1", corpus, tmp_path)
    assert code == 0, output
    code, output = start(ENTRY, "--model mpt --load llama --save other", corpus, tmp_path, "mpt")
    assert code == 3 and "Use --model llama" in output
    code, output = start(ENTRY, "--model lama --save other", corpus, tmp_path, "mpt")
    assert code == 2 and "did you mean llama?" in output
    assert not (tmp_path / "other").exists()
