"""A policy that runs in the policy server, for all actors at once: the actor's side, without torch.

Each actor has a queue of one slot. It writes its observations there; the server (`pearl.runtime.policy_server`) writes
the actions next to them and gives the slot back. An actor that dies leaves nothing behind: if the slot holds a request,
the server answers it, and the next actor gets the slot.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pearl.ipc.queues import Bell, ColumnQueue
from pearl.spec import ACTION, ACTION_MASK, NEXT_ACTION_MASK, OBS, FieldSpec, TransitionSpec

if TYPE_CHECKING:
    from pearl.exploration import Exploration

_WAIT_S = 0.5  # between signs of life


class Inference(enum.IntEnum):
    """What a request asks for: the method of `Policy` that it stands for."""

    ACT = 0
    SAMPLE = 1
    EXPLORE = 2
    VALUE = 3


RESULTS: Mapping[Inference, tuple[str, ...]] = {
    Inference.ACT: ("action",),
    Inference.SAMPLE: ("action",),
    Inference.EXPLORE: ("action", "log_prob", "value"),
    Inference.VALUE: ("value",),
}
"""What the server writes into a slot."""


def inputs_of(inference: Inference, *, masked: bool) -> tuple[str, ...]:
    """What the server reads from a slot; with `masked`, also the mask."""
    noise = ("noise",) if inference in (Inference.SAMPLE, Inference.EXPLORE) else ()
    return ("obs", *noise, *(("mask",) if masked else ()))


class InferenceQueue(ColumnQueue):
    """One actor's requests to the policy server, of up to `rows` observations, and the answers in the same slots.

    The actor writes `request` (an `Inference`, and 1 if `mask` counts), `obs` `(rows, *obs)`, `noise` `(rows, size)`
    float32 and `mask` `(rows, choices)` uint8; the server `action` `(rows, *action)`, `log_prob` and `value` `(rows,)`
    float32, and the `version` of the weights. A slot that is free again has the answer.
    """

    def __init__(self, transition: TransitionSpec, rows: int, bell: Bell | None = None, slots: int = 1) -> None:
        known = {f.name: f for f in transition.fields}
        obs, action = known[OBS], known[ACTION]
        mask = known.get(ACTION_MASK) or known.get(NEXT_ACTION_MASK)
        super().__init__(
            [
                FieldSpec("request", (2,), "int64"),
                FieldSpec("version", (1,), "int64"),
                FieldSpec("obs", (rows, *obs.shape), obs.dtype),
                FieldSpec("noise", (rows, math.prod(action.shape)), "float32"),
                *([] if mask is None else [FieldSpec("mask", (rows, *mask.shape), "uint8")]),
                FieldSpec("action", (rows, *action.shape), action.dtype),
                FieldSpec("log_prob", (rows,), "float32"),
                FieldSpec("value", (rows,), "float32"),
            ],
            slots,
            bell,
        )
        self.rows = rows

    def __getstate__(self) -> tuple[Any, ...]:
        return (*super().__getstate__(), self.rows)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        super().__setstate__(state[:-1])
        self.rows = state[-1]


@dataclass(frozen=True)
class PolicyService:
    """What an actor needs to have its policy run by the server: its queue, and its own exploration."""

    queue: InferenceQueue
    exploration: Exploration | None


class ServedPolicy:
    """Acts as the server's trainer does; `waiting` is called now and then while no answer has come.

    All methods raise QueueClosedError when the run ends.
    """

    def __init__(self, service: PolicyService, waiting: Callable[[], None] = lambda: None) -> None:
        self.exploration = service.exploration
        self.version = 0  # of the weights of the newest answer
        self._queue, self._waiting = service.queue, waiting

    def load_weights(self, weights: np.ndarray) -> None:
        """Nothing to do: the server takes the newest weights itself."""

    def act(self, obs: np.ndarray, masks: np.ndarray | None = None) -> np.ndarray:
        """Greedy actions `(envs, *action)` for contiguous observations `(envs, *obs)`.

        With `masks` `(envs, choices)` bool, of those that they allow.
        """
        return self._actions(Inference.ACT, obs, None, masks)

    def sample(self, obs: np.ndarray, noise: np.ndarray) -> np.ndarray:
        """Actions drawn from the policy's distribution by standard normal `noise` `(envs, *action)` float32."""
        return self._actions(Inference.SAMPLE, obs, noise, None)

    def explore_into(
        self,
        obs: np.ndarray,
        noise: np.ndarray,
        action: np.ndarray,
        log_prob: np.ndarray,
        value: np.ndarray,
        masks: np.ndarray | None = None,
    ) -> None:
        """On-policy: draw by `noise` `(envs, size)` into `action` `(envs, *action)`, `log_prob` and `value` `(envs,)`.

        With `masks` `(envs, choices)` bool, of what they allow.
        """
        for part, answer in self._answers(Inference.EXPLORE, obs, noise, masks):
            count = len(action[part])
            action[part], log_prob[part] = answer["action"][:count], answer["log_prob"][:count]
            value[part] = answer["value"][:count]

    def value(self, obs: np.ndarray) -> np.ndarray:
        """On-policy: values `(envs,)` float32."""
        values = np.empty(len(obs), np.float32)
        for part, answer in self._answers(Inference.VALUE, obs, None, None):
            values[part] = answer["value"][: len(values[part])]
        return values

    def _actions(
        self, inference: Inference, obs: np.ndarray, noise: np.ndarray | None, masks: np.ndarray | None
    ) -> np.ndarray:
        like = self._queue.arrays(0)["action"]
        actions = np.empty((len(obs), *like.shape[1:]), like.dtype)
        for part, answer in self._answers(inference, obs, noise, masks):
            actions[part] = answer["action"][: len(actions[part])]
        return actions

    def _answers(
        self, inference: Inference, obs: np.ndarray, noise: np.ndarray | None, masks: np.ndarray | None
    ) -> Iterator[tuple[slice, Mapping[str, np.ndarray]]]:
        """The answers for the rows of `obs`, a slot at a time."""
        for start in range(0, len(obs), self._queue.rows):
            part = slice(start, min(start + self._queue.rows, len(obs)))
            count = part.stop - part.start
            slot = self._free_slot()  # also after an actor that died while the server had its request
            slot["request"][:] = inference, masks is not None
            slot["obs"][:count] = obs[part]
            if noise is not None:
                slot["noise"][:count] = noise[part].reshape(count, -1)
            if masks is not None:
                slot["mask"][:count] = masks[part]
            self._queue.publish(count)
            answer = self._free_slot()
            self.version = int(answer["version"][0])
            yield part, answer

    def _free_slot(self) -> Mapping[str, np.ndarray]:
        while (slot := self._queue.reserve(_WAIT_S)) is None:
            self._waiting()
        return slot
