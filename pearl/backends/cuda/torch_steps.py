"""Training steps of a torch trainer on a GPU: recorded in CUDA graphs and replayed, or run as they are written."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

from pearl.algorithms.batch import Batch
from pearl.algorithms.trainer import Trainer, TrainerLike
from pearl.backends.cuda.capturable_optimizers import CapturableOptimizers
from pearl.backends.cuda.graphs import CudaGraphs
from pearl.backends.cuda.staging import Staging
from pearl.backends.cuda.sub_batches import step_in_parts
from pearl.backends.cuda.trainer_parts import AN_OPTIMIZER, BakedValues, PythonState, TrainerParts
from pearl.backends.torch_support import Around, Graph
from pearl.error_place import described
from pearl.lazy_torch import torch
from pearl.learner.torch_learner import parts_of

_WARM_UP = 3  # steps of a kind before it is recorded: they make the optimizers' state, and torch loads its kernels
_MOST_FORMS = 16  # of batches whose memory and recordings are kept
_NAMED = 3  # changed values in a message

_log = logging.getLogger(__name__)


@functools.cache
def _warn_once(message: str) -> None:
    _log.warning(message)


@dataclass(frozen=True)
class _Recording:
    graph: Graph
    priorities: torch.Tensor
    steps: int  # that the trainer counts for it
    left: dict[str, torch.Tensor]  # the trainer's attributes that a step replaces with other tensors


@dataclass(frozen=True)
class _Memory:
    """Where the columns and weights of each part of a batch, and the inputs for all parts, are on the device."""

    parts: list[Staging]
    inputs: Staging


@dataclass(frozen=True)
class _Uploaded:
    """Batches with weights, one for each part, and the trainer's `host_inputs`, on the device.

    With `around`, the batches are there once `around.before` has run.
    """

    batches: list[tuple[Batch, torch.Tensor]]
    inputs: tuple[torch.Tensor, ...]
    rows: int
    around: Around | None


class TorchSteps:
    """Trains `trainer` on `sub_batches` parts of a batch, on the streams of `graphs`.

    With `capture`, a step of each kind (`Trainer.step_kind`) and shape is recorded after a few that run as they are
    written; later ones replay it. Recordings are dropped when a value changes that is baked into them. A trainer whose
    steps cannot be recorded trains as it is written, which is logged once.
    """

    def __init__(
        self, trainer: TrainerLike, batch_type: type[Batch], graphs: CudaGraphs, *, sub_batches: int, capture: bool
    ) -> None:
        self._trainer = trainer
        self._batch_type = batch_type
        self._graphs = graphs
        self._sub_batches = sub_batches
        self._captures = capture
        self._memory: dict[object, _Memory] = {}
        self._run_before: dict[object, int] = {}
        self._recordings: dict[object, _Recording] = {}
        self._left: set[str] = set()
        self._baked: BakedValues | None = None
        self._warm_up = _WARM_UP
        if isinstance(trainer, Trainer):
            self._take_parts(TrainerParts(trainer))
        elif capture:
            self._refuse(
                "it does not derive from pearl.algorithms.Trainer, whose step_kind() says how its steps differ"
            )

    @property
    def device(self) -> torch.device:
        """Where it trains."""
        return self._graphs.device

    def step(
        self, columns: Sequence[torch.Tensor], weights: torch.Tensor, around: Around | None = None
    ) -> torch.Tensor:
        """What `update_policy` returns for a batch of `columns` with `weights`, on the host or the device.

        With `around`, the batch is on the device already, where each batch of its iterations will be: recordings read
        it there, and have all of an iteration.
        """
        with self._graphs.main(None if around is None else around.stream):
            kind = self._kind()
            if kind is None:
                return self._run(self._uploaded(columns, weights, (), around, recorded=False)[0])
            inputs = self._parts.trainer.host_inputs(len(weights))
            uploaded, form = self._uploaded(columns, weights, inputs, around, recorded=True)
            self._graphs.join(len(uploaded.batches) if self._sub_batches > 1 and around is None else 0)
            return self._step_of_kind((kind, form), uploaded)

    def _take_parts(self, parts: TrainerParts) -> None:
        self._parts, self._optimizers = parts, CapturableOptimizers(parts.optimizers, self._graphs.device)

    def _kind(self) -> tuple[object, ...] | None:
        """The kind of the next step; None: it is not recorded."""
        if not self._captures:
            return None
        kind = self._parts.trainer.step_kind()
        if isinstance(kind, str):
            self._refuse(kind)
            return None
        return kind

    def _refuse(self, reason: str) -> None:
        """Record no more steps."""
        _warn_once(f"{type(self._trainer).__name__} trains without CUDA graphs: {reason}.")
        self._captures = False
        self._drop_recordings()
        if isinstance(self._trainer, Trainer):
            self._optimizers.release()

    def _drop_recordings(self) -> None:
        self._recordings.clear()
        self._run_before.clear()
        self._baked = None
        self._graphs.forget()

    def _uploaded(
        self,
        columns: Sequence[torch.Tensor],
        weights: torch.Tensor,
        inputs: tuple[torch.Tensor, ...],
        around: Around | None,
        *,
        recorded: bool,
    ) -> tuple[_Uploaded, object]:
        """A batch on the device, and its form: batches of one form are in the same memory."""
        tensors, rows = (*columns, weights), len(weights)
        parts = [[t[a:b] for t in tensors] for a, b in parts_of(rows, self._sub_batches)]
        shapes = [(tuple(t.shape), t.dtype, t.device) for t in (*tensors, *inputs)]
        form = tuple(shapes), None if around is None else around.owner
        memory = self._memory.get(form)
        if memory is None:
            if len(self._memory) >= _MOST_FORMS:
                self._drop_recordings()
                self._memory.clear()
            moving = parts if around is None else []
            memory = _Memory([Staging(self._graphs, part) for part in moving], Staging(self._graphs, inputs))
            self._memory[form] = memory
        moved = memory.inputs.fill(inputs, recorded=recorded)
        if around is not None:
            return _Uploaded([(self._batch_type(*p[:-1]), p[-1]) for p in parts], moved, rows, around), form
        batches = []
        for number, (staging, part) in enumerate(zip(memory.parts, parts, strict=True)):
            with self._stream(number):
                *moved_columns, moved_weights = staging.fill(part, recorded=recorded)
                batches.append((self._batch_type(*moved_columns), moved_weights))
        return _Uploaded(batches, moved, rows, None), form

    def _stream(self, number: int) -> AbstractContextManager[None]:
        """Where a part's tensors are moved to the device: a whole batch's on the main stream."""
        return self._graphs.part(number) if self._sub_batches > 1 else nullcontext()

    def _run(self, uploaded: _Uploaded) -> torch.Tensor:
        around = uploaded.around
        if around is not None:
            around.before(self._graphs.launch)
        if self._sub_batches == 1:
            priorities = self._trainer.update_policy(*uploaded.batches[0])
        else:
            priorities = step_in_parts(self._parts, self._graphs, uploaded.batches, uploaded.rows)
        if around is not None:
            around.after(self._graphs.launch, priorities)
        return priorities

    def _step_of_kind(self, key: object, uploaded: _Uploaded) -> torch.Tensor:
        trainer = self._parts.trainer
        if self._baked is not None and (changed := self._baked.changed()):
            name, names = type(trainer).__name__, ", ".join(changed[:_NAMED])
            _log.info("%s: %s changed, so that steps are recorded in new CUDA graphs.", name, names)
            self._drop_recordings()
            self._warm_up *= 2  # a recording takes as long as many steps: none for values that often change
        if self._baked is None:
            self._take_parts(TrainerParts(trainer))  # which its owner may have replaced
            if (reason := self._optimizers.departure()) is not None:
                self._refuse(reason)
                return self._run(uploaded)
        recording = self._recordings.get(key)
        if recording is not None:
            trainer.gradient_steps += recording.steps
        elif self._run_before.get(key, 0) < self._warm_up:
            return self._run_as_written(key, uploaded)
        else:
            recording = self._record(uploaded)
            if recording is None:
                return self._run(uploaded)
            self._recordings[key] = recording
        self._optimizers.fill_rates()
        recording.graph.replay()
        for name, tensor in recording.left.items():
            setattr(trainer, name, tensor.detach().clone())
        return recording.priorities

    def _run_as_written(self, key: object, uploaded: _Uploaded) -> torch.Tensor:
        """Make one of the steps before a recording; the last one shows which changes replays would miss."""
        self._run_before[key] = self._run_before.get(key, 0) + 1
        tensors = self._parts.tensor_attributes()
        baked = BakedValues(self._parts, tensors) if self._run_before[key] == self._warm_up else None
        with self._ready(uploaded):
            priorities = self._run(uploaded)
        self._left |= self._parts.replaced(tensors).keys()
        if baked is not None and (changed := baked.changed()):
            self._refuse(f"its steps change {', '.join(changed[:_NAMED])}, which replays would not do")
        elif self._baked is not None and (changed := self._baked.changed()):
            # An optimizer has made its state for parameters that no step so far has trained.
            if set(changed) <= {*self._left, AN_OPTIMIZER}:
                self._baked = BakedValues(self._parts, self._left)
            else:
                self._drop_recordings()
        return priorities

    def _record(self, uploaded: _Uploaded) -> _Recording | None:
        """A recording of the step; its Python code has run, but no operation has. None if recording failed."""
        trainer = self._parts.trainer
        for name in self._left:  # what is left to differentiate would bring its stream into the recording
            if isinstance(value := getattr(trainer, name, None), torch.Tensor) and value.grad_fn is not None:
                setattr(trainer, name, value.detach())
        state, steps, tensors = PythonState(self._parts), trainer.gradient_steps, self._parts.tensor_attributes()
        try:
            with self._ready(uploaded):
                graph, priorities = self._graphs.capture(lambda: self._run(uploaded))
        except Exception as error:  # the trainer's code may raise anything
            state.restore()
            self._refuse(f"a step cannot be recorded: {described(error)}")
            return None
        if self._baked is None:
            self._baked = BakedValues(self._parts, self._left)
        return _Recording(graph, priorities, trainer.gradient_steps - steps, self._parts.replaced(tensors))

    @contextmanager
    def _ready(self, uploaded: _Uploaded) -> Iterator[None]:
        """The trainer takes the uploaded inputs, and its optimizers are as recordings need them."""
        trainer = self._parts.trainer
        trainer.give_inputs(uploaded.inputs)
        try:
            with self._optimizers.switched():
                yield
        finally:
            trainer.give_inputs(None)
