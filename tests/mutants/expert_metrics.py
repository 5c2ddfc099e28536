"""Mistakes in what a run says of its experts: what is counted, of which ranks, and when a router has collapsed."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

LAYER = "tests/models/common/test_experts.py"
PARITY = "tests/parity/test_experts.py"
MONITOR = "tests/training/callbacks/test_expert_monitor.py"
MAP = "tests/tools/test_report_experts.py"
RUN = f"{MONITOR}::test_every_layout_has_the_same_numbers_and_tells_the_same"
VALUES = f"{MONITOR}::test_values_are_those_that_the_page_says"
ONCE = f"{MONITOR}::test_a_router_that_collapses_is_told_once_and_again_only_when_it_has_been_even_since"
HALF = f"{MONITOR}::test_a_router_that_is_collapsed_from_the_start_is_told_after_half_a_window"
PICTURE = f"{MAP}::test_the_page_has_a_cell_for_each_expert_of_the_last_record_and_a_curve_for_each_layer"
ROUTER, SAYS = "megatron/models/common/router.py", "megatron/training/callbacks/expert_monitor.py"

OF_EXPERT_METRICS = (
    Mutant(
        "choices that are kept count as dropped",
        ROUTER,
        "kept.logical_not().sum()",
        "kept.sum()",
        (f"{LAYER}::test_a_layer_is_a_loop_over_tokens[capacity by weight]",),
    ),
    Mutant(
        "a recompute counts what is dropped again",
        ROUTER,
        "        if self.training and not is_running():\n",
        "        if self.training:\n",
        (f"{LAYER}::test_recompute_and_evaluation_count_no_token",),
    ),
    Mutant(
        "evaluation counts what is dropped",
        ROUTER,
        "        if self.training and not is_running():\n",
        "        if not is_running():\n",
        (f"{LAYER}::test_recompute_and_evaluation_count_no_token",),
    ),
    Mutant(
        "what is dropped adds up over steps",
        ROUTER,
        "        self.dropped.zero_()\n",
        "",
        (f"{LAYER}::test_recompute_and_evaluation_count_no_token",),
    ),
    Mutant(
        "the table of experts is that of one stage",
        ROUTER,
        "        if self._grid.pipe.size > 1:  # a row",
        "        if self._grid.pipe.size > 2:  # a row",
        (f"{RUN}[pipe 2 x data 2]", f"{PARITY}::test_every_layout_is_one_process[deepseek-1-2-2-recomputed-1]"),
    ),
    Mutant(
        "a layer of a stage has its number within the stage",
        ROUTER,
        "        self._rows = [names.index(name) for name in named]\n",
        "        self._rows = list(range(len(named)))\n",
        (f"{RUN}[pipe 2 x data 2]",),
    ),
    Mutant(
        "choices are those of one replica",
        ROUTER,
        "        for group in self._groups:\n",
        "        for group in self._groups[1:]:\n",
        (f"{RUN}[pipe 2 x data 2]",),
    ),
    Mutant(
        "layers are in the order of their letters",
        ROUTER,
        "part.zfill(9) if part.isdigit() else part",
        "part",
        (f"{LAYER}::test_layers_are_in_the_order_of_their_numbers",),
    ),
    Mutant(
        "capacity is taken off the tokens of experts",
        "megatron/models/common/experts.py",
        "            self.router.count_dropped(kept)\n",
        "            self.router.count_dropped(kept)\n"
        "            self.router.counts -= experts[~kept].bincount(minlength=self.sizes.num_experts)\n",
        (f"{LAYER}::test_a_layer_is_a_loop_over_tokens[capacity by weight]",),
    ),
    Mutant(
        "the imbalance is over the least",
        ROUTER,
        "tokens.amax(1) / tokens.mean(1)",
        "tokens.amax(1) / tokens.amin(1).clamp(min=1)",
        (VALUES,),
    ),
    Mutant(
        "entropy is in nats",
        ROUTER,
        ".sum(1) / math.log(tokens.shape[1])",
        ".sum(1)",
        (VALUES,),
    ),
    Mutant(
        "a router that stays collapsed is reported in each step",
        SAYS,
        "                self._collapsed.add(layer)\n",
        "",
        (ONCE,),
    ),
    Mutant(
        "a single uneven step is a collapse",
        SAYS,
        "            mean = seen.mean()\n",
        "            mean = entropy\n",
        (ONCE, HALF),
    ),
    Mutant(
        "a router that recovers is reported for what it was",
        SAYS,
        " and entropy < self.limit",
        "",
        (HALF,),
    ),
    Mutant(
        "a run that goes on forgets which routers have collapsed",
        SAYS,
        '        self._collapsed = set(state.get("collapsed", ()))\n',
        "        self._collapsed = set()\n",
        (ONCE,),
    ),
    Mutant(
        "a router that is even again is never reported again",
        SAYS,
        "                self._collapsed.remove(layer)\n",
        "                pass\n",
        (ONCE,),
    ),
    Mutant(
        "all experts chosen at any time are a collapse",
        SAYS,
        " if k < number else 0.0",
        " if k < number else 2.0",
        (HALF,),
    ),
    Mutant(
        "the step line has the best layer",
        "megatron/training/callbacks/console.py",
        "load imbalance {max(load.values())",
        "load imbalance {min(load.values())",
        (f"{MONITOR}::test_the_line_of_a_step_has_the_worst_layer",),
    ),
    Mutant(
        "the heat map is of the first record",
        "tools/report_parts/experts.py",
        'in reversed(run.of_kind("train"))',
        'in run.of_kind("train")',
        (PICTURE,),
    ),
    Mutant(
        "an expert without a token looks like one with few",
        "tools/report_parts/experts.py",
        "    if not over_mean:\n",
        "    if over_mean < 0:\n",
        (PICTURE,),
    ),
    Mutant(
        "the heat map has the experts of all layers in one row",
        "tools/report_parts/experts.py",
        "total, y, cells = sum(counts), at * ROW, []",
        "total, y, cells = sum(counts), 0, []",
        (PICTURE,),
    ),
)
