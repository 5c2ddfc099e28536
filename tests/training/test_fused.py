"""apex's kernels where they are chosen; a module that computes the same on the CPU stands in for apex."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megatron.config import Config, OptimizerConfig, ParallelConfig, PrecisionConfig, parse
from megatron.errors import ConfigError
from megatron.models.common.norms import LayerNorm, RMSNorm, rms_norm
from megatron.optim import MixedPrecisionOptimizer, build_optimizer
from megatron.training import fused_kernels, kernel_rows
from megatron.training.state_records import make_moments, optimizer_steps, set_optimizer_steps


class FusedAdam(torch.optim.Optimizer):
    """Adam as apex's has it: it counts steps in the group, and keeps two moments for each weight."""

    def __init__(self, params: Any, lr: float, betas: Any, eps: float, adam_w_mode: bool, weight_decay: float = 0.0):
        assert adam_w_mode
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def step(self) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            (b1, b2), n = group["betas"], group["step"]
            for p in group["params"]:
                if not self.state[p]:
                    self.state[p].update(exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
                m, v = self.state[p]["exp_avg"], self.state[p]["exp_avg_sq"]
                m.lerp_(p.grad, 1 - b1)
                v.mul_(b2).addcmul_(p.grad, p.grad, value=1 - b2)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(group["lr"] * (m / (1 - b1**n)) / ((v / (1 - b2**n)).sqrt() + group["eps"]))


@pytest.fixture
def apex(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Put a stand-in for apex into ``sys.modules``; the list names the norms that were called."""
    calls: list[str] = []

    def fake_layer_norm(x: Any, weight: Any, bias: Any, shape: Any, eps: float) -> torch.Tensor:
        calls.append("layer")
        return F.layer_norm(x, shape, weight, bias, eps)

    def fake_rms_norm(x: Any, weight: Any, shape: Any, eps: float) -> torch.Tensor:
        calls.append("rms")
        return rms_norm(x, weight, eps)

    for name in ("apex", "apex.normalization", *fused_kernels.APEX_MODULES):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    norms = sys.modules["apex.normalization.fused_layer_norm"]
    norms.fused_layer_norm_affine, norms.fused_rms_norm_affine = fake_layer_norm, fake_rms_norm  # type: ignore[attr-defined]
    sys.modules["apex.optimizers"].FusedAdam = FusedAdam  # type: ignore[attr-defined]
    return calls


def make_config(kernels: str, dtype: str = "fp32", **optimizer: Any) -> Config:
    return Config(
        parallel=ParallelConfig(fused_kernels=kernels),
        precision=PrecisionConfig(dtype=dtype),
        optimizer=OptimizerConfig(**optimizer),
    )


def kernel_row(config: Config, device_type: str) -> str:
    return dict(fused_kernels.fused_kernel_rows(config, device_type))["fused kernels"]


def test_apex_is_rejected_on_unsupported_device_or_dtype() -> None:
    assert parse(["--fused-kernels", "apex", "--dry-run"], world_size=1, env={}).parallel.fused_kernels == "apex"
    with pytest.raises(ConfigError, match="--fused-kernels apex needs a GPU, got --device cpu"):
        fused_kernels.check_fused_kernels(make_config("apex"), "cpu")
    with pytest.raises(ConfigError, match="needs NVIDIA's apex with its CUDA extensions, got No module named 'apex'"):
        fused_kernels.check_fused_kernels(make_config("apex"), "cuda")
    with pytest.raises(ConfigError, match="needs fp32, bf16 or fp16, got --fp64"):
        fused_kernels.check_fused_kernels(make_config("apex", "fp64"), "cuda")
    for kernels in ("auto", "torch"):
        fused_kernels.check_fused_kernels(make_config(kernels), "cuda")
        assert kernel_row(make_config(kernels), "cuda") == "torch's"


def test_apex_without_extensions_is_rejected(apex: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    fused_kernels.check_fused_kernels(make_config("apex"), "cuda")
    monkeypatch.setitem(sys.modules, "amp_C", None)
    with pytest.raises(ConfigError, match="needs NVIDIA's apex with its CUDA extensions, got .*amp_C"):
        fused_kernels.check_fused_kernels(make_config("apex"), "cuda")


def test_start_table_names_fused_kernel_choice(apex: list[str]) -> None:
    assert kernel_row(make_config("auto"), "cuda").startswith("torch's (apex is installed, too: --fused-kernels apex")
    assert kernel_row(make_config("auto"), "cpu") == kernel_row(make_config("torch"), "cuda") == "torch's"
    assert kernel_row(make_config("apex"), "cuda") == "apex's norms and AdamW"
    message = "apex's norms; the optimizer is not apex's, which has only AdamW on the GPU"
    assert kernel_row(make_config("apex", optimizer="sgd"), "cuda") == message


def test_norms_use_apex_if_chosen_and_supported(apex: list[str]) -> None:
    modules = torch.nn.ModuleList(
        [LayerNorm(8, 1e-5), torch.nn.Sequential(RMSNorm(8, 1e-6)), LayerNorm(8, 1e-5, False)]
    )
    x = torch.randn(3, 8)
    before = [module(x) for module in modules]
    for kernels in ("auto", "torch"):
        assert fused_kernels.set_norm_kernels(make_config(kernels), modules) == 0
    assert fused_kernels.set_norm_kernels(make_config("apex"), modules) == 2 and not apex
    after = [module(x) for module in modules]
    assert apex == ["layer", "rms"], "apex has no layer norm without a shift"
    assert all(
        torch.equal(before_output, after_output) for before_output, after_output in zip(before, after, strict=True)
    )
    LayerNorm(8, 1e-5)(x)
    assert len(apex) == 2, "other norms stay torch's"


def make_module_and_optimizer(adam: Any) -> tuple[torch.nn.Module, MixedPrecisionOptimizer]:
    torch.manual_seed(0)
    module = torch.nn.Linear(6, 4)
    return module, build_optimizer(module.parameters(), lr=0.1, weight_decay=0.1, adam=adam)


def train(module: torch.nn.Module, optimizer: MixedPrecisionOptimizer, first: int, last: int) -> None:
    for step in range(first, last):
        module(torch.full((2, 6), 0.1 * step + 0.5)).square().sum().backward()
        optimizer.step()


def test_apex_adam_matches_torch_adam_also_after_resume(apex: list[str]) -> None:
    assert fused_kernels.uses_apex_adam(make_config("apex")) and not fused_kernels.uses_apex_adam(make_config("auto"))
    torch_run, apex_run = make_module_and_optimizer(None), make_module_and_optimizer(fused_kernels.apex_adam)
    for pair in (torch_run, apex_run):
        train(*pair, 0, 3)
    assert torch.allclose(torch_run[0].weight, apex_run[0].weight, atol=1e-6)
    assert optimizer_steps(torch_run[1]) == optimizer_steps(apex_run[1]) == 3
    assert not torch.equal(torch_run[0].weight, make_module_and_optimizer(None)[0].weight)
    for source, adam in ((torch_run, fused_kernels.apex_adam), (apex_run, None)):
        module, optimizer = make_module_and_optimizer(adam)
        make_moments(optimizer)
        module.load_state_dict(source[0].state_dict())
        for resumed_state, source_state in zip(
            optimizer.inner.state.values(), source[1].inner.state.values(), strict=True
        ):
            for key in ("exp_avg", "exp_avg_sq"):
                resumed_state[key].copy_(source_state[key])
        set_optimizer_steps(optimizer, 3)
        train(module, optimizer, 3, 5)
        expected_module, expected_optimizer = make_module_and_optimizer(None)
        train(expected_module, expected_optimizer, 0, 5)
        assert torch.allclose(module.weight, expected_module.weight, atol=1e-6)
        assert optimizer_steps(optimizer) == 5


def test_optimizer_setup_uses_chosen_adam(apex: list[str]) -> None:
    from megatron.training import optimizer_setup

    assert optimizer_setup._adam_constructor(make_config("apex")) is fused_kernels.apex_adam
    assert (
        optimizer_setup._adam_constructor(make_config("auto"))
        is None
        is optimizer_setup._adam_constructor(make_config("apex", optimizer="sgd"))
    )


DRY_RUN_ARGS = ["--hidden-dropout", "0.1", "--attention-dropout", "0.1", "--bf16", "--dry-run"]


def make_dropout_config(*flags: str) -> Config:
    return parse([*DRY_RUN_ARGS, "--layout-independent-dropout", *flags], world_size=1, env={})


def test_start_table_names_cuda_dropout_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_rows, "has_triton", lambda: True)
    by_kernel, by_torch = (
        make_dropout_config("--attention-dropout", "0"),
        make_dropout_config("--fused-kernels", "torch"),
    )
    assert [name for name, _ in kernel_rows.dropout_rows(by_kernel, "cuda")] == ["dropout"]
    assert not list(kernel_rows.dropout_rows(by_torch, "cuda")) and not list(kernel_rows.dropout_rows(by_kernel, "cpu"))
    kernel_warning, torch_warning = (kernel_rows.dropout_warning(config, "cuda") for config in (by_kernel, by_torch))
    assert (
        kernel_warning is not None and "not been run on a GPU" in kernel_warning and "attention" not in kernel_warning
    )
    assert torch_warning is not None and "6 to 7 times as long; attention dropout stores all" in torch_warning
    assert kernel_rows.dropout_warning(by_kernel, "cpu") is None
    plain_config = parse(DRY_RUN_ARGS, world_size=1, env={})
    assert kernel_rows.dropout_warning(plain_config, "cuda") is None
    monkeypatch.setattr(kernel_rows, "has_triton", lambda: False)
    assert not list(kernel_rows.dropout_rows(by_kernel, "cuda"))


LLAMA_ARGS = "--position-embedding-type rope --normalization RMSNorm --activation gated-silu --bf16 --dry-run".split()


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", "rotary positions, gated activation, norms with residual connections, by kernels"),
        ("--zero-stage 3", "rotary positions, gated activation, by kernels"),
        ("--fused-kernels apex", "rotary positions, gated activation, by kernels"),
        ("--activation gelu --position-embedding-type alibi", "norms with residual connections, by kernels"),
        ("--fused-kernels torch", None),
        ("--compile", None),
    ],
)
def test_start_table_names_triton_kernels(flags: str, expected: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_rows, "has_triton", lambda: True)
    config = parse([*LLAMA_ARGS, *flags.split()], world_size=1, env={})
    rows = dict(kernel_rows.triton_rows(config, "cuda"))
    assert rows["Triton kernels"].startswith(expected) if expected else not rows
    assert not list(kernel_rows.triton_rows(config, "cpu"))
    monkeypatch.setattr(kernel_rows, "has_triton", lambda: False)
    assert not list(kernel_rows.triton_rows(config, "cuda"))


def test_start_table_names_cross_entropy_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_rows, "has_triton", lambda: True)
    config, without_kernels, in_fp64 = (
        parse(["--dry-run", *flags], world_size=1, env={}) for flags in ([], ["--fused-kernels", "torch"], ["--fp64"])
    )
    assert [name for name, _ in kernel_rows.loss_rows(config, "cuda")] == ["cross-entropy"]
    for other_config, device_type in ((without_kernels, "cuda"), (in_fp64, "cuda"), (config, "cpu")):
        assert not list(kernel_rows.loss_rows(other_config, device_type))
    monkeypatch.setattr(kernel_rows, "has_triton", lambda: False)
    assert not list(kernel_rows.loss_rows(config, "cuda"))
