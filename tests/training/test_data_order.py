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
from megatron.training.data import RunData, samples_wanted
from megatron.training.data_agreement import RankData, disagreement
from megatron.training.data_progress import epochs_text, epochs_values, numbers_text, start_rows
from megatron.training.data_resume import SavedData, data_to_save, resume_order
from megatron.training.train_progress import TrainProgress
from megatron.training.world import World
from tests.helpers.token_data import write

SEQ, STEPS = 8, 9
MIXTURE = "0.7 {a} 0.3 {b}"
RAMP = "--rampup-batch-size 4 4 40"
LAYOUTS = [(d, b) for d, b in itertools.product((1, 2, 4), (1, 2, 4)) if d * b <= 4]


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Write two corpora of unlike sizes; each runs out within a few steps, so that epochs begin anew."""
    folder = tmp_path_factory.mktemp("corpora")
    write(folder / "a", [30 + i % 7 for i in range(20)])
    write(folder / "b", [90, 5, 60, 40])
    return {name: str(folder / name) for name in ("a", "b")}


def config_of(paths: dict[str, str], replicas: int, micro: int, *, mixed: str = MIXTURE, extra: str = "") -> Config:
    gas = 16 // (replicas * micro)
    sizes = f"--batch-size {micro} --gas {gas} --seq-length {SEQ} --seed 11 --train-iters {STEPS} --eval-iters 0"
    words = ["--data-path", mixed.format(**paths), *sizes.split(), *extra.split()]
    return parse(words, world_size=replicas, env={})


def data_of(config: Config, schedule: str | None = None, length: int = SEQ) -> RunData:
    paths = BlendPaths(data_path=config.data.data_path, split="1", mixture_schedule=schedule)
    needed = (True, False, False)
    train, _, _ = build_train_valid_test(
        paths, seq_length=length, seed=config.run.seed, vocab_size=50_000, needed=needed
    )
    assert train is not None
    return RunData({"train": train}, train.fingerprint, train.order)


def world_of(rank: int, replicas: int) -> World:
    """Return the world as one replica sees it; nothing here communicates."""
    grid = replace(single_grid(), data=Group(tuple(range(replicas)), rank))
    return World("cpu", torch.device("cpu"), grid, rank)


def steps_of(config: Config, replicas: int, data: RunData, consumed: int = 0, steps: int = STEPS) -> list[np.ndarray]:
    """Return the tokens of each step, those of all replicas in their order."""
    batches = [data.batches("train", config, world_of(rank, replicas), consumed) for rank in range(replicas)]
    sizes, found = config.batch.sizes(replicas), []
    for _ in range(steps):
        number = sizes.at(consumed) // (config.batch.batch_size * replicas)
        parts = [next(each)["text"] for each in batches if each is not None for _ in range(number)]
        found.append(torch.cat(parts).numpy())
        consumed += sizes.at(consumed)
    for each in batches:
        assert each is not None
        with each:
            pass
    return found


def stream(steps: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(steps)


@pytest.mark.parametrize("ramp", ["", RAMP], ids=["whole", "ramp"])
@pytest.mark.parametrize(
    ("mixed", "schedule"),
    [("{a}", None), (MIXTURE, None), (MIXTURE, "250: 0.1 0.9; 600: 1 0")],
    ids=["one", "mixture", "schedule"],
)
def test_the_stream_is_the_same_in_every_layout_and_after_a_resume_in_another(
    mixed: str, schedule: str | None, ramp: str, corpora: dict[str, str]
) -> None:
    config = config_of(corpora, 1, 1, mixed=mixed, extra=ramp)
    whole = steps_of(config, 1, data_of(config, schedule))
    assert sum(map(len, whole)) == samples_wanted(config, world_of(0, 1))[0]
    for replicas, micro in LAYOUTS:
        config = config_of(corpora, replicas, micro, mixed=mixed, extra=ramp)
        for step, (wanted, got) in enumerate(
            zip(whole, steps_of(config, replicas, data_of(config, schedule)), strict=True)
        ):
            assert np.array_equal(wanted, got), (replicas, micro, step)
    for cut, (replicas, micro) in zip((1, 4, 6), ((4, 1), (1, 4), (2, 2)), strict=True):
        config = config_of(corpora, replicas, micro, mixed=mixed, extra=ramp)
        consumed = sum(map(len, whole[:cut]))
        data = data_of(config, schedule)
        go_on(data, data_of(config, schedule), consumed)
        assert np.array_equal(stream(steps_of(config, replicas, data, consumed, STEPS - cut)), stream(whole[cut:]))


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_the_stream_is_the_same_with_processes_that_read_ahead(corpora: dict[str, str]) -> None:
    config = config_of(corpora, 2, 2, extra=RAMP)
    ahead = config_of(corpora, 2, 2, extra=f"{RAMP} --num-workers 4 --prefetch-factor 1")
    here, there = (steps_of(each, 2, data_of(each), steps=6) for each in (config, ahead))
    assert all(map(np.array_equal, here, there))


def test_an_evaluation_reads_whole_batches_whatever_the_ramp(corpora: dict[str, str]) -> None:
    config = config_of(corpora, 2, 2, extra="--rampup-batch-size 4 4 400 --num-workers 1")
    train = data_of(config).datasets["train"]
    data = RunData({"valid": train}, None)
    batches = [data.batches("valid", config, world_of(rank, 2)) for rank in range(2)]
    read = torch.cat([next(each)["text"] for each in batches if each is not None for _ in range(config.batch.gas)])
    assert np.array_equal(read.numpy(), np.stack([train[index] for index in range(16)]))


def test_an_evaluation_reads_the_length_that_it_is_told(corpora: dict[str, str]) -> None:
    """Whatever the schedule says of its own samples; unless it is told, whole ones."""
    config = config_of(corpora, 1, 2, extra="--seq-length-schedule 0:2;64:4;9999:8")
    train = data_of(config).datasets["train"]
    data = RunData({"valid": train, "train": train}, None)
    found = {
        length: [next(batches)["text"] for _ in range(12)]
        for length in (2, 4, 8, None)
        if (batches := data.batches("valid", config, world_of(0, 1), length=length)) is not None
    }
    for length, read in found.items():
        assert {part.shape for part in read} == {(2 * SEQ // (length or SEQ), (length or SEQ) + 1)}
    assert torch.equal(torch.cat(found[8]), torch.cat(found[None]))
    trained = data.batches("train", config, world_of(0, 1))
    assert trained is not None
    assert [next(trained)["text"].shape[1] for _ in range(12)] == [3] * 8 + [5] * 4, "16 samples a step"


def go_on(data: RunData, before: RunData, consumed: int, *, allow_change: bool = False) -> None:
    """Let ``data`` go on where a run on ``before`` was saved."""
    saved = json.loads(json.dumps(before.order.state(consumed)))
    state = {"data_order": saved, "data_fingerprint": "x", "progress": {"samples_consumed": consumed}}
    data.use_order(resume_order(data, state, allow_change=allow_change))


def samples_read(data: RunData, start: int, stop: int) -> list[tuple[int, int]]:
    return [data.order.locate(index) for index in range(start, stop)]


def test_after_a_change_of_weights_no_corpus_repeats_what_it_gave(corpora: dict[str, str]) -> None:
    first = data_of(config_of(corpora, 1, 4))
    other = data_of(config_of(corpora, 1, 4, mixed="0.2 {b} 0.8 {a}"))
    go_on(other, first, 48)
    names = [[corpus.name for corpus in each.order.corpora] for each in (first, other)]
    before = [(names[0][corpus], place) for corpus, place in samples_read(first, 0, 48)]
    after = [(names[1][corpus], place) for corpus, place in samples_read(other, 48, 144)]
    for name in names[0]:
        places = [place for corpus, place in before + after if corpus == name]
        assert places == list(range(len(places))), name
    shares = [sum(corpus == "b" for corpus, _ in part) / len(part) for part in (before, after)]
    assert shares == pytest.approx([0.3, 0.2], abs=0.02)
    assert np.array_equal(other.datasets["train"][50], other.datasets["train"].parts[after[2][0]][after[2][1]])


def test_another_corpus_is_an_error_that_says_what_has_changed_unless_it_is_allowed(
    corpora: dict[str, str], tmp_path: Path
) -> None:
    write(tmp_path / "b", [90, 5, 60, 41])
    first = data_of(config_of(corpora, 1, 4))
    changed = data_of(config_of({"a": corpora["a"], "b": str(tmp_path / "b")}, 1, 4))
    before, now = (next(c for c in each.order.corpora if c.name == "b") for each in (first, changed))
    with pytest.raises(CheckpointError, match="--allow-data-change") as raised:
        go_on(changed, first, 48)
    said = f"corpus b (14 samples read) had {before.num_tokens:,} tokens, now {now.num_tokens:,}"
    assert said in str(raised.value) and before.fingerprint not in str(raised.value)
    go_on(changed, first, 48, allow_change=True)
    assert changed.order.cursors(48) == {"a": first.order.cursors(48)["a"], "b": 0}


@pytest.mark.parametrize("length, carried, position", [(4, [68, 28], 96), (16, [17, 7], 24), (6, [46, 19], 64)])
def test_samples_of_another_length_go_on_behind_as_many_tokens_of_each_corpus(
    length: int, carried: list[int], position: int, corpora: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """48 samples of 8 tokens were read, 34 of one corpus and 14 of the other."""
    lines: list[str] = []
    monkeypatch.setattr("megatron.training.data_resume.log.info", lines.append)
    first = data_of(config_of(corpora, 1, 4))
    assert first.order.cursors(48) == {"a": 34, "b": 14}
    config = config_of(corpora, 1, 4, extra=f"--seq-length {length}")
    progress = TrainProgress(6, 6, 48).to_metadata(SEQ)
    assert progress["tokens_consumed"] == 48 * SEQ
    state = {"data_order": first.order.state(48), "data_fingerprint": "x", "progress": progress}
    other = data_of(config, length=length)
    with pytest.raises(CheckpointError, match="--allow-data-change"):
        resume_order(other, state, length, allow_change=False)
    other.use_order(resume_order(other, state, length, allow_change=True))
    assert TrainProgress.from_metadata(state, length) == TrainProgress(6, 6, position)
    assert list(other.order.cursors(position).values()) == carried
    read = [other.order.locate(index) for index in range(position, position + 20)]
    for corpus, start in enumerate(carried):
        places = [place for number, place in read if number == corpus]
        assert places == list(range(start, start + len(places)))
    assert f"continuing at sample {position}, the first that begins at or after the 384 consumed tokens" in "".join(
        lines
    )
    same = TrainProgress.from_metadata(state, SEQ)
    assert same == TrainProgress(6, 6, 48), "of the same length it is the same sample"


def test_another_length_of_one_corpus_goes_on_behind_as_many_tokens(corpora: dict[str, str]) -> None:
    first, other = (
        data_of(config_of(corpora, 1, 4, mixed="{a}", extra=f"--seq-length {length}"), length=length)
        for length in (SEQ, 2 * SEQ)
    )
    state = {
        "data_order": first.order.state(5),
        "data_fingerprint": "x",
        "progress": TrainProgress(1, 1, 5).to_metadata(SEQ),
    }
    order = resume_order(other, state, 2 * SEQ, allow_change=True)
    assert order is not None and [order.locate(index) for index in (3, 4)] == [(0, 3), (0, 4)]
    saved = json.loads(json.dumps(order.state(3)))
    progress = TrainProgress(2, 2, 3).to_metadata(2 * SEQ)
    again = resume_order(other, {**state, "data_order": saved, "progress": progress}, 2 * SEQ, allow_change=False)
    assert again is not None and again.locate(3) == (0, 3)


def test_a_checkpoint_that_knows_a_fingerprint_only_goes_on(corpora: dict[str, str]) -> None:
    data = data_of(config_of(corpora, 1, 4, mixed="{a}"))
    state = {"data_fingerprint": data.fingerprint, "progress": {"samples_consumed": 32}}
    order = resume_order(data, state, allow_change=False)
    assert [order.locate(i) for i in (0, 32, 99)] == [(0, 0), (0, 32), (0, 99)]
    with pytest.raises(CheckpointError):
        resume_order(data, state | {"data_fingerprint": "other"}, allow_change=False)


def test_a_checkpoint_that_says_nothing_of_what_it_has_read_is_refused_unless_that_is_allowed(
    corpora: dict[str, str],
) -> None:
    data = data_of(config_of(corpora, 1, 4, mixed="{a}"))
    silent: dict[str, Any] = {"data_fingerprint": None, "progress": {"samples_consumed": 32}}
    with pytest.raises(CheckpointError, match=r"does not identify the data of its 32 .*--allow-data-change"):
        resume_order(data, silent, allow_change=False)
    assert resume_order(data, silent, allow_change=True) is data.order
    fresh = silent | {"progress": {"samples_consumed": 0}}
    assert resume_order(data, fresh, allow_change=False) is data.order
    own: Any = RunData({"train": SimpleNamespace()}, None)
    assert resume_order(own, silent, allow_change=False) is None


def test_a_run_without_training_data_hands_on_what_its_checkpoint_says_of_them(corpora: dict[str, str]) -> None:
    data, loaded = data_of(config_of(corpora, 1, 4)), SavedData("print", {"format": 1})
    assert data_to_save(RunData({}, None, has_training=False), 16, loaded) == loaded
    assert data_to_save(RunData({}, None), 16, loaded) == SavedData()
    assert data_to_save(data, 16, loaded) == (data.fingerprint, data.order.state(16))


def test_a_line_names_the_furthest_of_many_corpora() -> None:
    numbers = {f"c{i}": i / 8 for i in range(9)}
    assert numbers_text(numbers, ".3g") == "c8 1, c7 0.875, c6 0.75, c5 0.625 and 5 more"
    assert numbers_text(numbers | {"c3": float("nan")}, ".1f").startswith("c3 nan, c8 1.0, ")
    few = dict(list(numbers.items())[:6])
    assert numbers_text(few, ".3g") == "c0 0, c1 0.125, c2 0.25, c3 0.375, c4 0.5, c5 0.625"


def rank_data_of(*datasets: Any) -> list[RankData]:
    return [RankData.of({"train": dataset}, True, None) for dataset in datasets]


def test_ranks_that_read_other_data_are_named_with_both_fingerprints(corpora: dict[str, str]) -> None:
    one, other, heavier = (
        data_of(config_of(corpora, 1, 4, mixed=mixed)).datasets["train"]
        for mixed in ("{a}", MIXTURE, "0.6 {a} 0.4 {b}")
    )
    assert disagreement([*rank_data_of(other, other), RankData.of({}, False, None)]) is None
    text = disagreement(rank_data_of(other, one, one, other, one)) or ""
    assert f"fingerprint {other.fingerprint} and order " in text and " on ranks 0, 3; " in text
    assert f"fingerprint {one.fingerprint} and order " in text and " on ranks 1-2, 4. Use the same files" in text
    assert "rank 1." in (disagreement(rank_data_of(other, heavier)) or ""), "weights count too"
    assert disagreement(rank_data_of(SimpleNamespace(), SimpleNamespace())) is None
    assert "none on rank 1." in (disagreement([*rank_data_of(one), RankData.of({}, True, None)]) or "")


def test_data_sets_of_ones_own_must_be_equally_long_on_all_ranks() -> None:
    """One that ends earlier would begin anew earlier, and the stages would see different samples."""
    assert disagreement(rank_data_of([1, 2], [3, 4])) is None
    text = disagreement(rank_data_of([1, 2], [1, 2], [1, 2, 3])) or ""
    assert "2 samples and fingerprint None on ranks 0-1; 3 samples and fingerprint None on rank 2. Give every" in text


def test_a_data_set_of_ones_own_may_have_attributes_that_are_called_as_ours(corpora: dict[str, str]) -> None:
    alike = SimpleNamespace(order=np.arange(3), parts=["a", "b"], fingerprint=lambda: 1, samples_per_epoch=lambda: 2)
    described = RankData.of({"train": alike, "valid": alike}, True, None)
    assert (described.fingerprint, described.order, dict(described.corpora)) == (None, None, {})
    data: Any = RunData({"train": alike}, None)
    assert dict(start_rows(data, 5)) == {}
    mixed = data_of(config_of(corpora, 1, 4)).datasets["train"]
    passed_on: Any = SimpleNamespace(order=mixed.order, parts=mixed.parts, use_order=mixed.use_order, fingerprint="x")
    assert RankData.of({"train": passed_on}, True, None).order is mixed.order


def test_what_is_told_of_epochs(corpora: dict[str, str]) -> None:
    one, two = data_of(config_of(corpora, 1, 4, mixed="{a}")), data_of(config_of(corpora, 1, 4))
    per_epoch = one.order.corpora[0].samples_per_epoch
    assert epochs_text(one, per_epoch // 2) == "epoch 0.5"
    assert epochs_values(one, per_epoch) == {"epoch": 1.0}
    read = two.order.epochs(100)
    assert epochs_text(two, 100) == f"epochs a {read['a']:.3g}, b {read['b']:.3g}"
    assert epochs_values(two, 100) == {"epochs": read}
    rows = dict(start_rows(two, 100))
    assert rows["epochs"] == f"a {read['a']:.3g}, b {read['b']:.3g} in the 100 samples of the run"
    assert rows["samples"].startswith(f"a {per_epoch}, b ")


def test_data_of_ones_own_need_no_order() -> None:
    own: Any = RunData({"train": SimpleNamespace(samples_per_epoch=7)}, None)
    assert epochs_text(own, 5) == "" and epochs_values(own, 5) == {}
    assert dict(start_rows(own, 5)) == {"samples": "7 per epoch"}
    assert dict(start_rows(RunData({}, None), 5)) == {}
    assert resume_order(own, {"data_fingerprint": "x", "progress": {}}, allow_change=False) is None
