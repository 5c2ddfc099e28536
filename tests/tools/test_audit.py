"""tools/audit.py: what steps of runs read, compared with the samples that the runs read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from megatron.config import parse
from megatron.data.collate import Collate
from megatron.errors import DataError
from megatron.training.audit import Audit
from megatron.training.audit import _read_config as read_config
from tests.helpers.runs import make_flags, train_ranks, write_corpus
from tools import audit as tool


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def record_samples(folder: Path) -> Callable[[int], None]:
    """Return an injector that writes the indices of each micro-batch that a rank reads to ``folder/reads-RANK``."""

    def inject(rank: int) -> None:
        call = Collate.__call__

        def recorded(self: Collate, micro_batch: Any) -> Any:
            with open(folder / f"reads-{rank}", "a") as file:
                file.write(json.dumps(micro_batch.indices) + "\n")
            return call(self, micro_batch)

        Collate.__call__ = recorded  # type: ignore[method-assign]

    return inject


def read_indices(path: Path) -> list[int]:
    return [index for line in path.read_text().splitlines() for index in json.loads(line)]


def test_audit_finds_document_and_step_across_restart(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    base = "--eval-iters 0 --eval-interval 0 --batch-size 2 --train-iters 5"
    argv = make_flags(corpus, run, f"{base} --gas 2 --exit-interval 3")
    assert train_ranks(1, argv, record_samples(tmp_path))[0] == [75]
    one_rank = read_indices(tmp_path / "reads-0")[:12]
    (tmp_path / "reads-0").unlink()
    argv = make_flags(corpus, run, f"{base} --gas 1 --load {run}")
    assert train_ranks(2, argv, record_samples(tmp_path))[0] == [0, 0]
    by_rank = [read_indices(tmp_path / f"reads-{rank}") for rank in range(2)]
    assert one_rank == list(range(12)) and by_rank == [[12, 13, 16, 17], [14, 15, 18, 19]]

    audit = Audit(run)
    assert [sample for sample, _ in audit.samples_of_step(3)] == [8, 9, 10, 11]
    readings = [reading for _, slices in audit.samples_of_step(5) for reading in slices]
    assert {reading.reader.replica for reading in readings if reading.sample in by_rank[1]} == {1}
    document = readings[-1].document
    found = list(audit.readings_of(0, document))
    assert readings[-1] in found and all(reading.document == document for reading in found)
    assert tool.main([str(run), "--document", str(document)]) == 0
    assert "step 5, sample 19:" in capsys.readouterr().out
    assert tool.main([str(run), "--step", "5", "--positions"]) == 0
    assert f"document {document}, tokens" in capsys.readouterr().out
    text = audit.tokenizer.decode(audit.parts[0][1].token_file.read(document).tolist())[:60]
    assert document in audit.documents_with(text, 0)
    assert tool.main([str(run), "--document", "99999999"]) != 0
    assert "--document must be from 0 to" in capsys.readouterr().err


@pytest.mark.slow
def test_skipped_steps_and_excluded_documents_are_not_reported_as_read(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Step 2 is skipped; the resumed run skips step 5 instead, and excludes a document that step 4 reads."""
    run = tmp_path / "run"
    base = "--eval-iters 0 --eval-interval 0 --batch-size 2 --gas 2 --train-iters 6 --split 1,0,0"
    argv = make_flags(corpus, run, f"{base} --exit-interval 3 --iterations-to-skip 2")
    assert train_ranks(1, argv, record_samples(tmp_path))[0] == [75]
    slices = [reading for _, slices in Audit(run).samples_of_step(4) for reading in slices]
    document = slices[0].document
    (tmp_path / "ids.txt").write_text(f"{document}\n")
    argv = make_flags(corpus, run, f"{base} --iterations-to-skip 5 --load {run} --exclude {tmp_path / 'ids.txt'}")
    assert train_ranks(1, argv, record_samples(tmp_path))[0] == [0]
    (tmp_path / "ids.txt").unlink()
    assert read_indices(tmp_path / "reads-0") == [*range(4), *range(8, 16), *range(20, 24)]

    audit = Audit(run)
    effects = {
        step: {reading.effect for _, slices in audit.samples_of_step(step) for reading in slices}
        for step in range(1, 7)
    }
    assert effects[2] == effects[5] == {"skipped"} and effects[1] == effects[3] == {"read"}
    assert "excluded" in effects[4]
    assert [audit.is_skipped(step) for step in range(1, 7)] == [False, True, False, False, True, False]
    skipped = next(
        reading for _, slices in audit.samples_of_step(5) for reading in slices if reading.document != document
    )
    assert skipped in list(audit.readings_of(0, skipped.document))
    assert tool.main([str(run), "--document", str(skipped.document)]) == 0
    assert ", skipped in 1" in capsys.readouterr().out
    assert tool.main([str(run), "--document", str(document)]) == 0
    assert "no loss: the document was excluded (--exclude)" in capsys.readouterr().out
    assert tool.main([str(run), "--step", "5"]) == 0
    assert "step 5 was skipped by --iterations-to-skip; it read none of these samples:" in capsys.readouterr().out
    assert tool.main([str(run), "--step", "7"]) == 0
    assert "step 7 is not recorded yet, the last step is 6" in capsys.readouterr().out


def test_text_is_found_as_the_tokenizer_returns_it() -> None:
    """As with CPM's vocabulary, which replaces full-width punctuation."""

    class Lossy:
        def encode(self, text: str) -> list[int]:
            return [ord(char) for char in text.replace("，", ",")]

        def decode(self, ids: list[int]) -> str:
            return " " + "".join(map(chr, ids))

    documents = ["从前，有", "从后"]
    token_file = SimpleNamespace(
        document_lengths=[4, 2], read=lambda document: np.array(Lossy().encode(documents[document]), np.int32)
    )
    audit = Audit.__new__(Audit)
    audit.parts, audit.tokenizer = cast(Any, [("a", SimpleNamespace(token_file=token_file))]), Lossy()
    assert audit.documents_with("从前，", 0) == [0] and audit.documents_with("从", 0) == [0, 1]
    with pytest.raises(SystemExit):
        tool.parse_args(["runs/x", "--text", " "])
    audit.tokenizer = None
    with pytest.raises(DataError, match="--text needs a run with a tokenizer"):
        audit.documents_with("从", 0)


def test_settings_use_cache_next_to_run_folder_and_no_list(tmp_path: Path) -> None:
    """The token files of text are next to the run folder; the list of --exclude may have been deleted."""
    flags = "--data-path none --vocab-size 9 --dry-run --seq-length 16 --save elsewhere/run --exclude gone.txt"
    (tmp_path / "config.json").write_text(json.dumps(parse(flags.split(), world_size=1).to_dict()))
    config = read_config(tmp_path, 1)
    assert config.checkpoint.save == str(tmp_path) and config.data.exclude is None and config.data.data_path == "none"
