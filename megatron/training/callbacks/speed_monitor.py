"""SpeedMonitor: tokens/s, FLOP/s, MFU, pipeline bubble, waits for data, and work and memory by stage."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from megatron import device, log
from megatron.config import Config
from megatron.costs.memory import peak_flops
from megatron.log import human_count
from megatron.models import registry
from megatron.mpu.mappings import all_reduce
from megatron.mpu.topology import Topology
from megatron.training.estimates import is_config_model, make_bubble_estimator
from megatron.training.start_table import bounds_of
from megatron.training.trainer import Callback
from megatron.training.world import World

MATMUL_SIZE = 1024
MATMUL_S = 0.3
MAX_REMEASUREMENTS = 3
"""Maximum number of times that a run remeasures the peak FLOP/s of the CPUs."""
MIB = 2**20


class RankMetrics(NamedTuple):
    """Measurements by rank.

    Args:
        waited_s: seconds waited for data since the last report.
        compute_s: seconds of compute per step.
        waited_per_step_s: seconds waited for data per step.
        memory_bytes: peak memory in bytes.
    """

    waited_s: list[float]
    compute_s: list[float]
    waited_per_step_s: list[float]
    memory_bytes: list[float]


class SpeedMonitor(Callback):
    """Logs a run's speed, and compute time and memory by stage.

    Args:
        param_counts: parameter count in the full model, then per rank of each stage.

    Attributes:
        ranks: all ranks' measurements in the last log step; the same on all ranks.
    """

    ranks: RankMetrics

    def __init__(self, param_counts: Sequence[int]) -> None:
        self.param_counts = param_counts
        self._num_remeasurements_left = 0

    def on_train_start(self) -> None:
        trainer, config = self.trainer, self.trainer.config
        self.peak_flops = peak_of_all_ranks(trainer.world, fp8_share(config, self.param_counts))
        self.rates = Rates(config, self.peak_flops, self.param_counts)
        self._num_remeasurements_left = MAX_REMEASUREMENTS if trainer.world.device_type == "cpu" else 0
        self._predict_bubble: Callable[[int], float] = make_bubble_estimator(
            config, bounds_of(config, trainer.engine.module), self.param_counts
        )
        self._last_totals = (0, Counter[int](), 0.0)

    def on_log(self, metrics: dict[str, Any]) -> None:
        trainer, topology = self.trainer, self.trainer.world.grid.topology
        bubble, self.ranks = trainer.engine.bubble(), self._gather()
        steps, samples, pause_s = self._last_totals
        self._last_totals = (trainer.steps_taken, trainer.samples_taken.copy(), trainer.pause_s)
        new_samples = self._last_totals[1] - samples
        flops = sum(count * self.rates.flops_of_sample(length) for length, count in new_samples.items())
        num_dropped = sum(count * trainer.seq_lengths.num_dropped(length) for length, count in new_samples.items())
        metrics |= self.rates.drain(
            self._last_totals[0] - steps,
            new_samples.total(),
            self._last_totals[2] - pause_s,
            max(self.ranks.waited_s),
            flops,
            num_dropped,
        )
        metrics["mfu"] = self._plausible_mfu(metrics["mfu"], metrics["flops_per_s"])
        if bubble is not None:
            metrics |= {"bubble": bubble, "bubble_predicted": self._predict_bubble(trainer.samples.num_micro_batches)}
        metrics |= {
            "work_s": by_stage(self.ranks.compute_s, topology, statistics.fmean),
            "memory_bytes": by_stage(self.ranks.memory_bytes, topology, max),
            "time": time.time(),
        }

    def _plausible_mfu(self, mfu: float | None, flops_per_s: float) -> float | None:
        """Return the MFU, or None if it is still above 1 after remeasuring the CPUs' peak FLOP/s. Collective.

        A CPU's peak is measured at the start, and the measurement is too low if other programs were busy then.
        """
        trainer = self.trainer
        if self._num_remeasurements_left and trainer.world.any_rank([_is_above_one(mfu)])[0]:
            self._num_remeasurements_left -= 1
            began = time.perf_counter()
            peak = max(peak_of_all_ranks(trainer.world) or 0.0, self.peak_flops or 0.0)
            trainer.pause_s += time.perf_counter() - began  # not part of any step
            log.info(
                f"MFU above 100 %: the peak of the CPUs was remeasured: {human_count(peak)}FLOP/s instead of "
                f"{human_count(self.peak_flops or 0.0)}FLOP/s"
            )
            self.peak_flops = self.rates.peak_flops = peak
            mfu = flops_per_s / peak
        return None if _is_above_one(mfu) else mfu

    def _gather(self) -> RankMetrics:
        """Gather all ranks' measurements since the last call. Collective.

        Shapes:
            message fp32 [4, ranks]; memory in MiB, which fp32 resolves to 8 KiB at 80 GiB
        """
        world, batches = self.trainer.world, self.trainer.batches
        total_waited_s = 0.0 if batches is None else batches.drain_waited_s()
        busy_s, num_steps = self.trainer.engine.busy()
        memory_mib = device.peak_memory_bytes(world.device_type) / MIB
        values = torch.zeros(4, world.grid.topology.world_size, dtype=torch.float32, device=world.device)
        values[:, world.rank] = torch.tensor(
            [total_waited_s, busy_s / max(num_steps, 1), total_waited_s / max(num_steps, 1), memory_mib]
        )
        waited_s, compute_s, waited_per_step_s, memory = all_reduce(values, world.grid.world).tolist()
        return RankMetrics(waited_s, compute_s, waited_per_step_s, [MIB * mib for mib in memory])


class Rates:
    """Speed since the last report: tokens/s, FLOP/s and MFU.

    The MFU does not count recomputation. It counts the causal half of attention for GPT-2 (``6 N + 6 L a d s`` FLOPs
    per token), full attention for T5, and ``6 N`` for a user's model, whose parameter count is all that is known.

    Args:
        param_counts: parameter counts from ``count_parameters``.
    """

    def __init__(self, config: Config, peak_flops: float | None, param_counts: Sequence[int]) -> None:
        self.tokens_per_sample = config.tokens_per_sample
        flops_of_user_model = 6.0 * param_counts[0] * self.tokens_per_sample
        self._config, self._is_known = config, is_config_model(config, param_counts)
        self.flops_per_sample = registry.costs_of(config).flops_per_sample if self._is_known else flops_of_user_model
        self._flops_by_length = {config.batch.seq_length: self.flops_per_sample}
        self._lengths = config.batch.seq_lengths
        self.peak_flops = peak_flops
        self._last_drain_at = time.perf_counter()
        self._first_tokens_per_s: float | None = None
        self._later_s, self._later_tokens = 0.0, 0

    def flops_of_sample(self, length: int) -> float:
        """Return the FLOPs per sample if samples are split into, or truncated to, sequences of ``length`` tokens."""
        num_sequences = self._lengths.num_sequences(length)
        if not self._is_known:
            return self.flops_per_sample * num_sequences * length / self._lengths.full
        if length not in self._flops_by_length:
            batch = self._config.batch
            flops_per_sequence = registry.costs_of(
                replace(self._config, batch=replace(batch, seq_length=length))
            ).flops_per_sample
            self._flops_by_length[length] = num_sequences * flops_per_sequence
        return self._flops_by_length[length]

    def drain(
        self, num_steps: int, num_samples: int, pause_s: float = 0.0, waited_s: float = 0.0, flops: float | None = None,
        tokens_dropped: int = 0,
    ) -> dict[str, Any]:  # fmt: skip
        """Return the rates since the last call.

        Args:
            num_steps, num_samples: steps and samples since then.
            pause_s: seconds since then that were not spent on training (evaluation, saving).
            waited_s: seconds that training waited for data.
            flops: FLOPs for these samples; None: they were read at full length.
            tokens_dropped: tokens of these samples that were truncated.
        """
        now = time.perf_counter()
        seconds = max(now - self._last_drain_at - pause_s, 1e-9)
        self._last_drain_at = now
        num_tokens = self.tokens_per_sample * num_samples - tokens_dropped
        tokens_per_s = num_tokens / seconds
        if self._first_tokens_per_s is None:
            self._first_tokens_per_s = tokens_per_s
        else:
            self._later_s, self._later_tokens = self._later_s + seconds, self._later_tokens + num_tokens
        flops = (self.flops_per_sample * num_samples if flops is None else flops) / seconds
        return {
            "step_s": seconds / max(num_steps, 1),
            "tokens_per_s": tokens_per_s,
            "flops_per_s": flops,
            "mfu": flops / self.peak_flops if self.peak_flops else None,
            "data_wait": waited_s / seconds,
        }

    def mean_tokens_per_s(self) -> float | None:
        """Return the mean speed without the first record, which includes warm-up, unless it is the only one."""
        return self._later_tokens / self._later_s if self._later_s else self._first_tokens_per_s


def _is_above_one(mfu: float | None) -> bool:
    return mfu is not None and mfu > 1


def fp8_share(config: Config, param_counts: Sequence[int]) -> float:
    """Return the share of the FLOPs in FP8; 0 for a user's model, whose products are unknown."""
    return registry.costs_of(config).fp8_share if is_config_model(config, param_counts) else 0.0


def peak_of_all_ranks(world: World, fp8_share: float = 0.0) -> float | None:
    """Return the total peak FLOP/s over all devices: from a table for GPUs, measured in fp32 on CPUs. Collective.

    Args:
        fp8_share: share of the FLOPs in FP8, which have a higher peak on GPUs.
    """
    if world.device_type != "cpu":
        peak = peak_flops(device.name(world.device_type), fp8_share)
        return peak * world.grid.topology.world_size if peak else None
    total = torch.tensor([_measure_matmul_flops()], dtype=torch.float64)
    return all_reduce(total, world.grid.world).item()


def _measure_matmul_flops() -> float:
    """Measure the FLOP/s of fp32 matrix products on this CPU."""
    a = torch.randn(MATMUL_SIZE, MATMUL_SIZE, generator=torch.Generator().manual_seed(0))
    a @ a
    start, num_products = time.perf_counter(), 0
    while time.perf_counter() - start < MATMUL_S:
        a @ a
        num_products += 1
    return 2.0 * MATMUL_SIZE**3 * num_products / (time.perf_counter() - start)


def by_stage(
    values: Sequence[float], topology: Topology, reduce: Callable[[Sequence[float]], float]
) -> dict[str, float]:
    """Apply ``reduce`` to the ranks' values by stage: "stage 0", "stage 1", ... -> result."""
    ranks = topology.groups("data", "tensor")
    return {f"stage {stage}": reduce([values[rank] for rank in stage_ranks]) for stage, stage_ranks in enumerate(ranks)}


def max_bytes_by_stage(num_bytes: float, world: World) -> dict[str, float]:
    """Return the maximum of ``num_bytes`` over the ranks of each stage. Collective."""
    values = torch.zeros(world.grid.topology.world_size, dtype=torch.float32, device=world.device)
    values[world.rank] = num_bytes / MIB
    return by_stage([MIB * mib for mib in all_reduce(values, world.grid.world).tolist()], world.grid.topology, max)
