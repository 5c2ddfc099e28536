"""check_declarations: parameters that are declared equal on several ranks are the same shard of the same weight."""

from __future__ import annotations

from typing import Any

import spmd_types as spmd
from spmd_types import V

from megatron.models.common.decoder import DecoderModel
from megatron.models.common.model_args import ModelArgs
from megatron.models.common.parameters import named_parameters
from megatron.mpu.shard import Shard, shard_of
from megatron.mpu.topology import Topology
from tests.types.fake_world import fake_grid, make_parallel_context
from tests.types.local_types import Mesh, Types


def check_declarations(args: ModelArgs, topology: Topology, **options: Any) -> None:
    """Compare the declared types of all parameters with their names and shards on all ranks.

    Args:
        options: fields of ``ParallelContext``.

    Raises:
        SpmdTypeError: ranks with a parameter of type R or I hold different weights or shards, or ranks with a parameter
            of type V hold the same one.
    """
    mesh = Mesh(topology)
    ranks: list[dict[str, tuple[Shard, Types]]] = []
    for rank in range(topology.world_size):
        with fake_grid(topology, rank) as grid:
            model = DecoderModel(args, make_parallel_context(grid, **options))
        ranks.append({name: (shard_of(p), mesh.of_parameter(p)) for name, p in named_parameters(model)})
    for axis_name, axis in mesh.named.items():
        stride = mesh.strides[axis]
        for rank, parameters in enumerate(ranks):
            if rank // stride % axis.size():  # not the first rank along the axis
                continue
            neighbour = ranks[rank + stride]
            for name, (shard, types) in parameters.items():
                is_equal = name in neighbour and neighbour[name][0] == shard
                if is_equal == (types[axis] is V):
                    raise spmd.SpmdTypeError(
                        f"{name} is {types[axis]!r} on axis {axis_name}, but ranks {rank} and {rank + stride} hold "
                        f"{'the same shard' if is_equal else 'different weights or shards'}"
                    )
