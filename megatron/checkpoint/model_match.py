"""Check that a checkpoint belongs to the model of this run."""

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


def check_model(saved: Mapping[str, Any], config: Config) -> None:
    """Check that weights fit the model of ``config``, as closely as its flags ask for.

    ``--resize-vocab`` takes another vocabulary, ``--finetune`` another value of what no weight's shape depends on
    (``FamilyConfig.REFITTED``). Families of the common decoder are one model where their settings are.

    Args:
        saved: ``Config.identity()`` of the model that the weights are of.

    Raises:
        CheckpointError: listing every key that differs with both values.
    """
    flags, now = config.checkpoint, config.identity()
    free: tuple[str, ...] = ("vocab_size",) if flags.resize_vocab else ()
    free += config.refitted if flags.finetune else ()
    try:
        saved = former.identity(saved)
        if is_common_decoder(saved.get("family", FIRST_FAMILY)) and is_common_decoder(config.family):
            saved, now = ({key: each[key] for key in each if key != "family"} for each in (saved, now))
        compare_model_config({**saved, **{key: now[key] for key in free if key in saved}}, now)
    except CheckpointError as error:
        fitting = [key for key in config.refitted if saved.get(key, _ABSENT) != now[key]]
        if not fitting or flags.finetune:
            raise
        raise CheckpointError(
            f"{error} The weights fit another {', '.join(fitting)} as well: --finetune starts anew from them so"
        ) from None
