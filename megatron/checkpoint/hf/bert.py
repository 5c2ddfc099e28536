"""Weights and settings of Hugging Face's BERT under our names and back.

| ours | theirs |
|---|---|
| embedding.word, .position, .token_type, .norm | bert.embeddings.word_embeddings, position_embeddings, ... |
| layers.i.attention.query_key_value, by head | bert.encoder.layer.i.attention.self.query, key, value |
| layers.i.post_attention_norm, post_mlp_norm | bert.encoder.layer.i.attention.output.LayerNorm, output.LayerNorm |
| transform, head.bias | cls.predictions.transform, cls.predictions.bias, of which decoder.bias is a copy |
| next_sentence.pooler, .classifier | bert.pooler.dense, cls.seq_relationship |

With the two heads it is a ``BertForPreTraining``, with ``--bert-no-binary-head`` a ``BertForMaskedLM``.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron.checkpoint.hf.recipes import Recipe
from megatron.config import Config

_WORD, _THEIR_WORD = "embedding.word.weight", "bert.embeddings.word_embeddings.weight"
_THEIR_HEAD, _THEIR_BIAS = "cls.predictions.decoder.weight", "cls.predictions.bias"
_TABLES = {"position": "position_embeddings", "token_type": "token_type_embeddings"}
_TOP = {
    "embedding.norm": "bert.embeddings.LayerNorm",
    "transform.dense": "cls.predictions.transform.dense",
    "transform.norm": "cls.predictions.transform.LayerNorm",
}
_SECOND_HEAD = {"next_sentence.pooler": "bert.pooler.dense", "next_sentence.classifier": "cls.seq_relationship"}
_LAYER = {
    "attention.dense": "attention.output.dense",
    "post_attention_norm": "attention.output.LayerNorm",
    "mlp.up": "intermediate.dense",
    "mlp.down": "output.dense",
    "post_mlp_norm": "output.LayerNorm",
}


def recipes(config: Config) -> dict[str, Recipe]:
    """Return how each of our weights is made of theirs, by our logical name."""
    model = config.model
    return dict(_recipes(model.num_layers, model.num_attention_heads, has_both=config.bert.binary_head))


def _recipes(num_layers: int, heads: int, *, has_both: bool) -> Iterator[tuple[str, Recipe]]:
    yield _WORD, Recipe((_THEIR_WORD,))
    for ours, theirs in _TABLES.items():
        yield f"embedding.{ours}.weight", Recipe((f"bert.embeddings.{theirs}.weight",))
    yield "head.bias", Recipe((_THEIR_BIAS,))
    for kind in ("weight", "bias"):
        for ours, theirs in (_TOP | (_SECOND_HEAD if has_both else {})).items():
            yield f"{ours}.{kind}", Recipe((f"{theirs}.{kind}",))
        for layer in range(num_layers):
            at, there = f"layers.{layer}", f"bert.encoder.layer.{layer}"
            three = tuple(f"{there}.attention.self.{part}.{kind}" for part in ("query", "key", "value"))
            yield f"{at}.attention.query_key_value.{kind}", Recipe(three, blocks=heads)
            for ours, theirs in _LAYER.items():
                yield f"{at}.{ours}.{kind}", Recipe((f"{there}.{theirs}.{kind}",))
