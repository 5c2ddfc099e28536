"""What a run evaluates, saves, logs or compares beside its steps changes nothing in them, to the bit.

The model and the data set of these runs draw from torch's generator, in evaluation too, as a user's own may: state that
is moved shows in the next loss. Each layout runs once, in one set of forked ranks, with each of ``SIDE_ACTIVITIES`` in
turn.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import pretrain_gpt2
from megatron.checkpoint import open_latest
from megatron.checkpoint.manifest import CHECKPOINTS
from megatron.config import resolve_dtype
from megatron.data.gpt_dataset import GPTDataset
from megatron.models.common.transformer import MLP
from megatron.mpu.groups import SINGLE
from megatron.mpu.shard import Shard
from megatron.runtime.exit_signals import StopRequests
from megatron.training import Callback, initialize
from megatron.training.startup import run
from megatron.training.step_result import StepResult
from megatron.training.trainer import Trainer
from tests.helpers import runs
from tests.helpers.fake_trackers import FakeWandb
from tests.helpers.harness import run_ranks

NUM_STEPS = 6
BASE_FLAGS = (
    f"--train-iters {NUM_STEPS} --log-interval {NUM_STEPS} --eval-iters 2 --eval-interval 0 --save-interval-minutes 0 "
    "--drift-interval 0 --hidden-dropout 0.1 --attention-dropout 0.1"
)
SIDE_ACTIVITIES = {
    "evaluation": "--eval-interval 2",
    "checkpoints": "--save-interval 2 --keep-last 1",
    "checkpoints in the background": "--save-interval 2 --async-save",
    "checkpoints in DeepSpeed's layout": "--save-interval 2 --checkpoint-format deepspeed",
    "checkpoints by time": "--save-interval-minutes 1e-5",
    "log lines": "--log-interval 1",
    "norms of layers": "--log-interval 2 --log-layer-norms",
    "Weights & Biases": "--log-interval 1 --wandb-project p",
    "profile": "--profile 3-4",
    "dump": "--debug-dump {folder}/dump --debug-dump-steps 2,4-5 --debug-dump-tensors",
    "search for NaN": "--debug-nan",
    "guard": "--stability-guard skip --stability-sigma 1000 --stability-window 4",
    "guard that goes back": "--stability-guard rollback --stability-sigma 1000 --stability-window 4 --save-interval 2",
    "progress bar": "--progress bar --verbose-deepspeed",
}
PIPELINE_ACTIVITIES = {
    "drift check": "--drift-interval 1",
    "pipeline trace": "--pipeline-trace {folder}/trace",
    "checksums of data": "--check-data-agreement",
}
COMBINED_FLAGS = (  # but for the profile, which takes seconds
    "--log-interval 1 --eval-interval 2 --save-interval 2 --async-save --log-layer-norms "
    "--stability-guard skip --stability-sigma 1000 --stability-window 4 --debug-dump {folder}/dump --wandb-project p"
)
LAYOUTS = {
    "one rank": (1, ""),
    "two stages": (2, "--pipe-parallel-size 2"),
    "two tensor ranks": (2, "--model-parallel-size 2 --sequence-parallel"),
    "two replicas, ZeRO 3": (2, "--zero-stage 3"),
    "two stages of two replicas, ZeRO 3": (4, "--pipe-parallel-size 2 --zero-stage 3"),
}
QUICK_ACTIVITIES = {
    "one rank": ["evaluation", "nothing"],
    "two stages": ["everything"],
}
"""What the short run tries."""


def activities_for(layout: str) -> dict[str, str]:
    """Return what can go on beside the steps of ``layout``, all of it together, and a plain run behind it."""
    layout_activities = PIPELINE_ACTIVITIES if layout == "two stages" else {}
    if layout == "two tensor ranks":
        layout_activities = {"drift check": PIPELINE_ACTIVITIES["drift check"]}  # with ZeRO 3 there are no copies
    excluded = ("checkpoints in DeepSpeed's layout",) if "ZeRO" in layout else ()
    combined = {"everything": f"{COMBINED_FLAGS} {' '.join(layout_activities.values())}", "nothing": ""}
    return {
        name: flags
        for name, flags in {**SIDE_ACTIVITIES, **layout_activities, **combined}.items()
        if name not in excluded
    }


def inject_random_draws() -> None:
    """Let each MLP scale what it gives, and each sample be preceded, by a number of torch's own generator."""
    original_forward, original_getitem = MLP.forward, GPTDataset.__getitem__

    def forward_with_draw(self: MLP, x: torch.Tensor) -> torch.Tensor:
        return original_forward(self, x) * (1.0 + 0.1 * torch.rand(()))

    def getitem_with_draw(self: GPTDataset, idx: int) -> Any:
        torch.rand(1)
        return original_getitem(self, idx)

    MLP.forward = forward_with_draw  # type: ignore[method-assign]
    GPTDataset.__getitem__ = getitem_with_draw  # type: ignore[method-assign]


def digest(values: Any) -> str:
    """Return a hash of tensors, or of what has a ``repr``."""
    hasher = hashlib.sha256()
    for value in values:
        is_tensor = isinstance(value, torch.Tensor)
        bits = value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() if is_tensor else b""
        hasher.update(bits or repr(value).encode())
    return hasher.hexdigest()[:12]


def collect_state(trainer: Trainer) -> dict[str, Any]:
    """Return what a step starts from, by name."""
    module, optimizer, engine = trainer.engine.module, trainer.engine.optimizer, trainer.engine.engine
    moments = [value for state in optimizer.inner.state.values() for value in state.values()]
    return {
        "progress": (trainer.progress.step, trainer.progress.updates, trainer.progress.samples_consumed),
        "rates": [group["lr"] for group in optimizer.param_groups],
        "weights": digest(module.parameters()),
        "masters": digest(main_param for group in optimizer.param_groups for main_param in group["params"]),
        "moments": digest(moments),
        "gradients": digest(p.grad for p in module.parameters() if p.grad is not None),
        "loss scale": repr(optimizer.scaler.state()),
        "torch's generator": digest([torch.get_rng_state()]),
        "numpy's generator": digest(np.random.get_state()),  # noqa: NPY002 - the one that others may draw from
        "Python's generator": digest([random.getstate()]),
        "counters of the engine": (engine.global_steps, engine.micro_steps, engine.global_samples),
        "forwards": getattr(module, "micro_offset", 0),
        "hooks": sum(
            not hook.__module__.startswith("deepspeed")
            for submodule in module.modules()
            for hook in [*submodule._forward_hooks.values(), *submodule._forward_pre_hooks.values()]
        ),
        "trained": sum(p.requires_grad for p in module.parameters()),
        "torch's settings": (
            torch.is_grad_enabled(),
            torch.is_anomaly_enabled(),
            torch.get_default_dtype(),
            torch.get_num_threads(),
            torch.are_deterministic_algorithms_enabled(),
        ),
    }


class StateRecorder(Callback):
    """Notes what each step gave, and the state at the end; ``trace_run`` notes that ahead of each step."""

    def __init__(self) -> None:
        self.states: list[dict[str, Any]] = []

    def on_after_update(self, result: StepResult) -> None:
        self.states[-1]["result"] = (result.loss.hex(), result.grad_norm.hex(), result.is_skipped)

    def on_train_end(self) -> None:
        self.states.append(collect_state(self.trainer))


def trace_run(argv: list[str], num_ranks: int) -> list[dict[str, Any]]:
    """Train as ``argv`` says; return the state ahead of each step, with what the step gave, and that at the end."""
    original_train_step, recorder = Trainer.train_step, StateRecorder()

    def recorded_step(trainer: Trainer) -> StepResult:
        recorder.states.append(collect_state(trainer))
        return original_train_step(trainer)

    config = resolve_dtype(runs.parse_script_config(pretrain_gpt2, argv, num_ranks), "fp32")
    world = initialize.start(config)
    stop_requests = StopRequests()
    stop_requests.set_limits(0, 0.0, 0.0)
    script = pretrain_gpt2
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(Trainer, "train_step", recorded_step)
        providers = (script.train_valid_test_datasets_provider, script.model_provider, script.forward_step)
        run(config, world, *providers, "gpt2", stop_requests, [recorder])
    return recorder.states


def trace_all(rank: int, argv_by_name: Mapping[str, list[str]], num_ranks: int) -> dict[str, list[dict[str, Any]]]:
    """Return what each of ``argv_by_name`` came to on this rank, by its name. Collective."""
    inject_random_draws()
    runs.disable_slow_features()
    sys.modules["wandb"] = FakeWandb()  # type: ignore[assignment]
    return {name: trace_run(argv, num_ranks) for name, argv in argv_by_name.items()}


def digest_checkpoint(folder: Path) -> dict[str, str]:
    """Return the digest of each tensor of the newest checkpoint, and the counters."""
    checkpoint = open_latest(folder / CHECKPOINTS, SINGLE)
    tensors = {name: digest([checkpoint.read(name, Shard(checkpoint.shape(name)))]) for name in checkpoint.names()}
    return {**tensors, **{key: repr(checkpoint.metadata[key]) for key in ("progress", "scaler", "optimizer_steps")}}


def compare_activities(layout: str, names: list[str], corpus: Path, folder: Path) -> Iterator[tuple[str, str]]:
    """Yield (name, what is first different on any rank) of ``names`` beside the steps of a run, "" if nothing is."""
    num_ranks, layout_flags = LAYOUTS[layout]
    flags_by_name = {"plain": "", **{name: activities_for(layout)[name] for name in names}}
    folders = {name: folder / name.replace(" ", "-") for name in flags_by_name}
    argv_by_name = {
        name: runs.make_flags(
            corpus, folders[name], f"{BASE_FLAGS} {layout_flags} {extra_flags.format(folder=folders[name])}"
        )
        for name, extra_flags in flags_by_name.items()
    }
    rank_traces = run_ranks(num_ranks, trace_all, argv_by_name, num_ranks, deadline_s=110.0)
    plain_checkpoint = digest_checkpoint(folders["plain"])
    for name in list(flags_by_name)[1:]:
        differences = [_first_difference(traces["plain"], traces[name]) for traces in rank_traces]
        if "DeepSpeed" not in name and digest_checkpoint(folders[name]) != plain_checkpoint:
            differences.append("its last checkpoint")
        yield name, next(filter(None, differences), "")


def _first_difference(plain: list[dict[str, Any]], other: list[dict[str, Any]]) -> str:
    assert [entry["progress"][0] for entry in plain] == [*range(NUM_STEPS + 1)]
    for step, (state, other_state) in enumerate(zip(plain, other, strict=True)):
        names = [name for name in state if state[name] != other_state[name]]
        if names:
            return f"ahead of step {step + 1}: {', '.join(names)}"
    return ""


@pytest.mark.parametrize("layout", QUICK_ACTIVITIES)
def test_side_activities_do_not_change_steps(layout: str, corpus: Path, tmp_path: Path) -> None:
    """Row P09, with ``samples_consumed``, generators and counters; a plain run at the end finds nothing left behind."""
    differences_by_name = dict(compare_activities(layout, QUICK_ACTIVITIES[layout], corpus, tmp_path))
    assert not {name: differences for name, differences in differences_by_name.items() if differences}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_side_activities_do_not_change_steps(layout: str, corpus: Path, tmp_path: Path) -> None:
    differences_by_name = dict(compare_activities(layout, [*activities_for(layout)], corpus, tmp_path))
    assert not {name: differences for name, differences in differences_by_name.items() if differences}
