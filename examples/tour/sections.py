"""The sections of the tour: commands, expected exit codes, expected lines of output, and comparisons of losses."""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from examples.tour.texts import Texts

RUNS = Path("runs/tour")
"""Folder of the tour's runs and outputs, relative to the repository."""
KILLED = -9
STEPS, SAVE_INTERVAL, FAULT_STEP, NAN_STEP = 40, 20, 28, 6
MIN_FALL = 1.0
"""Minimum difference between the first and the last loss of the run without a fault."""
ROUNDING = 1e-4
"""Largest accepted difference between the fp32 losses of two layouts in the first ``STEPS`` steps."""

FAULT, PROGRAM = "TOUR_FAULT=", "program=examples/tour/faults.py"
FLAGS = f"--train-iters {STEPS} --eval-iters 0 --log-interval 5"
RESTART_FLAGS = f"--no-prove --save-interval {SAVE_INTERVAL} --max-restarts 1"
NAN_FLAGS = "--train-iters 8 --eval-iters 0 --log-interval 2 --no-prove"


class NotDetectedError(Exception):
    """A fault was not detected, or a run did not continue as it should."""


@dataclass(frozen=True)
class Command:
    """A shell command of a section.

    Args:
        line: the command as a user would type it.
        code: expected exit code.
        patterns: regular expressions; each must match a line of the output, which is then shown.
    """

    line: str
    code: int = 0
    patterns: tuple[str, ...] = ()


@dataclass(frozen=True)
class Section:
    """A section of the tour. Its texts are NAME.title, NAME.before and NAME.after.

    Args:
        groups: groups of commands; the commands of a group run at the same time.
        page: page with the details, relative to docs/.
        limit_s: time limit of a group in seconds, far above the usual time because the machine may be busy.
        needs: section whose losses ``compare`` reads; "" if there is none.
        compare: checks the losses of the runs and returns lines to print; raises NotDetectedError.
    """

    name: str
    groups: tuple[tuple[Command, ...], ...]
    page: str
    limit_s: float = 120.0
    needs: str = ""
    compare: Callable[[Path, Texts], list[str]] | None = None


def make_sections() -> tuple[Section, ...]:
    """Return the sections in the order of the tour."""
    last_step = rf"^step +{STEPS}/{STEPS} "
    failed_check = r"^layout check: .* FAILED: "
    train = Command(
        f"bash run_gpt2.sh {FLAGS} --save {RUNS}/train",
        0,
        (r"^layout check: (?!.*FAILED)", r"^step +1/", last_step),  # a busy machine may not complete the check
    )
    kill = Command(
        f"{FAULT}kill:{FAULT_STEP} {PROGRAM} bash run_gpt2.sh {FLAGS} {RESTART_FLAGS} --save {RUNS}/kill",
        0,
        (rf"^launch: ended by rank 3 .* by SIGKILL, at step {FAULT_STEP}\b.*restarting", last_step),
    )
    find_nan = Command(
        f"{FAULT}nan:{NAN_STEP} {PROGRAM} bash run_gpt2.sh {NAN_FLAGS} --debug-nan --save {RUNS}/nan",
        5,
        (rf"NumericsError: step {NAN_STEP} .*layers\.2\.mlp returned NaN",),
    )
    skip_nan = Command(
        f"{FAULT}nan:{NAN_STEP} {PROGRAM} bash run_gpt2.sh {NAN_FLAGS} --stability-guard skip --save {RUNS}/skip",
        0,
        (rf"^step {NAN_STEP} \| .*skipped", r"^step +8/8 "),
    )
    leak = Command(
        f"GPUS_PER_NODE=2 pp_size=1 mp_size=1 cp_size=2 {FAULT}leak {PROGRAM} bash run_gpt2.sh --prove-only",
        1,
        (failed_check,),
    )
    gradient = Command(
        f"{FAULT}gradient {PROGRAM} bash run_gpt2.sh --sequence-parallel --prove-only",
        1,
        (failed_check + r"gradient of .*norm\.weight",),
    )
    nodes = ",".join(f"127.0.0.1:{port}" for port in _find_free_ports(2))
    hosts = [
        f"NNODES=1:2 NODE_LIST={nodes} NODE_RANK={node} GPUS_PER_NODE=2 pp_size=1 mp_size=2 GAS=1 "
        f"{FAULT}host:{FAULT_STEP} {PROGRAM} bash run_gpt2.sh {FLAGS} {RESTART_FLAGS} --save {RUNS}/host"
        for node in range(2)
    ]
    host_lines = (r"^launch: node 1 was lost; restarting", r"^launch: start 1 has 1 of 2 nodes", last_step)
    return (
        Section("train", ((train,),), "first_hour.md", limit_s=240.0, compare=check_loss_falls),
        Section("kill", ((kill,),), "running.md", needs="train", compare=partial(compare_losses, "kill", 0.0)),
        Section("nan", ((find_nan,), (skip_nan,)), "running.md"),
        Section("leak", ((leak,),), "correctness.md"),
        Section("gradient", ((gradient,),), "proof.md"),
        Section(
            "host",
            ((Command(hosts[0], 0, host_lines), Command(hosts[1], KILLED)),),
            "launching.md",
            needs="train",
            compare=partial(compare_losses, "host", ROUNDING),
        ),
    )


def select_sections(sections: tuple[Section, ...], names: list[str]) -> list[Section]:
    """Return the sections in ``names`` and the sections that they need, in the order of the tour; all without names."""
    chosen = set(names) or {section.name for section in sections}
    needed = {section.needs for section in sections if section.name in chosen}
    return [section for section in sections if section.name in chosen | needed]


def read_losses(folder: Path) -> dict[int, float]:
    """Return the last training loss that a run wrote for each logged step."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return {line["step"]: line["loss"] for line in map(json.loads, lines) if line["kind"] == "train"}


def check_loss_falls(runs: Path, texts: Texts) -> list[str]:
    """Raise NotDetectedError unless the loss of the run ``train`` falls by ``MIN_FALL``."""
    losses = read_losses(runs / "train")
    first, last = losses[1], losses[STEPS]
    if not first - last >= MIN_FALL:
        raise NotDetectedError(texts("loss fell", min_fall=MIN_FALL, first=first, last=last))
    return []


def compare_losses(name: str, bound: float, runs: Path, texts: Texts) -> list[str]:
    """Compare the losses of ``name`` after its restart with those of ``train``; return lines to print for two steps.

    Raises:
        NotDetectedError: a loss differs by more than ``bound``.
    """
    reference, losses = read_losses(runs / "train"), read_losses(runs / name)
    steps = [step for step in sorted(reference) if step > FAULT_STEP]
    difference = max(abs(losses[step] - reference[step]) for step in steps)
    if not difference <= bound:
        raise NotDetectedError(texts("losses differ", bound=bound, difference=difference))
    shown_steps = (steps[0], steps[-1])
    return [texts("losses", step=step, loss=reference[step], other=losses[step]) for step in shown_steps]


def _find_free_ports(num_ports: int) -> list[int]:
    """Return ports that are currently free, below the range that the kernel assigns to outgoing connections."""
    ports: set[int] = set()
    while len(ports) < num_ports:
        port = random.SystemRandom().randrange(20000, 32000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            ports.add(port)
    return sorted(ports)
