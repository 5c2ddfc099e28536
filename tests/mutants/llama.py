"""Mistakes in LLaMA: what turns and how far, who shares a key, under the cache, on the way to Hugging Face."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_ROTARY = "tests/ops/test_rotary.py"
_TURNS = f"{_ROTARY}::test_a_number_and_the_one_half_a_head_away_turn_by_position_times_frequency"
_THEIRS = "tests/models/llama/test_against_huggingface.py"
_SAME = f"{_THEIRS}::test_the_same_weights_give_the_same_logits_loss_and_gradients[1-fp64]"
_CACHED = (
    "tests/models/common/test_cache.py::"
    "test_a_decoder_with_a_cache_and_rows_of_any_length_equals_each_row_alone_without_one"
)
_PARITY = "tests/parity/test_llama.py::test_fp64_equals_one_process"
_ACTS = "tests/parity/test_llama.py::test_each_flag_makes_another_model_or_batch"
_FORM = "tests/models/llama/test_huggingface.py"
_MODEL, _ARITHMETIC, _PIPE = (
    "megatron/models/common/attention.py",
    "megatron/ops/positions.py",
    "megatron/models/common/pipeline.py",
)
_HF = "megatron/models/llama/huggingface.py"

LLAMA = (
    Mutant(
        "queries and keys turn the other way",
        _ARITHMETIC,
        "(first * cosine - second * sine, second * cosine + first * sine)",
        "(first * cosine + second * sine, second * cosine - first * sine)",
        (_TURNS,),
    ),
    Mutant(
        "neighbouring numbers turn in place of halves",
        _ARITHMETIC,
        "x.to(cosine.dtype).chunk(2, dim=-1)",
        "x.to(cosine.dtype).unflatten(-1, (-1, 2)).unbind(-1)",
        (_TURNS,),
    ),
    Mutant(
        "angles are in fp32",
        _ARITHMETIC,
        "torch.arange(rows, dtype=torch.float64).unsqueeze(1) * speeds",
        "torch.arange(rows, dtype=torch.float32).unsqueeze(1) * speeds.float()",
        (f"{_ROTARY}::test_long_positions_are_exact[131071]",),
    ),
    Mutant(
        "linear scaling brings positions further apart",
        _ARITHMETIC,
        "frequency / self.factor for",
        "frequency * self.factor for",
        (f"{_ROTARY}::test_frequencies_and_turns_are_hugging_faces[linear]",),
    ),
    Mutant(
        "llama3 slows the high frequencies",
        _ARITHMETIC,
        "(kept + (1.0 - kept) / self.factor)",
        "(1.0 - kept + kept / self.factor)",
        (f"{_ROTARY}::test_frequencies_between_the_two_of_llama3_lie_between",),
    ),
    Mutant(
        "given positions are passed over",
        _ARITHMETIC,
        "    if positions is None:\n",
        "    if positions is None or True:\n",
        (f"{_ROTARY}::test_given_positions_turn_as_those_of_a_whole_sequence[0]",),
    ),
    Mutant(
        "a key with dropout serves every second query in place of neighbours",
        "megatron/ops/attention.py",
        "part.unsqueeze(2).expand(-1, -1, heads // part.shape[1], -1, -1).flatten(1, 2)",
        "part.unsqueeze(1).expand(-1, heads // part.shape[1], -1, -1, -1).flatten(1, 2)",
        (f"{_ROTARY}::test_a_key_serves_its_neighbouring_queries[True-None]",),
    ),
    Mutant(
        "keys are not turned",
        _MODEL,
        "rotated(query, cosine, sine), rotated(key, cosine, sine)",
        "rotated(query, cosine, sine), key",
        (_SAME,),
    ),
    Mutant(
        "keys and values change places within a group",
        _MODEL,
        "key, value = groups[:, :, :, each], groups",
        "value, key = groups[:, :, :, each], groups",
        (_SAME,),
    ),
    Mutant(
        "positions count from 0 in each pass of generation",
        _MODEL,
        "positions, longest = cache.slots.positions, cache.slots.stop",
        "positions, longest = None, cache.slots.stop",
        (f"{_CACHED}[llama]",),
    ),
    Mutant(
        "a new token stands one too far behind those of the prompt",
        _MODEL,
        "positions, longest = cache.slots.positions, cache.slots.stop",
        "positions, longest = cache.slots.positions + (cache.slots.mask is not None), cache.slots.stop + 1",
        (f"{_CACHED}[llama]",),
    ),
    Mutant(
        "groups that several ranks share are let through",
        _MODEL,
        'divide("--num-query-groups", groups, place.group)',
        "max(groups // place.group.size, 1)",
        ("tests/models/common/test_llama_model.py::test_groups_are_cut_whole_or_not_at_all",),
    ),
    Mutant(
        "the two norms of a layer change places",
        "megatron/models/common/transformer.py",
        "normed = x if self.input_norm is None else self.input_norm(x)",
        "normed = x if self.input_norm is None else self.post_attention_norm(x)",
        (_SAME,),
    ),
    Mutant(
        "norms do not add their epsilon",
        "megatron/models/common/norms.py",
        '{"epsilon": sizes.layernorm_epsilon,',
        '{"epsilon": 0.0,',
        (_SAME,),
    ),
    Mutant(
        "positions that begin anew are lost between stages",
        _PIPE,
        "positions = beside[-1] if self.has_positions else None",
        "positions = None",
        (f"{_PARITY}[2-2-1-positions]",),
    ),
    Mutant(
        "a stage looks across documents",
        _PIPE,
        "self.masks.of(x, segment_ids, self.has_window)",
        "self.masks.of(x, None, self.has_window)",
        (f"{_PARITY}[1-2-2-tied]",),
    ),
    Mutant(
        "each layer of a stage makes a mask of its own",
        "megatron/models/common/masks.py",
        "return self._within[has_window].of(segment_ids, partial(within, causal, segment_ids))",
        "return within(causal, segment_ids)",
        ("tests/models/common/test_masks.py::test_a_stage_makes_the_mask_of_a_micro_batch_once[llama with dropout]",),
    ),
    Mutant(
        "a position one too far is taken",
        "megatron/models/common/decoder.py",
        "highest >= length",
        "highest > length",
        ("tests/models/common/test_llama_model.py::test_positions_beyond_the_longest_are_refused",),
    ),
    Mutant(
        "the script drops positions that begin anew",
        "examples/llama/pretrain_llama.py",
        "if not config.model.has_learned_positions and not args.reset_position_ids:",
        "if True:",
        (f"{_ACTS}[--reset-position-ids]",),
    ),
    Mutant(
        "gate and value change places on the way from Hugging Face",
        _HF,
        'for name in ("gate", "up"))',
        'for name in ("up", "gate"))',
        (_SAME,),
    ),
    Mutant(
        "all queries come first in our matrix",
        _HF,
        "WeightMapping(heads, blocks=model.num_query_groups)",
        "WeightMapping(heads, blocks=1)",
        (f"{_THEIRS}::test_a_rank_holds_whole_groups",),
    ),
    Mutant(
        "queries and keys are given back at equal heights",
        _HF,
        "**by_recipes(partial(recipes, preset), heights)",
        "**by_recipes(partial(recipes, preset))",
        (f"{_THEIRS}::test_weights_come_back_bit_for_bit_from_any_number_of_tensor_ranks[fp64]",),
        refuses=True,
    ),
    Mutant(
        "an old config.json has the epsilon of the newer ones",
        _HF,
        'given.get("rms_norm_eps", 1e-6)',
        'given.get("rms_norm_eps", 1e-5)',
        (f"{_FORM}::test_configs_of_the_hub_are_read",),
    ),
    Mutant(
        "the base of rotary positions is not read where files had it before transformers 5",
        "megatron/models/llama/huggingface_rotary.py",
        'theirs.get("rope_theta", _BASE))',
        "_BASE)",
        (f"{_FORM}::test_configs_of_the_hub_are_read",),
    ),
    Mutant(
        "fewer keys cost as many parameters",
        "megatron/models/common/decoder_cost.py",
        "return self.sizes.num_query_groups * self.sizes.kv_hidden_size",
        "return self.sizes.num_attention_heads * self.sizes.kv_hidden_size",
        ("tests/models/llama/test_cost.py::test_published_models_have_their_numbers_of_parameters",),
    ),
)
