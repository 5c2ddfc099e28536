"""``config.json`` of a Hugging Face folder from our configuration, and back.

| ours | theirs |
|---|---|
| GPT-2 | gpt2; linear layers without biases get zeros, and ``"hidden_bias": false`` says so |
| T5 with a tied head | t5; its head takes ``x h ** -0.5`` |
| T5 with a head of its own (v1.1, mT5) | t5; ``tie_word_embeddings`` and ``scale_decoder_outputs`` are false |
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from megatron.checkpoint.hf import gpt2, t5
from megatron.config import Config
from megatron.config.config import all_options
from megatron.errors import CheckpointError

FAMILY = {"gpt2": "gpt2", "t5": "t5", "mt5": "t5"}
"""Their model_type -> our family."""
_TOKENIZER = ("tokenizer_type", "tokenizer_path", "vocab_file", "merge_file")
_GPT2_ACTIVATIONS = {"gelu-tanh": "gelu_new", "gelu": "gelu"}
_T5_ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu-tanh": "gelu_new",
    "gated-gelu": "gated-gelu",
    "gated-silu": "gated-silu",
}


def saved_config(state: Mapping[str, Any]) -> Config:
    """Return the configuration that a checkpoint's ``state`` keeps: what says what the model is, and the tokenizer.

    Raises:
        CheckpointError: there is none, or it is of a family that this program does not know.
    """
    try:
        saved, sizes = state["config"], state["model"]
        values = {key: value for name in ("model", "t5", "data") for key, value in saved.get(name, {}).items()}
        known = {option.name for _, option in all_options()}
        config = Config.of_values({key: value for key, value in values.items() if key in known}, family=saved["family"])
        return replace(config, model=replace(config.model, vocab_size=sizes["vocab_size"]))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"the checkpoint does not say which model it holds ({type(error).__name__}: {error}); only those of GPT-2 "
            "and T5 that the pretraining scripts save can be converted"
        ) from error


def to_theirs(config: Config, dtype: str) -> dict[str, Any]:
    """Return the fields of ``config.json``, ids of control tokens left out.

    Raises:
        CheckpointError: listing everything of the model that has no form there.
    """
    problems = list(_t5_problems(config) if config.is_t5 else _gpt2_problems(config))
    if problems:
        raise CheckpointError(f"this model has no Hugging Face form: {'; '.join(problems)}")
    return {**(_t5_fields(config) if config.is_t5 else _gpt2_fields(config)), "dtype": dtype}


def _gpt2_problems(config: Config) -> Iterator[str]:
    model = config.model
    if model.activation not in _GPT2_ACTIVATIONS:
        yield f"GPT-2 has the activation {' or '.join(_GPT2_ACTIVATIONS)} there, got {model.activation}"
    if model.attention_size != model.hidden_size:
        yield (
            f"heads must make up the hidden size, got {model.num_attention_heads} heads of {model.kv_hidden_size} "
            f"for {model.hidden_size}"
        )
    if model.apply_residual_connection_post_layernorm:
        yield "GPT-2 has no residual connection from behind the norm there"


def _t5_problems(config: Config) -> Iterator[str]:
    if not config.t5.has_relative_positions:
        yield "T5 has no learned positions there (the variant that CPM trained)"
    if config.model.hidden_bias:
        yield "T5 has no biases in its linear layers there, got hidden_bias"
    if config.model.activation not in _T5_ACTIVATIONS:
        yield f"T5 has the activation {', '.join(_T5_ACTIVATIONS)} there, got {config.model.activation}"


def _gpt2_fields(config: Config) -> dict[str, Any]:
    model = config.model
    fields = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": model.vocab_size,
        "n_positions": model.max_position_embeddings,
        "n_ctx": model.max_position_embeddings,
        "n_embd": model.hidden_size,
        "n_layer": model.num_layers,
        "n_head": model.num_attention_heads,
        "n_inner": model.ff_hidden_size,
        "activation_function": _GPT2_ACTIVATIONS[model.activation],
        "layer_norm_epsilon": model.layernorm_epsilon,
        "initializer_range": model.init_method_std,
        "resid_pdrop": model.hidden_dropout,
        "embd_pdrop": model.hidden_dropout,
        "attn_pdrop": model.attention_dropout,
        "tie_word_embeddings": not model.untie_embeddings,
    }
    return fields if model.hidden_bias else {**fields, "hidden_bias": False}


def _t5_fields(config: Config) -> dict[str, Any]:
    model, sides = config.model, config.t5
    return {
        "architectures": ["T5ForConditionalGeneration"],
        "model_type": "t5",
        "is_encoder_decoder": True,
        "vocab_size": model.vocab_size,
        "d_model": model.hidden_size,
        "d_kv": model.kv_hidden_size,
        "d_ff": model.ff_hidden_size,
        "num_layers": sides.enc_layers,
        "num_decoder_layers": sides.dec_layers,
        "num_heads": model.num_attention_heads,
        "feed_forward_proj": _T5_ACTIVATIONS[model.activation],
        "layer_norm_epsilon": model.layernorm_epsilon,
        "dropout_rate": model.hidden_dropout,
        "relative_attention_num_buckets": sides.relative_attention_num_buckets,
        "relative_attention_max_distance": sides.relative_attention_max_distance,
        "tie_word_embeddings": not model.untie_embeddings,
        "scale_decoder_outputs": not model.untie_embeddings,
    }


def to_ours(theirs: Mapping[str, Any]) -> Config:
    """Return our configuration of the model that ``config.json`` describes.

    Raises:
        CheckpointError: another architecture, a setting that our models do not have, or a size that is missing.
    """
    kind = theirs.get("model_type")
    if kind not in FAMILY:
        raise CheckpointError(f"model_type must be one of {', '.join(FAMILY)}, got {kind!r}: another architecture")
    try:
        is_t5 = FAMILY[kind] == "t5"
        values = (_t5_values if is_t5 else _gpt2_values)(dict(theirs))
        return Config.of_values(values, family=FAMILY[kind])
    except KeyError as error:
        raise CheckpointError(f"config.json must hold {error} for a {kind}; it is missing") from error
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise CheckpointError(f"config.json does not describe a {kind}: {error}") from error


def _gpt2_values(theirs: dict[str, Any]) -> dict[str, Any]:
    return {
        **gpt2.model_fields(theirs),
        "hidden_bias": theirs.get("hidden_bias", True),
        "hidden_dropout": theirs.get("resid_pdrop", 0.1),
        "attention_dropout": theirs.get("attn_pdrop", 0.1),
    }


def _t5_values(theirs: dict[str, Any]) -> dict[str, Any]:
    rate = theirs.get("dropout_rate", 0.1)
    return {**t5.model_fields(theirs), "hidden_dropout": rate, "attention_dropout": rate}


def flags(config: Config) -> list[str]:
    """Return the flags with which a pretraining script builds the model of ``config`` and reads its tokenizer."""
    files = {name: getattr(config.data, name) for name in _TOKENIZER}
    given = {**config.identity(), "layernorm_epsilon": config.model.layernorm_epsilon, **files}
    words: list[str] = []
    for _, option in all_options():
        value = given.get(option.name)
        if value is not None and value != option.default:
            words += [option.flag] if value is True else [option.flag, str(value)]
    return words
