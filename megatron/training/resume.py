"""Going on from a checkpoint at the start of a run."""

from __future__ import annotations

from megatron import log
from megatron.errors import marked
from megatron.training import data_order
from megatron.training.parts import Run
from megatron.training.resume_rules import check_tokenizer, layout_text, warn_of_changes
from megatron.training.run_folder import Place
from megatron.training.state import CHECKPOINTS, EVERYTHING, Taken, open_for, restore


def load(run: Run, place: Place) -> None:
    """Take up what the checkpoint of ``place`` holds, as far as the flags say; a restart takes all. Collective."""
    flags, topology = run.config.checkpoint, run.world.grid.topology
    checkpoint = open_for(place.source or place.folder, run.world, strict=flags.strict_load)
    state = checkpoint.state
    taken = EVERYTHING if place.is_restart else Taken.of(flags)
    order = None
    with marked(is_of_this_rank=False):
        check_tokenizer(state, run.tokenizer, allow_change=flags.allow_vocab_change)
        if taken.data:
            run.data_loaded = data_order.Saved(state.get("data_fingerprint"), state.get("data_order"))
            order = data_order.resumed(run.data, state, allow_change=flags.allow_data_change)
    run.progress = restore(
        checkpoint,
        config=run.config,
        module=run.engine.module,
        optimizer=run.engine.optimizer,
        world=run.world,
        fingerprint=run.data.fingerprint if run.data.order is None else None,
        taken=taken,
    )
    if order is not None:
        run.data.use_order(order)
    if taken.optimizer:
        run.guard.load(state.get("guard"))
    run.loaded = checkpoint.path
    if is_same_run(run, place):
        run.saved, run.saved_step = checkpoint.path, run.progress.step
    log.info(f"loaded {checkpoint.path}: going on after step {run.progress.step}")
    if moved := layout_text(state["layout"], topology):
        anew = "; torch's generators start from --seed" if taken.generators else ""
        log.info(f"{moved}: each rank reads the slices that it needs{anew}")
    if taken.data and run.world.rank == 0:
        warn_of_changes(state, run.config, run.world.kind)
    if run.progress.step >= run.config.batch.train_iters and not flags.eval_only:
        log.info(f"all {run.config.batch.train_iters} steps are done already; raise --train-iters to go on")


def is_same_run(run: Run, place: Place) -> bool:
    """Whether the run goes on in the folder and at the step of what it has loaded."""
    flags = run.config.checkpoint
    is_here = run.loaded is not None and run.loaded.parent == run.folder / CHECKPOINTS
    return is_here and (place.is_restart or not (flags.finetune or flags.eval_only))
