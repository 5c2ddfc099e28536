"""The samples of a run are a function of the seed and the samples consumed, whatever the layout; and what is told."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron.config import Config, parse
from megatron.data import BlendPaths, build_train_valid_test
from megatron.errors import CheckpointError
from megatron.mpu.groups import Group, single_grid
from megatron.training.data import RunData, num_samples_of_splits
from megatron.training.data_agreement import RankData, find_disagreement
from megatron.training.data_progress import corpus_rows, epoch_metrics, epochs_text, format_by_corpus
from megatron.training.data_resume import SavedData, data_to_save, resume_order
from megatron.training.train_progress import TrainProgress
from megatron.training.world import World
from tests.helpers.token_data import write_documents

SEQ, STEPS = 8, 9
MIXTURE = "0.7 {a} 0.3 {b}"
RAMP = "--rampup-batch-size 4 4 40"
LAYOUTS = [(d, b) for d, b in itertools.product((1, 2, 4), (1, 2, 4)) if d * b <= 4]


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Write two corpora of unlike sizes; each runs out within a few steps, so that epochs begin anew."""
    folder = tmp_path_factory.mktemp("corpora")
    write_documents(folder / "a", [30 + i % 7 for i in range(20)])
    write_documents(folder / "b", [90, 5, 60, 40])
    return {name: str(folder / name) for name in ("a", "b")}


def make_config(
    paths: dict[str, str], num_replicas: int, micro_batch_size: int, *, blend: str = MIXTURE, extra: str = ""
) -> Config:
    gas = 16 // (num_replicas * micro_batch_size)
    size_args = (
        f"--batch-size {micro_batch_size} --gas {gas} --seq-length {SEQ} --seed 11 --train-iters {STEPS} --eval-iters 0"
    )
    argv = ["--data-path", blend.format(**paths), *size_args.split(), *extra.split()]
    return parse(argv, world_size=num_replicas, env={})


def make_run_data(config: Config, schedule: str | None = None, seq_length: int = SEQ) -> RunData:
    paths = BlendPaths(data_path=config.data.data_path, split="1", mixture_schedule=schedule)
    needed = (True, False, False)
    train, _, _ = build_train_valid_test(
        paths, seq_length=seq_length, seed=config.run.seed, vocab_size=50_000, needed=needed
    )
    assert train is not None
    return RunData({"train": train}, train.fingerprint, train.order)


def make_world(rank: int, num_replicas: int) -> World:
    """Return the world as one replica sees it; nothing here communicates."""
    grid = replace(single_grid(), data=Group(tuple(range(num_replicas)), rank))
    return World("cpu", torch.device("cpu"), grid, rank)


def read_steps(
    config: Config, num_replicas: int, data: RunData, consumed: int = 0, num_steps: int = STEPS
) -> list[np.ndarray]:
    """Return the tokens of each step, those of all replicas in their order."""
    batches = [data.batches("train", config, make_world(rank, num_replicas), consumed) for rank in range(num_replicas)]
    batch_sizes, step_tokens = config.batch.batch_sizes(num_replicas), []
    for _ in range(num_steps):
        num_micro_batches = batch_sizes.at(consumed) // (config.batch.batch_size * num_replicas)
        micro_batches = [
            next(replica_batches)["text"]
            for replica_batches in batches
            if replica_batches is not None
            for _ in range(num_micro_batches)
        ]
        step_tokens.append(torch.cat(micro_batches).numpy())
        consumed += batch_sizes.at(consumed)
    for replica_batches in batches:
        assert replica_batches is not None
        with replica_batches:
            pass
    return step_tokens


def concat_steps(steps: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(steps)


@pytest.mark.parametrize("ramp", ["", RAMP], ids=["whole", "ramp"])
@pytest.mark.parametrize(
    ("blend", "schedule"),
    [("{a}", None), (MIXTURE, None), (MIXTURE, "250: 0.1 0.9; 600: 1 0")],
    ids=["one", "mixture", "schedule"],
)
def test_samples_are_equal_in_all_layouts_and_after_resharded_resume(
    blend: str, schedule: str | None, ramp: str, corpora: dict[str, str]
) -> None:
    config = make_config(corpora, 1, 1, blend=blend, extra=ramp)
    reference = read_steps(config, 1, make_run_data(config, schedule))
    assert sum(map(len, reference)) == num_samples_of_splits(config, make_world(0, 1))[0]
    for num_replicas, micro_batch_size in LAYOUTS:
        config = make_config(corpora, num_replicas, micro_batch_size, blend=blend, extra=ramp)
        for step, (expected, actual) in enumerate(
            zip(reference, read_steps(config, num_replicas, make_run_data(config, schedule)), strict=True)
        ):
            assert np.array_equal(expected, actual), (num_replicas, micro_batch_size, step)
    for num_finished, (num_replicas, micro_batch_size) in zip((1, 4, 6), ((4, 1), (1, 4), (2, 2)), strict=True):
        config = make_config(corpora, num_replicas, micro_batch_size, blend=blend, extra=ramp)
        consumed = sum(map(len, reference[:num_finished]))
        data = make_run_data(config, schedule)
        resume_data(data, make_run_data(config, schedule), consumed)
        assert np.array_equal(
            concat_steps(read_steps(config, num_replicas, data, consumed, STEPS - num_finished)),
            concat_steps(reference[num_finished:]),
        )


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_worker_prefetch_preserves_samples(corpora: dict[str, str]) -> None:
    config = make_config(corpora, 2, 2, extra=RAMP)
    prefetch_config = make_config(corpora, 2, 2, extra=f"{RAMP} --num-workers 4 --prefetch-factor 1")
    direct_steps, prefetched_steps = (
        read_steps(run_config, 2, make_run_data(run_config), num_steps=6) for run_config in (config, prefetch_config)
    )
    assert all(map(np.array_equal, direct_steps, prefetched_steps))


def test_evaluation_reads_full_batches_during_batch_size_ramp(corpora: dict[str, str]) -> None:
    config = make_config(corpora, 2, 2, extra="--rampup-batch-size 4 4 400 --num-workers 1")
    train = make_run_data(config).datasets["train"]
    data = RunData({"valid": train}, None)
    batches = [data.batches("valid", config, make_world(rank, 2)) for rank in range(2)]
    samples = torch.cat(
        [
            next(rank_batches)["text"]
            for rank_batches in batches
            if rank_batches is not None
            for _ in range(config.batch.gas)
        ]
    )
    assert np.array_equal(samples.numpy(), np.stack([train[index] for index in range(16)]))


def test_evaluation_reads_requested_length(corpora: dict[str, str]) -> None:
    """Whatever the schedule says of its own samples; unless it is told, whole ones."""
    config = make_config(corpora, 1, 2, extra="--seq-length-schedule 0:2;64:4;9999:8")
    train = make_run_data(config).datasets["train"]
    data = RunData({"valid": train, "train": train}, None)
    batches_by_length = {
        length: [next(batches)["text"] for _ in range(12)]
        for length in (2, 4, 8, None)
        if (batches := data.batches("valid", config, make_world(0, 1), length=length)) is not None
    }
    for length, micro_batches in batches_by_length.items():
        assert {micro_batch.shape for micro_batch in micro_batches} == {
            (2 * SEQ // (length or SEQ), (length or SEQ) + 1)
        }
    assert torch.equal(torch.cat(batches_by_length[8]), torch.cat(batches_by_length[None]))
    train_batches = data.batches("train", config, make_world(0, 1))
    assert train_batches is not None
    assert [next(train_batches)["text"].shape[1] for _ in range(12)] == [3] * 8 + [5] * 4, "16 samples a step"


def resume_data(data: RunData, previous: RunData, consumed: int, *, allow_change: bool = False) -> None:
    """Let ``data`` go on where a run on ``previous`` was saved."""
    saved = json.loads(json.dumps(previous.order.state(consumed)))
    state = {"data_order": saved, "data_fingerprint": "x", "progress": {"samples_consumed": consumed}}
    data.use_order(resume_order(data, state, allow_change=allow_change))


def locate_samples(data: RunData, start: int, stop: int) -> list[tuple[int, int]]:
    return [data.order.locate(index) for index in range(start, stop)]


def test_blend_weight_change_repeats_no_samples(corpora: dict[str, str]) -> None:
    first = make_run_data(make_config(corpora, 1, 4))
    reweighted = make_run_data(make_config(corpora, 1, 4, blend="0.2 {b} 0.8 {a}"))
    resume_data(reweighted, first, 48)
    names = [[corpus.name for corpus in run_data.order.corpora] for run_data in (first, reweighted)]
    before = [(names[0][corpus], sample_idx) for corpus, sample_idx in locate_samples(first, 0, 48)]
    after = [(names[1][corpus], sample_idx) for corpus, sample_idx in locate_samples(reweighted, 48, 144)]
    for name in names[0]:
        sample_indices = [sample_idx for corpus, sample_idx in before + after if corpus == name]
        assert sample_indices == list(range(len(sample_indices))), name
    shares = [sum(corpus == "b" for corpus, _ in samples) / len(samples) for samples in (before, after)]
    assert shares == pytest.approx([0.3, 0.2], abs=0.02)
    assert np.array_equal(
        reweighted.datasets["train"][50], reweighted.datasets["train"].parts[after[2][0]][after[2][1]]
    )


def test_changed_corpus_raises_unless_data_change_is_allowed(corpora: dict[str, str], tmp_path: Path) -> None:
    write_documents(tmp_path / "b", [90, 5, 60, 41])
    first = make_run_data(make_config(corpora, 1, 4))
    changed = make_run_data(make_config({"a": corpora["a"], "b": str(tmp_path / "b")}, 1, 4))
    before, after = (next(c for c in run_data.order.corpora if c.name == "b") for run_data in (first, changed))
    with pytest.raises(CheckpointError, match="--allow-data-change") as raised:
        resume_data(changed, first, 48)
    expected_text = f"corpus b (14 samples read) had {before.num_tokens:,} tokens, now {after.num_tokens:,}"
    assert expected_text in str(raised.value) and before.fingerprint not in str(raised.value)
    resume_data(changed, first, 48, allow_change=True)
    assert changed.order.cursors(48) == {"a": first.order.cursors(48)["a"], "b": 0}


@pytest.mark.parametrize(
    "length, expected_cursors, position", [(4, [68, 28], 96), (16, [17, 7], 24), (6, [46, 19], 64)]
)
def test_new_length_resumes_each_corpus_after_its_consumed_tokens(
    length: int, expected_cursors: list[int], position: int, corpora: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """48 samples of 8 tokens were read, 34 of one corpus and 14 of the other."""
    lines: list[str] = []
    monkeypatch.setattr("megatron.training.data_resume.log.info", lines.append)
    first = make_run_data(make_config(corpora, 1, 4))
    assert first.order.cursors(48) == {"a": 34, "b": 14}
    config = make_config(corpora, 1, 4, extra=f"--seq-length {length}")
    progress = TrainProgress(6, 6, 48).to_metadata(SEQ)
    assert progress["tokens_consumed"] == 48 * SEQ
    state = {"data_order": first.order.state(48), "data_fingerprint": "x", "progress": progress}
    resumed = make_run_data(config, seq_length=length)
    with pytest.raises(CheckpointError, match="--allow-data-change"):
        resume_order(resumed, state, length, allow_change=False)
    resumed.use_order(resume_order(resumed, state, length, allow_change=True))
    assert TrainProgress.from_metadata(state, length) == TrainProgress(6, 6, position)
    assert list(resumed.order.cursors(position).values()) == expected_cursors
    samples = [resumed.order.locate(index) for index in range(position, position + 20)]
    for corpus_idx, start in enumerate(expected_cursors):
        sample_indices = [sample_idx for idx, sample_idx in samples if idx == corpus_idx]
        assert sample_indices == list(range(start, start + len(sample_indices)))
    assert f"continuing at sample {position}, the first that begins at or after the 384 consumed tokens" in "".join(
        lines
    )
    same_length_progress = TrainProgress.from_metadata(state, SEQ)
    assert same_length_progress == TrainProgress(6, 6, 48), "of the same length it is the same sample"


def test_new_length_resumes_single_corpus_after_consumed_tokens(corpora: dict[str, str]) -> None:
    first, resumed = (
        make_run_data(make_config(corpora, 1, 4, blend="{a}", extra=f"--seq-length {length}"), seq_length=length)
        for length in (SEQ, 2 * SEQ)
    )
    state = {
        "data_order": first.order.state(5),
        "data_fingerprint": "x",
        "progress": TrainProgress(1, 1, 5).to_metadata(SEQ),
    }
    order = resume_order(resumed, state, 2 * SEQ, allow_change=True)
    assert order is not None and [order.locate(index) for index in (3, 4)] == [(0, 3), (0, 4)]
    saved = json.loads(json.dumps(order.state(3)))
    progress = TrainProgress(2, 2, 3).to_metadata(2 * SEQ)
    second_order = resume_order(
        resumed, {**state, "data_order": saved, "progress": progress}, 2 * SEQ, allow_change=False
    )
    assert second_order is not None and second_order.locate(3) == (0, 3)


def test_checkpoint_with_only_fingerprint_resumes(corpora: dict[str, str]) -> None:
    data = make_run_data(make_config(corpora, 1, 4, blend="{a}"))
    state = {"data_fingerprint": data.fingerprint, "progress": {"samples_consumed": 32}}
    order = resume_order(data, state, allow_change=False)
    assert [order.locate(i) for i in (0, 32, 99)] == [(0, 0), (0, 32), (0, 99)]
    with pytest.raises(CheckpointError):
        resume_order(data, state | {"data_fingerprint": "other"}, allow_change=False)


def test_checkpoint_without_data_identity_is_rejected_unless_allowed(
    corpora: dict[str, str],
) -> None:
    data = make_run_data(make_config(corpora, 1, 4, blend="{a}"))
    unidentified_state: dict[str, Any] = {"data_fingerprint": None, "progress": {"samples_consumed": 32}}
    with pytest.raises(CheckpointError, match=r"does not identify the data of its 32 .*--allow-data-change"):
        resume_order(data, unidentified_state, allow_change=False)
    assert resume_order(data, unidentified_state, allow_change=True) is data.order
    fresh_state = unidentified_state | {"progress": {"samples_consumed": 0}}
    assert resume_order(data, fresh_state, allow_change=False) is data.order
    custom_data: Any = RunData({"train": SimpleNamespace()}, None)
    assert resume_order(custom_data, unidentified_state, allow_change=False) is None


def test_checkpoint_of_megatron_needs_its_order_or_flag(corpora: dict[str, str]) -> None:
    data = make_run_data(make_config(corpora, 1, 4, blend="{a}"))
    state: dict[str, Any] = {"data_fingerprint": None, "progress": {"samples_consumed": 32}, "format": "torch_dist"}
    native, megatron = (SimpleNamespace(data=SimpleNamespace(has_megatron_order=has)) for has in (False, True))
    with pytest.raises(CheckpointError, match=r"does not identify the data of its 32 .*--allow-data-change"):
        resume_order(data, state, allow_change=False, config=native)  # type: ignore[arg-type]
    assert resume_order(data, state, allow_change=False, config=megatron) is data.order  # type: ignore[arg-type]
    state["format"] = None
    with pytest.raises(CheckpointError):
        resume_order(data, state, allow_change=False, config=megatron)  # type: ignore[arg-type]


def test_run_without_training_data_preserves_saved_data_state(corpora: dict[str, str]) -> None:
    data, loaded = make_run_data(make_config(corpora, 1, 4)), SavedData("print", {"format": 1})
    assert data_to_save(RunData({}, None, has_training=False), 16, loaded) == loaded
    assert data_to_save(RunData({}, None), 16, loaded) == SavedData()
    assert data_to_save(data, 16, loaded) == (data.fingerprint, data.order.state(16))


def test_numbers_text_lists_largest_corpora_first() -> None:
    numbers = {f"c{i}": i / 8 for i in range(9)}
    assert format_by_corpus(numbers, ".3g") == "c8 1, c7 0.875, c6 0.75, c5 0.625 and 5 more"
    assert format_by_corpus(numbers | {"c3": float("nan")}, ".1f").startswith("c3 nan, c8 1.0, ")
    few = dict(list(numbers.items())[:6])
    assert format_by_corpus(few, ".3g") == "c0 0, c1 0.125, c2 0.25, c3 0.375, c4 0.5, c5 0.625"


def make_rank_data(*datasets: Any) -> list[RankData]:
    return [RankData.from_datasets({"train": dataset}, True, None) for dataset in datasets]


def test_disagreement_names_ranks_and_fingerprints(corpora: dict[str, str]) -> None:
    single, blended, reweighted = (
        make_run_data(make_config(corpora, 1, 4, blend=blend)).datasets["train"]
        for blend in ("{a}", MIXTURE, "0.6 {a} 0.4 {b}")
    )
    assert find_disagreement([*make_rank_data(blended, blended), RankData.from_datasets({}, False, None)]) is None
    text = find_disagreement(make_rank_data(blended, single, single, blended, single)) or ""
    assert f"fingerprint {blended.fingerprint} and order " in text and " on ranks 0, 3; " in text
    assert f"fingerprint {single.fingerprint} and order " in text and " on ranks 1-2, 4. Use the same files" in text
    assert "rank 1." in (find_disagreement(make_rank_data(blended, reweighted)) or ""), "weights count too"
    assert find_disagreement(make_rank_data(SimpleNamespace(), SimpleNamespace())) is None
    assert "none on rank 1." in (
        find_disagreement([*make_rank_data(single), RankData.from_datasets({}, True, None)]) or ""
    )


def test_custom_datasets_must_have_equal_length_on_all_ranks() -> None:
    """One that ends earlier would begin anew earlier, and the stages would see different samples."""
    assert find_disagreement(make_rank_data([1, 2], [3, 4])) is None
    text = find_disagreement(make_rank_data([1, 2], [1, 2], [1, 2, 3])) or ""
    assert "2 samples and fingerprint None on ranks 0-1; 3 samples and fingerprint None on rank 2. Use the same" in text


def test_custom_dataset_may_have_attributes_with_library_names(corpora: dict[str, str]) -> None:
    lookalike = SimpleNamespace(
        order=np.arange(3), parts=["a", "b"], fingerprint=lambda: 1, samples_per_epoch=lambda: 2
    )
    described = RankData.from_datasets({"train": lookalike, "valid": lookalike}, True, None)
    assert (described.fingerprint, described.order, dict(described.corpora)) == (None, None, {})
    data: Any = RunData({"train": lookalike}, None)
    assert dict(corpus_rows(data, 5)) == {}
    blended = make_run_data(make_config(corpora, 1, 4)).datasets["train"]
    forwarding_dataset: Any = SimpleNamespace(
        order=blended.order, parts=blended.parts, use_order=blended.use_order, fingerprint="x"
    )
    assert RankData.from_datasets({"train": forwarding_dataset}, True, None).order is blended.order


def test_epochs_are_reported_per_corpus(corpora: dict[str, str]) -> None:
    single, blended = make_run_data(make_config(corpora, 1, 4, blend="{a}")), make_run_data(make_config(corpora, 1, 4))
    per_epoch = single.order.corpora[0].samples_per_epoch
    assert epochs_text(single, per_epoch // 2) == "epoch 0.5"
    assert epoch_metrics(single, per_epoch) == {"epoch": 1.0}
    epochs = blended.order.epochs(100)
    assert epochs_text(blended, 100) == f"epochs a {epochs['a']:.3g}, b {epochs['b']:.3g}"
    assert epoch_metrics(blended, 100) == {"epochs": epochs}
    rows = dict(corpus_rows(blended, 100))
    assert rows["epochs"] == f"a {epochs['a']:.3g}, b {epochs['b']:.3g} in the 100 samples of the run"
    assert rows["samples"].startswith(f"a {per_epoch}, b ")


def test_custom_data_needs_no_order() -> None:
    custom_data: Any = RunData({"train": SimpleNamespace(samples_per_epoch=7)}, None)
    assert epochs_text(custom_data, 5) == "" and epoch_metrics(custom_data, 5) == {}
    assert dict(corpus_rows(custom_data, 5)) == {"samples": "7 per epoch"}
    assert dict(corpus_rows(RunData({}, None), 5)) == {}
    assert resume_order(custom_data, {"data_fingerprint": "x", "progress": {}}, allow_change=False) is None
