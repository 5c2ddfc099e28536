"""build_optimizer: the parameter groups of a model, and the optimizer over them.

| name | implementation | state of a matrix [m, n] |
|---|---|---|
| adamw | ``torch.optim.AdamW``; ``megatron.optim.adam`` if states are in bf16 or 8 bits | two moments, [m, n] each |
| adafactor | ``torch.optim.Adafactor`` | mean squares of its rows [m, 1] and of its columns [1, n] |
| muon | ``megatron.optim.muon`` for matrices of layers, otherwise as adamw | a momentum [m, n] |
| sgd | ``torch.optim.SGD`` | with momentum ``momentum_buffer`` [m, n], otherwise none |

In step n Adafactor changes a weight by ``min(lr, 1 / sqrt(n)) max(1e-3, RMS(weight))`` times an update whose RMS is
clipped at 1. The mean squares decay with ``1 - n^-0.8``. This is the recipe of T5 without the relative step size: the
learning rate is ``--lr`` with any schedule, rather than always ``1 / sqrt(n)``. T5 was trained without weight
decay and without clipping of the global norm, and with an lr that never exceeds ``1 / sqrt(n)`` (``LRScheduler``,
inverse-square-root). With a larger lr, torch's bound ``1 / sqrt(n)`` takes effect.

Source: Shazeer and Stern 2018, "Adafactor", algorithms 4 and 5; Raffel et al. 2020, section 3.1.2.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from megatron.errors import ConfigError
from megatron.mpu.groups import SINGLE, Group
from megatron.mpu.matrices import matrices_of
from megatron.mpu.shard import shard_of
from megatron.optim.adam import AdamW
from megatron.optim.grad_scaler import GradScaler
from megatron.optim.matrix_owners import MatrixPartition
from megatron.optim.muon import Muon, MuonArgs, MuonWeight
from megatron.optim.offload import NO_OFFLOAD, OffloadConfig
from megatron.optim.optimizer import MixedPrecisionOptimizer
from megatron.optim.param_rates import ParamRate
from megatron.optim.param_store import ParamStore
from megatron.optim.zero.param_init import ParamInit
from tds.gradients import is_reduced_by_optimizer

OPTIMIZERS = ("adamw", "adafactor", "muon", "sgd")
MATRIX_EPS, VECTOR_EPS, MIN_WEIGHT_RMS = 2e-19, 1e-8, 1e-3
"""Adafactor's lower bounds: RMS of a matrix's gradient, RMS of a vector's gradient, RMS of a weight.

For a matrix torch also uses ``MATRIX_EPS`` as a lower bound of the mean *square*. torch's default, 1e-7 in fp32, takes
effect for gradients below 3e-4, which are common, and the running means then have no effect. ``MATRIX_EPS`` takes
effect below 4e-10. It is about the smallest number whose square fp32 can represent, so that a row without a gradient is
not divided by 0. For a vector, the bound works like Adam's epsilon: the gradient of the bias of attention's keys
consists only of rounding errors, and without the bound they would cause updates of full size.
"""


def decay_groups(
    parameters: Iterable[torch.nn.Parameter],
    weight_decay: float,
    decayed_vectors: Collection[torch.nn.Parameter] = (),
) -> list[dict[str, Any]]:
    """Return three groups: matrices and ``decayed_vectors`` with weight decay; other biases and norms without.

    Biases and norms have one dimension. ``set_weight_decay`` changes the decay of groups with
    ``"has_default_decay": True``. Empty groups are left out.

    The rule depends only on the parameter, so that the groups are the same in every layout.
    """
    trainable = [parameter for parameter in dict.fromkeys(parameters) if parameter.requires_grad]
    decayed = set(decayed_vectors)
    vectors = [p for p in trainable if p.dim() < 2]
    groups = [
        {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": weight_decay, "has_default_decay": True},
        {"params": [p for p in vectors if p in decayed], "weight_decay": weight_decay, "has_default_decay": True},
        {"params": [p for p in vectors if p not in decayed], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def muon_groups(groups: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Split ``groups`` into layer matrices, with ``"is_muon": True``, and other parameters."""
    split_groups = []
    for group in groups:
        for is_muon in (True, False):
            params = [p for p in group["params"] if (p.dim() == 2 and matrices_of(p) is not None) == is_muon]
            split_groups += [{**group, "params": params, "is_muon": is_muon}] if params else []
    return split_groups


def split_by_rate(
    groups: Iterable[dict[str, Any]], rates: Mapping[torch.nn.Parameter, ParamRate]
) -> list[dict[str, Any]]:
    """Split ``groups`` by the settings in ``rates``, in parameter order."""
    split_groups = []
    for group in groups:
        params_by_rate: dict[ParamRate | None, list[torch.nn.Parameter]] = {}
        for parameter in group["params"]:
            params_by_rate.setdefault(rates.get(parameter), []).append(parameter)
        for rate, params in params_by_rate.items():
            split_groups.append({**group, **({} if rate is None else rate.settings()), "params": params})
    return split_groups


def build_optimizer(
    parameters: Iterable[torch.nn.Parameter],
    *,
    name: str = "adamw",
    lr: float = 1e-3,
    weight_decay: float = 0.0,
    decayed_vectors: Collection[torch.nn.Parameter] = (),
    betas: tuple[float, float] = (0.9, 0.999),
    epsilon: float = 1e-8,
    momentum: float = 0.0,
    dtype: torch.dtype = torch.float32,
    clip_grad: float = 0.0,
    scaler: GradScaler | None = None,
    model: Group = SINGLE,
    tensor: Group = SINGLE,
    data: Group = SINGLE,
    expert_data: Group = SINGLE,
    expert_tensor: Group | None = None,
    zero_stage: int = 0,
    overlap_grad_reduce: bool = False,
    has_pipeline: bool = False,
    offload: OffloadConfig = NO_OFFLOAD,
    adam: Callable[..., torch.optim.Optimizer] | None = None,
    param_init: ParamInit | None = None,
    reduce_bucket_size: int = 0,
    allgather_bucket_size: int = 0,
    prefetches: bool = True,
    fuses_accumulation: bool = False,
    muon: MuonArgs | None = None,
    rates: Mapping[torch.nn.Parameter, ParamRate] | None = None,
    bf16_states: Sequence[str] = (),
    quantized_states: Sequence[str] = (),
) -> MixedPrecisionOptimizer:
    """Build the optimizer ``name``. For arguments not listed see ``MixedPrecisionOptimizer`` and ``ParamStore``.

    Args:
        decayed_vectors: parameters with one dimension that have weight decay, see ``decay_groups``.
        betas, epsilon: settings of AdamW, also for weights that Muon does not update; other optimizers ignore them.
        momentum: momentum of SGD.
        adam: used instead of ``torch.optim.AdamW``, with the same arguments; None: torch's.
        muon: settings of Muon.
        rates: settings of individual parameters that differ from the defaults.
        bf16_states: states that AdamW stores in bf16: ``exp_avg``, ``exp_avg_sq`` or both.
        quantized_states: states that AdamW stores in 8 bits.

    Raises:
        ValueError: there is no optimizer of that name, or Adafactor is used with several tensor ranks.
        ConfigError: Adafactor is used with padded rows or with ZeRO.
    """
    if name not in OPTIMIZERS:
        raise ValueError(f"--optimizer must be {', '.join(OPTIMIZERS[:-1])} or {OPTIMIZERS[-1]}, got {name}")
    parameters = list(parameters)
    if name == "adafactor":
        _check_unpadded(parameters)
        if zero_stage:
            raise ConfigError(
                f"--optimizer adafactor requires --zero-stage 0, got {zero_stage}: its means are over full matrices, "
                "which ZeRO shards. Use --zero-stage 0 (Adafactor's states are small) or --optimizer adamw"
            )
    if name == "adafactor" and tensor.size > 1:
        raise ValueError(
            f"--optimizer adafactor requires --model-parallel-size 1, got {tensor.size}: its means over rows and "
            "columns need full matrices. Use --optimizer adamw, or --pipe-parallel-size instead."
        )

    def build(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        if name == "sgd":
            return torch.optim.SGD(groups, lr=lr, momentum=momentum)
        if name == "adafactor":
            return torch.optim.Adafactor([_with_eps(group) for group in groups], lr=lr)
        if name == "muon":
            device = param_init.device if param_init is not None else next((p.device for p in parameters), None)
            return Muon(
                groups,
                build_adam,
                weights,
                args,
                lr=lr,
                tensor=tensor,
                data=data,
                expert_data=expert_data,
                expert_tensor=expert_tensor,
                device=device,
            )
        return build_adam(groups)

    def build_adam(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        if bf16_states or quantized_states:
            state_dtypes = dict.fromkeys(bf16_states, torch.bfloat16)
            adam_args: dict[str, Any] = {"lr": lr, "betas": betas, "eps": epsilon}
            return AdamW(groups, **adam_args, state_dtypes=state_dtypes, quantized=quantized_states)
        if adam is not None:
            return adam(groups, lr=lr, betas=betas, eps=epsilon)
        return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=epsilon, fused=True)

    args = muon or MuonArgs()
    groups = decay_groups(parameters, weight_decay, decayed_vectors)
    groups = split_by_rate(groups, rates) if rates else groups
    weights: list[MuonWeight] = []
    if name == "muon":
        groups = muon_groups(groups)
    store = ParamStore(
        data,
        expert_data,
        expert_tensor=expert_tensor,
        zero_stage=zero_stage,
        offload=offload,
        param_init=param_init,
        reduce_bucket_size=reduce_bucket_size,
        allgather_bucket_size=allgather_bucket_size,
        prefetches=prefetches,
    )
    if name == "muon":
        muon_params = [parameter for group in groups if group["is_muon"] for parameter in group["params"]]
        weights = [_muon_weight(parameter, tensor, store, args) for parameter in muon_params]
    return MixedPrecisionOptimizer(
        groups,
        build,
        dtype=dtype,
        clip_grad=clip_grad,
        scaler=scaler,
        model=model,
        tensor=tensor,
        store=store,
        overlap_grad_reduce=overlap_grad_reduce,
        has_pipeline=has_pipeline,
        fuses_accumulation=fuses_accumulation,
    )


def _muon_weight(parameter: torch.nn.Parameter, tensor: Group, store: ParamStore, args: MuonArgs) -> MuonWeight:
    matrices = matrices_of(parameter)
    assert matrices is not None
    is_expert = is_reduced_by_optimizer(parameter)
    tensor_group = tensor if store.expert_tensor_group is None or not is_expert else store.expert_tensor_group
    partition = MatrixPartition.of(parameter, tensor_group, store.num_shards(parameter))
    return MuonWeight(partition, args.matrices(matrices), is_expert)


def _check_unpadded(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Raise ConfigError if a weight has padded rows, which the RMS and the means over columns would include."""
    for parameter in parameters:
        rows = shard_of(parameter).unpadded(parameter).shape[:1]
        if rows != parameter.shape[:1]:
            raise ConfigError(
                "--optimizer adafactor does not support padded rows, which its means over all rows would include, got "
                f"{parameter.shape[0]} rows of which {rows[0]} are real. Omit --make-vocab-size-divisible-by"
            )


def _with_eps(group: dict[str, Any]) -> dict[str, Any]:
    """Copy a parameter group, which has only matrices or only vectors, and set Adafactor's lower bounds ``eps``."""
    is_matrix_group = group["params"][0].dim() >= 2
    return {**group, "eps": (MATRIX_EPS if is_matrix_group else VECTOR_EPS, MIN_WEIGHT_RMS)}
