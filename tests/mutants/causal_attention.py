"""Mistakes in attention by blocks, and in activations and biases within compiled layers."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

OPS = "megatron/ops/causal_attention.py"
BLOCKS = "megatron/ops/causal_attention.py"
_TESTS = "tests/ops/test_causal_attention.py"
REST = f"{_TESTS}::test_it_equals_the_formula_and_so_does_the_gradient[a rest]"
WHOLE = f"{_TESTS}::test_it_equals_the_formula_and_so_does_the_gradient[whole blocks]"
LATER = f"{_TESTS}::test_a_later_token_changes_nothing_before_it"

CAUSAL_ATTENTION = (
    Mutant("a query does not see itself", BLOCKS, 'float("-inf")).triu_(1)', 'float("-inf")).triu_(0)', (REST,)),
    Mutant("a query sees the next key", BLOCKS, 'float("-inf")).triu_(1)', 'float("-inf")).triu_(2)', (LATER,)),
    Mutant(
        "the mask lies at the first keys",
        BLOCKS,
        "self.scores[:, :, own.start :], room.future",
        "self.scores[:, :, :count], room.future",
        (WHOLE,),
    ),
    Mutant("scores are not scaled", BLOCKS, "self._keys_across, self.scale)", "self._keys_across, 1.0)", (REST,)),
    Mutant("the gradient of the query is not scaled", OPS, "block.keys, room.scale)", "block.keys, 1.0)", (REST,)),
    Mutant("the gradient of the key is not scaled", BLOCKS, "room.spare, self.scale)", "room.spare)", (REST,)),
    Mutant(
        "the gradient of the value is scaled",
        BLOCKS,
        "_Sum(room.of_value, own.stop, room.spare)",
        "_Sum(room.of_value, own.stop, room.spare, self.scale)",
        (REST,),
    ),
    Mutant(
        "every block's gradient goes to the first queries",
        OPS,
        "of_query[:, block.own]",
        "of_query[:, : block.product.shape[1]]",
        (REST,),
    ),
    Mutant(
        "gradients of earlier blocks are lost",
        BLOCKS,
        "self._rows += self._product",
        "self._rows.copy_(self._product)",
        (WHOLE,),
    ),
    Mutant(
        "the first block's product counts twice",
        BLOCKS,
        "        if not self._is_first:\n",
        "        if True:\n",
        (WHOLE,),
    ),
    Mutant(
        "the last heads are left out",
        BLOCKS,
        "range(0, num_heads, at_once)",
        "range(0, num_heads - at_once + 1, at_once)",
        (WHOLE,),
    ),
    Mutant(
        "key and value change places",
        BLOCKS,
        "self.query, self.key, self.value = self.together",
        "self.query, self.value, self.key = self.together",
        (REST,),
    ),
    Mutant(
        "the gradient of the probabilities stands for that of the scores",
        OPS,
        "            _softmax_backward(",
        "            0 and _softmax_backward(",
        (WHOLE,),
    ),
    Mutant(
        "what is dropped is forgotten",
        OPS,
        " and not dropout and drop is None",
        "",
        (f"{_TESTS}::test_dropped_probabilities_go_by_torchs_attention",),
    ),
)

BIASED = "tests/ops/test_biased_attention.py::test_it_equals_the_formula_and_so_do_all_gradients"
TWICE = f"{BIASED}[no mask-made twice-a head-False]"
GELU = "megatron/ops/activations.py"
LINEAR = "megatron/mpu/layers.py"
_LINEAR = "tests/mpu/test_linear.py"
_COMPILED = "tests/ops/test_gelu.py::test_it_is_torchs_compiled_or_not"
_SHORT = "tests/ops/test_gelu.py::test_16_bits_are_rounded_once_when_compiled"

TIME = "megatron/training/compile.py"
_TIME = "tests/training/test_compile_time.py"

COMPILED_LAYERS = (
    Mutant(
        "a compiled GELU is the exact one",
        GELU,
        'if approximate == "tanh"',
        "if False",
        (f"{_COMPILED}[tanh]",),
    ),
    Mutant(
        "the compiler makes the exact GELU itself",
        GELU,
        '    """\n    if torch.compiler.is_compiling() and',
        '    """\n    if not torch.compiler.is_compiling() and',
        (f"{_COMPILED}[none]",),
    ),
    Mutant("a compiled GELU is half as steep", GELU, "LINEAR = 2 *", "LINEAR = 1 *", (f"{_COMPILED}[tanh]",)),
    Mutant("a compiled GELU of 16 bits rounds each step", GELU, "else x.float()", "else x", (_SHORT,)),
    Mutant(
        "the compiled gradient of the exact GELU is that of its approximation",
        GELU,
        "aten.gelu_backward(grad.contiguous(), x.contiguous())",
        'aten.gelu_backward(grad.contiguous(), x.contiguous(), approximate="tanh")',
        (f"{_COMPILED}[none]",),
    ),
    Mutant(
        "the compiled gradient of a bias is lost",
        "megatron/ops/biased_attention.py",
        "None if tensors[3] is None else to_bias, None, None",
        "None if tensors[3] is None else 0 * to_bias, None, None",
        (BIASED,),
    ),
    Mutant(
        "probabilities are taken as kept that were not",
        "megatron/ops/biased_attention.py",
        "        if not keeps:\n            _set",
        "        if keeps:\n            _set",
        (TWICE,),
    ),
    Mutant(
        "the compiled gradient of an added bias counts twice",
        LINEAR,
        "rows.new_ones(1, len(rows))",
        "rows.new_full((1, len(rows)), 2.0)",
        (f"{_LINEAR}::test_it_is_torchs_product_compiled_or_not",),
    ),
    Mutant(
        "a bias is added by itself in 16 bits",
        LINEAR,
        " and x.dtype in (torch.float32, torch.float64)",
        "",
        (f"{_LINEAR}::test_in_16_bits_the_product_rounds_with_the_bias",),
    ),
    Mutant(
        "the compiler sums a bias's gradient",
        LINEAR,
        "rows.new_ones(1, len(rows)).mm(rows).squeeze(0)",
        "rows.sum(0)",
        (f"{_LINEAR}::test_the_gradient_of_a_bias_added_after_a_sum_over_ranks_is_a_product_too",),
    ),
    Mutant(
        "a compiled ReLU lets the gradient through at 0",
        "megatron/ops/activations.py",
        "threshold_backward(grad.contiguous(), y, 0)",
        "threshold_backward(grad.contiguous(), y, -1)",
        ("tests/ops/test_relu.py::test_it_is_torchs_compiled_or_not",),
    ),
    Mutant(
        "graphs in the cache count as compiled",
        "megatron/training/callbacks/compile_meter.py",
        "graphs - found, found",
        "graphs, found",
        (f"{_TIME}::test_a_second_start_finds_its_graphs",),
    ),
    Mutant(
        "what was compiled once is told in every record",
        "megatron/training/callbacks/compile_meter.py",
        "        self._last = total\n",
        "",
        (f"{_TIME}::test_a_meter_tells_what_came_since_it_was_asked_last",),
    ),
    Mutant(
        "the time of the compiler is not written down",
        "megatron/training/callbacks/compile_meter.py",
        "        metrics |= cost\n",
        "",
        (f"{_TIME}::test_a_run_says_and_writes_down_what_was_compiled",),
    ),
    Mutant(
        "ranks wait for the compiler one after another",
        "megatron/training/callbacks/compile_meter.py",
        "max(each.seconds for each in ranks)",
        "sum(each.seconds for each in ranks)",
        (f"{_TIME}::test_graphs_of_all_ranks_count_and_the_longest_wait",),
    ),
    Mutant(
        "a mask goes to cuDNN",
        "megatron/ops/attention.py",
        "nullcontext() if mask is None else sdpa_kernel(FOR_MASKS)",
        "nullcontext()",
        ("tests/ops/test_attention.py::test_a_mask_never_goes_to_cudnn[a mask]",),
    ),
    Mutant(
        "what hides is the lowest number there is",
        "megatron/ops/attention.py",
        "torch.finfo(dtype).min / 2",
        "torch.finfo(dtype).min",
        ("tests/ops/test_attention.py::test_what_hides_stays_finite_with_a_score_and_in_powers_of_two[dtype0]",),
    ),
)
