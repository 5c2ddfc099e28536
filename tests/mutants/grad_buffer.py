"""Mistakes in contiguous gradients, in sums of which each replica gets its part, and in weights that come later."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

OWN = "tests/optim/test_grad_buffer.py"
PARTS = f"{OWN}::test_each_replica_finds_its_part_of_the_sum_of_micro_batches_in_one_run"
PLAIN = f"{OWN}::test_plain_gradients_lie_one_behind_the_other_and_those_that_do_not_come_are_zero"
TRAINED = f"{OWN}::test_reduce_scattered_sums_train_as_whole_ones[3-2]"
HELD = f"{OWN}::test_there_is_no_second_copy_of_the_gradients[False]"
SENT = f"{OWN}::test_zero_1_sends_each_gradient_once_in_place_of_twice[4]"
STAGES = "tests/parity/test_scattered_sums.py::test_stages_with_tied_weights_equal_one_process"
FILE = "megatron/optim/grad_buffer.py"
GATHERS = "tests/optim/zero/test_param_gather.py"
LATER = f"{GATHERS}::test_weights_that_come_later_have_the_bits_of_those_that_come_at_once[2]"
READERS = f"{GATHERS}::test_whoever_reads_weights_outside_of_a_forward_waits_for_them"
AHEAD = f"{GATHERS}::test_a_forward_waits_for_the_layer_that_it_calls_alone"
GATHER_FILE = "megatron/optim/zero/param_gather.py"
HOLDERS = "megatron/optim/main_params.py"

GRAD_BUFFER = (
    Mutant(
        "the last part of a bucket is not scattered",
        FILE,
        "        if self._rest:\n",
        "        if False:\n",
        (TRAINED,),
    ),
    Mutant(
        "the norm counts what all replicas have once for each",
        HOLDERS,
        "or self._masters.is_cut(parameter) or self.holders.rank == 0\n",
        "or True\n",
        (TRAINED,),
    ),
    Mutant(
        "the norm of scattered sums is that of one replica",
        HOLDERS,
        "        return self._masters.data_group if self.buffer.is_scattered else SINGLE\n",
        "        return SINGLE\n",
        (TRAINED,),
        refuses=True,  # replicas clip otherwise, and fp16 skips steps on some of them
    ),
    Mutant(
        "a gradient is added behind its reduce-scatter",
        FILE,
        "        if self._is_summed:\n",
        "        if False:\n",
        (f"{OWN}::test_a_gradient_that_comes_behind_its_reduce_scatter_is_refused",),
    ),
    Mutant(
        "a replica's part begins a number late",
        FILE,
        "self.slots[self._rank, first : first + math.prod(shape)]",
        "self.slots[self._rank].roll(-1)[first : first + math.prod(shape)]",
        (PARTS,),
    ),
    Mutant(
        "a replica takes the part of the next",
        FILE,
        "self.slots[self._rank, first : first + math.prod(shape)]",
        "self.slots[self._rank - 1, first : first + math.prod(shape)]",
        (PARTS,),
    ),
    Mutant(
        "the second micro-batch takes the place of the first",
        FILE,
        "                place.add_(parts)\n",
        "                place.copy_(parts)\n",
        (PARTS,),
    ),
    Mutant(
        "a gradient that does not come is that of the step before",
        FILE,
        "            for _, place in self._pairs(parameter, parameter.detach()):\n                place.zero_()\n",
        "            pass\n",
        (PLAIN,),
    ),
    Mutant(
        "a gradient in a bucket of its own is copied",
        FILE,
        "        if self._can_be(parameter, gradient):\n",
        "        if False:\n",
        (f"{OWN}::test_a_weight_alone_in_its_bucket_lends_it_the_memory_of_its_gradient",),
    ),
    Mutant(
        "sums are made in a copy",
        "tds/gradients.py",
        "        run = one_run(gradients)\n",
        "        run = None\n",
        (HELD,),
    ),
    Mutant(
        "gradients that lie apart are taken for one run",
        "tds/gradients.py",
        "        is_next = tensor.storage_offset() == end and",
        "        is_next =",
        ("tests/tds/test_gradients.py::test_what_lies_apart_is_no_run",),
    ),
    Mutant(
        "ZeRO 1 on NCCL sums whole gradients",
        FILE,
        'dist.get_backend(group.handle) == "nccl" if SCATTERS is None else SCATTERS\n',
        "False\n",
        (SENT,),
    ),
    Mutant(
        "tied weights are summed over stages ahead of the replicas, whose parts are not there yet",
        "tds/engine/engine.py",
        "        leaves_parts = reducer is not None and reducer.is_scattered\n",
        "        leaves_parts = False\n",
        (STAGES,),
    ),
    Mutant(
        "a pipeline's sums are whole whatever the optimizer can take",
        "tds/engine/build.py",
        "        scatter=scatter,\n",
        "        scatter=None,\n",
        (STAGES,),
        refuses=True,
    ),
    Mutant(
        "a layer does not wait for its weights",
        GATHER_FILE,
        "            layer.register_forward_pre_hook(lambda *_, own=own: self.wait(own), prepend=True)\n",
        "            pass\n",
        (LATER,),
    ),
    Mutant(
        "a model does not wait for what is in no layer",
        GATHER_FILE,
        "        module.register_forward_pre_hook(lambda *_: self.wait(rest), prepend=True)\n",
        "",
        (LATER,),
    ),
    Mutant(
        "a model waits for all weights at once",
        GATHER_FILE,
        "lambda *_: self.wait(rest), prepend=True)",
        "lambda *_: self.wait(), prepend=True)",
        (AHEAD,),
    ),
    Mutant(
        "a layer is saved ahead of its weights",
        GATHER_FILE,
        "        for inner in module.modules():\n",
        "        for inner in [module]:\n",
        (READERS,),
    ),
    Mutant(
        "what a replica compares are weights that have not come",
        "megatron/optim/optimizer.py",
        "        self.finish_gathers()\n        return self._masters.homes.get(parameter, parameter)\n",
        "        return self._masters.homes.get(parameter, parameter)\n",
        (READERS,),
    ),
    Mutant(
        "a part is sent ahead of its update",
        "megatron/optim/optimizer.py",
        "            self.update_masters()\n            if self._masters.are_apart:\n"
        "                self._send_weights()\n",
        "            if self._masters.are_apart:\n                self._send_weights()\n"
        "            self.update_masters()\n",
        (LATER,),
    ),
)
