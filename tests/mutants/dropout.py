"""Mistakes in dropout masks and recompute."""

from __future__ import annotations

from tests.mutants.mutant import LAYOUTS, LOOP, MASKS, Mutant

DROPOUT = (
    Mutant(
        "tensor ranks drop the same elements of their slices",
        "megatron/mpu/random.py",
        "        tensor_rank = self.tensor_rank if is_cut else -1\n",
        "        tensor_rank = -1\n",
        (f"{MASKS}::test_tensor_ranks_differ_where_the_tensor_is_cut",),
    ),
    Mutant(
        "attention does not say that its heads are cut",
        "megatron/models/common/attention.py",
        "is_cut=self.is_cut",
        "is_cut=False",
        ("tests/models/common/test_dropout.py::test_tensor_ranks_drop_the_same_hidden_states_and_different_attention",),
    ),
    Mutant(
        "tensor ranks drop other elements of what all hold",
        "megatron/mpu/random.py",
        "        tensor_rank = self.tensor_rank if is_cut else -1\n",
        "        tensor_rank = self.tensor_rank\n",
        (f"{MASKS}::test_tensor_ranks_share_the_mask_of_what_they_all_hold",),
    ),
    Mutant(
        "all replicas drop the same elements",
        "megatron/mpu/random.py",
        "        self.data_rank = data.rank\n",
        "        self.data_rank = 0\n",
        (f"{MASKS}::test_every_other_difference_of_place_gives_another_mask",),
    ),
    Mutant(
        "a run does not tell its dropout which replica it is",
        "megatron/training/setup.py",
        "streams = DropoutStreams(seed, grid.data_context, grid.tensor)",
        "streams = DropoutStreams(seed, tensor=grid.tensor)",
        (f"{LOOP}::test_a_run_draws_dropout_by_seed_replica_and_tensor_rank",),
    ),
    Mutant(
        "a pipeline's micro-batches all drop the same elements",
        "megatron/training/train_step.py",
        "        self.streams.position = DropoutKey(self._step, micro_batch, self._first)\n",
        "        self.streams.position = DropoutKey(self._step, 0, self._first)\n",
        (f"{LAYOUTS}::test_pipeline_draws_the_dropout_masks_of_one_process",),
    ),
    Mutant(
        "recompute draws the masks of the micro-batch that runs now",
        "megatron/mpu/random.py",
        "        with streams.at(position):\n",
        "        with streams.at(streams.position):\n",
        (f"{MASKS}::test_recomputing_draws_the_same_masks_even_when_the_position_has_moved_on",),
    ),
    Mutant(
        "evaluation in one stage drops elements",
        "megatron/training/train_step.py",
        "        self.engine.eval()\n",
        "        self.engine.train()\n",
        (f"{LOOP}::test_evaluation_drops_nothing",),
    ),
    Mutant(
        "evaluation in a pipeline drops elements",
        "tds/engine/engine.py",
        "            self.module.eval()\n",
        "            self.module.train()\n",
        (f"{LOOP}::test_evaluation_drops_nothing",),
    ),
)
