"""Mistakes in measuring a machine, in comparing plans with trainings, and in the study of scaling."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

CALIBRATE = "tests/planner/test_calibrate.py"
PLAN = "tests/benchmarks/test_plan.py"
RECORDING = "tests/benchmarks/test_recording.py"
SCALING = "tests/benchmarks/test_scaling.py"
COUNTED = f"{CALIBRATE}::test_work_is_counted_by_the_turns_of_a_second"
SLOWEST = f"{CALIBRATE}::test_a_machine_is_as_fast_as_its_slowest_rank"
FITTED = f"{CALIBRATE}::test_latency_and_bandwidth_come_back_from_the_times_that_they_make"
REFERENCE = "tests/planner/test_reference.py"
SPEEDS = f"{REFERENCE}::test_rates_of_a_machine_that_changes_its_speed_are_those_of_one_speed"
BESIDE = f"{REFERENCE}::test_a_time_is_taken_beside_the_readings_ahead_of_it_and_behind_it"
LOST = f"{PLAN}::test_what_waits_in_the_run_queue_is_lost_as_far_as_other_programs_were_at_work"
SHARES = f"{CALIBRATE}::test_a_rank_sends_the_share_of_a_ring"

CALIBRATION = (
    Mutant(
        "three products of a linear layer count as one",
        "megatron/planner/microbenchmarks.py",
        "6.0 * side**3 * turns",
        "2.0 * side**3 * turns",
        (COUNTED,),
    ),
    Mutant(
        "the update counts no gradient norm",
        "megatron/planner/microbenchmarks.py",
        "UPDATE_BYTES = 32",
        "UPDATE_BYTES = 28",
        (COUNTED,),
    ),
    Mutant(
        "starts of a chain's backward are not counted",
        "megatron/planner/microbenchmarks.py",
        "overhead_s = 1 / (2 * CHAIN",
        "overhead_s = 1 / (CHAIN",
        (COUNTED,),
    ),
    Mutant(
        "the mean window counts, so one disturbance does",
        "megatron/planner/microbenchmarks.py",
        "    return statistics.median(rates)\n",
        "    return statistics.fmean(rates)\n",
        (f"{CALIBRATE}::test_the_median_window_counts_and_the_turns_ahead_of_it_do_not",),
    ),
    Mutant(
        "the fastest rank's memory stands for all",
        "megatron/planner/calibrate.py",
        "memory_bandwidth=min(each.stream",
        "memory_bandwidth=max(each.stream",
        (SLOWEST,),
    ),
    Mutant(
        "the least overhead stands for all",
        "megatron/planner/calibrate.py",
        "overhead_s=max(",
        "overhead_s=min(",
        (SLOWEST,),
    ),
    Mutant(
        "products are as fast as on the fastest rank",
        "megatron/planner/calibrate.py",
        "min(rate for _, rate in rows)",
        "max(rate for _, rate in rows)",
        (SLOWEST,),
    ),
    Mutant(
        "a GPU's peak is what was measured",
        "megatron/planner/calibrate.py",
        "    if sheet is not None:\n        peaks |=",
        "    if sheet is None:\n        peaks |=",
        (f"{CALIBRATE}::test_a_known_gpu_has_the_peak_of_its_data_sheet",),
        refuses=True,
    ),
    Mutant(
        "a message of many ranks has one latency",
        "megatron/planner/microbenchmarks.py",
        "latency_s=start / latencies",
        "latency_s=start",
        (FITTED,),
    ),
    Mutant(
        "absolute errors count, so that long messages hide the latency",
        "megatron/planner/microbenchmarks.py",
        "weights = [1 / seconds**2 for _, seconds in samples]",
        "weights = [1.0 for _ in samples]",
        (f"{CALIBRATE}::test_relative_errors_count_so_long_messages_do_not_hide_the_latency",),
    ),
    Mutant(
        "the work ahead of a message counts as its time",
        "megatron/planner/microbenchmarks.py",
        "(_spent(rank, both, times, reference) - _spent(rank, work, times, reference)) / times",
        "_spent(rank, both, times, reference) / times",
        (f"{CALIBRATE}::test_what_ranks_do_ahead_of_a_message_is_not_in_its_time[0.001-0.004-0.004]",),
    ),
    Mutant(
        "an all-reduce sends as much as a gather",
        "megatron/planner/microbenchmarks.py",
        "Kind(_all_reduce, lambda n: 2 * (n - 1) / n",
        "Kind(_all_reduce, lambda n: (n - 1) / n",
        (SHARES,),
    ),
    Mutant(
        "a rank that has died has answered nothing",
        "megatron/planner/spawn_ranks.py",
        'what, value = "failed", "it died"',
        'what, value = "answer", None',
        (f"{CALIBRATE}::test_a_rank_that_fails_dies_or_hangs_is_named_and_none_is_left",),
    ),
    Mutant(
        "a step lasts as its fastest rank",
        "benchmarks/plan.py",
        "wall_s = max(each.steps_s[n]",
        "wall_s = min(each.steps_s[n]",
        (f"{PLAN}::test_a_step_lasts_as_its_slowest_rank_and_the_median_step_counts",),
    ),
    Mutant(
        "memory above the estimate is always met",
        "benchmarks/plan.py",
        "return abs(self.memory_ratio - 1) <= MEMORY_BAR",
        "return self.memory_ratio - 1 <= MEMORY_BAR",
        (f"{PLAN}::test_a_row_is_met_within_both_bars",),
    ),
    Mutant(
        "all ranks are divided by, though there are fewer cores",
        "benchmarks/scaling.py",
        "self.tokens_per_s / one.tokens_per_s / min(self.point.ranks, self.cores)",
        "self.tokens_per_s / one.tokens_per_s / self.point.ranks",
        (f"{SCALING}::test_efficiency_is_by_rank_and_at_most_by_core",),
    ),
    Mutant(
        "waits for messages are counted as bubble too",
        "benchmarks/scaling.py",
        '"bubble": silent_s - busy_s',
        '"bubble": whole_s - busy_s',
        (f"{SCALING}::test_slow_links_add_messages_and_leave_the_bubble",),
    ),
    Mutant(
        "a layout that does not fit may be the best",
        "benchmarks/scaling.py",
        "one.devices == devices and one.fits]",
        "one.devices == devices]",
        (f"{SCALING}::test_the_fastest_that_fits_stands_for_a_number_of_devices",),
    ),
    Mutant(
        "strong layouts keep the micro-batches of a replica",
        "benchmarks/scaling.py",
        '("strong", STRONG_SAMPLES / replicas)',
        '("strong", WEAK_MICRO_BATCHES)',
        (f"{SCALING}::test_every_layout_has_its_devices_and_both_series_their_micro_batches",),
    ),
    Mutant(
        "what lies behind a section of the page is lost",
        "benchmarks/scaling.py",
        "{end}{tail}",
        "{end}",
        (f"{SCALING}::test_a_section_is_replaced_between_its_marks_alone",),
    ),
    Mutant(
        "estimates made again are those of one rank's machine",
        "benchmarks/plan.py",
        "machines.get(case.ranks, UNTIMED)",
        "machines.get(1, UNTIMED)",
        (f"{RECORDING}::test_a_recording_gives_the_estimates_that_it_was_made_with",),
    ),
    Mutant(
        "bytes made again are those of the first stage",
        "benchmarks/plan.py",
        'estimate.memory[told["stage"]].total',
        "estimate.memory[0].total",
        (f"{RECORDING}::test_a_recording_gives_the_estimates_that_it_was_made_with",),
    ),
    Mutant(
        "estimates made again are of the sizes for tests",
        "benchmarks/plan.py",
        'is_smoke=recording["is_smoke"])\n',
        "is_smoke=True)\n",
        (f"{RECORDING}::test_a_faster_machine_and_larger_sizes_give_other_estimates",),
    ),
    Mutant(
        "rates are those of the second in which they were timed",
        "megatron/planner/microbenchmarks.py",
        "done / (spent * reference.scale())",
        "done / (spent + 0 * reference.scale())",
        (SPEEDS,),
    ),
    Mutant(
        "messages are those of the second in which they were timed",
        "megatron/planner/microbenchmarks.py",
        "rank.most(statistics.median(seconds)) * reference.scale()",
        "rank.most(statistics.median(seconds))",
        (f"{CALIBRATE}::test_what_ranks_do_ahead_of_a_message_is_not_in_its_time[0.001-0.004-0.004]",),
    ),
    Mutant(
        "layers are those of the second in which they were timed",
        "megatron/planner/layer_benchmarks.py",
        "(forward * at_work, backward * at_work)",
        "(forward, backward)",
        ("tests/planner/test_pieces.py::test_layers_and_updates_are_timed_at_the_speed_of_the_reference",),
    ),
    Mutant(
        "updates are those of the second in which they were timed",
        "megatron/planner/layer_benchmarks.py",
        'marks.between("ended", "updated") * scale',
        'marks.between("ended", "updated")',
        ("tests/planner/test_pieces.py::test_layers_and_updates_are_timed_at_the_speed_of_the_reference",),
    ),
    Mutant(
        "other programs make messages longer",
        "megatron/planner/microbenchmarks.py",
        "seconds - reference.lost_s(waited, seconds)",
        "seconds",
        (f"{CALIBRATE}::test_what_other_programs_took_is_no_time_of_a_message",),
    ),
    Mutant(
        "other programs make cut layers longer",
        "megatron/planner/layer_benchmarks.py",
        "1 - lost_s / sum(whole)",
        "1 - 0 * lost_s",
        ("tests/planner/test_pieces.py::test_what_other_programs_took_is_no_time_of_a_cut_layer",),
    ),
    Mutant(
        "whatever waits in the run queue is lost",
        "megatron/planner/reference.py",
        "else min(waited_s, others_s)",
        "else waited_s",
        (f"{REFERENCE}::test_what_waits_is_lost_as_far_as_other_programs_were_at_work",),
    ),
    Mutant(
        "the thread that waited least counts",
        "megatron/planner/reference.py",
        "return max((now - before",
        "return min((now - before",
        (f"{REFERENCE}::test_the_thread_counts_that_waited_longest",),
    ),
    Mutant(
        "only the reading ahead of it counts",
        "megatron/planner/reference.py",
        "return (ahead + self.read()) / 2",
        "return ahead + 0 * self.read()",
        (BESIDE,),
    ),
    Mutant(
        "a slow second makes times longer",
        "megatron/planner/reference.py",
        "return self.unit_s / self.beside()",
        "return self.beside() / self.unit_s",
        (BESIDE, SPEEDS),
    ),
    Mutant(
        "each rank goes by its own reading",
        "megatron/planner/reference.py",
        "        return self._rank.most(min(",
        "        return float(min(",
        (f"{REFERENCE}::test_the_slowest_rank_s_reading_counts_on_all",),
    ),
    Mutant(
        "a wait between the two clocks is taken off twice",
        "megatron/planner/reference.py",
        "if waited == before:",
        "if waited >= before:",
        (f"{REFERENCE}::test_a_wait_between_the_two_clocks_is_counted_by_neither",),
    ),
    Mutant(
        "a calibration keeps the speed of its first reading",
        "megatron/planner/calibrate.py",
        "statistics.median(readings) / readings[0]",
        "readings[0] / readings[0]",
        (f"{REFERENCE}::test_a_calibration_is_given_at_the_speed_of_the_median_reading",),
    ),
    Mutant(
        "a slower machine starts operations as fast",
        "megatron/planner/machine.py",
        "overhead_s=factor * self.overhead_s",
        "overhead_s=self.overhead_s",
        (f"{REFERENCE}::test_everything_takes_longer_on_a_slowed_machine",),
    ),
    Mutant(
        "a slower machine sends as fast",
        "megatron/planner/machine.py",
        "bandwidth=own.bandwidth / factor",
        "bandwidth=own.bandwidth",
        (f"{REFERENCE}::test_everything_takes_longer_on_a_slowed_machine",),
    ),
    Mutant(
        "steps count at the speed that the machine happened to have",
        "benchmarks/plan.py",
        "(step.seconds - step.lost_s) * step.speed(calibrated_s) for",
        "(step.seconds - step.lost_s) for",
        (
            f"{PLAN}::test_steps_are_taken_at_the_speed_of_the_calibration",
            f"{REFERENCE}::test_steps_and_calibration_at_speeds_of_their_own_meet_within_the_bar",
        ),
    ),
    Mutant(
        "all that a thread waited is lost, though its own process was at work",
        "benchmarks/plan.py",
        "else min(others_s, waited)",
        "else waited",
        (LOST,),
    ),
    Mutant(
        "ranks that share cores wait for one another, and it counts as lost",
        "benchmarks/plan.py",
        "others_s / cores if len(ranks) > cores else",
        "others_s / cores if False else",
        (LOST,),
    ),
    Mutant(
        "steps beside other programs count as quiet ones do",
        "benchmarks/plan.py",
        "key=lambda step: (step.reference_s, step.others))[: (len(steps) + 1) // 2]",
        "key=lambda step: (step.reference_s, step.others))",
        (f"{PLAN}::test_the_better_half_of_the_steps_counts_and_a_quiet_machine_has_all",),
    ),
)
