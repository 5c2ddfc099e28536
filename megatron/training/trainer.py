"""Trainer: the training loop. Callback: hooks called around each step; implementations are in ``callbacks``."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

from megatron import log
from megatron.config import Config
from megatron.errors import ConfigError, NumericsError, StopRequest
from megatron.optim.lr_scheduler import set_learning_rates
from megatron.optim.param_rates import RateTable
from megatron.optim.weight_decay import set_weight_decay
from megatron.runtime.exit_signals import REGROUP_REASON, StopRequests
from megatron.runtime.launcher_files import forwarded_signal
from megatron.training.batch_iterators import TimedBatches
from megatron.training.data import RunData
from megatron.training.data_progress import epoch_metrics, token_metrics
from megatron.training.optimizer_setup import SchedulePositions, make_lr_scheduler, make_weight_decay_schedule
from megatron.training.step_engine import StepEngine
from megatron.training.step_result import StepResult
from megatron.training.step_samples import StepSamples
from megatron.training.timeouts import OPENING_DATA, STEP, RunPhases
from megatron.training.train_progress import TrainProgress
from megatron.training.world import World

OTHER_RANK_REASON = "another rank was asked to stop"


class Callback:
    """Hooks called around training steps. Subclasses override the ones they need.

    | hook | is called |
    |---|---|
    | ``on_train_start()`` | once, before the first step; a checkpoint has been loaded |
    | ``on_load_end(step)`` | after a rollback to the checkpoint of step ``step`` |
    | ``on_step_start()`` | before the forward pass of a step |
    | ``on_before_update(loss)`` | before the optimizer step; the gradients of all micro-batches have been reduced |
    | ``on_after_update(result)`` | after the update was applied or skipped; the step has been counted |
    | ``on_log(metrics)`` | in logged steps; adds values to ``metrics`` or writes them |
    | ``on_step_end(result)`` | at the end of a step, before all ranks agree on stopping and saving |
    | ``on_save()`` | when any rank has called ``request_save`` |
    | ``on_evaluate_end(split, values)`` | after the evaluation of a split; for --eval-tasks, ``split`` is "tasks" |
    | ``on_save_staged(step, values)`` | with --async-save, after the tensors have been copied to host memory |
    | ``on_save_end(step, path, values)`` | once per save: when it is committed, or with ``path`` None when it failed |
    | ``on_export_end(step, path)`` | on rank 0, when the Hugging Face folder ``path`` has been written |
    | ``on_train_end()`` | after the last step, or after the step at which the run stops early |
    | ``on_exception(error)`` | when an error ends the run on this rank |
    | ``find_nonfinite(error)`` | when a non-finite value ends a step; returns its location, if known |

    Hooks are called in the order of the list of callbacks, which is the same on all ranks, so they may call
    collectives. The exceptions are ``on_save_end``, ``on_export_end``, ``on_exception`` and ``find_nonfinite``: ranks
    call them at different times.

    Attributes:
        every: call the step hooks (``on_step_start`` to ``on_step_end``, without ``on_log``) every N steps; 0: never.
        on_all_ranks: if False, the callback runs on rank 0 only and must not call collectives.
        trainer: the trainer that calls the hooks; set before ``on_train_start``.
    """

    every = 1
    on_all_ranks = True
    trainer: Trainer

    @property
    def name(self) -> str:
        """Key of the callback's state in checkpoints."""
        return type(self).__name__

    def on_train_start(self) -> None: ...

    def on_load_end(self, step: int) -> None: ...

    def on_step_start(self) -> None: ...

    def on_before_update(self, loss: float) -> None: ...

    def on_after_update(self, result: StepResult) -> None: ...

    def on_log(self, metrics: dict[str, Any]) -> None: ...

    def on_step_end(self, result: StepResult) -> None: ...

    def on_save(self) -> None: ...

    def on_evaluate_end(self, split: str, values: dict[str, Any]) -> None: ...

    def on_save_staged(self, step: int, values: dict[str, Any]) -> None: ...

    def on_save_end(self, step: int, path: Path | None, values: dict[str, Any]) -> None: ...

    def on_export_end(self, step: int, path: Path) -> None: ...

    def on_train_end(self) -> None: ...

    def on_exception(self, error: BaseException) -> None: ...

    def find_nonfinite(self, error: NumericsError) -> str | None:
        """Return the location of the value on this rank, "" if it is on another rank, or None if unknown."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return the callback's checkpoint state: JSON-serializable values, the same on every rank."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore ``state``. Not called if the checkpoint has no state for this callback."""


STEP_HOOKS = ("on_step_start", "on_before_update", "on_after_update", "on_step_end")
HOOKS = ("find_nonfinite", *(name for name in vars(Callback) if name.startswith("on_") and name != "on_all_ranks"))
CallbackT = TypeVar("CallbackT", bound=Callback)


class Trainer:
    """The training loop: runs training steps and calls the callbacks. Runs on every rank; its methods are collective.

    Attributes:
        batch_sizes: global batch size schedule in samples, as a function of samples consumed.
        skipped_steps: steps of --iterations-to-skip.
        seq_lengths: sequence length schedule or curriculum.
        progress: step, update and sample counters.
        run_length: run limits.
        samples, seq_length: samples and sequence length in the current or last step.
        learning_rate, last_loss: learning rate and loss in that step; None before the first one.
        stop_text: reason why the run ends early, once all ranks have agreed to stop; otherwise "".
        print_line: prints a line to the console on rank 0.
        resumed_step: checkpoint step from which this start continues the folder's run; None for a new run.
        steps_taken: steps since the start. Steps repeated after a rollback count again.
        samples_taken: sequence length -> samples in these steps.
        pause_s: seconds since the start that were not spent on training (evaluation, saving).
    """

    def __init__(
        self,
        config: Config,
        world: World,
        engine: StepEngine,
        data: RunData,
        folder: Path,
        callbacks: Sequence[Callback] = (),
        *,
        stop: StopRequests | None = None,
        phases: RunPhases | None = None,
    ) -> None:
        self.config, self.world, self.engine, self.data, self.folder = config, world, engine, data, folder
        self.stop, self.phases = stop or StopRequests(), phases or RunPhases()
        self.lr_scheduler = make_lr_scheduler(config)
        self.schedule_positions = SchedulePositions(config, self.lr_scheduler, world.grid.data.size)
        self.weight_decay_schedule = make_weight_decay_schedule(config, world.grid.data.size)
        self.run_length = config.run_length(world.grid.data.size)
        self.batch_sizes, self.seq_lengths = config.batch.batch_sizes(world.grid.data.size), config.batch.seq_lengths
        self.skipped_steps = config.batch.skipped_steps
        self.progress = TrainProgress()
        self.batches: TimedBatches | None = None
        self.samples = StepSamples(0, 0, 0, config.batch.batch_size, world.grid.data.size)
        self.seq_length = self.seq_lengths.full
        self.rates = RateTable.of(config).rates
        self.learning_rate: float | None = None
        self._lr_position = self._weight_decay_position = 0.0
        self.last_loss: float | None = None
        self.stop_text = ""
        self.print_line: Callable[[str], None] = lambda line: None
        self.resumed_step: int | None = None
        self.steps_taken, self.samples_taken, self.pause_s = 0, Counter[int](), 0.0
        self._is_save_requested = False
        self.callbacks = [cb for cb in callbacks if cb.on_all_ranks or world.rank == 0]
        for callback in self.callbacks:
            callback.trainer = self
        names = [cb.name for cb in self.callbacks if type(cb).state_dict is not Callback.state_dict]
        if repeated := [name for name, count in Counter(names).items() if count > 1]:
            raise ConfigError(
                "callbacks with a state must have different names, which identify the states in checkpoints; got "
                f"several called {', '.join(repeated)}. Rename the class, or override its property name"
            )
        self._callbacks_by_hook = {hook: [cb for cb in self.callbacks if _overrides(cb, hook)] for hook in HOOKS}
        if self._callbacks_by_hook["on_before_update"]:
            self._check_loss = engine.on_loss  # ``_before_update`` calls the engine's check after the hooks
            engine.on_loss = self._before_update

    def fit(self) -> None:
        """Run the remaining training steps, between ``on_train_start`` and ``on_train_end``.

        Raises:
            StopRequest: a signal or limit ended the run early; the run is saved and can be resumed.
            NumericsError: a loss or gradient is not finite, too many steps were anomalous, or replicas of a weight
                differ.
        """
        try:
            self.call("on_train_start")
            if not self.config.checkpoint.eval_only:
                self.train()
            self.call("on_train_end")
        except BaseException as error:
            self._call_on_exception(error)
            raise
        self.world.barrier()  # keeps all ranks alive while rank 0 uploads metrics and draws plots
        if self.stop_text:
            raise StopRequest(self.stop_text)

    def train(self) -> None:
        """Take steps until a limit of the run is reached, or until any rank is asked to stop."""
        with self.phases.during(STEP):
            while self.has_steps_left:
                if self.is_next_step_skipped:
                    self.skip_step()
                    continue
                with self.open_batches():  # reopened after each rollback and after skipped steps
                    while self.has_steps_left and not self.is_next_step_skipped and self.end_step(self.train_step()):
                        pass

    @property
    def has_steps_left(self) -> bool:
        """True if no limit is reached and the ranks have not agreed to stop."""
        return self.steps_left > 0 and not self.stop_text

    @property
    def steps_left(self) -> int:
        """Steps until the run reaches a limit."""
        progress = self.progress
        return self.run_length.steps_left(progress.step, progress.samples_consumed, progress.tokens_dropped)

    @property
    def last_step(self) -> int:
        """The run's last step number, given the samples consumed so far."""
        return self.progress.step + self.steps_left

    @property
    def is_next_step_skipped(self) -> bool:
        """True if --iterations-to-skip names the next step."""
        return self.progress.step + 1 in self.skipped_steps

    def skip_step(self) -> None:
        """Advance the run by one step without reading its samples. No callback is called, as in Megatron-LM."""
        first_sample = self.progress.samples_consumed
        num_samples, length = self.batch_sizes.at(first_sample), self._next_train_length
        self.progress.end_step(num_samples, num_samples * self.seq_lengths.num_dropped(length), is_updated=False)

    def open_batches(self) -> AbstractContextManager[Any]:
        """Open this rank's training data at the next sample; leaving the context closes the readers."""
        with self.phases.during(OPENING_DATA):
            progress = self.progress
            self.batches = self.data.batches(
                "train", self.config, self.world, progress.samples_consumed, steps_taken=progress.step
            )
        return self.batches or nullcontext()

    def train_step(self) -> StepResult:
        """Take one step: forward and backward for all micro-batches, gradient reduction, update; log if due."""
        progress, first_sample = self.progress, self.progress.samples_consumed
        num_samples = self.batch_sizes.at(first_sample)
        self.seq_length = self._next_train_length
        batch_dims = self.config.batch.batch_size, self.world.grid.data.size, self.config.data.has_megatron_order
        self.samples = StepSamples(progress.step + 1, first_sample, num_samples, *batch_dims)
        self._weight_decay_position = self.schedule_positions.of_weight_decay(progress, num_samples)
        self._lr_position = self.schedule_positions.of_rate(progress, num_samples, self.seq_length)
        self.learning_rate = set_learning_rates(self.engine.optimizer, self.lr_scheduler, self._lr_position)
        if self.weight_decay_schedule is not None:
            set_weight_decay(self.engine.optimizer, self.weight_decay_schedule.after(self._weight_decay_position))
        self.call("on_step_start")
        try:
            result = self.engine.train_step(self.batches, progress.step, self.samples.share(self.world.grid.data.rank))
        except NumericsError as error:
            raise self._with_location(error) from error
        tokens_dropped = num_samples * self.seq_lengths.num_dropped(self.seq_length)
        progress.end_step(num_samples, tokens_dropped, is_updated=not result.is_skipped)
        self.steps_taken += 1
        self.samples_taken[self.seq_length] += num_samples
        self.call("on_after_update", result)
        self.last_loss = result.loss
        if self.is_log_step:
            self.log(result)
        return result

    @property
    def num_sequences_per_sample(self) -> int:
        """Number of sequences of ``seq_length`` tokens per sample in this step."""
        return self.seq_lengths.num_sequences(self.seq_length)

    @property
    def _next_train_length(self) -> int:
        """Sequence length of the next step."""
        return self.seq_lengths.length_of_step(self.progress.samples_consumed, self.progress.step)

    @property
    def eval_seq_length(self) -> int:
        """Sequence length of an evaluation: that of the next step, or the full length with a curriculum."""
        return self.seq_lengths.full if self.seq_lengths.truncates else self._next_train_length

    @property
    def is_log_step(self) -> bool:
        """True in steps whose metrics are logged: every --log-interval steps, and the first and last step."""
        run, step = self.config.run, self.samples.step
        is_multiple = run.log_interval > 0 and step % run.log_interval == 0
        return is_multiple or step in (1, self.last_step)

    def log(self, result: StepResult) -> None:
        """Collect a step's metrics and call ``on_log``. docs/monitoring.md has the units and formulas."""
        consumed, per_sample = self.progress.samples_consumed, self.config.tokens_per_sample
        decay = self.weight_decay_schedule
        self.call(
            "on_log",
            {
                "loss": result.loss,
                "perplexity": perplexity(result.loss),
                **{name: value for name, value in result.losses.items() if name not in ("loss", "lm loss")},
                "learning_rate": self.learning_rate,
                **({"lr": self._rates_by_label()} if self.rates else {}),
                **({} if decay is None else {"weight_decay": decay.after(self._weight_decay_position)}),
                "grad_norm": result.grad_norm,
                "loss_scale": result.loss_scale,
                "samples": consumed,
                "tokens": self.progress.tokens_trained(per_sample),
                **({"seq_length": self.seq_length} if self.seq_lengths.is_changing else {}),
                **token_metrics(self.data, consumed, per_sample),
                **epoch_metrics(self.data, consumed),
                "skipped": self.progress.num_skipped_steps,
            },
        )

    def _rates_by_label(self) -> dict[str, float]:
        """Return learning rates other than --lr, by label; the same in every layout."""
        schedule = self.lr_scheduler
        return {rate.label: schedule.with_rates(rate.lr, rate.min_lr).after(self._lr_position) for rate in self.rates}

    def end_step(self, result: StepResult) -> bool:
        """Finish a step: call ``on_step_end`` and save if needed; return False if the run has rolled back."""
        start = time.perf_counter()
        for callback in self.due("on_step_end"):
            callback.on_step_end(result)
            if self.progress.step < self.samples.step:
                return False  # rolled back: the step will be repeated
        self.pause_s += time.perf_counter() - start
        reason, should_save = self.agree()
        self.phases.step_done()
        if reason and self.has_steps_left:
            self.stop_text = reason
        if should_save:
            start = time.perf_counter()
            self.call("on_save")
            self.pause_s += time.perf_counter() - start
        return True

    def agree(self) -> tuple[str, bool]:
        """Agree on stopping and saving after this step. Collective.

        Returns:
            The reason to stop or to regroup ("" to continue), and True if any rank has requested a checkpoint.
        """
        reason = self.stop.stop_reason(self.progress.step)
        should_stop, should_save, should_regroup = self.world.any_rank(
            [reason is not None, self._is_save_requested, self.stop.is_node_waiting()]
        )
        self._is_save_requested = False
        if not should_stop:
            return (REGROUP_REASON if should_save and should_regroup else ""), should_save
        # Another rank may have received the launcher's signal before this rank.
        forwarded = forwarded_signal() if reason is None else None
        return reason or (f"received {forwarded}" if forwarded else OTHER_RANK_REASON), should_save

    def request_save(self) -> None:
        """Request a checkpoint at the end of this step. Any rank may call this."""
        self._is_save_requested = True

    @property
    def is_save_requested(self) -> bool:
        """True if this rank has requested a checkpoint in this step."""
        return self._is_save_requested

    def _with_location(self, error: NumericsError) -> NumericsError:
        """Copy ``error`` with the step, its samples and the value's location on this rank."""
        location = next(
            (
                location_text
                for callback in self.due("find_nonfinite")
                if (location_text := callback.find_nonfinite(error)) is not None
            ),
            "",
        )
        message = f"step {self.samples.step} ({self.samples.text}): {error}"
        located_error = NumericsError(f"{message} On this rank, {location}." if location else message)
        located_error.is_of_this_rank = bool(location)
        return located_error

    def _before_update(self, loss: float) -> None:
        """Call all ``on_before_update`` hooks, then the engine's loss check."""
        self.call("on_before_update", loss)
        self._check_loss(loss)

    # Calls of the callbacks.

    def due(self, hook: str) -> list[Callback]:
        """Return the callbacks that override ``hook``; for step hooks, only those whose ``every`` divides the step."""
        overriding = self._callbacks_by_hook[hook]
        if hook not in STEP_HOOKS:
            return overriding
        return [callback for callback in overriding if callback.every and self.samples.step % callback.every == 0]

    def call(self, hook: str, *args: Any) -> None:
        """Call ``hook`` on every callback that is due."""
        for callback in self.due(hook):
            getattr(callback, hook)(*args)

    def find(self, callback_type: type[CallbackT]) -> CallbackT | None:
        """Return the ``callback_type`` callback, or None if this rank has none."""
        return next((callback for callback in self.callbacks if isinstance(callback, callback_type)), None)

    def state_dict(self) -> dict[str, Any]:
        """Return non-empty callback states, by name."""
        return {callback.name: state for callback in self.callbacks if (state := callback.state_dict())}

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """Restore the callbacks that have a state in ``states``."""
        for callback in self.callbacks:
            if callback.name in states:
                callback.load_state_dict(states[callback.name])

    def _call_on_exception(self, error: BaseException) -> None:
        """Call ``on_exception`` on each callback; an exception in one callback does not affect the others."""
        for callback in self.due("on_exception"):
            try:
                callback.on_exception(error)
            except Exception as hook_error:
                log.warning(f"{callback.name}.on_exception failed ({type(hook_error).__name__}: {hook_error})")


def _overrides(callback: Callback, hook: str) -> bool:
    return getattr(type(callback), hook) is not getattr(Callback, hook)


def perplexity(loss: float) -> float:
    """Return exp(loss), or infinity if that overflows."""
    return math.exp(loss) if loss < 700 else math.inf
