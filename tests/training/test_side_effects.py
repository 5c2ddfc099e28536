"""What a run evaluates, saves, logs or compares beside its steps changes nothing in them, to the bit.

The model and the data set of these runs draw from torch's generator, in evaluation too, as a user's own may: state that
is moved shows in the next loss. Each layout runs once, in one set of forked ranks, with each of ``BESIDE`` in turn.
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
from tests.helpers.harness import run_ranks
from tests.training.test_seeing import StandIn

STEPS = 6
PLAIN = (
    f"--train-iters {STEPS} --log-interval {STEPS} --eval-iters 2 --eval-interval 0 --save-interval-minutes 0 "
    "--drift-interval 0 --hidden-dropout 0.1 --attention-dropout 0.1"
)
BESIDE = {
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
BESIDE_STAGES = {
    "drift check": "--drift-interval 1",
    "pipeline trace": "--pipeline-trace {folder}/trace",
    "checksums of data": "--check-data-agreement",
}
TOGETHER = (  # but for the profile, which takes seconds
    "--log-interval 1 --eval-interval 2 --save-interval 2 --async-save --log-layer-norms "
    "--stability-guard skip --stability-sigma 1000 --stability-window 4 --debug-dump {folder}/dump --wandb-project p"
)
LAYOUTS = {
    "one rank": (1, ""),
    "two stages": (2, "--pipe-parallel-size 2"),
    "two tensor ranks": (2, "--model-parallel-size 2 --sequence-parallel"),
    "two replicas, ZeRO 3": (2, "--zero-stage 3"),
}
SHORT = {
    "one rank": ["evaluation", "nothing"],
    "two stages": ["everything"],
}
"""What the short run tries."""


def beside(layout: str) -> dict[str, str]:
    """Return what can go on beside the steps of ``layout``, all of it together, and a plain run behind it."""
    more = BESIDE_STAGES if layout == "two stages" else {}
    if layout == "two tensor ranks":
        more = {"drift check": BESIDE_STAGES["drift check"]}  # with ZeRO 3 there are no copies
    left_out = ("checkpoints in DeepSpeed's layout",) if "ZeRO" in layout else ()
    every = {"everything": f"{TOGETHER} {' '.join(more.values())}", "nothing": ""}
    return {name: flags for name, flags in {**BESIDE, **more, **every}.items() if name not in left_out}


def draw_in_model_and_data() -> None:
    """Let each MLP scale what it gives, and each sample be preceded, by a number of torch's own generator."""
    forward, item = MLP.forward, GPTDataset.__getitem__

    def drawing(self: MLP, x: torch.Tensor) -> torch.Tensor:
        return forward(self, x) * (1.0 + 0.1 * torch.rand(()))

    def preceded(self: GPTDataset, index: int) -> Any:
        torch.rand(1)
        return item(self, index)

    MLP.forward = drawing  # type: ignore[method-assign]
    GPTDataset.__getitem__ = preceded  # type: ignore[method-assign]


def digest(values: Any) -> str:
    """Return a hash of tensors, or of what has a ``repr``."""
    made = hashlib.sha256()
    for value in values:
        is_tensor = isinstance(value, torch.Tensor)
        bits = value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() if is_tensor else b""
        made.update(bits or repr(value).encode())
    return made.hexdigest()[:12]


def state_of(this: Trainer) -> dict[str, Any]:
    """Return what a step starts from, by name."""
    module, optimizer, engine = this.engine.module, this.engine.optimizer, this.engine.engine
    moments = [value for state in optimizer.inner.state.values() for value in state.values()]
    return {
        "progress": (this.progress.step, this.progress.updates, this.progress.samples_consumed),
        "rates": [group["lr"] for group in optimizer.param_groups],
        "weights": digest(module.parameters()),
        "masters": digest(master for group in optimizer.param_groups for master in group["params"]),
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
            for each in module.modules()
            for hook in [*each._forward_hooks.values(), *each._forward_pre_hooks.values()]
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
    """Notes what each step gave, and the state at the end; ``traced`` notes that ahead of each step."""

    def __init__(self) -> None:
        self.found: list[dict[str, Any]] = []

    def on_after_update(self, result: StepResult) -> None:
        self.found[-1]["result"] = (result.loss.hex(), result.grad_norm.hex(), result.is_skipped)

    def on_train_end(self) -> None:
        self.found.append(state_of(self.trainer))


def traced(argv: list[str], num_ranks: int) -> list[dict[str, Any]]:
    """Train as ``argv`` says; return the state ahead of each step, with what the step gave, and that at the end."""
    step, recorder = Trainer.train_step, StateRecorder()

    def noted_step(this: Trainer) -> StepResult:
        recorder.found.append(state_of(this))
        return step(this)

    config = resolve_dtype(runs.parse_as(pretrain_gpt2, argv, num_ranks), "fp32")
    here = initialize.start(config)
    stop = StopRequests()
    stop.limit(0, 0.0, 0.0)
    script = pretrain_gpt2
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "train_step", noted_step)
        providers = (script.train_valid_test_datasets_provider, script.model_provider, script.forward_step)
        run(config, here, *providers, "gpt2", stop, [recorder])
    return recorder.found


def trace_all(rank: int, lines: Mapping[str, list[str]], num_ranks: int) -> dict[str, list[dict[str, Any]]]:
    """Return what each of ``lines`` came to on this rank, by its name. Collective."""
    draw_in_model_and_data()
    runs.leave_out_what_takes_long()
    sys.modules["wandb"] = StandIn()  # type: ignore[assignment]
    return {name: traced(line, num_ranks) for name, line in lines.items()}


def checkpoint_of(folder: Path) -> dict[str, str]:
    """Return the digest of each tensor of the newest checkpoint, and the counters."""
    saved = open_latest(folder / CHECKPOINTS, SINGLE)
    tensors = {name: digest([saved.read(name, Shard(saved.shape(name)))]) for name in saved.names()}
    return {**tensors, **{key: repr(saved.metadata[key]) for key in ("progress", "scaler", "optimizer_steps")}}


def compared(layout: str, names: list[str], corpus: Path, folder: Path) -> Iterator[tuple[str, str]]:
    """Yield (name, what is first different on any rank) of ``names`` beside the steps of a run, "" if nothing is."""
    num_ranks, flags = LAYOUTS[layout]
    wanted = {"plain": "", **{name: beside(layout)[name] for name in names}}
    places = {name: folder / name.replace(" ", "-") for name in wanted}
    lines = {
        name: runs.flags(corpus, places[name], f"{PLAIN} {flags} {more.format(folder=places[name])}")
        for name, more in wanted.items()
    }
    ranks = run_ranks(num_ranks, trace_all, lines, num_ranks, deadline_s=110.0)
    plain = checkpoint_of(places["plain"])
    for name in list(wanted)[1:]:
        different = [_first_difference(rank["plain"], rank[name]) for rank in ranks]
        if "DeepSpeed" not in name and checkpoint_of(places[name]) != plain:
            different.append("its last checkpoint")
        yield name, next(filter(None, different), "")


def _first_difference(plain: list[dict[str, Any]], other: list[dict[str, Any]]) -> str:
    assert [each["progress"][0] for each in plain] == [*range(STEPS + 1)]
    for step, (one, two) in enumerate(zip(plain, other, strict=True)):
        names = [name for name in one if one[name] != two[name]]
        if names:
            return f"ahead of step {step + 1}: {', '.join(names)}"
    return ""


@pytest.mark.parametrize("layout", SHORT)
def test_what_goes_on_beside_the_steps_changes_nothing_in_them(layout: str, corpus: Path, tmp_path: Path) -> None:
    """Row P09, with ``samples_consumed``, generators and counters; a plain run at the end finds nothing left behind."""
    found = dict(compared(layout, SHORT[layout], corpus, tmp_path))
    assert not {name: differences for name, differences in found.items() if differences}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_that_can_go_on_beside_the_steps_changes_nothing_in_them(layout: str, corpus: Path, tmp_path: Path) -> None:
    found = dict(compared(layout, [*beside(layout)], corpus, tmp_path))
    assert not {name: differences for name, differences in found.items() if differences}
