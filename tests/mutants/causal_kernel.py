"""Mistakes in the attention of compiled layers on a CPU; each is built anew, for torch caches by the source's text."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

SOURCE = "megatron/ops/causal_kernel.cpp"
CHOICE = "megatron/ops/causal_kernel.py"
_TESTS = "tests/ops/test_causal_kernel.py"
_FORMULA = f"{_TESTS}::test_it_equals_the_formula_and_so_does_the_gradient"
REST = f"{_FORMULA}[a rest]"
WHOLE = f"{_FORMULA}[whole blocks]"
LESS = f"{_FORMULA}[less than a block, no whole vector]"
LATER = f"{_TESTS}::test_a_later_token_changes_nothing_before_it"
TAKEN = f"{_TESTS}::test_compiled_layers_take_it_in_fp32_and_no_others_do"
THREADS = f"{_TESTS}::test_any_number_of_threads_gives_the_same_bits"
NUMBERS = f"{_TESTS}::test_scores_too_large_for_exp_give_numbers_and_nan_gives_nan"

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
        "no score is taken from the largest", SOURCE, "largest(row, seen) * z.scale", "0 * largest(row, 1)", (NUMBERS,)
    ),
    Mutant(
        "the largest score is that of the first keys",
        SOURCE,
        "j < seen; j += kLanes)\n    found",
        "j < std::min<int64_t>(seen, kLanes); j += kLanes)\n    found",
        (NUMBERS,),
    ),
    Mutant("the sum of a query is without its largest", SOURCE, "most + std::log(sum)", "std::log(sum)", (REST,)),
    Mutant("a context is not divided by its sum", SOURCE, "x * Vector(shares[i])", "x", (REST,)),
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
        "all_given + first, scores, of_value",
        "all_given + first, of_scores, of_value",
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
        "packed + head * 3 * d, sums + head * s, found",
        "packed + head * 3 * d, sums, found",
        (REST,),
    ),
    Mutant("threads work in one memory", SOURCE, "at::get_thread_num() * each", "0 * each", (THREADS,)),
    Mutant(
        "layers that are not compiled take it", CHOICE, "torch.compiler.is_compiling() and is_fit", "is_fit", (TAKEN,)
    ),
    Mutant("fp64 takes it", CHOICE, " and packed.dtype == torch.float32", "", (TAKEN,)),
    Mutant("heads of any width take it", CHOICE, " and packed.shape[-1] % TILE == 0", "", (TAKEN,)),
    Mutant("no layer takes it", CHOICE, "is_fit and is_built()", "not is_fit and is_built()", (TAKEN,)),
    Mutant(
        "a product of its backward is not counted",
        CHOICE,
        "return 5 * products(packed)",
        "return 4 * products(packed)",
        (f"{_TESTS}::test_its_products_are_counted_as_those_of_blocks",),
    ),
    Mutant(
        "a kernel that cannot be built goes unsaid",
        CHOICE,
        "        log.warn_once(",
        "        str(",
        (f"{_TESTS}::test_where_it_cannot_be_built_layers_go_by_blocks_and_say_so",),
    ),
)
