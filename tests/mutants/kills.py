"""Mistakes that show when a run is killed: what it begins again, what forked ranks wait for, what is left behind."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

AT_EACH = (
    "tests/training/test_kills.py::"
    "test_at_each_file_operation_of_each_rank_all_that_bears_a_checkpoints_name_is_whole[async]"
)

KILLED_RUNS = (
    Mutant(
        "the benchmark of kills wants a folder that is there",
        "benchmarks/kill.py",
        "            args.folder.mkdir(parents=True, exist_ok=True)\n",
        "            args.folder.resolve()\n",
        ("tests/training/test_kills.py::test_the_benchmark_names_a_folder_that_cannot_be_made",),
        refuses=True,
    ),
    Mutant(
        "a forked rank frees the numbers of its launcher's sockets",
        "megatron/launch/processes.py",
        "            os.dup2(null, number, inheritable=False)",
        "            os.close(number)",
        ("tests/launch/test_inherited.py::test_what_a_rank_opens_is_not_closed_with_the_launchers_objects",),
    ),
    Mutant(
        "a forked rank keeps its launcher's sockets",
        "megatron/launch/processes.py",
        "            os.dup2(null, number, inheritable=False)",
        "            pass",
        ("tests/launch/test_inherited.py::test_a_forked_rank_does_not_keep_the_launchers_sockets",),
    ),
    Mutant(
        "a forked rank runs while the next one is forked",
        "megatron/launch/processes.py",
        "                gate.wait()\n",
        "                pass\n",
        ("tests/launch/test_gate.py::test_no_rank_runs_before_the_last_one_is_forked",),
    ),
    Mutant(
        "what a start killed before its first checkpoint has recorded stays",
        "megatron/training/run_folder.py",
        "begins_again=goes_on and not saved_in(folder)",
        "begins_again=False",
        ("tests/training/test_resume_rules.py::test_what_may_have_run_before_its_first_checkpoint_begins_again",),
    ),
    Mutant(
        "a checkpoint is put together under its own name",
        "megatron/checkpoint/folders.py",
        'return target.with_name(f".tmp-{target.name}-{os.getpid()}")',
        "return target",
        (AT_EACH,),
    ),
)
