"""Training on rollouts in PyTorch: any on-policy trainer, in the minibatches that every other device would take."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from pearl import _native
from pearl.algorithms.on_policy import Minibatch, OnPolicyTrainer
from pearl.errors import ConfigurationError, TrainerError
from pearl.lazy_torch import torch
from pearl.learner.torch_learner import least_step_us
from pearl.learner.trainer_learner import TrainerRolloutLearner, require_numbers
from pearl.rollout.columns import BEGINS, VALUE, rows_of_sequences
from pearl.spec import STATE


class TorchRolloutLearner(TrainerRolloutLearner):
    """Trains `trainer` by its own `update_minibatch`, on the device of its networks.

    `threads` is torch's intra-operator parallelism on the CPU.
    """

    backend = "torch"

    def __init__(self, trainer: object, *, epochs: int, batch_size: int, threads: int = 1) -> None:
        if not isinstance(trainer, OnPolicyTrainer):
            raise TrainerError(f"Rollouts cannot train {self.supports(trainer)}. Derive from pearl.algorithms.PPO.")
        super().__init__(trainer, epochs, batch_size, threads)
        _native.keep_freed_memory()
        self.device = str(trainer.device)

    least_step_us = staticmethod(least_step_us)

    @staticmethod
    def supports(trainer: object) -> str | None:
        """None if it can train `trainer`; else one line that says what it does not support."""
        if isinstance(trainer, OnPolicyTrainer):
            return None
        return f"{type(trainer).__name__}, which is not an on-policy trainer"

    def prepare(self) -> None:
        """Set this thread's core count."""
        torch.set_num_threads(self.threads)

    def write_weights(self, out: np.ndarray) -> None:
        """The policy that the trainer has now; TrainerError if it holds NaN."""
        self._follow_trainer()
        super().write_weights(out)
        require_numbers(out)

    def train(self, rollout: Mapping[str, np.ndarray], rows: np.ndarray | None = None) -> Mapping[str, float]:
        """Train on the columns of a rollout; the result has what `update_minibatch` returns, averaged.

        Raises TrainerError if a part of the loss is not finite; the step on it was made.
        """
        columns = [torch.from_numpy(column).to(self.device) for column in self.columns_of(rollout)]
        obs, action, log_prob, advantage, ret, *masks = columns
        obs = obs.reshape(len(obs), *self.trainer.input_shape)
        old = torch.from_numpy(rollout[VALUE]).to(self.device) if VALUE in rollout else ret - advantage
        whole = Minibatch(obs, action, log_prob, old, advantage, ret, *masks)
        if rows is not None and not len(rows):
            raise TrainerError("Training needs at least one row; found none.")
        divided = _Transitions(whole, rows) if STATE not in rollout else self._sequences(whole, rows, rollout)
        per_minibatch = self.batch_size // divided.steps
        sums: dict[str, float] = {}
        counts: dict[str, int] = {}
        steps = epochs = 0
        goes_on = True
        while goes_on and epochs < self.epochs:
            order = divided.numbers[_native.shuffled(len(divided.numbers), self.seed, self.trainer.gradient_steps)]
            epochs += 1
            on_device = torch.from_numpy(order).to(self.device)
            for first in range(0, len(order), per_minibatch):
                picked = on_device[first : first + per_minibatch]
                parts, goes_on = self._update(divided.minibatch(picked))
                _require_finite(parts)
                for name, part in parts.items():
                    sums[name] = sums.get(name, 0.0) + part
                    counts[name] = counts.get(name, 0) + 1
                if not goes_on:
                    break
                steps += 1
        means = {name: total / counts[name] for name, total in sums.items()}
        return {**means, "minibatches": float(steps), "epochs": float(epochs)}

    def _update(self, minibatch: Minibatch) -> tuple[Mapping[str, float], bool]:
        found: object = self.trainer.update_minibatch(minibatch)
        if isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], Mapping):
            return found
        raise TrainerError(
            f"{type(self.trainer).__name__}.update_minibatch() must return the parts of the loss by name and whether "
            f'training goes on, such as {{"policy_loss": 0.1}}, True; found {found!r:.100}.'
        )

    def _sequences(self, whole: Minibatch, rows: np.ndarray | None, rollout: Mapping[str, np.ndarray]) -> _Sequences:
        state, begins = rollout[STATE], rollout.get(BEGINS)
        count = len(whole.ret)
        if begins is None or begins.shape != (count,) or state.ndim != 3 or count % math.prod(state.shape[:2]):
            raise TrainerError(
                f"A rollout of {count} rows of a recurrent policy has `begins` ({count},) and `state` (sequences of an "
                f"environment, envs, size), by which the rows divide into sequences of equal length; found "
                f"{None if begins is None else begins.shape} and {state.shape}."
            )
        rows_of = rows_of_sequences(count, *state.shape[:2])
        if self.batch_size % rows_of.shape[1]:
            raise ConfigurationError(
                f"batch_size must be a multiple of {rows_of.shape[1]} (sequence_length); found {self.batch_size}."
            )
        whole = whole._replace(
            begins=torch.from_numpy(begins).to(self.device), state=torch.from_numpy(state).flatten(0, 1).to(self.device)
        )
        return _Sequences(whole, rows, rows_of)


class _Transitions:
    """A rollout that minibatches divide into single transitions: those with the numbers `rows`; None: all."""

    steps = 1

    def __init__(self, whole: Minibatch, rows: np.ndarray | None) -> None:
        self._whole = whole
        self.numbers = np.arange(len(whole.ret)) if rows is None else rows

    def minibatch(self, picked: torch.Tensor) -> Minibatch:
        """The transitions with the numbers `picked`."""
        return self._whole.rows(picked)


class _Sequences:
    """A rollout that minibatches divide into sequences, of a recurrent policy.

    `whole` has `begins`, and as `state` those of all sequences `(sequences, size)`; `rows_of` `(sequences, steps)`
    int64 are their rows. A sequence without any of the transitions `rows` is left out.
    """

    def __init__(self, whole: Minibatch, rows: np.ndarray | None, rows_of: np.ndarray) -> None:
        self.steps, self.numbers = rows_of.shape[1], np.arange(len(rows_of))
        if rows is not None:
            real = np.zeros(rows_of.size, bool)
            real[rows] = True
            self.numbers = np.flatnonzero(real[rows_of].any(axis=1))
            whole = whole._replace(real=torch.from_numpy(real).to(whole.obs.device))
        assert whole.state is not None
        self._whole, self._state = whole, whole.state
        self._rows_of = torch.from_numpy(rows_of).to(whole.obs.device)

    def minibatch(self, picked: torch.Tensor) -> Minibatch:
        """The sequences with the numbers `picked`, one after the other."""
        return self._whole.rows(self._rows_of[picked].flatten())._replace(state=self._state[picked])


def _require_finite(parts: Mapping[str, float]) -> None:
    wrong = [f"{name} is {part}" for name, part in parts.items() if not math.isfinite(part)]
    if wrong:
        raise TrainerError(
            f"The training step diverged: {', '.join(wrong)}. Look at the rollout for NaN or huge observations and "
            "rewards; a smaller learning rate or max_grad_norm may help. Do not use these weights: --resume continues "
            "from the last checkpoint."
        )
