"""--data-order megatron: the samples of megatron-core's GPTDataset, BlendedDataset and their builder, in its order.

| megatron-core | here |
|---|---|
| number of epochs, separate last epoch | ``epochs`` |
| document index and shuffle index, numpy's generator | ``permutations`` |
| sample index | ``sample_windows``, computed from the sizes of the documents |
| blending indices | ``blend_choices`` |
| ``--split`` | ``split_bounds`` |
| sizes of the corpora of a blend | ``builder`` |

Source: megatron-core 0.16.1; the order is the same in Megatron-LM of August 2026 (commit d98e8a6).
"""
