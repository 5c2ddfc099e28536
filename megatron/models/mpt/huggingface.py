"""Bit-exact conversion of MPT weights and settings to and from Hugging Face's ``MptForCausalLM``.

| ours | Hugging Face | change |
|---|---|---|
| embedding.word.weight [v, h] | transformer.wte.weight | |
| layers.{i}.input_norm.weight | transformer.blocks.{i}.norm_1.weight | |
| layers.{i}.attention.query_key_value.weight | transformer.blocks.{i}.attn.Wqkv.weight | [q, k, v] -> per head |
| layers.{i}.attention.dense.weight | transformer.blocks.{i}.attn.out_proj.weight | |
| layers.{i}.post_attention_norm.weight | transformer.blocks.{i}.norm_2.weight | |
| layers.{i}.mlp.up.weight, .down.weight | transformer.blocks.{i}.ffn.up_proj.weight, .down_proj.weight | |
| final_norm.weight | transformer.norm_f.weight | |
| head.weight (only when untied) | lm_head.weight | |

Effect of config.json settings on the Hugging Face model and on ours:

| setting | Hugging Face model | our model |
|---|---|---|
| alibi_bias_max | ignored, always 8 | used, as in MosaicML's program; ``prepare`` sets it in the Hugging Face model |
| attn_pdrop | dropout rate everywhere; must be an integer | written as 0; ``attention_dropout`` holds our rate |
| resid_pdrop, emb_pdrop | ignored | our hidden_dropout |
| expansion_ratio | ignored, always 4 | must be 4 |
| alibi false, learned_pos_emb without alibi, no_bias false, logit_scale | ignored | rejected |
| prefix_lm, qk_ln, attn_uses_sequence_id, softmax_scale | only softmax_scale is used | rejected |
| norm_type rmsnorm, rope, sliding_window_size, ffn_config | ignored | rejected |
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from megatron.config import Config
from megatron.errors import CheckpointError
from megatron.models.common.huggingface import HFFormat, WeightMapping, by_recipes, unsupported_settings

if TYPE_CHECKING:
    import torch

_LAYER_NAMES = {
    "input_norm": "norm_1",
    "attention.query_key_value": "attn.Wqkv",
    "attention.dense": "attn.out_proj",
    "post_attention_norm": "norm_2",
    "mlp.up": "ffn.up_proj",
    "mlp.down": "ffn.down_proj",
}
_HF_WORD = "transformer.wte.weight"
_FIXED_SETTINGS = {"no_bias": True, "logit_scale": None, "embedding_fraction": 1.0, "expansion_ratio": 4}
_SUPPORTED_NORMS = ("low_precision_layernorm", "layernorm")  # differ only in the dtype of the computation
_FIXED_ATTENTION_SETTINGS = {
    "alibi": True,
    "attn_type": "multihead_attention",
    "prefix_lm": False,
    "qk_ln": False,
    "attn_uses_sequence_id": False,
}
_ABSENT_ATTENTION_SETTINGS = {"rope": False, "sliding_window_size": -1}  # may be present in files of MosaicML's program


def recipes(config: Config) -> dict[str, WeightMapping]:
    """Return weight mappings by our names."""
    mappings = {
        "embedding.word.weight": WeightMapping((_HF_WORD,)),
        "final_norm.weight": WeightMapping(("transformer.norm_f.weight",)),
    }
    for i in range(config.model.num_layers):
        for our_name, hf_name in _LAYER_NAMES.items():
            mappings[f"layers.{i}.{our_name}.weight"] = WeightMapping((f"transformer.blocks.{i}.{hf_name}.weight",))
        query_key_value = f"layers.{i}.attention.query_key_value.weight"
        mappings[query_key_value] = WeightMapping(
            mappings[query_key_value].hf_names, num_blocks=config.model.num_attention_heads, num_packed=3
        )
    if config.model.untie_embeddings:
        mappings["head.weight"] = WeightMapping(("lm_head.weight",))
    return mappings


def problems(config: Config) -> Iterator[str]:
    """Yield a message for each setting in ``config`` that the format cannot express."""
    model = config.model
    fixed = {"position_embedding_type": "alibi", "norm_bias": False, "num_query_groups": model.num_attention_heads}
    yield from unsupported_settings(model, fixed, free=("clip_qkv",))
    if model.hidden_bias:
        yield "--hidden-bias is not supported"
    if model.activation != "gelu":
        yield f"--activation must be gelu, got {model.activation}"
    if model.attention_size != model.hidden_size:
        yield (
            "--num-attention-heads times --kv-hidden-size must equal --hidden-size, got "
            f"{model.num_attention_heads} heads of {model.kv_hidden_size} for {model.hidden_size}"
        )
    if model.ff_hidden_size != 4 * model.hidden_size:
        yield f"--ff-hidden-size must be 4 times --hidden-size, got {model.ff_hidden_size} for {model.hidden_size}"


def fields(config: Config) -> dict[str, Any]:
    """Convert ``config`` to the contents of config.json."""
    model = config.model
    return {
        "architectures": ["MptForCausalLM"],
        "model_type": "mpt",
        "vocab_size": model.vocab_size,
        "max_seq_len": model.max_position_embeddings,
        "d_model": model.hidden_size,
        "n_layers": model.num_layers,
        "n_heads": model.num_attention_heads,
        "layer_norm_epsilon": model.layernorm_epsilon,
        "initializer_range": model.init_method_std,
        "resid_pdrop": model.hidden_dropout,
        "emb_pdrop": model.hidden_dropout,
        "attention_dropout": model.attention_dropout,
        "learned_pos_emb": False,
        "tie_word_embeddings": not model.untie_embeddings,
        **_FIXED_SETTINGS,
        "attn_config": {
            **_FIXED_ATTENTION_SETTINGS,
            "alibi_bias_max": config.model.alibi_bias_max,
            "attn_impl": "torch",
            "attn_pdrop": 0,
            "clip_qkv": config.model.clip_qkv or None,
            "softmax_scale": None,
        },
    }


def values(hf_config: dict[str, Any]) -> dict[str, Any]:
    """Convert a config.json's contents to our settings, by field name (without sections).

    Raises:
        CheckpointError: a setting is not supported; the message lists all of them.
    """
    attn_config = {key: value for key, value in (hf_config.get("attn_config") or {}).items() if value is not None}
    hidden_size, num_heads = hf_config["d_model"], hf_config["n_heads"]
    unsupported = list(_differences(hf_config, _FIXED_SETTINGS))
    unsupported += [
        f"attn_config.{difference}"
        for difference in _differences(attn_config, _FIXED_ATTENTION_SETTINGS | _ABSENT_ATTENTION_SETTINGS)
    ]
    if hf_config.get("norm_type", _SUPPORTED_NORMS[0]) not in _SUPPORTED_NORMS:
        unsupported.append(f"norm_type {hf_config['norm_type']!r} (supported: {', '.join(_SUPPORTED_NORMS)})")
    ffn_config = {key: value for key, value in (hf_config.get("ffn_config") or {}).items() if value is not None}
    if {key: value for key, value in ffn_config.items() if key != "fc_type"} not in ({}, {"ffn_type": "mptmlp"}):
        unsupported.append(f"ffn_config {ffn_config!r} (supported: only ffn_type 'mptmlp')")
    softmax_scale, default_scale = attn_config.get("softmax_scale"), (hidden_size / num_heads) ** -0.5
    if softmax_scale is not None and abs(softmax_scale - default_scale) > 1e-6 * default_scale:
        unsupported.append(
            f"attn_config.softmax_scale {softmax_scale} (supported: {default_scale:.6g}, 1 / sqrt(head size))"
        )
    if unsupported:
        raise CheckpointError(f"our MPT does not support these settings: {'; '.join(unsupported)}")
    return {
        "num_layers": hf_config["n_layers"],
        "hidden_size": hidden_size,
        "num_attention_heads": num_heads,
        "vocab_size": hf_config["vocab_size"],
        "max_position_embeddings": hf_config.get("max_seq_len", 2048),
        "activation": "gelu",
        "layernorm_epsilon": hf_config.get("layer_norm_epsilon", 1e-5),
        "untie_embeddings": not hf_config.get("tie_word_embeddings", True),
        "hidden_dropout": hf_config.get("resid_pdrop", 0.0),
        "attention_dropout": hf_config.get("attention_dropout", attn_config.get("attn_pdrop", 0.0)),
        "init_method_std": hf_config.get("initializer_range", 0.02),
        "alibi_bias_max": attn_config.get("alibi_bias_max", 8),
        "clip_qkv": float(attn_config.get("clip_qkv", 0.0)),
    }


def prepare(hf_model: Any, config: Config) -> None:
    """Use the configured ``alibi_bias_max`` in the Hugging Face model instead of 8."""
    build_original = hf_model.transformer.build_mpt_alibi_tensor

    def build_mpt_alibi_tensor(*args: Any, **kwargs: Any) -> torch.Tensor:
        return build_original(*args, **{**kwargs, "alibi_bias_max": config.model.alibi_bias_max})

    hf_model.transformer.build_mpt_alibi_tensor = build_mpt_alibi_tensor


def _differences(settings: dict[str, Any], required_values: dict[str, Any]) -> Iterator[str]:
    for key, required in required_values.items():
        if settings.get(key, required) != required:
            yield f"{key} {settings[key]!r} (supported: {required!r})"


FORMAT = HFFormat(
    model_types=("mpt",),
    problems=problems,
    fields=fields,
    values=values,
    **by_recipes(recipes),
    word=_HF_WORD,
    logit_tolerance=1e-5,  # Hugging Face computes the softmax in fp32
    model_logits=lambda model, tokens: model(tokens).transpose(0, 1),
    patch_hf_model=prepare,
)
FORMATS = (FORMAT,)
