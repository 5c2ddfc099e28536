"""Mistakes in attention by blocks and in GELU within compiled layers."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

OPS = "megatron/ops/causal_attention.py"
BLOCKS = "megatron/ops/causal_blocks.py"
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
    Mutant("scores are not scaled", BLOCKS, "alpha=self.scale, ", "", (REST,)),
    Mutant(
        "the gradient of the key is not scaled",
        OPS,
        "room.together[:, :, :2] *=",
        "room.together[:, :, :1] *=",
        (REST,),
    ),
    Mutant("the gradient of the value is scaled", OPS, "room.together[:, :, :2] *=", "room.together *=", (REST,)),
    Mutant(
        "a block's gradient takes the place of its queries too early",
        OPS,
        "            block.of_key.add(block.second.transpose(1, 2), block.query)\n"
        "            torch.bmm(block.second, block.keys, out=block.product)\n"
        "            block.query.copy_(block.product)  # in its place: no other block needs it\n",
        "            torch.bmm(block.second, block.keys, out=block.product)\n"
        "            block.query.copy_(block.product)\n"
        "            block.of_key.add(block.second.transpose(1, 2), block.query)\n",
        (REST,),
    ),
    Mutant(
        "gradients of earlier blocks are lost",
        BLOCKS,
        "self._rows += torch.bmm(left, right, out=self._product)",
        "self._rows.copy_(torch.bmm(left, right, out=self._product))",
        (WHOLE,),
    ),
    Mutant(
        "the first product is added to what memory held",
        BLOCKS,
        "        if self._is_first:\n",
        "        if self._is_first and False:\n",
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
GELU = "megatron/ops/gelu.py"
_BITS = "tests/ops/test_gelu.py::test_it_has_torchs_bits_compiled_or_not"

COMPILED_GELU = (
    Mutant(
        "a compiled GELU is the exact one",
        GELU,
        "opaque: torch.Tensor = _gelu(x, approximate)",
        'opaque: torch.Tensor = _gelu(x, "none")',
        (f"{_BITS}[tanh]",),
    ),
    Mutant(
        "the compiler makes GELU itself",
        GELU,
        "torch.compiler.is_compiling() and",
        "not torch.compiler.is_compiling() and",
        (f"{_BITS}[none]",),
    ),
    Mutant(
        "the gradient of a compiled GELU is that of the exact one",
        GELU,
        "*ctx.saved_tensors, ctx.approximate)",
        '*ctx.saved_tensors, "none")',
        (f"{_BITS}[tanh]",),
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
)
