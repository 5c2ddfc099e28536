"""Whole engines with layers that return dicts and lists, pass inputs through, change them, or do not look at them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import nn

import tds
from tds.p2p.boundary import Boundary
from tds.p2p.input_leaves import with_leaves
from tds.pipe import LayerSpec, PipelineModule
from tests.helpers.harness import run_ranks
from tests.helpers.toys import Dense, Toy, make_engine, train_batch, train_reference, worst_relative_error


class Fork(nn.Module):
    """A tensor in; a dict out, with gradients at the first, third and last place."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.left, self.right = Dense(1, wide, torch.float64), Dense(2, wide, torch.float64)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        positions = torch.arange(x.shape[-1], dtype=torch.int32)
        return {
            "left": self.left(x),
            "mask": x > 0,
            "right": self.right(x),
            "places": positions,
            "unused": 2 * self.left(x),
        }


class Combine(nn.Module):
    """The dict in; a list out: what it made, what came in as it was, and a half-precision float without gradient."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.inner = Dense(3, wide, torch.float64)

    def forward(self, x: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        hidden = self.inner(torch.where(x["mask"], x["left"], -x["right"])[..., x["places"].long()])
        return [hidden, x["left"], torch.ones((), dtype=torch.bfloat16)]


class Join(nn.Module):
    """The list in; a tensor out. The last item is 1."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.linspace(0, 1, wide, dtype=torch.float64))

    def forward(self, x: list[torch.Tensor]) -> torch.Tensor:
        assert type(x) is list
        return x[0] * x[1] * x[2].double() + self.bias


class IgnoresInput(nn.Module):
    """Returns a parameter of its own, whatever comes in."""

    def __init__(self, rows: int, wide: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, wide, dtype=torch.float64).repeat(rows, 4, 1))

    def forward(self, _: Any) -> torch.Tensor:
        return self.weight * 2


class Structures(Toy):
    def layer_specs(self) -> list[Any]:
        if self.model_type == "deaf":
            return [
                LayerSpec(Dense, 5, self.hidden_size, self.dtype),
                LayerSpec(IgnoresInput, self.micro_batch_size, self.hidden_size),
            ]
        return [
            LayerSpec(Fork, self.hidden_size),
            LayerSpec(Combine, self.hidden_size),
            LayerSpec(Join, self.hidden_size),
        ]


class VaryingRows(Toy):
    """Every micro-batch has another number of rows."""

    def make_batch(self, idx: int, num_rows: int | None = None) -> tuple[Any, Any]:
        return super().make_batch(idx, 1 + idx % 3)


def _train(rank: int, toy: Toy, num_stages: int, options: dict[str, Any]) -> Any:
    return train_batch(make_engine(toy, num_stages, **options), toy)


def _assert_equals_reference(results: list[Any], toy: Toy) -> None:
    """Compare with one process, to the bit; what has no gradient there has zeros here."""
    loss, gradients = train_reference(toy)
    for got_loss, got, _ in results:
        assert torch.equal(got_loss, loss)
        for name, gradient in got.items():
            assert torch.equal(gradient, gradients.get(name, torch.zeros_like(gradient))), name


@pytest.mark.parametrize("num_stages", [2, 3])
def test_dict_and_list_outputs_equal_one_process(num_stages: int) -> None:
    toy = Structures(num_layers=3)
    _assert_equals_reference(run_ranks(num_stages, _train, toy, num_stages, {}), toy)


def test_stage_ignoring_its_input_returns_zero_gradients() -> None:
    toy = Structures("deaf", num_layers=2)
    results = run_ranks(2, _train, toy, 2, {})
    _assert_equals_reference(results, toy)
    assert len(results[0][1]) == 2, "the first stage has gradients, all zero"


def test_dynamic_shape_accepts_varying_micro_batch_sizes() -> None:
    toy = VaryingRows("many")
    _assert_equals_reference(run_ranks(2, _train, toy, 2, {"dynamic_shape": True}), toy)


def _train_partitioned(rank: int, toy: Toy) -> Any:
    tds.init_distributed("gloo", verbose=False)
    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=1)
    module = PipelineModule(toy.layer_specs(), topology=topology, loss_fn=toy.loss_fn, partition_method=[0, 1, 3])
    module.boundary = {
        0: [
            Boundary("left", torch.float64, partitioned=True),
            Boundary("mask", "bool", partitioned=True),
            Boundary("right"),
            Boundary("places", torch.int32, partitioned=True),
            Boundary("unused", "float", partitioned=True),
        ]
    }
    return train_batch(make_engine(toy, 2, module=module), toy)


def test_partitioned_dict_crosses_stage_boundary() -> None:
    """3 x 4 x 5 elements over two ranks divide, 5 indices do not."""
    toy = Structures(num_layers=3, hidden_size=5)
    loss, gradients = train_reference(toy)
    for got_loss, got, _ in run_ranks(4, _train_partitioned, toy):
        assert abs(float(got_loss - loss)) < 1e-14 and worst_relative_error(got, gradients) < 1e-13


def test_stage_inputs_are_not_copied_and_allow_in_place_ops() -> None:
    message = torch.arange(-3.0, 5.0)
    tensors = message[:4].view(2, 2), message[4:]
    (x, y), leaves = with_leaves(tensors)
    assert (x.data_ptr(), y.data_ptr()) == tuple(t.data_ptr() for t in tensors)
    assert [leaf.untyped_storage().nbytes() for leaf in leaves] == [4, 4]
    square = y * y  # y is saved for its backward, which must not take a change of x for one of y
    z = torch.relu_(x) * 2
    (z.sum() + 3 * square.sum()).backward()
    assert message[:4].tolist() == [0, 0, 0, 0] and x.is_leaf is False
    assert leaves[0].grad is not None and leaves[0].grad.tolist() == [[0, 0], [0, 0]]
    assert leaves[1].grad is not None and leaves[1].grad.tolist() == [6.0, 12.0, 18.0, 24.0]


def _train_in_place(rank: int, schedules: list[str], options: dict[str, Any]) -> list[Any]:
    tds.init_distributed("gloo", verbose=False)
    results = []
    for schedule in schedules:
        module = PipelineModule(_make_in_place_layers(), num_stages=2, loss_fn=nn.functional.mse_loss, **options)
        config = {"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2}
        config["pipeline"] = {"schedule": schedule}  # type: ignore[assignment]
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        engine = tds.initialize(model=module, optimizer=optimizer, config=config)[0]
        results.append([float(engine.train_batch(iter(_pairs(step)))) for step in range(3)])
    return results


def _make_in_place_layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.ReLU(inplace=True), nn.Linear(4, 4), nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4)]


def _pairs(step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(step)
    return [(torch.randn(3, 4, generator=generator), torch.randn(3, 4, generator=generator)) for _ in range(2)]


def test_stages_starting_with_in_place_layer_equal_one_process() -> None:
    """The first stage's inputs are marked for reentrant recompute, too, which has only the linear layers to run."""
    model = nn.Sequential(*_make_in_place_layers())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = []
    for step in range(3):
        losses = [nn.functional.mse_loss(model(x.clone()), y) for x, y in _pairs(step)]
        optimizer.zero_grad()
        (sum(losses) / 2).backward()  # type: ignore[union-attr]
        optimizer.step()
        expected.append(float(sum(loss.detach() for loss in losses) / 2))
    for options in ({}, {"activation_checkpoint_interval": 1}):
        options = {"partition_method": [0, 3, 5], **options}
        for losses in run_ranks(2, _train_in_place, ["1f1b", "zb-h1"], options):
            assert losses == [pytest.approx(expected, rel=1e-6)] * 2


def _build_with_seeded_layers(rank: int) -> list[tuple[object, int, set[type]]]:
    built = []
    for method in ("parameters", "uniform", "type:Linear", [0, 3, 6], np.array([0, 2, 6])):
        specs = [LayerSpec(nn.Linear, 4, 4) for _ in range(6)]
        module = PipelineModule(
            specs, num_stages=2, loss_fn=nn.functional.mse_loss, partition_method=method, seed_layers=True
        )
        assert module(torch.ones(1, 4)).shape == (1, 4)  # the forward pass seeds each layer, too
        built.append((method, len(module.forward_funcs), {type(bound) for bound in module.parts}))
        module = PipelineModule(specs, 2, loss_fn=nn.functional.mse_loss, chunks=2, seed_layers=True)
        assert module(torch.ones(1, 4), chunk=1).shape == (1, 4)
        built.append((method, len(module.forward_funcs), {type(bound) for bound in module.parts}))
    return built


def test_seeded_layers_are_built_with_every_partition_method() -> None:
    ranks = run_ranks(2, _build_with_seeded_layers)
    for (method, first, types), (_, second, _) in zip(*ranks, strict=True):
        assert first + second == 6 and types == {int}, method
