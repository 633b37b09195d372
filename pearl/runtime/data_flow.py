"""Data flows: the order in which a run collects, trains and saves."""

from __future__ import annotations

import dataclasses
from typing import Protocol

from pearl.actors.actor import message_rows
from pearl.errors import ConfigurationError
from pearl.runtime.collection import insertion_rows
from pearl.runtime.replay_ratio import ReplayRatio, check_samples_last, training_absent, why_no_training
from pearl.runtime.run_state import Counters
from pearl.spec import ActorSpec, ReplaySpec, TrainSpec

_INSERTION_S = 0.05


class DataFlow(Protocol):
    """Decides from the run's counters whether to collect, insert, train or save now.

    `FlowControl` asks it, and tracks what is in flight; only the host thread calls both. A Session makes its flow from
    the ReplaySpec, ActorSpec and TrainSpec of the program, and calls `begin` first.
    """

    @property
    def insertion_rows(self) -> int:
        """How many transitions fill the collection buffer; the last message may exceed that."""

    def begin(self, counters: Counters) -> None:
        """Use `counters`, which the run updates; a resumed run has them from its checkpoint."""

    def pretrain(self, batches: int) -> None:
        """Train so many batches before anything is collected; ConfigurationError where that is not possible."""

    def collection_allowed(self) -> bool:
        """Whether more transitions may be collected now."""

    def collected(self, rows: int, policy_version: int) -> None:
        """`rows` transitions, by the policy of this version, were taken into the collection buffer."""

    def insertion_wanted(self, rows: int, age_s: float) -> bool:
        """Whether the `rows` transitions in the collection buffer should be stored now.

        `age_s` is for how long the oldest has been there, 0 in a serial run. Before a checkpoint, an evaluation, and
        at the end, the buffer is stored unasked.
        """

    def batches_allowed(self) -> int:
        """Batches that may be trained now, including those in flight."""

    def checkpoint_allowed(self) -> bool:
        """Whether a checkpoint that is due may be written now, or has to wait."""

    def set_replay_ratio(self, ratio: float) -> None:
        """Keep another ratio from now on; raises ConfigurationError where that is not possible."""

    @property
    def achieved_ratio(self) -> float:
        """Samples trained per transition stored since learning started."""

    def training_absent(self, timesteps: int) -> str:
        """The warning for a run to step `timesteps` that will not train; "" if it will."""

    def why_no_training(self) -> str:
        """The reason, after a run without a training step."""


class OnPolicy:
    """Training by rollouts: `rows` transitions are collected, trained on `epochs` times, and dropped."""

    def __init__(self, rows: int, epochs: int) -> None:
        self.insertion_rows, self._epochs = rows, epochs

    def begin(self, counters: Counters) -> None:
        """Use `counters`."""
        self._counters = counters

    def pretrain(self, batches: int) -> None:
        """Never: rollouts are those of the present policy."""
        raise ConfigurationError("On-policy training has nothing to pretrain on: it learns from its own rollouts.")

    def collection_allowed(self) -> bool:
        """Always: full queues hold the actors back."""
        return True

    def collected(self, rows: int, policy_version: int) -> None:
        """Nothing: a rollout is taken only as a whole."""

    def insertion_wanted(self, rows: int, age_s: float) -> bool:
        """When all of the rollout is there."""
        return rows >= self.insertion_rows

    def batches_allowed(self) -> int:
        """One rollout at a time; while it is collected, the run does not wait for anything else."""
        return 1

    def checkpoint_allowed(self) -> bool:
        """At any time between rollouts, when nothing that was collected is left."""
        return True

    def set_replay_ratio(self, ratio: float) -> None:
        """The epochs alone: raises ConfigurationError for another ratio."""
        if ratio != self._epochs:
            raise ConfigurationError(
                f"On-policy training trains {self._epochs} times (epochs) on each transition and has no replay ratio; "
                f"found {ratio:g}. Set epochs instead."
            )

    @property
    def achieved_ratio(self) -> float:
        """Samples trained per transition collected."""
        return self._counters.samples / self._counters.stored if self._counters.stored else 0.0

    def training_absent(self, timesteps: int) -> str:
        """Warn where the run ends before the first rollout is complete."""
        missing = self.insertion_rows - (timesteps - self._counters.env_steps)
        if self._counters.stored or missing <= 0:
            return ""
        return (
            f"The run will not train: a rollout has {self.insertion_rows:,} steps, the run {timesteps:,}. Give more "
            "--timesteps, or a smaller horizon."
        )

    def why_no_training(self) -> str:
        """The run ended within its first rollout."""
        return f"The first rollout of {self.insertion_rows:,} transitions was not completed."


class OffPolicy:
    """Training by replay ratio and learning starts: transitions are stored soon and sampled many times."""

    def __init__(self, replay: ReplaySpec, actors: ActorSpec, train: TrainSpec) -> None:
        self._replay, self._train = replay, train
        rows = message_rows(actors, train)
        self.insertion_rows = insertion_rows(replay, actors, train, rows)
        self._lead = self.insertion_rows + rows
        check_samples_last(replay, train, self._lead)

    def begin(self, counters: Counters) -> None:
        """Use `counters`."""
        self._counters = counters
        self._ratio = ReplayRatio(self._train, counters, self._lead)

    def pretrain(self, batches: int) -> None:
        """Train `batches` first, while collection waits."""
        self._ratio.pretrain(batches)

    def collection_allowed(self) -> bool:
        """By the replay ratio: collection must not lead training by too much."""
        return self._ratio.collection_allowed()

    def collected(self, rows: int, policy_version: int) -> None:
        """Nothing: any policy's transitions will do, and the counters have their number."""

    def batches_allowed(self) -> int:
        """By the replay ratio, once learning starts."""
        return self._ratio.batches_allowed()

    def insertion_wanted(self, rows: int, age_s: float) -> bool:
        """When the buffer is full, or its oldest transition has waited for 50 ms (slow environments)."""
        return rows >= self.insertion_rows or age_s > _INSERTION_S

    def checkpoint_allowed(self) -> bool:
        """At any time: no transition depends on another."""
        return True

    def set_replay_ratio(self, ratio: float) -> None:
        """Change the ratio, for data collected from now on; raises ConfigurationError."""
        check_samples_last(self._replay, dataclasses.replace(self._train, replay_ratio=ratio), self._lead)
        self._ratio.set(ratio)

    @property
    def achieved_ratio(self) -> float:
        """Samples trained per transition stored since learning started."""
        return self._ratio.achieved

    def training_absent(self, timesteps: int) -> str:
        """Warn where the run ends before the first batch."""
        return training_absent(self._train, timesteps, self._counters)

    def why_no_training(self) -> str:
        """How many transitions the first batch lacked."""
        return why_no_training(self._train, self._counters)
