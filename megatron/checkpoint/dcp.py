"""Save and load through torch.distributed.checkpoint (imported on first use, 0.6 s).

DCP gathers plans and results over the ranks and makes an error on one rank an error on all. What is on the disk is
this project's: planners and storage are its own, so nothing is ever pickled to a file or unpickled from one.
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
from megatron.checkpoint.rank_errors import summary
from megatron.errors import CheckpointError, marked
from megatron.mpu.groups import Group

warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process alone is no accident here


def save(writer: ShardWriter, planner: RecordSavePlanner, world: Group) -> Path:
    """Let every rank of ``world`` write its share; return the committed checkpoint. Collective.

    Raises:
        CheckpointError: on all ranks alike; names the ranks that failed and why.
    """
    with _failures_in_words(world):
        metadata = torch_dcp.save(
            {}, storage_writer=writer, planner=planner, process_group=world.handle, no_dist=world.handle is None
        )
    assert metadata.storage_meta is not None and metadata.storage_meta.checkpoint_id is not None  # ShardWriter.finish
    return Path(metadata.storage_meta.checkpoint_id)


def load(reader: ShardReader, planner: RecordLoadPlanner, world: Group) -> None:
    """Let every rank of ``world`` read what its planner asks for. Collective.

    Raises:
        CheckpointError: as ``save``.
    """
    with _failures_in_words(world):
        torch_dcp.load(
            {}, storage_reader=reader, planner=planner, process_group=world.handle, no_dist=world.handle is None
        )


@contextmanager
def _failures_in_words(world: Group) -> Iterator[None]:
    try:
        yield
    except CheckpointException as caught:
        own = caught.failures.get(world.rank, (None, None))[0]
        if own is not None and not isinstance(own, Exception):
            raise own from caught  # Ctrl-C and the like end this rank as they would anywhere
        with marked(is_of_this_rank=False):  # DCP tells the failures of all ranks to each
            raise CheckpointError(summary(caught.failures, world.size)) from caught
