"""The same DeepSpeed program under ``deepspeed`` and under ``tds``: the same numbers, to the bit."""

from __future__ import annotations

import csv
from argparse import Namespace
from collections import OrderedDict
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from torch import nn

import tds
from tests.helpers.harness import run_ranks
from tests.helpers.toys import _share_groups

WIDTH, ROWS = 6, 2
CONFIG = {"train_micro_batch_size_per_gpu": ROWS, "gradient_accumulation_steps": 3, "gradient_clipping": 0.0}


def _run_both(rank: int, program: Any, *args: Any) -> list[Any]:
    tds.init_distributed("gloo", verbose=False)
    _share_groups()
    results = []
    for ds in (deepspeed, tds):
        torch.manual_seed(1)
        results.append(program(ds, *args))
    return results


def _compare_with_deepspeed(num_ranks: int, program: Any, *args: Any) -> list[Any]:
    """Return what each rank got, after the comparison."""
    ranks = run_ranks(num_ranks, _run_both, program, *args)
    for stock, ours in ranks:
        assert _is_equal(stock, ours), (stock, ours)
    return [ours for _, ours in ranks]


def _is_equal(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor):
        return torch.equal(first.reshape(-1).float(), second.reshape(-1).float())
    if isinstance(first, dict):
        return list(first) == list(second) and all(_is_equal(first[key], second[key]) for key in first)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(_is_equal(a, b) for a, b in zip(first, second, strict=True))
    return bool(first == second)


def _layers() -> list[nn.Module]:
    return [nn.Linear(WIDTH, 9), nn.Tanh(), nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, WIDTH)]


def _make_batches(num_batches: int, rows: int = ROWS, seq_length: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(num_batches)
    shape = (num_batches, rows, seq_length, WIDTH) if seq_length else (num_batches, rows, WIDTH)
    x = torch.randn(shape, generator=generator)
    return list(zip(x, x.flip(-1).argmax(-1), strict=True))


def _cross_entropy(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, -2), labels.flatten())


def _make_engine(
    ds: Any, layers: Any, num_stages: int = 2, config: Any = None, loss_fn: Any = _cross_entropy, **kwargs: Any
):  # type: ignore[no-untyped-def]
    module = ds.PipelineModule(layers, num_stages=num_stages, loss_fn=loss_fn, **kwargs)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    return ds.initialize(model=module, optimizer=optimizer, config={**CONFIG, **(config or {})})[0]


def _train_sequential(ds: Any) -> Any:
    """nn.Sequential, a loss that is a module, training_data=, a collate function, a scheduler of the JSON."""
    module = ds.PipelineModule(nn.Sequential(*_layers()), num_stages=2, loss_fn=nn.CrossEntropyLoss())
    engine, optimizer, loader, scheduler = ds.initialize(
        model=module,
        model_parameters=[p for p in module.parameters() if p.requires_grad],
        training_data=[(x[0], y[0]) for x, y in _make_batches(12, rows=1)],
        collate_fn=lambda items: tuple(torch.stack(column) for column in zip(*items, strict=True)),
        config={
            **CONFIG,
            "optimizer": {"type": "Adam", "params": {"lr": 0.05, "torch_adam": True}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3, "warmup_max_lr": 0.05}},
        },
    )
    losses = [engine.train_batch() for _ in range(4)]
    assert optimizer is engine.optimizer and scheduler is engine.lr_scheduler
    return losses, engine.get_lr(), loader is engine.training_dataloader, module.parts, dict(module.state_dict())


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_sequential_with_training_data_and_json_scheduler(ranks: int) -> None:
    ours = _compare_with_deepspeed(ranks, _train_sequential)
    assert float(ours[0][0][-1]) < float(ours[0][0][0])


class MeanSquare(nn.Module):
    """A last layer that gives the loss."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x**2).mean()


def _train_loss_layer(ds: Any, method: str) -> Any:
    specs = [ds.pipe.LayerSpec(type(layer), WIDTH, WIDTH) for layer in [nn.Linear(1, 1)] * 4]
    specs += [torch.tanh, ds.pipe.LayerSpec(MeanSquare)]
    engine = _make_engine(ds, specs, loss_fn=None, partition_method=method)
    loader = iter(ds.utils.RepeatingLoader(_make_batches(2)))
    losses = [engine.train_batch(data_iter=loader) for _ in range(3)]
    return losses, engine.eval_batch(loader), engine.module.parts, [n for n, _ in engine.module.named_parameters()]


@pytest.mark.parametrize("method", ["uniform", "parameters", "type:Linear"])
def test_loss_layer_with_each_partition_method(method: str) -> None:
    bounds = _compare_with_deepspeed(2, _train_loss_layer, method)[0][2]
    assert bounds == ([0, 3, 6] if method == "uniform" else [0, 2, 6])


def _use_data_sources(ds: Any) -> Any:
    """Every way to give data, another batch size, and what a step may ask in between."""
    engine = _make_engine(ds, _layers(), 2)
    boundary_flags: list[bool] = []
    engine.optimizer.register_step_pre_hook(
        lambda *_: boundary_flags.append(engine.is_gradient_accumulation_boundary())
    )
    results: list[Any] = [engine.train_batch(iter(_make_batches(3)))]
    engine.set_batch_fn(lambda batch: (batch[0] * 2, batch[1]))
    engine.set_dataiterator(iter(_make_batches(6)))
    results += [engine.train_batch(), engine.train_batch()]
    engine.set_dataloader(_make_batches(3))
    results.append(engine.train_batch())
    engine.set_batch_fn(None)
    engine.set_train_batch_size(ROWS * 5)
    results.append(engine.train_batch(iter(_make_batches(5))))
    with pytest.raises(ValueError):
        engine.set_train_batch_size(ROWS * 5 + 1)
    results += [engine.gradient_accumulation_steps(), engine.train_batch_size(), engine.micro_batches]
    results += [engine.is_gradient_accumulation_boundary(), boundary_flags, engine.global_steps, engine.global_samples]
    results += [engine.prev_stage, engine.next_stage, engine.is_pipe_parallel, engine.is_data_parallel]
    return results


def test_data_from_iterators_loaders_and_batch_functions() -> None:
    for results in _compare_with_deepspeed(2, _use_data_sources):
        assert results[8:10] == [False, [True] * 5]


def _train_with_growing_sequences(ds: Any) -> Any:
    """Sequences that grow, as curriculum learning has them."""
    engine = _make_engine(ds, _layers(), 2)
    losses = []
    for seq_length in (2, 4, 7):
        engine.reset_activation_shape()
        losses.append(engine.train_batch(iter(_make_batches(3, seq_length=seq_length))))
    return losses


def test_sequence_length_may_grow_between_steps() -> None:
    _compare_with_deepspeed(2, _train_with_growing_sequences)


class RecordingLinear(nn.Linear):
    """A layer that keeps the mean of what it gave, for the losses below."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = super().forward(x)
        self.mean = output.detach().abs().mean()
        return output


def _train_with_additional_losses(ds: Any) -> Any:
    class WithLosses(ds.PipelineModule):  # type: ignore[name-defined,misc]
        def get_additional_losses(self) -> dict[str, torch.Tensor]:
            last = self.forward_funcs[-1]
            return OrderedDict(size=last.mean, twice=2 * last.mean) if isinstance(last, RecordingLinear) else ZEROS

    module = WithLosses([*_layers()[:-1], RecordingLinear(9, WIDTH)], num_stages=2, loss_fn=_cross_entropy)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    engine = ds.initialize(model=module, optimizer=optimizer, config=CONFIG)[0]
    loss = engine.train_batch(iter(_make_batches(6)[3 * engine.grid.get_data_parallel_rank() :]))
    return loss, dict(engine.get_additional_losses())


ZEROS = OrderedDict(size=torch.zeros(()), twice=torch.zeros(()))


def test_additional_losses_are_averaged_on_all_ranks() -> None:
    all_losses = [losses for _, losses in _compare_with_deepspeed(4, _train_with_additional_losses)]
    assert all(_is_equal(losses, all_losses[0]) for losses in all_losses) and float(all_losses[0]["size"]) > 0


def _train_with_monitor(ds: Any, folder: str) -> Any:
    config = {"csv_monitor": {"enabled": True, "output_path": f"{folder}/{ds.__name__}", "job_name": "run"}}
    engine = _make_engine(ds, _layers(), 2, config)
    for _ in range(2):
        engine.train_batch(iter(_make_batches(3)))
    engine.eval_batch(iter(_make_batches(3)))
    return None


def test_monitor_events_equal_deepspeed(tmp_path: Path) -> None:
    _compare_with_deepspeed(2, _train_with_monitor, str(tmp_path))
    rows = {
        name: {p.name: list(csv.reader(p.open())) for p in sorted((tmp_path / name).rglob("*.csv"))}
        for name in ("deepspeed", "tds")
    }
    assert rows["deepspeed"] == rows["tds"]
    assert {name.removeprefix("Train_Samples_") for name in rows["tds"]} == {
        "train_loss.csv",
        "lr.csv",
        "eval_loss.csv",
    }


def _train_with_tensorboard(rank: int, folder: str) -> None:
    tds.init_distributed("gloo", verbose=False)
    config = {"tensorboard": {"enabled": True, "output_path": folder, "job_name": "run"}}
    _make_engine(tds, _layers(), 1, config).train_batch(iter(_make_batches(3)))


def test_tensorboard_event_file_is_written(tmp_path: Path) -> None:
    run_ranks(1, _train_with_tensorboard, str(tmp_path))
    assert b"Train/Samples/train_loss" in b"".join(p.read_bytes() for p in tmp_path.rglob("events.*"))


def _train_from_json_file(ds: Any, path: str) -> Any:
    """A JSON file named by ``args``, and a model that is no pipeline."""
    model = nn.Sequential(*_layers())
    engine, *_ = ds.initialize(
        Namespace(deepspeed_config=path, local_rank=0), model, torch.optim.SGD(model.parameters(), 0.1)
    )
    losses = []
    for x, y in _make_batches(6):
        losses.append(_cross_entropy(engine(x), y))
        engine.backward(losses[-1])
        engine.step()
    return type(engine).__name__, engine.global_steps, [loss.detach() for loss in losses]


def test_non_pipeline_model_uses_deepspeed_engine(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}')
    for name, steps, _ in _compare_with_deepspeed(1, _train_from_json_file, str(tmp_path / "ds.json")):
        assert (name, steps) == ("DeepSpeedEngine", 2)


def _train_dualpipev(ds: Any) -> Any:
    module = ds.DualPipeVModule(_layers(), num_stages=2, loss_fn=_cross_entropy)
    engine = ds.initialize(
        model=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
        config={**CONFIG, "gradient_accumulation_steps": 4},
    )[0]
    return type(engine) is deepspeed.DualPipeVEngine, [engine.train_batch(iter(_make_batches(4))) for _ in range(3)]


def test_dualpipev_module_uses_deepspeed_engine() -> None:
    for is_deepspeed_engine, losses in _compare_with_deepspeed(2, _train_dualpipev):
        assert is_deepspeed_engine and losses[-1] < losses[0]


def _train_without_boundary_lists(ds: Any) -> Any:
    """Several tensors cross, and no list says so; DeepSpeed's engine wants every float to have a gradient."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Any) -> Any:
            first, ids, second = x if isinstance(x, tuple) else (x, torch.arange(x.shape[0]), x)
            return self.inner(first), ids, self.inner(second) * ids[:, None]

    class Join(nn.Linear):
        def forward(self, x: Any) -> torch.Tensor:
            return super().forward(x[0] + x[2])

    engine = _make_engine(ds, [Pair(), Pair(), Pair(), Join(WIDTH, WIDTH)], 2, partition_method="uniform")
    return [engine.train_batch(iter(_make_batches(3))) for _ in range(2)]


def test_boundary_lists_are_optional() -> None:
    _compare_with_deepspeed(2, _train_without_boundary_lists)


def test_engine_has_all_public_deepspeed_methods_and_arguments() -> None:
    import inspect

    printing = {"log_for_device", "tput_log"}
    for name, method in vars(deepspeed.PipelineEngine).items():
        if name.startswith("_") or not callable(method) or name in printing:
            continue
        deepspeed_params = [p for p in inspect.signature(method).parameters if p != "self"]
        our_params = inspect.signature(getattr(tds.PipelineEngine, name)).parameters
        has_var_kwargs = any(p.kind is p.VAR_KEYWORD for p in our_params.values())
        assert has_var_kwargs or [p for p in our_params if p != "self"][: len(deepspeed_params)] == deepspeed_params, (
            name
        )


def _run_compiled(rank: int) -> list[float]:
    """Run chunks of functions before and after ``compile``, which here doubles what a function returns."""
    tds.init_distributed("gloo", verbose=False)
    module = tds.PipelineModule([_plus_one] * 4, num_stages=1, chunks=2, partition_method="uniform")
    before = [float(module(torch.ones(()), chunk)) for chunk in range(2)]
    torch.compile = lambda function: lambda x: 2 * function(x)
    module.compile()
    return before + [float(module(torch.ones(()), chunk)) for chunk in range(2)]


def _plus_one(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def test_compile_covers_functions_of_all_chunks() -> None:
    assert run_ranks(1, _run_compiled) == [[3.0, 3.0, 10.0, 10.0]]
