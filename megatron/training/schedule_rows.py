"""Start-table rows on the run length: learning-rate phases, tokens and epochs. No torch."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator

from megatron import object_store
from megatron.config import Config
from megatron.config.data_paths import parse_paths
from megatron.config.skipped_steps import SkippedSteps

_HEADER = struct.Struct("<9sQB")
_TOKEN_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 8: 2}
"""Token type code in an ``.idx`` file -> bytes per token; the format is in ``megatron.data.index_format``."""


def schedule_rows(config: Config, replicas: int) -> Iterator[tuple[str, str]]:
    """Yield the learning-rate phases in steps, and the run's tokens."""
    steps = config.batch.train_iters
    if config.checkpoint.eval_only or not steps:
        return
    yield "learning rate", schedule_text(config, replicas)
    if skipped := config.batch.skipped_steps:
        yield "skipped steps", skipped_steps_text(skipped, steps)
    batch_sizes, lengths = config.batch.batch_sizes(replicas), config.batch.seq_lengths
    samples = batch_sizes.consumed_after(steps)
    consumed = samples * config.tokens_per_sample
    if not lengths.truncates:
        yield "tokens", f"{consumed:,} in {steps:,} steps ({samples:,} samples)"
        return
    trained = lengths.tokens_after(steps, batch_sizes)
    yield (
        "tokens",
        f"{trained:,} in {steps:,} steps ({samples:,} samples); the curriculum drops {consumed - trained:,} of "
        f"{consumed:,} ({(consumed - trained) / consumed:.1%})",
    )


def skipped_steps_text(skipped: SkippedSteps, steps: int) -> str:
    """Describe the steps that --iterations-to-skip skips, such as "5, 101-200: 101 of 1,000 steps"."""
    texts = [f"{part[0]:,}-{part[-1]:,}" if len(part) > 1 else f"{part[0]:,}" for part in skipped.ranges]
    return f"{', '.join(texts)}: {skipped.num_steps:,} of {steps:,} steps consume their samples without an update"


def schedule_text(config: Config, replicas: int) -> str:
    """Format the schedule, such as "wsd, 0.001 to 0, in steps: warm-up 10, stable 70, decay 20"."""
    settings, steps = config.optimizer, config.batch.train_iters
    batch_sizes, style = config.batch.batch_sizes(replicas), settings.lr_decay_style
    lengths = config.batch.seq_lengths
    is_in_samples = settings.lr_decay_samples is not None

    def to_steps(length: float) -> float:
        if settings.lr_trained_tokens != "none" and lengths.truncates:
            return lengths.steps_until(round(length * lengths.full), batch_sizes)
        return batch_sizes.steps_until(length) if is_in_samples else length

    total_length = settings.lr_decay_samples if settings.lr_decay_samples is not None else settings.lr_decay_iters
    warmup = settings.warmup_length
    warmup_end, decay_end = to_steps(warmup), to_steps(total_length)
    phases: list[tuple[str, float, float]] = [("warm-up", 0, warmup_end)]
    if style == "wsd":
        decay = settings.lr_wsd_decay_samples if is_in_samples else settings.lr_wsd_decay_iters
        decay = settings.wsd_decay_fraction * (total_length - warmup) if decay is None else decay
        decay_start = to_steps(max(total_length - decay, warmup))
        phases += [("stable", warmup_end, decay_start), ("decay", decay_start, decay_end)]
    elif style == "constant":
        phases.append(("constant", warmup_end, steps))
    elif style == "inverse-square-root":
        phases.append(("decay", warmup_end, steps))
    else:
        phases.append(("decay", warmup_end, decay_end))
    if style not in ("constant", "inverse-square-root"):
        phases.append((f"at {settings.min_lr:g}", decay_end, steps))
    phase_texts = []
    for name, first, last in phases:
        length = min(last, steps) - first
        truncation = f" of {last - first:g}" if last > steps and length > 0 else ""
        if length > 0:
            phase_texts.append(f"{name} {length:g}{truncation}")
    floor_text = "" if style == "constant" else f" to {settings.min_lr:g}"
    return f"{style}, {settings.lr:g}{floor_text}, in steps: {', '.join(phase_texts)}"


def count_tokens(prefix: str) -> int | None:
    """Count the tokens in a token file from the ``.idx`` header and ``.bin`` size; None if unknown."""
    if object_store.is_remote(prefix):
        return None
    try:
        with open(f"{prefix}.idx", "rb") as file:
            _, _, code = _HEADER.unpack(file.read(_HEADER.size))
        return os.path.getsize(f"{prefix}.bin") // _TOKEN_BYTES[code]
    except (OSError, struct.error, KeyError):
        return None


def epoch_rows(config: Config, replicas: int) -> Iterator[tuple[str, str]]:
    """Yield the row on epochs by corpus, if they follow from token file sizes."""
    data, steps = config.data, config.batch.train_iters
    has_known_epochs = data.sft is None and data.mixture_schedule is None and not data.flag_of_cpm_set
    if (
        not has_known_epochs
        or data.is_mock
        or data.is_script_data
        or data.training_path is None
        or config.checkpoint.eval_only
    ):
        return
    train_share = data.split_shares[0]
    corpora = parse_paths(data.training_path)
    total_weight = sum(weight for weight, _ in corpora)
    tokens_read = config.batch.batch_sizes(replicas).consumed_after(steps) * config.family_config.text_length(
        config.batch
    )
    texts = []
    for weight, prefix in corpora:
        num_tokens = count_tokens(prefix)
        if not num_tokens or not total_weight or not train_share:
            return
        name = f"{prefix} " if len(corpora) > 1 else ""
        epochs = tokens_read * weight / total_weight / float(num_tokens * train_share)
        texts.append(f"{name}{epochs:{',.0f' if epochs >= 1000 else '.3g'}}")
    if steps:
        yield "epochs", f"about {', '.join(texts)}"
