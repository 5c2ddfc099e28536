"""Mistakes in when a run saves, what it does about a failed save, its lock, and what a start takes up."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

RUNS = "tests/training/test_saves_in_runs.py"
KILLED = f"{RUNS}::test_a_run_killed_while_it_saves_in_the_background_goes_on_as_if_it_had_not"
BACK = f"{RUNS}::test_a_run_goes_back_to_its_own_checkpoints_only"
LEFT = f"{RUNS}::test_a_run_does_not_go_back_to_a_branch_that_it_has_left"
OTHERS = f"{RUNS}::test_other_settings_are_warned_of_and_weights_alone_are_taken"
SAVER = "tests/training/test_saver.py"
LOCK = "tests/training/test_run_lock.py"
RULES = "tests/training/test_resume_rules.py"
METRICS = "tests/training/test_metrics_files.py"

SAVES = (
    Mutant(
        "metrics go to a folder that nobody can find",
        "megatron/training/callbacks/metrics_writer.py",
        "            self._require_folder()\n",
        "",
        (f"{METRICS}::test_a_run_folder_that_is_lost_in_mid_run_is_named",),
        refuses=True,
    ),
    Mutant(
        "a limit on the size of a file is told as a full disk",
        "megatron/checkpoint/dcp.py",
        '        if f"[Errno {errno.EFBIG}]" in why:\n',
        "        if not why:\n",
        ("tests/checkpoint/test_disk.py::test_a_file_that_the_system_cuts_short_is_an_error_and_no_stump_stays",),
    ),
    Mutant(
        "the cause of a failed save ends with two full stops",
        "megatron/training/callbacks/checkpointer.py",
        "{str(error).rstrip('.')}. Older",
        "{error}. Older",
        (f"{SAVER}::test_a_save_that_fails_in_mid_run_is_told_and_the_run_goes_on",),
    ),
    Mutant(
        "the default interval saves where another was named",
        "megatron/config/checkpoint.py",
        "return DEFAULT_MINUTES if self.is_default_interval else 0.0",
        "return DEFAULT_MINUTES",
        (f"{SAVER}::test_time_asks_for_a_save",),
    ),
    Mutant(
        "saves that nobody asked for fill the disk",
        "megatron/training/callbacks/checkpointer.py",
        "is_automatic=flags.is_default_interval",
        "is_automatic=False",
        (f"{SAVER}::test_a_save_knows_whether_anybody_asked_for_it",),
    ),
    Mutant(
        "saves that somebody asked for are deleted",
        "megatron/training/callbacks/checkpointer.py",
        "is_automatic=flags.is_default_interval",
        "is_automatic=True",
        (f"{SAVER}::test_a_save_knows_whether_anybody_asked_for_it",),
    ),
    Mutant(
        "a step whose save failed in the background counts as saved",
        "megatron/training/callbacks/checkpointer.py",
        "step, self.saved_step = self.saved_step, -1",
        "step = self.saved_step",
        (f"{SAVER}::test_a_failure_in_the_background_is_told_and_the_next_save_goes_on",),
    ),
    Mutant(
        "the last save of a run may fail in the background",
        "megatron/training/callbacks/checkpointer.py",
        "        if self.saves.failure is not None and self.saves.failed_step == self.trainer.progress.step:\n"
        "            raise self.saves.failure\n",
        "",
        (f"{SAVER}::test_a_failure_in_the_background_is_told_and_the_next_save_goes_on",),
    ),
    Mutant(
        "a rank that has not heard of the failure saves on",
        "megatron/training/callbacks/checkpointer.py",
        "            if stops and saves.failure is not None:\n                raise saves.failure\n",
        "",
        (f"{SAVER}::test_with_stop_a_failure_in_the_background_is_brought_to_all_ranks_by_the_vote",),
    ),
    Mutant(
        "the wait for the save before is under the limit of a step",
        "megatron/training/callbacks/checkpointer.py",
        "        with trainer.phases.over(SAVING):  # the wait for the save before, too\n"
        "            self.wait_here()\n",
        "        self.wait_here()\n        with trainer.phases.over(SAVING):\n",
        (f"{SAVER}::test_the_wait_for_the_save_before_is_under_the_limit_of_saving",),
    ),
    Mutant(
        "by time a save that failed is tried again at every step",
        "megatron/training/train_state.py",
        "self.failed_step = error, step\n        self.last_at = time.monotonic()\n",
        "self.failed_step = error, step\n",
        (f"{SAVER}::test_by_time_a_save_that_failed_is_tried_again_after_the_interval_only",),
    ),
    Mutant(
        "a staged checkpoint is told as durable",
        "megatron/training/callbacks/checkpointer.py",
        '            trainer.call("on_save_end", step, None, {**staged, **stall})\n',
        '            self._note_saved(step, trainer.folder, "staged", {**staged, **stall})\n',
        (f"{SAVER}::test_staged_and_durable_are_told_apart",),
    ),
    Mutant(
        "gradients that are held are not missed",
        "megatron/training/train_state.py",
        "    _check_between_steps(optimizer)\n    return",
        "    return",
        (f"{SAVER}::test_no_save_in_the_midst_of_a_step",),
    ),
    Mutant(
        "a run goes back to a checkpoint of an earlier one",
        "megatron/training/callbacks/checkpointer.py",
        " and (sequence is None or self.saves.lineage.has(sequence))",
        "",
        (BACK,),
    ),
    Mutant(
        "a run goes back to a branch that it has left",
        "megatron/training/callbacks/checkpointer.py",
        "                self.saves.lineage.go_on_from(checkpoint.sequence, last_sequence(saved_in(trainer.folder)))\n",
        "                pass\n",
        (LEFT,),
    ),
    Mutant(
        "a run deletes the checkpoints of an earlier one",
        "megatron/training/callbacks/checkpointer.py",
        '"loaded": self.loaded, "earlier": left_alone}',
        '"loaded": self.loaded}',
        (BACK,),
    ),
    Mutant(
        "a restart forgets that its folder has checkpoints of an earlier run",
        "megatron/training/train_state.py",
        "return cls(**state.get(_NAME, {}))",
        "return cls()",
        ("tests/training/test_branch.py::test_an_earlier_run_in_the_folder_is_not_on_the_way_of_a_restart_either",),
    ),
    Mutant(
        "what is recorded after the checkpoint stays when a run goes back",
        "megatron/training/callbacks/metrics_writer.py",
        "        self._opened.truncate_to_step(step)\n",
        "        pass\n",
        (BACK,),
    ),
    Mutant(
        "a run that goes back keeps its generators",
        "megatron/training/train_state.py",
        'if taken.generators and layout_text(checkpoint.state["layout"], world.grid.topology) is None:',
        "if False:",
        (BACK,),
    ),
    Mutant(
        "a line that a kill cut off spoils the next",
        "megatron/training/callbacks/metrics_writer.py",
        "    if kept != path.read_bytes():\n",
        '    if kept.count(b"\\n") != path.read_bytes().count(b"\\n"):\n',
        (f"{METRICS}::test_a_line_that_a_kill_cut_off_spoils_no_other",),
    ),
    Mutant(
        "weights alone bring the optimizer along",
        "megatron/training/train_state.py",
        "has_state = is_whole and not flags.load_weights_only",
        "has_state = is_whole",
        (OTHERS,),
    ),
    Mutant(
        "a restart follows the flags of the first start",
        "megatron/training/run_folder.py",
        "return Place(folder, folder, is_restart=True)",
        "return Place(folder, source or folder)",
        (f"{RULES}::test_a_restart_goes_on_with_everything_from_what_its_own_job_has_saved",),
    ),
    Mutant(
        "a restart takes the checkpoint of an earlier job",
        "megatron/training/run_folder.py",
        "job() is not None and any(_job_of(path) == job() for path",
        "any(True for path",
        (f"{RULES}::test_a_restart_goes_on_with_everything_from_what_its_own_job_has_saved",),
    ),
    Mutant(
        "a restart takes the run that is the newest now",
        "megatron/training/run_folder.py",
        "noted or _by_flags(config, name)",
        "_by_flags(config, name)",
        (f"{RULES}::test_a_restart_takes_the_run_that_its_first_start_chose",),
    ),
    Mutant(
        "a node that does not see the folder says nothing",
        "megatron/training/run_folder.py",
        "platform.node() if is_blind else None",
        "None",
        (f"{RULES}::test_a_folder_that_a_node_does_not_see_is_found_at_the_start[1]",),
    ),
    Mutant(
        "a file that its holder has just removed counts as the lock",
        "megatron/file_lock.py",
        "            if not isinstance(problem, BlockingIOError) and not _is_file(descriptor, self.path):\n"
        "                return None\n",
        "",
        (f"{LOCK}::test_a_file_that_was_removed_meanwhile_is_no_lock",),
    ),
    Mutant(
        "any job may enter a folder",
        "megatron/file_lock.py",
        "fcntl.LOCK_EX | fcntl.LOCK_NB",
        "fcntl.LOCK_SH | fcntl.LOCK_NB",
        (f"{LOCK}::test_the_second_job_is_told_who_the_first_one_is",),
    ),
    Mutant(
        "what rank 0 has forked holds the folder after it",
        "megatron/training/run_lock.py",
        '"lockf"',
        '"flock"',
        (f"{LOCK}::test_what_a_rank_has_forked_does_not_hold_its_lock",),
        refuses=True,
    ),
    Mutant(
        "a holder that has not said who it is counts as nobody's",
        "megatron/training/run_lock.py",
        " if found else _SILENCE_S\n",
        "\n",
        (f"{LOCK}::test_a_holder_that_has_not_said_yet_who_it_is_is_asked_again[True]",),
    ),
    Mutant(
        "a number that went to another process counts as the job",
        "megatron/training/run_lock.py",
        'return started is not None and started == found.get("started")',
        "return started is not None",
        (f"{LOCK}::test_without_locks_the_text_decides",),
        refuses=True,
    ),
    Mutant(
        "another tokenizer is taken without a word",
        "megatron/training/callbacks/checkpointer.py",
        "            check_tokenizer(state, self.tokenizer, allow_change=flags.allow_vocab_change, config=config)\n",
        "",
        (f"{RUNS}::test_another_tokenizer_ends_with_3",),
    ),
)
