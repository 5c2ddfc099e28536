"""--debug-nan and --debug-dump in whole runs: who is named, and that nothing is there where neither is given."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import pretrain_gpt2
from megatron.debug.dump_files import read
from megatron.errors import NumericsError, exit_code
from megatron.models.common.parameters import named_modules
from megatron.training import parity, setup, step_result
from megatron.training.step_result import ModuleError
from tests.helpers import dumps
from tests.helpers.harness import run_ranks
from tests.training import guarded

HIT = "layers.1.mlp.up"
IN_TRAINING = "megatron.training.callbacks.debugger"
SLICED = "layers.0.attention.query_key_value"
SMALL = "--eval-iters 0 --train-iters 5 --clip-grad 0 --lr 1e-3"


def spoil_from_the_third_step(rank: int) -> None:
    """Let a module of one layer give an infinite number in the second micro-batch of step 3."""
    plain = setup.build_model

    def spoiled(*args):
        model = plain(*args)
        for name, module in named_modules(model):
            if name == HIT:
                module.register_forward_hook(_Spoiler())
        return model

    setup.build_model = spoiled


class _Spoiler:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, module: torch.nn.Module, args: object, output: torch.Tensor) -> torch.Tensor | None:
        self.calls += module.training
        return output * float("inf") if self.calls == 6 else None


def test_the_rank_that_holds_the_module_names_it_and_all_end_ahead_of_the_update(corpus: Path, tmp_path: Path) -> None:
    flags = f"{SMALL} --debug-nan --pipe-parallel-size 2"
    first, last = guarded.train(2, corpus, tmp_path / "run", flags, spoil_from_the_third_step)
    wanted = (
        f"On this rank, {HIT} returned NaN or infinity in the forward of micro-batch 1, although its inputs were finite"
    )
    assert wanted in last.error and last.is_of_this_rank and "step 3 (samples 8-11)" in last.error
    assert "--debug-nan" in first.error and HIT not in first.error and not first.is_of_this_rank
    for seen in (first, last):
        assert seen.steps == [0, 1, 2] and seen.digests[-1] == seen.digests[-2]
    assert exit_code(ModuleError("", "")) == exit_code(NumericsError("")) == 5


def spoil_one_slice(rank: int) -> None:
    """Let the slice of a column layer that tensor rank 1 holds give an infinite number in step 3."""
    plain = setup.build_model

    def spoiled(*args):
        model = plain(*args)
        for name, module in named_modules(model):
            if name == SLICED and rank == 1:
                module.register_forward_hook(_Spoiler())
        return model

    setup.build_model = spoiled


@pytest.mark.parametrize("flag", ["--debug-nan", pytest.param("--debug-dump", marks=pytest.mark.slow)])
def test_of_a_tensor_group_the_rank_that_made_it_speaks_alone(corpus: Path, tmp_path: Path, flag: str) -> None:
    flags = f"{SMALL} {flag if flag == '--debug-nan' else f'{flag} {tmp_path}/dump'} --model-parallel-size 2"
    first, last = guarded.train(2, corpus, tmp_path / "run", flags, spoil_one_slice)
    assert f"On this rank, {SLICED} returned NaN or infinity" in last.error and last.is_of_this_rank
    assert first.error and "returned NaN" not in first.error
    if flag == "--debug-dump":
        assert [(each["name"], each["step"]) for each in read(tmp_path / "dump").findings] == [(SLICED, 3)]


class _Poisoned(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * float("nan")


def spoil_a_gradient(rank: int) -> None:
    """Let a layer of the first stage's second chunk send NaN back, all the way to the first layer."""
    plain = setup.build_model

    def spoiled(*args):
        model = plain(*args)
        for name, module in named_modules(model):
            if name == "layers.3.mlp.down":
                module.register_forward_pre_hook(lambda module, given: (_Poisoned.apply(given[0]),))
        return model

    setup.build_model = spoiled


@pytest.mark.slow
@pytest.mark.parametrize("lie", ["--pipeline-chunks 2", "--pipeline-schedule zb-v"])
def test_a_gradient_that_comes_from_another_chunk_is_not_the_losss(corpus: Path, tmp_path: Path, lie: str) -> None:
    flags = f"{SMALL} --debug-nan --pipe-parallel-size 2 {lie} --num-layers 4 --partition-method uniform"
    holder, other = guarded.train(2, corpus, tmp_path / "run", flags, spoil_a_gradient)
    if "zb-v" in lie:  # the last layers are those of the second stage, which hands them its own
        holder, other = other, holder
    assert (
        "On this rank, NaN or infinity arose between layers.3.mlp.down and layers.3.mlp.up in the backward"
        in holder.error
    )
    assert "--debug-nan" in other.error and "Here" not in other.error


@pytest.mark.slow
def test_a_dump_names_the_module_beside_the_loss_and_lets_a_guard_go_on(corpus: Path, tmp_path: Path) -> None:
    def flags(name: str) -> str:
        return f"{SMALL} --debug-dump {tmp_path / name} --debug-dump-steps 3-4"

    (seen,) = guarded.train(1, corpus, tmp_path / "run", flags("dump"), spoil_from_the_third_step)
    assert (
        "the loss must be finite, got nan" in seen.error
        and f"On this rank, {HIT} returned NaN or infinity" in seen.error
    )
    assert [finding["name"] for finding in read(tmp_path / "dump").findings] == [HIT]
    skipping = f"{flags('dump-2')} --stability-guard skip"
    (seen,) = guarded.train(1, corpus, tmp_path / "run-2", skipping, spoil_from_the_third_step)
    dump = read(tmp_path / "dump-2")
    assert not seen.error and [finding["step"] for finding in dump.findings] == [3]
    assert dump.ends[3]["is_skipped"] and not dump.ends[4]["is_skipped"]
    hit = [r for r in dump.records if r.name == HIT and r.what == "output" and not r.statistics.is_finite]
    assert [(r.step, r.micro_batch) for r in hit] == [(3, 1)] and hit[0].statistics.inf > 0


def _ours() -> list[str]:
    """Return the debugger's modules that are imported."""
    return [name for name in sys.modules if name.startswith("megatron.debug") or name == IN_TRAINING]


def _look(rank: int, extra: str) -> tuple[list[str], int, bool]:
    """Return what is imported, the number of hooks there are, and whether its check of the loss is its own."""
    for name in _ours():
        del sys.modules[name]
    found = []
    plain = parity.build_engine

    def kept(*args):
        found.append(plain(*args))
        return found[0]

    parity.build_engine = kept
    words = dumps.argv(pretrain_gpt2, (1, 1, 1), 1, None, f"--fp32 {extra}")
    dumps._rank(rank, words, 1, "pretrain_gpt2", 2, None)
    tables = [(m._forward_hooks, m._forward_pre_hooks, m._backward_hooks) for m in found[0].module.modules()]
    hooks = sum(not hook.__module__.startswith("deepspeed") for each in tables for t in each for hook in t.values())
    return _ours(), hooks, found[0].on_loss.__func__ is step_result.FiniteLossCheck.take_loss


def test_without_the_flags_nothing_is_imported_hooked_or_wrapped(tmp_path: Path) -> None:
    assert run_ranks(1, _look, "")[0] == ([], 0, True)
    imported, hooks, is_own = run_ranks(1, _look, f"--debug-dump {tmp_path} --debug-dump-steps 1")[0]
    assert imported and not is_own
    assert hooks == 0  # behind the dumped step


@pytest.mark.slow
def test_pieces_of_samples_are_dumped_as_samples_in_every_micro_batch_size(tmp_path: Path) -> None:
    """Step 1 has pieces of 2 tokens and step 2 whole samples of 8; 8 of these are a step."""
    for gas in (1, 4):
        dumps.run(tmp_path / str(gas), gas=gas, extra="--fp64 --seq-length-schedule 0:2;64:8")
    one, other = read(tmp_path / "1"), read(tmp_path / "4")
    for dump, gas in ((one, 1), (other, 4)):
        found = {(r.step, r.samples, r.shape[:2]) for r in dump.records if r.name == SLICED and r.what == "output"}
        assert {(step, shape) for step, _, shape in found} == {(1, (2, 32 // gas)), (2, (8, 8 // gas))}
        assert all(samples is not None and samples.stop - samples.first == shape[1] for _, samples, shape in found)
        assert {samples.stop for step, samples, _ in found if step == 1} == {32 // gas * (n + 1) for n in range(gas)}
