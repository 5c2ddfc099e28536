"""Mistakes in where pieces lie, the orders of a V, what a stage hands to itself, and orders in files."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

ORDERS = "tests/tds/schedule/test_v_schedules.py"
EXCHANGE = "tests/tds/p2p/test_exchange.py"
RUNS = "tests/tds/test_parity.py::test_a_v_equals_one_process[2-2]"
FILES = "tests/tds/schedule/test_schedule_file.py"
BALANCE = "tests/tds/test_balance.py"
AUTO = "tests/training/test_auto_placement.py"
LAYOUT = "tests/config/test_pipeline_layout.py"

IN_PLACEMENTS = (
    Mutant(
        "the pieces of a V go down in every chunk",
        "tds/schedule/actions.py",
        "return self.num_stages - 1 - place if self.kind == V and chunk % 2 else place",
        "return place",
        (f"{ORDERS}::test_pieces_go_down_and_up_again",),
    ),
    Mutant(
        "a stage of a V that runs ahead holds one forward more",
        "tds/schedule/v_schedules.py",
        "    for _ in range(2 * behind - 1):\n",
        "    for _ in range(2 * behind):\n",
        (f"{ORDERS}::test_a_v_runs_with_bounded_sends_and_holds_what_its_table_says[zb-v]",),
        refuses=True,
    ),
    Mutant(
        "halves are joined where another stage waits for the first",
        "tds/schedule/v_schedules.py",
        "            if message is None or message.peer == stage:\n",
        "            if True:\n",
        (f"{ORDERS}::test_zb_v_of_two_stages_by_hand",),
    ),
    Mutant(
        "what a stage hands to itself takes as long as a message",
        "tds/schedule/simulate.py",
        "end + (0.0 if is_own else costs.transfer)",
        "end + costs.transfer",
        (f"{ORDERS}::test_what_a_stage_hands_to_itself_takes_no_time",),
    ),
    Mutant(
        "the gradient that a stage hands to itself is doubled",
        "tds/p2p/communicator.py",
        "message.chunk - 1] = list(gradients)\n",
        "message.chunk - 1] = [2 * each for each in gradients]\n",
        (RUNS,),
    ),
    Mutant(
        "what a stage hands to itself may be changed in place unnoticed",
        "tds/p2p/boundary.py",
        "t.detach() if is_own else t.data",
        "t.data",
        (f"{EXCHANGE}::test_what_a_stage_hands_to_itself_is_not_changed_unnoticed",),
    ),
    Mutant(
        "sends to both neighbours wait in one line",
        "tds/p2p/communicator.py",
        "        sends, place = self._sending[Kind.ACTIVATION, answer.peer], (answer.micro_batch, answer.chunk)\n",
        "        place, every = (answer.micro_batch, answer.chunk), self._sending.items()\n"
        "        sends = deque(each for (kind, _), own in every if kind is Kind.ACTIVATION for each in own)\n",
        (f"{EXCHANGE}::test_in_a_v_each_stage_sends_to_both_sides_and_the_ends_to_themselves[dualpipev-3]",),
        refuses=True,
    ),
    Mutant(
        "the labels of a V are those of the micro-batch that is read last",
        "tds/engine/micro_batches.py",
        "            return None, self._labels.pop(micro_batch)\n",
        "            return None, self._labels.pop(max(self._labels))\n",
        (RUNS,),
    ),
    Mutant(
        "the last rank of a V gives the loss to all",
        "tds/engine/evaluate.py",
        "last_rank=grid.stage_to_global(engine.loss_stage)",
        "last_rank=grid.stage_to_global(engine.num_stages - 1)",
        (RUNS,),
    ),
    Mutant(
        "an order of a file is taken as it stands",
        "tds/schedule/schedule_file.py",
        "        self.peaks = validate(stages, self.num_micro_batches, num_chunks=placement.num_chunks, "
        "placement=placement.kind)\n",
        "        self.peaks = [1] * len(stages)\n",
        (f"{FILES}::test_what_is_no_order_is_refused",),
    ),
    Mutant(
        "of a pair in a file the second action goes first",
        "tds/schedule/schedule_file.py",
        'pair[1].split(";")',
        'pair[1].split(";")[::-1]',
        (f"{FILES}::test_a_pair_of_torchs_is_its_two_actions_in_turn",),
    ),
    Mutant(
        "pieces are written by their chunk",
        "tds/schedule/schedule_file.py",
        "{placement.piece(stage, action.chunk)}{_LETTER_OF",
        "{placement.num_stages * action.chunk + stage}{_LETTER_OF",
        (f"{FILES}::test_what_is_written_is_read_back_and_torch_reads_each_cell",),
        refuses=True,
    ),
    Mutant(
        "rounds of chunks have the stages' number of micro-batches, whatever the group",
        "tds/schedule/schedules.py",
        "num_chunks, group_size or num_stages)[stage]",
        "num_chunks, num_stages)[stage]",
        ("tests/tds/schedule/test_orders.py::test_a_larger_group_of_micro_batches_runs_and_holds_more",),
    ),
    Mutant(
        "the head of a layout is one unit",
        "megatron/config/pipeline_layout.py",
        'len(piece) + ("L" in piece)',
        "len(piece)",
        (f"{LAYOUT}::test_the_head_is_norm_and_head",),
    ),
    Mutant(
        "the planner places the head of a V on the last stage",
        "megatron/models/common/cost.py",
        "if stage == lie.last_stage else 0",
        "if stage == stages - 1 else 0",
        ("tests/planner/test_v_plans.py::test_the_first_stage_of_a_v_holds_both_ends",),
    ),
    Mutant(
        "auto takes schedules that do not fit",
        "megatron/training/auto_placement.py",
        "    fitting = [each for each in every if limit is None or each.most_bytes <= limit]\n",
        "    fitting = list(every)\n",
        (f"{AUTO}::test_what_does_not_fit_is_left_out[1f1b-auto:1f1b]",),
    ),
    Mutant(
        "auto looks at the first stage's memory alone",
        "megatron/training/auto_placement.py",
        "most = max(stage.total for stage in stage_memory(placed, topology, bounds, dtype))",
        "most = stage_memory(placed, topology, bounds, dtype)[0].total",
        (f"{AUTO}::test_the_fullest_stage_must_fit_wherever_it_is",),
    ),
    Mutant(
        "auto moves layers that a flag has placed",
        "megatron/training/auto_placement.py",
        "    is_said = any(name in config.given for name in LYING) or",
        "    is_said =",
        (f"{AUTO}::test_layers_lie_as_a_flag_says[--pipeline-chunks 1]",),
    ),
    Mutant(
        "auto counts a whole backward as dear as its halves",
        "megatron/training/auto_placement.py",
        "backward=tuple((again + 2) * cost for cost in pieces)",
        "backward=tuple((again + 2 * price) * cost for cost in pieces)",
        (f"{AUTO}::test_on_a_cpu_halves_of_a_backward_cost_more_than_a_whole_one",),
    ),
    Mutant(
        "the engine chooses among all schedules though some do not fit",
        "megatron/training/auto_placement.py",
        'among = None if is_all else ",".join(names)',
        "among = None",
        (f"{AUTO}::test_what_does_not_fit_is_left_out[1f1b-auto:1f1b]",),
    ),
    Mutant(
        "auto of some schedules chooses among all",
        "tds/engine/auto_schedule.py",
        "    names = names or candidates(AUTO, *lie)\n",
        "    names = candidates(AUTO, *lie)\n",
        ("tests/tds/engine/test_auto.py::test_a_schedule_that_is_not_among_them_is_not_chosen_though_it_is_faster",),
    ),
    Mutant(
        "a cut into chunks is sought for whole backwards that take as long as a half",
        "tds/partition.py",
        "2 if isinstance(event.action, Backward) else 1, source",
        "1, source",
        (f"{BALANCE}::test_half_layers_are_cut_for_the_schedules_of_their_placement[loop-best0]",),
    ),
    Mutant(
        "bounds of chunks are moved by one at a time",
        "tds/partition.py",
        "    for moves in itertools.chain(((move,) for move in single), pairs):\n",
        "    for moves in ((move,) for move in single):\n",
        (f"{BALANCE}::test_two_bounds_move_together_where_neither_helps_alone",),
    ),
    Mutant(
        "a cut into chunks is taken as it begins",
        "tds/partition.py",
        "            if (found := price(each)) < now:\n",
        "            if (found := price(each)) < (0.0, 0):\n",
        (f"{BALANCE}::test_a_big_model_in_chunks_is_cut_well_though_not_every_cut_is_tried",),
    ),
)
