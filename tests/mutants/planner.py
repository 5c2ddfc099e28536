"""Mistakes in the planner and in what the costs count for it."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

TRAFFIC = "tests/planner/test_traffic.py"
ESTIMATE = "tests/planner/test_estimate.py"
SEARCH = "tests/planner/test_search.py"
COST = "tests/cost/test_gpt2.py"
TOOL = "tests/planner/test_tool.py"
PIECES = "tests/planner/test_pieces.py"
CALIBRATE = "tests/planner/test_calibrate.py"

PLANNER = (
    Mutant(
        "an all-reduce sends its bytes once",
        "megatron/planner/traffic.py",
        'return self._around("all_reduce", 2 * num_bytes)',
        'return self._around("all_reduce", num_bytes)',
        (f"{TRAFFIC}::test_tensor_ranks_sum_four_times_a_layer_and_at_both_ends",),
    ),
    Mutant(
        "a group across nodes has the links of a node",
        "megatron/planner/traffic.py",
        "if world <= machine.devices_per_node or machine.devices_per_node % (size * stride) == 0:",
        "if size <= machine.devices_per_node:",
        (f"{TRAFFIC}::test_a_group_in_a_node_has_its_links_and_one_across_nodes_those_of_the_cards",),
    ),
    Mutant(
        "ZeRO 2 sums once for a step",
        "megatron/planner/messages.py",
        "sent = group.scattered(gradients).behind(hiding).times(m)",
        "sent = group.scattered(gradients).behind(hiding)",
        (f"{TRAFFIC}::test_replicas_sum_gradients_and_gather_weights_as_their_stage_of_zero_says",),
    ),
    Mutant(
        "what recomputation does again is not in the backward",
        "megatron/planner/work.py",
        "return Seconds(forward, backward + again, again, factor * parts.products, factor * parts.columns)",
        "return Seconds(forward, backward, again, factor * parts.products, factor * parts.columns)",
        (f"{ESTIMATE}::test_recomputation_costs_a_forward_and_leaves_memory",),
    ),
    Mutant(
        "the bubble is that of equal stages",
        "megatron/planner/estimate.py",
        "self.machine.idle(bubble(p, m, layout.schedule, layout.chunks, pieces))",
        "self.machine.idle(bubble(p, m, layout.schedule, layout.chunks))",
        (f"{ESTIMATE}::test_the_bubble_is_that_of_the_stages_in_the_machine_s_seconds",),
    ),
    Mutant(
        "ZeRO 2 is sought in pipelines",
        "megatron/planner/search.py",
        "if plain.pipe > 1 or not plain.overlaps_sums:",
        "if not plain.overlaps_sums:",
        (f"{SEARCH}::test_candidates_follow_the_rules_of_the_training",),
    ),
    Mutant(
        "the search ends one layout early",
        "megatron/planner/search.py",
        "if len(times) >= wanted.number and bound > times[wanted.number - 1]:",
        "if len(times) >= wanted.number - 1:",
        (f"{SEARCH}::test_the_search_finds_what_trying_every_candidate_finds",),
        refuses=True,
    ),
    Mutant(
        "a bound is above what a step takes",
        "megatron/planner/search.py",
        "return busy / (1 - planner.machine.idle(idle))",
        "return 1.5 * busy / (1 - planner.machine.idle(idle))",
        (f"{SEARCH}::test_the_search_finds_what_trying_every_candidate_finds",),
    ),
    Mutant(
        "a remedy makes a larger batch",
        "megatron/planner/remedies.py",
        "number = layout.num_micro_batches * layout.micro_batch_size // micro",
        "number = layout.num_micro_batches * layout.micro_batch_size",
        (f"{SEARCH}::test_changes_keep_to_the_rules_and_to_the_samples_of_a_step",),
    ),
    Mutant(
        "sequence parallelism leaves norms whole",
        "megatron/cost/parts.py",
        "else (2 * hidden + masks) // sequence",
        "else 2 * hidden + masks",
        (f"{COST}::test_sequence_parallelism_cuts_what_lies_between_the_products",),
    ),
    Mutant(
        "selective recomputation keeps the probabilities",
        "megatron/cost/waiting.py",
        "return replace(self, full=self.full - self.core, core=0)",
        "return self",
        (f"{COST}::test_attention_that_is_not_fused_keeps_probabilities_that_selective_recompute_leaves_out",),
    ),
    Mutant(
        "the lines to paste leave the stage of ZeRO out",
        "megatron/planner/lines.py",
        'words += ["--zero-stage", str(layout.zero_stage)]',
        "words += []",
        ("tests/planner/test_lines.py::test_flags_say_what_has_no_variable",),
    ),
    Mutant(
        "a search takes what the training refuses",
        "megatron/planner/search.py",
        "if is_better and not problems(planner.config, layout):",
        "if is_better:",
        (f"{TOOL}::test_the_pasted_lines_are_taken_by_the_parser_and_make_the_layout",),
        refuses=True,
    ),
    Mutant(
        "what is offered may be what the training refuses",
        "megatron/planner/remedies.py",
        "if fits and not problems(planner.config, layout):",
        "if fits:",
        (f"{TOOL}::test_what_makes_a_layout_fit_is_taken_by_the_parser",),
        refuses=True,
    ),
    Mutant(
        "weights stay on the host below ZeRO 3",
        "megatron/planner/remedies.py",
        "offload_parameters=layout.offload_parameters and stage == WHOLE)",
        "offload_parameters=layout.offload_parameters)",
        (f"{SEARCH}::test_changes_keep_to_the_rules_and_to_the_samples_of_a_step",),
    ),
    Mutant(
        "the search varies the micro-batches that were given",
        "megatron/planner/search.py",
        'number == fixed.get("num_micro_batches", number)',
        "number",
        (f"{TOOL}::test_what_is_given_of_a_layout_is_kept_and_the_rest_is_sought",),
    ),
    Mutant(
        "the schedule auto is one schedule in a search",
        "megatron/planner/options.py",
        "if name in LAYOUT and given[name] != AUTO}",
        "if name in LAYOUT}",
        (f"{TOOL}::test_what_is_given_of_a_layout_is_kept_and_the_rest_is_sought",),
    ),
    Mutant(
        "samples of a step are any multiple of the devices",
        "megatron/planner/options.py",
        "batch = least * 2 ** max(0, round(math.log2(TOKENS / config.tokens_per_sample / least)))",
        "batch = least * max(1, round(TOKENS / config.tokens_per_sample / least))",
        (f"{TOOL}::test_all_that_is_assumed_is_told",),
    ),
    Mutant(
        "nodes may be used in part",
        "megatron/planner/named.py",
        "if world > node and world % node:",
        "if world < 0:",
        (f"{TOOL}::test_what_cannot_be_ends_with_code_2_and_one_clear_message",),
    ),
    Mutant(
        "sequence parallelism joins no input again",
        "megatron/planner/messages.py",
        "return once + once.behind(beside) + sums.behind(for_weights)",
        "return once + sums.behind(for_weights)",
        (f"{TRAFFIC}::test_sequence_parallelism_joins_the_input_once_more_in_backward",),
    ),
    Mutant(
        "sums run beside the products of row layers, too",
        "megatron/planner/work.py",
        "[one for one in work.products if one.is_column]",
        "[*work.products]",
        (f"{TRAFFIC}::test_sequence_parallelism_joins_the_input_once_more_in_backward",),
    ),
    Mutant(
        "a device of a machine's file may be half a one",
        "megatron/planner/machine.py",
        "if isinstance(value, bool) or not isinstance(value, int) or value < 1:",
        "if value != value:",
        ("tests/planner/test_machine.py::test_a_file_that_is_no_machine_is_told",),
    ),
    Mutant(
        "a smoke run writes into the page",
        "benchmarks/scaling.py",
        "if args.smoke and not args.out:",
        "if False:",
        ("tests/benchmarks/test_scaling.py::test_options_that_cannot_be_are_refused_together",),
    ),
    Mutant(
        "the scores of attention set no pace",
        "megatron/planner/work.py",
        "tempo.passes * passed + tempo.scores * scored",
        "tempo.passes * passed",
        (f"{PIECES}::test_what_layers_take_comes_back_as_their_tempos",),
    ),
    Mutant(
        "a factor may be below zero",
        "megatron/planner/tempo.py",
        "if found is None or min(found) < 0:",
        "if found is None:",
        (f"{PIECES}::test_factors_come_back_and_none_is_below_zero",),
    ),
    Mutant(
        "the fastest rank stands for a model",
        "megatron/planner/pieces.py",
        "max((one.seconds[kind] for one in each), key=sum)",
        "min((one.seconds[kind] for one in each), key=sum)",
        (f"{PIECES}::test_the_slowest_rank_stands_for_a_model",),
    ),
    Mutant(
        "what lies beside the head is timed as the head",
        "megatron/planner/pieces.py",
        "beside = [units[name] for name in parts]",
        "beside = []  # type: ignore[var-annotated]",
        (f"{PIECES}::test_what_layers_take_comes_back_as_their_tempos",),
    ),
    Mutant(
        "ranks that take turns wait as if alone",
        "megatron/planner/machine.py",
        "return max(0.0, 1 - self.ranks_per_core * (1 - bubble))",
        "return bubble",
        (f"{PIECES}::test_ranks_that_take_turns_on_a_core_lose_less_by_waiting",),
    ),
    Mutant(
        "processor time of ranks that take turns counts once",
        "megatron/planner/probes.py",
        "return self.ranks_per_core * time.process_time()",
        "return time.process_time()",
        (f"{CALIBRATE}::test_ranks_that_take_turns_count_their_processor_time_once_for_each",),
    ),
    Mutant(
        "messages hide behind work on a CPU",
        "megatron/planner/messages.py",
        "hiding = 0.0 if machine.is_cpu else backward_s",
        "hiding = backward_s",
        (f"{PIECES}::test_on_a_cpu_nothing_hides_messages",),
    ),
    Mutant(
        "a head goes at the pace of layers",
        "megatron/planner/work.py",
        'self._kinds = [f"{family} {_kind(name)}" for name in costs.unit_names]',
        'self._kinds = [f"{family} layer" for name in costs.unit_names]',
        (f"{PIECES}::test_plans_take_the_tempo_of_their_family_and_format",),
    ),
)
