"""Mistakes in dropout by a kernel and as an operator of compiled layers; those in the kernel are seen with Triton."""

from __future__ import annotations

import importlib.util

from tests.mutants.mutant import Mutant

_FUSED = "megatron/mpu/fused_dropout.py"
_KERNEL = "megatron/mpu/triton_kernels.py"
_TESTS = "tests/mpu/test_fused_dropout.py"
_MASKS, _KEYS, _OPERATOR = (
    f"{_TESTS}::test_the_kernel_gives_what_torch_gives[{n}]" for n in ("masks", "keys", "operator")
)
_ON_A_CPU = f"{_TESTS}::test_the_operator_has_the_bits_of_a_generator_on_a_cpu[dtype0]"
_COMPILED = "tests/training/test_compiled.py"
_GRAPH = f"{_COMPILED}::test_a_layer_that_drops_hidden_states_alone_is_one_graph_of_every_step_and_micro_batch"

_IN_KERNEL = (
    Mutant("words are in another order", _KERNEL, "tl.interleave(one, three)", "tl.interleave(one, two)", (_MASKS,)),
    Mutant(
        "a part of columns begins with the first word of its counter",
        _KERNEL,
        "    begin = first_column // 4 * 4 - first_column + ",
        "    begin = ",
        (_MASKS,),
    ),
    Mutant("every rank has the rows of the first", _KERNEL, "row + first_row)", "row + 0 * first_row)", (_MASKS,)),
    Mutant("heads share a mask", _KERNEL, "(nothing + plane + first_plane)", "(nothing + first_plane)", (_MASKS,)),
    Mutant(
        "what is kept is not scaled up", _KERNEL, "given.to(tl.float32) * scale", "given.to(tl.float32) * 1.0", (_KEYS,)
    ),
    Mutant(
        "the residual is lost where an element is",
        _KERNEL,
        "(beside.to(tl.float32) + kept.to(tl.float32))",
        "tl.where(kept == 0.0, 0.0, beside + kept)",
        (_MASKS,),
    ),
    Mutant(
        "backward lets every element through",
        _FUSED,
        "return run_kernel(grads[0], None, ctx.mask), grads",
        "return grads[0], grads",
        (_KEYS,),
    ),
    Mutant(
        "the residual has no gradient",
        _FUSED,
        "grads[0] if ctx.has_residual else None, None",
        "None, None",
        (_MASKS,),
        True,
    ),
    Mutant(
        "the gradient of the operator is of another key",
        _FUSED,
        "Mask(int(key), probability))",
        "Mask(int(key) + 1, probability))",
        (_OPERATOR,),
    ),
)

FUSED_DROPOUT = (
    *(_IN_KERNEL if importlib.util.find_spec("triton") is not None else ()),
    Mutant(
        "the operator forgets the rank",
        _FUSED,
        "*ranks[1:], int(layer)",
        "0, -1 + 0 * ranks[1], 0 * int(layer)",
        (_ON_A_CPU,),
    ),
    Mutant("the operator lets every gradient through", _FUSED, "else grad * kept", "else grad", (_ON_A_CPU,)),
    Mutant(
        "a compiled layer has the masks of the first step for ever",
        "megatron/mpu/random.py",
        "        if self._counts is not None:  # a new",
        "        if self._counts is None:  # a new",
        (_GRAPH,),
    ),
    Mutant(
        "dropout breaks the graph of a layer",
        "megatron/training/compile.py",
        "    streams.enter_graphs()\n",
        "",
        (_GRAPH,),
    ),
)
