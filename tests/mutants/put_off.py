"""Mistakes in what waits for its ``BackwardWeight`` beside linear layers: modules with ``backward_dw()``, the graph."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

GRAPH = "tests/tds/engine/test_graph_split.py"
BITS = f"{GRAPH}::test_a_backward_that_the_graph_splits_has_the_bits_of_a_whole_one"
ONCE = f"{GRAPH}::test_hooks_run_once_when_the_gradient_comes_and_what_is_frozen_has_none"
PAYS = f"{GRAPH}::test_the_graph_is_taken_where_linear_layers_have_less_than_half"
MODULES = f"{GRAPH}::test_modules_with_backward_dw_have_the_gradients_of_torchs"
ENGINE = f"{GRAPH}::test_products_without_linear_are_put_off_under_a_schedule_that_splits"
EXPERTS = "tests/models/common/test_experts.py::test_gradients_of_experts_wait_for_their_turn_to_the_bit"
STORE, SPLIT, STAGE = "tds/engine/weight_grad_store.py", "tds/engine/graph_split.py", "tds/engine/stage.py"

OF_PUT_OFF = (
    Mutant(
        "a weight that two products share is put off, and comes down from the upper to the lower one again",
        SPLIT,
        "if all(uses[weight] == 1 for weight in branch.weights)",
        "if all(uses[weight] >= 1 for weight in branch.weights)",
        (f"{BITS}[False-torch.float64]",),
    ),
    Mutant(
        "a function of a program's own runs twice",
        SPLIT,
        "            if not is_own_function and any(",
        "            if any(",
        (f"{BITS}[False-torch.float64]",),
    ),
    Mutant(
        "norms are put off",
        SPLIT,
        "any(weight.dim() > 1 for weight in weights)",
        "weights",
        (f"{BITS}[False-torch.float64]",),
    ),
    Mutant(
        "linear layers that are split by themselves do not run in a backward by the graph",
        SPLIT,
        'if hasattr(node, "variable") and node.variable not in put_off]',
        'if hasattr(node, "variable") and node.variable not in put_off and node.variable is not anchor]',
        (f"{BITS}[False-torch.float64]",),
        refuses=True,
    ),
    Mutant(
        "layers that are computed again for their weights are not those of the forward",
        STORE,
        "        with self.active() if self.by_graph else nullcontext():",
        "        with nullcontext():",
        (f"{BITS}[True-torch.float64]",),
        refuses=True,
    ),
    Mutant(
        "hooks of a branch stay on its node",
        SPLIT,
        "            hook.remove()\n",
        "            pass\n",
        (f"{GRAPH}::test_a_graph_is_let_go_with_its_weights_turn",),
    ),
    Mutant(
        "the graph is taken where linear layers have more than half",
        SPLIT,
        "for weight in branch.weights) > graph.hidden",
        "for weight in branch.weights) > 0",
        (f"{PAYS}[Linear-False]",),
    ),
    Mutant(
        "a module's gradient replaces the sum of the micro-batches before it",
        STORE,
        "            parameter.grad = gradient\n",
        "            parameter.grad = None\n",
        (f"{MODULES}[2-zb-h1-False-delayed]",),
    ),
    Mutant(
        "of the calls of a module in a micro-batch one is computed",
        STORE,
        "        for _ in range(self.times):\n",
        "        for _ in range(1):\n",
        (f"{MODULES}[2-zb-h1-False-delayed]",),
    ),
    Mutant(
        "the second call of a module finds the gradient of the first",
        STORE,
        "            for parameter in parameters:\n                parameter.grad = None\n",
        "            for parameter in parameters[:0]:\n                parameter.grad = None\n",
        (f"{MODULES}[2-zb-h1-False-delayed]",),
    ),
    Mutant(
        "modules that always wait are forgotten in a whole backward",
        STAGE,
        "self.backward_in_halves if self.splitter.modules.always_wait else self.backward",
        "self.backward",
        (f"{MODULES}[4-1f1b-False-delayed]",),
    ),
    Mutant(
        "a forward that is computed again counts",
        STAGE,
        "return _key(action) if self.exchange.is_training and isinstance(action, Forward) else None",
        "return _key(action) if self.exchange.is_training else None",
        (f"{MODULES}[2-zb-h1-True-delayed]",),
        refuses=True,
    ),
    Mutant(
        "modules that may compute at once never wait",
        STORE,
        "            each.delay_wgrad = True",
        "            each.delay_wgrad = False",
        (f"{EXPERTS}[False]",),
    ),
    Mutant(
        "a module's weights are not among those that wait",
        STORE,
        "        self._put_off[key] += self.modules.waiting(key)\n",
        "        self._put_off[key] += self.modules.waiting(key)[1:]\n",
        (f"{EXPERTS}[False]",),
    ),
    Mutant(
        "experts of the second micro-batch take what the first has left",
        "megatron/models/common/experts.py",
        "        del self._delayed[:2]\n",
        "",
        (f"{EXPERTS}[False]",),
    ),
    Mutant(
        "the first stage's inputs, of which it has none, are waited for",
        STORE,
        "        if self.by_graph is None and inputs:\n",
        "        if self.by_graph is None:\n",
        (f"{PAYS}[Addmm-True]",),
    ),
)
