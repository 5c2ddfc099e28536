"""Fake of the package wandb, which records its calls."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any


class FakeWandb:
    """Records calls; sending NaN raises OSError, and ``init`` raises RuntimeError with the text ``error``."""

    def __init__(self, error: str = "") -> None:
        self.error, self.calls = error, []  # type: ignore[var-annotated]
        self.run = SimpleNamespace(
            id="abc",
            log=self._log,
            define_metric=lambda *names, **kwargs: self.calls.append(("define", names, kwargs)),
            finish=lambda exit_code: self.calls.append(("finish", exit_code)),
        )

    def init(self, **kwargs: Any) -> Any:
        if self.error:
            raise RuntimeError(self.error)
        self.calls.append(("init", kwargs))
        return self.run

    def _log(self, values: dict[str, float]) -> None:
        if any(math.isnan(value) for value in values.values()):
            raise OSError("the network is down")
        self.calls.append(("log", values))
