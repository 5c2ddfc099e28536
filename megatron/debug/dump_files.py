"""Dump files, written during the run so that a crash loses no earlier records.

| file | content |
|---|---|
| `dump.json` | the manifest: layout, dtype and other run properties that are needed to read the dump |
| `rank-00003.jsonl` | one rank's records, one line per tensor, between the lines "begin" and "end" for each step |
| `tensors/rank-00003/...safetensors` | the tensors, if requested; each record contains its file name |

Gradients are written as they are computed; ``read_dump`` normalizes them. For this, the last stage writes a "loss"
line, which records whether the loss is a pair (sum, count) or the mean over a replica. The line applies to the
gradients of all ranks.

If a step is repeated, after a resume or a rollback to a checkpoint, its new records replace the records for that step
and all later steps.
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
from megatron.debug.statistics import ShardSlice, Statistics, measure
from tds.schedule import LOOP, Placement

MANIFEST = "dump.json"
FORMAT = 1
WEIGHT, GRADIENT = "weight", "gradient"


class SampleRange(NamedTuple):
    """Samples [``first``, ``stop``) of the step's global batch to which a tensor belongs.

    If samples are split into shorter sequences (--seq-length-schedule), the range counts sequences instead.
    """

    first: int
    stop: int


@dataclass(frozen=True, slots=True)
class Record:
    """One tensor as recorded by one rank.

    Args:
        what: tensor type, such as "input" or "grad_output".
        micro_batch, samples: None for weights and their gradients.
        shape, dtype: the rank slice's shape and dtype. The shape includes padding, but ``statistics`` do not.
        cut: slice of the full tensor; None if it is unknown or every rank holds the full tensor.
        factor: multiplier for the tensor in ``file``; ``statistics`` already include it.
        time_ns: record time on the rank's clock, for sorting.
        rank: rank that wrote the record.
        chunk: chunk index on the rank's pipeline stage.
        is_share: the tensor is this rank's partial sum, which the tensor group reduces later.
    """

    step: int
    name: str
    what: str
    micro_batch: int | None
    samples: SampleRange | None
    call: int
    index: int
    shape: tuple[int, ...]
    dtype: str
    cut: ShardSlice | None
    statistics: Statistics
    factor: float
    time_ns: int
    rank: int
    file: str | None = None
    chunk: int = 0
    is_share: bool = False


class DumpWriter:
    """Writes one rank's records into ``folder``."""

    def __init__(self, folder: Path, rank: int, *, with_tensors: bool = False) -> None:
        self.folder, self.rank, self.with_tensors = folder, rank, with_tensors
        self._file: BinaryIO | None = None
        self._step = self._tensor_idx = 0

    @property
    def path(self) -> Path:
        """Path of this rank's record file."""
        return self.folder / f"rank-{self.rank:05d}.jsonl"

    def create_files(self) -> None:
        """Create the folder and this rank's file if they do not exist.

        Every rank creates the folder, because hosts may not share a file system.

        Raises:
            OSError: the folder or the file cannot be written.
        """
        files.make_folder(self.folder)
        with open(self.path, "ab"):
            pass

    def begin(self, step: int) -> None:
        """Begin a step."""
        self.close()
        self._file = open(self.path, "ab")  # noqa: SIM115 - closed in close()
        self._file.write(b"\n")  # terminates a line that a killed run left incomplete
        self._step, self._tensor_idx = step, 0
        self._write_line({"kind": "begin", "step": step})

    def add(
        self,
        x: torch.Tensor,
        name: str,
        tensor_type: str,
        *,
        shard_slice: ShardSlice | None = None,
        micro_batch: int | None = None,
        samples: SampleRange | None = None,
        call: int = 0,
        index: int = 0,
        chunk: int = 0,
        factor: float = 1.0,
        is_share: bool = False,
    ) -> None:
        """Write statistics for ``factor`` times ``x``, and ``x`` itself if tensors are requested."""
        time_ns = time.time_ns()
        unpadded = x if shard_slice is None else shard_slice.unpadded(x)
        start = shard_slice.start if shard_slice is not None and shard_slice.dim == x.dim() - 1 else 0
        statistics = measure(unpadded, start).times(factor)
        record = Record(
            self._step, name, tensor_type, micro_batch, samples, call, index, tuple(x.shape),
            str(x.dtype).removeprefix("torch."), shard_slice, statistics, factor, time_ns, self.rank,
            self._save_tensor(x), chunk, is_share,
        )  # fmt: skip
        self._write_line({"kind": "tensor", "step": self._step, "record": record})

    def note(self, line_type: str, **fields: Any) -> None:
        """Write a line of type ``line_type`` (any type but "tensor") with ``fields`` for the current step."""
        self._write_line({"kind": line_type, "step": self._step, **fields})

    def close(self) -> None:
        """Close the file until the next step begins."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _save_tensor(self, x: torch.Tensor) -> str | None:
        """Save ``x`` if tensors are requested; return the file's path relative to the folder, or None."""
        if not self.with_tensors:
            return None
        name = f"tensors/rank-{self.rank:05d}/step-{self._step:06d}-{self._tensor_idx:06d}.safetensors"
        self._tensor_idx += 1
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({"tensor": x.detach().cpu().contiguous()}, path)
        return name

    def _write_line(self, line: Mapping[str, Any]) -> None:
        if self._file is None:
            raise RuntimeError("no step has begun. Call begin(step) first")
        self._file.write(orjson.dumps(line, default=tuple) + b"\n")
        self._file.flush()


def write_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Write ``manifest`` to a dump's manifest file, together with the format version.

    Raises:
        ValueError: ``folder`` contains another run's dump, for example with another layout.
    """
    manifest = {"format": FORMAT, **manifest}
    path = folder / MANIFEST
    if path.exists():
        existing = orjson.loads(path.read_bytes())
        fixed = ("format", "layout", "family", "micro_batch_size", "dtype", "seed")
        different = [key for key in fixed if existing.get(key) != orjson.loads(orjson.dumps(manifest.get(key)))]
        if different:
            changes = "; ".join(f"{key} {existing.get(key)}, now {manifest.get(key)}" for key in different)
            raise ValueError(f"{folder} contains the dump of another run ({changes})")
    files.make_folder(folder)
    files.replace_bytes(path, orjson.dumps(manifest, option=orjson.OPT_INDENT_2) + b"\n")


class Dump(NamedTuple):
    """A dump's content.

    ``manifest`` is the manifest file's content. ``records`` cover complete and incomplete steps.
    ``ends`` maps each complete step to its "end" line. ``findings`` are the "not finite" lines.
    """

    folder: Path
    manifest: dict[str, Any]
    records: list[Record]
    ends: dict[int, dict[str, Any]]
    findings: list[dict[str, Any]]

    def global_chunk_idx(self, record: Record) -> int:
        """Compute the index of the record's chunk among all stages' chunks, in forward order."""
        ranks, stages = self.manifest["ranks"], self.manifest["layout"].get("pipe", 1)
        # any number of chunks above ``record.chunk`` yields the same virtual stage
        placement = Placement(stages, record.chunk + 2, self.manifest.get("placement", LOOP))
        return placement.virtual_stage(ranks[record.rank]["stage"], record.chunk)

    def tensor(self, record: Record) -> torch.Tensor:
        """Load the recorded tensor in fp64, without padding and multiplied by its factor."""
        x = load_file(self.folder / str(record.file))["tensor"].double() * record.factor
        return x if record.cut is None else record.cut.unpadded(x)


def read_dump(folder: Path) -> Dump:
    """Read the dump in ``folder``.

    Raises:
        ValueError: ``folder`` is not a dump, its format is unknown, or a rank's file is missing.
    """
    path = folder / MANIFEST
    if not path.exists():
        raise ValueError(f"{folder} must be a folder written by --debug-dump, but it has no {MANIFEST}")
    manifest = orjson.loads(path.read_bytes())
    if manifest.get("format") != FORMAT:
        raise ValueError(f"{path} must have format {FORMAT}, got {manifest.get('format')!r}: another version wrote it")
    dump = Dump(folder, manifest, [], {}, [])
    is_weighted_by_step: dict[int, bool] = {}
    for rank in range(manifest["world_size"]):
        rank_path = folder / f"rank-{rank:05d}.jsonl"
        if not rank_path.exists():
            raise ValueError(
                f"{folder} must contain the files of all {manifest['world_size']} ranks, but {rank_path.name} is "
                "missing"
            )
        for line in _valid_lines(rank_path):
            if line["kind"] == "tensor":
                dump.records.append(_parse_record(line["record"]))
            elif line["kind"] == "end":
                dump.ends[line["step"]] = line
            elif line["kind"] == "not finite":
                dump.findings.append(line)
            elif line["kind"] == "loss":
                is_weighted_by_step[line["step"]] = line["is_weighted"]
    return dump._replace(
        records=[
            _normalize_gradient(record, is_weighted_by_step, manifest["layout"].get("data", 1))
            for record in dump.records
        ]
    )


def _normalize_gradient(record: Record, is_weighted_by_step: Mapping[int, bool], num_replicas: int) -> Record:
    """Divide a gradient by the replica count if the loss is a scalar; return other records unchanged.

    After normalization, gradients belong to the mean loss over all replicas, up to a factor that all layouts share.

    Args:
        is_weighted_by_step: step -> True if the loss is a pair (sum, count), False if it is a scalar, the mean over a
            replica.
    """
    is_weighted = is_weighted_by_step.get(record.step, next(iter(is_weighted_by_step.values()), True))
    if record.what not in (GRAD_OUTPUT, GRAD_INPUT) or is_weighted:
        return record
    scale = 1.0 / num_replicas
    return replace(record, factor=scale * record.factor, statistics=record.statistics.times(scale))


def _valid_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Read the lines in a rank's file, except incomplete lines and lines that a repeated step replaces."""
    lines: list[dict[str, Any]] = []
    for text in path.read_bytes().splitlines():
        with suppress(orjson.JSONDecodeError):
            line = orjson.loads(text)
            if line["kind"] == "begin":
                lines = [other for other in lines if other["step"] < line["step"]]
            lines.append(line)
    yield from lines


def _parse_record(fields: dict[str, Any]) -> Record:
    statistics = fields["statistics"]
    fields |= {
        "cut": None if fields["cut"] is None else ShardSlice(*fields["cut"]),
        "samples": None if fields["samples"] is None else SampleRange(*fields["samples"]),
        "shape": tuple(fields["shape"]),
        "statistics": Statistics(**{**statistics, "sketch": tuple(statistics["sketch"])}),
    }
    return Record(**fields)
