"""Tiny decoders of Hugging Face's classes, with every feature of the class and unusual sizes, and our flags for each.

They have six heads of size ten (not h / a), two or three groups, windows shorter than the sequence, and layers of two
types. Hugging Face's models always compute some parts (norms, angles, softmax, Gemma's normalizer) in fp32, which
leaves a difference of 1e-7; ``disable_upcasts`` computes these parts in fp64 by the same formulas.
"""

from __future__ import annotations

import importlib
import math
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch

from megatron.checkpoint.huggingface.config import config_from_huggingface
from megatron.config import Config

VOCAB, SEQ_LENGTH = 101, 12
YARN = {
    "rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 8, "beta_fast": 2.0,
    "beta_slow": 0.1,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
SLIDING, FULL = "sliding_attention", "full_attention"
COMMON_SETTINGS = {
    "vocab_size": VOCAB, "intermediate_size": 54, "num_hidden_layers": 3, "num_attention_heads": 6, "head_dim": 10,
    "max_position_embeddings": 32, "rms_norm_eps": 1e-3, "pad_token_id": None, "bos_token_id": 0, "eos_token_id": 0,
    "initializer_range": 0.1,
}  # fmt: skip
FLAGS = (
    "--num-layers 3 --num-attention-heads 6 --kv-channels 10 --ffn-hidden-size 54 --max-position-embeddings 32 "
    "--norm-epsilon 1e-3 --init-method-std 0.1 --vocab-size 101"
)


@dataclass(frozen=True)
class ModelCase:
    """A Hugging Face model and our equivalent flags.

    Args:
        prefix: prefix of the names of the model's classes.
        settings: settings of Hugging Face's configuration, in addition to ``COMMON_SETTINGS``.
        flags: our flags for examples/llama/pretrain_llama.py, in addition to ``FLAGS``.
        module: name of Hugging Face's module, if it is not the prefix in lower case.
        config: name of Hugging Face's configuration class without the prefix.
    """

    prefix: str
    settings: dict[str, Any] = field(default_factory=dict)
    flags: str = ""
    module: str = ""
    config: str = "Config"

    @property
    def num_kv_heads(self) -> int:
        """Number of heads of keys and values."""
        return int(self.settings["num_key_value_heads"])

    def huggingface_config(self, **overrides: Any) -> Any:
        """Return Hugging Face's configuration."""
        import transformers

        config_class = getattr(transformers, f"{self.prefix}{self.config}")
        return config_class(**{**COMMON_SETTINGS, **self.settings, **overrides}, attn_implementation="eager")

    def huggingface_model(self, dtype: torch.dtype = torch.float64, seed: int = 0, **overrides: Any) -> Any:
        """Return Hugging Face's model with random weights, including norms and biases, so that all have an effect."""
        import transformers

        torch.manual_seed(seed)
        model = getattr(transformers, f"{self.prefix}ForCausalLM")(self.huggingface_config(**overrides)).to(dtype)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
        return model

    def our_config(self) -> Config:
        """Return our configuration for the same model."""
        return config_from_huggingface(self.huggingface_config().to_dict())


MODEL_CASES = {
    "qwen2": ModelCase(
        "Qwen2",
        {
            "hidden_size": 38, "num_key_value_heads": 2, "use_sliding_window": True, "sliding_window": 5,
            "max_window_layers": 1, "rope_parameters": YARN,
        },
        "--hidden-size 38 --num-query-groups 2 --add-qkv-bias --window-size 4 --window-attn-skip-freq [0,1,1] "
        "--rotary-base 500 --rotary-scaling yarn --rotary-scaling-factor 4 --rotary-original-positions 8 "
        "--rotary-beta-fast 2 --rotary-beta-slow 0.1",
    ),
    "qwen3": ModelCase(
        "Qwen3",
        {
            "hidden_size": 38, "num_key_value_heads": 3, "tie_word_embeddings": True, "use_sliding_window": True,
            "sliding_window": 4, "layer_types": [SLIDING, FULL, SLIDING],
            "rope_parameters": {"rope_type": "default", "rope_theta": 300.0},
        },
        "--hidden-size 38 --num-query-groups 3 --tie-embeddings-and-output-weights --qk-norm head --window-size 3 "
        "--window-attn-skip-freq 2 --rotary-base 300",
    ),
    "llama3": ModelCase(
        "Llama",
        {
            "hidden_size": 42, "num_key_value_heads": 2, "tie_word_embeddings": True, "attention_bias": True,
            "mlp_bias": True, "rope_parameters": LLAMA3,
        },
        "--hidden-size 42 --num-query-groups 2 --tie-embeddings-and-output-weights --hidden-bias --rotary-base 500 "
        "--rotary-scaling llama3 --rotary-scaling-factor 4 --rotary-original-positions 16",
    ),
    "llama yarn": ModelCase(
        "Llama",
        {"hidden_size": 42, "num_key_value_heads": 3, "rope_parameters": {**YARN, "attention_factor": 1.3}},
        "--hidden-size 42 --num-query-groups 3 --rotary-base 500 --rotary-scaling yarn --rotary-scaling-factor 4 "
        "--rotary-original-positions 8 --rotary-beta-fast 2 --rotary-beta-slow 0.1 --rotary-attention-factor 1.3",
    ),
    "mistral": ModelCase(
        "Mistral",
        {
            "hidden_size": 38, "num_key_value_heads": 2, "sliding_window": 4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
        },
        "--hidden-size 38 --num-query-groups 2 --window-size 3,0 --rotary-base 100",
    ),
    "gemma2": ModelCase(
        "Gemma2",
        {
            "hidden_size": 42, "num_key_value_heads": 3, "query_pre_attn_scalar": 17, "sliding_window": 4,
            "attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
        },
        "--hidden-size 42 --num-query-groups 3 --tie-embeddings-and-output-weights --activation gated-gelu "
        "--apply-layernorm-1p --norm-placement both --scale-embeddings --window-size 3 --window-attn-skip-freq 2 "
        f"--softmax-scale {17**-0.5!r} --attn-logit-softcapping 1.5 --final-logit-softcapping 2.5 --rotary-base 100",
    ),
    "gemma3": ModelCase(
        "Gemma3",
        {
            "hidden_size": 42, "num_key_value_heads": 2, "query_pre_attn_scalar": 23, "sliding_window": 3,
            "sliding_window_pattern": 3, "final_logit_softcapping": 2.5,
            "rope_parameters": {
                FULL: {"rope_type": "linear", "factor": 4.0, "rope_theta": 900.0},
                SLIDING: {"rope_type": "default", "rope_theta": 50.0},
            },
        },
        "--hidden-size 42 --num-query-groups 2 --tie-embeddings-and-output-weights --activation gated-gelu "
        "--apply-layernorm-1p --norm-placement both --scale-embeddings --qk-norm head --window-size 2 "
        f"--window-attn-skip-freq 3 --softmax-scale {23**-0.5!r} --final-logit-softcapping 2.5 --rotary-base 900 "
        "--rotary-scaling linear --rotary-scaling-factor 4 --rotary-local-base 50",
        config="TextConfig",
    ),
    "olmo2": ModelCase(
        "Olmo2",
        {
            "hidden_size": 38, "num_key_value_heads": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
        },
        "--hidden-size 38 --num-query-groups 2 --norm-placement after --qk-norm all --rotary-base 100",
    ),
}  # fmt: skip


def random_case(seed: int) -> ModelCase:
    """Return a random model of one of Hugging Face's classes."""
    rng = random.Random(seed)
    model = MODEL_CASES[rng.choice(list(MODEL_CASES))]
    num_groups = rng.choice([1, 2, 3])
    num_heads = num_groups * rng.choice([1, 2, 3])
    num_layers = rng.randint(1, 5)
    rope = {"rope_type": "default", "rope_theta": rng.choice([20.0, 10000.0])}
    scaling = rng.choice([{}, {"rope_type": "linear", "factor": 2.0}, {**LLAMA3, "rope_theta": 80.0}, YARN])
    settings: dict[str, Any] = {
        "num_hidden_layers": num_layers, "num_attention_heads": num_heads, "num_key_value_heads": num_groups,
        "head_dim": rng.choice([2, 6, 8, 14]), "hidden_size": num_heads * rng.choice([5, 6]),
        "intermediate_size": rng.choice([7, 30]), "tie_word_embeddings": rng.random() < 0.5,
        "rope_parameters": {**rope, **scaling},
    }  # fmt: skip
    if "sliding_window" in model.settings:
        settings["sliding_window"] = rng.randint(2, SEQ_LENGTH + 2)
    if model.prefix in ("Qwen2", "Qwen3", "Gemma2", "Gemma3"):
        settings["layer_types"] = [rng.choice([SLIDING, FULL]) for _ in range(num_layers)]
    if model.prefix == "Gemma3":
        settings["rope_parameters"] = {FULL: {**rope, **scaling}, SLIDING: {**rope, "rope_theta": 50.0}}
    if model.prefix == "Gemma2":
        settings["attn_logit_softcapping"] = rng.choice([None, 2.0])
    if model.prefix == "Llama":
        settings["attention_bias"] = settings["mlp_bias"] = rng.random() < 0.5
    return ModelCase(model.prefix, {**model.settings, **settings}, module=model.module, config=model.config)


# Hugging Face's models entirely in fp64.


def rotary_frequencies(config: Any, layer_type: str | None = None, length: int = 0) -> tuple[torch.Tensor, float]:
    """Return rotary frequencies [d/2] in fp64 and the factor of cosine and sine, by Hugging Face's formulas.

    Args:
        length: one more than the largest position, which selects the factors of longrope.
    """
    rope = config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    size = int(size * rope.get("partial_rotary_factor", 1.0))
    base = rope["rope_theta"]
    unscaled = 1.0 / base ** (torch.arange(0, size, 2, dtype=torch.float64) / size)
    if rope["rope_type"] == "default":
        return unscaled, 1.0
    if rope["rope_type"] == "longrope":
        original_length = rope["original_max_position_embeddings"]
        divisors = rope["long_factor"] if length > original_length else rope["short_factor"]
        growth = math.log(config.max_position_embeddings / original_length) / math.log(original_length)
        return unscaled / torch.tensor(divisors, dtype=torch.float64), math.sqrt(1 + growth)
    factor = rope["factor"]
    if rope["rope_type"] == "linear":
        return unscaled / factor, 1.0
    original_length = rope["original_max_position_embeddings"]
    if rope["rope_type"] == "llama3":
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        smooth = ((original_length * unscaled / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
        return smooth * unscaled + (1 - smooth) * unscaled / factor, 1.0
    assert rope["rope_type"] == "yarn"
    fast, slow = rope.get("beta_fast") or 32, rope.get("beta_slow") or 1

    def dimension(num_rotations: float) -> float:
        return size * math.log(original_length / (num_rotations * 2 * math.pi)) / (2 * math.log(base))

    first, last = dimension(fast), dimension(slow)
    if rope.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    last = last + 0.001 if first == last else last
    ramp = ((torch.arange(size // 2, dtype=torch.float64) - first) / (last - first)).clamp(0, 1)
    scale = rope.get("attention_factor")
    if scale is None and rope.get("mscale") and rope.get("mscale_all_dim"):
        terms = [0.1 * rope[key] * math.log(factor) + 1.0 for key in ("mscale", "mscale_all_dim")]
        scale = terms[0] / terms[1]
    scale = (0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0) if scale is None else scale
    return unscaled / factor * ramp + unscaled * (1 - ramp), scale


@contextmanager
def disable_upcasts() -> Iterator[None]:
    """Make norms, angles, softmax and Gemma's normalizer of all these models compute in fp64, by the same formulas."""

    def norm(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))

    def offset_norm(self: Any, x: torch.Tensor) -> torch.Tensor:
        return (1.0 + self.weight) * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))

    def angles(
        self: Any, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        inv_freq, scale = rotary_frequencies(self.config, layer_type)
        freqs = position_ids[..., None].double() * inv_freq
        doubled = torch.cat((freqs, freqs), dim=-1)
        return doubled.cos() * scale, doubled.sin() * scale

    def softmax(x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.softmax(x, dim)

    def scaled_embedding(self: Any, input_ids: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.embedding(input_ids, self.weight) * self.scalar_embed_scale

    with ExitStack() as stack:
        for prefix in sorted({model.prefix for model in MODEL_CASES.values()}):
            name = prefix.lower()
            module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
            is_gemma = prefix.startswith("Gemma")
            forwards = {"RMSNorm": offset_norm if is_gemma else norm, "RotaryEmbedding": angles}
            forwards |= {"TextScaledWordEmbedding": scaled_embedding} if is_gemma else {}
            for suffix, forward in forwards.items():
                stack.enter_context(patch.object(getattr(module, f"{prefix}{suffix}"), "forward", forward))
        stack.enter_context(patch.object(torch.nn.functional, "softmax", softmax))
        yield
