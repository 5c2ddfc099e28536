"""Ours against DeepSpeed's own PipelineEngine: the same program, the same numbers."""

from __future__ import annotations

from typing import Any

import deepspeed
import pytest
import torch
from torch import nn

import tds
from tests.helpers.harness import run_ranks
from tests.helpers.toys import Toy, make_engine, preload_zero, train_batch


def _train_both(rank: int, toys: list[Toy], num_stages: int, method: str = "uniform") -> list[Any]:
    """Return what stock and ours make of each toy: (steps, loss of an evaluation, steps, samples, bounds)."""
    results: list[Any] = []
    for toy in toys:
        results.append([])
        for initialize in (deepspeed.initialize, tds.initialize):
            tds.init_distributed("gloo", verbose=False)
            stock = deepspeed.PipelineModule(
                toy.layer_specs(), num_stages=num_stages, loss_fn=toy.loss_fn, partition_method=method
            )
            engine = make_engine(toy, num_stages, initialize, module=stock)
            steps = [train_batch(engine, toy)[:2] for _ in range(2)]
            loss = engine.eval_batch(iter(toy.make_batches()))
            results[-1].append((steps, loss, engine.global_steps, engine.global_samples, list(stock.parts)))
    return results


def _compare_with_stock(ranks: int, toys: list[Toy], num_stages: int, method: str = "uniform") -> list[list[int]]:
    """Compare stock and ours to the bit; return the bounds of each toy."""
    for rank_results in run_ranks(ranks, _train_both, toys, num_stages, method):
        for stock, ours in rank_results:
            assert torch.equal(stock[1].reshape(()), ours[1])
            assert stock[2:] == ours[2:]
            for (loss, gradients), (our_loss, our_gradients) in zip(stock[0], ours[0], strict=True):
                assert torch.equal(loss, our_loss)
                assert set(gradients) == set(our_gradients)
                for name in gradients:
                    assert torch.equal(gradients[name], our_gradients[name]), name
    return [ours[-1] for _, ours in rank_results]


def _make_toy(model: str, **kwargs: Any) -> Toy:
    return Toy(model, dtype=torch.float32, grad_clip=0.0, **kwargs)


@pytest.mark.parametrize(
    ("ranks", "num_stages", "micro_batches"),
    [*(pytest.param(*case, marks=pytest.mark.slow) for case in ((2, 2, 1), (3, 3, 7))), (4, 2, 4)],
)
def test_fp32_equals_deepspeed_engine_bitwise(ranks: int, num_stages: int, micro_batches: int) -> None:
    """Row E21: clipping off, untied and tied, one and two replicas."""
    _compare_with_stock(
        ranks, [_make_toy(model, num_micro_batches=micro_batches) for model in ("chain", "tied")], num_stages
    )


@pytest.mark.parametrize(
    ("num_stages", "micro_batches", "method", "bounds"),
    [
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((2, 5, "type:TiedEmbedding", [0, 6, 7]), (3, 2, "type:Dense", [0, 3, 5, 7]))
        ),
        (3, 4, "parameters", [0, 2, 5, 7]),
    ],
)
def test_unequal_stages_equal_deepspeed_bitwise(
    num_stages: int, micro_batches: int, method: str, bounds: list[int]
) -> None:
    """Fewer micro-batches than stages, and more; a weight that is tied over the first stage and the last."""
    toy = _make_toy("tied", num_layers=7, num_micro_batches=micro_batches)
    assert _compare_with_stock(num_stages, [toy], num_stages, method) == [bounds]


@pytest.mark.parametrize("use_reentrant", [pytest.param(False, marks=pytest.mark.slow), True])
def test_recompute_equals_deepspeed_bitwise(use_reentrant: bool) -> None:
    """On two unequal stages; with fewer micro-batches than stages, and more.

    Reentrant recompute of an embedding, whose input has no gradient, ends DeepSpeed's engine in an error.
    """
    pipeline = {"activation_checkpoint_interval": 1, "use_reentrant": use_reentrant}
    models = (("chain", 1), ("chain", 5), *(() if use_reentrant else (("tied", 5),)))
    toys = [_make_toy(model, num_micro_batches=m, pipeline=pipeline) for model, m in models]
    assert _compare_with_stock(2, toys, 2) == [[0, 3, 5]] * len(toys)


def _train_bf16(rank: int) -> list[Any]:
    results = []
    for initialize in (deepspeed.initialize, tds.initialize):
        tds.init_distributed("gloo", verbose=False)
        toy = Toy("chain", dtype=torch.float32, num_micro_batches=4)
        module = deepspeed.PipelineModule(
            toy.layer_specs(), num_stages=2, loss_fn=_half_loss, partition_method="uniform"
        )
        config = {
            "train_micro_batch_size_per_gpu": toy.micro_batch_size,
            "gradient_accumulation_steps": toy.num_micro_batches,
            "bf16": {"enabled": True},
            "communication_data_type": "fp32",  # without it stock rounds the sums to bf16, ours does not
            "data_types": {"grad_accum_dtype": "fp32"},
            "zero_optimization": {"stage": 1},
            "zero_allow_untested_optimizer": True,
        }
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
        engine = initialize(model=module, optimizer=optimizer, config=config)[0]
        replica = engine.grid.get_data_parallel_rank()
        batches = [(x.bfloat16(), (y.bfloat16(), m)) for x, (y, m) in toy.make_batches(replica)]
        losses = [float(engine.train_batch(iter(batches))) for _ in range(5)]
        results.append((losses, [p.detach().float() for p in module.parameters()], engine.get_global_grad_norm()))
    return results


def _half_loss(output: torch.Tensor, labels: Any) -> torch.Tensor:
    return ((output.float() - labels[0].float()) ** 2).mean()


@pytest.mark.slow
def test_bf16_with_zero_1_matches_deepspeed_engine() -> None:
    preload_zero()
    for stock, ours in run_ranks(4, _train_bf16):
        assert ours[0] == pytest.approx(stock[0], rel=1e-6)
        assert ours[0][-1] < ours[0][0]
        assert ours[2] == pytest.approx(float(stock[2]), rel=1e-5)
        for stock_weight, our_weight in zip(stock[1], ours[1], strict=True):
            assert torch.equal(stock_weight, our_weight)


def _flat(x: torch.Tensor) -> torch.Tensor:
    return torch.flatten(x, 1)


def _train_convolutions(rank: int, config: dict[str, Any]) -> list[list[float]]:
    """Train a small AlexNet, layers and functions in a list, in stock and in ours; return the losses of both."""
    losses: list[list[float]] = []
    for package in (deepspeed, tds):
        tds.init_distributed("gloo", verbose=False)
        torch.manual_seed(1138)
        layers = [
            nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d((2, 2)), _flat,
            nn.Dropout(), nn.Linear(64, 64), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(64, 10),
        ]  # fmt: skip
        module = package.PipelineModule(
            layers=layers, num_stages=2, loss_fn=nn.CrossEntropyLoss(), partition_method="parameters"
        )
        optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
        full_config = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4, **config}
        engine = package.initialize(model=module, optimizer=optimizer, config=full_config)[0]
        generator = torch.Generator().manual_seed(3)
        images = 30 * torch.randn(8, 4, 3, 8, 8, generator=generator)
        labels = torch.randint(0, 10, (8, 4), generator=generator)
        data = deepspeed.utils.RepeatingLoader(list(zip(images, labels, strict=True)))
        losses.append([float(engine.train_batch(data)) for _ in range(6)])
    return losses


@pytest.mark.slow
def test_convolutions_equal_deepspeed_except_for_clipping() -> None:
    """The first row of the table "differs from DeepSpeed" in tds/README.md: stock's norm is that of stage 0 alone."""
    for stock, ours in run_ranks(2, _train_convolutions, {"gradient_clipping": 0.0}):
        assert stock == ours
    for stock, ours in run_ranks(2, _train_convolutions, {}):
        assert stock[0] == ours[0] and stock != ours
