"""Mistakes in how the end of a job is told and what its code is."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

REASONS = "tests/launch/test_reasons.py"
SIGNALS = "tests/launch/test_signals.py"
STOP = "tests/training/test_stop.py"
ON_ITS_WAY = f"{REASONS}::test_an_error_on_its_way_out_counts_more_than_a_dead_peer"
NCCL = f"{REASONS}::test_what_nccl_says_of_this_rank_is_not_told_of_another"
SAMENESS = "tests/training/test_sameness.py"
CAUSES = "tests/checkpoint/test_causes.py::test_what_all_ranks_find_alike_is_marked_as_such_wherever_it_was_found"
RENDEZVOUS = "tests/training/test_rendezvous.py"
OWN = "tests/training/test_started_by.py::test_a_mistake_in_its_own_environment_is_said_by_the_very_process"
TABLE = f"{REASONS}::test_what_becomes_of_a_job_by_its_table"

CUT_SHORT = "tests/training/test_faults.py::test_a_run_that_sys_exit_0_cuts_short_ends_with_1_and_shows_the_line"
LEFT = "tests/launch/test_exit_codes.py::test_ranks_that_all_leave_with_0_before_their_run_is_done_fail_the_job"

ENDS = (
    Mutant(
        "sys.exit(0) in mid-run passes for the end of the run",
        "megatron/training/failure.py",
        "    return not isinstance(error, SystemExit) or own().is_running\n",
        "    return not isinstance(error, SystemExit)\n",
        (CUT_SHORT,),
    ),
    Mutant(
        "sys.exit(0) in mid-run is told and gives 0 all the same",
        "megatron/errors.py",
        "error.code & 0xFF or 1\n",
        "error.code & 0xFF\n",
        (CUT_SHORT,),
    ),
    Mutant(
        "ranks that all leave with 0 in mid-run have reached the goal",
        "megatron/launch/outcome.py",
        " or (self.status == 0 and bool(self.state))\n",
        "\n",
        (LEFT,),
    ),
    Mutant(
        "a run that is done counts as one that was cut short",
        "megatron/launch/outcome.py",
        "(self.status == 0 and bool(self.state))",
        "self.status == 0",
        ("tests/launch/test_exit_codes.py::test_ranks_whose_run_is_done_may_leave_with_0",),
    ),
    Mutant(
        "a run never ends for the launcher",
        "megatron/training/entrypoint.py",
        '        failure.note_state("")\n',
        "",
        ("tests/training/test_faults.py::test_a_run_that_is_done_may_be_left_with_0",),
    ),
    Mutant(
        "who takes longest to end is named last",
        "megatron/launch/attempt.py",
        "min(one.ended_at, last.said_at or one.ended_at)",
        "one.ended_at",
        (f"{REASONS}::test_who_called_sys_exit_first_is_named_though_rank_0_takes_longer_to_end",),
    ),
    Mutant(
        "a rank that the others waited for is one of those that lost a peer",
        "megatron/launch/outcome.py",
        "4: 2 if self.is_late else 3",
        "4: 3",
        ("tests/launch/test_verdict.py::test_culprit_and_code",),
    ),
    Mutant(
        "a rank that all ranks name does not tell the launcher",
        "megatron/training/timeouts.py",
        "    if is_named:\n",
        "    if not found:\n",
        ("tests/tds/watchdog/test_watch.py::test_a_rank_that_the_others_waited_for_says_so_to_the_launcher",),
    ),
    Mutant(
        "an error is told once all is closed",
        "megatron/training/callbacks/heartbeat.py",
        "        failure.report_failure(error, self.trainer.world.name)\n",
        "",
        (f"{REASONS}::test_a_run_out_of_patience_says_so_while_rank_0_still_closes_its_files",),
    ),
    Mutant(
        "a rank that has told its error leaves as one that lost a peer",
        "megatron/training/failure.py",
        "    if _code is not None:\n        os._exit(_code)\n",
        "",
        (f"{ON_ITS_WAY}[that was told]",),
        refuses=True,
    ),
    Mutant(
        "an error that waits for a save is forgotten when a peer dies",
        "megatron/training/failure.py",
        "isinstance(handled, JobError) and",
        "handled is None and",
        (f"{ON_ITS_WAY}[that waits for a save]",),
    ),
    Mutant(
        "what closing raises replaces the code of the error",
        "megatron/training/failure.py",
        "    if _code is not None:\n        return _code\n",
        "",
        (f"{REASONS}::test_what_is_raised_after_an_error_was_told_does_not_change_the_code",),
    ),
    Mutant(
        "what all ranks raised is lost when rank 0 does not come to say it",
        "megatron/launch/outcome.py",
        "if verdict.words and not self.is_said:",
        "if verdict.words and self.is_said:",
        (f"{REASONS}::test_the_launcher_says_what_rank_0_did_not_come_to_say",),
    ),
    Mutant(
        "the launcher repeats what rank 0 has said",
        "megatron/training/failure.py",
        "            print_line(str(failure))\n            note_reported()\n",
        "            print_line(str(failure))\n",
        (f"{REASONS}::test_the_launcher_does_not_say_again_what_rank_0_has_said",),
    ),
    Mutant(
        "what is wrong with one process alone is left to rank 0",
        "megatron/training/entrypoint.py",
        "    with marked(is_of_this_rank=True):\n        raise_all(problems)\n",
        "    raise_all(problems)\n",
        (OWN,),
    ),
    Mutant(
        "a wrong flag hides that a process does not know its rank",
        "megatron/training/entrypoint.py",
        "                raise_own(unsettled)\n            raise\n",
        "                pass\n            raise\n",
        (OWN,),
    ),
    Mutant(
        "a plan for many ranks names no wrong flag",
        "megatron/training/entrypoint.py",
        'if "--dry-run" not in sys.argv:',
        "if sys.argv:",
        ("tests/training/test_started_by.py::test_a_plan_for_many_ranks_names_the_wrong_flags",),
    ),
    Mutant(
        "a port that is none is found by the rendezvous",
        "megatron/training/entrypoint.py",
        '    if not re.fullmatch("[0-9]{1,5}", port) or',
        "    if port.isalpha() and",
        ("tests/training/test_started_by.py::test_what_is_said_by_half_is_told_with_what_to_do",),
    ),
    Mutant(
        "each rank says what all have found of a checkpoint",
        "megatron/checkpoint/rank_errors.py",
        "            problem.is_of_this_rank = False  # it names its ranks, and goes to all\n",
        "",
        (CAUSES,),
    ),
    Mutant(
        "each rank says that a save has failed",
        "megatron/checkpoint/dcp.py",
        "        with marked(is_of_this_rank=False):  # DCP",
        "        with marked(is_of_this_rank=True):  # DCP",
        (CAUSES,),
    ),
    Mutant(
        "a GPU that two ranks have is told as another rank that is gone",
        "megatron/training/failure.py",
        "isinstance(cause, kinds) and (own := fault_of_this_rank(cause)) is not None:",
        "(own := fault_of_this_rank(cause)) is not None and not isinstance(cause, kinds):",
        (NCCL,),
    ),
    Mutant(
        "a peer that NCCL has lost is told as a mistake of this rank",
        "megatron/training/failure.py",
        "        if is_of_a_peer or not any(",
        "        if not any(",
        (NCCL,),
    ),
    Mutant(
        "NCCL is the first to see two ranks on one GPU",
        "megatron/training/initialize.py",
        "    compare_devices(place, grid)\n",
        "",
        (f"{SAMENESS}::test_a_start_compares_devices_before_nccl_sees_them",),
    ),
    Mutant(
        "GPUs of two hosts are taken for one",
        "megatron/training/initialize.py",
        "ranks_of.setdefault((host, device_there), {})",
        'ranks_of.setdefault(("", device_there), {})',
        (f"{SAMENESS}::test_two_ranks_on_one_gpu_are_named_with_what_made_them_choose_it",),
    ),
    Mutant(
        "two processes with one rank wait for ever",
        "megatron/training/rendezvous.py",
        '        if keys.add(f"{_CLAIMS}/{rank}", 1) > 1 and',
        '        if keys.add(f"{_CLAIMS}/{rank}", 1) > 2 and',
        (f"{RENDEZVOUS}::test_a_rank_that_is_there_twice_is_named_by_the_later_one_and_the_others_go_on",),
        refuses=True,
    ),
    Mutant(
        "a process that waits for others does not hear a signal",
        "megatron/training/rendezvous.py",
        '            keys.compare_set(name, "", f"{wanted}, and rank {rank} has left',
        '            keys.check([name]) or (name, "", f"{wanted}, and rank {rank} has left',
        (f"{RENDEZVOUS}::test_sigterm_ends_a_process_that_waits_for_others_and_those_with_it",),
        refuses=True,
    ),
    Mutant(
        "a restarted process is taken for a second one",
        "megatron/training/rendezvous.py",
        'if keys.check([_COME]) or keys.add(f"{_HEARTBEATS}/{rank}", 0) > heartbeats:',
        "if heartbeats >= 0:",
        (f"{RENDEZVOUS}::test_a_process_takes_the_place_of_one_that_was_killed_while_it_waited",),
    ),
    Mutant(
        "nobody looks whether those that have come are still there",
        "megatron/training/rendezvous.py",
        "        _barrier(keys, _BEGIN,",
        "        rank or _barrier(keys, _COME,",
        (f"{RENDEZVOUS}::test_a_rank_that_died_after_all_had_come_is_named",),
        refuses=True,
    ),
    Mutant(
        "the ranks that waited are named in place of the one that is stuck",
        "megatron/launch/outcome.py",
        "    if stuck is not None and all(",
        "    if stuck is not None and not all(",
        (f"{REASONS}::test_ranks_that_did_not_leave_are_named_where_all_others_lost_a_peer",),
    ),
    Mutant(
        "SLURM's warning to all processes ends a job that has only begun with 4",
        "megatron/launch/processes.py",
        "    signal.signal(signal.SIGUSR1, signal.SIG_IGN)",
        "    signal.signal(signal.SIGUSR1, signal.SIG_DFL)",
        (f"{SIGNALS}::test_slurms_warning_to_all_processes_ahead_of_any_handler_asks_for_another_start",),
        refuses=True,
    ),
    Mutant(
        "a rank that a signal ended ahead of its handler counts as dead",
        "megatron/launch/outcome.py",
        "BY_REQUEST = (-signal.SIGTERM, -signal.SIGINT, -signal.SIGUSR1)",
        "BY_REQUEST = (-signal.SIGTERM,)",
        (TABLE,),
    ),
    Mutant(
        "--no-load-optim is left in the command that goes on",
        "megatron/training/exit_signals.py",
        '"--no-load-optim", ',
        "",
        (f"{STOP}::test_the_flags_that_are_advised_against_are_all_that_leave_something_out",),
    ),
    Mutant(
        "the limit of a step bounds the start",
        "megatron/training/initialize.py",
        "timedelta(seconds=config.parallel.phase_timeout_s)",
        "timedelta(seconds=config.parallel.step_timeout_s)",
        ("tests/training/test_world.py::test_the_start_is_limited_by_the_phase_and_not_by_the_step",),
        refuses=True,
    ),
    Mutant(
        "a wall clock that is set makes a rank late",
        "tds/watchdog/diagnosis.py",
        "for clock_s in (_CLOCK_S, time.time() - now)]",
        "for clock_s in (time.time() - now,)]",
        ("tests/tds/watchdog/test_watch_record.py::test_a_wall_clock_that_is_set_makes_no_rank_late",),
    ),
    Mutant(
        "the grace of ranks that leave is measured on the wall clock",
        "megatron/launch/attempt.py",
        "        spent = time.monotonic() - self._began\n        return",
        "        spent = time.time() - self._began\n        return",
        ("tests/launch/test_exit_codes.py::test_a_wall_clock_that_is_set_ahead_ends_nothing",),
    ),
)
