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
    ChunkLayers,
    deepspeed,
    first_layer_idx,
    indexed_grid,
    layer_specs,
    set_module_timeouts,
    sharing_groups,
)
from tds.deepspeed.layer_profiler import ProfiledPartition, profile_partition
from tds.deepspeed.shared_layers import (
    borrowed_parameters,
    count_shared_parameters,
    index_shared_modules,
    initialized_tied_weights,
    layer_parameters,
    shared_layer_indices,
    use_shared_modules,
)
from tds.partition import PartitionError, chunks_on
from tds.schedule import LOOP, Placement
from tds.user_functions import BatchFn


def layer_indices(module: Any) -> list[int]:
    """List the full-model index of each layer in ``module.forward_funcs``, chunk by chunk."""
    chunks = chunks_on(module.parts, module.num_stages, module.stage_id, getattr(module, "placement", LOOP))
    return [layer_idx for start, stop in chunks for layer_idx in range(start, stop)]


def contiguous_layer_idx(module: Any, local_index: int) -> int:
    """Convert a local layer index for DeepSpeed's path functions.

    They assume that a stage has one contiguous run of layers, and add ``first_layer_idx(module)`` to the local index.
    """
    return layer_indices(module)[local_index] - first_layer_idx(module)


class PipelineModule(BaseModule):
    """DeepSpeed's ``PipelineModule`` with several chunks per stage and more partition methods.

    Args:
        partition_method: "parameters", "uniform", "type:REGEX", "profile", or bounds such as ``[0, 3, 5]``: virtual
            stage ``i`` has the layers ``bounds[i] ... bounds[i + 1]``. Must be equal on every rank.
        chunks: number of chunks per stage, each a short run of layers. The schedule "interleaved" needs at least two.
        placement: "loop": ``chunk`` of ``stage`` is the virtual stage ``chunk * num_stages + stage``. "v": the virtual
            stages go down the stages and up again (``tds.schedule.Placement``), for the schedules "zb-v" and
            "dualpipev".
        profile_batch: one micro-batch (inputs, labels) on which "profile" times each layer; its shapes must be equal on
            all ranks.

    Raises:
        PartitionError: (a ValueError) the bounds do not contain each layer exactly once, a virtual stage has no layers,
            or no layer has the type.
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
        shared_layer_indices(layers)  # raises if keys clash, before anything is built
        self.chunks = chunks
        self.placement = Placement(1, chunks, placement).style  # raises for unknown placements
        self.profile: ProfiledPartition | None = None
        self._profile_batch = profile_batch
        self._recomputes = bool(kwargs.get("activation_checkpoint_interval", 0))
        self._runs: list[ChunkLayers] = []
        with without_prints(), sharing_groups(), indexed_grid():
            super().__init__(layers, *args, **kwargs)

    def forward(self, forward_input: Any, chunk: int = 0) -> Any:
        """Run this stage's layers of ``chunk``."""
        if self.chunks == 1:
            return super().forward(forward_input)
        return self._runs[chunk].forward(forward_input)

    def made_output(self, output: Any) -> Any:
        """Convert the last layer's output to the output that ``eval_batch`` returns.

        Subclasses override this method if the last layer leaves work to the loss function. Example: the loss function
        computes the logits in chunks, and this method computes all of them.
        """
        return output

    def parameters_of(self, chunk: int) -> list[torch.nn.Parameter]:
        """Return the parameters of ``chunk``, including shared ones, in the order of its layers without duplicates."""
        return list(dict.fromkeys(p for layer in self.layers_of(chunk) for p in layer_parameters(layer)))

    def layers_of(self, chunk: int) -> list[Any]:
        """Return the layers of ``chunk``: modules, functions, and partials that bind a tied module to a function."""
        return list(self.forward_funcs if self.chunks == 1 else self._runs[chunk].forward_funcs)

    def borrowed_parameters_of(self, chunk: int) -> list[torch.nn.Parameter]:
        """Return the parameters that the layers of ``chunk`` read from modules outside of them.

        These are the tied modules of functions and the shared modules (``tds.deepspeed.shared_layers``).
        """
        return list(dict.fromkeys(p for layer in self.layers_of(chunk) for p in borrowed_parameters(layer)))

    def ckpt_layer_path(self, ckpt_dir: str, local_layer_idx: int) -> str:
        """Return the file of the layer with a local index; file names contain the layer's index in the full model."""
        return super().ckpt_layer_path(ckpt_dir, contiguous_layer_idx(self, local_layer_idx))

    def ckpt_layer_path_list(self, ckpt_dir: str, local_layer_idx: int) -> list[str]:
        """Return the files of a layer, one per tensor rank that saved it."""
        return super().ckpt_layer_path_list(ckpt_dir, contiguous_layer_idx(self, local_layer_idx))

    def stage_owner(self, layer_idx: int) -> int:
        """Return the stage of the layer ``layer_idx`` of the full model."""
        return Placement(self.num_stages, self.chunks, self.placement).stage_of(
            virtual_stage_of_layer(self.parts, layer_idx)
        )

    def build_layers(self) -> None:
        with use_shared_modules(self.tied_modules):
            if self.chunks == 1:
                super().build_layers()
                return
            for start, stop in chunks_on(self.parts, self.num_stages, self.stage_id, self.placement):
                self.set_bounds(start, stop)
                first = len(self.forward_funcs)
                super().build_layers()
                self._runs.append(ChunkLayers(self, start, slice(first, len(self.forward_funcs))))

    def count_layer_parameters(self) -> list[int]:
        unshared_counts = super().count_layer_parameters()
        return [
            count + shared
            for count, shared in zip(unshared_counts, count_shared_parameters(layer_specs(self)), strict=True)
        ]

    def index_tied_modules(self) -> dict[str, dict[str, Any]]:
        return {**super().index_tied_modules(), **index_shared_modules(self)}

    def _profile_partition(self) -> ProfiledPartition:
        return profile_partition(
            layer_specs(self),
            num_stages=self.num_stages,
            num_chunks=self.chunks,
            placement=self.placement,
            batch=self._profile_batch,
            loss_fn=self.loss_fn,
            device=device.local_device(self.local_rank),
            recomputes=self._recomputes,
        )

    def select_recomputed_layers(self) -> None:
        if not self._runs:
            super().select_recomputed_layers()
        for run in self._runs:
            run.select_recomputed_layers()

    def synchronize_tied_weights(self) -> None:
        """Broadcast each tied weight that has values; weights that are drawn by name are equal on all stages."""
        set_module_timeouts(self)
        with torch.no_grad(), initialized_tied_weights(self):  # otherwise autograd would record the broadcast
            super().synchronize_tied_weights()

    def partition_layers(self, method: Any) -> None:
        num_layers = len(layer_specs(self))
        num_virtual_stages = self.num_stages * self.chunks
        if isinstance(method, str) and method.lower() == "profile":
            self.profile = self._profile_partition()
            self.parts = self.profile.bounds
        elif isinstance(method, str):
            with _partition_as_stages(self, num_virtual_stages), _list_classes_on_error(layer_specs(self), method):
                super().partition_layers(method)
            # DeepSpeed's bounds may be numpy integers, which Python's and torch's seeds reject (``seed_layers``).
            self.parts = [int(bound) for bound in self.parts]
        else:
            self.parts = check_bounds(method, num_layers, num_virtual_stages)
        check_no_empty_chunks(self.parts, num_layers, method, Placement(self.num_stages, self.chunks, self.placement))
        self.set_bounds(self.parts[self.stage_id], self.parts[self.stage_id + 1])


@contextmanager
def preserve_forward_counts(module: Any) -> Iterator[None]:
    """Restore DeepSpeed's counts of forwards, which seed layers, at the end of the block."""
    counters = [module, *getattr(module, "_runs", [])]
    offsets = [counter.micro_offset for counter in counters]
    try:
        yield
    finally:
        for counter, offset in zip(counters, offsets, strict=True):
            counter.micro_offset = offset


def virtual_stage_of_layer(bounds: Sequence[int], layer_idx: int) -> int:
    """Find the virtual stage that contains ``layer_idx``."""
    for virtual_stage in range(len(bounds) - 1):
        if bounds[virtual_stage] <= layer_idx < bounds[virtual_stage + 1]:
            return virtual_stage
    raise ValueError(f"a layer index must be within the bounds {list(bounds)}, got {layer_idx}")


@contextmanager
def _partition_as_stages(module: PipelineModule, num_virtual_stages: int) -> Iterator[None]:
    """Make DeepSpeed's methods partition into virtual stages instead of stages."""
    num_stages, module.num_stages = module.num_stages, num_virtual_stages
    try:
        yield
    finally:
        module.num_stages = num_stages


@contextmanager
def _list_classes_on_error(specs: Sequence[Any], method: str) -> Iterator[None]:
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


def check_bounds(bounds: Any, num_layers: int, num_virtual_stages: int) -> list[int]:
    """Return ``bounds`` as a list; raise PartitionError unless they split the layers into ``num_virtual_stages``."""
    got = f"got partition_method={bounds!r} for {num_layers} layers and {num_virtual_stages} stages (times chunks)"
    try:
        int_bounds = [int(bound) for bound in bounds]
        is_exact = int_bounds == list(bounds)
    except (TypeError, ValueError):
        is_exact = False
    if not is_exact:
        raise PartitionError(f"partition_method must be a name or a list of integers, {got}")
    if (
        len(int_bounds) != num_virtual_stages + 1
        or int_bounds[0] != 0
        or int_bounds[-1] != num_layers
        or int_bounds != sorted(int_bounds)
    ):
        raise PartitionError(
            f"partition bounds must be {num_virtual_stages + 1} increasing integers from 0 to the number of layers, "
            f"{got}. Write [0, ..., {num_layers}], so that each layer is on one stage."
        )
    return int_bounds


def check_no_empty_chunks(bounds: list[int], num_layers: int, method: Any, placement: Placement) -> None:
    """Raise PartitionError if a virtual stage has no layer; it would only forward tensors."""
    empty_stages = [
        virtual_stage for virtual_stage in range(len(bounds) - 1) if bounds[virtual_stage] == bounds[virtual_stage + 1]
    ]
    if not empty_stages:
        return
    num_stages, chunks = placement.num_stages, placement.num_chunks
    location = f"stage {placement.stage_of(empty_stages[0])}" + (
        f", chunk {empty_stages[0] // num_stages}" if chunks > 1 else ""
    )
    raise PartitionError(
        f"each stage must have a layer{' in each chunk' if chunks > 1 else ''}, got none on {location}: {num_layers} "
        f"layers, {num_stages} stages, {chunks=}, partition_method={method!r} results in the bounds {bounds}. "
        "Use fewer stages or chunks, more layers, or explicit bounds."
    )
