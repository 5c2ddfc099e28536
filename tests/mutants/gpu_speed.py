"""Mistakes in the figures of a GPU: memory, shares, ratios, and what tables, chart and pages make of them."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

SPEED = "tests/benchmarks/gpu/test_speed.py"
PICTURES = "tests/benchmarks/gpu/test_pictures.py"

GPU_SPEED = (
    Mutant(
        "reserved memory is that of the end, not the most",
        "benchmarks/step_time.py",
        "torch.accelerator.max_memory_reserved()",
        "torch.accelerator.memory_reserved()",
        (f"{SPEED}::test_reserved_memory_is_the_most_that_the_allocator_held",),
    ),
    Mutant(
        "reserved memory is what tensors had",
        "benchmarks/step_time.py",
        '"reserved_memory_bytes": record.reserved_bytes,',
        '"reserved_memory_bytes": record.peak_bytes,',
        (f"{SPEED}::test_a_step_has_quartiles_and_both_kinds_of_memory",),
    ),
    Mutant(
        "MFU counts the whole of causal attention",
        "benchmarks/step_time.py",
        '"mfu": flops / step_s / peak,',
        '"mfu": whole / step_s / peak,',
        (f"{SPEED}::test_a_step_has_quartiles_and_both_kinds_of_memory",),
    ),
    Mutant(
        "an operator's kernels count twice",
        "benchmarks/step_profile.py",
        'if (each.device_type == on_cpu) == (kind == "cpu") and not each.is_user_annotation',
        "if not each.is_user_annotation",
        (f"{SPEED}::test_the_kernels_are_what_ran_on_the_device_and_their_shares_those_of_all_kernels",),
    ),
    Mutant(
        "shares are those of the kernels that are shown",
        "benchmarks/step_profile.py",
        "whole = sum(time for _, time, _ in times)",
        "whole = sum(time for _, time, _ in times[:SHOWN])",
        (f"{SPEED}::test_the_kernels_are_what_ran_on_the_device_and_their_shares_those_of_all_kernels",),
    ),
    Mutant(
        "memory is estimated over what was reserved",
        "benchmarks/gpu/speed.py",
        'memory / row["peak_memory_bytes"] if is_counted',
        'memory / row["reserved_memory_bytes"] if is_counted',
        (f"{SPEED}::test_ratios_are_estimates_over_measurement",),
    ),
    Mutant(
        "the planner's ratio is upside down",
        "benchmarks/gpu/speed.py",
        'ms / row["ms_per_step"]}',
        'row["ms_per_step"] / ms}',
        (f"{SPEED}::test_ratios_are_estimates_over_measurement",),
    ),
    Mutant(
        "the planner plans another batch than was measured",
        "benchmarks/gpu/speed.py",
        'figures["batch_size"], planned, machine.kind, contender)',
        'figures["batch_size"] + 1, planned, machine.kind, contender)',
        (f"{SPEED}::test_the_planner_is_compared_with_the_cases_that_were_measured",),
    ),
    Mutant(
        "an allocator may hold less than its tensors",
        "benchmarks/gpu/speed.py",
        "assert 0 < allocated <= reserved,",
        "assert 0 < allocated,",
        (f"{SPEED}::test_figures_that_cannot_be_fail_the_case",),
    ),
    Mutant(
        "contenders hold their memory one after the other",
        "benchmarks/gpu/speed.py",
        "expected = sum(expected_bytes(sizes, batch, name) for name in names)",
        "expected = max(expected_bytes(sizes, batch, name) for name in names)",
        (f"{SPEED}::test_a_smaller_device_gets_smaller_batches_then_fewer_contenders_then_a_smaller_slice",),
    ),
    Mutant(
        "a run without room is given up at once",
        "benchmarks/gpu/speed.py",
        "below=run.batch_size)",
        "below=1)",
        (f"{SPEED}::test_a_run_without_room_after_all_is_tried_with_fewer_sequences",),
    ),
    Mutant(
        "bars are as high as MFU of whole attention",
        "benchmarks/gpu/publish.py",
        'one["contenders"][name]["mfu"]',
        'one["contenders"][name]["mfu_whole"]',
        (f"{PICTURES}::test_bars_are_as_high_as_mfu_and_the_chart_says_where_it_was_measured",),
    ),
    Mutant(
        "pictures stay those of the first start",
        "benchmarks/gpu/part.py",
        "    kept = () if part.is_always else [",
        "    kept = [",
        (f"{PICTURES}::test_the_part_is_run_anew_at_each_start",),
    ),
    Mutant(
        "cases that failed are left out of the table",
        "benchmarks/gpu/publish.py",
        "for end in (PASSED, FAILED, SKIPPED, NOT_RUN) if end in ends]",
        "for end in (PASSED, SKIPPED, NOT_RUN) if end in ends]",
        (f"{PICTURES}::test_the_table_of_devices_counts_the_cases_of_each_part",),
    ),
    Mutant(
        "a dry run is published as what was seen on a GPU",
        "benchmarks/gpu/publish.py",
        'if content["is_dry"] or content["kind"] != "cuda":',
        'if content["kind"] != "cuda":',
        (f"{PICTURES}::test_what_is_not_of_a_gpu_is_not_published",),
    ),
    Mutant(
        "the oldest results come first",
        "benchmarks/gpu/publish.py",
        'key=lambda content: str(content["date"]), reverse=True)',
        'key=lambda content: str(content["date"]))',
        (f"{PICTURES}::test_a_person_publishes_results_into_all_pages",),
    ),
    Mutant(
        "a page says more than was seen",
        "benchmarks/gpu/publish.py",
        "written, but has not run\\non a GPU.",
        "written, and has run\\non a GPU.",
        ("tests/docs/test_seen.py::test_the_results_on_a_page_are_those_in_the_repository",),
    ),
)
