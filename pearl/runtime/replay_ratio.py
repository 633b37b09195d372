"""The replay ratio: samples trained for each transition collected."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from pearl.errors import ConfigurationError
from pearl.replay.rate_limiter import RateLimiter
from pearl.spec import ReplaySpec, TrainSpec

if TYPE_CHECKING:
    from pearl.runtime.run_state import Counters

_UNLIMITED = 1 << 30
_UNITS = 2  # count half samples: a limiter needs room for two steps of a side, and a batch may be one sample


class ReplayRatio:
    """Keeps the ratio of samples trained to transitions collected at `train.replay_ratio`.

    Training waits for data, and collection waits for training. The rules are those of a `RateLimiter`, but the host
    asks instead of blocking, and the counts are the run's `counters`, which checkpoints save. With
    `train.hindsight_goals`, as many transitions as a step brings count as one: a step counts in full once its episode
    has ended. `lead_rows` is how many transitions may be collected and not yet stored. Collection may lead by these
    plus the transitions of one batch, so that one side can always continue. With an infinite ratio neither waits.
    """

    def __init__(self, train: TrainSpec, counters: Counters, lead_rows: int) -> None:
        self._train, self._counters, self._lead_rows = train, counters, lead_rows
        self._pretraining = 0  # samples
        self._starts = first_batch(train)
        self._limiter = RateLimiter(1.0)
        self._known = (0, 0)  # counts that the limiter has: stored, sampled
        self._configure()

    def set(self, ratio: float) -> None:
        """Change the ratio, for data collected from now on; raises ConfigurationError."""
        if ratio == self._train.replay_ratio:
            return
        self._train = dataclasses.replace(self._train, replay_ratio=ratio)
        counters = self._counters
        if counters.stored > self._starts:
            counters.ratio_stored, counters.ratio_samples = counters.stored, counters.samples
        self._configure()

    def pretrain(self, batches: int) -> None:
        """Train the first `batches` of the run before anything is collected."""
        self._pretraining = batches * self._train.batch_size

    def _configure(self) -> None:
        ratio, batch = self._train.replay_ratio, self._train.batch_size
        begin = max(self._starts, self._counters.ratio_stored)
        if math.isinf(ratio):
            self._limiter.reconfigure(samples_per_insert=1.0, min_size=begin, error_buffer=math.inf)
            return
        # Must suffice for a batch when collection waits and `lead_rows` of the collected rows are not yet stored.
        ratio /= self._train.rows_per_step
        lead = self._lead_rows + math.ceil(batch / ratio)
        per_insert = _UNITS * ratio
        self._limiter.reconfigure(samples_per_insert=per_insert, min_size=begin, error_buffer=(0.0, per_insert * lead))

    def _counted(self) -> RateLimiter:
        counters = self._counters
        counts = counters.stored, counters.samples - counters.ratio_samples
        if counts != self._known:  # the host asks far more often than they change
            self._limiter.restore(inserted=counts[0], sampled=_UNITS * counts[1])
            self._known = counts
        return self._limiter

    def _pretraining_left(self) -> int:
        """Batches of the pretraining that are not trained yet."""
        return max(0, self._pretraining - self._counters.samples) // self._train.batch_size

    def batches_allowed(self) -> int:
        """Batches that may be trained now; large if the ratio is infinite."""
        if left := self._pretraining_left():
            return left
        limiter, batch = self._counted(), _UNITS * self._train.batch_size
        if not limiter.can_sample(batch):
            return 0
        least, _ = limiter.bounds
        return _UNLIMITED if math.isinf(least) else int((limiter.statistics().diff - least) // batch)

    def collection_allowed(self) -> bool:
        """Whether more transitions may be collected now."""
        if self._pretraining_left():
            return False
        return self._counted().can_insert(self._counters.collected - self._counters.stored)

    @property
    def achieved(self) -> float:
        """Samples trained per transition stored, but for those with other goals.

        Since learning started, or since the ratio was last changed; not those that the run was given.
        """
        counters = self._counters
        samples = counters.samples - counters.ratio_samples
        return self._train.rows_per_step * samples / max(1, counters.stored - max(self._starts, counters.ratio_stored))


def first_batch(train: TrainSpec) -> int:
    """Transitions that must be stored before the first training step."""
    return max(train.rows_per_step * train.learning_starts, train.batch_size)


def check_training_begins(train: TrainSpec, timesteps: int) -> None:
    """Raise ConfigurationError if a run of `timesteps` ends before it may train."""
    if train.rows_per_step * timesteps <= first_batch(train):
        raise ConfigurationError(
            f"A run of {timesteps:,} environment steps would not train: learning_starts is {train.learning_starts:,} "
            f"and a batch has {train.batch_size:,}. Raise timesteps above both, or lower learning_starts."
        )


def training_absent(train: TrainSpec, timesteps: int, counters: Counters) -> str:
    """The warning for a run that starts at `counters` and will not train; "" if it will."""
    left = timesteps - counters.env_steps
    if left <= 0:
        return (
            f"Nothing is left to train: the run is at step {counters.env_steps:,} and is to end at {timesteps:,}. "
            "Raise --timesteps."
        )
    if counters.stored + train.rows_per_step * left > first_batch(train):
        return ""
    return (
        f"This run will not train: it ends after {timesteps:,} environment steps, and training begins with more than "
        f"{first_batch(train):,} transitions (learning_starts, or a batch). Raise --timesteps."
    )


def why_no_training(train: TrainSpec, counters: Counters) -> str:
    """The reason, after a run without a training step."""
    if counters.stored < first_batch(train):
        each = ""
        if goals := train.hindsight_goals:
            each = (
                f" A step brings {train.rows_per_step}, {goals} of them once its episode has ended (hindsight_goals)."
            )
        return (
            f"It begins once {first_batch(train):,} transitions are stored (learning_starts {train.learning_starts:,}, "
            f"batch_size {train.batch_size:,}); {counters.stored:,} were, in {counters.env_steps:,} environment steps."
            f"{each} Raise --timesteps, or lower learning_starts."
        )
    return f"{counters.stored:,} transitions are stored, and the run ended before the first batch. Raise --timesteps."


def check_samples_last(replay: ReplaySpec, train: TrainSpec, lead_rows: int) -> None:
    """Raise ConfigurationError if training would run out of items sampled less than `max_times_sampled` times.

    "fifo" uses items up in the order in which they are overwritten, and loses none; other modes lose the samples left
    of items that are overwritten, so the ratio must be smaller, the more so the smaller the replay.
    """
    most, capacity = replay.max_times_sampled, replay.capacity
    if not most:
        return
    # While every slot is written once, training takes part of the samples that the slots can give. The rest must cover
    # two batches of different items: the next one and the one being trained.
    spare = most * capacity - (most + 1) * train.batch_size
    largest = float(most) if replay.mode == "fifo" else spare / (capacity + 2 * lead_rows)
    largest *= train.rows_per_step  # transitions with other goals last, too
    if train.replay_ratio > largest:
        advice = f"Lower replay_ratio to {largest:.3g}" if largest > 0 else "Raise the replay's size"
        raise ConfigurationError(
            f"Items that may be sampled {most} times (max_times_sampled) do not last for a replay_ratio of "
            f"{train.replay_ratio:g}: training would run out of them. {advice}, or raise max_times_sampled."
        )
