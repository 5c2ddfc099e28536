"""MetricsWriter (metrics.jsonl, TensorBoard, loss.png), Weights & Biases, gradient norms by layer, stragglers."""

from __future__ import annotations

import functools
import json
import math
import os
import re
import statistics
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import torch

from megatron import files, log
from megatron.checkpoint import named_parameters
from megatron.config import Config
from megatron.errors import ConfigError, marked
from megatron.mpu.mappings import all_reduce
from megatron.mpu.topology import Topology
from megatron.optim import MixedPrecisionOptimizer
from megatron.training.initialize import World
from tds.gradients import square_of_norm

# The run at Weights & Biases that --wandb-project asks for. Rank 0 only.
#
# The id of it lies in ``wandb.json`` in the run folder, so that a run that goes on is one there, too. Steps that come
# again after a restart or a way back are sent again: every curve is drawn over the step that it is of, not over the
# order in which records came. What fails after the start is told once, and no run ends for it.

NAME = "wandb.json"
KINDS = ("train", "valid", "test", "save")
PATIENCE_S = 20.0
"""For what is on its way when a run ends: less than --exit-grace, within which all ranks must have left."""


class WandbRun:
    """Sends records; made by ``open_wandb``."""

    def __init__(self, run: Any) -> None:
        self._run: Any = run

    def write(self, kind: str, step: int, numbers: Mapping[str, float]) -> None:
        """Send the numbers of one record, by "kind/name"."""
        self._try(lambda: self._run.log({**numbers, f"{kind}/step": step}))

    def close(self, *, has_failed: bool = False) -> None:
        """Let the run end there, as a failed one or not, which waits a while for what is on its way."""
        finish = functools.partial(self._try, lambda: self._run.finish(exit_code=int(has_failed)))
        ending = threading.Thread(target=finish, name="wandb-finish", daemon=True)
        ending.start()
        ending.join(PATIENCE_S)
        if ending.is_alive():
            log.warning(
                f"Weights & Biases has not taken all within {PATIENCE_S:g} s; the rest lies in the run's wandb folder: "
                "wandb sync sends it"
            )

    def _try(self, do: Any) -> None:
        if self._run is None:
            return
        try:
            do()
        except Exception as error:
            self._run = None
            log.warning(f"nothing more is sent to Weights & Biases ({type(error).__name__}: {error})")


def open_wandb(config: Config, folder: Path) -> WandbRun | None:
    """Return the run at Weights & Biases, the one of before where this folder has had one; None without the flag.

    An evaluation is a run of its own there, and leaves the folder's as it is.

    Raises:
        ConfigError: wandb cannot be imported or started.
    """
    seeing, is_evaluation = config.seeing, config.checkpoint.eval_only
    if not seeing.wandb_project:
        return None
    os.environ.setdefault("WANDB_FINISH_TIMEOUT", f"{0.75 * PATIENCE_S:g}")  # of the end of the process, too
    try:
        import wandb

        run = wandb.init(
            project=seeing.wandb_project,
            entity=seeing.wandb_entity,
            name=seeing.wandb_exp_name or folder.name,
            dir=_made(Path(seeing.wandb_save_dir) if seeing.wandb_save_dir else folder),
            id=None if is_evaluation else _id_in(folder),
            resume="allow",
            config=config.to_dict(),
        )
        for kind in KINDS:
            run.define_metric(f"{kind}/step")
            run.define_metric(f"{kind}/*", step_metric=f"{kind}/step")
    except Exception as error:
        raise ConfigError(
            f"--wandb-project {seeing.wandb_project} must be one that wandb can write to, got {type(error).__name__}: "
            f"{error}. Run wandb login, set WANDB_MODE=offline to write to a folder, or leave the flag out"
        ) from error
    if not is_evaluation:
        _note_id(folder, run.id)
    return WandbRun(run)


def _made(folder: Path) -> str:
    folder.mkdir(parents=True, exist_ok=True)  # where there is none, wandb takes another without a word
    return str(folder)


def _note_id(folder: Path, name: str) -> None:
    try:
        files.replace_bytes(folder / NAME, json.dumps({"id": name}).encode() + b"\n")
    except OSError as error:
        log.warning(f"{folder / NAME} cannot be written ({error}): a run that goes on here is a new one there")


def _id_in(folder: Path) -> str | None:
    try:
        return str(json.loads((folder / NAME).read_text())["id"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


# Where numbers go: metrics.jsonl, TensorBoard events, Weights & Biases, loss.png. Rank 0 only.

METRICS = "metrics.jsonl"
EVALUATIONS = "evaluations.jsonl"
"""Of --eval-only, which adds nothing to the records of the run that it evaluates."""


class MetricsWriter:
    """Appends records to ``folder/metrics.jsonl`` and TensorBoard; draws the loss curve at the end.

    Args:
        tensorboard: folder of the event files; None: there are none.
        resumed_step: the run goes on after this step: records beyond it are of an attempt that was cut off, and come
            again. None keeps all that is there. A line that a kill has cut off goes in both cases.
        wandb: gets every record, too.
        name: of the file, METRICS or EVALUATIONS.
    """

    def __init__(
        self,
        folder: Path,
        tensorboard: Path | None,
        resumed_step: int | None = None,
        wandb: WandbRun | None = None,
        name: str = METRICS,
    ) -> None:
        self.path = folder / name
        self.picture = folder / "loss.png"
        self._tensorboard_folder, self._wandb = tensorboard, wandb
        self._events: Any = None
        self._purge_step: int | None = None
        self._open(resumed_step)

    def truncate_to_step(self, step: int) -> None:
        """Drop what was recorded after ``step``: those steps come again."""
        self._file.close()
        if self._events is not None:
            self._events.close()
            self._events = None
        self._open(step)

    def _open(self, last_step: int | None) -> None:
        _keep_whole(self.path, last_step)
        self._file = open(self.path, "ab")  # noqa: SIM115 - kept open for the run, closed in close()
        self._purge_step = None if last_step is None else last_step + 1

    def write(self, kind: str, step: int, values: dict[str, Any], notes: Mapping[str, Any] | None = None) -> None:
        """Record ``values`` of ``step``; ``kind`` is train, valid, test or save.

        A value may be a dictionary of numbers.

        Args:
            notes: go into the file alone.

        Raises:
            ConfigError: the run folder, or TensorBoard's, was deleted or moved; on this rank alone.
        """
        numbers = dict(flat(kind, values))
        with marked(is_of_this_rank=True):
            self._require_folder()
            record = {"kind": kind, "step": step, **values, **(notes or {})}
            self._file.write(orjson.dumps(record, default=str) + b"\n")
            self._file.flush()
            if self._tensorboard_folder is not None:
                self._add_events(self._tensorboard_folder, step, numbers)
        if self._wandb is not None:
            self._wandb.write(kind, step, numbers)

    def _require_folder(self) -> None:
        try:
            is_there = os.path.samestat(os.fstat(self._file.fileno()), os.stat(self.path))
        except FileNotFoundError:
            is_there = False
        if not is_there:
            raise ConfigError(
                f"the run folder must stay where it is while the run goes on, got {self.path.parent} deleted or moved, "
                f"or its {self.path.name}. Bring it back and go on with --load, or start again"
            )

    def _add_events(self, folder: Path, step: int, numbers: Mapping[str, float]) -> None:
        if self._events is None:
            from torch.utils.tensorboard import SummaryWriter

            self._events = SummaryWriter(str(folder), purge_step=self._purge_step)
        try:
            for name, number in numbers.items():
                self._events.add_scalar(name, number, step)
        except FileNotFoundError as error:
            raise ConfigError(
                f"TensorBoard's folder must stay where it is while the run goes on, got {folder} deleted or moved "
                f"({error})"
            ) from error

    def close(self, *, draws: bool = True) -> None:
        """Close the files and draw the picture. What fails here is said and counts for nothing: every record is there.

        Args:
            draws: False where an error ends the run: drawing takes seconds, which the launcher does not give.
        """
        events = [self._events.close] if self._events is not None else []
        picture = [lambda: draw_losses(self.path, self.picture)] if draws else []
        wandb = [functools.partial(self._wandb.close, has_failed=not draws)] if self._wandb is not None else []
        for step in (self._file.close, *events, *picture, *wandb):
            try:
                step()
            except Exception as error:
                log.warning(f"the metrics were not closed as they should ({type(error).__name__}: {error})")


def flat(kind: str, values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield "kind/name", or "kind/name/inner" of a dictionary, with each number of a record."""
    for name, value in values.items():
        for inner, number in value.items() if isinstance(value, dict) else (("", value),):
            if isinstance(number, int | float):
                yield f"{kind}/{name}" + (f"/{inner}" if inner else ""), number


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the records of a metrics file; a last line cut off by a kill is left out."""
    records = []
    if path.exists():
        for line in path.read_bytes().splitlines():
            with suppress(orjson.JSONDecodeError):
                records.append(orjson.loads(line))
    return records


def draw_losses(metrics: Path, picture: Path) -> None:
    """Draw training and validation loss over steps; nothing is drawn without records."""
    records = read_metrics(metrics)
    curves = {kind: [(r["step"], r["loss"]) for r in records if r["kind"] == kind] for kind in ("train", "valid")}
    if not any(curves.values()):
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for kind, marker in (("train", None), ("valid", "o")):
        points = [(step, loss) for step, loss in curves[kind] if loss is not None and math.isfinite(loss)]
        if points:
            axes.plot(*zip(*points, strict=True), marker=marker, label=kind)
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(picture, dpi=120)
    pyplot.close(figure)


def _keep_whole(path: Path, last_step: int | None) -> None:
    """Keep the whole records up to ``last_step`` (None: all): a line after a part of one could not be read."""
    if not path.exists():
        return
    records = [record for record in read_metrics(path) if last_step is None or record["step"] <= last_step]
    kept = b"".join(orjson.dumps(record) + b"\n" for record in records)
    if kept != path.read_bytes():
        files.replace_bytes(path, kept)


# Which rank is clearly slower than its peers, by numbers that every rank has anyway: its own work, its wait for data.
#
# Own work is the time of forward and backward passes without waits for other stages. Where weights are cut, a rank
# waits for its tensor group within that time: all ranks of the group then look alike, and are named together.
#
# Who is slow once may be anybody. ``StragglerDetector`` names those who are so in several reports in a row.

AS_REPLICA, AS_STAGE = 1.5, 2.0
"""Clearly slower is so many times its peers' work; stages differ by themselves."""
AT_LEAST_S = 0.02
"""More than its peers, a step; less is the noise of small models."""
ALIKE = 0.9
IN_A_ROW = 3


class Straggler(NamedTuple):
    """Who holds the others up: one rank, or its tensor group; ``place`` is their (stage, replica)."""

    place: tuple[int, int]
    text: str


class StragglerDetector:
    """Who was the slowest up to now, and in how many reports in a row."""

    def __init__(self) -> None:
        self._place: tuple[int, int] | None = None
        self._times = 0

    def judge(self, found: Straggler | None) -> str | None:
        """Take note of the slowest of one more report; return what to say of it: once in ``IN_A_ROW`` in a row."""
        place = None if found is None else found.place
        self._times = self._times + 1 if place == self._place else 1
        self._place = place
        return None if found is None or self._times % IN_A_ROW else found.text


def slowest(per_step: Sequence[float], waited_s: Sequence[float], topology: Topology) -> Straggler | None:
    """Return which rank holds the others up, or None.

    A rank's peers are the same stage of other replicas, or the other stages where there is one replica.

    Args:
        per_step: seconds of own work of each rank in a step.
        waited_s: how much of it was wait for data.
    """
    rank = max(range(len(per_step)), key=per_step.__getitem__)
    peers = _peers(rank, topology)
    if not peers:
        return None
    usual = statistics.median(per_step[peer] for peer in peers)
    clearly = AS_REPLICA if topology.data > 1 else AS_STAGE
    if per_step[rank] < clearly * usual or per_step[rank] - usual < AT_LEAST_S:
        return None
    place = topology.coordinate(rank)
    alike = [r for r in _same_tensor_group(rank, topology) if per_step[r] > ALIKE * per_step[rank]]
    names = f"rank {rank}" if len(alike) == 1 else f"ranks {', '.join(map(str, alike))}"
    of_data = f", {waited_s[rank]:.3f} s of it waiting for data" if waited_s[rank] > AT_LEAST_S else ""
    text = (
        f"slowest: {names} (stage {place.pipe}, data {place.data}) with {per_step[rank]:.3f} s of own work a step"
        f"{of_data}; its peers need {usual:.3f} s"
    )
    return Straggler((place.pipe, place.data), text)


def _peers(rank: int, topology: Topology) -> list[int]:
    own = topology.coordinate(rank)
    places = {other: topology.coordinate(other) for other in range(topology.world_size)}
    replicas = [r for r, place in places.items() if place.pipe == own.pipe and place.data != own.data]
    return replicas or [r for r, place in places.items() if place.pipe != own.pipe]


def _same_tensor_group(rank: int, topology: Topology) -> list[int]:
    own = topology.coordinate(rank)
    places = {other: topology.coordinate(other) for other in range(topology.world_size)}
    return [r for r, place in places.items() if (place.pipe, place.data) == (own.pipe, own.data)]


# The norm of the gradients of each layer: --log-layer-norms.
#
# A group is what a parameter's logical name says up to the number of its layer, ``layers.3`` or ``encoder.layers.3``,
# and of other parameters the module that has them, ``embedding.word``. Squares are added up over the ranks as those of
# the whole norm are, each parameter once, so the squares of all groups add up to the square of ``grad_norm``, and every
# layout has the same numbers.


class LayerNorms:
    """Takes the norms of the groups ahead of an update, in the steps for which ``is_wanted`` is set.

    Making one is collective, and so is every wanted step: all ranks set it alike.

    Attributes:
        norms: of the last wanted step, without loss scale and before clipping; the same on every rank.
    """

    def __init__(self, module: torch.nn.Module, optimizer: MixedPrecisionOptimizer, world: World) -> None:
        self.is_wanted = False
        self.norms: dict[str, float] = {}
        self._optimizer, self._device = optimizer, world.device
        self._group_of = {parameter: group_of(name) for name, parameter in named_parameters(module)}
        self._groups = _of_all_ranks(self._group_of.values(), world)
        optimizer.register_step_pre_hook(self._take)

    def _take(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self.is_wanted:
            self.norms = self._norms()

    @torch.no_grad()
    def _norms(self) -> dict[str, float]:
        optimizer, places = self._optimizer, {name: index for index, name in enumerate(self._groups)}
        optimizer.sum_partial_gradients()
        squares = torch.zeros(len(places), dtype=torch.float64, device=self._device)
        for parameter, gradient in optimizer.counted_gradients():
            squares[places[self._group_of[parameter]]] += square_of_norm(gradient).to(self._device)
        whole = all_reduce(all_reduce(squares, optimizer.gradient_holders), optimizer.model_group)
        factor = optimizer.gradient_factor / optimizer.loss_scale
        return dict(zip(self._groups, (whole.sqrt() * factor).tolist(), strict=True))


def group_of(name: str) -> str:
    """Return the group of a parameter by its logical name: its layer, or else its module."""
    layer = re.match(r"(?:.*?\.)??\d+(?=\.)", name)
    return layer.group() if layer else name.rpartition(".")[0] or name


def _of_all_ranks(names: Iterable[str], world: World) -> list[str]:
    """Return the groups that any rank has, layers by number. Collective."""
    every = world.grid.host.gather_objects(sorted(set(names)))
    return sorted({name for each in every for name in each}, key=_by_number)


def _by_number(name: str) -> list[str]:
    return [part.zfill(9) if part.isdigit() else part for part in name.split(".")]
