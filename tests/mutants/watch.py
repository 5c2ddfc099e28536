"""Mistakes in who is watched, for how long, and who is named for being stuck, slow or bad."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

PHASES = "megatron/training/timeouts.py"
WATCH = "tds/watchdog/watchdog.py"
RANKS = "tests/training/test_phases.py"
ALONE = "tests/tds/watchdog/test_watch.py"
ENGINES = "tests/tds/watchdog/test_watchdog.py"
LIMITS = f"{RANKS}::test_limits_of_all_waits_follow_the_phase_and_leave_other_groups_alone"

WATCHED = (
    Mutant(
        "ranks end a long phase one by one",
        PHASES,
        '        self._meet(f"waiting for all ranks at the end of {name}")\n',
        "",
        (f"{RANKS}::test_a_rank_that_is_slow_where_it_may_be_is_waited_for",),
    ),
    Mutant(
        "ranks begin a long phase one by one",
        PHASES,
        '        self._meet(f"waiting for all ranks ahead of {name}")\n',
        "",
        (f"{RANKS}::test_a_rank_stuck_in_a_step_has_the_limit_of_a_step_though_the_others_save_already",),
    ),
    Mutant(
        "the first step has the limit of every step",
        PHASES,
        "        if name == STEP and not self._has_stepped:\n",
        "        if name == STEP and False:\n",
        (LIMITS,),
    ),
    Mutant(
        "the short limit stays once steps have begun",
        PHASES,
        "        if self._limit_of(name) != before:\n",
        "        if self._limit_of(name) < before:\n",
        (LIMITS,),
    ),
    Mutant(
        "messages of a pipeline keep their limit",
        "tds/engine/engine.py",
        "        links.timeout = limit\n",
        "",
        (LIMITS,),
    ),
    Mutant(
        "what a thread in the background sends counts as progress",
        "tds/watchdog/diagnosis.py",
        'if each.get("thread_id") not in background]',
        "]",
        (f"{ALONE}::test_the_last_operations_are_those_of_the_main_thread_with_their_groups",),
    ),
    Mutant(
        "a process that was stopped for a while is late when it goes on",
        WATCH,
        "            self._since = min(now, self._since + stopped_s)\n",
        "            pass\n",
        (f"{ALONE}::test_a_process_that_was_itself_stopped_or_starved_is_not_late_for_that",),
    ),
    Mutant(
        "steps are no progress",
        PHASES,
        "            self._watch.progress += 1\n        if self.name == FIRST_STEP:\n",
        "            pass\n        if self.name == FIRST_STEP:\n",
        (f"{RANKS}::test_a_step_that_is_done_is_progress",),
    ),
    Mutant(
        "a rank that waits in a collective is taken for the one that is stuck",
        WATCH,
        "own.is_waiting or operation is not None or self._is_busy",
        "own.is_waiting or self._is_busy",
        (f"{ALONE}::test_a_rank_in_a_collective_says_that_it_waits",),
    ),
    Mutant(
        "nobody raises the alarm for a rank at work",
        WATCH,
        "        return now - self._since > limit_s\n",
        "        return now - self._since > limit_s and state.together is not None\n",
        (f"{ALONE}::test_a_rank_is_late_once_nothing_has_changed_for_the_limit",),
    ),
    Mutant(
        "a store that is gone takes the watch with it",
        WATCH,
        "        if not self._finished.wait(patience_s) and number",
        "        if self._finished.wait() and number",
        (f"{RANKS}::test_a_host_that_is_lost_with_the_store_of_the_process_group_takes_the_limit",),
    ),
    Mutant(
        "a wait that is over is concluded in the next call",
        WATCH,
        " and number == self._number and not self._closed.is_set():\n",
        " and not self._closed.is_set():\n",
        (f"{ENGINES}::test_a_late_wait_that_ends_with_its_call_is_not_concluded[True]",),
    ),
    Mutant(
        "an engine's work that takes long is a wait",
        WATCH,
        'self.limit_s if is_waiting else float("inf")',
        "self.limit_s",
        (f"{ENGINES}::test_many_short_waits_are_not_one_long_wait",),
    ),
    Mutant(
        "the engine's own watchdog goes on beside the run's",
        PHASES,
        "            self._watch.exchange = engine.engine.let_watch()\n",
        "            self._watch.exchange = engine.engine._stage.exchange\n",
        (LIMITS,),
    ),
    Mutant(
        "a single rank of the launcher is not watched",
        PHASES,
        "(world.grid.world.size == 1 and _is_attended())",
        "world.grid.world.size == 1",
        (f"{RANKS}::test_a_single_rank_of_the_launcher_that_is_stuck_ends_with_its_stack",),
    ),
    Mutant(
        "a debugger is ended with the process that it holds",
        PHASES,
        " or os.isatty(0)",
        "",
        (f"{RANKS}::test_a_run_of_one_rank_that_a_person_may_be_at_is_not_watched",),
    ),
    Mutant(
        "stacks of a process that was stopped stand there without a word",
        WATCH,
        "        if now - self._armed[0] > self._armed[1] > 0:\n",
        "        if now - self._armed[0] > self._armed[1] > limit_s:\n",
        (f"{ALONE}::test_stacks_that_a_stop_of_the_whole_process_has_shown_are_explained",),
    ),
    Mutant(
        "whoever was the slowest once is named",
        "megatron/training/callbacks/straggler.py",
        "self._times + 1 if place == self._place else 1",
        "self._times + 1",
        ("tests/training/test_drift.py::test_only_who_is_the_slowest_again_and_again_is_named",),
    ),
    Mutant(
        "a loss that is no number has a gradient norm of 0",
        "megatron/training/callbacks/stability_guard.py",
        "norm if has_gradients else math.nan",
        "norm",
        ("tests/training/test_guard.py::test_a_bad_step_is_left_out_on_all_ranks[replicas no number]",),
    ),
)
