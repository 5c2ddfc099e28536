"""--load, --resume, --finetune: what a start takes up; from a Hugging Face folder."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from megatron import log
from megatron.checkpoint import Checkpoint
from megatron.checkpoint.huggingface import weights
from megatron.checkpoint.huggingface.tokenizer import tokenizer_difference
from megatron.config import Config
from megatron.errors import CheckpointError, ConfigError, DataError, marked
from megatron.training import deepspeed_checkpoint, deepspeed_folders
from megatron.training.checkpoint_source import is_deepspeed_folder
from megatron.training.compatibility import warn_of_weights
from megatron.training.state_records import weight_records
from megatron.training.train_state import RestoreOptions, TrainState, check_fits, open_for, restore
from megatron.training.trainer import Trainer

# Starting from the weights in a Hugging Face folder, in any layout.


def is_pretrained(source: Path) -> bool:
    """Tell whether ``source`` is a Hugging Face folder rather than one of ours."""
    return weights.is_folder(source)


def start_from(trainer: Trainer, source: Path) -> None:
    """Fill the model's weights; each rank reads the parts that it holds. Steps and samples count from 0. Collective.

    Raises:
        CheckpointError: the folder is of another model, or damaged; or the flags ask for more than weights.
    """
    flags = trainer.config.checkpoint
    with ExitStack() as stack:
        with marked(is_of_this_rank=False):
            if not (flags.finetune or flags.eval_only):
                raise CheckpointError(
                    f"{source} is a Hugging Face folder, which holds weights and nothing to go on with. Add --finetune"
                )
            folder = weights.open_pretrained(source, stack)
            folder.check_fits(trainer.config)
        folder.load(weight_records(trainer.engine.module, trainer.engine.optimizer))
    trainer.engine.optimizer.copy_masters_to_parameters()
    if trainer.world.rank == 0:
        advice = f". The folder's own: {folder.flags}"
        warn_of_weights(folder.config.to_dict(), trainer.config, source, advice)
        _compare_tokenizers(trainer.config, source)
    log.info(f"loaded the weights of {source}, a Hugging Face folder: each rank has read its parts")


def _compare_tokenizers(config: Config, source: Path) -> None:
    """Say whether the run's tokenizer gives the ids that the weights of ``source`` were trained on, as far as seen."""
    try:
        found = tokenizer_difference(source, config)
    except (ConfigError, DataError) as error:
        log.info(f"whether the tokenizer is that of {source} is not checked: {error}")
        return
    if found:
        log.warning(f"the tokenizer is not that of {source}: {found}. Token ids have another meaning")
    else:
        log.info(f"the tokenizer has the ids of that in {source}")


# The parts of going on from a checkpoint, which the checkpointer does at the start of a run.


def open_source(trainer: Trainer, source: Path) -> Checkpoint:
    """Return the checkpoint that ``source`` means, in whichever format. Collective."""
    strict = trainer.config.checkpoint.strict_load
    if is_deepspeed_folder(source):
        return deepspeed_folders.open_newest(source, trainer.world.grid.host, strict=strict)
    return open_for(source, trainer.world, strict=strict)


def restore_from(trainer: Trainer, checkpoint: Checkpoint, taken: RestoreOptions) -> TrainState:
    """Put the state of ``checkpoint``, in whichever format, into model and optimizer. Collective."""
    fingerprint = trainer.data.fingerprint if trainer.data.order is None else None
    if deepspeed_folders.is_of_this_format(checkpoint):
        with marked(is_of_this_rank=False):
            check_fits(checkpoint, trainer.config, fingerprint, taken)
        trainer.engine.use_deepspeed()
        return deepspeed_checkpoint.restore(checkpoint, trainer.engine.engine, trainer.config, trainer.world, taken)
    return restore(
        checkpoint,
        config=trainer.config,
        module=trainer.engine.module,
        optimizer=trainer.engine.optimizer,
        world=trainer.world,
        fingerprint=fingerprint,
        taken=taken,
    )
