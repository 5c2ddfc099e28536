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
from tds.deepspeed.module import layer_indices
from tds.pipe import LayerSpec, TiedLayerSpec
from tests.helpers.harness import GROUP_TIMEOUT_S, run_ranks
from tests.helpers.toys import Toy, _share_groups, preload_zero

ENGINES = {"stock": deepspeed.initialize, "ours": tds.initialize}
TOY = Toy("tied", num_layers=6, dtype=torch.float32)
BF16 = {
    "bf16": {"enabled": True},
    "communication_data_type": "fp32",
    "data_types": {"grad_accum_dtype": "fp32"},
    "zero_optimization": {"stage": 1},
    "zero_allow_untested_optimizer": True,
}


class Bf16Toy(Toy):
    """A chain of layers that is fed in bf16."""

    def make_batch(self, idx: int, num_rows: int | None = None) -> tuple[Any, Any]:
        x, labels = super().make_batch(idx, num_rows)
        return x.bfloat16(), labels


BF16_TOY = Bf16Toy(num_layers=6, dtype=torch.float32, config=BF16)


def _engine(name: str, num_stages: int, toy: Toy = TOY, specs: Any = None, **options: Any) -> Any:
    tds.init_distributed("gloo", verbose=False)
    _share_groups()
    module_class = deepspeed.PipelineModule if name == "stock" else tds.PipelineModule
    options = {"partition_method": "uniform", **options}
    module = module_class(specs or toy.layer_specs(), num_stages=num_stages, loss_fn=toy.loss_fn, **options)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.02)
    config = {
        "train_micro_batch_size_per_gpu": toy.micro_batch_size,
        "gradient_accumulation_steps": toy.num_micro_batches,
        "gradient_clipping": 0.0,
        **toy.config,
    }
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    return ENGINES[name](model=module, optimizer=optimizer, lr_scheduler=scheduler, config=config)[0]


def _train_steps(engine: Any, first: int, num_steps: int, toy: Toy = TOY) -> list[float]:
    losses = []
    for step in range(first, first + num_steps):
        replica = engine.grid.get_data_parallel_rank()
        batches = [toy.make_batch(100 * step + 10 * replica + i) for i in range(toy.num_micro_batches)]
        losses.append(float(engine.train_batch(iter(batches))))
    return losses


def _weights(engine: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in engine.module.named_parameters()}


def _save_and_continue(rank: int, root: str, toy: Toy, num_stages: int, pairs: list[tuple[str, str]]) -> list[Any]:
    """Four steps at once, then for each pair two steps, a checkpoint, and two steps of another engine."""
    uninterrupted = _engine("stock", num_stages, toy)
    results: list[Any] = [(_train_steps(uninterrupted, 0, 4, toy)[2:], _weights(uninterrupted), uninterrupted.get_lr())]
    for saver, loader in pairs:
        folder = f"{root}/{saver}-{loader}"
        engine = _engine(saver, num_stages, toy)
        _train_steps(engine, 0, 2, toy)
        assert engine.save_checkpoint(folder, client_state={"seen": 24})
        resumed = _engine(loader, num_stages, toy)
        path, state = resumed.load_checkpoint(folder)
        assert path.startswith(f"{folder}/global_step2/mp_rank_") and state["seen"] == 24
        assert (resumed.global_steps, resumed.global_samples, resumed.skipped_steps) == (
            2,
            2 * resumed.train_batch_size(),
            0,
        )
        results.append((_train_steps(resumed, 2, 2, toy), _weights(resumed), resumed.get_lr()))
    return results


def _check_continuation(results: list[list[Any]]) -> None:
    for uninterrupted, *continuations in results:
        for losses, weights, lr in continuations:
            assert losses == uninterrupted[0] and lr == uninterrupted[2]
            assert all(torch.equal(weights[name], expected) for name, expected in uninterrupted[1].items())


PAIRS = [("ours", "ours"), ("ours", "stock"), ("stock", "ours")]


def test_resumed_run_equals_uninterrupted_run_in_both_engines(tmp_path: Path) -> None:
    _check_continuation(run_ranks(2, _save_and_continue, str(tmp_path), TOY, 2, PAIRS))
    names = [sorted(os.listdir(tmp_path / f"{pair}" / "global_step2")) for pair in ("ours-ours", "stock-ours")]
    assert names[0] == names[1]
    assert (tmp_path / "ours-ours" / "latest").read_text() == "global_step2"


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_bf16_with_zero_1_resumes_in_both_engines(tmp_path: Path, ranks: int) -> None:
    preload_zero()
    _check_continuation(run_ranks(ranks, _save_and_continue, str(tmp_path), BF16_TOY, 2, PAIRS[1:]))


def _save(rank: int, folder: str, name: str, num_stages: int, toy: Toy) -> dict[str, torch.Tensor]:
    engine = _engine(name, num_stages, toy)
    _train_steps(engine, 0, 1, toy)
    engine.save_checkpoint(folder, tag=7)
    return _weights(engine)


def _load_on_other_layout(rank: int, folder: str, num_stages: int, toy: Toy, options: dict[str, Any]) -> Any:
    engine = _engine("ours", num_stages, toy, **options)
    before = _weights(engine)
    with pytest.raises(CheckpointError) as raised:
        engine.load_checkpoint(folder)
    assert all(torch.equal(weight, before[name]) for name, weight in _weights(engine).items())
    path, _ = engine.load_checkpoint(folder, load_optimizer_states=False)
    loaded = _weights(engine)
    _train_steps(engine, 1, 1, toy)
    total_change = sum(float((weight - loaded[name]).abs().sum()) for name, weight in _weights(engine).items())
    return str(raised.value), path, loaded, (engine.global_steps, engine.get_lr()), total_change


@pytest.mark.parametrize(
    ("toy", "saver"),
    [pytest.param(TOY, "stock", marks=pytest.mark.slow), (TOY, "ours"),
     pytest.param(BF16_TOY, "stock", marks=pytest.mark.slow)],
    ids=["fp32 tied of stock", "fp32 tied of ours", "bf16 zero-1"],
)  # fmt: skip
def test_weights_load_on_other_stage_count_without_optimizer_states(tmp_path: Path, toy: Toy, saver: str) -> None:
    preload_zero()
    saved: dict[str, torch.Tensor] = {}
    for weights in run_ranks(2, _save, str(tmp_path), saver, 2, toy):
        saved |= weights
    layouts: list[tuple[int, int, Any]] = [(2, 2, {"partition_method": [0, 2, 6]}), (2, 1, {}), (3, 3, {})]
    for ranks, num_stages, options in layouts[: 2 if toy is BF16_TOY else 3]:
        names: set[str] = set()
        for message, path, loaded, state, total_change in run_ranks(
            ranks, _load_on_other_layout, str(tmp_path), num_stages, toy, options
        ):
            assert "Pass load_optimizer_states=False" in message, message
            assert path is not None and state == (2, [0.005]) and total_change > 0
            assert all(torch.equal(saved[name], weight) for name, weight in loaded.items())
            names |= set(loaded)
        assert names == set(saved)


class Scaled(nn.Module):
    """A table that is tied, with a bias that is not."""

    def __init__(self, size: int, wide: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size, wide))
        self.bias = nn.Parameter(torch.randn(size))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(ids, self.weight)


def _project_with_bias(tables: Scaled, x: torch.Tensor) -> torch.Tensor:
    return x @ tables.weight.t() + tables.bias


def _embed(tables: Scaled, ids: torch.Tensor) -> torch.Tensor:
    return tables(ids)


def _save_or_load_tied_module(
    rank: int, folder: str, specs: list[Any], num_stages: int, should_save: bool
) -> list[torch.Tensor]:
    torch.manual_seed(10 * num_stages + should_save)
    engine = _engine("ours", num_stages, TOY, specs)
    if should_save:
        torch.nn.init.normal_(engine.module.tied_modules["t"].bias, generator=torch.Generator().manual_seed(rank))
        engine.save_checkpoint(folder)
    else:
        engine.load_checkpoint(folder, load_optimizer_states=False)
    return [p.detach().clone() for p in engine.module.tied_modules["t"].parameters()]


@pytest.mark.parametrize(
    "forward_fn", [None, pytest.param(_embed, marks=pytest.mark.slow)], ids=["a layer first", "functions only"]
)
def test_untied_parameters_of_tied_module_are_restored(tmp_path: Path, forward_fn: Any) -> None:
    specs = [TiedLayerSpec("t", Scaled, 11, 6, forward_fn=forward_fn), LayerSpec(nn.Linear, 6, 6),
             TiedLayerSpec("t", Scaled, 11, 6, forward_fn=_project_with_bias)]  # fmt: skip
    saved = run_ranks(2, _save_or_load_tied_module, str(tmp_path), specs, 2, True)
    assert not torch.equal(saved[0][1], saved[1][1])
    for loaded, expected in zip(
        run_ranks(2, _save_or_load_tied_module, str(tmp_path), specs, 2, False), saved, strict=True
    ):
        assert all(
            torch.equal(loaded_weight, saved_weight)
            for loaded_weight, saved_weight in zip(loaded, expected, strict=True)
        )
    one_stage = run_ranks(1, _save_or_load_tied_module, str(tmp_path), specs, 1, False)[0]
    assert torch.equal(one_stage[0], saved[0][0]) and torch.equal(one_stage[1], saved[0][1])


def _load_damaged(rank: int, folder: str) -> list[str]:
    engine = _engine("ours", 2)
    messages = []
    for tag in ("cut", "gone", "empty", "other", None):
        with pytest.raises(CheckpointError) as raised:
            engine.load_checkpoint(folder, tag, load_optimizer_states=False)
        messages.append(str(raised.value))
    with pytest.raises(ValueError, match="custom_load_fn"):
        engine.load_checkpoint(folder, "good", custom_load_fn=print)
    assert engine.load_checkpoint(f"{folder}/nowhere") == (None, None)
    engine.load_checkpoint(folder, "good", load_module_only=True)
    assert engine.global_steps == 0 and set(engine.module_state_dict()) == set(engine.module.state_dict())
    return messages


def test_damaged_checkpoint_raises_on_all_ranks_with_file_name(tmp_path: Path) -> None:
    run_ranks(2, _save, str(tmp_path), "ours", 2, TOY)
    good = (tmp_path / "7").rename(tmp_path / "good")
    for name in ("cut", "gone", "other"):
        shutil.copytree(good, tmp_path / name)
    os.truncate(tmp_path / "cut" / "layer_04-model_states.pt", 100)
    os.remove(tmp_path / "gone" / "layer_01-model_states.pt")
    shutil.copy(good / "layer_00-model_states.pt", tmp_path / "other" / "layer_04-model_states.pt")
    first, second = run_ranks(2, _load_damaged, str(tmp_path))
    assert first == second
    assert "layer_04-model_states.pt cannot be loaded" in first[0] and "(rank 1)" in first[0]
    assert "does not exist" in first[1] and "layer_01" in first[1] and "(rank 0)" in first[1]
    assert "got none in" in first[2] and "empty" in first[2]
    assert "layer_04" in first[3] and "Missing key" in first[3]
    assert "got none in" in first[4]


def _load_inconsistent(rank: int, folder: str) -> list[tuple[str, float]]:
    """Load what rank 1 alone finds damaged or sees otherwise; return the errors and the seconds until they came."""
    engine = _engine("ours", 2)
    messages = []
    for name in ("torn", f"rank{rank}", f"other{rank}"):
        start = time.monotonic()
        with pytest.raises(CheckpointError) as raised:
            engine.load_checkpoint(f"{folder}/{name}")
        messages.append((str(raised.value), time.monotonic() - start))
    assert engine.load_checkpoint(f"{folder}/rank0")[0] is not None, "a checkpoint that is whole loads after all that"
    return messages


def test_file_unreadable_on_one_rank_raises_on_all_ranks(tmp_path: Path) -> None:
    """A cut file of optimizer states, a `latest` that one host does not see, and one that is older there."""
    run_ranks(2, _save, str(tmp_path / "rank0"), "ours", 2, TOY)
    for name in ("torn", "rank1", "other0", "other1"):
        shutil.copytree(tmp_path / "rank0", tmp_path / name)
    os.truncate(tmp_path / "torn" / "7" / "mp_rank_01_model_states.pt", 5000)
    os.remove(tmp_path / "rank1" / "latest")
    (tmp_path / "other1" / "7").rename(tmp_path / "other1" / "6")
    (tmp_path / "other1" / "latest").write_text("6")
    results = run_ranks(2, _load_inconsistent, str(tmp_path))
    for torn, gone, other in results:
        assert max(seconds for _, seconds in (torn, gone, other)) < GROUP_TIMEOUT_S / 2
        assert "/7/mp_rank_01_model_states.pt cannot be loaded: " in torn[0] and torn[0].endswith("(rank 1)"), torn
        assert 'got tag 7 on rank 0; no file "latest" on rank 1' in gone[0], gone
        assert "got tag 7 on rank 0; tag 6 on rank 1" in other[0], other


class _FakeModule:
    """What layer_numbers reads of a module."""

    parts, num_stages, stage_id = [0, 2, 3, 5, 9], 2, 1


def test_chunk_layers_have_global_indices() -> None:
    assert layer_indices(_FakeModule()) == [2, 5, 6, 7, 8]


def _save_or_load_chunks(rank: int, folder: str, chunks: int, should_load: bool) -> Any:
    engine = _engine("ours", 2, chunks=chunks)
    if not should_load:
        _train_steps(engine, 0, 1)
        engine.save_checkpoint(folder)
        return _train_steps(engine, 1, 1), _weights(engine)
    message = ""
    try:
        engine.load_checkpoint(folder)
    except CheckpointError as error:
        message = str(error)
        engine.load_checkpoint(folder, load_optimizer_states=False)
    return message, _weights(engine), _train_steps(engine, 1, 1)


def test_chunk_layers_are_saved_by_global_index(tmp_path: Path) -> None:
    """Tied weights that meet on one stage, and two runs of layers on each."""
    saved = run_ranks(2, _save_or_load_chunks, str(tmp_path), 3, False)
    resumed = run_ranks(2, _save_or_load_chunks, str(tmp_path), 3, True)
    for (losses, after), (message, _, continued) in zip(saved, resumed, strict=True):
        assert message == "" and continued == losses and after
    names = {name for _, loaded, _ in resumed for name in loaded}
    weights = {name: weight for _, loaded, _ in resumed for name, weight in loaded.items()}
    with_one_chunk = run_ranks(2, _save_or_load_chunks, str(tmp_path), 1, True)
    assert {name for _, loaded, _ in with_one_chunk for name in loaded} == names
    for message, loaded, _ in with_one_chunk:
        assert "stage " in message and "had the layers" in message and "load_optimizer_states=False" in message
        assert all(torch.equal(weight, weights[name]) for name, weight in loaded.items())
