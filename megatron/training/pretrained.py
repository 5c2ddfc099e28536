"""Start from a Hugging Face folder's weights, in any layout."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from megatron import log
from megatron.checkpoint.huggingface import weights
from megatron.checkpoint.huggingface.tokenizer import tokenizer_difference
from megatron.config import Config
from megatron.errors import CheckpointError, ConfigError, DataError, marked
from megatron.training.compatibility import warn_of_weights
from megatron.training.state_records import weight_records
from megatron.training.trainer import Trainer


def is_pretrained(source: Path) -> bool:
    """Return True if ``source`` is a Hugging Face folder rather than a checkpoint of this project."""
    return weights.is_huggingface_folder(source)


def load_pretrained(trainer: Trainer, source: Path) -> None:
    """Load the weights; each rank reads only local shards. Counters start at 0. Collective.

    Raises:
        CheckpointError: the folder is damaged or has another model, or the flags request more than weights.
    """
    flags = trainer.config.checkpoint
    with ExitStack() as stack:
        with marked(is_of_this_rank=False):
            if not (flags.finetune or flags.eval_only):
                raise CheckpointError(
                    f"{source} is a Hugging Face folder, which contains only weights: a run cannot resume from it. "
                    "Add --finetune"
                )
            folder = weights.open_pretrained(source, stack)
            folder.check_fits(trainer.config)
        folder.load(weight_records(trainer.engine.module, trainer.engine.optimizer))
    trainer.engine.optimizer.copy_main_params_to_parameters()
    if trainer.world.rank == 0:
        advice = f". The folder's settings: {folder.flags}"
        warn_of_weights(folder.config.to_dict(), trainer.config, source, advice)
        _compare_tokenizers(trainer.config, source)
    log.info(f"loaded the weights of {source}, a Hugging Face folder: each rank has read its shards")


def _compare_tokenizers(config: Config, source: Path) -> None:
    """Log whether the run's tokenizer has the token ids that the weights in ``source`` were trained with."""
    try:
        difference = tokenizer_difference(source, config)
    except (ConfigError, DataError) as error:
        log.info(f"cannot compare the tokenizer with that of {source}: {error}")
        return
    if difference:
        log.warning(f"the tokenizer differs from that of {source}: {difference}. Token ids have another meaning")
    else:
        log.info(f"the tokenizer has the same ids as that of {source}")
