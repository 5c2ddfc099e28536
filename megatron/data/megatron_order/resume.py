"""Resume a run in Megatron's order from a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import Any

from megatron.data.megatron_order.epochs import EpochPlan
from megatron.data.megatron_order.order import ORDER, MegatronOrder
from megatron.errors import CheckpointError


def check_megatron_resume(
    order: MegatronOrder, state: Mapping[str, Any] | str, samples_consumed: int, *, allow_change: bool = False,
    settings: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> list[str]:  # fmt: skip
    """Check that ``order`` continues a checkpoint's order, and return log lines that describe the changes.

    Args:
        state: result of ``MegatronOrder.state`` or ``BlendSchedule.state``, or only a fingerprint (old checkpoints).
        samples_consumed: samples that the saved run consumed.
        allow_change: continue at the same sample in another order, as Megatron does without a check.
        settings: see ``resumed_order``.

    Raises:
        CheckpointError: the checkpoint has another order, and ``allow_change`` is False.
    """
    saved: Mapping[str, Any] = {} if isinstance(state, str) else state
    differences = list(_describe_differences(order, saved, [*chain.from_iterable(settings.values())]))
    if not differences:
        return []
    if not allow_change:
        raise CheckpointError(
            f"the order of the samples differs from the order of the checkpoint: {'; '.join(differences)}. Samples "
            "would be repeated or lost. Restore the earlier settings and files, or add --allow-data-change to continue "
            f"at sample {samples_consumed} of the new order, as Megatron does."
        )
    return [
        *(f"data changed: {text}" for text in differences),
        f"data: continuing at sample {samples_consumed} of the new order",
    ]


def _describe_differences(order: MegatronOrder, saved: Mapping[str, Any], settings: list[str]) -> Iterator[str]:
    """Describe the differences between a checkpoint's order and ``order``."""
    if saved.get("order") != ORDER:
        if not any(text.startswith("--data-order ") for text in settings):
            yield f"--data-order was native, now {ORDER}"
        yield from settings
        return
    names = saved["corpora"]  # in list order, unlike the other entries' keys
    is_same_data = len(names) == len(order.corpora) and all(
        saved["fingerprints"][name] in (corpus.fingerprint, *corpus.other_fingerprints)
        for name, corpus in zip(names, order.corpora, strict=True)
    )
    weights, shares = [saved["weights"][name] for name in names], list(order.weights(0).values())
    if is_same_data and weights == shares:
        return
    lengths = list(_describe_lengths(order, saved))
    if settings or lengths:
        yield from [*settings, *lengths]
    elif len(weights) != len(shares):
        yield f"the corpora were {', '.join(names)}, now {', '.join(order.weights(0))}"
    elif not is_same_data:
        yield (
            "the files, the tokenizer, the sequence in the list or a setting of the samples has changed for "
            f"{', '.join(names)}"
        )
    else:
        yield f"the weights were {weights}, now {shares}"


def _describe_lengths(order: MegatronOrder, saved: Mapping[str, Any]) -> Iterator[str]:
    """Describe the corpora whose epochs have changed, with the flag that restores them."""
    changes = [
        f"{corpus.name} had {_format_plan(EpochPlan(*old))}, now {_format_plan(plan)}"
        for corpus, plan in zip(order.corpora, order.plans, strict=True)
        if (old := saved["epochs"].get(corpus.name)) is not None and EpochPlan(*old) != plan
    ]
    if changes and saved["run_samples"] != order.run_samples:
        yield (
            f"the run had {saved['run_samples']} samples, now {order.run_samples}, and Megatron's order depends on the "
            f"length of the run (--train-samples {saved['run_samples']} restores it): {', '.join(changes)}"
        )


def _format_plan(plan: EpochPlan) -> str:
    unit = "epoch" if plan.num_epochs == 1 else "epochs"
    return f"{plan.num_epochs} {unit}{', the last shuffled separately' if plan.has_separate_last else ''}"
