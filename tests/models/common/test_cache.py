"""What the cached passes give is what the whole model gives on all tokens at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.models.common.decoder import DecoderModel
from megatron.models.common.generation import DecoderReader, stage_of
from megatron.models.t5.generate import T5Reader
from megatron.models.t5.layers import T5ModelArgs
from megatron.models.t5.model import T5Model
from tests.helpers.cached_rows import LENGTHS, ROUNDING, STEPS, check_passes, differ, rows_of
from tests.helpers.llama_samples import llama_sizes
from tests.helpers.model_samples import SMALL, filled, small_sizes
from tests.models.common.test_features import FULL

T5 = {**SMALL, "max_position_embeddings": 24, "enc_layers": 2, "dec_layers": 2}
NEAR = {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 6}


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        (DecoderModel, small_sizes()),
        (DecoderModel, small_sizes(untie_embeddings=True)),
        (DecoderModel, llama_sizes()),
        (DecoderModel, llama_sizes(num_query_groups=1, untie_embeddings=False, rotary_scaling="linear")),
    ],
    ids=["gpt2", "gpt2, untied", "llama", "llama, one key, tied"],
)
@torch.no_grad()
def test_a_decoder_with_a_cache_and_rows_of_any_length_equals_each_row_alone_without_one(kind: Any, sizes: Any) -> None:
    model = filled(kind(sizes).double()).eval()
    rows = rows_of([length + STEPS for length in LENGTHS], seed=1)
    alone = [model(row[None], torch.arange(len(row))[None])[:, 0] for row in rows]  # each [s, v]
    reader = DecoderReader(stage_of(model), max(LENGTHS) + STEPS)
    check_passes(reader, rows, alone)


@pytest.mark.parametrize(
    "changes",
    [
        *FULL.values(),
        {"window_size": 2, "window_attn_skip_freq": "2"},
        {"window_size": 3, "position_embedding_type": "alibi"},
        {"window_size": 1, "position_embedding_type": "none", "attn_logit_softcapping": 1.0, "clip_qkv": 0.5},
        {"position_embedding_type": "rope", "rotary_percent": 0.5, "rotary_scaling": "yarn", "qk_norm": "all"},
    ],
    ids=[*FULL, "window", "window, alibi", "window, cap", "part, yarn"],
)
@torch.no_grad()
def test_a_decoder_of_many_features_goes_on_from_its_cache(changes: dict[str, Any]) -> None:
    model = filled(DecoderModel(small_sizes(**{"max_position_embeddings": 24, **changes})).double()).eval()
    rows = rows_of([length + STEPS for length in LENGTHS], seed=1)
    alone = [model(row[None])[:, 0] for row in rows]  # each [s, v]
    check_passes(DecoderReader(stage_of(model), max(LENGTHS) + STEPS), rows, alone)


@pytest.mark.parametrize("width", [1, 3], ids=["a token a pass", "three tokens a pass"])
@pytest.mark.parametrize(
    "changes",
    [NEAR, {**NEAR, "untie_embeddings": True, "activation": "gated-gelu"}, {"position_embedding_type": "learned"}],
    ids=["relative", "untied", "learned"],
)
@torch.no_grad()
def test_t5_with_a_cache_and_sources_of_any_length_equals_each_alone_without_one(
    changes: dict[str, Any], width: int
) -> None:
    model = filled(T5Model(T5ModelArgs(**{**T5, **changes})).double()).eval()  # type: ignore[arg-type]
    sources, answers = rows_of([5, 9, 2], seed=2), rows_of([12] * 3, seed=3)
    alone = [model(s[None], a[None])[:, 0] for s, a in zip(sources, answers, strict=True)]  # each [s_d, v]
    reader = T5Reader(stage_of(model), [source.tolist() for source in sources], 12)
    held = [0, 1, 2]
    for start in range(0, 12, width):
        if start == 6:
            reader.keep([1, 2])
            held = [1, 2]
        tokens = torch.stack([answers[row][start : start + width] for row in held])
        positions = torch.arange(start, start + width).expand(tokens.shape)
        found = reader.read(tokens, positions, torch.full((len(held),), width - 1))
        assert differ(found, [alone[row][start + width - 1] for row in held]) < ROUNDING
    assert reader.memory is None
