"""Mistakes in preprocessing by jobs that share a folder, and on a cluster."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

PLACE = "megatron/data/preprocess"
ON_RAY = "tests/data/preprocess/test_cluster.py"
FOREIGN = "tests/data/preprocess/test_foreign_folders.py"
REMOTE = "tests/data/preprocess/test_remote_inputs.py"
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
        '{path.name}.tmp-{self._mark}")\n',
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
    Mutant(
        "a unit of a lost machine is forgotten",
        f"{PLACE}/cluster.py",
        "                        waiting.appendleft(number)\n",
        "                        number = number\n",
        (f"{ON_RAY}::test_units_of_a_lost_machine_go_again",),
        refuses=True,
    ),
    Mutant(
        "what a lost machine had counted stays",
        f"{PLACE}/cluster.py",
        "                    counts.pop(number, None)\n",
        "                    number = number\n",
        (f"{ON_RAY}::test_what_a_lost_machine_had_counted_is_not_counted_twice",),
        refuses=True,
    ),
    Mutant(
        "a unit that ends its worker is tried for ever",
        f"{PLACE}/cluster.py",
        "        if times >= MOST_LOSSES:\n",
        "        if times >= 50:\n",
        (f"{ON_RAY}::test_a_unit_that_is_lost_again_and_again_ends_the_job",),
    ),
    Mutant(
        "--workers does not limit what a cluster does at a time",
        f"{PLACE}/cluster.py",
        "            room = self._most or max(1, ",
        "            room = max(1, ",
        (f"{ON_RAY}::test_the_address_of_the_environment_counts",),
    ),
    Mutant(
        "a unit is taken as finished that this machine does not see",
        f"{PLACE}/cluster.py",
        "                        _wait_until_seen(self._work.parts, report.part)\n",
        "                        number = number\n",
        (f"{ON_RAY}::test_a_machine_that_does_not_share_the_folders_is_named",),
        refuses=True,
    ),
    Mutant(
        "what Spark is still writing is read",
        f"{PLACE}/foreign_folders.py",
        'name == "_temporary" or',
        'name == "_temp" or',
        (f"{FOREIGN}::test_what_spark_has_not_finished_is_refused[_temporary]",),
    ),
    Mutant(
        "a transaction without its end is read",
        f"{PLACE}/foreign_folders.py",
        ") not in names\n    ]",
        ") in names\n    ]",
        (f"{FOREIGN}::test_what_spark_has_not_finished_is_refused[_started_5]",),
    ),
    Mutant(
        "_SUCCESS is a document",
        f"{PLACE}/foreign_folders.py",
        """ or (name.startswith("_") and "=" not in name)""",
        "",
        (f"{FOREIGN}::test_partitions_of_a_table_are_read_in_the_order_of_their_names",),
        refuses=True,
    ),
    Mutant(
        "partitions whose column begins with an underscore are left out",
        f"{PLACE}/foreign_folders.py",
        """ or (name.startswith("_") and "=" not in name)""",
        """ or name.startswith("_")""",
        (f"{FOREIGN}::test_partitions_of_a_table_are_read_in_the_order_of_their_names",),
    ),
    Mutant(
        "tasks of datatrove that did not complete are not missed",
        f"{PLACE}/foreign_folders.py",
        """if f"{task:05d}" not in completed]""",
        """if f"{task:05d}" in ()]""",
        (f"{FOREIGN}::test_datatroves_log_folder_is_left_out_and_says_whether_all_tasks_completed",),
    ),
    Mutant(
        "the last row groups of a file are of no unit",
        f"{PLACE}/corpus.py",
        "        yield Unit(0, path, format, start, len(sizes), size)\n",
        "        yield Unit(0, path, format, start, start + 1, size)\n",
        (f"{FOREIGN}::test_tiny_row_groups_share_a_unit",),
    ),
    Mutant(
        "a body that a store has cut short is taken as whole",
        "megatron/object_store.py",
        "        if len(data) != stop - start:\n",
        "        if not data:\n",
        (f"{REMOTE}::test_what_a_store_fails_at_is_asked_for_again_and_said",),
        refuses=True,
    ),
    Mutant(
        "refused credentials are tried again",
        "megatron/object_store.py",
        'if isinstance(error, PermissionError) or "Credential"',
        'if "Credential"',
        (f"{REMOTE}::test_what_fails_for_good_ends_the_job_and_leaves_nothing",),
    ),
    Mutant(
        "what is not finished in a store is read",
        f"{PLACE}/corpus.py",
        "        check_is_finished(folder, inside)\n",
        "        folder = str(folder)\n",
        (f"{REMOTE}::test_what_is_no_input_is_refused",),
    ),
)
