"""Mistakes in the launcher: who is ended, who starts again, and what is said of the dead."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

RESTARTS = "tests/launch/test_restarts.py"
SIGNALS = "tests/launch/test_signals.py"
DEATHS = "tests/launch/test_deaths.py"
STOP = "tests/training/test_stop.py"
SLURM = "tests/examples/test_slurm.py"
EXAMPLES = "tests/examples/test_examples.py"

LAUNCH = (
    Mutant(
        "ranks collect garbage among what the launcher has imported",
        "megatron/launch/__main__.py",
        "    gc.freeze()  # a collection in a forked rank would go over all of it, and copy its pages\n",
        "",
        ("tests/launch/test_exit_codes.py::test_a_forked_rank_collects_no_garbage_among_what_the_launcher_imported",),
    ),
    Mutant(
        "a restart meets what the dead ranks left in the store",
        "megatron/launch/rendezvous.py",
        "                if not key.startswith(OF_LAUNCHERS):\n",
        "                if key.startswith(OF_LAUNCHERS + ('x',)) and not key:\n",
        (f"{RESTARTS}::test_a_restart_meets_nothing_that_the_dead_ranks_left_in_the_store",),
        refuses=True,
    ),
    Mutant(
        "a checkpoint that was there before counts as progress",
        "megatron/launch/outcome.py",
        "self._last > last)",
        "self._last >= last)",
        (f"{RESTARTS}::test_progress_is_a_step_above_the_last_one_also_after_a_way_back",),
    ),
    Mutant(
        "a job starts again after a user's mistake",
        "megatron/launch/outcome.py",
        "RESTARTED = (1, 4)\n",
        "RESTARTED = (1, 3, 4)\n",
        (f"{RESTARTS}::test_restarts_follow_a_death_but_not_a_users_mistake",),
    ),
    Mutant(
        "a node that does not answer is taken for one that would start again",
        "megatron/launch/outcome.py",
        "        if missing:\n",
        "        if missing and not keys:\n",
        (f"{RESTARTS}::test_a_lost_node_ends_the_job_instead_of_starting_it_again",),
        refuses=True,
    ),
    Mutant(
        "a rank ends with the warning that its launcher has heard before",
        "megatron/launch/processes.py",
        "(number == WARNING or is_same_press(",
        "(is_same_press(",
        (f"{SIGNALS}::test_slurms_warning_lets_the_ranks_save_and_a_further_one_is_no_news",),
        refuses=True,
    ),
    Mutant(
        "a Ctrl-C that arrives twice ends the launcher's ranks",
        "megatron/launch/processes.py",
        " or is_same_press(number, self.seen[-1], now - self._last_at))",
        ")",
        (f"{SIGNALS}::test_a_ctrl_c_that_arrives_twice_is_one",),
    ),
    Mutant(
        "a Ctrl-C that arrives twice ends a rank",
        "megatron/training/exit_signals.py",
        " or is_same_press(number, self._number, now - self._at))",
        ")",
        (f"{STOP}::test_a_first_signal_is_a_request_and_a_second_ends_the_process",),
    ),
    Mutant(
        "two SIGTERMs are one",
        "megatron/training/exit_signals.py",
        "number == last and number in (signal.SIGINT, signal.SIGHUP) and",
        "number == last and",
        (f"{STOP}::test_what_a_terminal_sends_twice_within_half_a_second_is_one_press",),
    ),
    Mutant(
        "the ranks name the signal that the launcher sends",
        "megatron/launch/attempt.py",
        "        failure.note_asked(str(self.failure_file), self._signals.first_name)\n",
        "",
        (
            ""
            "tests/launch/test_reasons.py::test_ranks_say_the_signal_that_the_launcher_got_and_not_the_one_that_it_sends",
        ),
    ),
    Mutant(
        "SLURM's warning ends the launcher as a failure when there are no ranks yet",
        "megatron/launch/processes.py",
        "return RESUMABLE if self.seen[0] == WARNING else",
        "return RESUMABLE if self.seen[0] != WARNING else",
        (f"{SIGNALS}::test_slurms_warning_before_the_ranks_exist_asks_for_another_start",),
    ),
    Mutant(
        "what a rank has started outlives it",
        "megatron/launch/processes.py",
        "            os.killpg(self.pid, signal.SIGKILL)  # before waitpid",
        "            os.kill(self.pid, signal.SIGKILL)  # before waitpid",
        (f"{SIGNALS}::test_ctrl_c_leaves_no_orphan_and_the_port_free",),
    ),
    Mutant(
        "a longer note shines through a shorter one",
        "megatron/training/failure.py",
        '.ljust(length, b"\\0")',
        "",
        ("tests/training/test_position.py::test_a_page_holds_what_a_killed_rank_noted_last",),
        refuses=True,
    ),
    Mutant(
        "ranks that the launcher has ended are told of as victims of the OOM killer",
        "megatron/launch/attempt.py",
        "if status == -signal.SIGKILL and not self._was_signalled else",
        "if status != -signal.SIGKILL else",
        (f"{DEATHS}::test_a_killed_rank_is_named_with_its_stage_and_what_it_was_at",),
    ),
    Mutant(
        "a second signal is left to a launcher that is not there",
        "megatron/training/exit_signals.py",
        'if self.signal_name and "MEGATRON_FAILURE_FILE" not in os.environ:',
        'if self.signal_name and "MEGATRON_FAILURE_FILE" in os.environ:',
        (f"{STOP}::test_a_first_signal_is_a_request_and_a_second_ends_the_process",),
    ),
    Mutant(
        "--save alone is taken for a command that goes on by itself",
        "megatron/training/exit_signals.py",
        'or (saves_here and "--resume" in given)',
        "or saves_here",
        (f"{STOP}::test_the_line_says_how_this_very_command_goes_on",),
    ),
    Mutant(
        "ranks of other code train together",
        "megatron/training/initialize.py",
        "== 1 and len({code",
        "== 1 or len({code",
        ("tests/training/test_sameness.py::test_a_rank_that_runs_something_else_ends_all_with_2_and_a_table",),
    ),
    Mutant(
        "the launcher starts any number of ranks on two cores without a word",
        "megatron/launch/__main__.py",
        "    if crowded := machine.crowding(options.nproc_per_node):\n",
        "    if crowded := machine.crowding(1):\n",
        ("tests/launch/test_machine.py::test_the_launcher_warns_once_of_more_ranks_than_cores",),
    ),
    Mutant(
        "srun of a node's task takes no --cpus-per-task",
        "examples/slurm/gpt2.sh",
        "export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK",
        ":",
        (f"{SLURM}::test_the_job_is_requeued_on_75_alone",),
        refuses=True,
    ),
    Mutant(
        "srun of a rank's task takes no --cpus-per-task",
        "examples/launch/srun.sh",
        "export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK",
        ":",
        (f"{EXAMPLES}::test_srun_starts_a_task_for_each_rank_and_names_the_first_host",),
    ),
    Mutant(
        "Open MPI gives each rank one core",
        "examples/launch/mpirun.sh",
        "where=(--bind-to none) ",
        "where=() ",
        (f"{EXAMPLES}::test_mpirun_starts_python_and_is_told_where_ranks_meet",),
    ),
    Mutant(
        "the jobs of an elastic run have ports of their own",
        "examples/slurm/elastic.sh",
        "export NODE_LIST NNODES MASTER_PORT RUN_FOLDER",
        "export NODE_LIST NNODES RUN_FOLDER",
        (f"{SLURM}::test_an_elastic_run_is_a_job_for_each_host_with_the_same_nodes_port_and_folder",),
    ),
    Mutant(
        "the pods of an elastic run are in another order than their indices",
        "examples/launch/kubernetes/elastic.yaml",
        "gpt2-elastic-6.gpt2-elastic,gpt2-elastic-7.gpt2-elastic",
        "gpt2-elastic-7.gpt2-elastic,gpt2-elastic-6.gpt2-elastic",
        (f"{EXAMPLES}::test_a_job_of_kubernetes_starts_the_run_script_once_in_each_pod",),
    ),
    Mutant(
        "no part of the scripts for a real SLURM and MPI is refused",
        "tests/launch/local_runs.sh",
        'no such part: $part" >&2; exit 2; }',
        'no such part: $part" >&2; exit 3; }',
        ("tests/launch/test_slurm.py::test_a_part_that_is_not_there_is_refused_ahead_of_any_daemon",),
    ),
)
