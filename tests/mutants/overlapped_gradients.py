"""Mistakes in sums over replicas that start within the last backward of a step."""

from __future__ import annotations

from tests.mutants.mutant import SUMS, Mutant

OWN = "tests/optim/test_overlapped_gradients.py"
BITS = f"{OWN}::test_numbers_are_those_of_sums_after_the_backward_to_the_bit"
ORDER = f"{OWN}::test_sums_start_within_the_last_backward_alone_and_in_one_order_everywhere"
LATE = f"{OWN}::test_what_the_last_micro_batch_does_not_reach_is_summed_too_and_what_is_tied_once"
BROKEN = f"{OWN}::test_a_backward_that_breaks_off_leaves_nothing_behind"
PARITY = "tests/parity/test_overlapped_sums.py"
ENGINE = f"{PARITY}::test_one_stage_with_accumulation_in_fp32_has_the_same_bits"
PUT_OFF = f"{PARITY}::test_stages_that_put_weights_off_have_the_same_bits"
FOUR = f"{PARITY}::test_other_layouts_and_precisions_have_the_same_bits[(1, 1, 4)---fp32]"
FILE = "megatron/optim/main_params.py"
REDUCER = "tds/gradient_reducer.py"

OVERLAPPED_GRADIENTS = (
    Mutant(
        "whole gradients are summed in every micro-batch",
        FILE,
        "        if self._is_last:\n",
        "        if True:\n",
        (ORDER,),
        refuses=True,
    ),
    Mutant(
        "the last micro-batch in 16 bits comes behind the sum",
        FILE,
        "        if parameter.requires_grad:\n"
        "            parameter.register_post_accumulate_grad_hook(self._add_to_sum)\n",
        "        if parameter.requires_grad:\n"
        "            early = lambda p: getattr(self, '_is_last', False) and self._reducer._arrive(p)\n"
        "            parameter.register_post_accumulate_grad_hook(early)\n"
        "            parameter.register_post_accumulate_grad_hook(self._add_to_sum)\n",
        (BITS,),
        refuses=True,  # a gradient that is added to when its sum has started
    ),
    Mutant(
        "a weight that the last micro-batch does not reach is never summed",
        REDUCER,
        "        self._start(self.order.rest())\n",
        "        self.order.rest()\n",
        (LATE,),
    ),
    Mutant(
        "sums within the backward are not multiplied",
        REDUCER,
        "            bucket.wait(scale)\n",
        "            bucket.wait(1.0)\n",
        (BITS,),
    ),
    Mutant(
        "sums of a backward that broke off come into the next step",
        REDUCER,
        "            bucket.work.wait()\n        self._started.clear()\n",
        "            bucket.work.wait()\n",
        (BROKEN,),
    ),
    Mutant(
        "gradients of a backward that broke off count as those of the next",
        REDUCER,
        "        self._ready.clear()\n        self.order.reset()\n",
        "        self._ready.clear()\n",
        (BROKEN,),
        refuses=True,
    ),
    Mutant(
        "a gradient that comes behind its sum is let pass",
        REDUCER,
        "        if parameter in self._ready and self.order.is_taken(parameter):\n",
        "        if False:\n",
        (f"{OWN}::test_a_gradient_that_comes_after_its_sum_has_started_is_refused_with_the_way_out",),
    ),
    Mutant(
        "sums start with the first weights",
        REDUCER,
        "key=lambda bucket: -place[bucket[0]])",
        "key=lambda bucket: place[bucket[0]])",
        (ORDER,),
    ),
    Mutant(
        "biases of the first layers hold up the buckets behind them",
        REDUCER,
        "key=lambda bucket: bucket[-1].dim() < 2)",
        "key=lambda bucket: bucket[0].dim() < 2)",
        (ORDER,),
    ),
    Mutant(
        "the order of the first backward is not kept",
        REDUCER,
        "            self._filled.append(number)\n",
        "            pass\n",
        (ORDER,),
    ),
    Mutant(
        "an unused weight holds up the buckets behind it",
        REDUCER,
        "[int(not all(map(will_reach, bucket))) for bucket in self._guessed()]",
        "[0 for bucket in self._guessed()]",
        (ORDER,),
    ),
    Mutant(
        "the engine takes the first micro-batch for the last",
        "megatron/training/train_step.py",
        "            if works_in_backward and micro_batch == number - 1:\n",
        "            if works_in_backward and micro_batch == 0:\n",
        (ENGINE,),
    ),
    Mutant(
        "--no-overlap-grad-reduce acts on pipelines alone",
        "megatron/training/setup.py",
        "config.parallel.overlap_grad_reduce and not",
        "not",
        (ENGINE,),
    ),
    Mutant(
        "a pipeline's sums start early in any case",
        REDUCER,
        "        if self.starts_early and parameter not in self._ready:\n",
        "        if parameter not in self._ready:\n",
        (f"{SUMS}::test_sums_may_all_start_after_the_backward",),
    ),
    Mutant(
        "a stage that puts weights off starts its sums behind all of them",
        "tds/engine/stage.py",
        "reducer.ready if reducer is not None and starts_early else None)",
        "None)",
        (PUT_OFF,),
    ),
    Mutant(
        "a weight that is put off counts as summed up ahead of its gradient",
        "tds/engine/stage.py",
        "apart_from=self.splitter.waiting(_key(action)))",
        "apart_from=())",
        (PUT_OFF,),
    ),
    Mutant(
        "a stage that keeps its backwards whole starts its sums behind them",
        "tds/engine/stage.py",
        "        with self._making_final(action, call):\n",
        "        with nullcontext():\n",
        (PUT_OFF,),
    ),
    Mutant(
        "sums within the backward are cut into other buckets than those behind it",
        REDUCER,
        "parameters, lambda p: p.numel() *",
        "parameters, lambda p: 2 * p.numel() *",
        (FOUR,),
    ),
    Mutant(
        "a bucket has one gradient more than the limit allows",
        "tds/gradients.py",
        "            if bucket and size + num_bytes(item) > limit:\n",
        "            if bucket and size > limit:\n",
        ("tests/tds/test_gradients.py::test_runs_are_as_long_as_the_bytes_on_the_way_allow",),
    ),
    Mutant(
        "the factor on a sum of 16 bits is rounded to them",
        "tds/gradients.py",
        "    if not types <= set(WIDE) or (",
        "    if (",
        ("tests/tds/test_gradients.py::test_a_factor_is_not_rounded_to_the_16_bits_of_a_gradient",),
    ),
)
