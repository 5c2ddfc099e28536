"""Does a checkpoint belong to the model of this run?"""

from __future__ import annotations

from typing import Any

from megatron.errors import CheckpointError

_ABSENT = "absent"


def compare_model_config(saved: dict[str, Any], now: dict[str, Any]) -> None:
    """Check that the model that was saved has the sizes of the model of this run.

    Raises:
        CheckpointError: listing every key that differs with both values.
    """
    keys = [*saved, *(key for key in now if key not in saved)]
    different = [key for key in keys if saved.get(key, _ABSENT) != now.get(key, _ABSENT)]
    if different:
        table = "\n".join(f"  {key}: saved {saved.get(key, _ABSENT)}, now {now.get(key, _ABSENT)}" for key in different)
        raise CheckpointError(
            f"the checkpoint is of another model, {len(different)} values differ:\n{table}\n"
            "Start with the saved values, or name another folder with --load."
        )
