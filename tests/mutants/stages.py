"""Mistakes in the order of work and what crosses a stage."""

from __future__ import annotations

from tests.mutants.mutant import BITS, CHUNKS, PIPELINE, Mutant

STAGES = (
    Mutant(
        "the gradient that a stage sends back is divided by the accumulation steps",
        "tds/engine/stage.py",
        "            self.exchange.send_backward(outgoing, returned)\n",
        "            self.exchange.send_backward(outgoing, [g / call.meter.num_micro_batches for g in returned])\n",
        (PIPELINE,),
    ),
    Mutant(
        "the first stage runs its second chunk in place of its third, and the other way round",
        "tds/engine/stage.py",
        "self.module(inputs, action.chunk)",
        "self.module(inputs, (0, 2, 1)[action.chunk] if self.index == 0 else action.chunk)",
        (f"{CHUNKS}[2-3]",),
    ),
    Mutant(
        "one of the weight gradients that are put off is lost",
        "tds/engine/weight_grad_store.py",
        "        every = self._put_off.pop(key)\n",
        "        every = self._put_off.pop(key)[1:]\n",
        (f"{BITS}[--pipeline-schedule zb-h1]",),
    ),
    Mutant(
        "what the first chunk of a stage puts off is never computed",
        "tds/engine/stage.py",
        "        with call.part(BACKWARD):\n            gradients.before_backward()\n            self.splitter.run(",
        "        with call.part(BACKWARD):\n            gradients.before_backward()\n"
        "            action.chunk and self.splitter.run(",
        (f"{BITS}[--pipeline-schedule zb-h1 --pipeline-chunks 2]",),
    ),
    Mutant(
        "with chunks no gradient of a weight is put off",
        "tds/schedule/schedules.py",
        "    if stage == 0:\n",
        "    if stage == 0 or num_chunks > 1:\n",
        ("tests/tds/schedule/test_simulate.py::test_zb_h1_fills_the_bubble_of_chunks_too",),
    ),
    Mutant(
        "with chunks too few backwards of stage 1 are split when the last round is short",
        "tds/schedule/schedules.py",
        "    last_rounds = group + num_micro_batches % group\n",
        "    last_rounds = group\n",
        ("tests/tds/schedule/test_simulate.py::test_whole_backwards_of_stage_1_lose_nothing",),
    ),
    Mutant(
        "a layer of a backward that stays whole is built to be split",
        "tds/engine/stage.py",
        "return self.splitter.active() if _key(action) in self._program.put_off else nullcontext()",
        "return self.splitter.active() if self._program.put_off else nullcontext()",
        ("tests/tds/engine/test_split.py::test_what_is_not_put_off_runs_torchs_own_layers",),
        refuses=True,
    ),
    Mutant(
        "the gradients of weights trail by one backward on every stage",
        "tds/schedule/schedules.py",
        "trail=stage,",
        "trail=1,",
        ("tests/tds/schedule/test_simulate.py::test_zb_h1_fills_the_bubble_of_chunks_too",),
    ),
    Mutant(
        "the samples of a micro-batch change places in the gradient that comes back",
        "tds/engine/stage.py",
        "                    torch.autograd.backward(state.roots, arrived)\n",
        "                    torch.autograd.backward(state.roots, [a if a is None else a.flip(0) for a in arrived])\n",
        (f"{CHUNKS}[2-2]",),
    ),
    Mutant(
        "a stage on a CPU gives freed memory back to the system",
        "tds/engine/engine.py",
        "        if is_host(torch.device(self.device)):\n            keep_freed()\n",
        "",
        ("tests/tds/test_host_memory.py::test_an_engine_on_a_cpu_asks_for_it",),
    ),
    Mutant(
        "the weights of a loss function are never put off",
        "tds/engine/stage.py",
        "with call.part(FORWARD), noting, self._splitting(action):\n            loss = ",
        "with call.part(FORWARD), noting:\n            loss = ",
        ("tests/tds/engine/test_split.py::test_weights_of_a_loss_function_are_put_off_too[False]",),
    ),
    Mutant(
        "a whole backward is reckoned as both of its dearer halves",
        "tds/engine/auto_schedule.py",
        "replace(split, backward=whole.whole_backward)",
        "split",
        ("tests/tds/engine/test_auto.py::test_a_whole_backward_is_reckoned_by_the_trial_that_had_whole_ones",),
    ),
    Mutant(
        "the trim threshold of old releases of glibc is set alone",
        "tds/device.py",
        "[0]))\n    return False\n",
        "[0]))\n    return bool(set_option(TRIM_THRESHOLD, LARGEST_KEPT[0]))\n",
        ("tests/tds/test_host_memory.py::test_older_releases_of_glibc_keep_what_they_can",),
    ),
)
