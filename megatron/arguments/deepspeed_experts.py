"""Convert the flags of Megatron-DeepSpeed's experts, which are DeepSpeed's MoE layer.

| flag of theirs | ours | default there |
|---|---|---|
| --topk K | --moe-router-topk K; for 1 also --moe-router-pre-softmax | 1 |
| --expert-interval N | --moe-layer-freq: experts in layers N - 1, 2 N - 1, ..., counted from 0 | 2 |
| --moe-loss-coeff | --moe-aux-loss-coeff | 0.1 |
| --moe-expert-parallel-size | --expert-model-parallel-size | 1 |
| --moe-train-capacity-factor | --moe-expert-capacity-factor with --moe-token-drop-policy random | 1 |
| --moe-eval-capacity-factor, --moe-min-capacity | the same names | 1, 4 |
| --disable-moe-token-dropping | --moe-expert-capacity-factor 0 | |
| --mlp-type residual | --moe-use-residual | standard |

These defaults apply if at least one of the flags is given next to --num-experts above 1.

Source: Megatron-DeepSpeed, arguments.py and model/transformer.py; DeepSpeed, moe/sharded_moe.py, ``top1gating`` and
``top2gating``.
"""

from __future__ import annotations

from typing import Any

from megatron.arguments.scan import Scan
from megatron.config.model import ModelConfig

FLAGS = (
    "--topk", "--expert-interval", "--moe-loss-coeff", "--moe-expert-parallel-size", "--moe-train-capacity-factor",
    "--disable-moe-token-dropping", "--disable-moe-top2-2nd-expert-sampling", "--mlp-type",
)  # fmt: skip
SAMPLING = "--disable-moe-top2-2nd-expert-sampling"
STANDARD, RESIDUAL = "standard", "residual"


def convert_deepspeed_experts(scanned: Scan) -> None:
    """Set the fields of DeepSpeed's experts; a dense model ignores their flags."""
    flags = {flag: scanned.converted[flag] for flag in FLAGS if flag in scanned.converted}
    if not flags:
        return
    if (scanned.values.get("num_experts") or 0) <= 1:
        scanned.ignored |= dict.fromkeys(flags, "the model has no experts")
        return
    if (mlp_type := flags.get("--mlp-type", STANDARD)) not in (STANDARD, RESIDUAL):
        scanned.problems.append(f"--mlp-type must be {STANDARD} or {RESIDUAL}, got {mlp_type!r}")
    topk, drops_tokens = flags.get("--topk", 1), "--disable-moe-token-dropping" not in flags
    if topk > 1 and drops_tokens:
        scanned.problems.append(
            f"--topk {topk} needs --disable-moe-token-dropping, because DeepSpeed weights the experts of a token that "
            "remain after dropping. Add it, or use --moe-router-topk and --moe-expert-capacity-factor"
        )
    elif topk == 2 and SAMPLING not in flags:
        scanned.problems.append(
            f"--topk 2 needs {SAMPLING}, because DeepSpeed otherwise samples the second expert. Add it, or use "
            "--moe-router-topk 2"
        )
    _set_fields(scanned, flags, topk, drops_tokens=drops_tokens)
    scanned.notes.append(
        "DeepSpeed's experts: tokens are dropped per sample instead of per micro-batch of a replica, and the "
        "load-balancing loss uses the experts' shares of the previous global batch"
    )


def _set_fields(scanned: Scan, flags: dict[str, Any], topk: int, *, drops_tokens: bool) -> None:
    interval = flags.get("--expert-interval", 2)
    num_layers = scanned.values.get("num_layers") or ModelConfig.num_layers
    pattern = ([0] * (interval - 1) + [1]) * (num_layers // interval) + [0] * (num_layers % interval)
    fields: dict[str, tuple[str, Any]] = {
        "moe_router_topk": ("--topk", topk),
        "moe_layer_freq": ("--expert-interval", str(pattern).replace(" ", "")),
        "moe_aux_loss_coeff": ("--moe-loss-coeff", 0.1),
        "expert_model_parallel_size": ("--moe-expert-parallel-size", 1),
        "moe_expert_capacity_factor": ("--moe-train-capacity-factor", 1.0 if drops_tokens else 0.0),
    }
    if topk == 1:
        fields["moe_router_pre_softmax"] = ("--topk", True)
    if flags.get("--mlp-type") == RESIDUAL:
        fields["moe_use_residual"] = ("--mlp-type", True)
    if drops_tokens:
        fields |= {
            "moe_token_drop_policy": ("--moe-train-capacity-factor", "random"),
            "moe_eval_capacity_factor": ("--moe-eval-capacity-factor", 1.0),
            "moe_min_capacity": ("--moe-min-capacity", 4),
        }
    elif "--moe-train-capacity-factor" in flags:
        scanned.ignored["--moe-train-capacity-factor"] = "--disable-moe-token-dropping keeps all tokens"
    numbers = ("--moe-loss-coeff", "--moe-expert-parallel-size", "--moe-train-capacity-factor")
    for name, (flag, value) in fields.items():
        is_given = flag in flags and not (flag == "--moe-train-capacity-factor" and not drops_tokens)
        if is_given:
            is_number = flag in numbers and name != "moe_token_drop_policy"
            scanned.set(name, flags[flag] if is_number else value, f"{flag} {flags[flag]}")
        else:
            scanned.values.setdefault(name, value)
