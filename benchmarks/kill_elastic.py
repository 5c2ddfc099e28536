"""Kill hosts of an elastic job at random moments, let them come back, and compare it with the undisturbed run.

``python benchmarks/kill.py --elastic --kills 100`` runs it: runs of ``--steps`` steps in turn, until there were so many
kills. A host is a launcher with its ranks, all ended by SIGKILL at once; the leader, with the store and rank 0, is hit
as often as the others. Each run has three hosts, of which one must be there: one is killed, or two at once, then those
that are missing come back one after the other at random moments, also in the midst of a save. The tiny GPT-2 of
kill_job.py trains in fp64 without dropout, so that losses with other numbers of replicas can be compared.

Checked: each step has the loss and the gradient norm of the undisturbed run (1e-12), where the layout stays the same to
the bit; of the starts that count, the ranks together have read each sample of each step once; the run ends by itself
with 0. A figure is the time from a kill to the next step that a rank has done.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.kill_job import MODULES, SIZES, fork_launcher, saving_now, write_corpus
from megatron.training.callbacks.metrics_writer import read_metrics

SCRIPT = Path(__file__).with_name("kill_job.py")
NODES = 3
BOUND = 1e-12
DEADLINE_S = 300.0
MOST_WRONG = 3
"""After so many runs with problems there is no further one."""
LAYOUTS = {
    "d": (1, 1, ""),
    "t2": (2, 1, "--model-parallel-size 2"),
    "p2": (2, 1, "--pipe-parallel-size 2 --zero-stage 1"),
    "unequal": (2, 1, "--gas 1 --zero-stage 1"),
    "all": (1, NODES, "--hidden-dropout 0.1 --attention-dropout 0.1"),
}
"""name -> (ranks of a host, MIN, flags); a step has 6 micro-batches: 1, 2, 3 and 6 replicas share them alike, 4 do not.

With "all" the job waits for the hosts that are lost: the layout is always the same, and so must all bits be.
"""


@dataclass
class Run:
    """What became of one run."""

    layout: str
    lost: int = 0
    lost_leaders: int = 0
    in_saves: int = 0
    """Kills while a checkpoint was being written."""
    taken_in: int = 0
    back_in_saves: int = 0
    """Hosts that came back while a checkpoint was being written."""
    too_late: int = 0
    """Hosts that came back when the job had just ended, and were alone."""
    to_next_step_s: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def kills(self) -> int:
        """Kills behind which the run went on."""
        return len(self.to_next_step_s)


class Record:
    """What a run leaves in its folder ``place``."""

    def __init__(self, place: Path) -> None:
        self.place, self.run, self.record = place, place / "run", place / "record"
        self._lines: list[dict[str, Any]] = []
        self._offsets: dict[Path, int] = {}

    def lines(self) -> list[dict[str, Any]]:
        """Return what the ranks have recorded so far, in the order of time, each with its rank."""
        for path in self.record.glob("rank-*.jsonl"):
            rank = int(path.stem.removeprefix("rank-"))
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                whole, end, _ = file.read().rpartition(b"\n")
            self._offsets[path] = self._offsets.get(path, 0) + len(whole + end)
            self._lines += [json.loads(line) | {"rank": rank} for line in whole.splitlines()]
        self._lines.sort(key=lambda line: line["at"])
        return self._lines


class Hosts(Record):
    """The launchers of one run."""

    def __init__(self, place: Path, corpus: Path, layout: str, steps: int, interval: int) -> None:
        super().__init__(place)
        place.mkdir(parents=True)
        self.record.mkdir()
        nproc, fewest, flags = LAYOUTS[layout]
        self.is_waiting = fewest == NODES
        ports = free_ports(NODES)
        hosts = ",".join(f"127.0.0.1:{port}" for port in ports)
        self._launch = [
            "--nnodes",
            f"{fewest}:{NODES}",
            "--node-list",
            hosts,
            "--max-restarts",
            "99",
            "--node-timeout",
            "10",
        ]
        self._launch += ["--init-timeout", "10", "--nproc-per-node", str(nproc), "--preload", ",".join(MODULES)]
        train = f"--fp64 --gas 2 --train-iters {steps} --save-interval {interval} {flags}".split()
        off = [] if "dropout" in flags else ["--hidden-dropout", "0", "--attention-dropout", "0"]
        self._argv = [
            *SIZES,
            *off,
            *train,
            "--data-path",
            str(corpus),
            "--save",
            str(self.run),
            "--resume",
            "--load-if-exists",
        ]
        self.pids: dict[int, int] = {}
        self.codes: dict[int, int] = {}
        self.folders: dict[int, Path] = {}
        self._started = 0

    def start(self, node: int) -> None:
        """Start the launcher of a host."""
        folder = self.folders[node] = self.place / f"launcher-{self._started}-of-{node}"
        folder.mkdir()
        self._started += 1
        argv = [*self._launch, "--node-rank", str(node), str(SCRIPT), *self._argv]
        self.pids[node] = fork_launcher(argv, folder, {"KILL_LIFE": "0", "KILL_RECORD": str(self.record)})

    def lose(self, nodes: list[int]) -> float:
        """Kill hosts; return when."""
        found = [pid for node in nodes for pid in (self.pids[node], *_children(self.pids[node]))]
        at = time.time()
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for node in nodes:
            os.waitpid(self.pids.pop(node), 0)
        return at

    def poll(self) -> bool:
        """Return whether all launchers have ended."""
        for node, pid in list(self.pids.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                del self.pids[node]
                self.codes[node] = os.waitstatus_to_exitcode(status)
        return not self.pids

    def late(self) -> list[int]:
        """Return the hosts that found no job any more: nobody led when they came, and they were too few."""
        said = {node: (self.folders[node] / "output").read_text() for node, code in self.codes.items() if code == 4}
        return [node for node, text in said.items() if text.startswith("error: 1 of at least ")]

    def end(self) -> None:
        """Kill what is left."""
        self.lose(list(self.pids))

    def leader(self) -> int | None:
        """Return the host that rank 0 of the newest start is on, None if none is known."""
        pages = list(self.place.glob("launcher-*/megatron-launch-*/start-*/failure.at-0"))
        with suppress(ValueError, FileNotFoundError):
            newest = max(pages, key=lambda page: page.stat().st_mtime)
            folder = next(part for part in newest.parts if part.startswith("launcher-"))
            return int(folder.rpartition("-")[2])
        return None

    def output(self) -> str:
        """Return the last words of all launchers."""
        return "\n".join(f"{p.parent.name}:\n{p.read_text()[-4000:]}" for p in self.place.glob("launcher-*/output"))


def kill_one_run(place: Path, corpus: Path, layout: str, steps: int, whole: Record | None, draw: random.Random) -> Run:
    """Run once, disturbed if there is a ``whole`` run to compare with; what was without fault is removed."""
    run, began = Run(layout), time.monotonic()
    hosts = Hosts(place, corpus, layout, steps, draw.choice((1, 2)))
    try:
        for node in range(NODES):
            hosts.start(node)
        if whole is not None:
            _disturb(hosts, run, draw, began + DEADLINE_S)
        while not hosts.poll() and time.monotonic() < began + DEADLINE_S:
            time.sleep(0.01)
        late = hosts.late()
        run.too_late = len(late)
        if hosts.pids or {code for node, code in hosts.codes.items() if node not in late} != {0}:
            run.problems.append(f"codes {hosts.codes}, still running {sorted(hosts.pids)}:\n{hosts.output()}")
        elif whole is not None:
            run.problems += _differences(hosts, whole)
            run.problems += [] if run.kills else ["the run was over before a host was killed: give it more --steps"]
    finally:
        hosts.end()
    run.seconds = time.monotonic() - began
    if whole is not None and not run.problems:
        shutil.rmtree(place)
    return run


def _disturb(hosts: Hosts, run: Run, draw: random.Random, deadline: float) -> None:
    """Kill one host or two, and let them come back, until the run is nearly done."""
    if not _until(hosts, lambda: any("step" in line for line in hosts.lines())):
        return
    while _wait(hosts, draw.uniform(0.0, 1.5)) and time.monotonic() < deadline:
        leader = hosts.leader()
        victims = draw.sample(sorted(hosts.pids), min(draw.choice((1, 1, 2)), len(hosts.pids) - 1))
        if not victims:
            return
        is_saving = bool(saving_now(hosts.run))
        at = hosts.lose(victims)
        if hosts.is_waiting and not _bring_back(hosts, run, victims, draw, 0.3):
            return
        following = _next_step(hosts, at)
        if following is None:
            return  # the run was at its end
        run.lost += len(victims)
        run.lost_leaders += leader in victims
        run.in_saves += is_saving
        run.to_next_step_s.append(following - at)
        if hosts.is_waiting:
            continue
        if not _bring_back(hosts, run, victims, draw, 1.0):
            return
        starts = _newest_start(hosts)
        if draw.random() < 0.7:  # else the next kill comes while they wait
            _until(hosts, lambda starts=starts: _newest_start(hosts) > starts)
            run.taken_in += _newest_start(hosts) > starts


def _bring_back(hosts: Hosts, run: Run, nodes: list[int], draw: random.Random, within_s: float) -> bool:
    """Start hosts again, one after the other; return False if a launcher has ended by itself meanwhile."""
    for node in nodes:
        if not _wait(hosts, draw.uniform(0.0, within_s)):
            return False
        run.back_in_saves += bool(saving_now(hosts.run))
        hosts.start(node)
    return True


def _wait(hosts: Hosts, seconds: float) -> bool:
    """Wait; return False if a launcher has ended by itself meanwhile."""
    end = time.monotonic() + seconds
    known = len(hosts.pids)
    while time.monotonic() < end:
        hosts.poll()
        if len(hosts.pids) < known:
            return False
        time.sleep(0.005)
    return True


def _until(hosts: Hosts, is_so: Any) -> bool:
    end = time.monotonic() + 60.0
    while not is_so() and time.monotonic() < end:
        if not _wait(hosts, 0.02):
            return False
    return bool(is_so())


def _next_step(hosts: Hosts, at: float) -> float | None:
    """Return when a start behind that of ``at`` has done its first step."""
    start = max((line["start"][1] for line in hosts.lines() if line["at"] < at), default=-1)

    def times() -> list[float]:
        return [line["at"] for line in hosts.lines() if "step" in line and line["start"][1] > start]

    return min(times()) if _until(hosts, times) else None


def _newest_start(hosts: Hosts) -> int:
    return max((line["start"][1] for line in hosts.lines() if "begins" in line), default=-1)


def _differences(hosts: Hosts, whole: Record) -> list[str]:
    found = []
    wanted, got = losses(whole.run), losses(hosts.run)
    if [step for step, *_ in got] != [step for step, *_ in wanted]:
        found.append(f"steps {[step for step, *_ in got]} in the metrics")
    lines = [line for line in hosts.lines() if "step" in line or "begins" in line]
    sizes = [len({line["rank"] for line in lines if line["start"][1] == start}) for start in _starts(lines)]
    for (step, loss, norm), (_, whole_loss, whole_norm) in zip(got, wanted, strict=False):
        if abs(loss - whole_loss) > BOUND or abs(norm - whole_norm) > BOUND * max(1.0, whole_norm):
            found.append(f"step {step}: loss {loss - whole_loss:.2e} off, norm {norm - whole_norm:.2e} (ranks {sizes})")
    first = _starts(lines)[1:2]
    unchanged = min((line["begins"] for line in lines if "begins" in line and line["start"][1] in first), default=0)
    same = None if hosts.is_waiting else unchanged
    if got[:same] != wanted[:same]:
        found.append(f"the first {same or 'and all other'} steps, of the same layout, differ in bits")
    return found + _samples_differ(hosts, whole)


def _samples_differ(hosts: Hosts, whole: Record) -> list[str]:
    """Compare the samples that ranks of the first stage have read in the steps that count: each once a tensor rank."""
    counted, undisturbed = _counted(hosts), _counted(whole)
    return [
        f"step {step}: {sum((wanted - counted.get(step, Counter())).values())} samples lost, "
        f"{sum((counted.get(step, Counter()) - wanted).values())} repeated"
        for step, wanted in undisturbed.items()
        if counted.get(step) != wanted
    ]


def _counted(hosts: Record) -> dict[int, Counter[int]]:
    """Return the samples of each step as the last start that did it read them."""
    newest: dict[int, int] = {}
    for line in hosts.lines():
        if "step" in line:
            newest[line["step"]] = max(newest.get(line["step"], -1), line["start"][1])
    found: dict[int, Counter[int]] = {}
    for line in hosts.lines():
        if "step" in line and line["start"][1] == newest[line["step"]]:
            found.setdefault(line["step"], Counter()).update(line["tokens"])
    return found


def _starts(lines: list[dict[str, Any]]) -> list[int]:
    return sorted({line["start"][1] for line in lines})


def losses(folder: Path) -> list[tuple[int, float, float]]:
    """Return (step, loss, gradient norm) of the metrics of a run."""
    records = [r for r in read_metrics(folder / "metrics.jsonl") if r["kind"] == "train"]
    return [(r["step"], r["loss"], r["grad_norm"]) for r in records]


def _children(pid: int) -> list[int]:
    with suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def free_ports(number: int) -> list[int]:
    """Return ports that were free just now, below those that the kernel gives to connections."""
    found: list[int] = []
    while len(found) < number:
        port = random.SystemRandom().randrange(20000, 32000)
        with suppress(OSError), socket.create_server(("", port)):
            found.append(port)
    return list(dict.fromkeys(found)) if len(set(found)) == number else free_ports(number)


def kill_all(kills: int, seed: int, steps: int, folder: Path | None = None) -> tuple[list[Run], dict[str, Any]]:
    """Kill ``kills`` times at least, over several runs; print and return the runs and a summary."""
    place = Path(tempfile.mkdtemp(prefix="kill-elastic-", dir=folder))
    draw, runs = random.Random(seed), list[Run]()
    corpus, wholes = write_corpus(place), dict[str, Record]()
    began = time.monotonic()
    while sum(run.kills for run in runs) < kills and sum(bool(run.problems) for run in runs) < MOST_WRONG:
        layout = list(LAYOUTS)[len(runs) % len(LAYOUTS)]
        if layout not in wholes:
            path = place / f"whole-{layout}"
            whole = kill_one_run(path, corpus, layout, steps, None, draw)
            if whole.problems:
                raise RuntimeError("\n".join(whole.problems))
            wholes[layout] = Record(path)
        number = len(runs)
        own = random.Random(draw.random())
        runs.append(kill_one_run(place / f"run-{number}", corpus, layout, steps, wholes[layout], own))
        _say(runs)
    summary = _summary(runs, time.monotonic() - began)
    for name, value in summary.items():
        shown = ", ".join(f"{k} {v:.3g}" for k, v in value.items()) if isinstance(value, dict) else value
        print(f"{name:24} {shown}")
    if summary["runs_with_problems"]:
        print(f"what went wrong lies in {place}")
    else:
        shutil.rmtree(place)
    return runs, summary


def _summary(runs: list[Run], seconds: float) -> dict[str, Any]:
    waits = [each for run in runs for each in run.to_next_step_s]
    return {
        "kills": len(waits),
        "kills_in_saves": sum(run.in_saves for run in runs),
        "hosts_lost": sum(run.lost for run in runs),
        "leaders_lost": sum(run.lost_leaders for run in runs),
        "nodes_taken_in": sum(run.taken_in for run in runs),
        "nodes_back_in_saves": sum(run.back_in_saves for run in runs),
        "nodes_back_too_late": sum(run.too_late for run in runs),
        "runs": len(runs),
        "runs_with_problems": sum(bool(run.problems) for run in runs),
        "kill_to_next_step_s": {"median": median(waits or [0.0]), "most": max(waits, default=0.0)},
        "seconds": round(seconds, 1),
    }


def _say(runs: list[Run]) -> None:
    run = runs[-1]
    verdict = "WRONG" if run.problems else "as undisturbed"
    waits = ", ".join(f"{seconds:.1f}" for seconds in run.to_next_step_s)
    print(
        f"{sum(one.kills for one in runs):4} kills | {run.layout}: {run.lost} hosts lost in {run.kills} kills, "
        f"{run.lost_leaders} of them led, {run.taken_in} times taken in, to the next step {waits} s, "
        f"in all {run.seconds:.1f} s, {verdict}",
        flush=True,
    )
    for problem in run.problems:
        print(f"    {problem}", flush=True)
