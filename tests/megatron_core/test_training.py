"""megatron-core and our program train the same models from the same weights: logits, gradients, norms, 20 steps.

Both sides run their own layers, gradient reduction, clipping, AdamW and learning-rate schedule; ours reads
Megatron-LM's flags. megatron-core's optimizer is its own ``get_megatron_optimizer``, with CUDA mapped to the CPU. In
fp64 its conversions to fp32 are replaced (``fp64_for_fp32``), so that only differences in the formulas would remain.

The learning rate of our step n is that of Megatron's step n + 1 (docs/migration.md), so the program advances
megatron-core's scheduler once before the first step.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.arguments.other_programs import GPT
from megatron.config import Config, parse
from megatron.data.mock_dataset import MockTokens
from megatron.models.common.parallel_context import ParallelContext
from megatron.models.registry import build_model
from megatron.mpu.shard import set_uninitialized
from megatron.training import initialize
from megatron.training.parity import Trace, trace_steps
from megatron.training.programs import decoder
from tests.helpers.harness import run_ranks
from tests.helpers.megatron_core import requires_megatron_core, run_megatron_core
from tests.helpers.model_samples import fill_weights, join_shards, make_full_weight, worst_relative_error
from tests.megatron_core.training_cases import CASES, CLIP_GRAD, GLOBAL_BATCH, SEQ, STEPS, VOCAB, TrainingCase
from tests.megatron_core.weight_names import core_name, to_core_rows, to_our_rows
from tests.megatron_core.weight_names import join_shards as join_core_shards

pytestmark = [pytest.mark.slow, requires_megatron_core]
LAYOUTS = (1, 2)
PRECISIONS = ("fp64", "fp32")
TOKENS = MockTokens(VOCAB, SEQ, seed=5)
ALLOWED = {
    "fp64": {"logits": 1e-13, "gradients": 1e-11, "loss": 1e-12, "norm": 1e-12, "weights": 1e-10},
    "fp32": {"logits": 2e-6, "gradients": 3e-6, "loss": 2e-5, "norm": 2e-5, "weights": None},
}
"""Allowed relative errors by precision. Weights after 20 steps of Adam are not comparable in fp32."""


def our_config(case: TrainingCase, tensor: int, precision: str) -> Config:
    """Return the configuration that our program reads from the flags of ``case``."""
    argv = [*case.flags_of_layout(tensor), f"--{precision}"]
    return parse(argv, world_size=tensor, family="gpt2", defaults=GPT).with_vocab(VOCAB)


@functools.cache
def full_weights(name: str) -> dict[str, torch.Tensor]:
    """Return the full initial weights of a case, in fp64, exactly representable in fp32."""
    model = build_model(our_config(CASES[name], 1, "fp64"), ParallelContext())
    return {
        parameter_name: make_full_weight(parameter_name, tuple(parameter.shape)).float().double()
        for parameter_name, parameter in model.named_parameters()
    }


def train_ours(rank: int, case: TrainingCase, tensor: int, precision: str) -> tuple[torch.Tensor, Trace]:
    """Train ``case`` with our program; return the logits [s, b, v/t] of the first micro-batch and the trace."""
    config = our_config(case, tensor, precision)
    world = initialize.start(config)
    logits: list[torch.Tensor] = []

    def model_provider() -> torch.nn.Module:
        model = fill_weights(decoder.model_provider())
        for parameter in model.parameters():
            set_uninitialized(parameter, False)
        return model

    def forward_step(batches: Any, model: Any) -> Any:
        fields = decoder.get_batch(None if batches is None else next(batches))
        if not logits:
            inputs = {name: value for name, value in fields.items() if name not in ("labels", "loss_mask")}
            with torch.no_grad():
                logits.append(model.eval()(**inputs).clone())
            model.train()
        return model(**fields), {}

    trace = trace_steps(config, world, TOKENS, model_provider, forward_step, num_steps=STEPS)
    return logits[0], trace


@pytest.fixture(scope="module")
def core_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with the results of megatron-core for all cases, layouts and precisions."""
    folder = tmp_path_factory.mktemp("core")
    rows = [torch.from_numpy(TOKENS[idx]) for idx in range(STEPS * GLOBAL_BATCH)]
    torch.save(torch.stack(rows), folder / "tokens.pt")
    for name, case in CASES.items():
        weights = {
            core_name(our_name): to_core_rows(core_name(our_name), weight, is_gated=case.is_gated)
            for our_name, weight in full_weights(name).items()
        }
        torch.save(weights, folder / f"{name}.pt")
    cases = [(name, precision) for name in CASES for precision in PRECISIONS]
    for tensor in LAYOUTS:
        run_megatron_core("tests.megatron_core.training_program", folder, tensor, cases=cases, tensor=tensor)
    return folder


def read_core(folder: Path, name: str, tensor: int, precision: str) -> dict[str, Any]:
    """Return megatron-core's values of a case, with full tensors under our names."""
    ranks = [torch.load(folder / f"{name}-{precision}-{tensor}-{rank}.pt") for rank in range(tensor)]
    values = {**ranks[0], "logits": torch.cat([rank["logits"] for rank in ranks], dim=-1)}
    is_gated = CASES[name].is_gated
    for quantity in ("gradients", "weights"):
        values[quantity] = {}
        for our_name in full_weights(name):
            shards = [rank[quantity][core_name(our_name)] for rank in ranks]
            full = join_core_shards(core_name(our_name), shards, is_gated=is_gated)
            values[quantity][our_name] = to_our_rows(core_name(our_name), full, is_gated=is_gated)
    return values


def mean_losses(case: TrainingCase, values: dict[str, Any]) -> list[float]:
    """Return the loss of each step from megatron-core's sums and numbers of tokens of micro-batches."""
    if case.config.get("calculate_per_token_loss"):
        return [sum(total for total, _ in step) / sum(count for _, count in step) for step in values["losses"]]
    return [sum(total / count for total, count in step) / len(step) for step in values["losses"]]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("tensor", LAYOUTS)
@pytest.mark.parametrize("name", CASES)
def test_model_trains_as_in_megatron_core(core_folder: Path, name: str, tensor: int, precision: str) -> None:
    case = CASES[name]
    core = read_core(core_folder, name, tensor, precision)
    ranks = run_ranks(tensor, train_ours, case, tensor, precision)
    trace = ranks[0][1]
    logits = torch.cat([rank_logits for rank_logits, _ in ranks], dim=-1).transpose(0, 1)
    gradients = join_shards([rank_trace.gradients for _, rank_trace in ranks])
    weights = join_shards([rank_trace.weights for _, rank_trace in ranks])
    losses = mean_losses(case, core)
    gradient_error, worst_gradient = worst_relative_error(gradients, core["gradients"])
    weight_error, worst_weight = worst_relative_error(weights, core["weights"])
    observed = {
        "logits": (logits - core["logits"]).abs().max().item() / core["logits"].abs().max().item(),
        "gradients": gradient_error,
        "loss": max(abs(ours - theirs) / theirs for ours, theirs in zip(trace.losses, losses, strict=True)),
        "norm": max(abs(o - t) / t for o, t in zip(trace.grad_norms, core["norms"], strict=True)),
        "weights": weight_error,
    }
    print(name, tensor, precision, {k: f"{v:.1e}" for k, v in observed.items()}, worst_gradient, worst_weight)
    for quantity, allowed in ALLOWED[precision].items():
        assert allowed is None or observed[quantity] <= allowed, (quantity, worst_gradient, worst_weight)
    assert max(core["norms"]) > CLIP_GRAD, "gradients are clipped"
    for our_name, initial in full_weights(name).items():
        assert (core["weights"][our_name] - initial).norm() > 1e-3 * initial.norm(), f"{our_name} does not change"
