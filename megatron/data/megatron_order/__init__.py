"""--data-order megatron: samples from megatron-core's GPTDataset, BlendedDataset and their builder, in its order.

| megatron-core | here |
|---|---|
| epoch count, separate last epoch | ``epochs`` |
| document index and shuffle index, numpy's generator | ``permutations`` |
| sample index | ``sample_windows``, computed from document sizes |
| blending indices | ``blend_choices`` |
| ``--split`` | ``split_bounds`` |
| corpus sizes in a blend | ``builder`` |

Source: megatron-core 0.16.1; the order is the same in Megatron-LM of August 2026 (commit d98e8a6).
"""
