"""Mistakes in sequences that are cut over the context ranks."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

FAMILIES = "tests/models/common/test_context_parallel.py::test_every_family_equals_one_process_with_the_same_masks"
HEADS = "tests/models/common/test_context_parallel.py::test_heads_go_to_context_ranks_and_come_back"
KEPT = "tests/models/common/test_context_parallel.py::test_what_a_layer_keeps_falls_as_one_over_the_context_ranks"
EVEN = "tests/mpu/test_context_parallel.py::test_every_token_is_on_one_rank_and_causal_work_is_even"
DOCUMENTS = "tests/parity/test_context_parallel.py::test_documents_straddle_ranks_and_replicas_share_states"
PIPE = "tests/parity/test_context_parallel.py::test_a_pipeline_drops_what_one_process_drops"
LAST = "tests/ops/test_lower_right.py::test_values_and_gradients_are_those_with_a_mask"
ORDER = "tests/mpu/test_topology.py::test_context_runs_between_tensor_and_data_as_in_megatron"
FLAGS = "tests/arguments/test_context_parallel.py"

CONTEXT_PARALLEL = (
    Mutant(
        "gathered chunks stay in the order of the ranks",
        "megatron/mpu/context_parallel.py",
        "    return torch.cat([chunks[places.index(number)] for number in range(2 * size)])\n",
        "    return torch.cat([chunks[number] for number in range(2 * size)])\n",
        (FAMILIES, DOCUMENTS),
    ),
    Mutant(
        "a rank has neighbouring chunks, the last rank most of the work",
        "megatron/mpu/topology.py",
        "    return rank, 2 * size - 1 - rank\n",
        "    return 2 * rank, 2 * rank + 1\n",
        (EVEN,),
    ),
    Mutant(
        "gradients of gathered keys and values are not summed",
        "megatron/mpu/context_parallel.py",
        "        reduce_scatter_single(part, whole, group=ctx.group.handle)\n",
        "        part.copy_(whole.chunk(ctx.group.size)[ctx.group.rank])\n",
        (FAMILIES, DOCUMENTS),
    ),
    Mutant(
        "rotary positions begin anew on each context rank",
        "megatron/models/common/attention.py",
        "            positions = self.place.positions(own, query.device).unsqueeze(0)\n",
        "            positions = torch.arange(own, device=query.device).unsqueeze(0)\n",
        (FAMILIES,),
    ),
    Mutant(
        "learned positions begin anew on each context rank",
        "megatron/models/common/language_model.py",
        "        return self.place.positions(tokens.shape[1], tokens.device).expand(tokens.shape)\n",
        "        return torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)\n",
        (FAMILIES,),
    ),
    Mutant(
        "that a document began on another rank is forgotten",
        "megatron/models/common/model_args.py",
        "        every = gather_rows(segment_ids.t(), self.context).t()\n",
        "        every = gather_rows((segment_ids - segment_ids[:, :1]).t(), self.context).t()\n",
        (FAMILIES, DOCUMENTS),
    ),
    Mutant(
        "queries of a rank see keys as if they were the first of the sequence",
        "megatron/models/common/model_args.py",
        "        return own_positions(own, SINGLE if self.cuts_heads else self.context, device)\n",
        "        return torch.arange(own, device=device)\n",
        (FAMILIES,),
    ),
    Mutant(
        "the last queries see the first keys",
        "megatron/ops/attention.py",
        "    bias: Any = causal_lower_right(",
        '    bias: Any = __import__("torch").nn.attention.bias.causal_upper_left(',
        (LAST,),
    ),
    Mutant(
        "losses are those of one context rank, counted as if of all",
        "megatron/training/train_step.py",
        "        data = self.grid.data_context\n",
        "        data = self.grid.data\n",
        (DOCUMENTS,),
    ),
    Mutant(
        "a loss of whole samples counts on each context rank",
        "megatron/models/bert/model.py",
        "    if place.context.rank:  # the first token",
        "    if place.context.rank < 0:  # the first token",
        (FAMILIES,),
    ),
    Mutant(
        "gradients are summed over the data group alone",
        "megatron/training/setup.py",
        "        data=world.grid.data_context,\n",
        "        data=world.grid.data,\n",
        (DOCUMENTS,),
    ),
    Mutant(
        "hidden states are dropped as if they were the first of the sequence",
        "megatron/mpu/random.py",
        "            rows=_rows(runs, x.device).view(-1, 1, 1),\n",
        "            rows=_range(len(x), x.device).view(-1, 1, 1),\n",
        (FAMILIES, PIPE),
    ),
    Mutant(
        "probabilities are dropped as if their queries were the first of the sequence",
        "megatron/mpu/random.py",
        "            rows=(_rows(runs, x.device) if runs else _range(queries, x.device)).view(-1, 1),\n",
        "            rows=_range(queries, x.device).view(-1, 1),\n",
        (FAMILIES, PIPE),
    ),
    Mutant(
        "the heads of a context rank have the slopes of the first ones",
        "megatron/models/common/attention.py",
        "        first += place.context.rank * heads\n",
        "",
        (HEADS,),
    ),
    Mutant(
        "the second run of a rank has the documents of the first",
        "megatron/models/common/context_attention.py",
        "starts[:, start:stop], first=first)",
        "starts[:, : stop - start], first=first)",
        (FAMILIES,),
    ),
    Mutant(
        "documents begin where they do in the queries of another rank",
        "megatron/models/common/masks.py",
        "        return self._place.own_queries(document_starts(keys))\n",
        "        return document_starts(keys)[:, : segment_ids.shape[1]]\n",
        (FAMILIES,),
    ),
    Mutant(
        "the heads of a context rank have the dropout masks of the first ones",
        "megatron/models/common/context_attention.py",
        "first_head=group.rank * (query.shape[1] // group.size)",
        "first_head=0",
        (HEADS,),
    ),
    Mutant(
        "keys and values of all ranks are kept for the backward",
        "megatron/models/common/context_attention.py",
        "        if x.untyped_storage().data_ptr() != self._memory:\n",
        "        if x.untyped_storage().data_ptr() != 0:\n",
        (f"{KEPT}[all_gather]",),
    ),
    Mutant(
        "the context axis runs slower than the data axis",
        "megatron/mpu/topology.py",
        "        rest, context = divmod(rest, self.context)\n        pipe, data = divmod(rest, self.data)\n",
        "        rest, data = divmod(rest, self.data)\n        pipe, context = divmod(rest, self.context)\n",
        (ORDER,),
    ),
    Mutant(
        "a sequence that cannot be cut is taken",
        "megatron/arguments/validate.py",
        "    if length % parts:\n        tensor = ",
        "    if length % 2:\n        tensor = ",
        (f"{FLAGS}::test_what_it_cannot_go_with_is_refused",),
    ),
    Mutant(
        "a window longer than the sequence of loaded weights is refused",
        "megatron/config/decoder.py",
        "> config.batch.seq_length and config.checkpoint.load is None:",
        "> config.batch.seq_length:",
        (f"{FLAGS}::test_a_window_longer_than_the_sequence_is_refused_and_of_loaded_weights_is_named",),
        refuses=True,
    ),
    Mutant(
        "a model that was not built for context parallelism is taken",
        "megatron/training/setup.py",
        "    if size > 1 and built != {size}:\n",
        "    if size > 1 and not built:\n",
        (f"{FLAGS}::test_a_model_that_was_not_built_for_it_is_refused",),
    ),
)
