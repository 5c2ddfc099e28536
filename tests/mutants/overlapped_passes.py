"""Mistakes in forwards that run beside backwards: pairs, messages, process groups, threads, times."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

PAIRS = "tests/tds/schedule/test_overlap.py"
ENGINE = "tests/tds/engine/test_overlapped.py"
GROUPS = "tests/mpu/test_groups.py"
BITS = f"{ENGINE}::test_pairs_give_what_passes_in_turn_give_to_the_bit"
THREAD = f"{ENGINE}::test_a_thread_runs_one_forward_at_a_time_and_raises_where_it_is_joined"
ERRORS = f"{ENGINE}::test_an_error_of_either_thread_ends_the_call_on_all_stages"
WAITS = f"{ENGINE}::test_a_backward_that_waits_while_its_forward_runs_is_not_idle"
TIMES = f"{ENGINE}::test_both_actions_of_a_pair_are_recorded_and_no_time_counts_twice"
MIXED = f"{PAIRS}::test_a_pair_takes_what_two_evenly_mixed_actions_take"
PLANS = "tests/config/test_overlap.py::test_plans_count_the_forwards_that_begin_earlier"
STAGE, DATA, SIMULATE = "tds/engine/overlapped.py", "tds/schedule/overlap.py", "tds/schedule/simulate.py"

OF_OVERLAPPED_PASSES = (
    Mutant(
        "both passes have one process group",
        "megatron/mpu/groups.py",
        "return both.beside if runs_beside_backward() else both.in_turn",
        "return both.in_turn",
        (
            f"{GROUPS}::test_a_group_of_pairs_has_the_handle_of_the_thread_that_asks",
            f"{GROUPS}::test_two_threads_of_a_stage_add_up_in_any_order",
        ),
    ),
    Mutant(
        "the thread of forwards is not known as such",
        STAGE,
        "        let_run_beside_backward()\n",
        "        pass\n",
        (THREAD,),
    ),
    Mutant(
        "an error of a forward is lost",
        STAGE,
        "        if error is not None:\n            raise error",
        "        if error is not None:\n            return",
        (THREAD, f"{ERRORS}[forward-KeyError: 'the fourth]"),
    ),
    Mutant(
        "the backward takes its message ahead of the forward's",
        STAGE,
        "            self.exchange.taken.wait()\n",
        "",
        (BITS,),
        refuses=True,
    ),
    Mutant(
        "the stage goes on while the forward of a pair runs",
        STAGE,
        "            self._thread.join()  # an error",
        "            pass  # an error",
        (ERRORS,),
        refuses=True,
    ),
    Mutant(
        "layers of the backward are split for the forward of its pair, too",
        STAGE,
        "        is_other = self._beside is not None and not isinstance(action, Forward)",
        "        is_other = False",
        (f"{ENGINE}::test_in_a_pair_the_forward_alone_swaps_linear_layers",),
    ),
    Mutant(
        "the wait of a backward counts as idle while the forward runs",
        STAGE,
        "[(max(since, began), until)",
        "[(since, until)",
        (WAITS,),
    ),
    Mutant(
        "the forward of a pair is recorded as if it took no time",
        STAGE,
        "self.recorder.note(forward, marks[0], marks[1],",
        "self.recorder.note(forward, marks[0], marks[0],",
        (TIMES,),
    ),
    Mutant(
        "a stage that begins more forwards counts as much in flight as before",
        SIMULATE,
        "    more = more_in_flight(schedule, p, stage) if has_pairs else 0",
        "    more = 0",
        (f"{PAIRS}::test_orders_with_earlier_forwards_run_and_hold_what_is_planned", PLANS),
    ),
    Mutant(
        "a forward and the backward of its own micro-batch are a pair",
        DATA,
        "    return is_kind and (first.micro_batch, first.chunk) != (second.micro_batch, second.chunk)",
        "    return is_kind",
        (f"{PAIRS}::test_every_pair_is_of_two_micro_batches_or_chunks_and_no_stage_waits_for_ever",),
    ),
    Mutant(
        "a pair is made of a backward that hangs on its forward",
        DATA,
        "                if not all(self._is_there(stage, action) for action in unit):",
        "                if not self._is_there(stage, first):",
        (f"{PAIRS}::test_a_backward_that_hangs_on_what_its_forward_sends_is_no_pair",),
    ),
    Mutant(
        "two passes at once take no longer than one",
        DATA,
        "        return 1 / max(1.0, sum(each.load for each in row))",
        "        return 1.0",
        (f"{MIXED}[0.0-3.0]", f"{MIXED}[0.5-3.5]"),
    ),
    Mutant(
        "of what two passes share, time counts twice",
        SIMULATE,
        "        covered += max(span.end_s - max(span.start_s, until), 0.0)",
        "        covered += span.end_s - span.start_s",
        ("tests/tds/test_picture.py::test_a_pair_is_drawn_in_two_halves_and_its_time_counts_once",),
    ),
    Mutant(
        "a pair is drawn on top of each other",
        "tds/plot.py",
        "            lanes[number : number + 2] = [-1, 1]",
        "            lanes[number : number + 2] = [0, 0]",
        ("tests/tds/test_picture.py::test_a_pair_is_drawn_in_two_halves_and_its_time_counts_once",),
    ),
    Mutant(
        "recompute runs beside a backward",
        "tds/engine/build.py",
        'if engine.module.activation_checkpoint_interval > 0 else ""',
        'if engine.module.activation_checkpoint_interval > 1 else ""',
        (f"{ENGINE}::test_one_stage_recompute_and_devices_run_in_turn",),
    ),
)
