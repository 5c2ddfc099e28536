"""Losses of documents (--log-document-losses): equal in every layout, bounded, not repeated after a resume."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

import pretrain_gpt2
from megatron import tokenizer
from megatron.data import IndexedDatasetBuilder
from megatron.errors import ConfigError
from megatron.models.common import language_model
from megatron.training.callbacks.document_losses import DocumentLosses
from megatron.training.callbacks.metrics_writer import read_metrics
from megatron.training.document_losses import (
    FILE_NAME,
    PREVIOUS_NAME,
    DocumentLoss,
    DocumentLossWriter,
    DocumentSums,
    drop_later_steps,
    merge,
    read_document,
    read_step,
)
from megatron.training.trainer import Callback, Trainer
from tests.helpers.runs import INJECTED_CALLBACKS, TOKENIZER, make_flags, parse_script_config, train_ranks
from tools import audit as audit_tool

BASE = "--fp64 --hidden-dropout 0 --attention-dropout 0 --eval-iters 0 --split 1,0,0 --log-document-losses"
NUM_STEPS = 3
PACKINGS = {"concat": "", "best-fit": "--packing best-fit"}
LAYOUTS = {
    "data 2": (2, "--gas 1"),
    "context 2": (2, "--context-parallel-size 2"),
    "pipe 2": (2, "--pipe-parallel-size 2"),
    "context 2, all-to-all": (2, "--context-parallel-size 2 --cp-comm-type a2a"),
    "tensor 2, sequence": (2, "--model-parallel-size 2 --sequence-parallel"),
    "pipe 2 in a V": (2, "--pipe-parallel-size 2 --pipeline-schedule zb-v --gas 4 --batch-size 1"),
    "micro-batches": (1, "--gas 4 --batch-size 1"),
    "data 2, ZeRO 3": (2, "--gas 1 --zero-stage 3"),
    "pipe 2 x context 2": (4, "--pipe-parallel-size 2 --context-parallel-size 2"),
    "data 2 x tensor 2": (4, "--gas 1 --model-parallel-size 2"),
}
SLOW_LAYOUTS = list(LAYOUTS)[3:]
Losses = dict[int, dict[tuple[str, int], DocumentLoss]]


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write 30 documents of random tokens, some shorter than a chunk of a context rank, some longer than a sample."""
    folder, vocab = tmp_path_factory.mktemp("documents"), tokenizer.build(tokenizer_path=TOKENIZER)
    generator = np.random.default_rng(1)
    with IndexedDatasetBuilder(
        folder / "texts", vocab_size=vocab.vocab_size, tokenizer=vocab.identity, eod_id=vocab.eod_id
    ) as writer:
        for document in range(30):
            tokens = generator.integers(300, 1000, 90 if document % 6 == 5 else 4 + document % 13)
            writer.add(np.append(tokens, vocab.eod_id))
    with IndexedDatasetBuilder(folder / "ranges", vocab_size=vocab.vocab_size, tokenizer=vocab.identity) as writer:
        for document in range(20):  # the tokens of document d are from 300 + 30 d on
            writer.add(generator.integers(300 + 30 * document, 330 + 30 * document, 7 + document % 9))
    return folder / "texts"


def train(
    documents: Path,
    folder: Path,
    flags: str,
    num_ranks: int = 1,
    exit_code: int = 0,
    inject: Callable[[int], None] | None = None,
) -> Losses:
    argv = make_flags(documents, folder, f"--num-layers 4 --train-iters {NUM_STEPS} {BASE} {flags}")
    assert train_ranks(num_ranks, argv, inject)[0] == [exit_code] * num_ranks
    return read_losses(folder)


def read_losses(folder: Path) -> Losses:
    return {step: losses for step in range(1, 100) if (losses := read_step(folder, step))}


def assert_equal(losses: Losses, expected: Losses) -> None:
    assert list(losses) == list(expected) == list(range(1, NUM_STEPS + 1))
    for step, by_document in expected.items():
        assert {key: loss.tokens for key, loss in losses[step].items()} == {
            key: loss.tokens for key, loss in by_document.items()
        }
        for key, loss in by_document.items():
            assert abs(losses[step][key].loss - loss.loss) <= 1e-12, (step, key)


@pytest.fixture(scope="module")
def one_process(documents: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Run folder of one process by packing."""
    folders = {}
    for packing, flags in PACKINGS.items():
        folders[packing] = tmp_path_factory.mktemp("one") / packing
        train(documents, folders[packing], flags)
    return folders


def assert_add_up(losses: Losses, folder: Path) -> None:
    """Check that the documents of each step have the loss of the step."""
    records = [record for record in read_metrics(folder / "metrics.jsonl") if record["kind"] == "train"]
    assert len(records) == NUM_STEPS
    for record in records:
        by_document = losses[record["step"]].values()
        mean = sum(loss.loss * loss.tokens for loss in by_document) / sum(loss.tokens for loss in by_document)
        assert abs(mean - record["loss"]) <= 1e-12


@pytest.mark.parametrize("packing", PACKINGS)
def test_documents_have_loss_of_step(packing: str, one_process: dict[str, Path]) -> None:
    assert_add_up(read_losses(one_process[packing]), one_process[packing])


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        "--mtp-num-layers 1 --z-loss 1e-3",
        "--loss-chunk-tokens 16 --z-loss 1e-3",
        "--loss-chunk-tokens 16 --mtp-num-layers 2",
        "--eod-mask-loss --reset-attention-mask",
        "--data-order megatron --no-extra-token",
        "--loss-average micro-batch --batch-size 1 --gas 4",
        "--checkpoint-activations",
    ],
)
def test_documents_have_loss_of_step_with_other_losses(flags: str, documents: Path, tmp_path: Path) -> None:
    assert_add_up(train(documents, tmp_path, flags), tmp_path)


def record_targets(folder: Path) -> Callable[[int], None]:
    """Return an injector that appends the targets and losses of each forward to ``folder/targets``."""

    def inject(rank: int) -> None:
        compute = language_model.vocab_parallel_cross_entropy

        def recorded(logits: torch.Tensor, targets: torch.Tensor, **options: Any) -> Any:
            losses = compute(logits, targets, **options)
            with open(folder / "targets", "a") as file:
                file.write(json.dumps([targets.flatten().tolist(), losses.flatten().tolist()]) + "\n")
            return losses

        language_model.vocab_parallel_cross_entropy = recorded

    return inject


@pytest.mark.parametrize("flags", ["", "--seq-length-schedule 0:8;128:32"])
def test_loss_belongs_to_document_of_predicted_token(flags: str, documents: Path, tmp_path: Path) -> None:
    """The token ids reveal the document, independently of the sample order."""
    losses = train(documents.with_name("ranges"), tmp_path, flags, inject=record_targets(tmp_path))
    forwards = [json.loads(line) for line in (tmp_path / "targets").read_text().splitlines()]
    assert len(forwards) == 2 * NUM_STEPS
    for step in range(1, NUM_STEPS + 1):
        targets, token_losses = (
            np.concatenate([forward[idx] for forward in forwards[2 * step - 2 : 2 * step]]) for idx in range(2)
        )
        expected = {
            ("ranges", document): (token_losses[targets // 30 - 10 == document].mean(), count)
            for document, count in enumerate(np.bincount(targets // 30 - 10, minlength=20))
            if count
        }
        assert losses[step].keys() == expected.keys()
        for key, (loss, count) in expected.items():
            assert losses[step][key].tokens == count and abs(losses[step][key].loss - loss) <= 1e-12


@pytest.mark.parametrize("packing", ["concat", pytest.param("best-fit", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "layout", [*list(LAYOUTS)[:3], *(pytest.param(layout, marks=pytest.mark.slow) for layout in SLOW_LAYOUTS)]
)
def test_layouts_equal_one_process(
    layout: str, packing: str, documents: Path, one_process: dict[str, Path], tmp_path: Path
) -> None:
    num_ranks, flags = LAYOUTS[layout]
    losses = train(documents, tmp_path, f"{PACKINGS[packing]} {flags}", num_ranks)
    assert_equal(losses, read_losses(one_process[packing]))


@pytest.mark.parametrize("layout", ["", pytest.param("data 2", marks=pytest.mark.slow)])
def test_resumed_run_repeats_no_step(
    layout: str, documents: Path, one_process: dict[str, Path], tmp_path: Path
) -> None:
    """The run has recorded steps 2 and 3, but resumes from the checkpoint of step 1."""
    num_ranks, flags = LAYOUTS[layout] if layout else (1, "")
    train(documents, tmp_path, "--save-interval 1")
    for step in (2, 3):
        shutil.rmtree(tmp_path / "checkpoints" / f"step-{step:08d}")
    (tmp_path / "checkpoints" / "latest").unlink()
    losses = train(documents, tmp_path, f"{flags} --load {tmp_path}", num_ranks)
    assert_equal(losses, read_losses(one_process["concat"]))
    lines = (tmp_path / FILE_NAME).read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]


class KillAfterSave(Callback):
    """Ends the process, without any cleanup, as soon as a checkpoint is committed."""

    def on_save_end(self, step: int, path: Path | None, values: dict[str, Any]) -> None:
        os._exit(9)


def test_committed_checkpoint_has_losses_of_its_steps(documents: Path, tmp_path: Path) -> None:
    flags = "--log-interval 100 --save-interval 2"  # step 2 is not logged
    losses = train(
        documents, tmp_path, flags, exit_code=9, inject=lambda rank: INJECTED_CALLBACKS.append(KillAfterSave())
    )
    assert list(losses) == [1, 2]


def test_audit_reports_losses(
    documents: Path, one_process: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = one_process["concat"]
    (corpus, document), loss = next(iter(read_step(folder, 2).items()))
    text = f"document loss {loss.loss:.4f} over {loss.tokens} tokens in the step"
    assert audit_tool.main([str(folder), "--document", str(document)]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "step 2," in line]
    assert lines and all(text in line for line in lines)
    assert audit_tool.main([str(folder), "--step", "2"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if f"{corpus} document {document}," in line]
    assert lines and all(text in line for line in lines)
    assert read_document(folder, corpus, document)[2] == loss


# The files, without a run.


def make_sums(step: int, num_documents: int = 4) -> DocumentSums:
    documents = np.arange(num_documents) * 3
    return merge([DocumentSums(documents, step + documents / 7.0, np.full(num_documents, 2.0))] * 2)


def make_writer(folder: Path, max_bytes: int = 1 << 20) -> DocumentLossWriter:
    return DocumentLossWriter(folder, ["web"], max_bytes, np.dtype(np.float64))


def recorded_steps(folder: Path) -> list[int]:
    return list(read_document(folder, "web", 3))


def test_files_have_newest_steps_within_limit(tmp_path: Path) -> None:
    writer = make_writer(tmp_path, max_bytes=2000)
    for step in range(1, 100, 2):
        writer.write({step + 1: make_sums(step + 1), step: make_sums(step)})
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 2000
    steps = recorded_steps(tmp_path)
    assert steps == list(range(steps[0], 101)) and len(steps) > 6
    assert {path.name for path in tmp_path.iterdir()} == {FILE_NAME, PREVIOUS_NAME}
    make_writer(tmp_path, max_bytes=800)
    assert 0 < sum(path.stat().st_size for path in tmp_path.iterdir()) <= 800
    assert recorded_steps(tmp_path)[-1] == 100
    for path in tmp_path.iterdir():
        assert all(json.loads(line) for line in path.read_text().splitlines())


def test_sums_of_same_document_are_added(tmp_path: Path) -> None:
    make_writer(tmp_path).write({5: make_sums(5)})
    assert read_document(tmp_path, "web", 3) == {5: DocumentLoss((5 + 3 / 7) / 2, 4)}
    assert read_step(tmp_path, 5)["web", 9].tokens == 4 and not read_step(tmp_path, 4)


def test_later_and_truncated_records_are_dropped(tmp_path: Path) -> None:
    writer = make_writer(tmp_path, max_bytes=2000)
    writer.write({step: make_sums(step) for step in range(1, 10)})
    with open(tmp_path / FILE_NAME, "ab") as file:
        file.write(b'{"step":9,"corp')
    assert recorded_steps(tmp_path)[-1] == 9
    drop_later_steps(tmp_path, 9)
    assert recorded_steps(tmp_path)[-1] == 9
    assert (tmp_path / FILE_NAME).read_bytes().endswith(b"}\n")
    drop_later_steps(tmp_path, 6)
    writer.write({7: make_sums(70)})
    steps = recorded_steps(tmp_path)
    assert steps == list(range(steps[0], 8))
    assert read_document(tmp_path, "web", 3)[7].loss == (70 + 3 / 7) / 2
    drop_later_steps(tmp_path, 0)
    assert recorded_steps(tmp_path) == []


def test_step_larger_than_half_of_limit_is_reported(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    writer = make_writer(tmp_path, max_bytes=2 << 20)
    writer.write({1: make_sums(1, num_documents=60_000), 2: make_sums(2)})
    assert recorded_steps(tmp_path) == [2]
    assert "Raise the limit to at least" in capfd.readouterr().err


@pytest.mark.parametrize("reads_data", [True, False])
def test_own_model_or_data_is_rejected(reads_data: bool, documents: Path, tmp_path: Path) -> None:
    """On every rank: with a model that does not report token losses, or with data without documents."""
    config = parse_script_config(pretrain_gpt2, make_flags(documents, tmp_path, "--log-document-losses"), 1)
    callback = DocumentLosses(config)
    module = torch.nn.Linear(1, 1)
    if reads_data:
        module.token_losses = None
    world = SimpleNamespace(reads_data=reads_data, any_rank=lambda flags: flags)
    data = SimpleNamespace(datasets={"train": [1, 2, 3]} if reads_data else {}, has_training=True)
    callback.trainer = cast(
        Trainer, SimpleNamespace(engine=SimpleNamespace(module=module), world=world, data=data, config=config)
    )
    with pytest.raises(ConfigError, match="--log-document-losses needs a decoder of this repository"):
        callback.on_train_start()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--log-document-losses --data-path mock", "--log-document-losses needs documents"),
        ("--log-document-losses -1", "--log-document-losses must be"),
        ("--log-document-losses --eval-only --load x", "--log-document-losses applies to training only"),
    ],
)
def test_unusable_flag_is_rejected(flags: str, message: str, documents: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_script_config(pretrain_gpt2, [*make_flags(documents, tmp_path), *flags.split()], 1)
