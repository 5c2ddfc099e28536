"""Check that a checkpoint belongs to this run's model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megatron.checkpoint import former
from megatron.config import Config
from megatron.config.config import FIRST_FAMILY
from megatron.errors import CheckpointError
from megatron.models.registry import is_common_decoder

if TYPE_CHECKING:
    pass


_ABSENT = "absent"


def compare_model_config(saved: dict[str, Any], current: dict[str, Any]) -> None:
    """Check that the saved model has the same settings as this run's model.

    Raises:
        CheckpointError: lists every key that differs, with both values.
    """
    keys = [*saved, *(key for key in current if key not in saved)]
    differing_keys = [key for key in keys if saved.get(key, _ABSENT) != current.get(key, _ABSENT)]
    if differing_keys:
        table = "\n".join(
            f"  {key}: saved {saved.get(key, _ABSENT)}, now {current.get(key, _ABSENT)}" for key in differing_keys
        )
        raise CheckpointError(
            f"the checkpoint contains another model, {len(differing_keys)} values differ:\n{table}\n"
            "Use the saved values, or choose another checkpoint with --load."
        )


def check_model(saved: Mapping[str, Any], config: Config) -> None:
    """Check that saved weights fit the model in ``config``.

    ``--resize-vocab`` allows another vocabulary size. ``--finetune`` allows other values for settings without
    effect on the weights' shapes (``Config.refitted``). Common decoder families are interchangeable if their
    settings are equal.

    Args:
        saved: ``Config.identity()`` saved with the weights.

    Raises:
        CheckpointError: lists every key that differs, with both values.
    """
    flags, current = config.checkpoint, config.identity()
    ignored_keys: tuple[str, ...] = ("vocab_size",) if flags.resize_vocab else ()
    ignored_keys += config.refitted if flags.finetune else ()
    try:
        saved = former.convert_identity(saved)
        if is_common_decoder(saved.get("family", FIRST_FAMILY)) and is_common_decoder(config.family):
            saved, current = (
                {key: settings[key] for key in settings if key != "family"} for settings in (saved, current)
            )
        compare_model_config({**saved, **{key: current[key] for key in ignored_keys if key in saved}}, current)
    except CheckpointError as error:
        refittable = [key for key in config.refitted if saved.get(key, _ABSENT) != current[key]]
        if not refittable or flags.finetune:
            raise
        raise CheckpointError(
            f"{error} The weights also fit other values of {', '.join(refittable)}: add --finetune to start a new run"
        ) from None
