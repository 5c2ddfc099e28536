"""ZeRO 2 and 3 against ZeRO 0: bitwise equal gradients, and sharded memory (row E07)."""

from __future__ import annotations

import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron import log
from megatron.mpu.groups import build_grid, single_grid
from megatron.mpu.topology import Topology
from megatron.optim import GradScaler, OffloadConfig, build_optimizer
from megatron.optim.gradients import reduction
from megatron.optim.zero.layers import layers_of
from megatron.optim.zero.partition import partition_of
from megatron.training import optimizer_setup
from tds import bucket_reducer, gradients
from tests.helpers.harness import RankFailure, run_ranks
from tests.helpers.zero_parts import (
    Model,
    compute_loss,
    gather_full_weights,
    make_model_and_optimizer,
    make_single_replica,
    make_tokens,
    take_step,
)

STEPS = 6
FULL_OFFLOAD = OffloadConfig(optimizer=True, parameters=True)
CASES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16, recomputed": {"dtype": torch.bfloat16, "recompute": True},
    "fp16": {"dtype": torch.float16},
    "sgd": {"name": "sgd", "momentum": 0.9},
    "fp64, clipped": {"dtype": torch.float64, "clip_grad": 0.5},
}
VARIANTS: tuple[dict[str, Any], ...] = (
    {"zero_stage": 2},
    {"zero_stage": 3},
    {"zero_stage": 3, "offload": FULL_OFFLOAD},
    {"zero_stage": 1, "offload": OffloadConfig(optimizer=True)},
)
CLIPPED_TOLERANCE = 1e-12
"""Tolerance of clipped steps in fp64, whose norm is summed in another order; other steps must be bitwise equal."""


def settings_of(case: str) -> dict[str, Any]:
    """Return the settings of a case with a new loss scaler; the scale of fp16 overflows in the first steps."""
    scaler = GradScaler(scale=2.0**14, is_dynamic=True, hysteresis=1, window=50) if case == "fp16" else None
    return CASES[case] | {"scaler": scaler}


def compare_stages(rank: int, size: int, gas: int, cases: list[str]) -> dict[str, Any]:
    """Train with all stages; return by case the differences from ZeRO 0, and the skipped and rejected steps."""
    grid = build_grid(Topology.from_world_size(size, tensor=1, pipe=1), rank)
    results = {}
    for case in cases:
        tolerance = CLIPPED_TOLERANCE if "fp64" in case else 0.0
        plain_run = make_model_and_optimizer(grid, 0, **settings_of(case))
        runs = [make_model_and_optimizer(grid, **variant, **settings_of(case)) for variant in VARIANTS]
        differences, num_skipped, num_rejected = set(), 0, 0
        for step in range(STEPS):
            for module, optimizer in (plain_run, *runs):
                optimizer.policy.accepts_step = (lambda norm: False) if step == 4 else None
                optimizer.seen_loss = take_step(module, optimizer, grid, step, gas)
            _, reference = plain_run
            expected = gather_full_weights(*plain_run, grid)
            for run_idx, (module, optimizer) in enumerate(runs):
                if abs(optimizer.grad_norm - reference.grad_norm) > 1e-7 * reference.grad_norm:
                    differences.add((run_idx, "norm"))
                if abs(optimizer.seen_loss - reference.seen_loss) > tolerance * abs(reference.seen_loss):
                    differences.add((run_idx, "loss"))
                for name, value in gather_full_weights(module, optimizer, grid).items():
                    if not (value - expected[name]).abs().max() <= tolerance:
                        differences.add((run_idx, name))
                if (optimizer.overflow, optimizer.was_rejected) != (reference.overflow, reference.was_rejected):
                    differences.add((run_idx, "skipped"))
            num_skipped, num_rejected = num_skipped + reference.overflow, num_rejected + reference.was_rejected
        words = expected["words.weight"]
        has_moved = not torch.equal(words, Model().words.weight.to(words.dtype))
        results[case] = (differences, has_moved, num_skipped > 0, num_rejected)
    return results


def test_single_micro_batch_steps_are_bitwise_stage_0(pytestconfig: pytest.Config) -> None:
    """With --all, also SGD and clipping, which ZeRO 1 shares."""
    cases = list(CASES) if pytestconfig.getoption("--all") else list(CASES)[:3]
    gradients.BUCKET_BYTES, old_bucket_bytes = 3000, gradients.BUCKET_BYTES
    try:
        for result in run_ranks(2, compare_stages, 2, 1, cases):
            assert result == {case: (set(), True, case == "fp16", 1) for case in cases}
    finally:
        gradients.BUCKET_BYTES = old_bucket_bytes


@pytest.mark.slow
@pytest.mark.parametrize("size", [3, 4])
def test_more_replicas_are_bitwise_stage_0(size: int) -> None:
    for result in run_ranks(size, compare_stages, size, 1, list(CASES)):
        assert result == {case: (set(), True, case == "fp16", 1) for case in CASES}


def accumulate_micro_batches(rank: int) -> float:
    """Train stages 0 and 3 on steps of three micro-batches in fp64; return the largest difference."""
    grid = build_grid(Topology.from_world_size(2, tensor=1, pipe=1), rank)
    plain_run, sharded_run = (
        make_model_and_optimizer(grid, stage, dtype=torch.float64, name="sgd", clip_grad=0.5) for stage in (0, 3)
    )
    for step in range(STEPS):
        for module, optimizer in (plain_run, sharded_run):
            take_step(module, optimizer, grid, step, gas=3)
    expected = gather_full_weights(*plain_run, grid)
    return max(
        (value - expected[name]).abs().max().item() for name, value in gather_full_weights(*sharded_run, grid).items()
    )


def test_micro_batches_accumulate_up_to_rounding() -> None:
    for difference in run_ranks(2, accumulate_micro_batches):
        assert difference <= 1e-13


def compare_reductions(rank: int) -> float:
    """Sum gradients by an all-reduce and by a reduce-scatter; return the largest difference of a shard."""
    grid = build_grid(Topology.from_world_size(3, tensor=1, pipe=1), rank)
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in ((37, 16), (), (10, 5), (16,), (3, 2))]
    local_grads = []
    for param_idx, parameter in enumerate(parameters):
        generator = torch.Generator().manual_seed(10 * param_idx + rank)
        gradient = None if param_idx == rank else torch.randn(parameter.shape, generator=generator)
        local_grads.append(reduction.LocalGrad(gradient, parameter, partition_of(parameter, 3)))
    all_reduced, scattered = (
        dict(reduction.Reduction(local_grads, grid.data, is_scattered=is_scattered).shards())
        for is_scattered in (False, True)
    )
    assert all(
        shard.untyped_storage().nbytes() == shard.nbytes for shard in (*all_reduced.values(), *scattered.values())
    )
    full_grads = {p: torch.zeros_like(p).detach() for p in parameters}
    for local_grad in local_grads:
        full_grads[local_grad.parameter] += 0 if local_grad.gradient is None else local_grad.gradient
        dist.all_reduce(full_grads[local_grad.parameter])
    for local_grad in local_grads:
        assert torch.allclose(
            all_reduced[local_grad.parameter], local_grad.shard(full_grads[local_grad.parameter], rank), atol=1e-6
        )
    return max(
        ((all_reduced[p] - scattered[p]).abs().max().item() for p in parameters if all_reduced[p].numel()), default=1.0
    )


def test_reduce_scatter_equals_shards_of_all_reduce() -> None:
    assert max(run_ranks(3, compare_reductions)) <= 1e-6


def reduce_scatter_in_ring_order(rank: int) -> list[bool]:
    """Reduce-scatter with another order of additions on each replica; return if all ranks have equal scalars."""
    grid = build_grid(Topology.from_world_size(4, tensor=1, pipe=1), rank)

    def scatter(output: torch.Tensor, full_grad: torch.Tensor, **kwargs: Any) -> Any:
        gathered = [torch.empty_like(full_grad) for _ in range(4)]
        dist.all_gather(gathered, full_grad)
        output.copy_(sum(gathered[(rank + 1 + step) % 4].view(4, -1)[rank] for step in range(4)))
        return CompletedWork()

    dist.reduce_scatter_single = scatter
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in ((64, 4), *[()] * 64)]
    generator = torch.Generator().manual_seed(rank)
    local_grads = [
        reduction.LocalGrad(torch.randn(p.shape, generator=generator), p, partition_of(p, 4)) for p in parameters
    ]
    shards = dict(reduction.Reduction(local_grads, grid.data, is_scattered=True).shards())
    scalars = torch.stack([shards[p] for p in parameters[1:]])
    gathered = [torch.empty_like(scalars) for _ in range(4)]
    dist.all_gather(gathered, scalars)
    return [torch.equal(rank_scalars, scalars) for rank_scalars in gathered]


class CompletedWork:
    """A finished collective."""

    def wait(self) -> None: ...


def test_scalars_do_not_drift_under_ring_order_reduce_scatter() -> None:
    assert run_ranks(4, reduce_scatter_in_ring_order) == [[True] * 4] * 4


def test_buckets_match_stage_0(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in ((40, 3), (7,), (0, 4), (100,), (2, 2), (), (30, 9))]
    for limit in (1, 500, 900, 2**20):
        monkeypatch.setattr(gradients, "BUCKET_BYTES", limit)
        expected = [[id(p) for p in bucket] for bucket in gradients.make_buckets(parameters)]
        order = bucket_reducer.AgreedOrder(None)
        for parameter in parameters:
            order.register(parameter)
        assert sorted([id(p) for p in bucket] for bucket in order._set_initial_buckets()) == sorted(expected)


def measure_held_bytes(rank: int) -> tuple[list[int], list[int], int]:
    """Return the bytes of gradients after a backward by stage, of gathered weights in a pass, and of idle weights."""
    grid = build_grid(Topology.from_world_size(2, tensor=1, pipe=1), rank)
    gradients, weights = [], []
    for stage in (1, 2, 3):
        module, optimizer = make_model_and_optimizer(grid, stage, dtype=torch.bfloat16)
        compute_loss(module, make_tokens(rank, 0, 0)).backward()
        optimizer.end_micro_batch()
        storage_bytes = {g.untyped_storage().data_ptr(): g.untyped_storage().nbytes() for _, g in optimizer.gradients()}
        gradients.append(sum(storage_bytes.values()))
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in module.parameters()}
    weights = [gathered_bytes(optimizer)]
    module.layers[0].down.register_forward_hook(lambda *_: weights.append(gathered_bytes(optimizer)))
    loss = compute_loss(module, make_tokens(rank, 0, 0))
    weights.append(gathered_bytes(optimizer))
    loss.backward()
    weights.append(gathered_bytes(optimizer))
    with torch.no_grad():
        module(make_tokens(rank, 0, 0))
    return gradients, [*weights, gathered_bytes(optimizer)], sum(storages.values())


def gathered_bytes(optimizer: Any) -> int:
    """Return the bytes of the full weights that ZeRO 3 has gathered."""
    return sum(
        full_weight.untyped_storage().nbytes()
        for unit in optimizer.store.units.units
        for full_weight in unit._full.values()
    )


def test_gradients_are_sharded_and_weights_gathered_per_layer() -> None:
    num_params = sum(p.numel() for p in Model().parameters() if p.requires_grad and p.dim())
    num_layer_params = sum(
        p.numel() for name, p in Model().layers[0].named_parameters() if p.dim() and "shared" not in name
    )
    num_other_params = num_params - 2 * num_layer_params
    for grad_bytes, weight_bytes, idle_bytes in run_ranks(2, measure_held_bytes):
        full_bytes, *shard_bytes = grad_bytes
        assert full_bytes == 4 * (num_params + 2), "including two scalars"
        assert all(abs(num_bytes - 2 * num_params) <= 4 * 16 * 4 for num_bytes in shard_bytes), (
            "shards consist of full vectors of 16 elements"
        )
        pass_bytes = [
            2 * (num_other_params + num_layer_params),
            2 * num_other_params,
            0,
        ]  # in the layer, after forward, after backward
        assert weight_bytes == [0, *pass_bytes, 2 * (num_other_params + num_layer_params), 0]
        assert idle_bytes < 200, "one element for each sharded weight, the frozen weight and the scalars"


def test_layers_are_list_elements_without_shared_weights() -> None:
    module = Model()
    layers = layers_of(module, [p for p in module.parameters() if p.requires_grad])
    assert list(layers) == list(module.layers)
    layer_ids = {id(p) for name, p in module.layers[0].named_parameters() if not name.startswith("shared")}
    assert {id(p) for p in layers[module.layers[0]]} == layer_ids
    inner = nn.Sequential(nn.Linear(2, 2), nn.ModuleList([nn.Linear(2, 2)]))
    inner[1][0].weight = inner[0].weight
    assert {id(p) for weights in layers_of(inner, inner.parameters()).values() for p in weights} == {
        id(inner[0].bias),
        id(inner[1][0].bias),
    }


def test_weight_read_outside_call_is_nan() -> None:
    module, optimizer = make_single_replica()
    reference = Model()
    assert all(p.isnan().all() and p.shape == q.shape for p, q in zip(
        module.layers[0].up.parameters(), reference.layers[0].up.parameters(), strict=True))  # fmt: skip
    tokens = make_tokens(0, 0, 0)
    with torch.no_grad():
        assert torch.equal(module(tokens), reference(tokens))
        assert torch.equal(module.layers[1].up(torch.ones(16)), reference.layers[1].up(torch.ones(16))), (
            "a layer may be called directly"
        )
    with pytest.raises(IndexError):
        module(torch.tensor([99]))
    assert optimizer.store.units._depth == 0 and optimizer.store.units._saved_tensors_hooks is None
    optimizer.end_micro_batch()
    assert gathered_bytes(optimizer) == 0
    loss = compute_loss(module, tokens)
    optimizer.end_micro_batch()
    loss.backward()  # the weights that backward needs are gathered again
    compute_loss(reference, tokens).backward()
    assert torch.equal(optimizer.gradient_of(module.words.weight), reference.words.weight.grad)
    assert gathered_bytes(optimizer) <= sum(p.nbytes for p in reference.parameters())
    optimizer.zero_grad()
    take_step(module, optimizer, single_grid(), 0)
    with torch.no_grad():
        assert not torch.equal(module(tokens), reference(tokens))
    module(tokens)  # without a backward, the weights outside of layers stay gathered
    with torch.no_grad():
        assert gathered_bytes(optimizer) > 0
        optimizer.main_param_of(module.words.weight).zero_()
        optimizer.copy_main_params_to_parameters()
        assert gathered_bytes(optimizer) == 0 and module(tokens).unique().numel() == 1, "all words have the same logit"


def test_layers_with_bypassed_weights_are_named_in_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(self.layers[0](x), self.layers[2].weight)

    messages: list[str] = []
    monkeypatch.setattr(log, "warning", messages.append)
    module = Odd()
    optimizer = build_optimizer(module.parameters(), zero_stage=3, offload=FULL_OFFLOAD)
    optimizer.store.shard_weights(module)
    assert all(module(torch.ones(2, 16)).isnan().all() for _ in range(2))
    assert len(messages) == 1 and "layers.1, layers.2 was not called" in messages[0]


def recompute_reentrant_twice(rank: int) -> None:
    """Accumulate the gradient of a weight twice in one backward."""
    grid = build_grid(Topology.from_world_size(2, tensor=1, pipe=1), rank)
    module, _ = make_model_and_optimizer(grid, 2)
    shared, x = module.layers[0].shared, torch.ones(2, 16, requires_grad=True)
    once = checkpoint(shared, x, use_reentrant=True)
    checkpoint(shared, once, use_reentrant=True).sum().backward()


def test_gradient_computed_twice_is_rejected() -> None:
    with pytest.raises(RankFailure, match="once for each micro-batch, got one of shape .* twice.*use_reentrant=False"):
        run_ranks(2, recompute_reentrant_twice)


def host_bytes(variant: dict[str, Any], dtype: torch.dtype) -> tuple[int, int]:
    """Return the bytes of main params and of weight shards that have separate memory."""
    module, optimizer = make_model_and_optimizer(single_grid(), **variant, dtype=dtype)
    weights = {p.untyped_storage().data_ptr() for p in module.parameters()}
    main_storages = {
        main_param.untyped_storage() for main_param in map(optimizer.main_param_of, optimizer.store.main_params)
    }
    shard_storages = {shard.untyped_storage() for shard in optimizer.store.weight_shards.values()}
    main_addresses = {storage.data_ptr() for storage in main_storages}
    main_param_bytes = sum(storage.nbytes() for storage in main_storages if storage.data_ptr() not in weights)
    return main_param_bytes, sum(
        storage.nbytes() for storage in shard_storages if storage.data_ptr() not in main_addresses
    )


@pytest.mark.parametrize(
    ("variant", "dtype", "main_param_bytes", "shard_bytes"),
    [
        ({"zero_stage": 0}, torch.float32, 0, 0),
        ({"zero_stage": 0, "offload": OffloadConfig(optimizer=True)}, torch.float32, 4, 0),
        ({"zero_stage": 3, "offload": FULL_OFFLOAD}, torch.float32, 4, 0),
        ({"zero_stage": 3, "offload": OffloadConfig(parameters=True)}, torch.float32, 4, 4),
        ({"zero_stage": 3, "offload": FULL_OFFLOAD}, torch.bfloat16, 4, 2),
        ({"zero_stage": 1, "offload": OffloadConfig(optimizer=True)}, torch.bfloat16, 4, 0),
    ],
    ids=str,
)
def test_offloaded_state_has_separate_copies(
    variant: dict[str, Any], dtype: torch.dtype, main_param_bytes: int, shard_bytes: int
) -> None:
    num_params = sum(p.numel() for p in Model().parameters() if p.requires_grad)
    actual = host_bytes(variant, dtype)
    assert actual[0] in (main_param_bytes * num_params, main_param_bytes * (num_params - 2)), (
        "the two scalars are never sharded"
    )
    assert actual[1] == shard_bytes * (num_params - 2)


@pytest.mark.slow
@pytest.mark.timeout(580)
def test_deepspeed_cpu_adam_matches_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    builds = Path.home() / ".cache" / "megatron-tds" / f"extensions-{torch.__version__}-{version('deepspeed')}"
    for lock in builds.glob("*/lock"):
        if time.time() - lock.stat().st_mtime > 900:  # left by a build that was killed: torch would wait for it
            lock.unlink()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(builds))
    grid, offload = single_grid(), OffloadConfig(optimizer=True)
    try:
        deepspeed_run = make_model_and_optimizer(grid, 0, offload=offload, adam=optimizer_setup.deepspeed_adam)
    except ValueError as error:
        pytest.skip(f"DeepSpeedCPUAdam cannot be compiled here: {error}")
    torch_run = make_model_and_optimizer(grid, 0, offload=offload)
    assert type(deepspeed_run[1].inner).__name__ == "DeepSpeedCPUAdam"
    for step in range(STEPS):
        for module, optimizer in (deepspeed_run, torch_run):
            take_step(module, optimizer, grid, step)
    expected = gather_full_weights(*torch_run, grid)
    for name, value in gather_full_weights(*deepspeed_run, grid).items():
        assert torch.allclose(value, expected[name], rtol=0, atol=2e-6), name
