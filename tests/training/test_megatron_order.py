"""Runs with --data-order megatron: samples of each step and replica, validations, resumes and rejected settings."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.config import Config, parse
from megatron.config.batch import share_of
from megatron.data import BlendPaths, build_train_valid_test
from megatron.errors import CheckpointError, ConfigError, DataError, SampleError
from megatron.mpu.groups import Group, single_grid
from megatron.training.data import RunData, first_validation_sample, num_samples_of_splits
from megatron.training.data_resume import resume_order
from megatron.training.step_samples import StepSamples
from megatron.training.world import World
from tests.helpers.token_data import write_documents, write_megatron_files, write_token_files

SEQ, STEPS, BATCH = 8, 9, 16
BLEND = "0.7 {a} 0.3 {b}"


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Write two corpora with several epochs in a run."""
    folder = tmp_path_factory.mktemp("corpora")
    write_documents(folder / "a", [30 + i % 7 for i in range(20)])
    write_documents(folder / "b", [90, 5, 60, 40])
    return {name: str(folder / name) for name in ("a", "b")}


def make_config(paths: dict[str, str], replicas: int = 1, micro_batch_size: int = 4, extra: str = "") -> Config:
    line = (
        f"--batch-size {micro_batch_size} --gas {BATCH // (replicas * micro_batch_size)} --seq-length {SEQ} --seed 11 "
        f"--train-iters {STEPS} --eval-iters 2 --eval-interval 4 --data-order megatron --split 8,2 {extra}"
    )
    return parse(["--data-path", BLEND.format(**paths), *line.split()], world_size=replicas, env={})


def make_world(rank: int = 0, replicas: int = 1) -> World:
    """Return the world as one replica sees it; nothing here communicates."""
    grid = replace(single_grid(), data=Group(tuple(range(replicas)), rank))
    return World("cpu", torch.device("cpu"), grid, rank)


def make_run_data(config: Config, replicas: int = 1) -> RunData:
    settings = config.data
    paths = BlendPaths(
        data_path=settings.data_path, split=settings.split, order=settings.data_order,
        surplus=settings.mid_level_dataset_surplus,
    )  # fmt: skip
    train, valid, _ = build_train_valid_test(
        paths, seq_length=SEQ, seed=config.run.seed, vocab_size=50_000, needed=(True, True, False),
        num_samples=num_samples_of_splits(config, make_world(0, replicas)),
    )  # fmt: skip
    assert train is not None and valid is not None
    return RunData({"train": train, "valid": valid}, train.fingerprint, train.order)


def replica_samples(config: Config, data: RunData, rank: int, replicas: int, consumed: int, steps: int) -> np.ndarray:
    """Return the tokens that a replica reads, [steps, micro-batches, b, L + 1]."""
    batches = data.batches("train", config, make_world(rank, replicas), consumed)
    assert batches is not None
    with batches:
        texts = [next(batches)["text"] for _ in range(steps * config.batch.gas)]
    return torch.stack(texts).view(steps, config.batch.gas, config.batch.batch_size, -1).numpy()


def sampler_indices(consumed: int, total: int, micro_batch_size: int, rank: int, replicas: int) -> list[list[int]]:
    """Return the samples of each micro-batch of a replica.

    The arithmetic of ``MegatronPretrainingSampler`` (megatron/training/datasets/data_samplers.py of Megatron-LM).
    """
    stride = micro_batch_size * replicas
    starts = range(consumed, total - stride + 1, stride)
    return [[start + rank * micro_batch_size + i for i in range(micro_batch_size)] for start in starts]


@pytest.mark.parametrize(("replicas", "micro_batch_size"), [(1, 4), (2, 2), (4, 1), (2, 8)])
def test_each_replica_reads_the_samples_of_megatrons_sampler(
    replicas: int, micro_batch_size: int, corpora: dict[str, str]
) -> None:
    """The order is the same for every number of replicas, and a resumed run continues after the consumed samples."""
    config = make_config(corpora, replicas, micro_batch_size)
    data = make_run_data(config, replicas)
    expected = make_run_data(make_config(corpora)).datasets["train"]
    for consumed, steps in ((0, STEPS), (5 * BATCH, 4)):
        for rank in range(replicas):
            indices = sampler_indices(consumed, STEPS * BATCH, micro_batch_size, rank, replicas)
            texts = replica_samples(config, data, rank, replicas, consumed, steps)
            assert np.array_equal(
                texts.reshape(-1, micro_batch_size, SEQ + 1), [[expected[i] for i in row] for row in indices]
            )
    step = StepSamples(1, 0, BATCH, micro_batch_size, replicas, is_interleaved=True)
    last = sampler_indices(0, BATCH, micro_batch_size, replicas - 1, replicas)[0]
    assert str(last[0]) in step.micro_batch_text(replicas - 1, 0)


def test_replicas_take_turns_when_micro_batches_do_not_divide_evenly() -> None:
    shares = [share_of(7, 3, replica, is_interleaved=True) for replica in range(3)]
    indices = [[share.index_in_step(i) for i in range(share.num_micro_batches)] for share in shares]
    assert indices == [[0, 3, 6], [1, 4], [2, 5]]


def test_validation_continues_after_the_previous_validation(corpora: dict[str, str]) -> None:
    config = make_config(corpora)
    samples = num_samples_of_splits(config, make_world())
    assert samples == [STEPS * BATCH, 3 * 2 * BATCH, 0]  # 9 // 4 + 1 validations of two batches, as in Megatron
    firsts = [first_validation_sample(config, step, BATCH) for step in (0, 4, 8, 9, 13)]
    assert firsts == [0, 0, 2 * BATCH, 4 * BATCH, 0]
    native = make_config(corpora, extra="--data-order native")
    assert [first_validation_sample(native, step, BATCH) for step in (4, 8)] == [0, 0]
    valid = make_run_data(config).datasets["valid"]
    batches = make_run_data(config).batches("valid", config, make_world(), firsts[2])
    assert batches is not None
    texts = torch.cat([next(batches)["text"] for _ in range(config.batch.gas)]).numpy()
    assert np.array_equal(texts, [valid[firsts[2] + i] for i in range(BATCH)])


def resume(data: RunData, saved: RunData, consumed: int, saved_config: Config | None = None, **options: Any) -> None:
    state = json.loads(json.dumps(saved.order.state(consumed)))
    metadata = {"data_order": state, "data_fingerprint": "x", "progress": {"samples_consumed": consumed}}
    if saved_config is not None:
        metadata["config"] = saved_config.to_dict()
    data.use_order(resume_order(data, metadata, **{"allow_change": False, **options}))


def test_resume_with_more_replicas_keeps_the_order(corpora: dict[str, str]) -> None:
    data, resumed = make_run_data(make_config(corpora)), make_run_data(make_config(corpora, 4, 2), 4)
    resume(resumed, data, 5 * BATCH)
    assert all(np.array_equal(data.datasets["train"][i], resumed.datasets["train"][i]) for i in range(STEPS * BATCH))


def test_resume_in_another_order_is_an_error_with_a_fix(corpora: dict[str, str]) -> None:
    config, native = make_config(corpora), make_config(corpora, extra="--data-order native")
    with pytest.raises(CheckpointError, match=r"--data-order was native, now megatron.*--allow-data-change"):
        resume(make_run_data(config), make_run_data(native), 32, native, config=config)
    with pytest.raises(CheckpointError, match=r"--data-order was megatron, now native.*--allow-data-change"):
        resume(make_run_data(native), make_run_data(config), 32, config, config=native)
    longer = make_config(corpora, extra="--train-iters 30")
    with pytest.raises(CheckpointError, match=f"--train-samples {STEPS * BATCH} restores it"):
        resume(make_run_data(longer), make_run_data(config), 32, config, config=longer)
    data = make_run_data(longer)
    resume(data, make_run_data(config), 32, config, config=longer, allow_change=True)
    assert np.array_equal(data.datasets["train"][32], make_run_data(longer).datasets["train"][32])


def test_sample_after_the_run_is_an_error_when_it_is_used(corpora: dict[str, str]) -> None:
    """Workers and object stores read ahead of the run; that must not fail."""
    config = make_config(corpora)
    data = make_run_data(config)
    batches = data.batches("train", config, make_world(), (STEPS - 1) * BATCH)
    assert batches is not None
    for _ in range(config.batch.gas):
        next(batches)
    with pytest.raises(SampleError, match=f"--train-samples {STEPS * BATCH} to end the run there"):
        for _ in range(2):
            next(batches)


@pytest.mark.parametrize(
    "flags",
    [
        "--packing best-fit",
        "--fim-rate 0.5",
        "--split-by hash",
        "--mixture-schedule 99:1_0",
        "--dataloader-type cyclic",
    ],
)
def test_settings_that_megatron_does_not_have_are_rejected(flags: str, corpora: dict[str, str]) -> None:
    flag = flags.split()[0]
    with pytest.raises(ConfigError, match=rf"--data-order megatron .*{flag}.*--data-order native"):
        argv = [word.replace("_", " ") for word in flags.split()]
        parse(["--data-path", BLEND.format(**corpora), "--data-order", "megatron", *argv], world_size=1, env={})


def test_paths_without_weights_are_rejected(corpora: dict[str, str]) -> None:
    argv = ["--data-path", corpora["a"], corpora["b"], "--data-order", "megatron"]
    with pytest.raises(ConfigError, match="needs a weight before each path"):
        parse(argv, world_size=1, env={})


def test_corpora_that_megatron_rejects_are_errors(corpora: dict[str, str], tmp_path: Path) -> None:
    def build(path: str, **options: Any) -> None:
        values = {"num_samples": [9, 9, 9], "seq_length": SEQ, "seed": 1, "vocab_size": 70_000, **options}
        build_train_valid_test(BlendPaths(data_path=path, split="8,1,1", order="megatron"), **values)

    write_megatron_files(tmp_path / "sentences", [9, 9, 30], [0, 2, 3])
    write_token_files(tmp_path / "empty", np.array([9] * 9 + [0]))
    with pytest.raises(DataError, match="weights above 0, got 0 for"):
        build(f"1 {corpora['a']} 0 {corpora['b']}")
    with pytest.raises(DataError, match="3 sequences in 2 documents"):
        build(str(tmp_path / "sentences"))
    with pytest.raises(DataError, match="test split must have at least one token"):
        build(str(tmp_path / "empty"))
    with pytest.raises(DataError, match="num_samples=train_val_test_num_samples"):
        build(corpora["a"], num_samples=None)
