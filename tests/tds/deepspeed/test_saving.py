"""Checkpoints in DeepSpeed's layout: its engine and ours read each other's, and so does any number of stages."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from torch import nn

import tds
from tds.deepspeed.checkpointing import CheckpointError
from tds.deepspeed.module import layer_numbers
from tds.pipe import LayerSpec, TiedLayerSpec
from tests.helpers.harness import GROUP_TIMEOUT_S, run_ranks
from tests.helpers.toys import Toy, _share_groups, preload_zero

ENGINES = {"stock": deepspeed.initialize, "ours": tds.initialize}
TOY = Toy("tied", layers=6, dtype=torch.float32)
BF16 = {
    "bf16": {"enabled": True},
    "communication_data_type": "fp32",
    "data_types": {"grad_accum_dtype": "fp32"},
    "zero_optimization": {"stage": 1},
    "zero_allow_untested_optimizer": True,
}


class Half(Toy):
    """A chain of layers that is fed in bf16."""

    def batch(self, index: int, wide_rows: int | None = None) -> tuple[Any, Any]:
        x, labels = super().batch(index, wide_rows)
        return x.bfloat16(), labels


HALF = Half(layers=6, dtype=torch.float32, config=BF16)


def _engine(name: str, num_stages: int, toy: Toy = TOY, specs: Any = None, **options: Any) -> Any:
    tds.init_distributed("gloo", verbose=False)
    _share_groups()
    kind = deepspeed.PipelineModule if name == "stock" else tds.PipelineModule
    options = {"partition_method": "uniform", **options}
    module = kind(specs or toy.specs(), num_stages=num_stages, loss_fn=toy.loss_fn, **options)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.02)
    config = {"train_micro_batch_size_per_gpu": toy.rows, "gradient_accumulation_steps": toy.micro_batches,
              "gradient_clipping": 0.0, **toy.config}  # fmt: skip
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    return ENGINES[name](model=module, optimizer=optimizer, lr_scheduler=scheduler, config=config)[0]


def _steps(engine: Any, first: int, number: int, toy: Toy = TOY) -> list[float]:
    losses = []
    for step in range(first, first + number):
        replica = engine.grid.get_data_parallel_rank()
        batches = [toy.batch(100 * step + 10 * replica + i) for i in range(toy.micro_batches)]
        losses.append(float(engine.train_batch(iter(batches))))
    return losses


def _weights(engine: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in engine.module.named_parameters()}


def _continued(rank: int, place: str, toy: Toy, num_stages: int, pairs: list[tuple[str, str]]) -> list[Any]:
    """Four steps at once, then for each pair two steps, a checkpoint, and two steps of another engine."""
    straight = _engine("stock", num_stages, toy)
    results: list[Any] = [(_steps(straight, 0, 4, toy)[2:], _weights(straight), straight.get_lr())]
    for saver, loader in pairs:
        folder = f"{place}/{saver}-{loader}"
        engine = _engine(saver, num_stages, toy)
        _steps(engine, 0, 2, toy)
        assert engine.save_checkpoint(folder, client_state={"seen": 24})
        other = _engine(loader, num_stages, toy)
        path, state = other.load_checkpoint(folder)
        assert path.startswith(f"{folder}/global_step2/mp_rank_") and state["seen"] == 24
        assert (other.global_steps, other.global_samples, other.skipped_steps) == (2, 2 * other.train_batch_size(), 0)
        results.append((_steps(other, 2, 2, toy), _weights(other), other.get_lr()))
    return results


def _check_continued(results: list[list[Any]]) -> None:
    for straight, *others in results:
        for losses, weights, rate in others:
            assert losses == straight[0] and rate == straight[2]
            assert all(torch.equal(weights[name], wanted) for name, wanted in straight[1].items())


PAIRS = [("ours", "ours"), ("ours", "stock"), ("stock", "ours")]


def test_a_resumed_run_equals_one_that_never_stopped_in_either_engine(tmp_path: Path) -> None:
    _check_continued(run_ranks(2, _continued, str(tmp_path), TOY, 2, PAIRS))
    names = [sorted(os.listdir(tmp_path / f"{pair}" / "global_step2")) for pair in ("ours-ours", "stock-ours")]
    assert names[0] == names[1]
    assert (tmp_path / "ours-ours" / "latest").read_text() == "global_step2"


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_bf16_with_zero_1_resumes_in_either_engine(tmp_path: Path, ranks: int) -> None:
    preload_zero()
    _check_continued(run_ranks(ranks, _continued, str(tmp_path), HALF, 2, PAIRS[1:]))


def _save(rank: int, place: str, name: str, num_stages: int, toy: Toy) -> dict[str, torch.Tensor]:
    engine = _engine(name, num_stages, toy)
    _steps(engine, 0, 1, toy)
    engine.save_checkpoint(place, tag=7)
    return _weights(engine)


def _load_elsewhere(rank: int, place: str, num_stages: int, toy: Toy, options: dict[str, Any]) -> Any:
    engine = _engine("ours", num_stages, toy, **options)
    before = _weights(engine)
    with pytest.raises(CheckpointError) as raised:
        engine.load_checkpoint(place)
    assert all(torch.equal(weight, before[name]) for name, weight in _weights(engine).items())
    path, _ = engine.load_checkpoint(place, load_optimizer_states=False)
    loaded = _weights(engine)
    _steps(engine, 1, 1, toy)
    moved = sum(float((weight - loaded[name]).abs().sum()) for name, weight in _weights(engine).items())
    return str(raised.value), path, loaded, (engine.global_steps, engine.get_lr()), moved


@pytest.mark.parametrize(
    ("toy", "saver"),
    [pytest.param(TOY, "stock", marks=pytest.mark.slow), (TOY, "ours"),
     pytest.param(HALF, "stock", marks=pytest.mark.slow)],
    ids=["fp32 tied of stock", "fp32 tied of ours", "bf16 zero-1"],
)  # fmt: skip
def test_weights_load_on_another_number_of_stages_and_optimizer_states_do_not(
    tmp_path: Path, toy: Toy, saver: str
) -> None:
    preload_zero()
    saved: dict[str, torch.Tensor] = {}
    for weights in run_ranks(2, _save, str(tmp_path), saver, 2, toy):
        saved |= weights
    layouts: list[tuple[int, int, Any]] = [(2, 2, {"partition_method": [0, 2, 6]}), (2, 1, {}), (3, 3, {})]
    for ranks, num_stages, options in layouts[: 2 if toy is HALF else 3]:
        seen: set[str] = set()
        for message, path, loaded, state, moved in run_ranks(
            ranks, _load_elsewhere, str(tmp_path), num_stages, toy, options
        ):
            assert "Pass load_optimizer_states=False" in message, message
            assert path is not None and state == (2, [0.005]) and moved > 0
            assert all(torch.equal(saved[name], weight) for name, weight in loaded.items())
            seen |= set(loaded)
        assert seen == set(saved)


class Scaled(nn.Module):
    """A table that is tied, with a bias that is not."""

    def __init__(self, size: int, wide: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size, wide))
        self.bias = nn.Parameter(torch.randn(size))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(ids, self.weight)


def _biased(tables: Scaled, x: torch.Tensor) -> torch.Tensor:
    return x @ tables.weight.t() + tables.bias


def _looked_up(tables: Scaled, ids: torch.Tensor) -> torch.Tensor:
    return tables(ids)


def _tied_rest(rank: int, place: str, specs: list[Any], num_stages: int, saves: bool) -> list[torch.Tensor]:
    torch.manual_seed(10 * num_stages + saves)
    engine = _engine("ours", num_stages, TOY, specs)
    if saves:
        torch.nn.init.normal_(engine.module.tied_modules["t"].bias, generator=torch.Generator().manual_seed(rank))
        engine.save_checkpoint(place)
    else:
        engine.load_checkpoint(place, load_optimizer_states=False)
    return [p.detach().clone() for p in engine.module.tied_modules["t"].parameters()]


@pytest.mark.parametrize(
    "first", [None, pytest.param(_looked_up, marks=pytest.mark.slow)], ids=["a layer first", "functions only"]
)
def test_what_a_tied_module_holds_beyond_its_tied_weight_comes_back_too(tmp_path: Path, first: Any) -> None:
    specs = [TiedLayerSpec("t", Scaled, 11, 6, forward_fn=first), LayerSpec(nn.Linear, 6, 6),
             TiedLayerSpec("t", Scaled, 11, 6, forward_fn=_biased)]  # fmt: skip
    saved = run_ranks(2, _tied_rest, str(tmp_path), specs, 2, True)
    assert not torch.equal(saved[0][1], saved[1][1])
    for again, wanted in zip(run_ranks(2, _tied_rest, str(tmp_path), specs, 2, False), saved, strict=True):
        assert all(torch.equal(one, two) for one, two in zip(again, wanted, strict=True))
    whole = run_ranks(1, _tied_rest, str(tmp_path), specs, 1, False)[0]
    assert torch.equal(whole[0], saved[0][0]) and torch.equal(whole[1], saved[0][1])


def _broken(rank: int, place: str) -> list[str]:
    engine = _engine("ours", 2)
    messages = []
    for tag in ("cut", "gone", "empty", "other", None):
        with pytest.raises(CheckpointError) as raised:
            engine.load_checkpoint(place, tag, load_optimizer_states=False)
        messages.append(str(raised.value))
    with pytest.raises(ValueError, match="custom_load_fn"):
        engine.load_checkpoint(place, "good", custom_load_fn=print)
    assert engine.load_checkpoint(f"{place}/nowhere") == (None, None)
    engine.load_checkpoint(place, "good", load_module_only=True)
    assert engine.global_steps == 0 and set(engine.module_state_dict()) == set(engine.module.state_dict())
    return messages


def test_a_damaged_checkpoint_stops_every_rank_with_the_name_of_the_file(tmp_path: Path) -> None:
    run_ranks(2, _save, str(tmp_path), "ours", 2, TOY)
    good = (tmp_path / "7").rename(tmp_path / "good")
    for name in ("cut", "gone", "other"):
        shutil.copytree(good, tmp_path / name)
    os.truncate(tmp_path / "cut" / "layer_04-model_states.pt", 100)
    os.remove(tmp_path / "gone" / "layer_01-model_states.pt")
    shutil.copy(good / "layer_00-model_states.pt", tmp_path / "other" / "layer_04-model_states.pt")
    first, second = run_ranks(2, _broken, str(tmp_path))
    assert first == second
    assert "layer_04-model_states.pt cannot be loaded" in first[0] and "(rank 1)" in first[0]
    assert "got no" in first[1] and "layer_01" in first[1] and "(rank 0)" in first[1]
    assert "got none in" in first[2] and "empty" in first[2]
    assert "layer_04" in first[3] and "Missing key" in first[3]
    assert "got none in" in first[4]


def _seen_otherwise(rank: int, place: str) -> list[tuple[str, float]]:
    """Load what rank 1 alone finds damaged or sees otherwise; return the errors and the seconds until they came."""
    engine = _engine("ours", 2)
    messages = []
    for name in ("torn", f"rank{rank}", f"other{rank}"):
        began = time.monotonic()
        with pytest.raises(CheckpointError) as raised:
            engine.load_checkpoint(f"{place}/{name}")
        messages.append((str(raised.value), time.monotonic() - began))
    assert engine.load_checkpoint(f"{place}/rank0")[0] is not None, "a checkpoint that is whole loads after all that"
    return messages


def test_what_one_rank_alone_cannot_read_stops_every_rank_at_once(tmp_path: Path) -> None:
    """A cut file of optimizer states, a `latest` that one host does not see, and one that is older there."""
    run_ranks(2, _save, str(tmp_path / "rank0"), "ours", 2, TOY)
    for name in ("torn", "rank1", "other0", "other1"):
        shutil.copytree(tmp_path / "rank0", tmp_path / name)
    os.truncate(tmp_path / "torn" / "7" / "mp_rank_01_model_states.pt", 5000)
    os.remove(tmp_path / "rank1" / "latest")
    (tmp_path / "other1" / "7").rename(tmp_path / "other1" / "6")
    (tmp_path / "other1" / "latest").write_text("6")
    results = run_ranks(2, _seen_otherwise, str(tmp_path))
    for torn, gone, other in results:
        assert max(seconds for _, seconds in (torn, gone, other)) < GROUP_TIMEOUT_S / 2
        assert "/7/mp_rank_01_model_states.pt cannot be loaded: " in torn[0] and torn[0].endswith("(rank 1)"), torn
        assert 'got tag 7 on rank 0; no file "latest" on rank 1' in gone[0], gone
        assert "got tag 7 on rank 0; tag 6 on rank 1" in other[0], other


class _Cut:
    """What layer_numbers reads of a module."""

    parts, num_stages, stage_id = [0, 2, 3, 5, 9], 2, 1


def test_layers_of_chunks_are_numbered_as_in_the_whole_model() -> None:
    assert layer_numbers(_Cut()) == [2, 5, 6, 7, 8]


def _chunks(rank: int, place: str, chunks: int, loads: bool) -> Any:
    engine = _engine("ours", 2, chunks=chunks)
    if not loads:
        _steps(engine, 0, 1)
        engine.save_checkpoint(place)
        return _steps(engine, 1, 1), _weights(engine)
    message = ""
    try:
        engine.load_checkpoint(place)
    except CheckpointError as error:
        message = str(error)
        engine.load_checkpoint(place, load_optimizer_states=False)
    return message, _weights(engine), _steps(engine, 1, 1)


def test_chunks_are_saved_by_the_numbers_of_their_layers(tmp_path: Path) -> None:
    """Tied weights that meet on one stage, and two runs of layers on each."""
    saved = run_ranks(2, _chunks, str(tmp_path), 3, False)
    again = run_ranks(2, _chunks, str(tmp_path), 3, True)
    for (losses, after), (message, _, continued) in zip(saved, again, strict=True):
        assert message == "" and continued == losses and after
    names = {name for _, loaded, _ in again for name in loaded}
    weights = {name: weight for _, loaded, _ in again for name, weight in loaded.items()}
    others = run_ranks(2, _chunks, str(tmp_path), 1, True)
    assert {name for _, loaded, _ in others for name in loaded} == names
    for message, loaded, _ in others:
        assert "stage " in message and "had the layers" in message and "load_optimizer_states=False" in message
        assert all(torch.equal(weight, weights[name]) for name, weight in loaded.items())
