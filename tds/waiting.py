"""How long a rank waits for another, in every group of a pipeline: what the JSON or the default process group says.

DeepSpeed makes its groups without a timeout, so they would wait for the backend's 10 or 30 minutes.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from tds.torch_api import set_timeout

NCCL_GRACE = timedelta(seconds=2)
"""NCCL's own watchdog aborts the process without a word of ours, so it comes after the one in ``tds.watchdog``."""


def limit_groups(groups: Iterable[Any], limit: timedelta) -> None:
    """Let the operations that ``groups`` start from now on end after ``limit``; sends and receives over gloo do not."""
    for group in groups:
        grace = NCCL_GRACE if dist.get_backend(group) == "nccl" else timedelta()
        set_timeout(group, limit + grace)
