"""Mistakes in attention by blocks and in GELU within compiled layers."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

OPS = "megatron/ops/causal_attention.py"
_TESTS = "tests/ops/test_causal_attention.py"
REST = f"{_TESTS}::test_it_equals_the_formula_and_so_does_the_gradient[a rest]"
WHOLE = f"{_TESTS}::test_it_equals_the_formula_and_so_does_the_gradient[whole blocks]"
LATER = f"{_TESTS}::test_a_later_token_changes_nothing_before_it"

CAUSAL_ATTENTION = (
    Mutant("a query does not see itself", OPS, 'float("-inf")).triu_(1)', 'float("-inf")).triu_(0)', (REST,)),
    Mutant("a query sees the next key", OPS, 'float("-inf")).triu_(1)', 'float("-inf")).triu_(2)', (LATER,)),
    Mutant(
        "the mask lies at the first keys",
        OPS,
        "scores[:, :, seen - count :] += self.future",
        "scores[:, :, :count] += self.future",
        (WHOLE,),
    ),
    Mutant("scores are not scaled", OPS, "alpha=self.scale, ", "", (REST,)),
    Mutant("the gradient of the key is not scaled", OPS, "together[:, :, :2] *=", "together[:, :, :1] *=", (REST,)),
    Mutant("the gradient of the value is scaled", OPS, "together[:, :, :2] *=", "together *=", (REST,)),
    Mutant(
        "a block's gradient takes the place of its queries too early",
        OPS,
        "            _put_product(of_key[:, seen], scores.transpose(1, 2), query[:, own], adds=adds)\n"
        "            query[:, own] = torch.bmm(scores, key[:, seen])  # in its place: no other block needs it\n",
        "            query[:, own] = torch.bmm(scores, key[:, seen])\n"
        "            _put_product(of_key[:, seen], scores.transpose(1, 2), query[:, own], adds=adds)\n",
        (REST,),
    ),
    Mutant(
        "gradients of earlier blocks are lost",
        OPS,
        "        place += torch.bmm(left, right)\n",
        "        place.copy_(torch.bmm(left, right))\n",
        (WHOLE,),
    ),
    Mutant(
        "the first product is added to what memory held",
        OPS,
        "    if adds:\n",
        "    if adds or True:\n",
        (WHOLE,),
    ),
    Mutant(
        "the last heads are left out",
        OPS,
        "range(0, self.num_heads, self.at_once)",
        "range(0, self.num_heads - self.at_once + 1, self.at_once)",
        (WHOLE,),
    ),
    Mutant(
        "key and value change places",
        OPS,
        "query, key, value = _parts(room.copy",
        "query, value, key = _parts(room.copy",
        (REST,),
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
