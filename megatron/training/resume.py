"""--load, --resume, --finetune: what a start takes up; from a Hugging Face folder."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from megatron import log
from megatron.checkpoint import Checkpoint
from megatron.checkpoint.folders import last_sequence
from megatron.checkpoint.huggingface import weights
from megatron.checkpoint.huggingface.config import tokenizer_difference
from megatron.config import Config
from megatron.errors import CheckpointError, ConfigError, DataError, marked
from megatron.training import data, deepspeed_checkpoint
from megatron.training.compatibility import check_tokenizer, layout_text, warn_of_changes, warn_of_weights
from megatron.training.run import Run
from megatron.training.run_folder import Place, is_deepspeed_folder, saved_in, saves_in
from megatron.training.train_state import (
    EVERYTHING,
    CheckpointLineage,
    RestoreOptions,
    TrainState,
    check_fits,
    open_for,
    restore,
    weight_records,
)

# Starting from the weights in a Hugging Face folder, in any layout.


def is_pretrained(source: Path) -> bool:
    """Tell whether ``source`` is a Hugging Face folder rather than one of ours."""
    return weights.is_folder(source)


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
            folder = weights.open_pretrained(source, stack)
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
        found = tokenizer_difference(source, config)
    except (ConfigError, DataError) as error:
        log.info(f"whether the tokenizer is that of {source} is not checked: {error}")
        return
    if found:
        log.warning(f"the tokenizer is not that of {source}: {found}. The weights read other words")
    else:
        log.info(f"the tokenizer has the ids of that in {source}")


# Going on from a checkpoint at the start of a run.


def load(run: Run, place: Place) -> None:
    """Take up what the checkpoint of ``place`` holds, as far as the flags say; a restart takes all. Collective."""
    flags, topology = run.config.checkpoint, run.world.grid.topology
    if place.source is not None and is_pretrained(place.source):
        start_from(run, place.source)
        return
    checkpoint = _open(run, place.source or place.folder)
    state = checkpoint.state
    taken = EVERYTHING if place.is_restart else RestoreOptions.of(flags)
    order = None
    with marked(is_of_this_rank=False):
        check_tokenizer(state, run.tokenizer, allow_change=flags.allow_vocab_change)
        if taken.data:
            run.data_loaded = data.Saved(state.get("data_fingerprint"), state.get("data_order"))
            order = data.resumed(run.data, state, allow_change=flags.allow_data_change)
    run.progress = _restored(run, checkpoint, taken)
    if order is not None:
        run.data.use_order(order)
    if taken.optimizer:
        run.guard.load(state.get("guard"))
    run.loaded = checkpoint.path
    run.origin = checkpoint.path if taken == EVERYTHING else None
    if is_same_run(run, place):
        run.saved, run.saved_step = checkpoint.path, run.progress.step
        run.saves.branch = CheckpointLineage.of(state)
        if run.world.rank == 0:
            run.saves.branch.go_on_from(checkpoint.sequence, last_sequence(saved_in(run.folder)))
    log.info(f"loaded {checkpoint.path}: going on after step {run.progress.step}")
    if moved := layout_text(state["layout"], topology):
        anew = "; torch's generators start from --seed" if taken.generators else ""
        log.info(f"{moved}: each rank reads the slices that it needs{anew}")
    if run.world.rank == 0:
        if taken.data:
            warn_of_changes(state, run.config, run.world.kind)
        else:
            warn_of_weights(state.get("config", {}), run.config, checkpoint.path)
    if run.progress.step >= run.config.batch.train_iters and not flags.eval_only:
        log.info(f"all {run.config.batch.train_iters} steps are done already; raise --train-iters to go on")


def is_same_run(run: Run, place: Place) -> bool:
    """Whether the run goes on in the folder and at the step of what it has loaded."""
    flags = run.config.checkpoint
    is_here = run.loaded is not None and run.loaded.parent == saves_in(run.folder, flags)
    return is_here and (place.is_restart or not (flags.finetune or flags.eval_only))


def _open(run: Run, source: Path) -> Checkpoint:
    strict = run.config.checkpoint.strict_load
    if is_deepspeed_folder(source):
        return deepspeed_checkpoint.open_newest(source, run.world.grid.host, strict=strict)
    return open_for(source, run.world, strict=strict)


def _restored(run: Run, checkpoint: Checkpoint, taken: RestoreOptions) -> TrainState:
    """Put the state of ``checkpoint``, in whichever format, into model and optimizer. Collective."""
    fingerprint = run.data.fingerprint if run.data.order is None else None
    if deepspeed_checkpoint.is_of_this_format(checkpoint):
        with marked(is_of_this_rank=False):
            check_fits(checkpoint, run.config, fingerprint, taken)
        return deepspeed_checkpoint.restore(checkpoint, run.engine.engine, run.config, run.world, taken)
    return restore(
        checkpoint,
        config=run.config,
        module=run.engine.module,
        optimizer=run.engine.optimizer,
        world=run.world,
        fingerprint=fingerprint,
        taken=taken,
    )
