"""Mistakes in sums beside the backward and waiting messages."""

from __future__ import annotations

from tests.mutants.mutant import SUMS, Mutant

OVERLAP = (
    Mutant(
        "a weight of no layer is not added up over the replicas",
        "tds/gradient_reducer.py",
        "if holders[p] != 1}",
        "if holders[p] > 1}",
        (f"{SUMS}::test_what_is_of_no_layer_or_of_two_chunks_is_added_up_once_all_have_added_to_it[1-1]",),
    ),
    Mutant(
        "what was frozen at the start is not added up over the replicas once it is trained",
        "tds/gradient_reducer.py",
        "        if trained == self._trained:\n",
        "        if self._trained is not None:\n",
        (f"{SUMS}::test_weights_frozen_and_unfrozen_between_steps_stay_equal_on_all_replicas[False]",),
    ),
    Mutant(
        "a weight that DeepSpeed's optimizer has not taken is trained in silence",
        "tds/engine/optimizers.py",
        '    only if the JSON has one.\n    """\n\n    takes_unfrozen = False\n',
        '    only if the JSON has one.\n    """\n\n',
        (f"{SUMS}::test_a_weight_that_deepspeeds_optimizer_did_not_take_is_not_left_out_in_silence",),
        refuses=True,
    ),
    Mutant(
        "sums over the replicas start in the first backward of a chunk, not the last",
        "tds/engine/stage.py",
        "{a.chunk: a for a in actions if",
        "{a.chunk: a for a in reversed(actions) if",
        ("tests/tds/test_parity.py::test_two_replicas_equal_one_process_over_both_their_batches",),
    ),
    Mutant(
        "one replica starts two sums in the other order",
        "tds/gradient_reducer.py",
        "        self._buckets = order\n",
        "        order[:2] = order[1::-1] if torch.distributed.get_rank() == 1 else order[:2]\n"
        "        self._buckets = order\n",
        (f"{SUMS}::test_sums_start_while_the_backward_still_runs[False]",),
    ),
    Mutant(
        "a sender's limit is one with which the schedule stands still",
        "tds/schedule/limits.py",
        "            window *= 2\n",
        "            return window\n",
        ("tests/tds/schedule/test_window.py::test_a_schedule_that_would_stand_still_gets_a_larger_limit",),
    ),
)
