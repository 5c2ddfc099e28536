"""Starting from the weights in a Hugging Face folder, in any layout."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from megatron import log
from megatron.checkpoint.hf import direct, tokens
from megatron.config import Config
from megatron.errors import CheckpointError, ConfigError, DataError, marked
from megatron.training.parts import Run
from megatron.training.resume_rules import warn_of_weights
from megatron.training.state_tensors import weight_records


def is_pretrained(source: Path) -> bool:
    """Tell whether ``source`` is a Hugging Face folder rather than one of ours."""
    return direct.is_folder(source)


def start_from(run: Run, source: Path) -> None:
    """Fill the model's weights; each rank reads the parts that it holds. Steps and samples count from 0. Collective.

    Raises:
        CheckpointError: the folder is of another model, or damaged; or the flags ask for more than weights.
    """
    flags = run.config.checkpoint
    with ExitStack() as stack:
        with marked(is_of_this_rank=False):
            if not (flags.finetune or flags.eval_only):
                raise CheckpointError(
                    f"{source} is a Hugging Face folder, which holds weights and nothing to go on with. Add --finetune"
                )
            folder = direct.opened(source, stack)
            folder.check_fits(run.config)
        folder.load(weight_records(run.engine.module, run.engine.optimizer))
    run.engine.optimizer.copy_masters_to_parameters()
    run.loaded = source
    if run.world.rank == 0:
        advice = f". The folder's own: {folder.flags}"
        warn_of_weights(folder.config.to_dict(), run.config, source, advice)
        _compare_tokenizers(run.config, source)
    log.info(f"loaded the weights of {source}, a Hugging Face folder: each rank has read its parts")


def _compare_tokenizers(config: Config, source: Path) -> None:
    """Say whether the run's tokenizer gives the ids that the weights of ``source`` were trained on, as far as seen."""
    try:
        found = tokens.difference(source, config)
    except (ConfigError, DataError) as error:
        log.info(f"whether the tokenizer is that of {source} is not checked: {error}")
        return
    if found:
        log.warning(f"the tokenizer is not that of {source}: {found}. The weights read other words")
    else:
        log.info(f"the tokenizer has the ids of that in {source}")
