"""Mistakes in where settings come from: the file of --config, and the folder of --load."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

FILE = "tests/arguments/test_config_file.py"
ARGS = "tests/checkpoint/test_checkpoint_args.py"
BRING = "megatron/checkpoint/checkpoint_args.py"
READER = "megatron/arguments/config_file.py"

CONFIG_FILE = (
    Mutant(
        "a duplicated key of a YAML passes",
        READER,
        "        if key in found:\n",
        "        if key in found and keys:\n",
        (f"{FILE}::test_a_duplicated_key_is_an_error_that_names_file_line_and_key",),
    ),
    Mutant(
        "a duplicated key under a heading of a YAML passes",
        READER,
        "        if key in found:\n",
        "        if key in found and not keys:\n",
        (f"{FILE}::test_a_duplicated_key_is_an_error_that_names_file_line_and_key",),
    ),
    Mutant(
        "two keys of one flag pass",
        READER,
        "        if option.name in self.places:\n",
        "        if option.name in self.places and False:\n",
        (f"{FILE}::test_two_keys_of_one_flag_are_an_error_that_names_both",),
    ),
    Mutant(
        "a file wins over the command line",
        READER,
        "    for name in values.keys() - found.values.keys():\n",
        "    for name in values.keys():\n",
        (f"{FILE}::test_the_order_is_command_line_file_json_recipe",),
    ),
    Mutant(
        "a recipe acts beside a run's config.json",
        READER,
        "        return {} if self.is_of_run else defaults\n",
        "        return defaults\n",
        (f"{FILE}::test_a_config_json_is_accepted_as_it_is_and_says_the_same",),
    ),
    Mutant(
        "a repeated run writes into the folder of the first",
        READER,
        '    if is_own("save"):\n',
        '    if is_own("save") and values.get("load"):\n',
        (f"{FILE}::test_a_repeated_run_begins_as_the_first_start_did_and_saves_elsewhere",),
    ),
    Mutant(
        "the decay of a repeated run stays that of the first",
        READER,
        "name not in derived or flat[name] != value}",
        "True}",
        (f"{FILE}::test_what_follows_from_other_sizes_follows_those_of_the_command_line",),
    ),
    Mutant(
        "the folder's sizes lose against the recipe",
        "megatron/arguments/parser.py",
        "        defaults = {**defaults, **checkpoint_args(found, defaults)}\n",
        "        defaults = {**checkpoint_args(found, defaults), **defaults}\n",
        (f"{ARGS}::test_a_run_brings_every_size_to_all_ways_of_starting_from_it[mpt]",),
    ),
    Mutant(
        "the folder's sizes lose against our default",
        BRING,
        "    return brought if starts_new_run else {**brought, **_keep_settings(found, source, flags)}\n",
        "    return {}\n",
        (f"{ARGS}::test_a_run_brings_every_size_to_all_ways_of_starting_from_it[mpt]",),
        refuses=True,
    ),
    Mutant(
        "a given size that differs is silently taken",
        BRING,
        "and not _is_same(source.config, name, found.values[name], value)\n",
        "and not _is_same(source.config, name, value, value)\n",
        (f"{ARGS}::test_a_given_size_that_differs_is_an_error_that_names_both_and_both_places",),
    ),
    Mutant(
        "layers that do not act are silently taken",
        BRING,
        "    if sides and given is not None and other:\n",
        "    if sides and given is None and other:\n",
        (f"{ARGS}::test_layers_of_both_sides_are_those_of_the_folder",),
    ),
    Mutant(
        "a size that contradicts the tensors passes",
        BRING,
        "    if not _fits(config, tensors):\n",
        "    if False:\n",
        (f"{ARGS}::test_a_size_that_contradicts_the_tensors_is_named_with_its_file_and_key",),
    ),
    Mutant(
        "only names of tensors are compared",
        BRING,
        "    return bool(sum(prod(header.shape) for header in found.values()) == costs_of(whole).num_parameters)\n",
        "    return bool(costs_of(whole).num_parameters)\n",
        (f"{ARGS}::test_a_size_that_contradicts_the_tensors_is_named_with_its_file_and_key",),
    ),
    Mutant(
        "a file of tensors that is cut off passes",
        BRING,
        "        if end != size:\n",
        "        if end < size:\n",
        (f"{ARGS}::test_missing_cut_off_and_foreign_files_are_named",),
    ),
    Mutant(
        "the newest run of another name is taken",
        BRING,
        'RUNS.glob(f"{name}-*")',
        'RUNS.glob("*-*")',
        (f"{ARGS}::test_resume_takes_the_newest_run_of_its_name_or_what_this_job_chose",),
    ),
)
