"""The parts of one run, which the loop and its helpers share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from megatron.config import Config
from megatron.optim import LRScheduler
from megatron.training.compile import CompileMeter
from megatron.training.console import TrainingConsole
from megatron.training.data import RunData, Saved, TimedBatches
from megatron.training.exit_signals import StopRequests
from megatron.training.initialize import World
from megatron.training.metrics import LayerNorms, MetricsWriter, StragglerDetector
from megatron.training.report import Rates
from megatron.training.stability_guard import EventLog, StabilityGuard
from megatron.training.timeouts import Sections
from megatron.training.train_state import Saves, TrainState
from megatron.training.train_step import StepEngine


@dataclass
class Run:
    """All parts of one run on this rank. ``screen``, ``metrics``, ``rates``, ``predicted_bubble``
    and ``journal`` are on rank 0 only.

    ``tokenizer`` is the identity of the run's, where it names one. ``loaded`` is the checkpoint that the run started
    from, ``origin`` the same where everything was taken from it. ``evaluated`` has the last loss of each split.
    ``bytes_before`` is the memory that was held before the model was made.
    """

    config: Config
    world: World
    engine: StepEngine
    data: RunData
    learning_rate: LRScheduler
    folder: Path
    stop: StopRequests
    bytes_before: int = 0
    progress: TrainState = field(default_factory=TrainState)
    loaded: Path | None = None
    origin: Path | None = None
    saved: Path | None = None
    saved_step: int = -1
    last_loss: float | None = None
    evaluated: dict[str, float] = field(default_factory=dict)
    screen: TrainingConsole | None = None
    metrics: MetricsWriter | None = None
    rates: Rates | None = None
    predicted_bubble: Callable[[int], float] | None = None
    layer_norms: LayerNorms | None = None
    pause_s: float = 0.0
    batches: TimedBatches | None = None
    data_loaded: Saved = Saved()
    tokenizer: str | None = None
    saves: Saves = field(default_factory=Saves)
    phases: Sections = field(default_factory=Sections)
    guard: StabilityGuard = field(init=False)
    journal: EventLog | None = None
    suspect: StragglerDetector = field(default_factory=StragglerDetector)
    compiling: CompileMeter = field(init=False)

    def __post_init__(self) -> None:
        self.compiling = CompileMeter(self.config.parallel.compile)
        self.guard = StabilityGuard(self.config.stability)

    def is_log_step(self, step: int) -> bool:
        """Whether the numbers of ``step`` are told: once per log interval, and those of the first step and the last."""
        return step % self.config.run.log_interval == 0 or step in (1, self.config.batch.train_iters)
