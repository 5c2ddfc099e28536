"""Mistakes in what is said of flags that are not ours."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

PARSE = "tests/config/test_parse.py"
TABLE = "tests/config/test_flags_table.py"
PIPELINES = "tests/training/test_pipelines.py"

FLAGS = (
    Mutant(
        "names that are half alike are guessed",
        "megatron/config/scan.py",
        "ALIKE = 0.8\n",
        "ALIKE = 0.55\n",
        (f"{PARSE}::test_a_name_that_is_no_slip_of_the_hand_gets_no_guess",),
    ),
    Mutant(
        "dashes make names alike",
        "megatron/config/scan.py",
        '{other.lstrip("-"): other for other in names}  # the dashes are no likeness\n'
        '    close = difflib.get_close_matches(name.lower().lstrip("-"), bare,',
        "{other: other for other in names}\n    close = difflib.get_close_matches(name.lower(), bare,",
        (f"{PARSE}::test_a_name_that_is_no_slip_of_the_hand_gets_no_guess",),
    ),
    Mutant(
        "slips of the hand are not guessed",
        "megatron/config/scan.py",
        "ALIKE = 0.8\n",
        "ALIKE = 0.9\n",
        (f"{PARSE}::test_a_value_that_cannot_be_used_is_told_with_its_cure",),
    ),
    Mutant(
        "a reason names a flag that is not there",
        "megatron/config/flags_by_reason.py",
        '"use --no-pin-memory"',
        '"use --unpinned-memory"',
        (f"{TABLE}::test_what_to_use_instead_is_there",),
    ),
    Mutant(
        "a flag that people use is known no more",
        "megatron/config/flags_table.py",
        '    "--sft": ',
        '    "--sfft": ',
        (f"{TABLE}::test_the_document_is_what_the_table_says",),
    ),
    Mutant(
        "a flag has two reasons",
        "megatron/config/flags_by_reason.py",
        "--no-pin-cpu-grads --no-pin-cpu-params",
        "--no-pin-cpu-grads --no-pin-cpu-params --tp-comm-overlap",
        (f"{TABLE}::test_a_flag_has_one_reason",),
    ),
    Mutant(
        "a flag that is refused is suggested",
        "megatron/config/scan.py",
        "[*known, *extras, *ALREADY_SO], known)",
        "[*known, *extras, *ALREADY_SO, *refused], known)",
        (f"{PARSE}::test_only_what_is_accepted_is_suggested",),
    ),
    Mutant(
        "sizes that a global batch changes are not said",
        "megatron/config/batch_sizes.py",
        "    if (size, samples // size) != usual:\n",
        "    if size * (samples // size) != samples:\n",
        (f"{PARSE}::test_a_global_batch_that_changes_the_recipes_sizes_is_said",),
    ),
    Mutant(
        "a trace that nobody named a folder for lies beside the run",
        "megatron/training/run.py",
        'pipeline_trace=str(place.folder / "trace")',
        'pipeline_trace=str(place.folder.with_name("trace"))',
        (f"{PIPELINES}::test_a_run_with_a_trace_leaves_its_picture_and_writes_the_bubble_of_each_interval",),
    ),
)
