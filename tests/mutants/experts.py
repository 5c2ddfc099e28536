"""Mistakes in layers with experts: routing, balance, what is counted, where rows go, what is cut."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

LAYER = "tests/models/common/test_experts.py"
LOOP = f"{LAYER}::test_a_layer_is_a_loop_over_tokens"
LAYOUTS = "tests/parity/test_experts.py"
LAYOUT = f"{LAYOUTS}::test_every_layout_is_one_process"
MICRO = f"{LAYOUTS}::test_the_number_of_micro_batches_changes_nothing[4]"
COUNTED = f"{LAYER}::test_recompute_and_evaluation_count_no_token"
ROUTER, EXPERTS = "megatron/models/common/router.py", "megatron/models/common/experts.py"

IN_EXPERTS = (
    Mutant(
        "the balance loss takes the shares of the micro-batch",
        ROUTER,
        "        before = self.tokens_per_expert.to(like.dtype)\n",
        "        before = self.counts.to(like.dtype)\n",
        (MICRO,),
    ),
    Mutant(
        "weights of experts are not differentiated",
        EXPERTS,
        "weights.flatten(0, 1).unsqueeze(-1)",
        "weights.detach().flatten(0, 1).unsqueeze(-1)",
        (f"{LOOP}[softmax]",),
    ),
    Mutant(
        "results come back in the order of experts",
        "megatron/ops/grouped.py",
        "return x.index_select(0, slots.place).view(",
        "return x.index_select(0, slots.order).view(",
        (f"{LOOP}[softmax]",),
    ),
    Mutant(
        "the bias moves by the tokens of one replica",
        ROUTER,
        "        self._groups = [grid.data_context,",
        "        self._groups = [grid.tensor,",
        (f"{LAYOUT}[deepseek-1-2-2-recomputed-1]",),
    ),
    Mutant(
        "the shared expert is computed and summed on each tensor rank as a whole",
        EXPERTS,
        "        return y if self.shared_expert is None else y + self._shared(x)\n",
        "        shared = 0.0 if self.shared_expert is None else self._shared(x) * self.place.group.size\n"
        "        return y + shared\n",
        (f"{LAYOUT}[deepseek-2-2-1-cut-1]",),
    ),
    Mutant(
        "capacity is that of a part of the sample",
        ROUTER,
        "    whole = gather_rows(whole, place.context)\n",
        "",
        (f"{LAYOUT}[capacity-2-1-1-cut-2]",),
        refuses=True,
    ),
    Mutant(
        "capacity is that of the micro-batch",
        ROUTER,
        "len(whole) * sizes.moe_router_topk // number)",
        "whole.shape[0] * whole.shape[1] * sizes.moe_router_topk // number)",
        (MICRO, f"{LOOP}[capacity by weight]"),
    ),
    Mutant(
        "of equal scores the higher expert number goes first",
        ROUTER,
        "    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :number]",
        "    last = scores.shape[-1] - 1\n"
        "    return last - scores.flip(-1).sort(dim=-1, descending=True, stable=True).indices[..., :number]",
        (f"{LAYER}::test_equal_scores_go_to_the_lower_numbers_and_the_others_get_no_token",),
    ),
    Mutant(
        "a recompute counts its tokens again",
        ROUTER,
        "        if not is_running():  # a recompute sees the same tokens again\n",
        "        if True:\n",
        (COUNTED,),
    ),
    Mutant(
        "evaluation counts its tokens",
        ROUTER,
        "        if not self.training:\n            return weights\n",
        "",
        (COUNTED,),
    ),
    Mutant(
        "the losses of routers are not scaled as that of the tokens",
        ROUTER,
        "ctx.like.new_full((), ctx.router.gradient_scale)",
        "ctx.like.new_full((), 1.0)",
        (f"{LOOP}[softmax]", MICRO),
    ),
    Mutant(
        "weights of experts have the gradient of one tensor rank's part of the products",
        EXPERTS,
        "x, weights = enter_tensor_region(x, **place.cut), enter_tensor_region(weights, **place.cut)",
        "x = enter_tensor_region(x, **place.cut)\n"
        "        weights = enter_tensor_region(weights, **place.cut) if place.sequence_parallel else weights",
        (f"{LAYOUT}[balanced-2-1-1-1]",),
    ),
    Mutant(
        "the bias is part of the weights",
        ROUTER,
        "            weights = scores.gather(-1, experts)\n",
        "            weights = (scores + (0 if self.expert_bias is None else self.expert_bias)).gather(-1, experts)\n",
        (f"{LOOP}[sigmoid]",),
    ),
    Mutant(
        "the bias falls for experts with too few tokens",
        ROUTER,
        "torch.sign(counts.sum() / len(counts) - counts)",
        "torch.sign(counts - counts.sum() / len(counts))",
        (f"{LAYER}::test_a_step_moves_the_bias_by_the_sign_of_what_an_expert_lacks",),
    ),
    Mutant(
        "gate and value of an expert change places",
        EXPERTS,
        "hidden = activation(gate) * value",
        "hidden = activation(value) * gate",
        (f"{LOOP}[sigmoid]",),
    ),
    Mutant(
        "the tokens of each expert are not saved",
        "megatron/training/train_state.py",
        "    records += [*router_records(module, world), *rng_records(world)]\n",
        "    records += rng_records(world)\n",
        ("tests/training/test_expert_runs.py::test_a_resumed_run_is_bit_for_bit_the_one_that_did_not_stop",),
        refuses=True,
    ),
    Mutant(
        "gradients of experts are summed over all replicas",
        "megatron/optim/optimizer.py",
        "ExpertGradients(expert_data)",
        "ExpertGradients(data)",
        (f"{LAYOUT}[balanced-2-1-2-ep-2-cut-zero-stage-1-1]",),
    ),
    Mutant(
        "gradients of experts are summed twice, with the others too",
        "megatron/optim/main_params.py",
        "        if not is_reduced_apart(parameter):\n            self._order.register(parameter)\n",
        "        self._order.register(parameter)\n",
        (f"{LAYOUT}[balanced-2-1-2-ep-2-cut-zero-stage-1-1]",),
        refuses=True,
    ),
    Mutant(
        "the pipeline sums gradients of experts with the others",
        "tds/engine/build.py",
        "[[p for p in own(chunk) if not is_reduced_apart(p)] for chunk in range(num_chunks(module))]\n"
        "    every = [p for p in module.parameters() if not is_reduced_apart(p)]\n",
        "[list(own(chunk)) for chunk in range(num_chunks(module))]\n    every = list(module.parameters())\n",
        (f"{LAYOUT}[balanced-1-2-2-ep-2-recomputed-1]",),
    ),
    Mutant(
        "the norm counts the experts of one rank alone",
        "megatron/optim/optimizer.py",
        "        return self._masters.data_group if self._of_experts.are_there else self._gradients.holders\n",
        "        return self._gradients.holders\n",
        (f"{LAYOUT}[balanced-2-1-2-ep-2-cut-zero-stage-1-1]",),
    ),
    Mutant(
        "rows of several senders stay sender by sender",
        "megatron/mpu/expert_parallel.py",
        "        order = experts.sort(dim=0, stable=True).indices\n",
        "        order = torch.arange(len(experts), device=experts.device)\n",
        (f"{LAYOUT}[balanced-2-1-2-ep-2-cut-zero-stage-1-1]",),
    ),
    Mutant(
        "DeepSpeed sends the experts of the first rank to all",
        "megatron/training/setup.py",
        "(arrives and p.requires_grad) or is_reduced_apart(p)",
        "arrives and p.requires_grad",
        (f"{LAYOUT}[balanced-2-1-2-ep-2-cut-zero-stage-1-1]",),
    ),
    Mutant(
        "whole experts on tensor ranks are not summed over these",
        EXPERTS,
        "                set_partial(parameter)\n",
        "                pass\n",
        (f"{LAYOUT}[deepseek-2-1-1-cut-expert-tensor-parallel-size-1-1]",),
    ),
    Mutant(
        "whole experts on tensor ranks count on each of them in the norm",
        EXPERTS,
        "                set_shard(parameter, Shard(tuple(parameter.shape)))  # whole on each, and counted once\n",
        "                pass\n",
        (f"{LAYOUT}[deepseek-2-1-1-cut-expert-tensor-parallel-size-1-1]",),
    ),
    Mutant(
        "gate and up of an expert are read from one another's file",
        "megatron/models/llama/huggingface_experts.py",
        "WeightMapping((gate, up), blocks=size)",
        "WeightMapping((up, gate), blocks=size)",
        ("tests/models/llama/test_experts_against_huggingface.py"
         "::test_the_same_weights_give_the_same_logits_loss_and_gradients[mixtral]",),
    ),
)  # fmt: skip
