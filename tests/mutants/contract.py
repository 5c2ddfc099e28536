"""Mistakes in what a script and the engine owe each other: micro-batches, losses, who reads, who is started."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

AGREES = "tests/tds/engine/test_data_agreement.py"
ENDS = f"{AGREES}::test_all_ranks_learn_of_data_that_end_and_can_go_on"
NESTING = "tests/tds/engine/test_nesting.py"
AS_LAYER = "tests/tds/test_loss_as_layer.py"
DROP_IN = "tests/tds/test_drop_in.py"
STARTED = "tests/training/test_started_by.py"
STAGES = "tests/training/test_data_rules.py"

CONTRACT = (
    Mutant(
        "data that have ended on some ranks end as if on all",
        "tds/engine/micro_batches.py",
        "        if ended and ready:\n",
        "        if ended and not ready:\n",
        (ENDS,),
    ),
    Mutant(
        "a global batch that is not whole is trained on",
        "tds/engine/micro_batches.py",
        "            self.ended_at = self._number if self.ended_at is None else self.ended_at\n",
        "",
        (f"{AGREES}::test_a_global_batch_that_is_not_whole_changes_no_weight",),
    ),
    Mutant(
        "the update comes ahead of the agreement on the data",
        "tds/engine/engine.py",
        "            source.end(meter.num_micro_batches)\n",
        "            take_step(engine, gradients)\n            source.end(meter.num_micro_batches)\n",
        (f"{AGREES}::test_a_global_batch_that_is_not_whole_changes_no_weight",),
    ),
    Mutant(
        "checksums are compared between replicas that read nothing alike",
        "tds/engine/micro_batches.py",
        "            other = first_of.setdefault(replica, rank)\n",
        "            other = first_of.setdefault(rank, rank)\n",
        (f"{AGREES}::test_checksums_on_request_find_stages_that_read_different_samples",),
    ),
    Mutant(
        "checksums see bytes alone",
        "tds/engine/micro_batches.py",
        '        header_crc = zlib.crc32(f"{value.dtype}{list(value.shape)}".encode(), before)\n',
        "        header_crc = before\n",
        (f"{AGREES}::test_a_checksum_sees_values_types_shapes_and_nesting",),
    ),
    Mutant(
        "every rank has a sampler of its own",
        "tds/engine/micro_batches.py",
        "        rank=grid.get_data_parallel_rank(),\n        shuffle=False,\n",
        "        rank=grid.get_global_rank() % grid.data_parallel_size if grid.get_stage_id() == 0 else 0,\n"
        "        shuffle=False,\n",
        (f"{AGREES}::test_middle_stages_open_no_sample_and_replicas_share_them",),
    ),
    Mutant(
        "middle stages read, too",
        "megatron/training/initialize.py",
        "self.grid.pipe.rank in (0, of_loss)",
        "self.grid.pipe.rank <= of_loss",
        (f"{STAGES}::test_middle_stages_never_open_the_data",),
    ),
    Mutant(
        "a list of three is a pair and a rest",
        "tds/engine/micro_batches.py",
        "        if not isinstance(batch, (tuple, list)) or len(batch) != 2:\n",
        "        if not isinstance(batch, (tuple, list)) or len(batch) < 2:\n",
        (f"{NESTING}::test_a_wrong_nesting_is_named_with_what_to_do",),
    ),
    Mutant(
        "the batch function is not named",
        "tds/engine/micro_batches.py",
        "        if self.batch_fn is None:\n            return",
        "        if self.batch_fn is not None:\n            return",
        (f"{NESTING}::test_an_engine_names_the_nesting_and_who_gave_it",),
        refuses=True,
    ),
    Mutant(
        "a model without a loss function is trained on half of what its last layer returns",
        "tds/engine/stage.py",
        "            loss = output if call.loss_fn is None else",
        "            loss = output[0] / 2 if isinstance(output, dict) else output if call.loss_fn is None else",
        (f"{AS_LAYER}::test_a_loss_as_the_last_layer_trains_to_the_bits_of_a_loss_function[1]",),
        refuses=True,
    ),
    Mutant(
        "the labels of the first micro-batch stay on the last stage",
        "tds/engine/micro_batches.py",
        "        first, self._first = self._first, None\n",
        "        first = self._first\n",
        (f"{AS_LAYER}::test_a_loss_as_the_last_layer_trains_to_the_bits_of_a_loss_function[1]",),
    ),
    Mutant(
        "data sets of one's own may be of any length",
        "megatron/training/data.py",
        '        return f"{len(dataset)} samples and {text}" if isinstance(dataset, Sized) else text\n',
        "        return text\n",
        ("tests/training/test_data_order.py::test_data_sets_of_ones_own_must_be_equally_long_on_all_ranks",),
    ),
    Mutant(
        "the flag that compares data does nothing",
        "megatron/arguments/deepspeed_keys.py",
        '    "check_data": Key(BOOLEAN, "check_data_agreement"),\n',
        "",
        (f"{STAGES}::test_stages_that_read_different_samples_end_the_run_where_it_is_asked",),
    ),
    Mutant(
        "a rank of srun's step is taken for one of the batch script",
        "megatron/training/entrypoint.py",
        '    if starter.name == "srun" and size not in env:\n',
        '    if starter.name == "srun":\n',
        (f"{STARTED}::test_slurms_tasks_of_each_node_are_counted_and_what_is_no_step_is_alone",),
    ),
    Mutant(
        "ranks of several hosts meet each on its own",
        "megatron/training/entrypoint.py",
        '        if size != "1" and env.get("LOCAL_WORLD_SIZE") != size:\n',
        '        if size != "1" and "LOCAL_WORLD_SIZE" not in env:\n',
        (f"{STARTED}::test_the_ranks_of_every_program_meet_on_their_host_or_where_the_user_says",),
    ),
    Mutant(
        "a size without a rank trains alone",
        "megatron/training/entrypoint.py",
        '    if env.get("WORLD_SIZE", "1") != "1":\n',
        '    if env.get("WORLD_SIZE", "1") == "":\n',
        (f"{STARTED}::test_what_is_said_by_half_is_told_with_what_to_do",),
    ),
    Mutant(
        "mpirun's variables count ahead of torchrun's",
        "megatron/training/entrypoint.py",
        '    if "RANK" in env:\n',
        '    if "RANK" in env and not any(name in env for each in STARTERS for name in each.variables):\n',
        (f"{STARTED}::test_what_torchrun_says_counts_ahead_of_what_started_torchrun",),
    ),
    Mutant(
        "a section that is switched on further down is taken for one that is off",
        "tds/engine/build.py",
        "        if _is_enabled(given.get(key)):\n",
        '        if given.get(key, {}).get("enabled") is True:\n',
        (f"{DROP_IN}::test_sections_of_the_json_that_act_on_nothing_are_refused_or_announced",),
        refuses=True,
    ),
    Mutant(
        "DeepSpeed's profiler of FLOPs begins in our forwards",
        "tds/engine/engine.py",
        'would begin with each forward and never end."""\n        return False\n',
        'would begin with each forward and never end."""\n        return super().flops_profiler_enabled()\n',
        (f"{DROP_IN}::test_sections_of_the_json_that_act_on_nothing_are_refused_or_announced",),
        refuses=True,
    ),
    Mutant(
        "DeepSpeed's own engine trains where ours was asked for",
        "tds/engine/__init__.py",
        "    if not isinstance(built[0], PipelineEngine):\n",
        "    if built[0] is None:\n",
        (f"{DROP_IN}::test_an_engine_that_is_not_ours_is_refused",),
        refuses=True,
    ),
    Mutant(
        "any torch will do",
        "tds/deepspeed_alias.py",
        "OLDEST_TORCH = (2, 11)\n",
        "OLDEST_TORCH = (2,)\n",
        (f"{DROP_IN}::test_an_older_torch_is_refused",),
        refuses=True,
    ),
    Mutant(
        "any DeepSpeed will do",
        "tds/deepspeed_alias.py",
        "    check_versions()\n    spare",
        "    spare",
        ("tests/tds/test_lazy.py::test_a_deepspeed_of_another_version_is_refused_at_the_first_name_of_it",),
    ),
    Mutant(
        "a module of DeepSpeed is loaded a second time under our name",
        "tds/deepspeed_alias.py",
        "            sys.modules.pop(fullname, None)\n",
        "            pass\n",
        ("tests/tds/test_lazy.py::test_names_that_need_them_are_there_all_the_same_whatever_comes_first",),
    ),
    Mutant(
        "a rank that is stuck leaves before the others have read the verdict",
        "tds/watchdog/watchdog.py",
        'could say who did not come", own, linger)',
        'could say who did not come", own, None)',
        ("tests/tds/watchdog/test_watch.py::test_a_rank_whose_alarm_is_answered_does_what_it_was_told_to_do_then",),
    ),
    Mutant(
        "libraries are known by the folder of one Python",
        "tds/watchdog/diagnosis.py",
        " or not _INSTALLED.isdisjoint(path.split(os.sep))\n",
        "\n",
        ("tests/tds/watchdog/test_watchdog.py::test_the_place_of_a_stack_is_the_programs_own_wherever_libraries_lie",),
    ),
    Mutant(
        "a torch that is built in a checkout is taken for the program",
        "tds/watchdog/diagnosis.py",
        '(sysconfig.get_paths()["stdlib"], *torch.__path__))\n',
        '(sysconfig.get_paths()["stdlib"],))\n',
        ("tests/tds/watchdog/test_watchdog.py::test_torch_is_a_library_where_it_is_built_too",),
    ),
    Mutant(
        "an engine within another's call wipes what that one waits for",
        "tds/p2p/communicator.py",
        "        before, _present = _present, self\n",
        "        before, _present = _present, outside\n",
        ("tests/tds/watchdog/test_watchdog.py::test_two_engines_of_a_process_tell_each_of_what_it_does_itself",),
    ),
    Mutant(
        "a user's error with the words of a lost peer gets a verdict",
        "tds/watchdog/watchdog.py",
        "    while error is not None and not isinstance(error, communicator.PeerLost):\n",
        '    while error is not None and " lost " not in str(error):\n',
        ("tests/tds/watchdog/test_watchdog.py::test_a_timeout_is_known_by_its_cause",),
    ),
    Mutant(
        "chunks keep the functions that were there before they were compiled",
        "tds/deepspeed_api.py",
        "        return self._module.forward_funcs[self._own]\n",
        '        return self.__dict__.setdefault("kept", self._module.forward_funcs[self._own])\n',
        ("tests/tds/test_programs.py::test_compile_reaches_functions_of_every_chunk",),
    ),
    Mutant(
        "the pods of the Job look for another service",
        "examples/launch/kubernetes/job.yaml",
        "      subdomain: gpt2\n",
        "      subdomain: gpt\n",
        ("tests/examples/test_examples.py::test_a_job_of_kubernetes_starts_the_run_script_once_in_each_pod",),
    ),
)
