"""Mistakes in what is carried to a GPU machine without a network, and in the choice of torch's build."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

CARRIED = "tests/benchmarks/gpu/test_wheels.py"
SET_UP = "tests/tools/test_set_up.py"

GATHERED = (
    Mutant(
        "wheels of more than the limit are carried",
        "benchmarks/gpu/wheels.py",
        "    if size_of(folder) > limit_mb * MEGABYTE:\n",
        "    if size_of(folder) > 2 * limit_mb * MEGABYTE:\n",
        (f"{CARRIED}::test_more_than_the_limit_is_refused",),
    ),
    Mutant(
        "a package that is there in a version that does not fit is not carried",
        "benchmarks/gpu/wheels.py",
        'if version == "" or (version and one.specifier.contains(version, prereleases=True)):',
        "if version is not None:",
        (f"{CARRIED}::test_what_is_missing_or_superfluous_is_said",),
    ),
    Mutant(
        "what a carried package requires is not looked at",
        "benchmarks/gpu/wheels.py",
        "queue += [(need, name) for need in wheel.requires if target.needs(need, sorted(one.extras))]",
        "pass",
        (f"{CARRIED}::test_what_is_missing_or_superfluous_is_said",),
    ),
    Mutant(
        "wheels of any Python and machine are carried",
        "benchmarks/gpu/wheels.py",
        "        if not self.tags & target.tags:\n",
        "        if not self.tags:\n",
        (f"{CARRIED}::test_a_wheel_of_another_python_or_machine_is_refused",),
    ),
    Mutant(
        "the old wheels go although the new ones do not fit",
        "benchmarks/gpu/wheels.py",
        "    if not problems and not args.check:\n",
        "    if not args.check:\n",
        (f"{CARRIED}::test_what_is_missing_is_fetched_with_what_it_needs_and_the_folder_changes_only_if_all_fits",),
    ),
    Mutant(
        "wheels are installed into a Python that lacks nothing",
        "benchmarks/gpu/run.sh",
        " && ! is_complete; then",
        "; then",
        (f"{CARRIED}::test_a_python_that_lacks_packages_is_given_the_wheels_once",),
    ),
    Mutant(
        "wheels that were changed are not installed again",
        "benchmarks/gpu/run.sh",
        'cat "$wheels"/*.whl | cksum; ',
        "",
        (f"{CARRIED}::test_a_python_that_lacks_packages_is_given_the_wheels_once",),
    ),
    Mutant(
        "all packages are taken from the index of torch",
        "tools/set_up.py",
        'rest = [*pip, "-e",',
        'rest = [*pip, *source, "-e",',
        (f"{SET_UP}::test_torch_alone_is_taken_from_the_index_that_is_asked_for",),
    ),
    Mutant(
        "another build of torch than the one that was asked for stays in silence",
        "tools/set_up.py",
        "    if there and TORCH_BUILD.fullmatch(wanted) and wanted != there:\n",
        "    if there and TORCH_BUILD.fullmatch(wanted) and wanted == there:\n",
        (f"{SET_UP}::test_the_build_of_torch_that_is_there_is_told_and_stays",),
    ),
    Mutant(
        "a library that a vocabulary needs is not named",
        "megatron/tokenizer/build.py",
        "needs {error.name}, which is not installed.",
        "needs a library, which is not installed.",
        ("tests/tokenizer/test_tokenizer.py::test_a_vocabulary_of_cpm_without_jieba_says_what_to_install",),
    ),
)
