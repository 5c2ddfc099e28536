"""OptimizerConfig and PrecisionConfig."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron.config.newton_schulz import COEFFICIENTS
from megatron.config.option import option

# Number tables by parameter name: name pattern -> number.


def parse_table(text: str) -> dict[str, float]:
    """Parse "PATTERN=NUMBER", with commas between several entries, into pattern -> number.

    Raises:
        ValueError: an entry is malformed, a number is negative or not finite, or a pattern is repeated.
    """
    table: dict[str, float] = {}
    for word in text.split(","):
        pattern, equals, value_text = (token.strip() for token in word.rpartition("="))
        if not (pattern and equals) or pattern in table or not 0 <= (value := float(value_text)) < math.inf:
            raise ValueError(word)
        table[pattern] = value
    return table


# The optimizer and the learning-rate schedule.


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Learning-rate schedule, weight decay, betas and clipping of the global gradient norm."""

    optimizer: str = option(
        "adamw",
        "optimizer; muon updates the matrices of layers by orthogonalised momentum and all other parameters by "
        "AdamW; adaptive_muon also divides these updates by a second moment (AdaMuon, NorMuon); adafactor stores "
        "second moments per row and column and no first moment",
        choices=("adamw", "muon", "adaptive_muon", "adafactor", "sgd"),
        synonyms={"adam": "adamw", "AdamW": "adamw", "Adam": "adamw", "dist_muon": "muon", "Muon": "muon"},
    )
    lr: float = option(5e-4, "peak learning rate", above=0, short="peak learning rate")
    min_lr: float = option(
        0.0, "learning rate at the end of the decay", minimum=0, short="learning rate at the end of the decay"
    )
    lr_decay_style: str = option(
        "cosine",
        "learning-rate schedule after W warm-up steps; inverse-square-root: lr sqrt(W / step), at least --min-lr "
        "and without an end: --lr-decay-iters then only determines W",
        choices=("constant", "linear", "cosine", "exponential", "wsd", "inverse-square-root"),
        synonyms={"WSD": "wsd"},
        short="cosine, linear, wsd, ...",
    )
    lr_decay_iters: int = option(
        0,
        "steps until --min-lr, including the warm-up; with inverse-square-root it only determines the warm-up",
        minimum=1,
        shown_default="train-iters",
    )
    warmup: float = option(
        0.01,
        "warm-up as a fraction of --lr-decay-iters",
        minimum=0,
        maximum=1,
        aliases=("--lr-warmup-fraction",),
        short="warm-up fraction",
    )
    lr_decay_samples: float | None = option(
        None,
        "samples until --min-lr, instead of steps; the learning rate then follows the consumed samples, of which "
        "steps of a batch ramp-up have fewer",
        above=0,
        shown_default="set by --lr-decay-iters; with --train-samples, the samples of the run",
    )
    lr_warmup_rounding: str = option(
        "none",
        "rounding of --warmup times --lr-decay-iters: none: 3.2 steps stay 3.2 steps, as in Megatron-LM; down: 3 steps",
        choices=("none", "down"),
    )
    train_tokens_lr_unit: str = option(
        "samples",
        "unit of the learning-rate schedule if --train-tokens is the only length: samples, so that the decay ends "
        "with the tokens for any global batch, or steps",
        choices=("samples", "steps"),
    )
    lr_trained_tokens: str = option(
        "none",
        "with --seq-length-curriculum: the parts of the learning-rate schedule that count the tokens left after "
        "truncation instead of samples: none, decay (after a warm-up in samples) or all; set by --lr-decay-tokens",
        choices=("none", "decay", "all"),
    )
    lr_warmup_iters: int | None = option(
        None, "warm-up steps, instead of a fraction", minimum=0, shown_default="set by --warmup"
    )
    lr_warmup_samples: float | None = option(
        None, "warm-up samples, instead of a fraction", minimum=0, shown_default="set by --warmup"
    )
    lr_warmup_init: float = option(0.0, "learning rate at the start of the warm-up", minimum=0)
    lr_step_offset: int = option(
        0,
        "offset of the learning-rate schedule, 0 or -1: with 0, a step has the rate of the position after it, so that "
        "the first step has a rate above 0; with -1, that of the position before it, as in Megatron-LM",
        minimum=-1,
        maximum=0,
        shown_default="0; in a run that continues a checkpoint of Megatron-LM -1, which its checkpoints keep",
    )
    lr_wsd_decay_iters: int | None = option(
        None,
        "with --lr-decay-style wsd: number of decay steps at the end",
        minimum=1,
        shown_default="set by --wsd-decay-fraction",
    )
    lr_wsd_decay_samples: float | None = option(
        None,
        "with --lr-decay-style wsd: number of decay samples at the end",
        above=0,
        shown_default="set by --wsd-decay-fraction",
    )
    lr_wsd_decay_style: str = option(
        "linear",
        "with --lr-decay-style wsd: shape of the decay for u from 0 to 1: linear 1 - u, cosine (1 + cos(pi u)) / "
        "2, exponential 2 (1/2)^u - 1, minus_sqrt 1 - sqrt(u)",
        choices=("linear", "cosine", "exponential", "minus_sqrt"),
        synonyms={"1-sqrt": "minus_sqrt"},
    )
    wsd_decay_fraction: float = option(
        0.1,
        "with --lr-decay-style wsd: decay as a fraction of the steps after the warm-up",
        above=0,
        maximum=1,
    )
    lr_embedding: float | None = option(
        None,
        "peak learning rate of the word embedding; its schedule is that of --lr, with --min-lr scaled by the ratio "
        "of the two",
        above=0,
        shown_default="lr",
    )
    lr_head: float | None = option(
        None,
        "peak learning rate of an untied output head; its schedule is that of --lr, with --min-lr scaled by the "
        "ratio of the two",
        above=0,
        shown_default="lr",
    )
    decoupled_lr: float | None = option(
        None,
        "peak learning rate of word embedding and output head as in Megatron-LM, decaying to --decoupled-min-lr",
        above=0,
        shown_default="lr",
    )
    decoupled_min_lr: float | None = option(
        None,
        "learning rate of word embedding and output head at the end of the decay",
        minimum=0,
        shown_default="with --decoupled-lr min-lr, otherwise min-lr scaled by the ratio of the learning rates",
    )
    lr_by_name: str = option(
        "",
        "peak learning rates by parameter name in checkpoints: PATTERN=RATE, separated by commas, such as "
        "layers.*.mlp.*=1e-4; the last match applies and overrides --lr-embedding",
    )
    weight_decay: float = option(
        0.01, "decoupled weight decay; none for biases and norms", minimum=0, short="decoupled weight decay"
    )
    weight_decay_by_name: str = option(
        "", "weight decay by parameter name, including biases and norms: PATTERN=DECAY, as for --lr-by-name"
    )
    apply_wd_to_qk_layernorm: bool = option(
        False, "apply the weight decay to the norms of queries and keys too, as Qwen3-Next does; none for other norms"
    )
    weight_decay_incr_style: str = option(
        "constant",
        "weight decay over the run: constant: --weight-decay; linear or cosine: from --start-weight-decay to "
        "--end-weight-decay at the last step",
        choices=("constant", "linear", "cosine"),
    )
    start_weight_decay: float | None = option(
        None,
        "with --weight-decay-incr-style linear or cosine: weight decay at the start of the run",
        minimum=0,
        shown_default="weight-decay",
    )
    end_weight_decay: float | None = option(
        None,
        "with --weight-decay-incr-style linear or cosine: weight decay at the end of the run",
        minimum=0,
        shown_default="weight-decay",
    )
    adam_beta1: float = option(0.9, "decay rate of Adam's first moment", minimum=0, below=1)
    adam_beta2: float = option(0.999, "decay rate of Adam's second moment", minimum=0, below=1)
    adam_eps: float = option(1e-8, "epsilon added to the denominator in Adam", above=0)
    exp_avg_dtype: str = option(
        "fp32",
        "data type of AdamW's first moment; fp32: that of the main params. The update is computed in fp32 and the "
        "state is rounded afterwards. 8bit: torchao's format with a scale for 256 elements; needs torchao",
        choices=("fp32", "bf16", "8bit"),
    )
    exp_avg_sq_dtype: str = option(
        "fp32",
        "data type of AdamW's second moment; in bf16 it cannot decay with --adam-beta2 above 0.996; 8bit as for "
        "--exp-avg-dtype",
        choices=("fp32", "bf16", "8bit"),
    )
    sgd_momentum: float = option(0.0, "with --optimizer sgd: momentum; 0: none", minimum=0, below=1)
    muon_momentum: float = option(0.95, "with --optimizer muon: momentum", minimum=0, below=1)
    muon_nesterov: bool = option(
        True,
        "with --optimizer muon: Nesterov momentum, which counts the newest gradient once more",
        flag="",
        constants={
            "--muon-nesterov": True, "--muon-use-nesterov": True,
            "--muon-no-nesterov": False, "--muon-no-use-nesterov": False,
        },
    )  # fmt: skip
    muon_num_ns_steps: int = option(5, "with --optimizer muon: number of Newton-Schulz steps", minimum=1, maximum=99)
    muon_coefficient_type: str = option(
        "simple",
        "with --optimizer muon: polynomials of the Newton-Schulz steps; simple: one for all steps, as in "
        "torch.optim.Muon; quintic: a period of five; polar_express: eight that converge to an orthogonal matrix",
        choices=tuple(COEFFICIENTS),
    )
    muon_fp32_matmul_prec: str = option(
        "bf16",
        "with --optimizer muon: precision of Newton-Schulz steps; bf16: bf16 throughout, as in torch.optim.Muon; "
        "medium: products in bf16, the norm in fp32; high: products in TF32; highest: fp32 throughout",
        choices=("bf16", "medium", "high", "highest"),
    )
    muon_scale_mode: str = option(
        "match_rms_adamw",
        "with --optimizer muon: factor for the learning rate of a matrix [m, n]: match_rms_adamw: 0.2 sqrt(max(m, "
        "n)), for learning rates of AdamW; spectral: sqrt(max(m, n)); original: sqrt(max(1, m/n)); unit_rms_norm: "
        "sqrt(m/n)",
        choices=("match_rms_adamw", "spectral", "original", "unit_rms_norm"),
        synonyms={"shape_scaling": "original"},
    )
    muon_extra_scale_factor: float = option(
        1.0,
        "with --optimizer muon: additional factor for the learning rate of every matrix; spectral with 0.2 equals "
        "match_rms_adamw",
        above=0,
    )
    muon_split_qkv: bool = option(
        True,
        "with --optimizer muon: treat query, key and value of a layer as three matrices instead of one",
        flag="",
        constants={"--muon-split-qkv": True, "--muon-no-split-qkv": False},
    )
    muon_split_qkv_heads: bool = option(
        False, "with --optimizer muon: treat query, key and value of each head as separate matrices"
    )
    adaptive_muon_moment2_method: str = option(
        "adamuon",
        "with --optimizer adaptive_muon: second moment of an orthogonalised update; adamuon: one per element; normuon: "
        "one per row of a tall matrix or column of a wide one, and the norm of the update is restored",
        choices=("adamuon", "normuon"),
    )
    adaptive_muon_beta2: float = option(
        0.95, "with --optimizer adaptive_muon: decay rate of the second moment", minimum=0, below=1
    )
    adaptive_muon_eps: float = option(
        1e-8, "with --optimizer adaptive_muon: adamuon adds it to the denominator, normuon bounds by it", above=0
    )
    clip_grad: float = option(
        1.0, "maximum global gradient norm; 0: no clipping", minimum=0, short="maximum gradient norm"
    )
    zero_stage: int = option(
        0,
        "ZeRO stage: shard over the replicas 1: fp32 main params and optimizer states; 2: also gradients; 3: also "
        "weights, which are gathered layer by layer. Experts are sharded over the ranks with the same experts. The "
        "results are those of stage 0",
        minimum=0,
        maximum=3,
        short="ZeRO stage, 0 to 3",
    )
    offload_optimizer: bool = option(
        False,
        "keep main params and optimizer states in host memory and update them on the CPU",
        aliases=("--cpu-optimizer", "--optimizer-cpu-offload"),
    )
    offload_parameters: bool = option(
        False, "with --zero-stage 3: keep the weight shards in host memory", aliases=("--offload-param",)
    )
    cpu_adam: str = option(
        "torch",
        "with --offload-optimizer: AdamW implementation on the CPU; deepspeed's is compiled at the first start",
        choices=("torch", "deepspeed"),
        constants={"--cpu_torch_adam": "torch"},
    )
    no_pin_memory: bool = option(False, "do not pin the host memory of offloaded tensors")

    @property
    def lr_follows_samples(self) -> bool:
        """True if learning-rate schedule lengths are in samples, False if they are in steps."""
        return self.lr_decay_samples is not None

    @property
    def warmup_length(self) -> float:
        """Warm-up length in steps, or in samples if ``lr_follows_samples``."""
        explicit = self.lr_warmup_samples if self.lr_follows_samples else self.lr_warmup_iters
        if explicit is not None:
            return explicit
        length = self.warmup * (self.lr_decay_samples or self.lr_decay_iters)
        if not self.lr_follows_samples and self.lr_warmup_rounding == "down":
            return int(length)
        return round(length) if math.isclose(length, round(length), rel_tol=1e-12) else length

    @property
    def bf16_states(self) -> tuple[str, ...]:
        """AdamW's states that are stored in bf16, by their names in checkpoints."""
        return self._states_in("bf16")

    @property
    def quantized_states(self) -> tuple[str, ...]:
        """AdamW's states that are stored in 8 bits, by their names in checkpoints."""
        return self._states_in("8bit")

    def _states_in(self, dtype: str) -> tuple[str, ...]:
        return tuple(name for name in ("exp_avg", "exp_avg_sq") if getattr(self, f"{name}_dtype") == dtype)

    @property
    def is_muon(self) -> bool:
        """True if matrices of layers are updated by Muon or adaptive Muon."""
        return self.optimizer in ("muon", "adaptive_muon")

    @property
    def state_type(self) -> str:
        """Layout of the optimizer states: ``optimizer``, or one of these names.

        | name | optimizer |
        |---|---|
        | momentum | SGD with momentum |
        | adamuon | adaptive Muon with as many states as AdamW |
        | muon | Muon, and adaptive Muon with normuon, whose second moments are few |
        """
        if self.optimizer == "adaptive_muon":
            return "adamuon" if self.adaptive_muon_moment2_method == "adamuon" else "muon"
        return "momentum" if self.optimizer == "sgd" and self.sgd_momentum else self.optimizer

    def problems(self) -> Iterator[str]:
        """Yield an error message for each invalid value in this section."""
        yield from self._state_problems()
        if self.zero_stage and self.optimizer == "adafactor":
            yield (
                f"--optimizer adafactor needs --zero-stage 0, got {self.zero_stage}: it averages over full matrices, "
                "which ZeRO shards over the replicas. Its states are small: use --zero-stage 0, or --optimizer adamw"
            )
        if self.muon_split_qkv_heads and not self.muon_split_qkv:
            yield "--muon-split-qkv-heads and --muon-no-split-qkv exclude each other, got both. Remove one of them"
        yield from self._warmup_problems()
        yield from self._rate_problems()
        yield from self._decay_problems()
        if self.min_lr > self.lr:
            yield f"--min-lr must not exceed --lr, got --min-lr {self.min_lr:g} and --lr {self.lr:g}. Lower --min-lr"
        if self.lr_decay_style == "exponential" and self.min_lr == 0:
            yield "--lr-decay-style exponential needs --min-lr above 0, got 0: its curve never reaches 0. Set --min-lr"

    def _state_problems(self) -> Iterator[str]:
        """Yield an error message if the optimizer does not support states in bf16 or 8 bits."""
        names = (*self.bf16_states, *self.quantized_states)
        flags = ", ".join(f"--{name.replace('_', '-')}-dtype" for name in names)
        if flags and not (self.is_muon or self.optimizer == "adamw"):
            got = f"got --optimizer {self.optimizer}"
            yield f"{flags} applies to AdamW only, {got}. Remove it, or use --optimizer adamw"
        elif flags and self.cpu_adam == "deepspeed":
            got = "got --cpu-adam deepspeed, whose states are fp32"
            yield f"{flags} is supported with --cpu-adam torch only, {got}. Remove one of them"

    def _rate_problems(self) -> Iterator[str]:
        """Yield an error message for each malformed PATTERN=NUMBER table and each contradicting learning rate."""
        for name in ("lr_by_name", "weight_decay_by_name"):
            text, flag = getattr(self, name), f"--{name.replace('_', '-')}"
            try:
                rates = parse_table(text) if text else {}
            except ValueError:
                yield (
                    f"{flag} must be PATTERN=NUMBER entries separated by commas, with distinct patterns and numbers "
                    f"of at least 0, got {text!r}. Write it as layers.*.mlp.*=1e-4,head.weight=1e-3"
                )
                continue
            if self.lr_decay_style == "exponential" and name == "lr_by_name" and 0 in rates.values():
                yield (
                    f"{flag} needs rates above 0 with --lr-decay-style exponential, got {text!r}. Raise the rates, or "
                    "change the style"
                )
        separate_flags = [f"--lr-{name}" for name in ("embedding", "head") if getattr(self, f"lr_{name}") is not None]
        if self.decoupled_lr is not None and separate_flags:
            yield (
                "--decoupled-lr sets the learning rates of word embedding and head, got "
                f"{' and '.join(separate_flags)} too. Remove one of them"
            )
        if self.decoupled_min_lr is None:
            if self.decoupled_lr is not None and self.min_lr > self.decoupled_lr:
                yield (
                    "--decoupled-lr decays to --min-lr unless --decoupled-min-lr is set, and must not be below it, "
                    f"got {self.decoupled_lr:g} and {self.min_lr:g}. Add --decoupled-min-lr"
                )
            return
        peak_rates = [rate for rate in (self.decoupled_lr, self.lr_embedding, self.lr_head) if rate is not None]
        if not peak_rates:
            yield "--decoupled-min-lr has no effect without --decoupled-lr. Remove it, or add --decoupled-lr"
        elif self.decoupled_min_lr > min(peak_rates):
            yield (
                "--decoupled-min-lr must not exceed the learning rates that decay to it, got "
                f"{self.decoupled_min_lr:g} and {min(peak_rates):g}. Lower it"
            )

    def _decay_problems(self) -> Iterator[str]:
        """Yield an error message if ends of the weight decay contradict its style, or if it varies by name too."""
        ends = {"--start-weight-decay": self.start_weight_decay, "--end-weight-decay": self.end_weight_decay}
        explicit_ends = [f"{flag} {value:g}" for flag, value in ends.items() if value is not None]
        style = self.weight_decay_incr_style
        if style == "constant" and explicit_ends:
            yield (
                f"{' and '.join(explicit_ends)} needs --weight-decay-incr-style linear or cosine, got constant. Set "
                "the style, or use --weight-decay only"
            )
        elif style != "constant" and len(explicit_ends) < 2:
            yield (
                f"--weight-decay-incr-style {style} needs --start-weight-decay and --end-weight-decay, got "
                f"{' and '.join(explicit_ends) or 'neither'}. Set both, or use --weight-decay-incr-style constant"
            )

    def _warmup_problems(self) -> Iterator[str]:
        """Yield an error message for a warm-up that does not fit the schedule or the peak learning rates.

        A wsd decay longer than the schedule is a problem, too.
        """
        peak_rates = {"--lr": self.lr, "--decoupled-lr": self.decoupled_lr}
        peak_rates |= {"--lr-embedding": self.lr_embedding, "--lr-head": self.lr_head}
        for flag, rate in peak_rates.items():
            if rate is not None and self.lr_warmup_init > rate:
                yield (
                    f"--lr-warmup-init must not exceed {flag}, got {self.lr_warmup_init:g} and {rate:g}. Lower "
                    "--lr-warmup-init"
                )
        is_by_samples = self.lr_decay_samples is not None
        unit = "samples" if is_by_samples else "iters"
        decay = self.lr_decay_samples if self.lr_decay_samples is not None else self.lr_decay_iters
        for name, noun in (("warmup", "warm-up"), ("wsd_decay", "wsd decay")):
            length = getattr(self, f"lr_{name}_{unit}")
            if length is not None and decay and (length > decay or (length == decay and name == "warmup")):
                yield (
                    f"the {noun} must be shorter than the schedule, got --lr-{name.replace('_', '-')}-{unit} "
                    f"{length:g} and --lr-decay-{unit} {decay:g}. Shorten the {noun}"
                )


# The number format of weights and activations, and the loss scale that fp16 needs.

DTYPES = ("fp32", "bf16", "fp16", "fp64")
E4M3 = "e4m3"
ROWWISE, BLOCKWISE = "rowwise", "blockwise"
"""Recipes of FP8; see ``megatron.mpu.fp8``."""


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Number format of weights and activations, and loss scale; if ``dtype`` is None, ``resolve_dtype`` sets it."""

    dtype: str | None = option(
        None,
        "data type: --fp16, --bf16, --fp32, or --fp64 for comparisons",
        flag="",
        choices=DTYPES,
        constants={f"--{name}": name for name in ("fp16", "bf16", "fp32", "fp64")},
        shown_default="bf16 on GPUs that have it, fp16 on older ones, fp32 on CPU",
        short="data type; default: by the device",
    )
    loss_scale: float = option(0.0, "fixed loss scale of fp16; 0: dynamic", minimum=0)
    initial_scale_power: int = option(16, "initial dynamic loss scale, as a power of two", minimum=0, maximum=64)
    loss_scale_window: int = option(1000, "steps without overflow until the loss scale doubles", minimum=1)
    hysteresis: int = option(
        2,
        "number of overflows until the loss scale is halved; further overflows halve it until a window without "
        "overflow",
        minimum=1,
    )
    min_scale: float = option(1.0, "minimum dynamic loss scale", above=0, aliases=("--min-loss-scale",))
    fp8_format: str | None = option(
        None,
        "FP8 number format of matrix products in attention, feed-forward layers and experts; weight gradients, "
        "embeddings, heads and routers remain in bf16",
        choices=(E4M3,),
        shown_default="no FP8",
    )
    fp8_recipe: str = option(
        ROWWISE,
        "scales of FP8: rowwise, one per row of an operand; blockwise, one per 128 elements, emulated in bf16",
        choices=(ROWWISE, BLOCKWISE),
    )
    first_last_layers_bf16: bool = option(
        False,
        "with --fp8-format, compute the first and last layers in bf16: --num-layers-at-start-in-bf16 and "
        "--num-layers-at-end-in-bf16",
    )
    num_layers_at_start_in_bf16: int = option(1, "first layers in bf16 with --first-last-layers-bf16", minimum=0)
    num_layers_at_end_in_bf16: int = option(1, "last layers in bf16 with --first-last-layers-bf16", minimum=0)
    excluded: tuple[str, ...] = ()  # formats that the JSON disables; never chosen for the device

    def fp8_layers(self) -> dict[str, Any]:
        """Return the FP8 fields of ``ModelArgs``; empty without ``--fp8-format``."""
        if self.fp8_format is None:
            return {}
        return {
            "fp8_recipe": self.fp8_recipe,
            "num_layers_at_start_in_bf16": self.num_layers_at_start_in_bf16 if self.first_last_layers_bf16 else 0,
            "num_layers_at_end_in_bf16": self.num_layers_at_end_in_bf16 if self.first_last_layers_bf16 else 0,
        }

    @property
    def is_dynamic(self) -> bool:
        """True if the loss scale is dynamic."""
        return self.loss_scale == 0
