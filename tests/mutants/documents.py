"""Mistakes in attention that keeps documents apart by where they begin."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

SOURCE = "megatron/ops/document_attention.py"
KERNEL = "megatron/ops/causal_kernel.cpp"
MASKS = "megatron/models/common/masks.py"
_OPS = "tests/ops/test_document_attention.py"
ANY = f"{_OPS}::test_documents_of_any_lengths_equal_a_mask_in_values_and_gradients"
PIECE = f"{_OPS}::test_queries_of_a_piece_see_the_keys_of_the_whole"
CUDA = f"{_OPS}::test_the_way_of_cuda_equals_a_mask_in_values_and_gradients"
BOTH = f"{_OPS}::test_both_directions_within_documents_equal_a_mask"
FP32 = f"{_OPS}::test_the_kernel_in_fp32_keeps_documents_apart"
SIZES = f"{_OPS}::test_cu_seqlens_have_one_size_for_all_documents_and_hold_few_sequences"
BYTES = f"{_OPS}::test_bytes_grow_with_the_length_and_not_with_its_square"
STARTS = f"{_OPS}::test_starts_and_stops_are_those_of_the_documents"
TURNS = f"{_OPS}::test_heads_in_turns_have_their_own_slopes"
PLAN = f"{_OPS}::test_layers_share_the_plan_of_a_micro_batch_and_the_next_one_has_its_own"
OLDER = f"{_OPS}::test_keys_are_repeated_for_a_torch_that_knows_no_groups"
MADE = "tests/models/common/test_masks.py::test_nothing_of_s_x_s_is_made_of_documents_but_where_attention_drops"
FEATURES = "tests/models/common/test_features.py::test_a_feature_is_its_formula"
FAKE = "tests/cuda/test_documents.py"
SAID = "tests/training/test_determinism.py::test_the_start_says_by_what_documents_are_kept_apart"

IN_TILES = (
    Mutant(
        "documents see one token of the one before",
        SOURCE,
        "masked_fill_(keys < low, lowest(self.wide))",
        "masked_fill_(keys < low - 1, lowest(self.wide))",
        (ANY,),
    ),
    Mutant(
        "a query of a tile sees the key behind it",
        SOURCE,
        "masked_fill_(keys >= high, lowest(self.wide))",
        "masked_fill_(keys > high, lowest(self.wide))",
        (ANY,),
    ),
    Mutant(
        "a tile begins one key too late",
        SOURCE,
        "found.append(_Tile(own, slice(start, stop)",
        "found.append(_Tile(own, slice(min(start + 1, stop - 1), stop)",
        (ANY,),
    ),
    Mutant(
        "the window within documents is ignored",
        SOURCE,
        "torch.maximum(starts, own - window) if window else starts",
        "starts",
        (ANY,),
    ),
    Mutant(
        "a window within documents has one token too few",
        SOURCE,
        "starts, own - window)",
        "starts, own - window + 1)",
        (ANY,),
    ),
    Mutant(
        "the lengths are those of another sample",
        SOURCE,
        "(each[part.row, tile.own].unsqueeze(1) for each in (self.low, self.high))",
        "(each[part.row - 1, tile.own].unsqueeze(1) for each in (self.low, self.high))",
        (ANY,),
    ),
    Mutant(
        "the tiles are those of the first sample",
        SOURCE,
        "self.low[row].split(TILE)",
        "self.low[0].split(TILE)",
        (ANY,),
    ),
    Mutant(
        "a piece stands at the start of its sequence",
        SOURCE,
        "own = torch.arange(first, first + query.shape[2]",
        "own = torch.arange(0, query.shape[2]",
        (PIECE,),
    ),
    Mutant(
        "keys of several tiles get the gradient of the last",
        SOURCE,
        "of_key[:, tile.keys] +=",
        "of_key[:, tile.keys] =",
        (ANY,),
    ),
    Mutant(
        "the gradient of scores in tiles passes the cap as if it were not there",
        SOURCE,
        "of_scores.mul_(1.0 - tangents.square_())",
        "of_scores.mul_(1.0)",
        (ANY,),
    ),
    Mutant(
        "heads that come later have the first slopes",
        SOURCE,
        "self.slopes[part.heads]",
        "self.slopes[: len(by_head)]",
        (TURNS,),
    ),
    Mutant("stops are not looked at", SOURCE, "own + 1 if stops is None else stops", "own + 1", (BOTH,)),
    Mutant(
        "a document takes the first token of the next",
        SOURCE,
        "    return begins.cummax(dim=1).values\n",
        "    return begins.roll(1, dims=1).cummax(dim=1).values\n",
        (STARTS,),
    ),
    Mutant(
        "a document ends one token early", SOURCE, "    return ends.flip(1)", "    return -1 + ends.flip(1)", (STARTS,)
    ),
)

ON_CUDA = (
    Mutant(
        "a document may be too long for its window",
        SOURCE,
        "is_short = stops - starts <= SHORT",
        "is_short = stops - starts <= 2 * SHORT",
        (CUDA,),
    ),
    Mutant(
        "short documents see each other",
        SOURCE,
        "(seen >= begin) & (seen <= place)",
        "(seen >= begin - 1) & (seen <= place)",
        (CUDA,),
    ),
    Mutant(
        "the window of short documents is ignored",
        SOURCE,
        "        is_seen &= seen >= place - window\n",
        "        pass\n",
        (CUDA,),
    ),
    Mutant(
        "keys ahead of the first sequence go to it",
        SOURCE,
        "torch.where(is_short[:, 0], positions[0], starts[:, 0])",
        "torch.zeros_like(starts[:, 0])",
        (PIECE,),
    ),
    Mutant(
        "sequences of the second sample begin in the first",
        SOURCE,
        "queries + rows * s, b * s",
        "queries, b * s",
        (CUDA,),
    ),
    Mutant(
        "long documents run into one another",
        SOURCE,
        "begins = (starts == positions) & ~is_short",
        "begins = torch.zeros_like(is_short)",
        (CUDA,),
    ),
    Mutant(
        "a place is there for each token",
        SOURCE,
        "places = 2 * (s // (SHORT + 1)) + s // CUT + 5",
        "places = s + 5",
        (SIZES,),
    ),
    Mutant(
        "each layer makes a plan of its own",
        SOURCE,
        "    if settings not in known:\n",
        "    if True:\n",
        (PLAN,),
    ),
    Mutant("a plan outlives what it was made of", SOURCE, "(starts._version, piece,", "(piece,", (PLAN,)),
    Mutant("a piece has the plan of others", SOURCE, "_version, piece, num_keys", "_version, num_keys", (PLAN,)),
    Mutant(
        "each layer plans its piece anew",
        SOURCE,
        "whole = starts if starts._base is None else starts._base",
        "whole = starts",
        (PLAN,),
    ),
    Mutant(
        "a window has the plan of others",
        SOURCE,
        "num_keys, first, window)\n    if",
        "num_keys, first)\n    if",
        (PLAN,),
    ),
    Mutant(
        "short sequences go by length on CUDA, too",
        SOURCE,
        "is_long = length > 2 * SHORT and",
        "is_long =",
        (f"{FAKE}::test_what_flash_attention_lacks_keeps_the_mask[a short sequence]",),
    ),
    Mutant(
        "torch 2.11 is given groups",
        "megatron/torch_compat.py",
        "        if HAS_GROUPS:\n",
        "        if True:\n",
        (OLDER,),
    ),
    Mutant(
        "a window of FlashAttention is all",
        "megatron/torch_compat.py",
        '"window_size": (window or -1, 0)',
        '"window_size": (-1, 0)',
        (OLDER,),
    ),
)

IN_LAYERS = (
    Mutant(
        "documents are told by a mask",
        MASKS,
        "not sizes.attention_dropout and takes",
        "False and takes",
        (MADE, f"{BYTES}[kernel]"),
    ),
    Mutant(
        "attention that drops goes without its mask", MASKS, "not sizes.attention_dropout and takes", "takes", (MADE,)
    ),
    Mutant(
        "a layer without a window has one within documents",
        "megatron/models/common/attention.py",
        "window=sizes.window_size if has_window(sizes, layer) else 0",
        "window=sizes.window_size",
        (f"{FEATURES}[window by number]",),
    ),
    Mutant(
        "the start says nothing of a mask",
        "megatron/models/common/decoder_cost.py",
        "    if model.attention_dropout:\n        return f",
        "    if False:\n        return f",
        (SAID,),
    ),
)

IN_THE_KERNEL = (
    Mutant(
        "the fp32 kernel sees the document before",
        KERNEL,
        "row + low, row + starts[query], -std",
        "row + low, row + low, -std",
        (FP32,),
    ),
    Mutant(
        "the fp32 kernel takes the lengths of the first sample",
        KERNEL,
        "const int32_t* own = starts ? starts + head / heads * s : nullptr;",
        "const int32_t* own = starts;",
        (FP32,),
    ),
    Mutant(
        "what is added to begins with anything",
        KERNEL,
        "if (starts) std::fill(of_key,",
        "if (false) std::fill(of_key,",
        (FP32,),
    ),
)

DOCUMENTS = (*IN_TILES, *ON_CUDA, *IN_LAYERS, *IN_THE_KERNEL)
