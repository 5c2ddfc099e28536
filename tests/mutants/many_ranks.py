"""Mistakes by which the work of rank 0, or of the store, grows faster than the ranks, or something is lost for it."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

RANKS = "tests/benchmarks/test_many_ranks.py"
GROWS = f"{RANKS}::test_start_and_end_grow_no_faster_than_ranks_times_their_logarithm"
PLANS = f"{RANKS}::test_plans_of_a_checkpoint_stay_with_their_ranks"
VERDICT = "tests/launch/test_verdict.py"
DECIDING = f"{VERDICT}::test_the_few_that_decide_name_the_culprit_of_all_whatever_comes_later"
RENDEZVOUS = "tests/training/test_rendezvous.py"

MANY_RANKS = (
    Mutant(
        "gloo makes a mesh of any number of ranks",
        "megatron/training/initialize.py",
        '        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")\n',
        "        pass\n",
        (f"{RANKS}::test_gloo_asks_of_the_store_in_proportion_to_the_ranks",),
    ),
    Mutant(
        "DeepSpeed's topology looks at all ranks for each place",
        "tds/deepspeed_api.py",
        "            _index(topology)\n",
        "            pass\n",
        ("tests/tds/test_deepspeed_contract.py::test_our_grid_is_made_in_lines_that_grow_as_the_ranks",),
    ),
    Mutant(
        "the neighbours of each rank are sought in all pipelines",
        "tds/deepspeed_api.py",
        '        pipelines = self._topo.get_axis_comm_lists("pipe")\n',
        "        return super()._build_p2p_groups()\n",
        (f"{GROWS}[groups]",),
    ),
    Mutant(
        "a stage is its own neighbour",
        "tds/deepspeed_api.py",
        "ranks[(stage + 1) % len(ranks)]",
        "ranks[stage]",
        ("tests/tds/test_deepspeed_contract.py::test_our_grid_is_deepspeeds[sizes0]",),
    ),
    Mutant(
        "DeepSpeed's own grid stays behind a module",
        "tds/deepspeed_api.py",
        "        _pipe_module.PipelineParallelGrid = theirs\n",
        "        pass\n",
        (
            "tests/tds/test_deepspeed_contract.py::test_pipeline_modules_have_our_grid_and_deepspeeds_module_is_as_it_was",
        ),
    ),
    Mutant(
        "each rank that gives up looks who is missing",
        "megatron/training/rendezvous.py",
        '    if keys.add(f"{opening}looks", 1) > 1:\n',
        "    if False:\n",
        (f"{GROWS}[meeting]",),
    ),
    Mutant(
        "all ranks are said to be missing",
        "megatron/training/rendezvous.py",
        '    missing = [number for number in range(size) if not keys.check([f"{opening}{number}"])]\n',
        "    missing = list(range(size))\n",
        (f"{RENDEZVOUS}::test_one_looks_who_is_missing_and_the_others_read_what_it_found",),
    ),
    Mutant(
        "the exits of all nodes go to all nodes",
        "megatron/launch/outcome.py",
        "for one in deciding([*exits_of(known), verdict])",
        "for one in dict.fromkeys([*exits_of(known), verdict])",
        (f"{GROWS}[ending]",),
    ),
    Mutant(
        "a node writes its exit over those of others",
        "megatron/launch/outcome.py",
        "            if known in (merged, before):  # torch gives back",
        "            if known:  # torch gives back",
        (f"{VERDICT}::test_a_node_enters_its_exit_beside_what_came_in_between",),
    ),
    Mutant(
        "only the first exit of any weight is kept",
        "megatron/launch/outcome.py",
        "for weight in range(4)]",
        "for weight in range(3, 4)]",
        (DECIDING,),
    ),
    Mutant(
        "the exit that opens the window is forgotten",
        "megatron/launch/outcome.py",
        "next((one for one in own if one.has_failed), None), ",
        "",
        (DECIDING,),
    ),
    Mutant(
        "the rank that had to be killed is forgotten",
        "megatron/launch/outcome.py",
        "    kept.append(first_stuck(exits))\n",
        "",
        (DECIDING,),
    ),
    Mutant(
        "the leader of an elastic job passes on what each node says of itself",
        "megatron/launch/elastic.py",
        "found = {} if name in TO_LEADER else {key: value}",
        "found = {key: value}",
        (f"{GROWS}[ending]",),
    ),
    Mutant(
        "the leader passes on what all know",
        "megatron/launch/control.py",
        "({} if is_known else self.summary(self, key, value))",
        "self.summary(self, key, value)",
        (f"{GROWS}[ending]",),
    ),
    Mutant(
        "each node of an elastic job gets a list of all nodes",
        "megatron/launch/control.py",
        "        if runs and runs[-1][1] == node - 1:\n",
        "        if False:\n",
        (f"{GROWS}[ending]",),
    ),
    Mutant(
        "all have left where one has not",
        "megatron/launch/elastic.py",
        'number >= len(control.round) and have_all(control, "left"):',
        "number >= len(control.round):",
        ("tests/launch/test_elastic.py::test_the_leader_tells_all_nodes_what_follows_from_what_each_says",),
    ),
    Mutant(
        "what each rank writes travels to rank 0 and back",
        "megatron/checkpoint/dcp.py",
        "            return SavePlan([], planner_data=(",
        "            return SavePlan(self._items, planner_data=(",
        (PLANS,),
    ),
    Mutant(
        "what each rank reads travels to rank 0",
        "megatron/checkpoint/dcp.py",
        "            return LoadPlan([])\n",
        "            return LoadPlan(self._reads)\n",
        (PLANS,),
    ),
    Mutant(
        "all ranks look into the store as often as a few do",
        "tds/watchdog/alarm.py",
        "        return max(PAUSE_S, self.num_ranks / LOOKS_PER_S)\n",
        "        return PAUSE_S\n",
        (f"{RANKS}::test_watchdogs_do_not_ask_more_of_a_store_than_it_can_answer",),
    ),
    Mutant(
        "the store of many ranks may have 1,024 connections",
        "megatron/files.py",
        "        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, most))\n",
        "        pass\n",
        ("tests/test_files.py::test_a_process_may_open_more_files_as_far_as_the_system_lets_it",),
    ),
)
