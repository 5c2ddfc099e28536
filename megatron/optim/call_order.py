"""ZeRO 3: replicas must call the same layers in the same order, or one would take the parts of another layer.

Each replica says by a number of its own what it gathers next, ahead of it. On a CPU all look at the numbers at once. On
a device they do when the next one is sent and when a step begins, so that the host need not wait for the device: what
was gathered meanwhile may be of several layers, and is used for no update.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megatron import device
from megatron.errors import ConfigError
from megatron.mpu.groups import Group
from megatron.torch_compat import all_gather_single

END = -1
"""In the place of a number: this replica's micro-batch is through."""


class CallOrder:
    """What this replica gathers, held against the others.

    Args:
        names: of what is gathered, by its number.
        place: where the group sends from.
        looks_later: None: as it suits ``place``.
    """

    def __init__(
        self, group: Group, names: Sequence[str], place: torch.device, *, looks_later: bool | None = None
    ) -> None:
        self._group, self._names, self._place = group, names, place
        self._looks_later = place.type != "cpu" if looks_later is None else looks_later
        self._seen: torch.Tensor | None = None  # by replica, what it has said last
        self._is_seen: Any = None  # an event, behind the copy

    def gathers(self, number: int) -> None:
        """Tell the others that this replica gathers ``names[number]`` next. Collective.

        Raises:
            ConfigError: another gathers something else; the same on every replica.
        """
        self._say(number)

    def end(self) -> None:
        """Tell the others that this replica gathers no more. Collective.

        Raises:
            ConfigError: another goes on; the same on every replica.
        """
        self._say(END)

    def check(self) -> None:
        """Look at what all have said last.

        Raises:
            ConfigError: it is not the same.
        """
        if self._seen is None:
            return
        if self._is_seen is not None:
            self._is_seen.synchronize()
        said, self._seen = self._seen.tolist(), None
        if len(set(said)) > 1:
            told = ", ".join(f"replica {replica} {self._text(number)}" for replica, number in enumerate(said[:8]))
            more = f" and {len(said) - 8} others" if len(said) > 8 else ""
            raise ConfigError(
                "under --zero-stage 3 replicas must call the same layers in the same order, for each holds a part of "
                f"every weight, got replicas that call other layers: {told}{more}. The weights are as before this "
                "step. Let all replicas take the same way through the model, or use --zero-stage 2"
            )

    def _say(self, number: int) -> None:
        if self._group.size == 1:
            return
        self.check()
        mine = torch.full((1,), number, dtype=torch.int64, device=self._place)
        every = mine.new_empty(self._group.size)
        all_gather_single(every, mine, group=self._group.handle)
        if not self._looks_later:
            self._seen = every
            self.check()
            return
        self._seen = device.host_memory(tuple(every.shape), every.dtype, self._place)
        self._seen.copy_(every, non_blocking=True)
        self._is_seen = device.mark(self._place)

    def _text(self, number: int) -> str:
        return "is through with its micro-batch" if number == END else f"calls {self._names[number]}"
