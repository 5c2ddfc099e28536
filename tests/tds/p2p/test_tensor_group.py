"""With tensor groups of two: partitioned tensors arrive whole, and every parameter counts once in the norm."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import nn

import tds
from tds.p2p.message_header import DTYPES
from tds.p2p.packed_layout import PackedLayout, Slice
from tds.p2p.tensor_meta import TensorMeta
from tds.pipe import LayerSpec, PipelineModule
from tests.helpers.harness import run_ranks
from tests.helpers.toys import Dense, Toy, check_equal, make_engine, norm_of, reference, train, worst


def _cross(rank: int) -> None:
    cut = Slice(rank, 2, dist.group.WORLD)
    shapes = [(), (1,), (3, 5), (4, 2), (0, 3)]
    specs = [TensorMeta(dtype, shape, False, i % 3 != 0) for i, dtype in enumerate(DTYPES) for shape in shapes]
    for start in range(0, len(specs), 7):
        part = specs[start : start + 7]
        tensors = [torch.arange(torch.Size(spec.shape).numel()).view(spec.shape).to(spec.dtype) for spec in part]
        layout = PackedLayout(part, cut)
        message = layout.pack(tensors)
        assert message.numel() == layout.num_bytes
        for sent, got in zip(tensors, layout.unpack(message), strict=True):
            assert got.dtype is sent.dtype and torch.equal(got, sent)
    half = PackedLayout([TensorMeta(torch.float32, (64, 32), True, True)], cut)
    assert half.num_bytes == 64 * 32 * 4 / 2


def test_any_dtype_and_size_is_cut_and_gathered() -> None:
    run_ranks(2, _cross)


def _declared(rank: int, toy: Toy, cuts: list[bool], num_stages: int) -> Any:
    tds.init_distributed("gloo", verbose=False)
    world = dist.get_world_size()
    topology = PipeModelDataParallelTopology(num_pp=num_stages, num_mp=2, num_dp=world // num_stages // 2)
    module = PipelineModule(toy.specs(), topology=topology, loss_fn=toy.loss_fn, partition_method="uniform")
    if not cuts:
        pass
    elif toy.kind == "chain":
        module._input_grad, module._input_type, module._input_pipe_partitioned = [True], ["float"], cuts
    else:
        module._input_grad = [True, False, True, False, False]
        module._input_type = ["float", "bool", "float", "int", "float"]
        module._input_pipe_partitioned = cuts
    return train(make_engine(toy, num_stages, module=module), toy)


@pytest.mark.parametrize("rows", [3, pytest.param(5, marks=pytest.mark.slow)])
def test_partitioned_boundaries_equal_one_process(rows: int) -> None:
    """Two floats with gradients, one without, a mask and indices; 3 x 4 x 5 and 5 x 4 x 5 elements do not divide."""
    toy = Toy("many", rows=rows, wide=5, micro_batches=3)
    for cuts in ([True, True, True, True, True], [False, True, True, False, False]):
        check_equal(run_ranks(4, _declared, toy, cuts, 2), toy, tolerance=1e-12)


@pytest.mark.parametrize("cuts", [[True], [False], []], ids=["cut", "whole", "undeclared"])
def test_a_single_tensor_under_a_tensor_group_equals_one_process_to_the_bit(cuts: list[bool]) -> None:
    toy = Toy("chain", rows=1, wide=5, dtype=torch.float32)
    check_equal(run_ranks(4, _declared, toy, cuts, 2), toy)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        parts = [torch.empty_like(x) for _ in range(2)]
        dist.all_gather(parts, x.contiguous(), group=group)
        ctx.rank = dist.get_rank(group)
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient.chunk(2, -1)[ctx.rank].contiguous(), None


class CutDense(nn.Module):
    """``Dense`` with the rows of its weight cut over the tensor group; the bias is whole on every rank."""

    group: Any = None

    def __init__(self, seed: int, wide: int, dtype: torch.dtype) -> None:
        super().__init__()
        whole = Dense(seed, wide, dtype).inner
        rank = dist.get_rank(CutDense.group)
        self.weight = nn.Parameter(whole.weight.detach().chunk(2)[rank].clone())
        self.weight.model_parallel = True
        self.bias = nn.Parameter(whole.bias.detach().clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = _Copy.apply(x, CutDense.group) @ self.weight.t()
        return torch.tanh(_Gather.apply(y, CutDense.group) + self.bias)


def _cut_weights(rank: int, toy: Toy) -> Any:
    tds.init_distributed("gloo", verbose=False)
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    CutDense.group = pairs[rank // 2]
    specs = [LayerSpec(CutDense, 10 + i, toy.wide, toy.dtype) for i in range(toy.layers)]
    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=1)
    module = PipelineModule(specs, topology=topology, loss_fn=toy.loss_fn, partition_method="uniform")
    return train(make_engine(toy, 2, module=module), toy)


def test_the_norm_counts_cut_and_whole_parameters_once_and_clips_by_it() -> None:
    toy = Toy("chain", clip=0.01)
    loss, gradients = reference(toy)
    wanted = norm_of(gradients)
    for rank, (got_loss, got, norm) in enumerate(run_ranks(4, _cut_weights, toy)):
        assert abs(float(got_loss - loss)) < 1e-14
        assert norm == pytest.approx(wanted, rel=1e-13)
        for name, gradient in got.items():
            whole = gradients[name.replace(".weight", ".inner.weight").replace(".bias", ".inner.bias")]
            part = whole.chunk(2)[rank % 2] if name.endswith("weight") else whole
            clipped = {name: part * (toy.clip / (wanted + 1e-6))}
            assert worst({name: gradient}, clipped) < 1e-12, name
