"""Mistakes in the planner and in what the costs count for it."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

TRAFFIC = "tests/planner/test_traffic.py"
ESTIMATE = "tests/planner/test_estimate.py"
SEARCH = "tests/planner/test_search.py"
COST = "tests/cost/test_gpt2.py"

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
        "if size * stride <= machine.devices_per_node:",
        "if size <= machine.devices_per_node:",
        (f"{TRAFFIC}::test_a_group_in_a_node_has_its_links_and_one_across_nodes_those_of_the_cards",),
    ),
    Mutant(
        "ZeRO 2 sums once for a step",
        "megatron/planner/estimate.py",
        "sent = group.gathered(gradients).behind(backward_s).times(m)",
        "sent = group.gathered(gradients).behind(backward_s)",
        (f"{TRAFFIC}::test_replicas_sum_gradients_and_gather_weights_as_their_stage_of_zero_says",),
    ),
    Mutant(
        "what recomputation does again is not in the backward",
        "megatron/planner/work.py",
        "return Seconds(forward, backward + again, again, products)",
        "return Seconds(forward, backward, again, products)",
        (f"{ESTIMATE}::test_recomputation_costs_a_forward_and_leaves_memory",),
    ),
    Mutant(
        "the bubble is that of equal stages",
        "megatron/planner/estimate.py",
        "idle = bubble(p, m, layout.schedule, layout.chunks, pieces)",
        "idle = bubble(p, m, layout.schedule, layout.chunks)",
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
        "return busy / (1 - bubble(",
        "return 1.5 * busy / (1 - bubble(",
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
        "megatron/cost/gpt2.py",
        "whole = (4 * h * width + 2 * h * self.mask_bytes) // sequence",
        "whole = 4 * h * width + 2 * h * self.mask_bytes",
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
)
