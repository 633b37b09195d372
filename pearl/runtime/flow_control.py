"""Tracks every transition and batch of a run: collected, stored, sampled, trained."""

from __future__ import annotations

import numpy as np

from pearl.runtime.collection import CollectionBuffer, Ring, collides
from pearl.runtime.data_flow import DataFlow
from pearl.runtime.rate import StepRate
from pearl.runtime.run_state import Counters

_GRANT_S = 0.02  # length of setting 2's grants: negligible overhead, quick to stop


class FlowControl:
    """Answers the host loop's questions (may I sample? may I collect?) and is told what happened.

    `data_flow` decides the order of collecting and training; this class holds the rules that every order must respect.
    Updates `counters` and `rate`. `update_delay` is how many batches may be in flight in addition to the oldest one.
    While `draining` is set, nothing new begins, and while `held` is set, no training; `idle` says that nothing is in
    flight. After `warm_up`, the rates restart.
    """

    def __init__(
        self,
        counters: Counters,
        data_flow: DataFlow,
        storage: Ring | None,
        rate: StepRate,
        *,
        batch_size: int,
        update_delay: int,
        serial: bool,
    ) -> None:
        self._counters, self._data_flow, self._storage, self._rate = counters, data_flow, storage, rate
        self._batch_size, self._serial = batch_size, serial
        self.update_delay = update_delay
        self.draining = self.held = False
        self._in_flight: dict[int, np.ndarray] = {}  # slots of the batches assigned to the Learner, by id
        self._requested = self._granted = self._buffered = 0
        self._insertion_waits = False
        self._progressed = False
        self._warm_up_s: float | None = None
        self.beats = 0  # signs of life of the Learner: how often something came back trained

    def warm_up(self, seconds: float) -> None:
        """Let the rates restart after so many seconds of training from now."""
        self._warm_up_s = seconds
        self._restart_rates()

    def _restart_rates(self) -> None:
        self._rate.restart()
        if self._requested or self._granted:
            self._rate.started()

    # --- the loop's questions ---------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Nothing sampled awaits training, nothing collected awaits insertion."""
        return not (self._requested or self._granted or self._buffered)

    @property
    def is_training(self) -> bool:
        """Whether the Learner has something to train on, or soon gets it from the Replay Manager."""
        return bool(self._requested or self._granted)

    @property
    def warming_up(self) -> bool:
        """Whether the rates are still those of a benchmark's first steps."""
        return self._warm_up_s is not None

    def has_progressed(self) -> bool:
        """Whether anything happened since the last call."""
        progressed, self._progressed = self._progressed, False
        return progressed

    def wants_data(self, buffer: CollectionBuffer) -> bool:
        """Whether the host may take another message from the actors."""
        # While training is held, messages of fast Actors must not use up what the slow ones may collect.
        return not self.draining and not buffer.full and (self.held or self._data_flow.collection_allowed())

    def insertion_due(self, buffer: CollectionBuffer) -> bool:
        """Insert now: the data flow wants it, or the run drains.

        In setting 1 no slot that the insertion takes may be trained on. In setting 2 the host knows
        no slots: there the Learner trains on copies, and the Replay Manager drops the priorities of slots that were
        overwritten meanwhile.
        """
        self._buffered = buffer.count
        # A serial run must not depend on time.
        age_s = 0.0 if self._serial else buffer.age_s
        wanted = buffer.count > 0 and (self.draining or self._data_flow.insertion_wanted(buffer.count, age_s))
        # A sampling in progress may return any slot: wait for its end.
        sampled = self._requested == len(self._in_flight)
        assert self._storage is not None
        ready = wanted and sampled and not collides(self._storage, buffer.count, self._in_flight.values())
        self._insertion_waits = buffer.full and not ready
        return ready

    def may_sample(self) -> bool:
        """Whether to sample: the data flow allows it, at most D updates ahead, one request at a time."""
        return (
            not (self.draining or self.held)
            # A full buffer waits for the batches in flight: more batches could delay it forever.
            and not self._insertion_waits
            and self._requested == len(self._in_flight)
            and self._requested <= self.update_delay
            and self._data_flow.batches_allowed() > self._requested
        )

    def iterations_to_grant(self) -> int:
        """Setting 2: how many iterations the training loop may run next; 0 to wait."""
        if self.draining or self.held or self._granted:
            return 0
        # A serial run's order of work must not depend on speed.
        aim = 1 if self._serial else max(1, int(_GRANT_S * self._rate.busy))
        return min(self._data_flow.batches_allowed(), aim)

    # --- what happened ----------------------------------------------------------------------------------------------

    def collected(self, rows: int, env_steps: int, policy_version: int) -> None:
        """`rows` transitions, of `env_steps` environment steps, were taken into the buffer."""
        self._data_flow.collected(rows, policy_version)
        self._counters.env_steps += env_steps
        self._counters.collected += rows
        self._buffered += rows
        self._progressed = True

    def inserted(self) -> None:
        """The buffer entered the Data Storage."""
        self._counters.stored += self._buffered
        self._buffered = 0
        self._progressed = True

    def sampling(self) -> None:
        """A sampling was requested."""
        self._requested += 1
        self._rate.started()
        self._progressed = True

    def sampled(self, batch: int, indices: np.ndarray) -> None:
        """A batch was sampled and assigned to the Learner under the id `batch`."""
        self._in_flight[batch] = indices
        self._progressed = True

    def granted(self, iterations: int, *, whole: bool = True) -> None:
        """Setting 2: the training loop may run `iterations`; `whole` says that these begin now."""
        self._granted = iterations
        self._rate.started(whole=whole)
        self._progressed = True

    def trained(
        self,
        iterations: int,
        batch: int | None = None,
        *,
        gradient_steps: int | None = None,
        samples: int | None = None,
        busy_s: float | None = None,
    ) -> None:
        """The batch with the id `batch` came back trained, in any order; None in setting 2: what was granted did.

        An iteration is one gradient step on a batch, unless `gradient_steps` and `samples` say how many all of them
        made, and on how many transitions. `busy_s` is explained at `StepRate.trained`.
        """
        self.beats += 1
        if batch is None:
            self._granted = 0
        else:
            del self._in_flight[batch]
            self._requested -= 1
        self._counters.gradient_steps += iterations if gradient_steps is None else gradient_steps
        self._counters.samples += iterations * self._batch_size if samples is None else samples
        self._rate.trained(
            iterations,
            idle=not self._requested and (self.draining or not self._data_flow.batches_allowed()),
            busy_s=busy_s,
        )
        if self._warm_up_s is not None and self._rate.total_s >= self._warm_up_s:
            self._warm_up_s = None
            self._restart_rates()
        self._progressed = True
