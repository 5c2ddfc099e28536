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
    called: list[str] = []

    def layer(x: Any, weight: Any, bias: Any, shape: Any, eps: float) -> torch.Tensor:
        called.append("layer")
        return F.layer_norm(x, shape, weight, bias, eps)

    def rms(x: Any, weight: Any, shape: Any, eps: float) -> torch.Tensor:
        called.append("rms")
        return rms_norm(x, weight, eps)

    for name in ("apex", "apex.normalization", *fused_kernels.MODULES):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    norms = sys.modules["apex.normalization.fused_layer_norm"]
    norms.fused_layer_norm_affine, norms.fused_rms_norm_affine = layer, rms  # type: ignore[attr-defined]
    sys.modules["apex.optimizers"].FusedAdam = FusedAdam  # type: ignore[attr-defined]
    return called


def config_of(kernels: str, dtype: str = "fp32", **optimizer: Any) -> Config:
    return Config(
        parallel=ParallelConfig(fused_kernels=kernels),
        precision=PrecisionConfig(dtype=dtype),
        optimizer=OptimizerConfig(**optimizer),
    )


def row(config: Config, kind: str) -> str:
    return dict(fused_kernels.fused_kernel_rows(config, kind))["fused kernels"]


def test_apex_is_refused_where_it_cannot_be() -> None:
    assert parse(["--fused-kernels", "apex", "--dry-run"], world_size=1, env={}).parallel.fused_kernels == "apex"
    with pytest.raises(ConfigError, match="--fused-kernels apex needs a GPU, got --device cpu"):
        fused_kernels.check_fused_kernels(config_of("apex"), "cpu")
    with pytest.raises(ConfigError, match="needs NVIDIA's apex with its CUDA extensions, got No module named 'apex'"):
        fused_kernels.check_fused_kernels(config_of("apex"), "cuda")
    with pytest.raises(ConfigError, match="needs fp32, bf16 or fp16, got --fp64"):
        fused_kernels.check_fused_kernels(config_of("apex", "fp64"), "cuda")
    for kernels in ("auto", "torch"):
        fused_kernels.check_fused_kernels(config_of(kernels), "cuda")
        assert row(config_of(kernels), "cuda") == "torch's"


def test_apex_without_its_extensions_is_refused(apex: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    fused_kernels.check_fused_kernels(config_of("apex"), "cuda")
    monkeypatch.setitem(sys.modules, "amp_C", None)
    with pytest.raises(ConfigError, match="needs NVIDIA's apex with its CUDA extensions, got .*amp_C"):
        fused_kernels.check_fused_kernels(config_of("apex"), "cuda")


def test_the_choice_is_told(apex: list[str]) -> None:
    assert row(config_of("auto"), "cuda").startswith("torch's (apex is installed, too: --fused-kernels apex")
    assert row(config_of("auto"), "cpu") == row(config_of("torch"), "cuda") == "torch's"
    assert row(config_of("apex"), "cuda") == "apex's norms and AdamW"
    message = "apex's norms; the optimizer is not apex's, which has only AdamW on the GPU"
    assert row(config_of("apex", optimizer="sgd"), "cuda") == message


def test_norms_use_apex_where_it_is_chosen_and_has_a_kernel(apex: list[str]) -> None:
    modules = torch.nn.ModuleList(
        [LayerNorm(8, 1e-5), torch.nn.Sequential(RMSNorm(8, 1e-6)), LayerNorm(8, 1e-5, False)]
    )
    x = torch.randn(3, 8)
    before = [module(x) for module in modules]
    for kernels in ("auto", "torch"):
        assert fused_kernels.use_norms(config_of(kernels), modules) == 0
    assert fused_kernels.use_norms(config_of("apex"), modules) == 2 and not apex
    after = [module(x) for module in modules]
    assert apex == ["layer", "rms"], "apex has no layer norm without a shift"
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    LayerNorm(8, 1e-5)(x)
    assert len(apex) == 2, "other norms stay torch's"


def make(adam: Any) -> tuple[torch.nn.Module, MixedPrecisionOptimizer]:
    torch.manual_seed(0)
    module = torch.nn.Linear(6, 4)
    return module, build_optimizer(module.parameters(), lr=0.1, weight_decay=0.1, adam=adam)


def train(module: torch.nn.Module, optimizer: MixedPrecisionOptimizer, first: int, last: int) -> None:
    for step in range(first, last):
        module(torch.full((2, 6), 0.1 * step + 0.5)).square().sum().backward()
        optimizer.step()


def test_adam_of_apex_moves_weights_as_torchs_and_a_resume_in_the_other_goes_on(apex: list[str]) -> None:
    assert fused_kernels.uses_adam(config_of("apex")) and not fused_kernels.uses_adam(config_of("auto"))
    whole, other = make(None), make(fused_kernels.apex_adam)
    for pair in (whole, other):
        train(*pair, 0, 3)
    assert torch.allclose(whole[0].weight, other[0].weight, atol=1e-6)
    assert optimizer_steps(whole[1]) == optimizer_steps(other[1]) == 3
    assert not torch.equal(whole[0].weight, make(None)[0].weight)
    for source, adam in ((whole, fused_kernels.apex_adam), (other, None)):
        module, optimizer = make(adam)
        make_moments(optimizer)
        module.load_state_dict(source[0].state_dict())
        for mine, theirs in zip(optimizer.inner.state.values(), source[1].inner.state.values(), strict=True):
            for key in ("exp_avg", "exp_avg_sq"):
                mine[key].copy_(theirs[key])
        set_optimizer_steps(optimizer, 3)
        train(module, optimizer, 3, 5)
        expected, going_on = make(None)
        train(expected, going_on, 0, 5)
        assert torch.allclose(module.weight, expected.weight, atol=1e-6)
        assert optimizer_steps(optimizer) == 5


def test_the_engine_is_built_with_what_was_chosen(apex: list[str]) -> None:
    from megatron.training import optimizer_setup

    assert optimizer_setup._adam(config_of("apex")) is fused_kernels.apex_adam
    assert optimizer_setup._adam(config_of("auto")) is None is optimizer_setup._adam(config_of("apex", optimizer="sgd"))


DRY = ["--hidden-dropout", "0.1", "--attention-dropout", "0.1", "--bf16", "--dry-run"]


def dropping(*flags: str) -> Config:
    return parse([*DRY, "--layout-independent-dropout", *flags], world_size=1, env={})


def test_the_start_says_by_what_elements_are_dropped_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_rows.fused_dropout, "is_there", lambda: True)
    by_kernel, by_torch = dropping("--attention-dropout", "0"), dropping("--fused-kernels", "torch")
    assert [name for name, _ in kernel_rows.dropout_rows(by_kernel, "cuda")] == ["dropout"]
    assert not list(kernel_rows.dropout_rows(by_torch, "cuda")) and not list(kernel_rows.dropout_rows(by_kernel, "cpu"))
    text, slow = (kernel_rows.dropout_warning(each, "cuda") for each in (by_kernel, by_torch))
    assert text is not None and "not been run on a GPU" in text and "attention" not in text
    assert slow is not None and "6 to 7 times as long; attention dropout stores all" in slow
    assert kernel_rows.dropout_warning(by_kernel, "cpu") is None
    plain = parse(DRY, world_size=1, env={})
    assert kernel_rows.dropout_warning(plain, "cuda") is None
    monkeypatch.setattr(kernel_rows.fused_dropout, "is_there", lambda: False)
    assert not list(kernel_rows.dropout_rows(by_kernel, "cuda"))
