"""Mistakes in the features of a decoder: windows, caps, rotary positions, norms and their costs."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_FEATURES = "tests/models/common/test_features.py"
_ONE = f"{_FEATURES}::test_a_feature_is_its_formula"
_FULL = f"{_FEATURES}::test_models_of_many_features_are_their_formulas"
_CACHED = "tests/models/common/test_cache.py::test_a_decoder_of_many_features_goes_on_from_its_cache"
_COSTS = "tests/models/common/test_feature_costs.py"
_FORMER = "tests/checkpoint/test_former.py::test_a_checkpoint_of_before_is_of_the_model_that_it_was"
_CONFIG = "tests/config/test_decoder.py"

DECODER = (
    Mutant(
        "a window has one token too few",
        "megatron/models/common/masks.py",
        "(behind <= self.window)",
        "(behind < self.window)",
        (f"{_ONE}[window]",),
    ),
    Mutant(
        "a window with ALiBi has one token too few",
        "megatron/models/common/masks.py",
        "behind > self.window, lowest",
        "behind >= self.window, lowest",
        (f"{_ONE}[alibi and a window]",),
    ),
    Mutant(
        "each second layer has the window in place of the others",
        "megatron/config/decoder.py",
        "tuple(number % int(text) != 0 for",
        "tuple(number % int(text) == 0 for",
        (f"{_ONE}[window by number]",),
    ),
    Mutant(
        "a layer with a window takes the mask of those without",
        "megatron/models/common/transformer.py",
        "window_mask if self.has_window else mask",
        "mask",
        (f"{_ONE}[window by list]",),
    ),
    Mutant(
        "scores are capped behind the mask",
        "megatron/ops/softcapped_attention.py",
        "    return torch.softmax(scores, dim=-1).view_as(tangents), tangents\n",
        "    return torch.softmax(cap * torch.tanh(scores / cap), dim=-1).view_as(tangents), tangents\n",
        (f"{_ONE}[capped scores]",),
    ),
    Mutant(
        "the gradient of scores passes the cap as if it were not there",
        "megatron/ops/softcapped_attention.py",
        "of_scores.mul_(1.0 - tangents.square_()).mul_(scale)",
        "of_scores.mul_(scale)",
        (f"{_ONE}[capped scores]",),
    ),
    Mutant(
        "capped logits in chunks have the gradient of others",
        "megatron/mpu/linear_cross_entropy.py",
        "            wide.mul_(begun.slopes)\n",
        "            pass\n",
        (f"{_FULL}[{{'loss_chunk_tokens': 3}}-Gemma 3]",),
    ),
    Mutant(
        "layers with a window turn by the base of the others",
        "megatron/models/common/attention.py",
        "sizes.local_rotary if has_window(sizes, layer) else sizes.rotary",
        "sizes.rotary",
        (f"{_ONE}[rope, local base]",),
    ),
    Mutant(
        "layers with a window scale their positions too",
        "megatron/models/common/model_args.py",
        'base=self.rotary_local_base, scaling="none")',
        "base=self.rotary_local_base)",
        (f"{_ONE}[rope, local base]",),
    ),
    Mutant(
        "yarn leaves the scores as they are",
        "megatron/ops/positions.py",
        "        if rotary.multiplier != 1.0:\n",
        "        if False:\n",
        (f"{_ONE}[rope, yarn]",),
    ),
    Mutant(
        "a part that turns has the frequencies of the whole head",
        "megatron/ops/positions.py",
        "plain = [self.base ** (-2.0 * pair / size)",
        "plain = [self.base ** (-2.0 * pair / self.head_size)",
        (f"{_ONE}[rope of a part]",),
    ),
    Mutant(
        "keys are normed with the weights of queries",
        "megatron/models/common/attention.py",
        "self.query_norm(query), self.key_norm(key)",
        "self.query_norm(query), self.query_norm(key)",
        (f"{_ONE}[q, k norms]",),
    ),
    Mutant(
        "all heads are normed each by itself",
        "megatron/models/common/norms.py",
        "        own = x.sum(dim=(1, 3), keepdim=True)\n",
        "        own = x.sum(dim=3, keepdim=True) * x.shape[1]\n",
        (f"{_ONE}[q, k norms of all heads]",),
    ),
    Mutant(
        "a norm behind a part is left out of the feed-forward half",
        "megatron/models/common/transformer.py",
        "part = part if self.mlp_output_norm is None else self.mlp_output_norm(part)",
        "part = part",
        (f"{_ONE}[norms on both sides]",),
    ),
    Mutant(
        "the embedding is scaled behind its norm",
        "megatron/models/common/language_model.py",
        "        return x if self.norm is None else self.norm(x)\n",
        "        return x if self.norm is None else self.norm(x) * (self.scale or 1.0)\n",
        (f"{_FEATURES}::test_a_scaled_embedding_is_scaled_ahead_of_its_norm",),
    ),
    Mutant(
        "the size of a head is that of the hidden states over the heads",
        "megatron/models/common/attention.py",
        "self.head_size = sizes.kv_hidden_size",
        "self.head_size = sizes.hidden_size // sizes.num_attention_heads",
        (f"{_ONE}[groups]",),
        refuses=True,
    ),
    Mutant(
        "a cached pass has no window",
        "megatron/models/common/generation.py",
        "x.dtype, bool(unit.has_window))",
        "x.dtype)",
        (_CACHED,),
    ),
    Mutant(
        "the gradient of a head's norm is that of a rank's own heads",
        "megatron/models/common/norms.py",
        "            set_partial(parameter)\n",
        "            pass\n",
        ("tests/models/common/test_tensor_ranks.py::test_tensor_ranks_together_equal_one_process[2-q/k norm, head]",),
    ),
    Mutant(
        "the squares of all heads are those of a rank's own",
        "megatron/models/common/norms.py",
        "reduce_from_tensor_region(own, self.group)",
        "own",
        ("tests/models/common/test_tensor_ranks.py::test_tensor_ranks_together_equal_one_process[2-q/k norm, all]",),
    ),
    Mutant(
        "the plan counts no norms behind the parts",
        "megatron/models/common/decoder_cost.py",
        'return 4 if self.sizes.norm_placement == "both" else 2',
        "return 2",
        (f"{_COSTS}::test_parameters_are_those_of_the_model_with_every_feature",),
    ),
    Mutant(
        "the plan counts the scores beyond a window",
        "megatron/models/common/decoder_cost.py",
        "return [seen(self.seq_length, window) for window in windows]",
        "return [seen(self.seq_length, 0) for window in windows]",
        (f"{_COSTS}::test_a_window_has_the_scores_that_lie_in_it",),
    ),
    Mutant(
        "settings of before are compared with the defaults of GPT-2",
        "megatron/checkpoint/former.py",
        " | dict(FAMILIES[family].config.DEFAULTS)",
        "",
        (f"{_FORMER}[llama]",),
    ),
    Mutant(
        "a pattern of windows of another length is taken",
        "megatron/config/experts.py",
        " or len(found) != num_layers:",
        ":",
        (f"{_CONFIG}::test_a_pattern_of_windows_that_cannot_be_read_is_refused",),
    ),
)
