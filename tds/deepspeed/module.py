"""PipelineModule: layers partitioned into stages and chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from tds import device
from tds.deepspeed.alias import without_prints
from tds.deepspeed.api import (
    BaseModule,
    LayerRun,
    deepspeed,
    first_layer,
    indexed_grid,
    layer_specs,
    limit_waits,
    sharing_groups,
)
from tds.deepspeed.layer_profiler import ProfiledCut, profiled_cut
from tds.deepspeed.shared_layers import count_shared, held_in, index_shared_modules, layer_parameters, sharing_layers
from tds.partition import PartitionError, chunks_on
from tds.schedule import LOOP, Placement
from tds.user_functions import BatchFn


def layer_numbers(module: Any) -> list[int]:
    """Return the index in the full model of each layer in ``module.forward_funcs``, chunk by chunk."""
    runs = chunks_on(module.parts, module.num_stages, module.stage_id, getattr(module, "placement", LOOP))
    return [layer_idx for start, stop in runs for layer_idx in range(start, stop)]


def index_in_one_run(module: Any, local_index: int) -> int:
    """Convert a local layer index for DeepSpeed's path functions.

    They assume that a stage has one contiguous run of layers, and add ``first_layer(module)`` to the local index.
    """
    return layer_numbers(module)[local_index] - first_layer(module)


class PipelineModule(BaseModule):
    """DeepSpeed's ``PipelineModule`` with several chunks per stage and more partition methods.

    Args:
        partition_method: "parameters", "uniform", "type:REGEX", "profile", or bounds such as ``[0, 3, 5]``: piece ``i``
            has the layers ``bounds[i] ... bounds[i + 1]``. Must be equal on every rank.
        chunks: number of pieces per stage, each a short run of layers. The schedule "interleaved" needs at least two.
        placement: "loop": ``stage`` has the pieces ``chunk * num_stages + stage``. "v": the pieces go down the stages
            and up again (``tds.schedule.Placement``), for the schedules "zb-v" and "dualpipev".
        profile_batch: one micro-batch (inputs, labels) on which "profile" times each layer; its shapes must be equal on
            all ranks.

    Raises:
        PartitionError: a ValueError: the bounds do not contain each layer exactly once, a piece has no layers, or no
            layer has the type.
        ValueError: ``chunks`` is not a positive int, or ``placement`` is unknown or does not support ``chunks``.
    """

    parts: list[int]
    num_stages: int
    _megatron_batch_fn: BatchFn | None = None
    """Initial value of ``engine.batch_fn``, see ``engine.set_batch_fn``; a script may set it on the module."""

    def __init__(
        self, layers: Any, *args: Any, chunks: int = 1, placement: str = LOOP,
        profile_batch: tuple[Any, Any] | None = None, **kwargs: Any,
    ) -> None:  # fmt: skip
        if not isinstance(chunks, int) or isinstance(chunks, bool) or chunks < 1:
            raise ValueError(f"chunks must be a positive integer, got {chunks!r}")
        if dist.is_initialized() and not deepspeed.comm.is_initialized():
            deepspeed.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False, verbose=False)
        layers = list(layers)
        sharing_layers(layers)  # raises if keys clash, before anything is built
        self.chunks = chunks
        self.placement = Placement(1, chunks, placement).kind  # raises for unknown placements
        self.profile: ProfiledCut | None = None
        self._profile_batch = profile_batch
        self._recomputes = bool(kwargs.get("activation_checkpoint_interval", 0))
        self._runs: list[LayerRun] = []
        with without_prints(), sharing_groups(), indexed_grid():
            super().__init__(layers, *args, **kwargs)

    def forward(self, forward_input: Any, chunk: int = 0) -> Any:
        """Run this stage's layers of ``chunk``."""
        if self.chunks == 1:
            return super().forward(forward_input)
        return self._runs[chunk].forward(forward_input)

    def made_output(self, output: Any) -> Any:
        """Convert the output of the last layer to the output that ``eval_batch`` returns.

        Subclasses override this method if the last layer leaves work to the loss function. Example: the loss function
        computes the logits in chunks, and this method computes all of them.
        """
        return output

    def parameters_of(self, chunk: int) -> list[torch.nn.Parameter]:
        """Return the parameters of ``chunk``, including shared ones, in the order of its layers without duplicates."""
        layers = self.forward_funcs if self.chunks == 1 else self._runs[chunk].forward_funcs
        return list(dict.fromkeys(p for layer in layers for p in layer_parameters(layer)))

    def ckpt_layer_path(self, ckpt_dir: str, local_layer_idx: int) -> str:
        """Return the file of the layer with a local index; file names contain the layer's index in the full model."""
        return super().ckpt_layer_path(ckpt_dir, index_in_one_run(self, local_layer_idx))

    def ckpt_layer_path_list(self, ckpt_dir: str, local_layer_idx: int) -> list[str]:
        """Return the files of a layer, one per tensor rank that saved it."""
        return super().ckpt_layer_path_list(ckpt_dir, index_in_one_run(self, local_layer_idx))

    def stage_owner(self, layer_idx: int) -> int:
        """Return the stage of the layer ``layer_idx`` of the full model."""
        return Placement(self.num_stages, self.chunks, self.placement).stage_of(chunk_of(self.parts, layer_idx))

    def build_layers(self) -> None:
        with held_in(self.tied_modules):
            if self.chunks == 1:
                super().build_layers()
                return
            for start, stop in chunks_on(self.parts, self.num_stages, self.stage_id, self.placement):
                self.set_bounds(start, stop)
                first = len(self.forward_funcs)
                super().build_layers()
                self._runs.append(LayerRun(self, start, slice(first, len(self.forward_funcs))))

    def count_layer_parameters(self) -> list[int]:
        unshared = super().count_layer_parameters()
        return [count + shared for count, shared in zip(unshared, count_shared(layer_specs(self)), strict=True)]

    def index_tied_modules(self) -> dict[str, dict[str, Any]]:
        return {**super().index_tied_modules(), **index_shared_modules(self)}

    def _profiled_cut(self) -> ProfiledCut:
        return profiled_cut(
            layer_specs(self),
            num_stages=self.num_stages,
            num_chunks=self.chunks,
            placement=self.placement,
            batch=self._profile_batch,
            loss_fn=self.loss_fn,
            device=device.own(self.local_rank),
            recomputes=self._recomputes,
        )

    def choose_recomputed(self) -> None:
        if not self._runs:
            super().choose_recomputed()
        for run in self._runs:
            run.choose_recomputed()

    def synchronize_tied_weights(self) -> None:
        limit_waits(self)
        with torch.no_grad():  # otherwise autograd would record the broadcast
            super().synchronize_tied_weights()

    def partition_layers(self, method: Any) -> None:
        num_layers = len(layer_specs(self))
        num_pieces = self.num_stages * self.chunks
        if isinstance(method, str) and method.lower() == "profile":
            self.profile = self._profiled_cut()
            self.parts = self.profile.bounds
        elif isinstance(method, str):
            with _as_stages(self, num_pieces), _naming_classes(layer_specs(self), method):
                super().partition_layers(method)
            # DeepSpeed's bounds may be numpy integers, which Python's and torch's seeds reject (``seed_layers``).
            self.parts = [int(bound) for bound in self.parts]
        else:
            self.parts = check_bounds(method, num_layers, num_pieces)
        refuse_empty_pieces(self.parts, num_layers, method, Placement(self.num_stages, self.chunks, self.placement))
        self.set_bounds(self.parts[self.stage_id], self.parts[self.stage_id + 1])


@contextmanager
def forwards_uncounted(module: Any) -> Iterator[None]:
    """Restore DeepSpeed's counts of forwards, which seed layers, at the end of the block."""
    counters = [module, *getattr(module, "_runs", [])]
    offsets = [counter.micro_offset for counter in counters]
    try:
        yield
    finally:
        for counter, offset in zip(counters, offsets, strict=True):
            counter.micro_offset = offset


def chunk_of(parts: Sequence[int], layer: int) -> int:
    """Return the index of the piece that contains ``layer``."""
    for piece in range(len(parts) - 1):
        if parts[piece] <= layer < parts[piece + 1]:
            return piece
    raise ValueError(f"a layer index must be within the bounds {list(parts)}, got {layer}")


@contextmanager
def _as_stages(module: PipelineModule, num_pieces: int) -> Iterator[None]:
    """Make DeepSpeed's methods partition into pieces instead of stages."""
    num_stages, module.num_stages = module.num_stages, num_pieces
    try:
        yield
    finally:
        module.num_stages = num_stages


@contextmanager
def _naming_classes(specs: Sequence[Any], method: str) -> Iterator[None]:
    """Replace DeepSpeed's error "found no valid layers" by one that names the available classes."""
    try:
        yield
    except RuntimeError as error:
        if "found no valid layers" not in str(error):
            raise
        classes = ", ".join(dict.fromkeys(_class_name(spec) for spec in specs))
        raise PartitionError(
            f"partition_method={method!r} matches no layer; the classes are {classes}. Write type: and a part of one "
            "of these names, or use another method."
        ) from None


def _class_name(spec: Any) -> str:
    class_or_function = getattr(spec, "typename", type(spec) if isinstance(spec, torch.nn.Module) else spec)
    return getattr(class_or_function, "__name__", type(class_or_function).__name__)


def check_bounds(bounds: Any, num_layers: int, num_pieces: int) -> list[int]:
    """Return ``bounds`` as a list; raise PartitionError unless they split ``num_layers`` layers into ``num_pieces``."""
    got = f"got partition_method={bounds!r} for {num_layers} layers and {num_pieces} stages (times chunks)"
    try:
        as_ints = [int(bound) for bound in bounds]
        exact = as_ints == list(bounds)
    except (TypeError, ValueError):
        exact = False
    if not exact:
        raise PartitionError(f"partition_method must be a name or a list of integers, {got}")
    if len(as_ints) != num_pieces + 1 or as_ints[0] != 0 or as_ints[-1] != num_layers or as_ints != sorted(as_ints):
        raise PartitionError(
            f"partition bounds must be {num_pieces + 1} increasing integers from 0 to the number of layers, {got}. "
            f"Write [0, ..., {num_layers}], so that each layer is on one stage."
        )
    return as_ints


def refuse_empty_pieces(parts: list[int], num_layers: int, method: Any, placement: Placement) -> None:
    """Raise PartitionError if a piece has no layer; it would only forward tensors."""
    empty = [piece for piece in range(len(parts) - 1) if parts[piece] == parts[piece + 1]]
    if not empty:
        return
    num_stages, chunks = placement.num_stages, placement.num_chunks
    location = f"stage {placement.stage_of(empty[0])}" + (f", chunk {empty[0] // num_stages}" if chunks > 1 else "")
    raise PartitionError(
        f"each stage must have a layer{' in each chunk' if chunks > 1 else ''}, got none on {location}: {num_layers} "
        f"layers, {num_stages} stages, {chunks=}, partition_method={method!r} results in the bounds {parts}. "
        "Use fewer stages or chunks, more layers, or explicit bounds."
    )
