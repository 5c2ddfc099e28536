"""Files of a dump. They are written during the run, so that a crash preserves all earlier records.

| file | content |
|---|---|
| `dump.json` | the layout and other facts that a reader needs |
| `rank-00003.jsonl` | records of one rank, one line per tensor, between the lines "begin" and "end" of each step |
| `tensors/rank-00003/...safetensors` | the tensors, if requested; the line of a record contains the file name |

A line "loss" of the last stage records whether the loss is a pair (sum, count) or the mean of a replica. It is written
as soon as this is known, and it applies to the gradients of all ranks, which are written without conversion.

A step that is repeated, after a resume or a return to a checkpoint, replaces the records of that step and of all later
steps.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import orjson
import torch
from safetensors.torch import load_file, save_file

from megatron import files
from megatron.debug.hooks import GRAD_INPUT, GRAD_OUTPUT
from megatron.debug.statistics import Cut, Statistics, measure
from tds.schedule import LOOP, Placement

MANIFEST = "dump.json"
FORMAT = 1
WEIGHT, GRADIENT = "weight", "gradient"


class Samples(NamedTuple):
    """Range of samples of the step's global batch to which a tensor belongs: from ``first`` up to ``stop``.

    If samples are split into shorter sequences (--seq-length-schedule), the range counts sequences instead.
    """

    first: int
    stop: int


@dataclass(frozen=True, slots=True)
class Record:
    """One tensor as recorded by one rank.

    Args:
        micro_batch, samples: None for weights and their gradients.
        shape, dtype: shape and dtype of the rank's slice, including padding, which ``statistics`` exclude.
        factor: factor to apply to the tensor in ``file``; it is already applied to the statistics.
        time_ns: time of the record, for the order among ranks.
        rank: rank that made the record.
        chunk: chunk of the rank's pipeline stage.
        is_share: the tensor is this rank's summand of a sum that its tensor group computes later.
    """

    step: int
    name: str
    what: str
    micro_batch: int | None
    samples: Samples | None
    call: int
    index: int
    shape: tuple[int, ...]
    dtype: str
    cut: Cut | None
    statistics: Statistics
    factor: float
    time_ns: int
    rank: int
    file: str | None = None
    chunk: int = 0
    is_share: bool = False


class Writer:
    """Writes the records of one rank into ``folder``."""

    def __init__(self, folder: Path, rank: int, *, with_tensors: bool = False) -> None:
        self.folder, self.rank, self.with_tensors = folder, rank, with_tensors
        self._file: BinaryIO | None = None
        self._step = self._number = 0

    @property
    def path(self) -> Path:
        """File of this rank."""
        return self.folder / f"rank-{self.rank:05d}.jsonl"

    def make(self) -> None:
        """Create the folder (hosts may not share it) and this rank's file if they do not exist.

        Raises:
            OSError: they cannot be written.
        """
        files.make_folder(self.folder)
        with open(self.path, "ab"):
            pass

    def begin(self, step: int) -> None:
        """Begin a step."""
        self.close()
        self._file = open(self.path, "ab")  # noqa: SIM115 - closed in close()
        self._file.write(b"\n")  # a kill may have truncated the last line
        self._step, self._number = step, 0
        self._write({"kind": "begin", "step": step})

    def add(
        self,
        x: torch.Tensor,
        name: str,
        what: str,
        *,
        cut: Cut | None = None,
        micro_batch: int | None = None,
        samples: Samples | None = None,
        call: int = 0,
        index: int = 0,
        chunk: int = 0,
        factor: float = 1.0,
        is_share: bool = False,
    ) -> None:
        """Write the statistics of ``factor`` times ``x``, and ``x`` itself if tensors are requested."""
        time_ns = time.time_ns()
        real = x if cut is None else cut.unpadded(x)
        start = cut.start if cut is not None and cut.dim == x.dim() - 1 else 0
        statistics = measure(real, start).times(factor)
        record = Record(
            self._step, name, what, micro_batch, samples, call, index, tuple(x.shape),
            str(x.dtype).removeprefix("torch."), cut, statistics, factor, time_ns, self.rank, self._keep(x), chunk,
            is_share,
        )  # fmt: skip
        self._write({"kind": "tensor", "step": self._step, "record": record})

    def note(self, kind: str, **facts: Any) -> None:
        """Write a line of a ``kind`` other than "tensor" with ``facts`` about the step."""
        self._write({"kind": kind, "step": self._step, **facts})

    def close(self) -> None:
        """Close the file until the next step begins."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _keep(self, x: torch.Tensor) -> str | None:
        """Save ``x`` if tensors are requested; return the name of its file relative to the folder."""
        if not self.with_tensors:
            return None
        name = f"tensors/rank-{self.rank:05d}/step-{self._step:06d}-{self._number:06d}.safetensors"
        self._number += 1
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({"tensor": x.detach().cpu().contiguous()}, path)
        return name

    def _write(self, line: Mapping[str, Any]) -> None:
        if self._file is None:
            raise RuntimeError("no step has begun. Call begin(step) first")
        self._file.write(orjson.dumps(line, default=tuple) + b"\n")
        self._file.flush()


def write_manifest(folder: Path, facts: Mapping[str, Any]) -> None:
    """Create the manifest of a dump with these ``facts``.

    Raises:
        ValueError: ``folder`` contains a dump of another run, for example with another layout.
    """
    facts = {"format": FORMAT, **facts}
    path = folder / MANIFEST
    if path.exists():
        existing = orjson.loads(path.read_bytes())
        fixed = ("format", "layout", "family", "micro_batch_size", "dtype", "seed")
        different = [key for key in fixed if existing.get(key) != orjson.loads(orjson.dumps(facts.get(key)))]
        if different:
            changes = "; ".join(f"{key} {existing.get(key)}, now {facts.get(key)}" for key in different)
            raise ValueError(f"{folder} contains the dump of another run ({changes})")
    files.make_folder(folder)
    files.replace_bytes(path, orjson.dumps(facts, option=orjson.OPT_INDENT_2) + b"\n")


class Dump(NamedTuple):
    """The content of a dump.

    ``facts`` are the manifest, ``records`` the records of complete and incomplete steps. ``ends`` maps each complete
    step to its "end" line. ``findings`` are the "not finite" lines.
    """

    folder: Path
    facts: dict[str, Any]
    records: list[Record]
    ends: dict[int, dict[str, Any]]
    findings: list[dict[str, Any]]

    def piece(self, record: Record) -> int:
        """Return the index of the record's chunk among the chunks of all stages, in forward order."""
        ranks, stages = self.facts["ranks"], self.facts["layout"].get("pipe", 1)
        # the piece does not depend on the number of chunks
        placement = Placement(stages, record.chunk + 2, self.facts.get("placement", LOOP))
        return placement.piece(ranks[record.rank]["stage"], record.chunk)

    def tensor(self, record: Record) -> torch.Tensor:
        """Return the recorded tensor, without padding, in fp64 and times its factor."""
        x = load_file(self.folder / str(record.file))["tensor"].double() * record.factor
        return x if record.cut is None else record.cut.unpadded(x)


def read(folder: Path) -> Dump:
    """Read the dump in ``folder``.

    Raises:
        ValueError: ``folder`` is not a dump, its format is unknown, or a rank's file is missing.
    """
    path = folder / MANIFEST
    if not path.exists():
        raise ValueError(f"{folder} must be a folder written by --debug-dump, but it has no {MANIFEST}")
    facts = orjson.loads(path.read_bytes())
    if facts.get("format") != FORMAT:
        raise ValueError(f"{path} must have format {FORMAT}, got {facts.get('format')!r}: another version wrote it")
    dump = Dump(folder, facts, [], {}, [])
    forms: dict[int, bool] = {}
    for rank in range(facts["world_size"]):
        rank_path = folder / f"rank-{rank:05d}.jsonl"
        if not rank_path.exists():
            raise ValueError(
                f"{folder} must contain the files of all {facts['world_size']} ranks, got no {rank_path.name}"
            )
        for line in _lasting(rank_path):
            if line["kind"] == "tensor":
                dump.records.append(_record(line["record"]))
            elif line["kind"] == "end":
                dump.ends[line["step"]] = line
            elif line["kind"] == "not finite":
                dump.findings.append(line)
            elif line["kind"] == "loss":
                forms[line["step"]] = line["is_weighted"]
    return dump._replace(
        records=[_of_mean_loss(record, forms, facts["layout"].get("data", 1)) for record in dump.records]
    )


def _of_mean_loss(record: Record, forms: Mapping[int, bool], replicas: int) -> Record:
    """Return ``record`` with a gradient of a scalar loss divided by the number of replicas; others unchanged.

    Afterwards gradients are those of the mean loss over all replicas, up to a factor common to all layouts.

    Args:
        forms: step -> True if the loss is a pair (sum, count), False if it is a scalar, the mean of a replica.
    """
    is_weighted = forms.get(record.step, next(iter(forms.values()), True))
    if record.what not in (GRAD_OUTPUT, GRAD_INPUT) or is_weighted:
        return record
    share = 1.0 / replicas
    return replace(record, factor=share * record.factor, statistics=record.statistics.times(share))


def _lasting(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the valid lines of a rank's file: those not replaced by a repeated step."""
    lines: list[dict[str, Any]] = []
    for text in path.read_bytes().splitlines():
        with suppress(orjson.JSONDecodeError):
            line = orjson.loads(text)
            if line["kind"] == "begin":
                lines = [other for other in lines if other["step"] < line["step"]]
            lines.append(line)
    yield from lines


def _record(held: dict[str, Any]) -> Record:
    statistics = held["statistics"]
    held |= {
        "cut": None if held["cut"] is None else Cut(*held["cut"]),
        "samples": None if held["samples"] is None else Samples(*held["samples"]),
        "shape": tuple(held["shape"]),
        "statistics": Statistics(**{**statistics, "sketch": tuple(statistics["sketch"])}),
    }
    return Record(**held)
