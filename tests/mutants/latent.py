"""Mutants of multi-latent attention, among them faults of other trainers.

| fault | known from |
|---|---|
| gradient of the shared rotated key is partial, or counted once per tensor rank | Megatron-LM #6839, AReno #496 |
| gradient of the latents' norms is counted once per tensor rank | TransformerEngine (ROCm) #715 |
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from megatron.mpu.mappings import copy_to_tensor_region
from megatron.mpu.shard import set_partial
from tests.mutants.mutant import mutant

TENSOR_RANKS = "tests/models/common/test_tensor_ranks.py::test_tensor_ranks_match_one_process[2-latents]"
LATENT = "tests/models/common/test_latent_attention.py"
SEQUENCE_PARALLEL = f"{LATENT}::test_sequence_parallel_matches_one_process"
FORMULA = "tests/models/common/test_features.py::test_full_models_match_formulas[{}-DeepSeek-V2]"
HUGGING_FACE = (
    "tests/models/llama/test_latent_against_huggingface.py"
    "::test_logits_loss_and_gradients_match_hugging_face[deepseek_v3]"
)
MINICPM3 = HUGGING_FACE.replace("deepseek_v3", "minicpm3")
CONTEXT = "tests/models/common/test_context_parallel.py::test_every_family_matches_one_process_with_same_masks"
CACHE = "tests/models/common/test_cache.py::test_decoder_feature_cache_matches_full_forward[DeepSeek-V2]"


@mutant("megatron.models.common.latent_attention:LatentAttention.enter", TENSOR_RANKS)
def gradient_of_the_shared_rotated_key_is_partial(original: Any) -> Any:
    def enter(self: Any, parts: list[torch.Tensor]) -> list[torch.Tensor]:
        latent, _, *queries = original(self, parts)
        return [latent, parts[1], *queries]

    return enter


@mutant("megatron.models.common.latent_attention:LatentAttention.enter", TENSOR_RANKS)
def gradient_of_the_shared_rotated_key_is_counted_by_every_tensor_rank(original: Any) -> Any:
    def enter(self: Any, parts: list[torch.Tensor]) -> list[torch.Tensor]:
        latent, rotated_key, *queries = original(self, parts)
        return [latent, copy_to_tensor_region(rotated_key, self.parallel.group), *queries]

    return enter


@mutant("megatron.models.common.latent_attention:make_latent_norm", TENSOR_RANKS)
def gradients_of_latent_norms_are_counted_by_every_tensor_rank(original: Any) -> Any:
    def make(*args: Any) -> Any:
        norm = original(*args)
        for parameter in norm.parameters():
            set_partial(parameter)
        return norm

    return make


@mutant("megatron.models.common.latent_attention:make_latent_norm", SEQUENCE_PARALLEL)
def gradients_of_latent_norms_lack_the_tokens_of_other_ranks(original: Any) -> Any:
    return lambda args, parallel, size: original(args, replace(parallel, sequence_parallel=False), size)


@mutant("megatron.config.latent_attention:LatentFeatures.latent_softmax_scale", FORMULA)
def yarn_term_of_the_scores_is_not_squared(original: Any) -> Any:
    return property(lambda self: original.fget(self) / self._yarn_term(self.mscale_all_dim))


@mutant("megatron.config.latent_attention:LatentFeatures.latent_rotary_factor", FORMULA)
def rotated_parts_ignore_mscale(original: Any) -> Any:
    return property(lambda self: 1.0)


@mutant("megatron.config.latent_attention:LatentFeatures.latent_rotary_factor", MINICPM3)
def longrope_does_not_scale_the_rotated_parts(original: Any) -> Any:
    return property(lambda self: original.fget(self) or 1.0)


@mutant("megatron.models.common.rotary_rows:RotaryRows.to_ours", HUGGING_FACE)
def rotated_rows_keep_the_order_of_the_file(original: Any) -> Any:
    return lambda self, rows: rows


@mutant("megatron.models.common.latent_context_attention:_pack", CONTEXT)
def context_ranks_exchange_rotated_keys_of_the_first_token(original: Any) -> Any:
    return lambda latent, rotated_key: original(latent, rotated_key[:, :, :1].expand_as(rotated_key))


@mutant("megatron.models.common.latent_attention:KeyValueProjection.split_weight", CACHE)
def cached_latents_use_the_weights_of_other_heads(original: Any) -> Any:
    return lambda self: tuple(weight.flip(0) for weight in original(self))
