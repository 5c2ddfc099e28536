"""Hugging Face folders with all files of an instruct model, with tiny random models of transformers' classes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers

from megatron.checkpoint.huggingface.config import family_by_type, formats_of
from tests.helpers.chats import LLAMA3, write_tokenizer

COMMON_SIZES = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 24}
OPTIONAL_SIZES = {
    "num_key_value_heads": 2, "head_dim": 8, "d_kv": 8, "d_ff": 24, "num_local_experts": 4, "num_experts": 4,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8,
}  # fmt: skip
LATENT_SIZES = {
    "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 6, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
"""Sizes of models with multi-latent attention, which has as many key heads as query heads."""
SIZES_BY_TYPE: dict[str, dict[str, Any]] = {
    "dots1": {
        "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
    },
    "smollm3": {"no_rope_layers": [1, 0]},
    # transformers saves no weights of MTP layers, and an import without them changes the number to 0
    "deepseek_v3": {"num_nextn_predict_layers": 0},
    "glm4_moe": {"num_nextn_predict_layers": 0},
}  # fmt: skip
UNKNOWN_FIELDS = {"company": "Acmé", "pretraining_tp": 3, "serving": {"max_batch": 7, "ratio": 1e-05}, "odd_flag": None}


def write_instruct_folder(
    folder: Path, model_type: str = "llama", dtype: torch.dtype = torch.float32, **overrides: Any
) -> Path:
    """Write a random model of transformers' class with a tokenizer and all files of an instruct model."""
    write_tokenizer(folder)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    if model_type in ("t5", "mt5"):
        tokenizer.add_special_tokens(["</s>", *(f"<extra_id_{idx}>" for idx in reversed(range(20)))])
        tokenizer.save(str(folder / "tokenizer.json"))
    config_class: Any = transformers.CONFIG_MAPPING[model_type]
    fields = {config_class.attribute_map.get(name, name): size for name, size in COMMON_SIZES.items()}
    fields |= {name: size for name, size in OPTIONAL_SIZES.items() if hasattr(config_class, name)}
    if hasattr(config_class, "kv_lora_rank"):
        fields |= {name: size for name, size in LATENT_SIZES.items() if hasattr(config_class, name)}
    fields |= SIZES_BY_TYPE.get(model_type, {})
    torch.manual_seed(0)
    config = config_class(vocab_size=tokenizer.get_vocab_size(), pad_token_id=0, **fields)
    auto_class = formats_of(family_by_type()[model_type])[0].auto_class
    name = auto_class if isinstance(auto_class, str) else "AutoModelForPreTraining"
    getattr(transformers, name).from_config(config).to(dtype).save_pretrained(folder)
    config_dict = json.loads((folder / "config.json").read_text())
    ids = {name: tokenizer.token_to_id(name) for name in ("<|begin_of_text|>", "<|endoftext|>", "<|eot_id|>", "<pad>")}
    bos, end_of_text, turn_end, pad = ids.values()
    eos = tokenizer.token_to_id("</s>") if model_type in ("t5", "mt5") else [end_of_text, turn_end]
    config_dict |= {**UNKNOWN_FIELDS, "bos_token_id": bos, "eos_token_id": eos, "pad_token_id": pad, **overrides}
    # a different layout from ours, to verify that the text is preserved
    (folder / "config.json").write_text(json.dumps(config_dict, indent=4, ensure_ascii=True))
    generation = {"bos_token_id": bos, "eos_token_id": eos, "temperature": 0.6, "top_p": 0.9, "do_sample": True}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2))
    tokenizer_config = {
        "add_bos_token": True, "bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>", "pad_token": "<pad>",
        "unk_token": "<|im_start|>", "model_max_length": 131072, "tokenizer_class": "PreTrainedTokenizerFast",
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=3))
    (folder / "special_tokens_map.json").write_text('{\r\n"eos_token": "<|eot_id|>"}')
    (folder / "chat_template.jinja").write_text(LLAMA3)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}" + LLAMA3)
    return folder


def read_files(folder: Path) -> dict[str, bytes]:
    """Return the contents of all files without tensors, except the tokenizer's probe, which every export adds."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.suffix != ".safetensors" and path.name != "tokenizer_probe.json"
    }
