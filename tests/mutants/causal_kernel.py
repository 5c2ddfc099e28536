"""Mistakes in causal attention in fp32 on a CPU; each is built anew, for torch caches by the source's text."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

SOURCE = "megatron/ops/causal_kernel.cpp"
CHOICE = "megatron/ops/causal_attention.py"
_TESTS = "tests/ops/test_causal_kernel.py"
_FORMULA = f"{_TESTS}::test_it_equals_the_formula_and_so_does_the_gradient"
REST = f"{_FORMULA}[a rest]"
WHOLE = f"{_FORMULA}[whole blocks]"
LESS = f"{_FORMULA}[less than a block, no whole vector]"
LATER = f"{_TESTS}::test_a_later_token_changes_nothing_before_it"
TAKEN = f"{_TESTS}::test_compiled_layers_take_it_in_fp32_and_no_others_do"
EAGER = f"{_TESTS}::test_layers_that_are_not_compiled_take_it_too"
BUILT = f"{_TESTS}::test_it_is_built_for_processors_that_it_was_measured_on"
THREADS = f"{_TESTS}::test_any_number_of_threads_gives_the_same_bits"
HUGEST = f"{_TESTS}::test_scores_too_large_for_exp_choose_one_key[100000.0]"
HUGE = f"{_TESTS}::test_scores_too_large_for_exp_choose_one_key[1000.0]"

CAUSAL_KERNEL = (
    Mutant(
        "a query sees the next key too",
        SOURCE,
        "row, seen, whole(end, kTile), Vector(z.scale)",
        "row, std::min(seen + 1, end), whole(end, kTile), Vector(z.scale)",
        (LATER,),
    ),
    Mutant("scores behind the diagonal count", SOURCE, "if (j + kLanes > seen)", "if (j > seen)", (REST,)),
    Mutant(
        "nothing is taken off the scores",
        SOURCE,
        "(Vector::loadu(row + j) - most) * scale",
        "(Vector::loadu(row + j)) * scale",
        (HUGE,),
    ),
    Mutant(
        "the largest score is scaled and rounded ahead of the others",
        SOURCE,
        "((Vector::loadu(row + j) - most) * scale)",
        "at::vec::fmadd(Vector::loadu(row + j), scale, (most * scale).neg())",
        (HUGEST,),
    ),
    Mutant(
        "the largest score is that of the first keys",
        SOURCE,
        "j < seen; j += kLanes)\n    found",
        "j < std::min<int64_t>(seen, kLanes); j += kLanes)\n    found",
        (HUGE,),
    ),
    Mutant(
        "probabilities of the backward do not add up to 1",
        SOURCE,
        "Vector::loadu(row + j) * part",
        "Vector::loadu(row + j)",
        (REST,),
    ),
    Mutant("a context is not divided by its sum", SOURCE, "x * Vector(share[first + i])", "x", (REST,)),
    Mutant(
        "scores behind the rest's end are not zero",
        SOURCE,
        "std::fill(of_row + seen",
        "0 ? void() : std::fill(of_row + rounded",
        (LESS,),
    ),
    Mutant("the kernel loses gradients of earlier blocks", SOURCE, "adds = end < z.s", "adds = false", (WHOLE,)),
    Mutant("the first block adds to what was there", SOURCE, "adds = end < z.s", "adds = true", (WHOLE,)),
    Mutant("the gradient of the scores is not scaled", SOURCE, "- mean) * scale)", "- mean))", (REST,)),
    Mutant(
        "a mean is not taken from the gradient",
        SOURCE,
        "(Vector::loadu(of_row + j) - mean)",
        "Vector::loadu(of_row + j)",
        (REST,),
    ),
    Mutant(
        "the gradient of the value goes by that of the scores",
        SOURCE,
        "all_given + first, scores + low, of_value",
        "all_given + first, of_scores + low, of_value",
        (REST,),
    ),
    Mutant(
        "key and value change places in the gradient",
        SOURCE,
        "transpose(of_key, width, found + d,",
        "transpose(of_value, width, found + d,",
        (REST,),
    ),
    Mutant(
        "all heads work with the sums of the first",
        SOURCE,
        "const float* most = queries + head * s;\n    ",
        "const float* most = queries;\n    ",
        (REST,),
    ),
    Mutant("threads work in one memory", SOURCE, "memory + room * each", "memory", (THREADS,)),
    Mutant(
        "layers that are not compiled go without it",
        CHOICE,
        "return packed.dtype == torch.float32 and",
        "return torch.compiler.is_compiling() and packed.dtype == torch.float32 and",
        (EAGER,),
    ),
    Mutant("fp64 takes it", CHOICE, "packed.dtype == torch.float32 and ", "", (TAKEN, EAGER)),
    Mutant(
        "the compiler is not told of the processor's vectors",
        CHOICE,
        'f"-DCPU_CAPABILITY={capability}", f"-DCPU_CAPABILITY_{capability}", ',
        "",
        (f"{_TESTS}::test_it_has_the_vectors_of_this_processor",),
    ),
    Mutant(
        "torch tries out vectors at each start",
        "megatron/torch_compat.py",
        "extra_flags=flags, needs_vec_isa=False",
        "extra_flags=flags",
        (f"{BUILT}[AVX512]",),
    ),
    Mutant("it is built for this very processor", CHOICE, "VECTORS[capability], ", "", (f"{BUILT}[AVX2]",)),
    Mutant(
        "it is built for processors that it was never run on",
        CHOICE,
        "    if capability not in VECTORS:\n        return None\n",
        "    VECTORS.setdefault(capability, '')\n",
        (f"{BUILT}[DEFAULT]",),
    ),
    Mutant(
        "an error of the kernel goes unsaid",
        CHOICE,
        "if error is not None",
        "if error == 0",
        (f"{_TESTS}::test_an_error_of_the_library_is_raised",),
    ),
    Mutant("no layer takes it", CHOICE, "torch.float32 and is_built()", "torch.float16 and is_built()", (TAKEN,)),
    Mutant(
        "a product of its backward is not counted",
        CHOICE,
        "def _kernel_backward_flops(_: torch.Size, packed: torch.Size, *__: Any, **___: Any) -> int:\n    return 5 * products(packed)",  # noqa: E501
        "def _kernel_backward_flops(_: torch.Size, packed: torch.Size, *__: Any, **___: Any) -> int:\n    return 4 * products(packed)",  # noqa: E501
        (f"{_TESTS}::test_its_products_are_counted_as_those_of_blocks",),
    ),
    Mutant(
        "a kernel that cannot be built goes unsaid",
        CHOICE,
        "        (log.info if has_none else log.warn_once)(",
        "        str(",
        (f"{_TESTS}::test_where_it_cannot_be_built_layers_go_by_blocks_and_say_so",),
    ),
)
