"""Mistakes in what experts cost: parameters, memory, rows that are sent; and in the plans that follow."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

COST = "tests/models/common/test_expert_cost.py"
PLANS = "tests/planner/test_expert_plans.py"
KEPT = f"{COST}::test_a_half_keeps_what_is_counted[1]"
EVEN = f"{COST}::test_an_even_load_sends_what_the_planner_says[even-4]"
FLOPS = f"{COST}::test_flops_and_mfu_count_active_parameters"
BUILT = f"{COST}::test_parameters_are_those_of_the_model_that_is_built_on_every_rank"
SENT = f"{PLANS}::test_rows_go_to_the_experts_and_back_in_both_passes[none]"
SUMMED = f"{PLANS}::test_gradients_of_experts_are_summed_over_those_that_have_them[1-6-10]"
SOUGHT = f"{PLANS}::test_experts_are_sought_on_ranks_that_divide_them"
CHANGED = f"{PLANS}::test_changes_share_experts_out_and_keep_what_can_be"
DECODER, EXPERTS = "megatron/models/common/decoder_cost.py", "megatron/models/common/expert_cost.py"
MEMORY, TIMES, SEARCH = (
    "megatron/models/common/memory.py", "megatron/planner/time_model.py", "megatron/planner/search.py"
)  # fmt: skip

IN_EXPERT_COSTS = (
    Mutant(
        "FLOPs count all experts that are held",
        DECODER,
        "self.layer_parameters(layer=layer, is_active=True) for layer",
        "self.layer_parameters(layer=layer) for layer",
        (FLOPS,),
    ),
    Mutant(
        "active parameters are those of one expert",
        EXPERTS,
        "sizes.moe_router_topk if is_active else",
        "1 if is_active else",
        (f"{COST}::test_total_and_active_parameters_are_those_that_are_published", FLOPS),
    ),
    Mutant(
        "the total is that of one rank's experts",
        DECODER,
        "[0] if self.expert == 1 else self.shared_out(1).num_parameters",
        "[0]",
        (f"{COST}::test_total_and_active_parameters_are_those_that_are_published",),
    ),
    Mutant(
        "the start table counts the experts of one rank",
        "megatron/training/report.py",
        "copies = grid.expert.size if is_reduced_apart(parameter) else 1",
        "copies = 1",
        (f"{COST}::test_the_start_table_counts_the_experts_of_all_ranks",),
    ),
    Mutant(
        "whole experts are cut over the tensor ranks",
        EXPERTS,
        "        return tensor if self.cuts_experts else 1\n",
        "        return tensor\n",
        (BUILT,),
    ),
    Mutant(
        "states of experts are cut over all replicas",
        MEMORY,
        "-(-apart * optimizer * ranks // max(share, ranks))",
        "-(-apart * optimizer // share)",
        (f"{COST}::test_states_of_experts_are_cut_over_their_replicas",),
    ),
    Mutant(
        "an expert that nobody else has is cut",
        MEMORY,
        "* ranks // max(share, ranks))",
        "// max(share // 2, 1))",
        (f"{COST}::test_states_of_experts_are_cut_over_their_replicas",),
    ),
    Mutant(
        "rows that went back are not kept",
        EXPERTS,
        "return 2 * rows * h * width + between",
        "return rows * h * width + between",
        (KEPT,),
    ),
    Mutant(
        "the router keeps its input in 16 bits",
        EXPERTS,
        "router = part * h * max(width, 4) + (",
        "router = part * h * width + (",
        (KEPT,),
    ),
    Mutant(
        "the order of rows is not kept",
        EXPERTS,
        "rows * (2 * INDEX * (2 if self.ranks > 1 else 1) + 2 * wide) + part * INDEX * k",
        "rows * 2 * wide",
        (KEPT,),
    ),
    Mutant(
        "the router keeps the order of all scores",
        "megatron/models/common/router.py",
        ".indices[..., :number].contiguous()",
        ".indices[..., :number]",
        (KEPT,),
    ),
    Mutant(
        "a backward makes the gradient of one expert at a time",
        EXPERTS,
        "weights, entering = h * f * (sizes.num_experts // self.ranks), self.matrices - 1",
        "weights, entering = h * f, self.matrices - 1",
        (f"{COST}::test_a_backward_holds_the_gradients_of_all_weights_of_a_product",),
    ),
    Mutant(
        "rows are counted in forward alone",
        TIMES,
        'times = 3 if layout.recompute == "full" else 2',
        'times = 2 if layout.recompute == "full" else 1',
        (EVEN, SENT),
    ),
    Mutant(
        "what is recomputed sends no rows",
        TIMES,
        'times = 3 if layout.recompute == "full" else 2',
        "times = 2",
        (f"{COST}::test_an_even_load_sends_what_the_planner_says[recomputed-6]",),
    ),
    Mutant(
        "a token's rows are sent once for all its experts",
        EXPERTS,
        "one = self._seen(tokens, tensor) * self.sizes.moe_router_topk * self.sizes.hidden_size * width",
        "one = self._seen(tokens, tensor) * self.sizes.hidden_size * width",
        (EVEN, SENT),
    ),
    Mutant(
        "rows that come are not given back",
        EXPERTS,
        "return 2 * (gives + takes) * hidden_size * width",
        "return 2 * (gives + gives) * hidden_size * width",
        (f"{COST}::test_an_uneven_load_sends_the_rows_of_others_there_and_back",),
    ),
    Mutant(
        "dense layers send rows",
        DECODER,
        "[each if has else () for has in self.with_experts]",
        "[each for has in self.with_experts]",
        (SENT,),
    ),
    Mutant(
        "neighbours that share experts out are a tensor group",
        TIMES,
        'Group.of(self.machine, layout.expert, layout.stride("context"), layout.world_size)',
        "Group.of(self.machine, layout.expert, 1, layout.world_size)",
        (SENT,),
    ),
    Mutant(
        "a rank computes the rows of its own tokens on its experts alone",
        EXPERTS,
        "* sizes.moe_router_topk * self.ranks // sizes.num_experts)",
        "* sizes.moe_router_topk // sizes.num_experts)",
        (f"{PLANS}::test_products_are_those_of_the_rows_that_come_to_a_rank",),
    ),
    Mutant(
        "gradients of experts are summed over all replicas in a plan",
        TIMES,
        "held = of_stages[fullest] - apart\n",
        "held, apart = of_stages[fullest], 0\n",
        (SUMMED,),
    ),
    Mutant(
        "sums of experts hide behind the last backward",
        TIMES,
        "own.summed(apart * state.gradient)",
        "own.summed(apart * state.gradient).behind(hiding)",
        (SUMMED,),
    ),
    Mutant(
        "the update of experts is shared by all",
        TIMES,
        "number = held / share + apart * layout.expert / max(share, layout.expert)",
        "number = (held + apart) / share",
        (f"{PLANS}::test_the_update_of_experts_is_shared_by_those_that_have_them",),
    ),
    Mutant(
        "experts are sought on ranks that do not divide them",
        SEARCH,
        "divisors(layout.data * layout.context) if number % n == 0]",
        "divisors(layout.data * layout.context) if n <= number]",
        (SOUGHT,),
    ),
    Mutant(
        "ZeRO 2 is sought beside experts that are shared out",
        SEARCH,
        "        if ranks == 1 or zero <= most_zero_stage(plain):\n",
        "        if True:\n",
        (SOUGHT,),
    ),
    Mutant(
        "fewer replicas keep as many expert ranks",
        SEARCH,
        "    fewer = replace(fewer, expert=max(n for n in expert_sizes(planner, fewer) if layout.expert % n == 0))\n",
        "",
        (CHANGED,),
    ),
    Mutant(
        "the bound of a search holds experts on each rank",
        SEARCH,
        "for number in planner.parameters(layout))",
        "for number in planner.parameters(replace(layout, expert=1)))",
        (f"{PLANS}::test_the_search_finds_what_trying_every_candidate_finds",),
    ),
    Mutant(
        "pasted lines leave the expert ranks out",
        "megatron/planner/layout.py",
        '        words += ["--expert-model-parallel-size", str(layout.expert)]\n',
        "        pass\n",
        ("tests/planner/test_tool.py"
         "::test_the_pasted_lines_are_taken_by_the_parser_and_make_the_layout[llama, experts]",),
    ),
)  # fmt: skip
