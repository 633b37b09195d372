"""Algorithm 1 of PEARL: choose the devices of Replay Manager and Learner among all pairs, then of the Data Storage."""

from __future__ import annotations

import bisect
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from composer.contention import CoreSharing
from composer.learners import ON_HOST_ONLY, runs_several
from composer.matrix import (
    NOT_MEASURED,
    AssignmentMatrix,
    Candidacy,
    LearnerCell,
    LearnerOption,
    MissingCell,
    PairCell,
    ReplayCell,
    StorageCell,
)
from composer.measurement import Measurement
from composer.metric import Metric, parse_metric
from composer.placement import (
    TIE,
    Candidate,
    Impossible,
    IterationTerms,
    LearnerConfig,
    Placement,
    ReplayConfig,
    StorageOption,
    WholeIteration,
)
from composer.platform import Platform
from composer.power import power_of
from composer.storage_rule import StorageRule
from pearl.errors import ConfigurationError, PlacementError
from pearl.spec import ONE_LEARNER, LearnersSpec

_T = TypeVar("_T")

# Bytes per item of the messages of Eq. 7: an int64 index, a float32 weight or priority, a uint32 generation. Insertions
# may carry priorities, so they have the same size.
MESSAGE_BYTES = 8 + 4 + 4
# The "word" of Algorithm 1's Step 2: one index.
WORD_BYTES = 8

_BYTES_PER_US_PER_GBPS = 1e3


def place(
    matrix: AssignmentMatrix,
    platform: Platform,
    *,
    metric: str = "throughput",
    batch_size: int,
    transition_bytes: int,
    actor_count: int,
    envs_per_actor: int = 1,
    storage_forced: str | None = None,
    storage_rule: StorageRule | None = None,
    sharing: CoreSharing | None = None,
    messages_us: float = 0.0,
    wholes: Mapping[Candidacy, WholeIteration] | None = None,
    replay_ratio: float | None = None,
    priority_update_delay: int = 1,
    learners: LearnersSpec = ONE_LEARNER,
    average_us: float = 0.0,
    stretch: float = 1.0,
    core_speed: float = 1.0,
) -> Placement:
    """Run PEARL's Algorithm 1 on `matrix`.

    Step 1 chooses the devices of Replay Manager and Learner, and the Learner's implementation, with the most
    experiences per second (or per joule that the machine takes, `Candidate.machine_watts`) in the program's steady
    state: in setting 1 with a `priority_update_delay` above 0, sampling runs during training (`IterationTerms.stages`),
    else Eq. 7 holds. Costs within 1e-9 are a tie: it goes to the least traffic between devices, then to the fewest
    devices, then to the order of the matrix (Replay Manager's device, Learner's device, implementations of the latter).
    Step 2 puts the Data Storage on `storage_forced`, or on the device with the least transfer time among those that
    `storage_rule` allows (None: both devices and the host). Ties within 1e-9 go to the Learner's device, then to the
    Actors', then to the Replay Manager's.

    A pair is impossible where a device cannot run its primitive, or where there is no route between two of the host and
    both devices. Eq. 7 has no messages between host and Learner, but they need a route too: weights go to the Actors,
    which run on the host, and their transitions go to the Learner's batches.

    Where a batch is gathered and arriving transitions are stored, the matrix's column "Data Storage" says how long that
    takes; a row without that cell counts the transfer in its own memory.

    `transition_bytes` is E; every environment (`actor_count` times `envs_per_actor`) inserts one transition per
    iteration. `sharing` gives the slowdown of a Learner on the host's silicon while Actors run; None: no slowdown.
    `messages_us` is the time per iteration of the host's messages between two devices. `wholes` are iterations of
    programs that were tried: their times replace those of the parts. `replay_ratio` is the ratio at which the Actors
    collect, inf where they run free; the placement records it.

    With several `learners`, an iteration is a step of each on its part of `batch_size`; the times of `matrix` are those
    of one of them. `average_us` is the time of an average; an iteration has the share 1 / H of it (thesis Eq. 5.6,
    where `average_us` is the time of the network). A step of one takes `stretch` times as long as alone, with the wait
    for the slowest. Only CPUs take several Learners: the host's, and those of nodes like it, whose slowest core is
    `core_speed` times as fast.

    Raises PlacementError where no pair is possible, ConfigurationError for an unknown metric, and for a missing
    active_watts where power counts.
    """
    search = _Search(
        matrix,
        platform,
        parse_metric(metric),
        batch_size,
        transition_bytes,
        actor_count * envs_per_actor,
        storage_forced,
        storage_rule,
        sharing,
        messages_us,
        wholes or {},
        priority_update_delay,
        learners,
        average_us,
        stretch,
        core_speed,
    )
    for name, value in (
        ("batch_size", batch_size),
        ("transition_bytes", transition_bytes),
        ("actor_count", actor_count),
        ("envs_per_actor", envs_per_actor),
    ):
        if value < 1:
            raise ConfigurationError(f"{name} must be at least 1; found {value!r}.")
    for name in (*matrix.devices, *(() if storage_forced is None else (storage_forced,))):
        platform.device(name)
    host = platform.host.name
    candidates, impossible = search.pairs()
    if not candidates:
        reasons = "; ".join(f"RM on {i.replay_manager}, Learner on {i.learner}: {i.reason}" for i in impossible)
        left_out = "; ".join(f"{device.device} is left out: {device.reason}" for device in matrix.unavailable)
        raise PlacementError(
            f"No pair of devices can take Replay Manager and Learner. {reasons or 'The matrix has no rows'}. {left_out}"
            " Add a device that can, such as the CPU, to the device CSV."
        )
    ranked = search.ranked(candidates)
    best = ranked[0]
    return Placement(
        replay_manager=best.replay.device,
        learner=best.learner.device,
        storage=best.storage[0].device,
        implementation=best.learner.implementation,
        metric=search.metric,
        batch_size=batch_size,
        transition_bytes=transition_bytes,
        actor_count=actor_count,
        envs_per_actor=envs_per_actor,
        host=host,
        candidates=tuple(ranked),
        impossible=tuple(impossible),
        unavailable=matrix.unavailable,
        unsupported=matrix.unsupported,
        replay_ratio=None if replay_ratio is None or math.isinf(replay_ratio) else replay_ratio,
        priority_update_delay=priority_update_delay,
        learner_count=learners.count,
        average_every=learners.average_every if learners.count > 1 else 0,
    )


def watts_missing(names: Sequence[str]) -> ConfigurationError:
    """The error for devices whose power the device CSV does not state."""
    return ConfigurationError(
        f"Power efficiency needs the power of every device used: fill the cell of device "
        f"{', '.join(map(repr, names))}, column 'active_watts', in the device CSV."
    )


@dataclass(frozen=True)
class _Search:
    matrix: AssignmentMatrix
    platform: Platform
    metric: Metric
    batch_size: int
    transition_bytes: int
    insertions: int  # transitions that all Actors insert in one iteration
    storage_forced: str | None
    storage_rule: StorageRule | None
    sharing: CoreSharing | None
    messages_us: float
    wholes: Mapping[Candidacy, WholeIteration]
    delay: int
    learners: LearnersSpec
    average_us: float
    stretch: float
    core_speed: float

    def pairs(self) -> tuple[list[Candidate], list[Impossible]]:
        """Every pair in the order of the matrix: the possible ones with their cost, the others with the reason."""
        candidates: list[Candidate] = []
        impossible: list[Impossible] = []
        for replay_device in self.matrix.devices:
            for learner_device in self.matrix.devices:
                reasons: dict[str, None] = {}
                if (reason := self._no_several(replay_device, learner_device)) is not None:
                    impossible.append(Impossible(replay_device, learner_device, reason))
                    continue
                found: list[Candidate] = []
                for option in self.matrix[learner_device].learners:
                    replay, learner, pair = self._cells(replay_device, learner_device, option)
                    reasons.update((cell.reason, None) for cell in (replay, learner) if isinstance(cell, MissingCell))
                    if isinstance(replay, MissingCell) or isinstance(learner, MissingCell):
                        continue
                    try:
                        found.append(self._candidate(replay_device, replay, learner_device, learner, pair))
                    except PlacementError as error:  # no route between two devices
                        reasons[str(error)] = None
                candidates += found
                if not found:
                    impossible.append(Impossible(replay_device, learner_device, "; ".join(reasons)))
        return candidates, impossible

    def _no_several(self, i: str, j: str) -> str | None:
        """Why several Learners cannot be on `j` with their banks on `i`; None if they can, or there is one."""
        host = self.platform.host.name
        if self.learners.count == 1 or (i == j and runs_several(self.platform.device(j), host)):
            return None
        return ON_HOST_ONLY

    def _cells(
        self, i: str, j: str, option: LearnerOption
    ) -> tuple[ReplayCell | MissingCell, LearnerCell | MissingCell, PairCell | None]:
        """The two primitives' cells, and the pair's where they share a device."""
        if i != j:
            return self.matrix[i].replay, option.learner, None
        pair = option.pair
        return (pair, pair, None) if isinstance(pair, MissingCell) else (pair.replay, pair.learner, pair)

    def _candidate(self, i: str, replay: ReplayCell, j: str, learner: LearnerCell, pair: PairCell | None) -> Candidate:
        host = self.platform.host.name
        batch_message, insert_message = self.batch_size * MESSAGE_BYTES, self.insertions * MESSAGE_BYTES
        to_learner = self.platform.link(i, j)
        joined = pair is not None and pair.joined
        pair_gather = None if pair is None else pair.gather
        storage = self._storage(learner_device=j, host=host, replay_device=i, pair_gather=pair_gather)
        terms = IterationTerms(
            sample_us=replay.sample.value_us / self.core_speed,
            sample_transfer_us=0.0 if joined else to_learner.transfer_us(batch_message),
            insert_us=replay.insert.value_us / self.core_speed,
            insert_transfer_us=self.platform.link(host, i).transfer_us(insert_message),
            learner_us=learner.step.value_us / self.core_speed,
            priority_transfer_us=0.0 if joined else self.platform.link(j, i).transfer_us(batch_message),
            update_us=replay.update.value_us / self.core_speed,
            messages_us=self.messages_us if i != j else 0.0,
            replay_transfer_us=self._there_and_back_us(i, host, batch_message) if host in to_learner.hops[1:] else 0.0,
            delay=self.delay if i != j else 0,
            inserts_between=joined,
            average_us=self.average_us / self.learners.average_every,
        ).with_storage(storage[0], learner=j)
        alone_us = terms.sample_us + terms.gather_us + terms.learner_us + terms.update_us
        terms = replace(terms, waiting_us=(self.stretch - 1) * alone_us)
        whole = self.wholes.get((i, j, learner.implementation))
        free = self._beside_actors(terms, j, learner, math.inf)
        if self.sharing is not None:
            terms = self._beside_actors(terms, j, learner, self.sharing.collect_us)
        if whole is not None:
            terms = replace(terms, beyond_parts_us=whole.paced.value_us - terms.t_itr_us)
        used = tuple(dict.fromkeys((host, i, j)))
        power = power_of(self.platform, used, ((host, i), (host, j), (i, j)))
        if power.missing and self.metric == "power_efficiency":
            raise watts_missing(power.missing)
        on_i, on_j = self.platform.device(i), self.platform.device(j)
        return Candidate(
            replay=ReplayConfig(i, on_i.backend, on_i.selector, replay.fanout, replay.workers),
            learner=LearnerConfig(
                j,
                on_j.backend,
                on_j.selector,
                learner.threads,
                learner.sub_batches,
                learner.implementation,
                learner.prefetch,
                learner.unroll,
            ),
            terms=terms,
            t_itr_us=terms.t_itr_us,
            eps=self.batch_size / terms.t_itr_us * 1e6,
            free_us=free.t_itr_us if whole is None else whole.free.value_us,
            whole=whole,
            watts=power.active_watts,
            idle_watts=power.idle_watts,
            idle_unstated=power.unstated,
            devices_used=len(used),
            message_bytes=(2 * batch_message if i != j else 0) + (insert_message if i != host else 0),
            route=to_learner.hops,
            storage=storage,
        )

    def _beside_actors(self, terms: IterationTerms, j: str, learner: LearnerCell, collect_us: float) -> IterationTerms:
        """The terms while Actors that need `collect_us` for an iteration share the cores of a Learner on the host."""
        if self.sharing is None or not self.platform.shared_silicon(self.platform.host.name, j):
            return terms
        sharing = replace(self.sharing, collect_us=collect_us)
        return replace(terms, learner_us=sharing.step_us(terms.learner_us, learner.threads))

    def _there_and_back_us(self, i: str, j: str, nbytes: int) -> float:
        """The time of a message from `i` to `j` and of one back."""
        return self.platform.link(i, j).transfer_us(nbytes) + self.platform.link(j, i).transfer_us(nbytes)

    def _storage(
        self, *, learner_device: str, host: str, replay_device: str, pair_gather: Measurement | None
    ) -> tuple[StorageOption, ...]:
        """Step 2: C_Learner = BS (E + 1), C_Actor = N_Actor E, C_RM = BS, in words of one index each."""
        experience = self.transition_bytes + WORD_BYTES
        flows = (
            (learner_device, self.batch_size * experience),
            (host, self.insertions * self.transition_bytes),
            (replay_device, self.batch_size * WORD_BYTES),
        )
        rule = self.storage_rule
        allowed = (name for name, _ in flows if rule is None or rule.refusal(name, learner_device) is None)
        names = dict.fromkeys(name for name in allowed if name == host or not self._storage_failed(name))
        if self.storage_forced is not None:
            names.setdefault(self.storage_forced)
        options = [self._storage_option(name, flows, learner_device, pair_gather) for name in names]
        ranked = [option for group in _ties(options, lambda option: option.traffic_us) for option in group]
        return tuple(sorted(ranked, key=lambda option: option.device != self.storage_forced))

    def _storage_option(
        self, name: str, flows: tuple[tuple[str, int], ...], learner_device: str, pair_gather: Measurement | None
    ) -> StorageOption:
        traffic = sum(
            nbytes / (self.platform.link(name, device).bandwidth_gbps * _BYTES_PER_US_PER_GBPS)
            for device, nbytes in flows
        )
        batch_bytes = self.batch_size * self.transition_bytes
        moving = 0.0 if name == learner_device else self.platform.link(name, learner_device).transfer_us(batch_bytes)
        crossing = sum(nbytes for device, nbytes in flows if device != name)
        gather_us, store_us = self._storage_us(name, batch_bytes)
        if pair_gather is not None and name == learner_device:
            gather_us = pair_gather.value_us
        speed = self.core_speed
        return StorageOption(name, traffic, moving, float(crossing), gather_us / speed, store_us / speed)

    def _storage_failed(self, name: str) -> bool:
        """Whether the matrix says why a device of a pair, which has a row, has no Data Storage."""
        cell = self.matrix[name].storage
        return isinstance(cell, MissingCell) and cell != NOT_MEASURED

    def _storage_us(self, name: str, batch_bytes: int) -> tuple[float, float]:
        """The times to gather a batch and to store arrived transitions; by the device's memory without a cell.

        A pair's devices need not have a row of the matrix: the host has none where it is unavailable.
        """
        cell = self.matrix[name].storage if name in self.matrix.devices else None
        if isinstance(cell, StorageCell):
            return cell.gather.value_us, cell.store.value_us
        memory = self.platform.link(name, name)
        return memory.transfer_us(batch_bytes), memory.transfer_us(self.insertions * self.transition_bytes)

    def ranked(self, candidates: list[Candidate]) -> list[Candidate]:
        """Best first. Ties go to the least traffic, then to the fewest devices, then to the first."""
        return [
            candidate
            for group in _ties(candidates, lambda candidate: 1 / candidate.score(self.metric))
            for candidate in sorted(group, key=lambda candidate: (candidate.traffic_bytes, candidate.devices_used))
        ]


def _ties(items: Sequence[_T], cost: Callable[[_T], float]) -> Iterator[list[_T]]:
    """Groups of equal cost, the cheapest first, each in the order of `items`."""
    ranked = sorted((cost(item), number) for number, item in enumerate(items))
    start = 0
    while start < len(ranked):
        end = bisect.bisect_right(ranked, ranked[start][0] * (1 + TIE), lo=start, key=operator.itemgetter(0))
        yield [items[number] for number in sorted(number for _, number in ranked[start:end])]
        start = end
