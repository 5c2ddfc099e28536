"""Bit-exact conversion of dense decoders whose Hugging Face types differ from LLaMA's in names, keys or mechanisms.

A ``DenseType`` per ``model_type`` describes the names of the tensors and the keys of config.json; the table of types is
in ``huggingface_dense_types``. Weights are stored as in ``huggingface``, except for these features of a type:

| Hugging Face | ours | conversion |
|---|---|---|
| qkv_proj: all queries, all keys, all values | query_key_value | rows are grouped by query group |
| gate_up_proj: all gates, all values | mlp.up | gates and values alternate |
| rotary pairs of adjacent rows | pairs of two halves | rows of each query and key head are reordered |
| q_layernorm.norms.{head} | query_norm | the tensors of all heads are concatenated |
| act_fn.beta, .eps | | constants, which must have our values and are written again |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from megatron.config import Config
from megatron.config.decoder import ARCHITECTURE, SHARED_NORM, window_layers
from megatron.config.model import ModelConfig
from megatron.errors import CheckpointError
from megatron.models.common.huggingface import (
    HFFormat,
    Tensors,
    WeightMapping,
    by_recipes,
    unsupported_mechanisms,
    unsupported_settings,
)
from megatron.models.common.rotary_rows import RotaryRows
from megatron.models.llama.huggingface import EXAMPLE_SIZES, ROTARY_BUFFERS, heights
from megatron.models.llama.huggingface_rotary import ROTARY_KEYS, rotary_fields, rotary_values
from megatron.models.llama.huggingface_windows import (
    SLIDING,
    WINDOW_KEYS,
    layer_types_of,
    layer_types_problems,
    window_settings,
)

if TYPE_CHECKING:
    import torch

GATED_SILU = {"silu": "gated-silu", "swish": "gated-silu"}
"""Activation in config.json -> ours; the first entry of each of ours is written."""
PRE_NORMS = {"input_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"}

XIELU_CONSTANTS = {"beta": 0.5, "eps": -1e-6}
"""Hugging Face name -> value in ``megatron.ops.xielu``, which imports torch."""

Problems = list[str]


@dataclass(frozen=True, kw_only=True)
class BiasKeys:
    """Keys of config.json that enable biases; "" if the type has no such biases.

    Args:
        query_key_value: key for the query, key and value projections.
        output: key for the output projection of attention.
        feed_forward: key for the feed-forward layer.
    """

    query_key_value: str = ""
    output: str = ""
    feed_forward: str = ""

    @property
    def by_part(self) -> tuple[str, str, str]:
        return self.query_key_value, self.output, self.feed_forward

    def to_ours(self, settings: Mapping[str, Any]) -> tuple[dict[str, bool], Problems]:
        """Return our settings of biases for the contents of config.json, and unsupported combinations."""
        has_biases = tuple(bool(key and settings.get(key)) for key in self.by_part)
        if has_biases in _BIASES:
            return dict(zip(("add_qkv_bias", "hidden_bias"), _BIASES[has_biases], strict=True)), []
        actual = {key: bool(settings.get(key)) for key in self.by_part if key}
        supported = filter(None, (self._entries(pattern) for pattern in _BIASES))
        return {}, [f"{_join(actual)} (supported: {' or '.join(_join(entries) for entries in supported)})"]

    def to_hf(self, model: ModelConfig) -> dict[str, bool]:
        """Return the entries of config.json for our model, for which ``problems`` yields nothing."""
        return self._entries(_biased_parts(model)) or {}

    def problems(self, model: ModelConfig) -> Iterator[str]:
        """Yield a message if config.json cannot express the biases of ``model``."""
        if self._entries(_biased_parts(model)) is None:
            yield f"{'--hidden-bias' if model.hidden_bias else '--add-qkv-bias'} is not supported"

    def _entries(self, has_biases: tuple[bool, ...]) -> dict[str, bool] | None:
        """Return the entries of config.json for biases of each part; None if the keys cannot express them."""
        entries = {"": False}
        for key, has_bias in zip(self.by_part, has_biases, strict=True):
            if entries.setdefault(key, has_bias) != has_bias:
                return None
        del entries[""]
        return entries


def _biased_parts(model: ModelConfig) -> tuple[bool, bool, bool]:
    return (True,) * 3 if model.hidden_bias else (model.add_qkv_bias, False, False)


def _join(entries: Mapping[str, bool]) -> str:
    return ", ".join(f"{key} {has_bias}" for key, has_bias in entries.items())


_BIASES = {
    (False, False, False): (False, False),
    (True, False, False): (True, False),
    (True, True, True): (False, True),
}
"""Biases of (queries, keys and values; output; feed-forward) -> our (``add_qkv_bias``, ``hidden_bias``)."""


def same_rotary(model: ModelConfig, common: dict[str, Any]) -> dict[str, Any]:
    """Return the common entries for rotary positions."""
    return common


def no_fields(model: ModelConfig) -> dict[str, Any]:
    """Return no further entries of config.json."""
    return {}


def no_values(settings: dict[str, Any]) -> tuple[dict[str, Any], Problems]:
    """Return no further settings of ours."""
    return {}, []


def no_problems(model: ModelConfig) -> Iterator[str]:
    """Yield no further problems."""
    yield from ()


@dataclass(frozen=True, kw_only=True)
class DenseType:
    """Tensor names and keys of config.json of one ``model_type``.

    Args:
        architecture: name of the Hugging Face class.
        fixed: our settings that all models of the type share, without those that equal GPT-2's; a decoder has rotary
            positions and RMS norms unless ``fixed`` says otherwise.
        free: our settings that config.json can express, in addition to sizes, rotary scaling and biases.
        defaults: defaults of the Hugging Face class for missing keys.
        default_rope: ``rope_parameters`` of the class if config.json has none.
        biases: keys of biases.
        activations: activation in config.json -> ours.
        epsilon_key: key of the epsilon of norms.
        hidden_dropout_key: key of the dropout of the residual stream; it has no effect on a trained model.
        norms: our norms of a layer -> their Hugging Face names.
        query_key_norms: Hugging Face names of the norms of queries and keys, in ``self_attn``.
        has_packed_query_key_value, has_packed_gate: the projections are one tensor, ``qkv_proj`` or ``gate_up_proj``.
        has_adjacent_pairs: rotary pairs are adjacent elements.
        window: "all": in all layers or none; "layer": per layer; "": no windows.
        has_fixed_head_size: a head has hidden size / number of heads elements, and config.json cannot change that.
        rotary: function from our model and the common entries for rotary positions to the entries of this type.
        fields: function from our model to further entries of config.json.
        values: function from config.json, completed by the defaults of the class, to further settings of ours and
            unsupported settings. It is called before other conversions and may change its argument.
        problems: function that yields further problems of an export.
    """

    model_type: str
    architecture: str
    fixed: Mapping[str, Any] = field(default_factory=dict)
    free: frozenset[str] = frozenset()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    default_rope: Mapping[str, Any] | None = None
    biases: BiasKeys = BiasKeys()
    activations: Mapping[str, str] = field(default_factory=lambda: GATED_SILU)
    epsilon_key: str = "rms_norm_eps"
    hidden_dropout_key: str = "hidden_dropout"
    norms: Mapping[str, str] = field(default_factory=lambda: PRE_NORMS)
    query_key_norms: tuple[str, str] = ("q_norm", "k_norm")
    has_packed_query_key_value: bool = False
    has_packed_gate: bool = False
    has_adjacent_pairs: bool = False
    window: str = ""
    has_fixed_head_size: bool = False
    rotary: Callable[[ModelConfig, dict[str, Any]], dict[str, Any]] = same_rotary
    fields: Callable[[ModelConfig], dict[str, Any]] = no_fields
    values: Callable[[dict[str, Any]], tuple[dict[str, Any], Problems]] = no_values
    problems: Callable[[ModelConfig], Iterator[str]] = no_problems

    @property
    def settings(self) -> dict[str, Any]:
        """Our settings that all models of the type share."""
        return {"position_embedding_type": "rope", "normalization": "RMSNorm", **self.fixed}

    @property
    def has_partial_rotary(self) -> bool:
        return "rotary_percent" in self.free

    @property
    def has_local_rotary(self) -> bool:
        """True if config.json has separate rotary parameters for layers with a window."""
        return "rotary_local_base" in self.free


# Weights.


def recipes(dense_type: DenseType, config: Config) -> dict[str, WeightMapping]:
    """Return the mapping of each of our weights, by name."""
    model = config.model
    mappings = {"embedding.word.weight": WeightMapping(("model.embed_tokens.weight",))}
    norms = {"final_norm": "model.norm"}
    for layer_idx in range(model.num_layers):
        ours, theirs = f"layers.{layer_idx}", f"model.layers.{layer_idx}"
        for our_name, hf_name in dense_type.norms.items():
            if our_name != "post_attention_norm" or model.parallel_residual != SHARED_NORM:
                norms[f"{ours}.{our_name}"] = f"{theirs}.{hf_name}"
        mappings |= _query_key_norm_recipes(dense_type, model, f"{ours}.attention", f"{theirs}.self_attn")
        for suffix in ("weight", "bias") if model.hidden_bias or model.add_qkv_bias else ("weight",):
            mappings[f"{ours}.attention.query_key_value.{suffix}"] = _query_key_value_mapping(
                dense_type, model, f"{theirs}.self_attn", suffix
            )
        for suffix in ("weight", "bias") if model.hidden_bias else ("weight",):
            mappings[f"{ours}.attention.dense.{suffix}"] = WeightMapping((f"{theirs}.self_attn.o_proj.{suffix}",))
            mappings[f"{ours}.mlp.up.{suffix}"] = _up_mapping(dense_type, model, f"{theirs}.mlp", suffix)
            mappings[f"{ours}.mlp.down.{suffix}"] = WeightMapping((f"{theirs}.mlp.down_proj.{suffix}",))
        for name in ("alpha_p", "alpha_n") if model.activation == "xielu" else ():
            mappings[f"{ours}.mlp.activation.{name}"] = WeightMapping((f"{theirs}.mlp.act_fn.{name}",))
    for our_name, hf_name in norms.items():
        for suffix in ("weight", "bias") if model.normalization == "LayerNorm" and model.norm_bias else ("weight",):
            mappings[f"{our_name}.{suffix}"] = WeightMapping((f"{hf_name}.{suffix}",))
    if model.untie_embeddings:
        mappings["head.weight"] = WeightMapping(("lm_head.weight",))
    return mappings


def _query_key_norm_recipes(
    dense_type: DenseType, model: ModelConfig, ours: str, theirs: str
) -> dict[str, WeightMapping]:
    mappings: dict[str, WeightMapping] = {}
    num_heads = model.num_attention_heads, model.num_query_groups
    for our_name, hf_name, num in zip(("query", "key"), dense_type.query_key_norms, num_heads, strict=True):
        if model.qk_norm == "per-head":
            hf_names = tuple(f"{theirs}.{hf_name}.norms.{head}.weight" for head in range(num))
            mappings[f"{ours}.{our_name}_norm.weight"] = WeightMapping(hf_names)
        elif model.qk_norm != "none":
            mappings[f"{ours}.{our_name}_norm.weight"] = WeightMapping((f"{theirs}.{hf_name}.weight",))
    return mappings


def _query_key_value_mapping(dense_type: DenseType, model: ModelConfig, theirs: str, suffix: str) -> WeightMapping:
    key_rows = model.num_query_groups * model.kv_hidden_size
    head_rows = RotaryRows(model.kv_hidden_size, 0, int(model.kv_hidden_size * model.rotary_percent))
    rotary_rows = (head_rows, head_rows, None) if dense_type.has_adjacent_pairs else ()
    if dense_type.has_packed_query_key_value:
        return WeightMapping(
            (f"{theirs}.qkv_proj.{suffix}",),
            num_blocks=model.num_query_groups,
            num_packed=3,
            packed_rows=(model.attention_size, key_rows, key_rows),
            row_orders=rotary_rows,
        )
    hf_names = tuple(f"{theirs}.{name}_proj.{suffix}" for name in "qkv")
    return WeightMapping(hf_names, num_blocks=model.num_query_groups, row_orders=rotary_rows)


def _up_mapping(dense_type: DenseType, model: ModelConfig, theirs: str, suffix: str) -> WeightMapping:
    if not model.activation.startswith("gated-"):
        return WeightMapping((f"{theirs}.up_proj.{suffix}",))
    if dense_type.has_packed_gate:
        return WeightMapping((f"{theirs}.gate_up_proj.{suffix}",), num_blocks=model.ff_hidden_size, num_packed=2)
    gate_and_up = tuple(f"{theirs}.{name}_proj.{suffix}" for name in ("gate", "up"))
    return WeightMapping(gate_and_up, num_blocks=model.ff_hidden_size)


def constants(config: Config) -> dict[str, float]:
    """Return the constants of xIELU that files of a type contain, by name."""
    if config.model.activation != "xielu":
        return {}
    prefixes = [f"model.layers.{layer_idx}.mlp.act_fn" for layer_idx in range(config.model.num_layers)]
    return {f"{prefix}.{name}": value for prefix in prefixes for name, value in XIELU_CONSTANTS.items()}


def _with_constants(from_ours: Callable[[Tensors, Config], Tensors], weights: Tensors, config: Config) -> Tensors:
    """Return the Hugging Face tensors of ``weights``, and the constants in the dtype of the weights."""
    import torch

    hf_weights = from_ours(weights, config)
    example: torch.Tensor = next(iter(hf_weights.values()))
    for name, value in constants(config).items():
        hf_weights[name] = torch.tensor(value, dtype=example.dtype).to(example.device)
    return hf_weights


# Settings, from ours to config.json.


def problems(dense_type: DenseType, config: Config) -> Iterator[str]:
    """Yield a message for each setting of ``config`` that the type cannot express."""
    model, model_type = config.model, dense_type.model_type
    free = {*dense_type.free, "rotary_scaling"}
    if dense_type.window:
        free |= {"window_size", "window_attn_skip_freq"}
    yield from unsupported_settings(model, dense_type.settings, free={*free, "add_qkv_bias"})
    yield from (f"{problem} by {model_type}" for problem in dense_type.biases.problems(model))
    if model.activation not in dense_type.activations.values():
        supported = " or ".join(dict.fromkeys(dense_type.activations.values()))
        yield f"--activation must be {supported}, got {model.activation}"
    if dense_type.has_fixed_head_size and model.kv_hidden_size * model.num_attention_heads != model.hidden_size:
        yield (
            "--kv-hidden-size must be --hidden-size / --num-attention-heads, got "
            f"{model.kv_hidden_size} and {model.hidden_size} / {model.num_attention_heads}"
        )
    if dense_type.window == "all" and model.window_size and not all(window_layers(model)):
        yield (
            f"{model_type} supports windows in all layers only, got --window-attn-skip-freq "
            f"{model.window_attn_skip_freq}"
        )
    yield from dense_type.problems(model)


def fields(dense_type: DenseType, config: Config) -> dict[str, Any]:
    """Return the contents of config.json for ``config``."""
    model = config.model
    hf_activations = {ours: theirs for theirs, ours in reversed(list(dense_type.activations.items()))}
    return {
        "architectures": [dense_type.architecture],
        "model_type": dense_type.model_type,
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ff_hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_query_groups,
        **({} if dense_type.has_fixed_head_size else {"head_dim": model.kv_hidden_size}),
        "hidden_act": hf_activations[model.activation],
        "max_position_embeddings": model.max_position_embeddings,
        dense_type.epsilon_key: model.layernorm_epsilon,
        "initializer_range": model.init_method_std,
        "attention_dropout": model.attention_dropout,
        dense_type.hidden_dropout_key: model.hidden_dropout,
        "tie_word_embeddings": not model.untie_embeddings,
        **dense_type.biases.to_hf(model),
        **_window_fields(dense_type, model),
        **dense_type.rotary(
            model, rotary_fields(model, has_local=False, has_partial_rotary=dense_type.has_partial_rotary)
        ),
        **dense_type.fields(model),
    }


def _window_fields(dense_type: DenseType, model: ModelConfig) -> dict[str, Any]:
    """Return the window fields. The Hugging Face window size includes the token itself, ours does not."""
    has_window = window_layers(model)
    window_size = model.window_size + 1 if any(has_window) else None
    if not dense_type.window:
        return {}
    if dense_type.window == "all":
        return {"sliding_window": window_size}
    return {
        "sliding_window": window_size or dense_type.defaults["sliding_window"],  # the class requires an integer
        "layer_types": layer_types_of(has_window),
    }


# Settings, from config.json to ours.


def values(dense_type: DenseType, hf_config: dict[str, Any]) -> dict[str, Any]:
    """Convert the contents of a config.json to our settings, by field name (without sections).

    Raises:
        CheckpointError: a setting is not supported; the message lists all of them.
    """
    settings = {**dense_type.defaults, **hf_config}
    if dense_type.default_rope is not None and not settings.get("rope_scaling"):
        settings["rope_parameters"] = settings.get("rope_parameters") or dict(dense_type.default_rope)
    hidden_size, num_heads = settings["hidden_size"], settings["num_attention_heads"]
    head_size = settings.get("head_dim") or hidden_size // num_heads
    if dense_type.has_fixed_head_size:
        head_size = hidden_size // num_heads
    settings["head_dim"] = head_size
    special, unsupported = dense_type.values(settings)
    windows, unsupported_windows = _window_values(dense_type, settings)
    rotary, unsupported_rotary = rotary_values(
        settings,
        has_local=dense_type.has_local_rotary,
        has_windows="window_size" in windows,
        has_partial_rotary=dense_type.has_partial_rotary,
    )
    biases, unsupported_biases = dense_type.biases.to_ours(settings)
    unsupported = [
        *unsupported, *unsupported_windows, *unsupported_rotary, *unsupported_biases,
        *unsupported_mechanisms(settings),
    ]  # fmt: skip
    activation = settings.get("hidden_act") or next(iter(dense_type.activations))
    if activation not in dense_type.activations:
        unsupported.append(f"hidden_act {activation!r} (supported: {', '.join(dense_type.activations)})")
    if dense_type.has_fixed_head_size and hidden_size % num_heads:
        unsupported.append(f"hidden_size {hidden_size} with num_attention_heads {num_heads} (supported: a multiple)")
    if unsupported:
        raise CheckpointError(
            f"our decoders do not support these settings of {dense_type.model_type}: {'; '.join(unsupported)}"
        )
    return {
        **dense_type.settings,
        "num_layers": settings["num_hidden_layers"],
        "hidden_size": hidden_size,
        "num_attention_heads": num_heads,
        "num_query_groups": settings.get("num_key_value_heads") or num_heads,
        "kv_hidden_size": head_size,
        "ff_hidden_size": settings["intermediate_size"],
        "activation": dense_type.activations[activation],
        "layernorm_epsilon": settings[dense_type.epsilon_key],
        "max_position_embeddings": settings.get("max_position_embeddings", 2048),
        "vocab_size": settings["vocab_size"],
        "untie_embeddings": not settings.get("tie_word_embeddings", False),
        "attention_dropout": settings.get("attention_dropout") or 0.0,
        "hidden_dropout": settings.get(dense_type.hidden_dropout_key) or 0.0,
        "init_method_std": settings.get("initializer_range", 0.02),
        **biases,
        **windows,
        **rotary,
        **special,
    }


def _window_values(dense_type: DenseType, settings: Mapping[str, Any]) -> tuple[dict[str, Any], Problems]:
    """Return our window fields, empty without windows, and the window settings that we do not support."""
    num_layers, window_size = settings["num_hidden_layers"], settings.get("sliding_window")
    layer_types = settings.get("layer_types")
    if layer_types is None and dense_type.window == "layer":
        period = settings["sliding_window_pattern"]
        layer_types = layer_types_of([layer % period != 0 for layer in range(1, num_layers + 1)])
    if layer_types is None:
        layer_types = layer_types_of([bool(dense_type.window) and window_size is not None] * num_layers)
    if unsupported := layer_types_problems(layer_types, num_layers):
        return {}, unsupported
    has_window = [layer_type == SLIDING for layer_type in layer_types]
    if any(has_window) and dense_type.window != "layer" and not (dense_type.window and all(has_window)):
        supported = f"{SLIDING} in all layers" if dense_type.window else "none"
        return {}, [
            f"sliding_window {window_size!r} with a window in {sum(has_window)} layers (supported: {supported})"
        ]
    return window_settings(has_window, window_size)


def architecture(dense_type: DenseType) -> dict[str, Any]:
    """Return our settings, without sizes, that correspond to the defaults of the Hugging Face class."""
    all_settings = values(dense_type, dict(EXAMPLE_SIZES))
    return {name: all_settings[name] for name in ARCHITECTURE if name in all_settings}


def make_format(dense_type: DenseType) -> HFFormat:
    """Return the Hugging Face format of a type."""
    conversions = by_recipes(partial(recipes, dense_type), heights)
    conversions["from_ours"] = partial(_with_constants, conversions["from_ours"])
    return HFFormat(
        model_types=(dense_type.model_type,),
        problems=partial(problems, dense_type),
        fields=partial(fields, dense_type),
        values=partial(values, dense_type),
        **conversions,
        word="model.embed_tokens.weight",
        key_groups=(ROTARY_KEYS | {"original_max_position_embeddings"}, WINDOW_KEYS),
        ignored_names=ROTARY_BUFFERS,
        logit_tolerance=1e-5,  # Hugging Face computes norms and rotary angles in fp32
        architecture=partial(architecture, dense_type),
        fixed=dense_type.settings,
        constants=constants,
    )
