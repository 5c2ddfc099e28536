"""Save and load through torch.distributed.checkpoint (DCP). Importing it takes 0.6 s, so this module is imported late.

DCP gathers plans and results from all ranks and raises one rank's error on all ranks. The planners and the storage
classes are this project's own and never pickle to a file or unpickle from one.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint.api import CheckpointException

from megatron.checkpoint.dcp_load import RecordLoadPlanner, ShardReader
from megatron.checkpoint.dcp_save import RecordSavePlanner, ShardWriter
from megatron.checkpoint.rank_errors import summarize_failures
from megatron.errors import CheckpointError, marked
from megatron.mpu.groups import Group

warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # saving in a single process is intended


def save(writer: ShardWriter, planner: RecordSavePlanner, world: Group) -> Path:
    """Write the shards of all ranks in ``world``; return the path of the committed checkpoint. Collective.

    Raises:
        CheckpointError: names the ranks that failed and the causes; raised on all ranks.
    """
    with _convert_failures(world):
        metadata = torch_dcp.save(
            {}, storage_writer=writer, planner=planner, process_group=world.handle, no_dist=world.handle is None
        )
    assert metadata.storage_meta is not None and metadata.storage_meta.checkpoint_id is not None  # set by ShardWriter
    return Path(metadata.storage_meta.checkpoint_id)


def load(reader: ShardReader, planner: RecordLoadPlanner, world: Group) -> None:
    """Read the tensors that each rank's planner requests. Collective.

    Raises:
        CheckpointError: as ``save``.
    """
    with _convert_failures(world):
        torch_dcp.load(
            {}, storage_reader=reader, planner=planner, process_group=world.handle, no_dist=world.handle is None
        )


@contextmanager
def _convert_failures(world: Group) -> Iterator[None]:
    try:
        yield
    except CheckpointException as error:
        local_error = error.failures.get(world.rank, (None, None))[0]
        if local_error is not None and not isinstance(local_error, Exception):
            raise local_error from error  # KeyboardInterrupt and the like end this rank as usual
        with marked(is_of_this_rank=False):  # DCP sends the failures of all ranks to every rank
            raise CheckpointError(summarize_failures(error.failures, world.size)) from error
