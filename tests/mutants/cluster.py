"""Mistakes in preprocessing by jobs that share a folder, and on a cluster."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

PLACE = "megatron/data/preprocess"
SHARES = "tests/data/preprocess/test_shares.py"
CLUSTER = (
    Mutant(
        "the last units are of no job",
        f"{PLACE}/job_types.py",
        "        return unit % self.num_jobs == self.number - 1\n",
        "        return unit == self.number - 1\n",
        (f"{SHARES}::test_each_unit_is_of_one_job_and_neighbours_are_of_neighbours",),
        refuses=True,
    ),
    Mutant(
        "jobs of one output cut it by the cores of their machines",
        f"{PLACE}/plan.py",
        "    if job.share or job.cluster:  # not",
        "    if job.cluster:  # not",
        (f"{SHARES}::test_the_cut_depends_on_no_machine",),
        refuses=True,
    ),
    Mutant(
        "a job is not compared with the plan of those before it",
        f"{PLACE}/plan.py",
        "    if differences := asked.differences(found):\n",
        "    if differences := asked.differences(asked):\n",
        (f"{SHARES}::test_parts_of_other_options_or_of_another_count_are_refused",),
    ),
    Mutant(
        "units of another job are joined",
        f"{PLACE}/shards.py",
        "            if part.plan != self.plan:\n",
        "            if part.plan == '':\n",
        (f"{SHARES}::test_missing_damaged_and_mixed_parts_are_named",),
    ),
    Mutant(
        "damaged units are joined",
        f"{PLACE}/share.py",
        "            looked_at = parts.look_at(unit)\n",
        "            looked_at = parts.look_at(unit)\n"
        "            if looked_at == 'damaged':\n"
        "                looked_at = Part.from_json(parts.path(unit, 'json').read_bytes())\n",
        (f"{SHARES}::test_missing_damaged_and_mixed_parts_are_named",),
    ),
    Mutant(
        "two writers of a unit write into one file",
        f"{PLACE}/shards.py",
        '{path.name}.tmp-{socket.gethostname()}-{os.getpid()}")\n',
        '{path.name}.tmp-")\n',
        (f"{SHARES}::test_two_writers_of_one_unit_leave_it_whole",),
        refuses=True,
    ),
    Mutant(
        "the plan of several jobs is written in place",
        f"{PLACE}/plan.py",
        "            with suppress(FileExistsError):\n                os.link(own, folder / PLAN)\n",
        "            os.replace(own, folder / PLAN)\n",
        (f"{SHARES}::test_parts_of_other_options_or_of_another_count_are_refused",),
    ),
    Mutant(
        "an input that changed under one part leaves its units",
        f"{PLACE}/job.py",
        '                parts.path(number, "json").unlink(missing_ok=True)\n',
        "                number = number\n",
        (f"{SHARES}::test_an_input_that_changes_or_holds_nothing_is_refused",),
    ),
)
