"""Multi-token prediction layers in Hugging Face folders: names of their tensors. No torch.

Layer k, counted from 0, of a decoder with L layers:

| ours | DeepSeek-V3, GLM 4.5 (i = L + k) | Qwen 3.5 |
|---|---|---|
| mtp.k.enorm | model.layers.i.enorm | mtp.pre_fc_norm_embedding |
| mtp.k.hnorm | model.layers.i.hnorm | mtp.pre_fc_norm_hidden |
| mtp.k.eh_proj | model.layers.i.eh_proj | mtp.fc |
| mtp.k.layer | model.layers.i | mtp.layers.k |
| mtp.k.final_norm | model.layers.i.shared_head.norm | mtp.norm |
| embedding.word (a copy) | model.layers.i.embed_tokens | |
| the head (a copy) | model.layers.i.shared_head.head | |

The classes of transformers do not read these tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron.models.common.huggingface import WeightMapping

PREFIX = "mtp."
"""Prefix of our names of these weights."""


@dataclass(frozen=True, kw_only=True)
class MTPNames:
    """Names of the multi-token prediction layers in the folders of a model type; {} is the index of the layer.

    Args:
        config_key: config.json key of the number of layers.
        layer: name of the transformer layer.
        enorm, hnorm, eh_proj, final_norm: names of the other weights, without ".weight".
        word_copy, head_copy: names of the copies of word embedding and head; "": there are none.
        follows_layers: layers are counted from the number of decoder layers, not from 0.
    """

    config_key: str
    layer: str
    enorm: str
    hnorm: str
    eh_proj: str
    final_norm: str
    word_copy: str = ""
    head_copy: str = ""
    follows_layers: bool = False

    @property
    def max_layers(self) -> int | None:
        """Maximum number of layers that the names can express; None: no limit."""
        return None if "{}" in self.enorm else 1

    def layer_idx(self, model: Any, depth: int) -> int:
        """Return the index in names of layer ``depth`` of ``model``, a ``ModelConfig``."""
        return depth + (model.num_layers if self.follows_layers else 0)

    def recipes(self, model: Any) -> dict[str, WeightMapping]:
        """Return the mapping of each weight outside of the transformer layers, by name."""
        return {
            f"{PREFIX}{depth}.{part}.weight": WeightMapping(
                (f"{getattr(self, part).format(self.layer_idx(model, depth))}.weight",)
            )
            for depth in range(model.mtp_num_layers)
            for part in ("enorm", "hnorm", "eh_proj", "final_norm")
        }

    def copies(self, model: Any, word: str, head: str) -> dict[str, str]:
        """Return the name of each copy and of the tensor that it repeats: ``word`` or ``head``."""
        originals = {self.word_copy: word, self.head_copy: head if model.untie_embeddings else word}
        return {
            f"{name.format(self.layer_idx(model, depth))}.weight": original
            for depth in range(model.mtp_num_layers)
            for name, original in originals.items()
            if name
        }

    def problems(self, model: Any) -> Iterator[str]:
        """Yield a message if the names cannot express the layers of ``model``."""
        if self.max_layers is not None and model.mtp_num_layers > self.max_layers:
            yield f"--mtp-num-layers must be at most {self.max_layers}, got {model.mtp_num_layers}"


_LAYER = "model.layers.{}"
DEEPSEEK = MTPNames(
    config_key="num_nextn_predict_layers",
    layer=_LAYER,
    enorm=f"{_LAYER}.enorm",
    hnorm=f"{_LAYER}.hnorm",
    eh_proj=f"{_LAYER}.eh_proj",
    final_norm=f"{_LAYER}.shared_head.norm",
    word_copy=f"{_LAYER}.embed_tokens",
    head_copy=f"{_LAYER}.shared_head.head",
    follows_layers=True,
)
QWEN = MTPNames(
    config_key="mtp_num_hidden_layers",
    layer="mtp.layers.{}",
    enorm="mtp.pre_fc_norm_embedding",
    hnorm="mtp.pre_fc_norm_hidden",
    eh_proj="mtp.fc",
    final_norm="mtp.norm",
)


def layer_names(names: MTPNames | None, model: Any) -> Iterator[tuple[int, str, str]]:
    """Yield (layer index, our name, Hugging Face name) for each transformer layer.

    For a multi-token prediction layer, the index is that of the last decoder layer, which has the same structure.

    Args:
        names: names of the multi-token prediction layers; None: the model type has none.
    """
    for idx in range(model.num_layers):
        yield idx, f"layers.{idx}", f"model.layers.{idx}"
    for depth in range(model.mtp_num_layers if names is not None else 0):
        assert names is not None
        hf_layer = names.layer.format(names.layer_idx(model, depth))
        yield model.num_layers - 1, f"{PREFIX}{depth}.layer", hf_layer


def has_mtp(recipes: Mapping[str, WeightMapping]) -> bool:
    """Return True if the mappings of a model include multi-token prediction layers."""
    return any(name.startswith(PREFIX) for name in recipes)
