"""Mistakes in products that add the gradient of a weight to where it lies."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

OWN = "tests/tds/test_fused_linear.py"
SAME = f"{OWN}::test_gradients_are_those_of_autograd"
BITS = f"{OWN}::test_halves_of_a_backward_have_the_same_bits[False]"
HOOKS = f"{OWN}::test_hooks_run_once_behind_all_products_of_a_weight"
HELD = f"{OWN}::test_no_gradient_of_a_weight_is_made_apart"
GATED = f"{OWN}::test_gate_and_value_are_one_product_of_their_weight"
SHARE = f"{OWN}::test_the_share_counts_trained_numbers_and_names_the_largest_others"
SLOTS = "tests/optim/test_grad_buffer.py::test_a_product_adds_what_its_gradient_would"
LATE = "tests/optim/test_grad_buffer.py::test_a_product_behind_the_sum_is_refused"
BESIDE = "tests/mpu/test_products.py::test_a_product_that_adds_to_the_gradient_runs_beside_the_sum_too"
LAYOUT = "tests/parity/test_fused_accumulation.py::test_stages_that_put_weights_off_equal_one_process_without_it"
FILE, HOLDERS, BUFFER = "tds/fused_linear.py", "megatron/optim/main_params.py", "megatron/optim/grad_buffer.py"

OF_FUSED_LINEAR = (
    Mutant(
        "every product writes over those of earlier micro-batches",
        FILE,
        "beta=0 if is_first else 1",
        "beta=0",
        (f"{SAME}[False]",),
    ),
    Mutant(
        "a product that recompute runs adds to a copy of the weight",
        FILE,
        "            ctx.leaf.add_product(",
        "            getattr(weight, 'add_product', lambda *_: None)(",
        (f"{SAME}[True]",),
    ),
    Mutant(
        "the gradient is made apart and added",
        FILE,
        "    product(place, a, b, beta=0 if is_first else 1, out=place, **wide)\n",
        "    place.copy_(a @ b) if is_first else place.add_(a @ b)\n",
        (HELD,),
    ),
    Mutant(
        "autograd gets the gradient too, and adds it once more",
        FILE,
        "        return of_x, None, rows.sum(0) if",
        "        return of_x, rows.t().mm(x.reshape(-1, x.shape[-1])), rows.sum(0) if",
        (f"{SAME}[False]",),
    ),
    Mutant(
        "hooks of a weight never hear that its gradient is final",
        FILE,
        "    product: torch.Tensor = _FusedLinear.apply(x, weight, bias)\n",
        "    hidden = weight.detach().requires_grad_()\n"
        "    hidden.add_product = weight.add_product\n"
        "    product: torch.Tensor = _FusedLinear.apply(x, hidden, bias)\n",
        (HOOKS,),
    ),
    Mutant(
        "half a backward makes gradients apart",
        "tds/engine/weight_grad_store.py",
        '            elif hasattr(leaf, "add_product"):\n',
        "            elif False:\n",
        (BITS,),
    ),
    Mutant(
        "tensor-parallel products leave the gradient to autograd",
        "megatron/mpu/layers.py",
        '    if hasattr(weight, "add_product"):\n',
        "    if False:\n",
        (BESIDE,),
    ),
    Mutant(
        "a gated layer makes the gradients of its halves apart",
        "megatron/models/common/transformer.py",
        '        if hasattr(self.weight, "add_product"):\n',
        "        if False:\n",
        (GATED,),
    ),
    Mutant(
        "gate and value change places",
        "megatron/models/common/transformer.py",
        "            return gated.contiguous(), values.contiguous()\n",
        "            return values.contiguous(), gated.contiguous()\n",
        (GATED,),
    ),
    Mutant(
        "gradients of weights with fp32 masters lie in two places",
        HOLDERS,
        "        place = parameter.grad if parameter.dtype in WIDE else self._sums.get(parameter)\n",
        "        place = self._sums.get(parameter)\n",
        (f"{SAME}[False]",),
    ),
    Mutant(
        "parts of a slot have the products of other rows",
        BUFFER,
        "for of_a in cut.parts(a)]",
        "for of_a in cut.parts(a.flip(0))]",
        (SLOTS,),
    ),
    Mutant(
        "a product writes over what other micro-batches have left in a bucket",
        BUFFER,
        "        is_first = parameter not in self._filled\n",
        "        is_first = True\n",
        (SLOTS,),
    ),
    Mutant(
        "a product is added behind the sum over the replicas",
        BUFFER,
        "        self._refuse_if_summed(parameter)\n        is_first",
        "        is_first",
        (LATE,),
    ),
    Mutant(
        "the share counts frozen weights",
        FILE,
        "in parameters.items() if parameter.requires_grad}",
        "in parameters.items()}",
        (SHARE,),
    ),
    Mutant(
        "stages forget what products have added to a bucket",
        BUFFER,
        "        self._filled.add(parameter)\n        cut, a, b",
        "        cut, a, b",
        (LAYOUT,),
    ),
)
