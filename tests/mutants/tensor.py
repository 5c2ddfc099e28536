"""Mistakes in layers cut over the tensor group."""

from __future__ import annotations

from tests.mutants.mutant import EMBEDDING, ENTROPY, LINEAR, Mutant

TENSOR = (
    Mutant(
        "column-parallel backward has no all-reduce",
        "megatron/mpu/mappings.py",
        "    return AsyncHandle(x, dist.all_reduce(x, group=group.handle, async_op=True), x)\n",
        "    return AsyncHandle(x, dist.all_reduce(x.clone(), group=group.handle, async_op=True), x)\n",
        (LINEAR,),
    ),
    Mutant(
        "row-parallel backward has an all-reduce",
        "megatron/mpu/mappings.py",
        "        return all_reduce(x.contiguous().clone(), group)\n\n"
        "    @staticmethod\n    def backward(ctx: Any, *grads: torch.Tensor) -> Any:\n        return grads[0], None\n",
        "        ctx.group = group\n        return all_reduce(x.contiguous().clone(), group)\n\n"
        "    @staticmethod\n    def backward(ctx: Any, *grads: torch.Tensor) -> Any:\n"
        "        return all_reduce(grads[0].contiguous().clone(), ctx.group), None\n",
        (LINEAR,),
    ),
    Mutant(
        "the row-parallel bias is added on every rank",
        "megatron/mpu/layers.py",
        "leave_tensor_region(linear(x, self.weight), self.group",
        "leave_tensor_region(linear(x, self.weight, self.bias), self.group",
        (LINEAR,),
    ),
    Mutant(
        "the embedding's first token is one too high",
        "megatron/mpu/layers.py",
        "        local = tokens - self.start\n",
        "        local = tokens - self.start - min(self.group.rank, 1)\n",
        (EMBEDDING,),
    ),
    Mutant(
        "the loss's first token is one too high",
        "megatron/mpu/cross_entropy.py",
        "        local = targets - start\n",
        "        local = targets - start - min(group.rank, 1)\n",
        (ENTROPY,),
    ),
    Mutant(
        "padded rows of the vocabulary take part in the softmax",
        "megatron/mpu/cross_entropy.py",
        "    real = logits[..., :num_real] if logits.shape[-1] != num_real else logits\n",
        "    real = logits\n",
        (ENTROPY,),
    ),
    Mutant(
        "queries, keys and values of all heads lie together, so that a cut mixes them",
        "megatron/models/common/attention.py",
        ".view(*packed.shape[:2], self.num_heads, parts, self.head_size)",
        ".view(*packed.shape[:2], parts, self.num_heads, self.head_size).transpose(2, 3)",
        ("tests/models/common/test_tensor_ranks.py::test_tensor_ranks_together_equal_one_process[2-GPT-2]",),
    ),
    Mutant(
        "each tensor rank starts from numbers of its own",
        "megatron/models/common/parameters.py",
        "        block = _block(name, seed, first, last - first, shard.global_shape[1:]) * scale\n",
        "        block = _block(name, seed + shard.start, first, last - first, shard.global_shape[1:]) * scale\n",
        ("tests/models/common/test_init.py::test_a_model_starts_from_the_same_values_on_any_number_of_tensor_ranks",),
    ),
    Mutant(
        "collectives have the names of torch 2.13 alone",
        "megatron/torch_compat.py",
        "    return name if hasattr(dist, name) else OLDER[name]\n",
        "    return name\n",
        ("tests/test_torch_compat.py",),
        refuses=True,
    ),
)
