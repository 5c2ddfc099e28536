"""ParamStore: parameters, the main params that the inner optimizer updates, and their shards.

| precision | ZeRO 0 | ZeRO 1, 2 | ZeRO 3 |
|---|---|---|---|
| fp32, fp64 | the parameter itself | a view of this replica's shard of it | the shard |
| bf16, fp16 | a copy in fp32 | a copy of the shard in fp32 | a copy of the shard in fp32 |

With optimizer offload each main param is a copy on the CPU. Under ZeRO 3 each replica also keeps its shards of the
weights in the training dtype (``weight_shards``); full weights exist only while a layer uses them (``zero.stage3``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from megatron.mpu.groups import SINGLE, Group
from megatron.mpu.shard import set_shard, shard_of
from megatron.optim.offload import NO_OFFLOAD, OffloadConfig
from megatron.optim.zero.gather import ShardedWeight, gather_all
from megatron.optim.zero.param_gather import ParamGather, defers_gather
from megatron.optim.zero.param_init import ParamInit
from megatron.optim.zero.partition import ParamPartition, partition_of
from megatron.optim.zero.stage3 import ParamUnits
from tds.gradients import WIDE_DTYPES, choose_bucket_numel, is_reduced_by_optimizer


class ParamStore:
    """The parameters of one replica.

    Args:
        data: group of the replicas.
        expert_data: group of the ranks with the same experts, if not exactly the replicas have them.
        expert_tensor: group over which these experts are sharded; None: the tensor group.
        zero_stage: from 1 on main params are sharded over the replicas. A single replica shards nothing, unless weights
            are offloaded.
        offload: state that is stored on the CPU.
        param_init: with ZeRO 3, initializes weights one by one; None if all are initialized.
        reduce_bucket_size, allgather_bucket_size: elements per gradient-reduction bucket and per weight-gather bucket;
            0: the default from ``tds.gradients.choose_bucket_numel``.
        prefetches: with ZeRO 3, gather a layer's weights while the previous layer computes.

    Attributes:
        main_params: main params by parameter.
        weight_shards: with ZeRO 3, this replica's shard of each weight in the training dtype.
        zero_stage, offload, data_group, expert_group, expert_tensor_group: the arguments.
        has_copies: True if any parameter is not its own main param, so that updates must be copied into parameters.
        units: with ZeRO 3, the weights that are gathered together, after ``shard_weights``.
    """

    def __init__(
        self,
        data: Group = SINGLE,
        expert_data: Group = SINGLE,
        *,
        expert_tensor: Group | None = None,
        zero_stage: int = 0,
        offload: OffloadConfig = NO_OFFLOAD,
        param_init: ParamInit | None = None,
        reduce_bucket_size: int = 0,
        allgather_bucket_size: int = 0,
        prefetches: bool = True,
    ) -> None:
        self.data_group, self.expert_group, self.expert_tensor_group = data, expert_data, expert_tensor
        self.offload = offload
        self.main_params: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
        self.weight_shards: dict[torch.nn.Parameter, torch.Tensor] = {}
        self.has_copies = False
        self.units: ParamUnits | None = None
        self._bucket_sizes = {"reduce": reduce_bucket_size, "allgather": allgather_bucket_size}
        self.zero_stage = zero_stage
        self._shards_params = zero_stage > 0 and (data.size > 1 or offload.parameters)
        self._shards_weights = zero_stage == 3 and self._shards_params
        self._partitions: dict[torch.nn.Parameter, ParamPartition] = {}
        self._param_init = param_init if self._shards_weights else None
        self._has_full_weights = self._param_init is None
        self._prefetches = prefetches
        self._deferred_gather: ParamGather | None = None

    # Main params.

    def register(self, parameter: torch.nn.Parameter, dtype: torch.dtype) -> torch.nn.Parameter:
        """Convert ``parameter`` to ``dtype`` in place and return the main param."""
        is_wide = dtype in WIDE_DTYPES
        num_replicas = self.group_of(parameter).size
        # An expert that no other rank holds is only partitioned to be offloaded.
        is_full = is_reduced_by_optimizer(parameter) and num_replicas == 1 and not self.offload.parameters
        partition = partition_of(parameter, num_replicas) if self._shards_params and not is_full else None
        if self._param_init is not None:
            self._param_init.materialize(parameter, is_sharded=partition is not None)
        if is_wide:
            parameter.data = parameter.data.to(dtype)
        main_param = parameter
        if partition is not None or not is_wide or self.offload.optimizer:
            main_param, self.has_copies = self._make_main_param(parameter, partition, is_wide), True
        self.main_params[parameter] = main_param
        parameter.data = parameter.data.to(dtype)
        if partition is not None and self._shards_weights:
            self.weight_shards[parameter] = self._make_weight_shard(parameter, partition, is_wide)
            if self._param_init is not None:
                self._param_init.release(parameter)
        return main_param

    def _make_main_param(
        self, parameter: torch.nn.Parameter, partition: ParamPartition | None, is_wide: bool
    ) -> torch.nn.Parameter:
        """Copy ``parameter`` to a separate main param; ``is_wide``: the training dtype is fp32 or fp64."""
        position, values = shard_of(parameter), parameter.detach()
        if partition is not None:
            self._partitions[parameter] = partition
            position = partition.shard(position, self.group_of(parameter).rank)
            values = self._device_shard(parameter, partition)
        if self.offload.optimizer:
            values = self.offload.copy(values if is_wide else values.float())
        elif not is_wide:
            values = values.float().clone()
        elif self._shards_weights:
            values = values.clone(memory_format=torch.contiguous_format)
        return set_shard(torch.nn.Parameter(values), position)

    def _make_weight_shard(
        self, parameter: torch.nn.Parameter, partition: ParamPartition, is_wide: bool
    ) -> torch.Tensor:
        """Return this replica's weight shard: the main param itself if dtype and device are the same."""
        if is_wide and self.offload.parameters == self.offload.optimizer:
            return self.main_params[parameter].detach()
        shard = self._device_shard(parameter, partition)
        if self.offload.parameters:
            return self.offload.copy(shard)
        return shard.clone(memory_format=torch.contiguous_format)

    def _device_shard(self, parameter: torch.nn.Parameter, partition: ParamPartition) -> torch.Tensor:
        """Return this replica's shard on the training device."""
        shard = partition.slice(parameter.detach(), self.group_of(parameter).rank)
        return shard if self._param_init is None else shard.to(self._param_init.device)

    @contextmanager
    def contiguous_main_params(self) -> Iterator[None]:
        """Make every main param contiguous within the block, as fused optimizers require."""
        main_params = self.main_params.values() if self._shards_params else ()
        strided = [(main_param, main_param.data) for main_param in main_params if not main_param.is_contiguous()]
        for main_param, _ in strided:
            main_param.data = main_param.data.contiguous()
        try:
            yield
        finally:
            for main_param, view in strided:
                view.copy_(main_param.data)
                main_param.data = view

    @torch.no_grad()
    def scale_rows(self, parameter: torch.nn.Parameter, factors: torch.Tensor) -> None:
        """Multiply the rows of a main param by ``factors`` in place; a frozen parameter is not changed.

        The parameter changes only with the next ``copy_to_parameters``, unless it is its own main param.

        Args:
            factors: one factor for each row of ``parameter``, on the device of the main param.
        """
        main_param, partition = self.main_params.get(parameter), self._partitions.get(parameter)
        if main_param is None:
            return
        if partition is not None and partition.dim == 0:
            factors = partition.slice(factors, self.group_of(parameter).rank)
        main_param.mul_(factors.to(main_param.dtype).view(-1, *[1] * (main_param.dim() - 1)))

    def set_grads(self, grads: Sequence[torch.Tensor]) -> None:
        """Set main-param gradients in parameter order; with optimizer offload they are copied to the CPU."""
        main_params = self.main_params.values()
        if self.offload.optimizer and any(m.device != g.device for m, g in zip(main_params, grads, strict=True)):
            grads = self.offload.copies(grads)
        for main_param, grad in zip(main_params, grads, strict=True):
            main_param.grad = grad

    def clear_grads(self) -> None:
        """Discard all gradients of parameters and main params."""
        for parameter, main_param in self.main_params.items():
            parameter.grad = None
            main_param.grad = None

    # Shards.

    def group_of(self, parameter: torch.Tensor) -> Group:
        """Return the group of ranks that replicate ``parameter``."""
        return self.expert_group if is_reduced_by_optimizer(parameter) else self.data_group

    @property
    def is_sharded_over_replicas(self) -> bool:
        """True if the main params are sharded over several replicas, from ZeRO 1 on."""
        return self._shards_params and self.data_group.size > 1

    def num_shards(self, parameter: torch.Tensor) -> int:
        """Return the number of ranks over which ZeRO shards the main param of ``parameter``, registered or not.

        Without several replicas nothing is sharded, even if tensor ranks hold copies of an expert.
        """
        return self.group_of(parameter).size if self._shards_params else 1

    def is_sharded(self, parameter: torch.nn.Parameter) -> bool:
        """Return True if each replica holds only a shard of the main param."""
        return parameter in self._partitions

    def is_first_copy(self, parameter: torch.nn.Parameter) -> bool:
        """Return True if this replica's main param is a shard, or the first of equal copies."""
        return self.is_sharded(parameter) or self.group_of(parameter).rank == 0

    def partition(self, parameter: torch.nn.Parameter) -> ParamPartition | None:
        """Return the partition over the replicas; None if all have the full main param."""
        return self._partitions.get(parameter)

    def local_shard(self, parameter: torch.nn.Parameter, full: torch.Tensor) -> torch.Tensor:
        """Slice this replica's main-param elements from ``full``, contiguous.

        Args:
            full: a tensor with the shape of ``parameter``.
        """
        partition = self._partitions.get(parameter)
        return full if partition is None else partition.slice(full, self.group_of(parameter).rank).contiguous()

    def bucket_numel(self, device: torch.device, operation: str = "reduce") -> int | None:
        """Return the number of elements per bucket on ``device``; None if ``BUCKET_BYTES`` limits it.

        ZeRO 2 and 3 reduce copies of gradients, so their reduce buckets exceed ``BUCKET_BYTES`` only on request.

        Args:
            operation: "reduce" or "allgather".
        """
        requested = self._bucket_sizes[operation]
        if operation == "reduce" and self.zero_stage > 1:
            return requested or None
        return choose_bucket_numel(device, self.data_group.size, requested)

    # Weights, which are gathered from the shards of all replicas.

    def shard_weights(self, module: torch.nn.Module) -> None:
        """Hook the weights of ``module``: with ZeRO 3, keep shards and gather full weights where they are used.

        With ZeRO 1 and 2 on NCCL, each layer waits for its updated weights.
        """
        if self._deferred_gather is None:
            self._deferred_gather = self._make_deferred_gather(module)
        if self.weight_shards and self.units is None:
            self._has_full_weights = False
            weights = {
                p: ShardedWeight(p.detach(), shard, self._partitions[p]) for p, shard in self.weight_shards.items()
            }
            self.units = ParamUnits(module, weights, self.data_group, self.group_of, prefetches=self._prefetches)

    def _make_deferred_gather(self, module: torch.nn.Module) -> ParamGather | None:
        has_shards = bool(self._partitions) and not self._shards_weights and self.data_group.size > 1
        if not has_shards or not defers_gather(self.data_group):
            return None
        weights = [parameter for parameter in module.parameters() if parameter in self._partitions]
        if len(weights) != len(self._partitions):  # some belong to another module
            return None
        return ParamGather(module, [p for p in weights if not is_reduced_by_optimizer(p)], self.data_group)

    @property
    def gathers_weights(self) -> bool:
        """True under ZeRO 3: weights are gathered per module and invalid (NaN) outside its forward and backward."""
        return self.units is not None

    def persistent_storage(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """Return this rank's persistent storage for ``parameter``: its shard under ZeRO 3."""
        self.finish_gathers()
        return self.weight_shards.get(parameter, parameter)

    def full_weights(self) -> AbstractContextManager[None]:
        """Return a context in which every replica has full weights, also under ZeRO 3. Collective."""
        self.finish_gathers()
        return nullcontext() if self.units is None else self.units.gathered()

    def finish_gathers(self) -> None:
        """Wait for updated weights. Code that reads weights outside the model's forward calls this first."""
        if self._deferred_gather is not None:
            self._deferred_gather.wait()

    def check_gather_order(self) -> None:
        """Check that the replicas have gathered the same weights. Collective under ZeRO 3.

        Raises:
            ConfigError: they have not; raised on every replica.
        """
        if self.units is not None:
            self.units.check()

    def end_micro_batch(self) -> None:
        """Free gathered weights after a backward. Collective under ZeRO 3."""
        if self.units is not None:
            self.units.end_micro_batch()

    def begin_action(self, action_type: str, chunk: int) -> None:
        """Announce an action of a pipeline schedule, before which ZeRO 3 starts to gather weights. Collective."""
        if self.units is not None:
            self.units.begin_action(action_type, chunk)

    def end_action(self) -> None:
        """Free the weights that ZeRO 3 has gathered for the running action of a pipeline schedule. Collective."""
        if self.units is not None:
            self.units.end_action()

    def reading_weights(self) -> AbstractContextManager[None]:
        """Return a context for code outside of the model's forward that calls layers, such as a loss function.

        Under ZeRO 3, layers called in the context gather their weights, and backward gathers them again.
        """
        return nullcontext() if self.units is None else self.units.forward_scope()

    @torch.no_grad()
    def copy_to_parameters(self, *, deferred: bool = False) -> None:
        """Round the main params into the parameters. Collective over the replicas if main params are sharded.

        Args:
            deferred: return before the other replicas' weights have arrived, if layers wait for weights
                (``zero.param_gather``, on NCCL).
        """
        if self.units is not None:
            self.units.free()  # gathered weights are outdated
        self.finish_gathers()
        for parameter, shard in self.weight_shards.items():
            if shard.data_ptr() != self.main_params[parameter].data_ptr():
                shard.copy_(self.main_params[parameter])
        pairs = [(p, m) for p, m in self.main_params.items() if p is not m and p not in self._partitions]
        if pairs:
            # With non_blocking, offloaded values are sent first and rounded on the device. Otherwise the host would
            # round them, into memory that is not pinned.
            torch._foreach_copy_([p for p, _ in pairs], [m for _, m in pairs], non_blocking=True)
        self._gather(deferred)

    def _gather(self, deferred: bool) -> None:
        """Gather the updated shards into full parameters, except those that ZeRO 3 gathers on use."""
        weights = {
            p: ShardedWeight(p.detach(), self.main_params[p].detach(), partition)
            for p, partition in self._partitions.items()
            if self._has_full_weights or p not in self.weight_shards
        }
        if not weights:
            return
        bucket_numel = self.bucket_numel(next(iter(weights)).device, "allgather")
        experts = [weights.pop(p) for p in list(weights) if is_reduced_by_optimizer(p)]
        if experts:
            gather_all(experts, self.expert_group, bucket_numel)
        if deferred and self._deferred_gather is not None:
            self._deferred_gather.start(weights, bucket_numel)
        else:
            gather_all(weights.values(), self.data_group, bucket_numel)

    @torch.no_grad()
    def copy_from_parameters(self) -> None:
        """Copy this replica's parameter shards into the main params."""
        self.finish_gathers()
        for parameter, main_param in self.main_params.items():
            if parameter is not main_param:
                shard = self.weight_shards.get(parameter)
                main_param.copy_(self.local_shard(parameter, parameter) if shard is None else shard)
