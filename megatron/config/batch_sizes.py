"""``global batch = micro-batch x gas x replicas``: three numbers of which two give the third."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.config.batch import BatchConfig
from megatron.config.scan import Scan

TOTAL = "requested_global_batch_size"
JSON_KEYS = {
    TOTAL: "train_batch_size",
    "batch_size": "train_micro_batch_size_per_gpu",
    "gas": "gradient_accumulation_steps",
}
"""Field -> key of the JSON."""


def resolve_batch(found: Scan, firm: Mapping[str, Any], soft: Mapping[str, Any], world_size: int) -> dict[str, Any]:
    """Return the sizes that follow from a global batch; a contradiction goes to ``found.problems``.

    With all three stated the product must agree. A size that is only a default follows the others: gas follows the
    micro-batch, the micro-batch follows gas, and with neither stated the micro-batch is the largest that fits and is
    not above its default. A global batch that is only a default steps back when gas is stated.

    Args:
        firm: field -> value from flags and JSON.
        soft: field -> value from defaults.
    """
    both = {**soft, **firm}
    total, t, p = both.get(TOTAL), both.get("model_parallel_size", 1), max(both.get("pipe_parallel_size", 1), 1)
    if not total or world_size % (t * p):
        return {}
    if TOTAL not in firm and "gas" in firm:
        return {TOTAL: 0}
    d = world_size // (t * p)
    replicas = f"dp = world {world_size} / (tp {t} x pp {p})"
    micro, gas = firm.get("batch_size"), firm.get("gas")
    if micro and gas:
        if total != micro * gas * d:
            found.problems.append(_disagreement(found, total, micro, gas, d, replicas))
        return {}
    known = [("micro", micro)] if micro else [("gas", gas)] if gas else []
    product = (micro or gas or 1) * d
    if total % product:
        names = " x ".join([*(name for name, _ in known), "dp"])
        terms = " x ".join(f"{name} {size}" for name, size in [*known, ("dp", d)])
        cure = _origin(found, "batch_size" if micro else "gas") + " or the global batch" if known else "it"
        found.problems.append(
            f"train_batch_size must be a multiple of {names}, got {total} and {terms} = {product}; {replicas}. "
            f"Change {cure}"
        )
        return {}
    if known:
        return {"gas" if micro else "batch_size": total // product}
    samples, most = total // d, soft.get("batch_size", BatchConfig().batch_size)
    size = max(size for size in range(1, min(most, samples) + 1) if samples % size == 0)
    usual = (most, soft.get("gas", BatchConfig().gas))
    if (size, samples // size) != usual:
        found.notes.append(
            f"a global batch of {total} on {d} replica{'' if d == 1 else 's'} is --batch-size {size} x --gas "
            f"{samples // size}, in place of {usual[0]} x {usual[1]}; give one of the two to choose"
        )
    return {"batch_size": size, "gas": samples // size}


def _disagreement(found: Scan, total: int, micro: int, gas: int, d: int, replicas: str) -> str:
    product = micro * gas * d
    return (
        f"train_batch_size {total} != micro {micro} x gas {gas} x dp {d} = {product}; {replicas}. "
        f'Set train_batch_size to {product} or "auto", or change {_origin(found, "batch_size")} or '
        f"{_origin(found, 'gas')}"
    )


def _origin(found: Scan, name: str) -> str:
    return found.spelling.get(name, JSON_KEYS[name])
