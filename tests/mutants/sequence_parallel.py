"""Mistakes in the sequence that is cut over the tensor ranks, and in what runs beside the products of weights."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

FAMILIES = "tests/models/common/test_sequence_parallel.py::test_every_family_equals_one_process_with_the_same_masks[2]"
MARKED = (
    "tests/models/common/test_sequence_parallel.py::"
    "test_what_every_rank_holds_whole_is_partial_but_for_what_follows_the_gathered_first_token"
)
IN_PIPELINES = "tests/models/common/test_pipe_sequence_parallel.py::test_what_every_rank_holds_whole_is_partial_in_a_pipeline_as_without_one"  # noqa: E501
KEPT = "tests/models/common/test_sequence_parallel.py::test_a_layer_keeps_a_part_of_all_that_was_whole"
ORDER = "tests/mpu/test_products.py::test_the_sum_starts_ahead_of_the_product_of_the_weight_and_is_awaited_behind_it"
ORDER_OF_PARTS = "tests/mpu/test_products.py::test_parts_are_joined_again_beside_the_product_of_the_input"
BITS = "tests/mpu/test_products.py::test_the_bits_are_those_of_the_same_products_one_after_another"
AUTOGRADS = "tests/mpu/test_products.py::test_the_gradient_of_a_weight_is_the_product_that_autograd_makes"
PUT_OFF = "tests/mpu/test_products.py::test_a_schedule_that_puts_weights_off_sees_every_product"
PIPE = "tests/parity/test_sequence_parallel.py"
FLAGS = "tests/arguments/test_sequence_parallel.py"

SEQUENCE_PARALLEL = (
    Mutant(
        "the gradients of norms and biases stay shares of each tensor rank",
        "megatron/optim/main_params.py",
        "        if self._group.size > 1 and is_partial(parameter):\n",
        "        if self._group.size < 1 and is_partial(parameter):\n",
        (FAMILIES,),
    ),
    Mutant(
        "shares of gradients are summed again by whoever reads them next",
        "megatron/optim/optimizer.py",
        "        self._are_summed = True\n",
        "        self._are_summed = False\n",
        (f"{PIPE}::test_parts_of_gradients_are_summed_over_replicas_and_over_tensor_ranks",),
    ),
    Mutant(
        "the bias behind a row-parallel sum is not marked",
        "megatron/mpu/layers.py",
        "            if sequence_parallel:\n                set_partial(self.bias)\n",
        "",
        (MARKED,),
    ),
    Mutant(
        "the norm at the end is not marked",
        "megatron/models/common/decoder.py",
        "self.final_norm = make_norm(sizes, self.place)",
        "self.final_norm = make_norm(sizes)",
        (MARKED,),
    ),
    Mutant(
        "the norm at the end of a pipeline is not marked",
        "megatron/models/common/pipeline.py",
        "            super().__init__(*sizes, **how)\n            place.on_part(self)\n",
        "            super().__init__(*sizes, **how)\n",
        (f"{PIPE}::test_a_pipeline_with_the_sequence_cut_equals_one_process_and_sends_parts", IN_PIPELINES),
    ),
    Mutant(
        "the positions that a T5 pipeline shares are not marked",
        "megatron/models/t5/pipeline.py",
        "        super().__init__(*size)\n        place.on_part(self)\n",
        "        super().__init__(*size)\n",
        (f"{PIPE}::test_t5_gathers_the_encoders_output_on_every_stage_that_reads_it",),
    ),
    Mutant(
        "every layer of a stage hands on the first rows of the encoder's output",
        "megatron/models/t5/pipeline.py",
        "self.place.part(memory) if self.is_last_here",
        "memory[: len(self.place.part(memory))] if self.is_last_here",
        (f"{PIPE}::test_t5_gathers_the_encoders_output_on_every_stage_that_reads_it",),
    ),
    Mutant(
        "all ranks take the rows of the first",
        "megatron/models/common/model_args.py",
        "        return x.chunk(self.group.size)[self.group.rank]\n",
        "        return x.chunk(self.group.size)[0]\n",
        (FAMILIES,),
    ),
    Mutant(
        "masks that belong to elements begin anew on each tensor rank",
        "megatron/mpu/random.py",
        "self.tensor_rank * length if is_part else 0",
        "0",
        (FAMILIES,),
    ),
    Mutant(
        "BERT's first token is the first of each part",
        "megatron/models/bert/model.py",
        "        own = x[0] if self.place.group.rank == 0 else torch.zeros_like(x[0])\n",
        "        own = x[0]\n",
        (FAMILIES,),
    ),
    Mutant(
        "ALiBi's distances are those of a part",
        "megatron/models/common/masks.py",
        "length = self._place.length(x)",
        "length = len(x)",
        (FAMILIES,),
        refuses=True,
    ),
    Mutant(
        "the gradient of joined parts is each rank's own",
        "megatron/mpu/mappings.py",
        "        return _sum_parts(grads[0], ctx.group), None\n",
        "        return grads[0].chunk(ctx.group.size)[ctx.group.rank].clone(), None\n",
        (FAMILIES,),
    ),
    Mutant(
        "the gradient of a weight whose rows lie apart is made as that of others",
        "megatron/mpu/layers.py",
        "is_whole = weight.stride() == (weight.shape[1], 1)",
        "is_whole = True",
        (f"{AUTOGRADS}[apart]", f"{AUTOGRADS}[a row]"),
    ),
    Mutant(
        "a single row that lies apart counts as whole",
        "megatron/mpu/layers.py",
        "weight.stride() == (weight.shape[1], 1)",
        "weight.is_contiguous()",
        (f"{AUTOGRADS}[a row]",),
    ),
    Mutant(
        "the graph keeps the joined input",
        "megatron/mpu/layers.py",
        "    if group.size == 1 or is_swapped or torch.compiler.is_compiling():\n",
        "    if group.size >= 1 or is_swapped or torch.compiler.is_compiling():\n",
        (KEPT,),
    ),
    Mutant(
        "the sum is awaited ahead of the product of the weight",
        "megatron/mpu/layers.py",
        "        summing = _start_sum(ctx, x, rows, weights) if of_x else None\n",
        "        summing = _start_sum(ctx, x, rows, weights) if of_x else None\n        summing.wait()\n",
        (ORDER,),
    ),
    Mutant(
        "parts are joined behind the product of the input",
        "megatron/mpu/layers.py",
        "        whole = x if joining is None else joining.wait()\n",
        "        whole = x if joining is None else start_all_gather(x, ctx.group).wait()\n",
        (ORDER_OF_PARTS,),
    ),
    Mutant(
        "the second product's share of the input's gradient is lost",
        "megatron/mpu/layers.py",
        "        summand += each.mm(weight)\n",
        "        each.mm(weight)\n",
        (BITS,),
    ),
    Mutant(
        "products run by themselves where a schedule puts weights off",
        "megatron/mpu/layers.py",
        "    is_swapped = F.linear is not _OWN_LINEAR\n",
        "    is_swapped = False\n",
        (PUT_OFF,),
    ),
    Mutant(
        "a sequence that the tensor ranks do not divide is taken",
        "megatron/arguments/validate.py",
        "        if length % t:\n",
        "        if length < t:\n",
        (f"{FLAGS}::test_what_it_cannot_go_with_is_refused",),
    ),
)
