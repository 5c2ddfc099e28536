"""What the cached passes give is what the whole model gives on all tokens at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.models.common.decoder import DecoderModel
from megatron.models.common.generation import CachedDecoder, get_model_stage
from megatron.models.t5.generate import CachedT5
from megatron.models.t5.layers import T5ModelArgs
from megatron.models.t5.model import T5Model
from tests.helpers.cached_rows import (
    LENGTHS,
    NUM_STEPS,
    TOLERANCE,
    check_cached_logits,
    random_rows,
    relative_difference,
)
from tests.helpers.llama_samples import llama_model_args
from tests.helpers.model_samples import SMALL, fill_weights, small_model_args
from tests.models.common.test_features import FULL_MODELS

T5_ARGS = {**SMALL, "max_position_embeddings": 24, "enc_layers": 2, "dec_layers": 2}
SMALL_BUCKETS = {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 6}


@pytest.mark.parametrize(
    ("model_class", "args"),
    [
        (DecoderModel, small_model_args()),
        (DecoderModel, small_model_args(untie_embeddings=True)),
        (DecoderModel, llama_model_args()),
        (DecoderModel, llama_model_args(num_query_groups=1, untie_embeddings=False, rotary_scaling="linear")),
    ],
    ids=["gpt2", "gpt2, untied", "llama", "llama, one key, tied"],
)
@torch.no_grad()
def test_decoder_cache_matches_full_forward(model_class: Any, args: Any) -> None:
    model = fill_weights(model_class(args).double()).eval()
    rows = random_rows([length + NUM_STEPS for length in LENGTHS], seed=1)
    full_logits = [model(row[None], torch.arange(len(row))[None])[:, 0] for row in rows]  # each [s, v]
    reader = CachedDecoder(get_model_stage(model), max(LENGTHS) + NUM_STEPS)
    check_cached_logits(reader, rows, full_logits)


@pytest.mark.parametrize(
    "changes",
    [
        *FULL_MODELS.values(),
        {"window_size": 2, "window_attn_skip_freq": "2"},
        {"window_size": 3, "position_embedding_type": "alibi"},
        {"window_size": 1, "position_embedding_type": "none", "attn_logit_softcapping": 1.0, "clip_qkv": 0.5},
        {"position_embedding_type": "rope", "rotary_percent": 0.5, "rotary_scaling": "yarn", "qk_norm": "all"},
    ],
    ids=[*FULL_MODELS, "window", "window, alibi", "window, cap", "part, yarn"],
)
@torch.no_grad()
def test_decoder_feature_cache_matches_full_forward(changes: dict[str, Any]) -> None:
    model = fill_weights(DecoderModel(small_model_args(**{"max_position_embeddings": 24, **changes})).double()).eval()
    rows = random_rows([length + NUM_STEPS for length in LENGTHS], seed=1)
    full_logits = [model(row[None])[:, 0] for row in rows]  # each [s, v]
    check_cached_logits(CachedDecoder(get_model_stage(model), max(LENGTHS) + NUM_STEPS), rows, full_logits)


@pytest.mark.parametrize("width", [1, 3], ids=["a token a pass", "three tokens a pass"])
@pytest.mark.parametrize(
    "changes",
    [
        SMALL_BUCKETS,
        {**SMALL_BUCKETS, "untie_embeddings": True, "activation": "gated-gelu"},
        {"position_embedding_type": "learned"},
    ],
    ids=["relative", "untied", "learned"],
)
@torch.no_grad()
def test_t5_cache_matches_full_forward(changes: dict[str, Any], width: int) -> None:
    model = fill_weights(T5Model(T5ModelArgs(**{**T5_ARGS, **changes})).double()).eval()  # type: ignore[arg-type]
    sources, targets = random_rows([5, 9, 2], seed=2), random_rows([12] * 3, seed=3)
    full_logits = [model(s[None], a[None])[:, 0] for s, a in zip(sources, targets, strict=True)]  # each [s_d, v]
    reader = CachedT5(get_model_stage(model), [source.tolist() for source in sources], 12)
    active_rows = [0, 1, 2]
    for start in range(0, 12, width):
        if start == 6:
            reader.keep([1, 2])
            active_rows = [1, 2]
        tokens = torch.stack([targets[row][start : start + width] for row in active_rows])
        positions = torch.arange(start, start + width).expand(tokens.shape)
        logits = reader.read(tokens, positions, torch.full((len(active_rows),), width - 1))
        assert relative_difference(logits, [full_logits[row][start + width - 1] for row in active_rows]) < TOLERANCE
    assert reader.memory is None
