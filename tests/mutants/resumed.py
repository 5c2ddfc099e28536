"""Mistakes in what a resumed run takes up."""

from __future__ import annotations

from tests.mutants.mutant import FP16, LOOP, RESUME, Mutant

RESUMED = (
    Mutant(
        "random states are not restored",
        "megatron/training/train_state.py",
        "    device.set_rng_states(states)\n",
        "    del states\n",
        (f"{RESUME}[1-1-2]",),
    ),
    Mutant(
        "every rank restores the random state of rank 0",
        "megatron/training/train_state.py",
        "        name = _rng_name(kind, world)\n",
        '        name = f"rng/{kind}/{0:05d}"\n',
        (f"{RESUME}[1-1-2]",),
    ),
    Mutant(
        "the data goes on some micro-batches too late",
        "megatron/training/trainer.py",
        "self.config, self.world, self.progress.samples_consumed)",
        "self.config, self.world, self.progress.samples_consumed + (self.config.batch.gas if "
        "self.progress.step else 0))",
        (f"{RESUME}[1-1-1]",),
    ),
    Mutant(
        "consumed samples leave out the accumulation",
        "megatron/training/trainer.py",
        "        progress.samples_consumed += count\n",
        "        progress.samples_consumed += count // self.samples.num_micro_batches\n",
        (f"{LOOP}::test_a_skipped_step_counts_its_samples_but_holds_the_learning_rate",),
    ),
    Mutant(
        "Adam's step count is not restored",
        "megatron/training/train_state.py",
        '        set_optimizer_steps(optimizer, checkpoint.state["optimizer_steps"])\n',
        "",
        (f"{RESUME}[1-1-1]",),
    ),
    Mutant(
        "the loss scale is not restored",
        "megatron/training/train_state.py",
        "        restore_scaler(optimizer.scaler, checkpoint.state, config)\n",
        "",
        (f"{FP16}::test_loss_scale_and_counters_survive_a_stop[8]",),
    ),
    Mutant(
        "tensor ranks load each other's slices",
        "megatron/checkpoint/dcp.py",
        "        wanted = ChunkStorageMetadata(torch.Size(offsets(shard)), torch.Size(part_shape(shard)))\n",
        "        facts = zip(shard.global_shape, offsets(shard), part_shape(shard), strict=True)\n"
        "        starts = torch.Size([whole - start - length for whole, start, length in facts])\n"
        "        wanted = ChunkStorageMetadata(starts, torch.Size(part_shape(shard)))\n",
        ("tests/checkpoint/test_layouts.py::test_any_tensor_size_reads_what_any_other_saved[2]",),
    ),
    Mutant(
        "16-bit weights do not follow the masters that were loaded",
        "megatron/training/train_state.py",
        "    optimizer.copy_masters_to_parameters()\n",
        "",
        (f"{FP16}::test_loss_scale_and_counters_survive_a_stop[8]",),
    ),
)
