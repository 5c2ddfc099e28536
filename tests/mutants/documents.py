"""Mistakes in attention that keeps documents apart by where they begin."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

SOURCE = "megatron/ops/document_attention.py"
FLEX = "megatron/ops/flex_attention.py"
PLANS = "megatron/ops/plans.py"
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
_FLEX = "tests/ops/test_flex_attention.py"
BLOCKS = f"{_FLEX}::test_documents_of_any_lengths_equal_a_mask_in_values_and_gradients"
BLOCKS_OF_A_PIECE = f"{_FLEX}::test_queries_of_a_piece_see_the_keys_of_the_whole"
BLOCKS_OF_BOTH = f"{_FLEX}::test_both_directions_within_documents_equal_a_mask"
LISTS = f"{_FLEX}::test_blocks_are_those_that_queries_see"
SHARED = f"{_FLEX}::test_layers_share_the_plan_of_a_micro_batch_which_is_gone_with_it"
WAY = f"{_FLEX}::test_what_flash_attention_lacks_goes_by_blocks_with_triton"
FAKE = "tests/cuda/test_documents.py::test_what_flash_attention_lacks_goes_by_blocks_without_a_mask"
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
        PLANS,
        "    if key not in known:\n",
        "    if True:\n",
        (PLAN,),
    ),
    Mutant(
        "a plan outlives what it was made of", PLANS, "(make, starts._version, _piece", "(make, _piece", (PLAN, SHARED)
    ),
    Mutant("a piece has the plan of others", PLANS, "_version, _piece(starts), None", "_version, None", (PLAN,)),
    Mutant(
        "each layer plans its piece anew",
        PLANS,
        "return x if x._base is None else x._base",
        "return x",
        (PLAN,),
    ),
    Mutant(
        "a window has the plan of others",
        PLANS,
        "_piece(stops), *settings)",
        "_piece(stops), *settings[:2])",
        (PLAN,),
    ),
    Mutant(
        "short sequences go by length on CUDA, too",
        SOURCE,
        "is_long = length > 2 * SHORT and",
        "is_long =",
        (WAY,),
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

BY_BLOCKS = (
    Mutant(
        "the last block of keys is left out",
        FLEX,
        "num_some = end - begin - num_all",
        "num_some = (end - begin - num_all - 1).clamp(min=1)",
        (BLOCKS, LISTS),
    ),
    Mutant(
        "blocks begin one too late", FLEX, "which_some = begin + columns", "which_some = begin + 1 + columns", (LISTS,)
    ),
    Mutant(
        "full blocks may begin ahead of a document",
        FLEX,
        "all_from = -(-lows.amax(2) // BLOCK)",
        "all_from = lows.amax(2) // BLOCK",
        (BLOCKS, LISTS),
    ),
    Mutant(
        "full blocks may hold keys behind a query",
        FLEX,
        "highs.amin(2) // BLOCK - all_from",
        "-(-highs.amin(2) // BLOCK) - all_from",
        (BLOCKS, LISTS),
    ),
    Mutant(
        "a bias is capped",
        FLEX,
        """        if cap:
            score = cap * torch.tanh(score / cap)
        return score if slopes is None else score + slopes[head] * (key - positions[query])
""",
        """        if slopes is not None:
            score = score + slopes[head] * (key - positions[query])
        return cap * torch.tanh(score / cap) if cap else score
""",
        (BLOCKS,),
    ),
    Mutant("far keys count more", FLEX, "slopes[head] * (key - pos", "slopes[head] * -(key - pos", (BLOCKS,)),
    Mutant("all heads have the first slope", FLEX, "slopes[head] *", "slopes[0 * head] *", (BLOCKS,)),
    Mutant("a cap is not divided by", FLEX, "torch.tanh(score / cap)", "torch.tanh(score)", (BLOCKS,)),
    Mutant(
        "a piece stands at the start of its sequence in blocks",
        FLEX,
        "torch.arange(first, first + starts.shape[1]",
        "torch.arange(0, starts.shape[1]",
        (BLOCKS_OF_A_PIECE,),
    ),
    Mutant(
        "a window in blocks has one token too few",
        FLEX,
        "positions - window) if window",
        "positions - window + 1) if window",
        (BLOCKS, LISTS),
    ),
    Mutant("a query in blocks sees the key behind it", FLEX, "(positions + 1)", "(positions + 2)", (BLOCKS, LISTS)),
    Mutant("a query in blocks sees the document before", FLEX, "(key >= low[b", "(key >= 0 * low[b", (BLOCKS, LISTS)),
    Mutant("the blocks are those of the first sample", FLEX, "low[b, query]", "low[0 * b, query]", (LISTS,)),
    Mutant(
        "stops in blocks are not looked at",
        FLEX,
        "if stops is None else stops.clone()",
        "if True else stops.clone()",
        (BLOCKS_OF_BOTH,),
    ),
    Mutant("a plan holds what it was made of", FLEX, "else starts.clone()", "else starts", (SHARED,)),
    Mutant(
        "queries are not padded to whole blocks",
        FLEX,
        "    behind = -x.shape[2] % BLOCK\n",
        "    behind = 0\n",
        (BLOCKS,),
    ),
    Mutant(
        "a plan is for other stops, too",
        PLANS,
        "None if stops is None else _piece(stops), *",
        "*",
        (SHARED,),
    ),
    Mutant("stops of their own are taken for known", PLANS, "or _whole(stops) is whole", "or True", (SHARED,)),
    Mutant(
        "fp64 goes to a kernel",
        FLEX,
        "DTYPES = (torch.float32,",
        "DTYPES = (torch.float64, torch.float32,",
        (WAY,),
    ),
    Mutant("small heads go to a kernel", FLEX, "LEAST, MOST = 16, 256", "LEAST, MOST = 8, 256", (WAY,)),
    Mutant(
        "a device without Triton goes by blocks",
        SOURCE,
        "takes_blocks(x.dtype, head_size) and has_triton()",
        "takes_blocks(x.dtype, head_size)",
        (WAY,),
    ),
    Mutant("capped scores go to FlashAttention", SOURCE, "if is_plain and is_long and", "if is_long and", (WAY,)),
    Mutant(
        "each layer makes a plan of blocks",
        PLANS,
        "    if key not in known:\n",
        "    if True:\n",
        (SHARED, f"{FAKE}[ALiBi]"),
    ),
    Mutant(
        "padding is told by a mask where a kernel is",
        "megatron/models/bert/model.py",
        "way = None if sizes.attention_dropout else way_of(",
        "way = None if x.device.type != 'cpu' or sizes.attention_dropout else way_of(",
        (f"{FAKE}[padding]",),
    ),
)

IN_LAYERS = (
    Mutant(
        "documents are told by a mask",
        MASKS,
        "        if sizes.attention_dropout:\n",
        "        if True:\n",
        (MADE, f"{BYTES}[kernel]"),
    ),
    Mutant(
        "attention that drops goes without its mask",
        MASKS,
        "        if sizes.attention_dropout:\n",
        "        if False:\n",
        (MADE,),
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

DOCUMENTS = (*IN_TILES, *ON_CUDA, *BY_BLOCKS, *IN_LAYERS, *IN_THE_KERNEL)
