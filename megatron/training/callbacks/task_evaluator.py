"""TaskEvaluator: evaluates lm_eval tasks on the model in its training layout (--eval-tasks)."""

from __future__ import annotations

from pathlib import Path

from megatron import log
from megatron.checkpoint.huggingface.tokenizer import vocabulary_of
from megatron.config import Config
from megatron.errors import ConfigError, DataError, StopRequest
from megatron.evaluation.all_ranks import DistributedModel
from megatron.evaluation.tasks import LoadedTasks, Results, read_suite
from megatron.generate.text import Prompts
from megatron.models.common.generation import get_model_stage
from megatron.runtime.exit_signals import resume_advice
from megatron.tokenizer.chat import ChatTemplate, find_template
from megatron.training.rank_0 import run_on_rank_0
from megatron.training.step_result import StepResult
from megatron.training.timeouts import EVALUATING
from megatron.training.trainer import Callback

RECORD_TYPE = "tasks"
"""Value of ``kind`` in the records of metrics.jsonl."""


class TaskEvaluator(Callback):
    """Evaluates the tasks in a file every ``every`` steps and at the end. Collective.

    Rank 0 reads the tasks; the other ranks run their model shards. Training is unaffected: the evaluation uses neither
    its random generators nor its batches.

    Args:
        file: path of the task file for ``read_suite``.
        every: steps between evaluations; 0: only at the end.
    """

    def __init__(self, file: str, every: int) -> None:
        self._file, self.every = Path(file), every
        self._tasks: LoadedTasks | None = None
        self._evaluated_step: int | None = None
        self._chat: ChatTemplate | None = None
        self._add_bos: bool | None = None

    def on_train_start(self) -> None:
        """Load the tasks, so that errors in them are raised before training. Collective.

        Raises:
            ConfigError: there is no tokenizer, or a task cannot be loaded; the same on every rank.
        """
        config = self.trainer.config
        vocabulary = vocabulary_of(config, None)
        if vocabulary is None:
            raise ConfigError(
                "--eval-tasks needs a tokenizer, got none. Set --tokenizer-path, or leave --eval-tasks out"
            )
        self._add_bos = None if config.logging.prompt_bos else False
        self._prompts = Prompts(vocabulary.tokenizer, None, adds_bos=self._add_bos)
        run_on_rank_0(self.trainer.world, lambda: self._open(config))

    def _open(self, config: Config) -> None:
        """Load the tasks and the chat template.

        Raises:
            ConfigError: a task cannot be loaded, or is not supported with --sequence-parallel.
        """
        try:
            suite = read_suite(self._file)
            self._tasks = LoadedTasks(suite, self.trainer.world.device_type)
            if suite.apply_chat_template:
                self._chat = find_template(self._prompts.tokenizer, config.data.chat_template)
        except DataError as error:
            raise ConfigError(str(error)) from error
        if config.parallel.sequence_parallel and (names := self._tasks.generating_tasks):
            raise ConfigError(
                "--sequence-parallel does not support tasks that generate text, because each forward pass reads only "
                f"one new token, got {', '.join(names)}. Leave them out, and evaluate the run's checkpoint with "
                "tools/evaluate.py"
            )

    def on_step_end(self, result: StepResult) -> None:
        self._evaluate()

    def on_train_end(self) -> None:
        trainer = self.trainer
        if trainer.stop_text or self._evaluated_step == trainer.progress.step or self._evaluate():
            return
        trainer.stop_text = (
            f"stopped during the evaluation of tasks; the run is saved in {trainer.folder}. "
            f"{resume_advice(trainer.folder)}"
        )

    def _evaluate(self) -> bool:
        """Evaluate the tasks and report the results; return False if a signal interrupted it. Collective.

        A task failure is logged and does not end the run.
        """
        trainer, step = self.trainer, self.trainer.progress.step
        config, world = trainer.config, trainer.world
        with trainer.phases.during(EVALUATING), trainer.engine.optimizer.store.full_weights():
            model = DistributedModel(
                get_model_stage(trainer.engine),
                self._prompts,
                data=world.grid.data,
                world=world.grid.host,
                max_length=config.batch.seq_length,
                max_tokens=config.batch.micro_batch_size * config.batch.seq_length,
                is_stopping=lambda: trainer.stop.signal_name is not None,
            )
            metrics: dict[str, dict[str, float]] | None = None
            try:
                results = model.run_from_rank_0(lambda: self._results(model))
                metrics = world.grid.host.broadcast_object(None if results is None else results.metrics)
            except StopRequest:
                return False
            except DataError as error:
                if world.rank == 0:
                    log.error(f"step {step}: TASKS NOT EVALUATED: {error}. The run continues")
        self._evaluated_step = step
        if metrics is not None:
            task_texts = " | ".join(f"{name} {headline(values)}" for name, values in metrics.items())
            trainer.print_line(f"step {step} | tasks | {task_texts}")
            trainer.call("on_evaluate_end", RECORD_TYPE, metrics)
        return True

    def _results(self, model: DistributedModel) -> Results:
        from megatron.evaluation.lm import DecoderLM

        assert self._tasks is not None
        return self._tasks.evaluate(DecoderLM(model, chat=self._chat, add_bos_token=self._add_bos))


def headline(metrics: dict[str, float]) -> str:
    """Format a task's metric for the log line: accuracy or exact match if present, otherwise the first one."""
    names = [name for name in metrics if "_stderr" not in name]
    best = next((name for name in ("acc_norm", "acc", "exact_match") if name in names), names[0] if names else "")
    return f"{best} {metrics[best]:.4f}" if best else "no metric"
