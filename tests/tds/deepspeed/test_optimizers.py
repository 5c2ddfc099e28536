"""DeepSpeed's optimizers under our engine: ZeRO 1, fp16, bf16, offload; the same numbers as with DeepSpeed's engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import deepspeed
import pytest
import torch
import torch.nn.functional as F
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime import engine as deepspeed_engine
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

import tds
from tds.deepspeed.optimizers import gradient_source_for
from tds.loss import Weighted
from tests.helpers.harness import run_ranks
from tests.helpers.toys import Toy, make_engine, preload_zero

FP32, BF16 = (
    {"communication_data_type": "fp32"},
    {"bf16": {"enabled": True}},
)  # the first: stock rounds its sums otherwise
ZERO = {"stage": 1}
OFFLOAD = {"zero_optimization": {**ZERO, "offload_optimizer": {"device": "cpu"}}, "zero_force_ds_cpu_optimizer": False}
ACCUMULATES = {"data_types": {"grad_accum_dtype": "fp32"}}


class _FakeFusedAdam(torch.optim.AdamW):
    """In place of DeepSpeed's FusedAdam, which has to be compiled, so that FP16_Optimizer is taken."""


@pytest.fixture(autouse=True)
def _enable_fp16_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let DeepSpeed take fp16 on a CPU, and a fused optimizer that is none."""
    preload_zero()
    accelerator = type(get_accelerator())
    monkeypatch.setattr(accelerator, "is_fp16_supported", lambda self: True)
    monkeypatch.setattr(accelerator, "supported_dtypes", lambda self: [torch.float32, torch.float16, torch.bfloat16])
    monkeypatch.setattr(deepspeed_engine, "FusedAdam", _FakeFusedAdam)


def _loss(output: torch.Tensor, labels: Any) -> torch.Tensor:
    target = labels[0]
    if target.is_floating_point():
        return ((output.float() - target.float()) ** 2).mean()
    return F.cross_entropy(output.float().flatten(0, 1), target.flatten())


def _weighted_loss(output: torch.Tensor, labels: Any) -> Weighted:
    target, mask = labels
    token_losses = F.cross_entropy(output.float().flatten(0, 1), target.flatten(), reduction="none")
    return Weighted((token_losses * mask.flatten()).sum(), mask.sum())


def _build(
    model: str,
    config: dict[str, Any],
    *,
    initialize: Callable[..., Any] = tds.initialize,
    num_stages: int = 2,
    micro_batches: int = 4,
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW,
    loss: Any = _loss,
) -> tuple[Any, list[Any]]:
    """Return an engine, and this rank's batches in its dtype."""
    config = {"zero_allow_untested_optimizer": True, **config}
    pipeline = config.pop("pipeline", {})
    toy = Toy(model, dtype=torch.float32, num_micro_batches=micro_batches, config=config, pipeline=pipeline)
    tds.init_distributed("gloo", verbose=False)
    module = deepspeed.PipelineModule(
        toy.layer_specs(), num_stages=num_stages, loss_fn=loss, partition_method="uniform"
    )

    def with_optimizer(**kwargs: Any) -> Any:
        return initialize(**{**kwargs, "optimizer": optimizer(module.parameters(), lr=0.01)})

    engine = make_engine(toy, num_stages, with_optimizer, module=module)
    dtype = next(module.parameters()).dtype
    local_batches = toy.make_batches(engine.grid.get_data_parallel_rank())
    return engine, [tuple(_cast(item, dtype) for item in batch) for batch in local_batches]


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, tuple):
        return tuple(_cast(item, dtype) for item in value)
    return value.to(dtype) if value.is_floating_point() else value


def _train_steps(engine: Any, batches: list[Any], num_steps: int) -> list[dict[str, Any]]:
    """Train; return what each step gave on this rank."""
    steps = []
    for _ in range(num_steps):
        loss = engine.train_batch(iter(batches))
        norm = engine.get_global_grad_norm()
        steps.append(
            {
                "loss": float(loss).hex(),
                "norm": None if norm is None else float(norm),
                "scale": getattr(engine.optimizer, "loss_scale", None),
                "skipped": engine.skipped_steps,
                "weights": [p.detach().clone() for p in engine.module.parameters()],
            }
        )
    return steps


def _equal_weights(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def _zero_0_and_1(rank: int, num_steps: int) -> list[Any]:
    results = []
    for model, loss in (("chain", _loss), ("tied", _weighted_loss)):
        runs = []
        for stage in (0, 1):
            engine, batches = _build(
                model, {"zero_optimization": {"stage": stage}, "gradient_clipping": 1e9}, micro_batches=3, loss=loss
            )
            gradients: list[list[torch.Tensor]] = []

            def record_gradients(_: Any, engine: Any = engine, gradients: Any = gradients) -> None:
                gradients.append([engine._gradients.gradient_of(p).clone() for p in engine.module.parameters()])

            engine.on_loss = record_gradients
            runs.append((type(engine.optimizer).__name__, _train_steps(engine, batches, num_steps), gradients))
        results.append(runs)
    return results


def test_zero_1_equals_zero_0_bitwise(pytestconfig: pytest.Config) -> None:
    """Row E07, two stages x two replicas, untied and tied, by micro-batches and by tokens: losses, gradients, weights.

    Twenty steps with --all.
    DeepSpeed takes ZeRO's norm in fp32, where one step is up to 1.2e-7: two are allowed.
    """
    num_steps = 20 if pytestconfig.getoption("--all") else 5
    for (plain, steps, plain_gradients), (zero, zero_steps, zero_gradients_by_step) in sum(
        run_ranks(4, _zero_0_and_1, num_steps), []
    ):
        assert (plain, zero) == ("AdamW", "DeepSpeedZeroOptimizer")
        for plain_step, zero_step, step_gradients, zero_step_gradients in zip(
            steps, zero_steps, plain_gradients, zero_gradients_by_step, strict=True
        ):
            assert plain_step["loss"] == zero_step["loss"]
            assert _equal_weights(step_gradients, zero_step_gradients)
            assert _equal_weights(plain_step["weights"], zero_step["weights"])
            assert zero_step["norm"] == pytest.approx(plain_step["norm"], rel=2.4e-7)
        assert steps[-1]["loss"] != steps[0]["loss"]


CASES: dict[str, tuple[str, type[torch.optim.Optimizer], dict[str, Any], type]] = {
    "fp32, ZeRO 1": ("tied", torch.optim.AdamW, {"zero_optimization": ZERO}, DeepSpeedZeroOptimizer),
    "fp32, ZeRO 1, offload": ("tied", torch.optim.AdamW, OFFLOAD, DeepSpeedZeroOptimizer),
    "fp32, ZeRO 1, buffers of their own": (
        "chain", torch.optim.SGD,
        {"zero_optimization": {**ZERO, "contiguous_gradients": False, "round_robin_gradients": True,
                               "reduce_bucket_size": 50}},
        DeepSpeedZeroOptimizer,
    ),
    "bf16": ("tied", torch.optim.AdamW, {**BF16, **FP32}, BF16_Optimizer),
    "bf16, ZeRO 1, gradients at once in fp32": (
        "tied", torch.optim.AdamW,
        {"bf16": {"enabled": True, "immediate_grad_update": True}, **FP32, **ACCUMULATES, "zero_optimization": ZERO},
        BF16_Optimizer,
    ),
    "bf16, ZeRO 1, offload, gradients in fp32": (
        "chain", torch.optim.AdamW, {**BF16, **FP32, **ACCUMULATES, **OFFLOAD}, DeepSpeedZeroOptimizer
    ),
    "fp16, scale 1": ("chain", torch.optim.AdamW, {"fp16": {"enabled": True, "loss_scale": 1}, **FP32},
                      FP16_UnfusedOptimizer),
    "fp16, fused, scale 1": (
        "tied", _FakeFusedAdam, {"fp16": {"enabled": True, "loss_scale": 1}, **FP32}, FP16_Optimizer
    ),
    "fp16, ZeRO 1": (
        "tied", torch.optim.AdamW,
        {"fp16": {"enabled": True, "initial_scale_power": 20, "hysteresis": 1}, **FP32, "zero_optimization": ZERO},
        DeepSpeedZeroOptimizer,
    ),
    "fp16, ZeRO 1, gradients in fp32": (
        "chain", torch.optim.AdamW,
        {"fp16": {"enabled": True, "initial_scale_power": 20, "hysteresis": 1}, **FP32, **ACCUMULATES,
         "zero_optimization": ZERO},
        DeepSpeedZeroOptimizer,
    ),
}  # fmt: skip


def _train_both_engines(rank: int, names: list[str]) -> dict[str, Any]:
    results = {}
    for name in names:
        model, optimizer, config, expected_type = CASES[name]
        runs = []
        for initialize in (deepspeed.initialize, tds.initialize):
            engine, batches = _build(
                model, {**config, "gradient_clipping": 0.3}, initialize=initialize, optimizer=optimizer
            )
            assert type(engine.optimizer) is expected_type, (name, type(engine.optimizer))
            runs.append(_train_steps(engine, batches, 5))
        results[name] = runs
    return results


def _compare_engines(names: list[str]) -> None:
    for result in run_ranks(4, _train_both_engines, names):
        for name, (stock, ours) in result.items():
            for stock_step, our_step in zip(stock, ours, strict=True):
                for key in ("loss", "scale", "skipped"):
                    assert stock_step[key] == our_step[key], (name, key, stock_step[key], our_step[key])
                assert our_step["norm"] == pytest.approx(stock_step["norm"], rel=1e-6), name
                assert _equal_weights(stock_step["weights"], our_step["weights"]), name
            assert ours[-1]["loss"] != ours[0]["loss"]


def test_selected_optimizers_match_deepspeed_engine_bitwise() -> None:
    """Two stages x two replicas, clipping on.

    fp16 without ZeRO is compared at scale 1: DeepSpeed 0.19's engine does not scale the loss there, but its optimizer
    unscales the gradients; and untied, as its FP16_UnfusedOptimizer counts tied weights twice in the norm.
    """
    _compare_engines(["fp32, ZeRO 1, offload", "fp16, scale 1"])


@pytest.mark.slow
def test_all_optimizers_match_deepspeed_engine_bitwise() -> None:
    _compare_engines(list(CASES))


FP16 = {"fp16": {"enabled": True, "initial_scale_power": 12, "hysteresis": 1}}
FP16_OPTIMIZERS: dict[str, tuple[dict[str, Any], type[torch.optim.Optimizer]]] = {
    "unfused": (FP16, torch.optim.AdamW),
    "fused": (FP16, _FakeFusedAdam),
    "ZeRO 1": ({**FP16, "zero_optimization": ZERO}, torch.optim.AdamW),
}


def _train_with_overflow(rank: int, num_stages: int, has_overflow: bool) -> dict[str, Any]:
    """Train in fp16; with ``has_overflow`` one gradient of the last stage, on the last replica, overflows in step 1."""
    results = {}
    for name, (config, optimizer) in FP16_OPTIMIZERS.items():
        engine, batches = _build("tied", config, num_stages=num_stages, optimizer=optimizer)
        is_target_rank = (
            engine.is_last_stage() and engine.grid.get_data_parallel_rank() == engine.grid.data_parallel_size - 1
        )
        if has_overflow and is_target_rank:
            weight = [p for n, p in engine.module.named_parameters() if "inner" in n][-1]
            weight.register_hook(lambda g, engine=engine: g * float("inf") if engine.global_steps == 1 else g)
        results[name] = _train_steps(engine, batches, 4)
    return results


def test_overflow_on_one_stage_skips_step_on_all_ranks() -> None:
    """Rows N03 and E18: all ranks agree; the weights stay; every optimizer's norm is the same."""
    ranks = run_ranks(4, _train_with_overflow, 2, True)
    for name in FP16_OPTIMIZERS:
        for steps in (result[name] for result in ranks):
            assert [step["skipped"] for step in steps] == [0, 1, 1, 1], name
            assert [step["scale"] for step in steps] == [4096, 2048, 2048, 2048], name
            assert _equal_weights(steps[0]["weights"], steps[1]["weights"])
            assert not _equal_weights(steps[1]["weights"], steps[2]["weights"])
            assert steps[1]["norm"] == float("inf")
            assert steps[0]["norm"] == pytest.approx(ranks[0]["ZeRO 1"][0]["norm"], rel=1e-3), name
            assert [step["loss"] for step in steps] == [step["loss"] for step in ranks[0][name]]


def _train_with_high_scale(rank: int, num_stages: int) -> list[Any]:
    config = {"fp16": {"enabled": True, "initial_scale_power": 20, "hysteresis": 1}}
    engine, batches = _build("chain", config, num_stages=num_stages)
    return [(step["loss"], step["scale"], step["skipped"]) for step in _train_steps(engine, batches, 4)]


def test_loss_scale_is_independent_of_layout() -> None:
    """Row E18."""
    one_process = run_ranks(1, _train_with_high_scale, 1)[0]
    assert one_process[0][2] == 1 and one_process[-1][2] < 4
    assert all(result == one_process for result in run_ranks(2, _train_with_high_scale, 2))


def _train_with_schedules(rank: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name in ("bf16, ZeRO 1, gradients at once in fp32", "fp16, ZeRO 1, gradients in fp32"):
        model, optimizer, config, _ = CASES[name]
        for schedule in ("1f1b", "zb-h1"):
            engine, batches = _build(model, {**config, "pipeline": {"schedule": schedule}}, optimizer=optimizer)
            results[f"{name}: {schedule}"] = _train_steps(engine, batches, 2)[-1]
    return results


def test_split_backward_matches_1f1b_for_all_gradient_storages() -> None:
    """It finds them in buffers and in attributes of parameters, as the sums beside it do."""
    for results in run_ranks(4, _train_with_schedules):
        for name, last in results.items():
            plain = results[name.partition(":")[0] + ": 1f1b"]
            assert last["loss"] == plain["loss"] and last["scale"] == plain["scale"], name
            assert _equal_weights(last["weights"], plain["weights"]), name


def _get_error(rank: int) -> str:
    with pytest.raises(ValueError, match="main params in fp32, got fp64 parameters") as raised:
        make_engine(Toy(config={"zero_optimization": ZERO, "zero_allow_untested_optimizer": True}), 1)
    return str(raised.value)


def test_fp64_under_zero_and_unsupported_optimizers_are_rejected() -> None:
    assert "stage 0" in run_ranks(1, _get_error)[0]
    with pytest.raises(NotImplementedError, match=r"DeepSpeed's SGD \(ZeRO stage 1\)"):
        gradient_source_for(torch.optim.SGD([torch.zeros(1)], lr=0.1), 1)


def _stop_and_retrain(rank: int) -> list[Any]:
    results = []
    for config in ({}, {**BF16, **ACCUMULATES, "zero_optimization": ZERO}, {"zero_optimization": ZERO}):
        outcome = []
        for is_stopped in (True, False):
            engine, batches = _build("tied", config)
            if is_stopped:
                engine.on_loss = _stop
                with pytest.raises(ArithmeticError):
                    engine.train_batch(iter(batches))
                engine.on_loss = None
            outcome.append(_train_steps(engine, batches, 1)[0])
        results.append(outcome)
    return results


def _stop(_: Any) -> None:
    raise ArithmeticError


def test_batch_stopped_by_on_loss_leaves_no_gradients() -> None:
    for results in run_ranks(2, _stop_and_retrain):
        for after, fresh in results:
            assert after["loss"] == fresh["loss"] and _equal_weights(after["weights"], fresh["weights"])
