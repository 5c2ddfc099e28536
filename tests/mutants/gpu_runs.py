"""Mistakes in the program for a GPU by which a case would pass that must fail."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

TRAIN = "tests/benchmarks/gpu/test_train.py"
PROGRAM = "tests/benchmarks/gpu/test_program.py"
FAULTS = "tests/benchmarks/gpu/test_faults.py"
RUNS = "benchmarks/gpu/train.py"
PART = "benchmarks/gpu/faults.py"

GPU_RUNS = (
    Mutant(
        "losses may be anywhere",
        RUNS,
        "    assert largest <= allowed, ",
        "    assert largest <= 10 * allowed, ",
        (f"{TRAIN}::test_losses_that_are_not_those_of_the_reference_fail",),
    ),
    Mutant(
        "only the steps that both runs have are compared",
        RUNS,
        "    return max(abs(one - two) for one, two in zip(run.losses, other.losses, strict=True))\n",
        "    return max(abs(one - two) for one, two in zip(run.losses[:1], other.losses[:1], strict=True))\n",
        (f"{TRAIN}::test_losses_that_are_not_those_of_the_reference_fail",),
    ),
    Mutant(
        "a loss that does not fall passes",
        RUNS,
        "    assert fallen >= fall, ",
        "    assert fallen <= fall, ",
        (
            f"{TRAIN}::test_losses_that_do_not_fall_and_runs_without_steps_fail",
            f"{TRAIN}::test_losses_within_the_tolerance_pass",
        ),
    ),
    Mutant(
        "norms are not compared",
        RUNS,
        "(step, loss.hex(), norm.hex()) for step",
        '(step, loss.hex(), "") for step',
        (f"{TRAIN}::test_one_bit_of_a_loss_or_a_norm_fails",),
    ),
    Mutant(
        "checkpoints that cannot be opened are equal",
        RUNS,
        "    assert done.code == 0, f",
        "    assert done.code != 1, f",
        (f"{TRAIN}::test_checkpoints_that_differ_fail",),
    ),
    Mutant(
        "a stopped run may end with any code",
        "benchmarks/gpu/train.py",
        "        assert ended == code, f",
        "        assert ended is not None, f",
        (f"{TRAIN}::test_a_stop_with_another_code_or_too_late_fails",),
    ),
    Mutant(
        "bf16's tolerance is that of all formats",
        "benchmarks/gpu/train.py",
        "TOLERANCES[number_format], machine, fall)",
        'TOLERANCES["bf16"], machine, fall)',
        (f"{TRAIN}::test_each_format_has_its_own_tolerance",),
    ),
    Mutant(
        "a read for each micro-batch passes",
        PART,
        "    assert sum(places.values()) == 1, f",
        "    assert sum(places.values()) >= 1, f",
        (f"{FAULTS}::test_other_waits_fail",),
    ),
    Mutant(
        "a watch that sees nothing passes",
        PART,
        '    assert seen["is_noticed"], ',
        '    assert "is_noticed" in seen, ',
        (f"{FAULTS}::test_other_waits_fail",),
    ),
    Mutant(
        "an allocator that never tried again passes",
        PART,
        '    assert pressed["retries"] > 0, f',
        '    assert pressed["retries"] >= 0, f',
        (f"{FAULTS}::test_allocations_tried_again_pass_with_the_same_losses_alone",),
    ),
    Mutant(
        "a job may end long after its rank",
        PART,
        "    assert seconds <= DEATH_S, f",
        "    assert seconds >= 0, f",
        (f"{FAULTS}::test_an_end_passes_with_its_code_and_words_alone",),
    ),
    Mutant(
        "other steps may have no loss",
        PART,
        "    assert bad == [SPOILED], f",
        "    assert SPOILED in bad, f",
        (f"{FAULTS}::test_a_nan_must_end_the_run_at_its_step_and_be_left_out_there_alone",),
    ),
    Mutant(
        "a case that its part cuts off has failed for good",
        "benchmarks/gpu/part.py",
        "    if verdict.status == FAILED and end < own_end and now >= end:",
        "    if verdict.status == FAILED and end < own_end and now < end:",
        (f"{PROGRAM}::test_a_case_that_is_cut_off_with_its_part_has_not_failed",),
    ),
    Mutant(
        "nothing is left for the pictures",
        "benchmarks/gpu/__main__.py",
        "min(LONGEST_S, left_s - kept, max(",
        "min(LONGEST_S, left_s, max(",
        (f"{PROGRAM}::test_what_a_part_leaves_is_for_the_next_and_the_pictures_are_always_made",),
    ),
    Mutant(
        "the ordinary suite sees the GPU",
        "benchmarks/gpu/checks.py",
        "words, env=NO_GPU), limit_s=150.0",
        "words), limit_s=150.0",
        ("tests/benchmarks/gpu/test_suite.py::test_the_ordinary_suite_sees_no_gpu_and_the_tests_for_a_gpu_do",),
    ),
    Mutant(
        "what a program had started lives on when it is killed",
        "benchmarks/gpu/part.py",
        '[sys.executable, "-I", "-S", "-c", _TIED, *words]',
        "list(words)",
        (f"{PROGRAM}::test_a_command_dies_with_the_program",),
    ),
)
