"""``global batch = micro-batch x gas x replicas``: three numbers of which two give the third."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.config.batch import BatchConfig
from megatron.config.scan import Scan

NAMES = {
    "requested_global_batch_size": "train_batch_size",
    "batch_size": "train_micro_batch_size_per_gpu",
    "gas": "gradient_accumulation_steps",
}
"""Field -> key of the JSON."""


def resolve_batch(found: Scan, stated: Mapping[str, Any], world_size: int) -> dict[str, Any]:
    """Return the accumulation steps that a stated global batch asks for; a contradiction goes to ``found.problems``.

    With a global batch and no accumulation steps these are computed; with all three, the product must agree.

    Args:
        stated: field -> value from flags, JSON and a user's defaults, in that order of strength.
    """
    total = stated.get("requested_global_batch_size")
    t, p = stated.get("model_parallel_size", 1), max(stated.get("pipe_parallel_size", 1), 1)
    if total is None or world_size % (t * p):
        return {}
    d = world_size // (t * p)
    micro = stated.get("batch_size", BatchConfig().batch_size)
    replicas = f"dp = world {world_size} / (tp {t} x pp {p})"
    if "gas" not in stated:
        if total % (micro * d):
            found.problems.append(
                f"train_batch_size must be a multiple of micro x dp, got {total} and micro {micro} x dp {d} = "
                f"{micro * d}; {replicas}. Change --batch-size or the global batch"
            )
            return {}
        return {"gas": total // (micro * d)}
    product = micro * stated["gas"] * d
    if total != product:
        found.problems.append(
            f"train_batch_size {total} != micro {micro} x gas {stated['gas']} x dp {d} = {product}; {replicas}. "
            f'Set train_batch_size to {product} or "auto", or change {_origin(found, "batch_size")} or '
            f"{_origin(found, 'gas')}"
        )
    return {}


def _origin(found: Scan, name: str) -> str:
    return found.spelling.get(name, NAMES[name])
