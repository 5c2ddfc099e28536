"""Mistakes in what a checkpoint's checksums cover, and in how another layout takes its tensors up."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

FLIPS = "tests/checkpoint/test_flips.py::test_a_thousand_flipped_bits_are_all_found"
CHAIN = "tests/checkpoint/test_reshard.py::test_every_bit_comes_through_any_chain_of_layouts"
PAIRS = "tests/training/test_reshard.py::test_some_layouts_load_what_others_saved"

FLIPPED = (
    Mutant(
        "later segments are cut as before, the first begins behind the length of the header",
        "megatron/checkpoint/loading.py",
        "    starts = range(0, max(size, 1), SEGMENT_BYTES)\n    return [Segment(name, start,",
        "    starts = range(0, max(size, 1), SEGMENT_BYTES)\n    return [Segment(name, start or 8,",
        (FLIPS,),
        refuses=True,
    ),
    Mutant(
        "the first altered file is told, the last one is believed",
        "megatron/checkpoint/loading.py",
        "        if name not in problems:\n",
        "        if name not in problems and name != max(content.files):\n",
        (FLIPS,),
    ),
    Mutant(
        "a manifest that has an index is believed whatever its checksum",
        "megatron/checkpoint/manifest.py",
        'first[1] == b"%08x" % zlib.crc32(content[first.end() :])',
        'b"index" in content',
        (FLIPS,),
        refuses=True,  # some flips end in another error than the one that the test wants
    ),
    Mutant(
        "a segment of odd place is read twice over",
        "megatron/files.py",
        "        file.seek(start)\n        while start < stop",
        "        file.seek(start & ~511)\n        while start < stop",
        (FLIPS,),
        refuses=True,
    ),
    Mutant(
        "a slice along columns is read from the first one",
        "megatron/checkpoint/dcp.py",
        "cuts = tuple(slice(o, o + n) for o, n in zip(item.storage_offsets, item.lengths, strict=True))",
        "cuts = tuple(slice(o if d == 0 else 0, n + (o if d == 0 else 0)) for d, (o, n) in enumerate("
        "zip(item.storage_offsets, item.lengths, strict=True)))",
        (CHAIN,),
    ),
    Mutant(
        "the second moment is taken for the first",
        "megatron/training/train_state.py",
        'yield TensorRecord(f"optimizer/{key}/{name}", value, shard, optimizer.owns(parameter))',
        'yield TensorRecord(f"optimizer/{key}/{name}", state["exp_avg"], shard, optimizer.owns(parameter))',
        (PAIRS,),
    ),
    Mutant(
        "weights of 16 bits are saved instead of their masters",
        "megatron/training/train_state.py",
        'yield TensorRecord(f"weights/{name}", master.detach(), shard_of(master), optimizer.owns(parameter))',
        'yield TensorRecord(f"weights/{name}", master.detach().copy_(master.bfloat16()), shard_of(master), '
        "optimizer.owns(parameter))",
        (PAIRS, CHAIN),
    ),
    Mutant(
        "the model goes on with the weights it had before the load",
        "megatron/training/train_state.py",
        "    optimizer.copy_masters_to_parameters()\n",
        "",
        (PAIRS,),
    ),
    Mutant(
        "a part of ZeRO 1 lies where the replica's whole part does",
        "megatron/optim/zero/partition.py",
        "start=first + start, length=stop - start)",
        "start=first, length=stop - start)",
        (CHAIN,),
        refuses=True,
    ),
    Mutant(
        "moments begin where the weight of another tensor rank does",
        "megatron/training/train_state.py",
        "    return Shard(whole, shard.partition_dim, shard.start, shard.length)\n",
        "    return Shard(whole, shard.partition_dim, whole[shard.partition_dim] - shard.start - shard.length, "
        "shard.length)\n",
        (
            ""
            "tests/optim/zero/test_zero_checkpoints.py::test_a_checkpoint_goes_through_stages_and_layouts_with_every_bit[dtype0]",
        ),
    ),
)
