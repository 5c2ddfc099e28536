"""Stage: runs the actions of a schedule on one pipeline rank; one method per action type."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import get_gradient_edge

from tds.bucket_reducer import BucketReducer
from tds.device import to_device
from tds.engine.batch_structure import describe_structure
from tds.engine.micro_batches import stage_inputs
from tds.engine.recompute import NoRecompute, Recompute
from tds.engine.report import BACKWARD, FORWARD
from tds.engine.stage_call import Call, InFlight, action_key, program_of
from tds.engine.weight_grad_store import WeightGradStore
from tds.gradients import GradientSource
from tds.loss import NO_LOSS_FN, has_loss_function
from tds.p2p.communicator import P2PCommunicator
from tds.schedule import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
)

if TYPE_CHECKING:
    from tds.action_times import Recorder


class Stage:
    """A pipeline rank's layers and their communication with the adjacent stages.

    Args:
        module: this stage's layers, see ``ScheduleEngine``.
        communicator: this stage's communicator.
        splits_by_graph: split backwards by autograd's graph, see ``WeightGradStore``.
        recompute: activation recomputation; None: no recomputation.

    Attributes:
        recorder: records action times in training; None: actions are not recorded.
        span: clock marks before and after the last run's actions.
    """

    def __init__(
        self,
        module: Any,
        communicator: P2PCommunicator,
        device: torch.device,
        splits_by_graph: bool | None = False,
        recompute: Recompute | None = None,
    ) -> None:
        self.module = module
        self.communicator = communicator
        self.device = device
        self.index = communicator.links.stage
        self.num_stages = communicator.links.num_stages
        self.placement = communicator.placement
        self.num_chunks = self.placement.num_chunks
        self.splitter = WeightGradStore(module, self._current_forward, splits_by_graph=splits_by_graph)
        self.recompute: Recompute = NoRecompute() if recompute is None else recompute
        self.recorder: Recorder | None = None
        self.span: tuple[Any, Any] | None = None
        self._in_flight: dict[tuple[int, int], InFlight] = {}
        self._program = program_of((), self.index, self.placement)
        self._always_defers = self.splitter.modules.always_defers
        self._failure: str | None = None
        self._is_aborted = False
        self._methods: dict[type[Action], Callable[[Action, Call], None]] = {
            Forward: self.forward,
            Backward: self.backward_split if self._always_defers else self.backward,
            BackwardInput: self.backward_input,
            BackwardWeight: self.backward_weight,
        }

    @property
    def has_deferred_weights(self) -> bool:
        """True if the last run deferred weight gradients."""
        return bool(self._program.deferred_keys)

    def run(self, actions: Sequence[Action], call: Call) -> None:
        """Run ``actions`` in order. Collective: all other stages must run their actions of the same call.

        Raises:
            RuntimeError: an earlier call failed midway, so its messages may still be in flight.
        """
        self._check_not_broken()
        self._program = program_of(tuple(actions), self.index, self.placement)
        call.source.begin(self._program.reads_data)
        with self._mark_broken_on_error():
            self.communicator.begin(actions, is_training=call.is_training, marks_all=call.recomputes_reentrantly)
            start = self.communicator.clock.mark()
            self._run_actions(actions, call)
            self.span = (start, self.communicator.clock.mark())
            self.communicator.finish()

    @contextmanager
    def _mark_broken_on_error(self) -> Iterator[None]:
        """Clean up if the block raises.

        With several stages, also mark this stage as broken: messages of the failed call are still in flight, and the
        next call would receive them as its own.
        """
        try:
            yield
        except BaseException as error:
            self._in_flight.clear()
            self.splitter.clear()
            if self.num_stages > 1:
                self._failure = f"{type(error).__name__}: {error}"
                self._is_aborted = self.communicator.abort()
            raise

    def _check_not_broken(self) -> None:
        if self._failure is not None:
            raise RuntimeError(
                f"stage {self.index} cannot continue: an earlier train_batch or eval_batch failed while messages "
                f"between stages were in flight ({self._failure}). End the program and resume"
                + ("" if self._is_aborted else ", or build a new engine on all ranks")
            )

    def _run_actions(self, actions: Sequence[Action], call: Call) -> None:
        recorder = self.recorder if call.is_training else None
        for action in actions:
            self.communicator.begin_action(action)
            if call.on_action is not None:
                call.on_action(action)
            if recorder is None:
                self._methods[type(action)](action, call)
            else:
                recorder.before()
                self._methods[type(action)](action, call)
                recorder.after(action)
        self.communicator.action = None

    def forward(self, action: Action, call: Call) -> None:
        """Run the layers on one micro-batch, then send the output to the next stage or compute the loss."""
        incoming, outgoing = self._program.messages[action]
        labels = None
        leaves: list[torch.Tensor] = []
        if incoming is None or outgoing is None:
            inputs, labels = call.source.next(action.micro_batch)
            labels = to_device(labels, self.device) if outgoing is None else None  # starts the copy before the forward
        if incoming is None:
            inputs = stage_inputs(inputs, self.device, needs_grad=call.recomputes_reentrantly)
        else:
            inputs, leaves = self.communicator.recv_forward(incoming)
        if call.is_training and call.on_micro_batch is not None:
            call.on_micro_batch(action.micro_batch)
        note_context = _add_note_on_error(
            lambda: f"the first layer received {describe_structure(inputs)}", incoming is None
        )
        with call.time_phase(FORWARD), note_context, self._splittable_layers(action), self._recomputing():
            output = self.module(inputs) if self.num_chunks == 1 else self.module(inputs, action.chunk)
        if not call.is_training:
            self.recompute.discard()
        if outgoing is None:
            self._finish_forward(action, call, output, labels, leaves)
            return
        with_grad = self.communicator.send_forward(outgoing, output)
        if call.is_training:
            self._check_lost_gradients(with_grad)
            self._in_flight[action_key(action)] = InFlight(leaves, [get_gradient_edge(t) for t in with_grad])

    def backward(self, action: Action, call: Call) -> None:
        """Run the full backward of one micro-batch and send the input gradients to the previous stage."""
        with self._starting_reductions(action, call):
            self._run_backward(action, call)
        reducer = self._reducer_after(action, call)
        if reducer is not None:
            reducer.register_chunk_ready(action.chunk)
            reducer.end_backward()

    def backward_split(self, action: Action, call: Call) -> None:
        """Run a full backward as two halves, for modules that defer their weight gradients in every backward."""
        self._run_backward(action, call)
        self.backward_weight(action, call)

    def backward_input(self, action: Action, call: Call) -> None:
        """Run the backward of one micro-batch and defer the weight gradients that the schedule can split."""
        self._run_backward(action, call)

    def backward_weight(self, action: Action, call: Call) -> None:
        """Compute the weight gradients that ``backward_input`` deferred."""
        gradients = _gradients(call)
        reducer = self._reducer_after(action, call)
        starts_early = reducer is not None and gradients.accumulates_in_hooks
        if reducer is not None and starts_early:
            reducer.register_chunk_ready(action.chunk, excluded=self.splitter.deferred_leaves(action_key(action)))
        with call.time_phase(BACKWARD):
            gradients.before_backward()
            self.splitter.run(action_key(action), reducer.mark_ready if reducer is not None and starts_early else None)
            gradients.after_backward()
        if reducer is not None:
            reducer.register_chunk_ready(action.chunk)
            reducer.end_backward()

    def _reducer_after(self, action: Action, call: Call) -> BucketReducer | None:
        """Return the reducer if it reduces the gradients of the chunk after ``action``, otherwise None."""
        reducer = call.reducer
        if reducer is None or not (reducer.reduces_every_backward or action in self._program.last):
            return None
        return reducer

    def _run_backward(self, action: Action, call: Call) -> None:
        incoming, outgoing = self._program.messages[action]
        gradients = _gradients(call)
        output_grads = [None] if incoming is None else self.communicator.recv_backward(incoming)
        state = self._in_flight.pop(action_key(action))
        with call.time_phase(BACKWARD):
            gradients.before_backward()
            with self._splittable_layers(action), self._deferring_weight_grads(action):
                if isinstance(action, BackwardInput):
                    self.splitter.backward(state.roots, output_grads, state.leaves)
                elif state.roots:
                    torch.autograd.backward(state.roots, output_grads)
            gradients.after_backward()
        if outgoing is not None:
            input_grads = [torch.zeros_like(t) if t.grad is None else t.grad for t in state.leaves]
            self.communicator.send_backward(outgoing, input_grads)

    def _splittable_layers(self, action: Action) -> AbstractContextManager[None]:
        """Return a context in which linear layers save the tensors that a deferred weight gradient needs.

        The context does nothing if the schedule does not defer the weight gradients of this micro-batch. It is needed
        around the forward, and around the backward because the backward may recompute the layers.
        """
        return self.splitter.active() if action_key(action) in self._program.deferred_keys else nullcontext()

    def _recomputing(self) -> AbstractContextManager[None]:
        is_enabled = getattr(self.module, "activation_checkpoint_interval", 0)
        return self.recompute.running(self.module) if is_enabled else nullcontext()

    def _deferring_weight_grads(self, action: Action) -> AbstractContextManager[None]:
        """Return a context in which the backward of linear layers defers weight gradients to ``backward_weight``."""
        defers = isinstance(action, BackwardInput) or self._always_defers
        return self.splitter.deferring(action_key(action)) if defers else nullcontext()

    def _current_forward(self) -> tuple[int, int] | None:
        """Return (micro-batch, chunk) of the training forward that is running, or None."""
        action = self.communicator.action
        return action_key(action) if self.communicator.is_training and isinstance(action, Forward) else None

    def _starting_reductions(self, action: Action, call: Call) -> AbstractContextManager[None]:
        """Return a context in which the last backward of a chunk starts the all-reduces of the buckets that it fills.

        The context does nothing if ``action`` is not the last backward of its chunk, if the schedule defers weight
        gradients, if recompute is reentrant, or if the gradient source stores gradients only after the backward. A
        ``MicroBatchReducer`` reduces in every backward, also in the full backwards of a schedule that defers others.
        """
        reducer = self._reducer_after(action, call)
        if reducer is None or call.recomputes_reentrantly or not _gradients(call).accumulates_in_hooks:
            return nullcontext()
        if self.has_deferred_weights and not reducer.reduces_every_backward:
            return nullcontext()
        return reducer.last_backward(action.chunk)

    def _finish_forward(self, action: Action, call: Call, output: Any, labels: Any, leaves: list[torch.Tensor]) -> None:
        """Compute the loss on the last stage, or store the output if the call collects no losses."""
        call.last_output = output
        if not call.collects_losses:
            call.outputs.append(self.made_output(output))
            return
        loss_args = output, labels
        note_context = _add_note_on_error(lambda: f"the loss function received {describe_structure(loss_args)}")
        with call.time_phase(FORWARD), note_context, self._splittable_layers(action):
            loss = output if call.loss_fn is None else call.loss_fn(output, labels)
        with _add_note_on_error(lambda: NO_LOSS_FN, not has_loss_function(call.loss_fn)):
            weighted_loss = call.meter.add(loss, action.micro_batch)
        if not call.is_training:
            call.outputs.append(loss)
            return
        call.last_output = None
        if not weighted_loss.requires_grad:
            raise RuntimeError(
                f"the loss must depend on the parameters, but it requires no gradient at micro-batch "
                f"{action.micro_batch} on stage {self.index}"
            )
        scaled_loss = weighted_loss if call.loss_scale == 1.0 else weighted_loss * call.loss_scale
        self._in_flight[action_key(action)] = InFlight(leaves, [scaled_loss])

    def made_output(self, output: Any) -> Any:
        """Convert the last layer's output to the output for the program; None on all other stages."""
        make = getattr(self.module, "made_output", None)
        return output if output is None or make is None else make(output)

    def _check_lost_gradients(self, with_grad: Sequence[torch.Tensor]) -> None:
        """Raise if this stage has trainable weights but none of its outputs requires a gradient."""
        if with_grad or not any(p.requires_grad for p in self.module.parameters()):
            return
        raise RuntimeError(
            f"stage {self.index} has trainable parameters, but none of its outputs requires a gradient. "
            "Reentrant recompute detaches the output of a layer whose inputs need no gradient (token ids). Set "
            '"pipeline": {"use_reentrant": false}, or remove that layer from checkpointable_layers.'
        )


@contextmanager
def _add_note_on_error(make_note: Callable[[], str], is_needed: bool = True) -> Iterator[None]:
    """Add ``make_note()`` as a note to an exception of the block, to show the structure that user code received."""
    try:
        yield
    except Exception as error:
        if is_needed:
            error.add_note(make_note())
        raise


def _gradients(call: Call) -> GradientSource:
    if call.gradients is None:
        raise RuntimeError("a backward needs an optimizer. Pass one to initialize")
    return call.gradients
