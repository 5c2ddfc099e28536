"""--debug-nan and --debug-dump in whole runs: who is named, and that nothing is there where neither is given."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import pretrain_gpt2
from megatron.debug.dump_files import read_dump
from megatron.errors import NumericsError, exit_code
from megatron.models.common.parameters import named_modules
from megatron.training import parity, setup, step_result
from megatron.training.step_result import ModuleError
from tests.helpers import dumps
from tests.helpers.harness import run_ranks
from tests.training import guarded

FAULTY_MODULE = "layers.1.mlp.up"
DEBUGGER_MODULE = "megatron.training.callbacks.debugger"
SHARDED_MODULE = "layers.0.attention.query_key_value"
SHORT_RUN = "--eval-iters 0 --train-iters 5 --clip-grad 0 --lr 1e-3"


def inject_inf_from_step_3(rank: int) -> None:
    """Let a module of one layer give an infinite number in the second micro-batch of step 3."""
    original_build_model = setup.build_model

    def build_faulty_model(*args):
        model = original_build_model(*args)
        for name, module in named_modules(model):
            if name == FAULTY_MODULE:
                module.register_forward_hook(_InfInjector())
        return model

    setup.build_model = build_faulty_model


class _InfInjector:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, module: torch.nn.Module, args: object, output: torch.Tensor) -> torch.Tensor | None:
        self.calls += module.training
        return output * float("inf") if self.calls == 6 else None


def test_rank_of_faulty_module_names_it_and_all_ranks_stop_before_update(corpus: Path, tmp_path: Path) -> None:
    flags = f"{SHORT_RUN} --debug-nan --pipe-parallel-size 2"
    first, last = guarded.train(2, corpus, tmp_path / "run", flags, inject_inf_from_step_3)
    expected = (
        f"On this rank, {FAULTY_MODULE} returned NaN or infinity in the forward of micro-batch 1, although its inputs "
        "were finite"
    )
    assert expected in last.error and last.is_of_this_rank and "step 3 (samples 8-11)" in last.error
    assert "--debug-nan" in first.error and FAULTY_MODULE not in first.error and not first.is_of_this_rank
    for result in (first, last):
        assert result.steps == [0, 1, 2] and result.digests[-1] == result.digests[-2]
    assert exit_code(ModuleError("", "")) == exit_code(NumericsError("")) == 5


def inject_inf_on_tensor_rank_1(rank: int) -> None:
    """Let the slice of a column layer that tensor rank 1 holds give an infinite number in step 3."""
    original_build_model = setup.build_model

    def build_faulty_model(*args):
        model = original_build_model(*args)
        for name, module in named_modules(model):
            if name == SHARDED_MODULE and rank == 1:
                module.register_forward_hook(_InfInjector())
        return model

    setup.build_model = build_faulty_model


@pytest.mark.parametrize("flag", ["--debug-nan", pytest.param("--debug-dump", marks=pytest.mark.slow)])
def test_only_faulty_tensor_rank_names_module(corpus: Path, tmp_path: Path, flag: str) -> None:
    flags = f"{SHORT_RUN} {flag if flag == '--debug-nan' else f'{flag} {tmp_path}/dump'} --model-parallel-size 2"
    first, last = guarded.train(2, corpus, tmp_path / "run", flags, inject_inf_on_tensor_rank_1)
    assert f"On this rank, {SHARDED_MODULE} returned NaN or infinity" in last.error and last.is_of_this_rank
    assert first.error and "returned NaN" not in first.error
    if flag == "--debug-dump":
        assert [(finding["name"], finding["step"]) for finding in read_dump(tmp_path / "dump").findings] == [
            (SHARDED_MODULE, 3)
        ]


class _NanGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * float("nan")


def inject_nan_gradient(rank: int) -> None:
    """Let a layer of the first stage's second chunk send NaN back, all the way to the first layer."""
    original_build_model = setup.build_model

    def build_faulty_model(*args):
        model = original_build_model(*args)
        for name, module in named_modules(model):
            if name == "layers.3.mlp.down":
                module.register_forward_pre_hook(lambda module, inputs: (_NanGradient.apply(inputs[0]),))
        return model

    setup.build_model = build_faulty_model


@pytest.mark.slow
@pytest.mark.parametrize("placement_flags", ["--pipeline-chunks 2", "--pipeline-schedule zb-v"])
def test_nan_gradient_from_another_chunk_is_not_attributed_to_loss(
    corpus: Path, tmp_path: Path, placement_flags: str
) -> None:
    flags = (
        f"{SHORT_RUN} --debug-nan --pipe-parallel-size 2 {placement_flags} --num-layers 4 --partition-method uniform"
    )
    owner, other = guarded.train(2, corpus, tmp_path / "run", flags, inject_nan_gradient)
    if "zb-v" in placement_flags:  # the last layers are those of the second stage, which hands them its own
        owner, other = other, owner
    assert (
        "On this rank, NaN or infinity first appeared between layers.3.mlp.down and layers.3.mlp.up in the backward"
        in owner.error
    )
    assert "--debug-nan" in other.error and "Here" not in other.error


@pytest.mark.slow
def test_dump_names_module_of_nan_loss_and_guard_skips_step(corpus: Path, tmp_path: Path) -> None:
    def make_flags(name: str) -> str:
        return f"{SHORT_RUN} --debug-dump {tmp_path / name} --debug-dump-steps 3-4"

    (result,) = guarded.train(1, corpus, tmp_path / "run", make_flags("dump"), inject_inf_from_step_3)
    assert (
        "the loss must be finite, got nan" in result.error
        and f"On this rank, {FAULTY_MODULE} returned NaN or infinity" in result.error
    )
    assert [finding["name"] for finding in read_dump(tmp_path / "dump").findings] == [FAULTY_MODULE]
    skip_flags = f"{make_flags('dump-2')} --stability-guard skip"
    (result,) = guarded.train(1, corpus, tmp_path / "run-2", skip_flags, inject_inf_from_step_3)
    dump = read_dump(tmp_path / "dump-2")
    assert not result.error and [finding["step"] for finding in dump.findings] == [3]
    assert dump.ends[3]["is_skipped"] and not dump.ends[4]["is_skipped"]
    nonfinite_records = [
        r for r in dump.records if r.name == FAULTY_MODULE and r.what == "output" and not r.statistics.is_finite
    ]
    assert [(r.step, r.micro_batch) for r in nonfinite_records] == [(3, 1)] and nonfinite_records[0].statistics.inf > 0


def _imported_debug_modules() -> list[str]:
    """Return the debugger's modules that are imported."""
    return [name for name in sys.modules if name.startswith("megatron.debug") or name == DEBUGGER_MODULE]


def _inspect_engine(rank: int, extra: str) -> tuple[list[str], int, bool]:
    """Return what is imported, the number of hooks there are, and whether its check of the loss is its own."""
    for name in _imported_debug_modules():
        del sys.modules[name]
    engines = []
    original_build_engine = parity.build_engine

    def recording_build_engine(*args):
        engines.append(original_build_engine(*args))
        return engines[0]

    parity.build_engine = recording_build_engine
    argv = dumps.make_argv(pretrain_gpt2, (1, 1, 1), 1, None, f"--fp32 {extra}")
    dumps._run_rank(rank, argv, 1, "pretrain_gpt2", 2, None)
    hook_tables = [
        (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
        for module in engines[0].module.modules()
    ]
    num_hooks = sum(
        not hook.__module__.startswith("deepspeed")
        for module_tables in hook_tables
        for table in module_tables
        for hook in table.values()
    )
    return _imported_debug_modules(), num_hooks, engines[0].on_loss.__func__ is step_result.FiniteLossCheck.record_loss


def test_debugger_is_not_imported_or_hooked_without_flags(tmp_path: Path) -> None:
    assert run_ranks(1, _inspect_engine, "")[0] == ([], 0, True)
    imported, num_hooks, is_default_check = run_ranks(
        1, _inspect_engine, f"--debug-dump {tmp_path} --debug-dump-steps 1"
    )[0]
    assert imported and not is_default_check
    assert num_hooks == 0  # behind the dumped step


@pytest.mark.slow
def test_short_samples_are_dumped_with_sample_indices(tmp_path: Path) -> None:
    """Step 1 has slices of 2 tokens and step 2 whole samples of 8; 8 of these are a step."""
    for gas in (1, 4):
        dumps.train_with_dumps(tmp_path / str(gas), gas=gas, extra="--fp64 --seq-length-schedule 0:2;64:8")
    first_dump, second_dump = read_dump(tmp_path / "1"), read_dump(tmp_path / "4")
    for dump, gas in ((first_dump, 1), (second_dump, 4)):
        outputs = {
            (r.step, r.samples, r.shape[:2]) for r in dump.records if r.name == SHARDED_MODULE and r.what == "output"
        }
        assert {(step, shape) for step, _, shape in outputs} == {(1, (2, 32 // gas)), (2, (8, 8 // gas))}
        assert all(samples is not None and samples.stop - samples.first == shape[1] for _, samples, shape in outputs)
        assert {samples.stop for step, samples, _ in outputs if step == 1} == {32 // gas * (n + 1) for n in range(gas)}
