"""``pretrain_gpt2.py`` with something wrong in it.

    python benchmarks/gpu/workers/planted.py nan@5 FLAGS...     # the losses of step 5 are no numbers
    python benchmarks/gpu/workers/planted.py one-gpu FLAGS...   # every rank takes the first GPU that it sees

The second is for ranks that the launcher starts.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import pretrain_gpt2
from megatron.training import get_config, pretrain

_calls = 0


def spoiled_in(step: int) -> Any:
    """Return GPT-2's forward step whose losses in this step, counted from 1, are NaN."""

    def forward_step(data_iterator: Any, model: Any) -> tuple[Any, dict[str, Any]]:
        global _calls
        (total, count), _ = pretrain_gpt2.forward_step(data_iterator, model)
        number = _calls // get_config().batch.gas + 1
        _calls += 1
        loss = (total * float("nan") if number == step else total, count)
        return loss, {"lm loss": loss}

    return forward_step


def main() -> None:
    """Train with what the first word plants."""
    what = sys.argv.pop(1)
    forward_step = pretrain_gpt2.forward_step
    if what == "one-gpu":
        os.environ["LOCAL_RANK"] = "0"
    else:
        forward_step = spoiled_in(int(what.removeprefix("nan@")))
    pretrain(pretrain_gpt2.train_valid_test_datasets_provider, pretrain_gpt2.model_provider, forward_step)


if __name__ == "__main__":
    main()
