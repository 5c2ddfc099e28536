"""ExpertFeatures: flags for feed-forward layers with experts (MoE), named as in Megatron-LM, and their checks."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from megatron.config.option import option


def _read_num_experts(text: str) -> int:
    """Read one number, or the same number for each layer with experts, as Megatron-DeepSpeed's ``--num-experts``.

    Raises:
        ValueError: the layers have different numbers. Expert parallelism and costs use one number for all.
    """
    (number,) = set(map(int, text.split()))
    return number


_option = partial(option, family_kind="decoder", elsewhere="experts are supported in decoders only; remove it")

_MAX_PATTERN_LENGTH = 10_000
AUX_LOSS, SEQ_AUX_LOSS, GLOBAL_AUX_LOSS = "aux_loss", "seq_aux_loss", "global_aux_loss"
AUX_LOSSES = (AUX_LOSS, SEQ_AUX_LOSS, GLOBAL_AUX_LOSS)
SINKHORN, NO_LOSS = "sinkhorn", "none"
SOFTMAX, SIGMOID = "softmax", "sigmoid"


@dataclass(frozen=True, kw_only=True)
class ExpertFeatures:
    """The experts of a decoder; a base of ``ModelConfig``. The fields have an effect only with ``num_experts``."""

    num_experts: int = _option(
        0,
        "number of experts E per feed-forward layer, of which --moe-router-topk process each token; 0 and 1: dense "
        "layers. A list with one number per layer with experts is accepted if all are equal",
        minimum=0,
        join=" ".join,
        read=_read_num_experts,
    )
    moe_ffn_hidden_size: int = _option(0, "size f of an expert", minimum=1, shown_default="ff-hidden-size")
    moe_layer_freq: str = _option(
        "1",
        "layers with experts: N: every N-th layer, starting with the first; or a list with 1 for a layer with "
        "experts and 0 for a dense layer, such as [0,1,1] or ([0]*1+[1]*26)",
    )
    moe_router_topk: int = _option(2, "number of experts k per token", minimum=1)
    moe_router_score_function: str = _option(
        SOFTMAX, "function that maps router logits to scores", choices=(SOFTMAX, SIGMOID)
    )
    moe_router_pre_softmax: bool = _option(
        False,
        "weight experts by the softmax over all experts, so that weights sum to less than 1, instead of the "
        "softmax over the k selected experts",
    )
    moe_router_topk_scaling_factor: float = _option(1.0, "factor for the weights of a token's experts", above=0)
    moe_router_num_groups: int = _option(
        0, "number of groups of consecutive experts; a token is routed to --moe-router-group-topk of them", minimum=0
    )
    moe_router_group_topk: int = _option(
        0,
        "number of groups per token: the groups whose best --moe-router-group-score-topk scores have the largest sums",
        minimum=0,
    )
    moe_router_enable_expert_bias: bool = _option(
        False,
        "select experts by score plus a bias, without changing their weights; after a step the bias rises for "
        "experts with fewer tokens than the mean of the global batch, and falls for the others",
    )
    moe_router_bias_update_rate: float = _option(1e-3, "change of the expert bias per step", minimum=0)
    moe_router_load_balancing_type: str = _option(
        AUX_LOSS,
        "load balancing of experts: a loss weighted by --moe-aux-loss-coeff, with an expert's fraction f of the "
        "choices in the previous global batch (aux_loss), in the token's sequence (seq_aux_loss), or in this step's "
        "micro-batches so far on all replicas (global_aux_loss); several losses are added; sinkhorn: in training, "
        "choose experts by balanced scores of the micro-batch; none",
        choices=(*AUX_LOSSES, SINKHORN, NO_LOSS),
        join=" ".join,
        is_list=True,
    )
    moe_aux_loss_coeff: float | str = _option(
        0.0,
        "weight of the load-balancing loss E x sum of f P over experts; f is the fraction of choices that "
        "--moe-router-load-balancing-type selects, P the mean probability in the global batch; one weight for each of "
        "its losses",
        minimum=0,
        join=" ".join,
        is_list=True,
    )
    moe_z_loss_coeff: float = _option(
        0.0, "weight of the router's z-loss, the mean square of the log-sum-exp of its logits", minimum=0
    )
    moe_expert_capacity_factor: float = _option(
        0.0,
        "capacity of an expert: ceil(this x s k / E) tokens of a sample with s tokens; further tokens are dropped; "
        "0: no limit",
        minimum=0,
    )
    moe_eval_capacity_factor: float = _option(
        0.0,
        "--moe-expert-capacity-factor of evaluation and generation",
        minimum=0,
        shown_default="moe-expert-capacity-factor",
    )
    moe_min_capacity: int = _option(
        0, "with --moe-expert-capacity-factor: minimum capacity of an expert, in tokens of a sample", minimum=0
    )
    moe_token_drop_policy: str = _option(
        "probs",
        "tokens that an expert with limited capacity keeps: those with the largest weights, the first ones of the "
        "sample, or random ones, the same in every layout",
        choices=("probs", "position", "random"),
    )
    moe_shared_expert_intermediate_size: int = _option(
        0, "size of the shared expert, which processes all tokens; 0: none", minimum=0
    )
    moe_shared_expert_gate: bool = _option(
        False, "multiply the output of the shared expert by a sigmoid gate, as Qwen2-MoE"
    )
    moe_use_residual: bool = _option(
        False,
        "weight the outputs of the routed experts and of the shared expert by the softmax of a linear layer, as "
        "PR-MoE; the default size of the shared expert is --moe-ffn-hidden-size",
    )
    moe_router_group_score_topk: int = _option(
        0,
        "number of a group's best scores whose sum selects the groups of a token; 1: the best score, as DeepSeek-V2",
        minimum=1,
        shown_default="moe-router-topk / moe-router-group-topk",
    )

    def __post_init__(self) -> None:
        if self.num_experts <= 1:  # a dense model ignores all expert settings
            for name in FIELD_NAMES:
                object.__setattr__(self, name, ExpertFeatures.__dataclass_fields__[name].default)
            return
        if not self.moe_ffn_hidden_size:
            object.__setattr__(self, "moe_ffn_hidden_size", getattr(self, "ff_hidden_size", 0))
        if self.moe_use_residual and not self.moe_shared_expert_intermediate_size:
            object.__setattr__(self, "moe_shared_expert_intermediate_size", self.moe_ffn_hidden_size)

    def capacity(self, num_tokens: int, *, is_training: bool) -> int:
        """Return the number of tokens that an expert keeps of a sample of ``num_tokens``."""
        factor = self.moe_expert_capacity_factor
        if not is_training and self.moe_eval_capacity_factor:
            factor = self.moe_eval_capacity_factor
        return max(int(-(-factor * num_tokens * self.moe_router_topk // self.num_experts)), self.moe_min_capacity)

    @property
    def num_group_scores(self) -> int:
        """Number of expert scores whose sum ranks a group: the highest scores in that group."""
        return self.moe_router_group_score_topk or self.moe_router_topk // max(self.moe_router_group_topk, 1)

    @property
    def balancing_types(self) -> tuple[str, ...]:
        """Types of load balancing, one or several."""
        return tuple(self.moe_router_load_balancing_type.split())

    @property
    def aux_loss_coeffs(self) -> tuple[float, ...]:
        """Weights in ``moe_aux_loss_coeff``, one for each of ``balancing_types``."""
        return tuple(map(float, str(self.moe_aux_loss_coeff).split()))

    @property
    def aux_losses(self) -> dict[str, float]:
        """Weight of each load-balancing loss by type, without those of weight 0."""
        pairs = zip(self.balancing_types, self.aux_loss_coeffs, strict=False)
        return {name: weight for name, weight in pairs if name in AUX_LOSSES and weight > 0}

    @property
    def has_aux_loss(self) -> bool:
        """True if an auxiliary loss balances the experts' load."""
        return bool(self.aux_losses)

    @property
    def has_sinkhorn(self) -> bool:
        """True if experts are chosen by sinkhorn-balanced scores in training."""
        return self.moe_router_load_balancing_type == SINKHORN


FIELD_NAMES = tuple(field.name for field in fields(ExpertFeatures))
TRAINING = (
    "moe_router_bias_update_rate", "moe_router_load_balancing_type", "moe_aux_loss_coeff", "moe_z_loss_coeff",
)  # fmt: skip
"""Fields that affect how a model is trained but not what it computes."""
ARCHITECTURE = (
    "moe_router_score_function", "moe_router_pre_softmax", "moe_router_topk_scaling_factor",
    "moe_router_enable_expert_bias", "moe_shared_expert_gate",
)  # fmt: skip
"""Fields that ``--model`` sets: the parts of the router and of the shared expert, without sizes."""
REFITTED = (
    "moe_router_topk", "moe_router_score_function", "moe_router_pre_softmax", "moe_router_topk_scaling_factor",
    "moe_router_num_groups", "moe_router_group_topk", "moe_expert_capacity_factor", "moe_token_drop_policy",
    "moe_router_group_score_topk", "moe_eval_capacity_factor", "moe_min_capacity",
)  # fmt: skip
"""Fields that may differ when weights are loaded: the weights fit, but the outputs change."""


def expert_layers(text: str, num_layers: int) -> tuple[bool, ...]:
    """Return a bool per layer: True if ``text``, a value of ``moe_layer_freq``, assigns experts to it.

    Raises:
        ValueError: ``text`` is invalid, or its list does not have one entry per layer.

    Source: Megatron-LM's ``--moe-layer-freq``: a number, or an expression of lists.
    """
    if number := period(text):
        return tuple(layer % number == 0 for layer in range(num_layers))
    return layer_pattern(text, num_layers)


def period(text: str) -> int:
    """Return N if ``text`` is a positive number N, otherwise 0."""
    return int(text) if re.fullmatch(r"\s*[1-9]\d*\s*", text) else 0


def layer_pattern(text: str, num_layers: int) -> tuple[bool, ...]:
    """Evaluate an expression of integers, lists of 0 and 1, ``+`` and ``*`` to a bool per layer.

    Raises:
        ValueError: ``text`` is invalid, or its list does not have one entry per layer.
    """
    try:
        entries = _evaluate(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, RecursionError):
        raise ValueError(text) from None
    if not isinstance(entries, list) or len(entries) != num_layers:
        raise ValueError(text)
    return tuple(bool(entry) for entry in entries)


def _evaluate(node: ast.AST) -> list[int] | int:
    if isinstance(node, ast.List):
        entries = [_evaluate(entry) for entry in node.elts]
        if all(entry in (0, 1) for entry in entries):
            return [entry for entry in entries if isinstance(entry, int)]
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Mult)):
        left, right = _evaluate(node.left), _evaluate(node.right)
        if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
            return left + right
        if isinstance(node.op, ast.Mult) and isinstance(left, list) != isinstance(right, list):
            num_repeats, pattern = (right, left) if isinstance(left, list) else (left, right)
            if (
                isinstance(num_repeats, int)
                and isinstance(pattern, list)
                and num_repeats * len(pattern) <= _MAX_PATTERN_LENGTH
            ):
                return pattern * num_repeats
    raise ValueError(ast.dump(node))


# Expert checks.


def expert_problems(config: Any) -> Iterator[str]:
    """Yield an error message for each invalid expert setting in ``config``, a decoder ``Config``."""
    model = config.model
    if not model.num_experts:
        return
    yield from _router_problems(model)
    try:
        has_experts_by_layer = expert_layers(model.moe_layer_freq, model.num_layers)
        if not any(has_experts_by_layer):
            yield (
                f"--moe-layer-freq must assign experts to at least one layer, got {model.moe_layer_freq!r}. Change "
                "it, or remove --num-experts"
            )
    except ValueError:
        yield (
            "--moe-layer-freq must be a number of at least 1, or a list with 1 or 0 for each of the "
            f"{model.num_layers} layers such as [0,1,1] or ([0]*1+[1]*2), got {model.moe_layer_freq!r}"
        )
    yield from _layout_problems(config)
    if model.moe_shared_expert_gate and not model.moe_shared_expert_intermediate_size:
        yield (
            "--moe-shared-expert-gate has no effect without a shared expert. Add "
            "--moe-shared-expert-intermediate-size, or remove it"
        )
    if model.moe_shared_expert_gate and model.moe_use_residual:
        yield (
            "--moe-shared-expert-gate and --moe-use-residual exclude each other: both weight the output of the shared "
            "expert. Remove one of them"
        )


def _router_problems(model: Any) -> Iterator[str]:
    experts, k, groups, group_topk = (
        model.num_experts, model.moe_router_topk, model.moe_router_num_groups, model.moe_router_group_topk
    )  # fmt: skip
    if k > experts:
        yield f"--moe-router-topk must not exceed --num-experts, got {k} and {experts}. Lower it"
    yield from _balancing_problems(model)
    yield from _sinkhorn_problems(model)
    is_topk = not model.has_sinkhorn
    if k == 1 and is_topk and model.moe_router_score_function == SOFTMAX and not model.moe_router_pre_softmax:
        yield (
            "--moe-router-topk 1 applies the softmax to a single expert, so its weight is always 1 and the router "
            "gets no gradient. Add --moe-router-pre-softmax"
        )
    if model.moe_router_pre_softmax and model.moe_router_score_function != SOFTMAX:
        yield "--moe-router-pre-softmax has no effect without --moe-router-score-function softmax. Remove one of them"
    if bool(groups) != bool(group_topk):
        yield (
            f"--moe-router-num-groups and --moe-router-group-topk must be set together, got {groups} and {group_topk}. "
            "Set both, or neither"
        )
    elif groups and (experts % groups or group_topk > groups or k > group_topk * (experts // groups)):
        yield (
            "--moe-router-num-groups must divide --num-experts, --moe-router-group-topk must not exceed "
            "--moe-router-num-groups, and the selected groups must have at least --moe-router-topk experts, "
            f"got {groups}, {experts}, {group_topk} and {k}"
        )
    elif groups and k % group_topk and not model.moe_router_group_score_topk:
        yield (
            f"--moe-router-group-topk must divide --moe-router-topk, got {group_topk} and {k}, because a group's score "
            "is the sum of its best --moe-router-topk / --moe-router-group-topk scores. Change one of them, or set "
            "--moe-router-group-score-topk"
        )
    elif groups and model.moe_router_group_score_topk > experts // groups:
        yield (
            "--moe-router-group-score-topk must not exceed the experts of a group, --num-experts / "
            f"--moe-router-num-groups, got {model.moe_router_group_score_topk} and {experts} / {groups}. Lower it"
        )
    if model.moe_router_group_score_topk and not groups:
        yield (
            "--moe-router-group-score-topk has no effect without --moe-router-num-groups, got "
            f"{model.moe_router_group_score_topk}. Remove it, or add --moe-router-num-groups"
        )


def _balancing_problems(model: Any) -> Iterator[str]:
    """Yield an error message if several types of load balancing do not fit each other or their weights."""
    types, weights = model.balancing_types, model.aux_loss_coeffs
    if len(types) != len(weights):
        yield (
            "--moe-aux-loss-coeff must have one weight for each type of --moe-router-load-balancing-type, got "
            f"{model.moe_aux_loss_coeff} for {model.moe_router_load_balancing_type}. Set {len(types)}"
        )
    if len(types) > 1 and (len(set(types)) < len(types) or not set(types) <= set(AUX_LOSSES)):
        yield (
            f"several types of --moe-router-load-balancing-type must be different ones of {', '.join(AUX_LOSSES)}, got "
            f"{model.moe_router_load_balancing_type}. Remove the others"
        )


def _sinkhorn_problems(model: Any) -> Iterator[str]:
    """Yield an error message for each setting of the router that sinkhorn does not support."""
    if not model.has_sinkhorn:
        return
    if any(model.aux_loss_coeffs):
        yield (
            "--moe-router-load-balancing-type sinkhorn has no load-balancing loss, got --moe-aux-loss-coeff "
            f"{model.moe_aux_loss_coeff}. Remove it, or use seq_aux_loss"
        )
    flags = [
        flag
        for flag, is_set in (
            ("--moe-router-num-groups", model.moe_router_num_groups),
            ("--moe-router-enable-expert-bias", model.moe_router_enable_expert_bias),
            ("--moe-router-topk-scaling-factor", model.moe_router_topk_scaling_factor != 1.0),
            ("--moe-router-score-function", model.moe_router_score_function != SOFTMAX),
        )
        if is_set
    ]
    if flags:
        yield (
            f"--moe-router-load-balancing-type sinkhorn does not support {', '.join(flags)}: its weights are the "
            "sigmoid (--moe-router-topk 1) or the softmax of the logits. Remove one of them"
        )


def _layout_problems(config: Any) -> Iterator[str]:
    model, parallel, t = config.model, config.parallel, config.parallel.model_parallel_size
    tensor_flag = "--model-parallel-size"
    expert_flag = "--expert-tensor-parallel-size" if parallel.has_fewer_expert_shards else tensor_flag
    for flag, size, ranks_flag, num_ranks in (
        ("--moe-ffn-hidden-size", model.moe_ffn_hidden_size, expert_flag, parallel.expert_shards),
        ("--moe-shared-expert-intermediate-size", model.moe_shared_expert_intermediate_size, tensor_flag, t),
    ):
        if size % num_ranks:
            yield f"{flag} must be a multiple of {ranks_flag}, got {size} and {num_ranks}. Change one of them"
    ep = parallel.expert_model_parallel_size
    if model.num_experts % ep:
        divisors = [n for n in range(1, model.num_experts + 1) if model.num_experts % n == 0]
        yield (
            f"--expert-model-parallel-size must divide --num-experts, got {ep} and {model.num_experts}. Use one of "
            f"{divisors}"
        )
    if ep > 1 and config.checkpoint.checkpoint_format == "deepspeed":
        yield (
            "--checkpoint-format deepspeed does not support --expert-model-parallel-size above 1. Use "
            "--checkpoint-format native"
        )
    if t % parallel.expert_shards:
        yield (
            "--expert-tensor-parallel-size must divide --model-parallel-size, got "
            f"{parallel.expert_shards} and {t}. Use one of {[n for n in range(1, t + 1) if t % n == 0]}"
        )
    elif parallel.expert_shards < t and not parallel.sequence_parallel:
        yield (
            f"--expert-tensor-parallel-size {parallel.expert_shards} with --model-parallel-size {t} needs "
            "--sequence-parallel: an expert processes the sequence shards of its tensor ranks. Add "
            "--sequence-parallel, or remove --expert-tensor-parallel-size"
        )
    if parallel.compile:
        yield "--compile supports dense layers only, got --num-experts. Remove one of them"


def expert_rank_problems(config: Any, ranks: int) -> Iterator[str]:
    """Yield an error message if the experts cannot be divided over ``ranks`` ranks on the data and context axes."""
    parallel = config.parallel
    ep, etp, t = parallel.expert_model_parallel_size, parallel.expert_shards, parallel.model_parallel_size
    num_ranks, axes = ranks * t // etp, "data x context ranks"
    if etp < t:
        axes = f"data x context x tensor / expert tensor ranks ({ranks} x {t} / {etp})"
    if config.model.num_experts and t % etp == 0 and num_ranks % ep:
        yield (
            f"--expert-model-parallel-size must divide the {axes}, got {ep} and {num_ranks}. Use one of "
            f"{[n for n in range(1, num_ranks + 1) if num_ranks % n == 0]}"
        )
