"""Algorithm 1 of PEARL: which device takes the Replay Manager, the Learner and the Data Storage, and why."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import pandas as pd
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from composer.matrix import (
    AssignmentMatrix,
    LearnerCell,
    MissingCell,
    ReplayCell,
    UnavailableDevice,
    from_document,
    microseconds,
    plain,
    to_document,
    unavailable_lines,
)
from composer.platform import Platform
from pearl.devices.description import Backend, Device
from pearl.errors import ConfigurationError, PlacementError

Metric: TypeAlias = Literal["throughput", "power_efficiency"]
METRICS: tuple[Metric, ...] = get_args(Metric)

# Bytes per item of the messages of Eq. 7: an int64 index, a float32 weight or priority, a uint32 generation.
MESSAGE_BYTES = 8 + 4 + 4
# The "word" of Algorithm 1's Step 2: one index.
WORD_BYTES = 8

_TIE = 1e-9  # costs closer than this, relatively, are equal
_BYTES_PER_US_PER_GBPS = 1e3


@dataclass(frozen=True)
class IterationTerms:
    """The terms of PEARL Eq. 7 in microseconds; each transfer includes its latency."""

    sample_us: float
    sample_transfer_us: float  # T_comm(i -> j): indices, weights and generations
    insert_us: float
    insert_transfer_us: float  # T_comm(cpu -> i): the Actors' indices and priorities
    learner_us: float
    priority_transfer_us: float  # T_comm(j -> i): indices, priorities and generations
    update_us: float

    @property
    def training_us(self) -> float:
        """The Learner's branch of the maximum."""
        return self.learner_us + self.priority_transfer_us + self.update_us

    @property
    def insertion_us(self) -> float:
        """The Actors' branch of the maximum."""
        return self.insert_us + self.insert_transfer_us

    @property
    def t_itr_us(self) -> float:
        """T_itr of Eq. 7."""
        return self.sample_us + self.sample_transfer_us + max(self.insertion_us, self.training_us)

    def critical(self) -> dict[str, float]:
        """The terms on the critical path, by what they are called in a report."""
        path = {"sampling": self.sample_us, "moving samples to the Learner": self.sample_transfer_us}
        if self.insertion_us > self.training_us:
            return path | {"insertion": self.insert_us, "moving insertions to the RM": self.insert_transfer_us}
        return path | {
            "training": self.learner_us,
            "returning priorities": self.priority_transfer_us,
            "updating priorities": self.update_us,
        }


@dataclass(frozen=True)
class ReplayConfig:
    """Where the Replay Manager runs and how it is set."""

    device: str
    backend: Backend
    selector: str
    fanout: int
    workers: int


@dataclass(frozen=True)
class LearnerConfig:
    """Where the Learner runs and how it is set."""

    device: str
    backend: Backend
    selector: str
    threads: int
    sub_batches: int
    streams: int


@dataclass(frozen=True)
class StorageOption:
    """One device for the Data Storage.

    `traffic_us` is Step 2's sum of C_x / bandwidth; `data_transfer_us` the time one batch of transitions takes to
    the Learner, which Eq. 7 leaves out; `crossing_bytes` what leaves or enters the device per iteration.
    """

    device: str
    traffic_us: float
    data_transfer_us: float
    crossing_bytes: float


@dataclass(frozen=True)
class Candidate:
    """One pair of devices for Replay Manager and Learner, with its cost.

    `eps` is training experiences per second; `watts` the active power of the distinct devices used, host included,
    None where the device CSV does not state it; `storage` lists the devices for the Data Storage, best first.
    """

    replay: ReplayConfig
    learner: LearnerConfig
    terms: IterationTerms
    t_itr_us: float
    eps: float
    watts: float | None
    devices_used: int
    message_bytes: float  # messages of Eq. 7 that cross between devices, per iteration
    route: tuple[str, ...]  # devices on the way from RM to Learner
    storage: tuple[StorageOption, ...]

    def __post_init__(self) -> None:
        costs = (self.t_itr_us, self.eps, *(() if self.watts is None else (self.watts,)))
        if not all(0 < cost < math.inf for cost in costs) or not self.storage:
            raise ConfigurationError(
                f"The pair {' + '.join(self.pair)} needs t_itr_us, eps and watts above 0 and a device for the Data "
                f"Storage; found {self.t_itr_us!r}, {self.eps!r}, {self.watts!r} and {len(self.storage)} devices."
            )

    @property
    def pair(self) -> tuple[str, str]:
        """The devices of Replay Manager and Learner."""
        return self.replay.device, self.learner.device

    @property
    def setting(self) -> Literal[1, 2]:
        """2 where RM and Learner share a device and talk directly, 1 where they talk through the host."""
        return 2 if self.replay.device == self.learner.device else 1

    @property
    def traffic_bytes(self) -> float:
        """Bytes that cross between devices per iteration, the best Data Storage included."""
        return self.message_bytes + self.storage[0].crossing_bytes

    def score(self, metric: Metric) -> float:
        """What is maximised: experiences per second, or per joule."""
        if metric == "throughput":
            return self.eps
        if not self.watts:
            raise ConfigurationError(
                f"The watts of {' and '.join(self.pair)} are not known, so the pair has no power efficiency. "
                "Fill active_watts in the device CSV and compose again."
            )
        return self.eps / self.watts


@dataclass(frozen=True)
class Impossible:
    """A pair of devices that cannot take the primitives, and why."""

    replay_manager: str
    learner: str
    reason: str


@dataclass(frozen=True)
class Alternative:
    """A pair that was not chosen: its cost, how many times worse it is than the choice, and why."""

    replay_manager: str
    learner: str
    t_itr_us: float
    eps: float
    watts: float | None
    times_worse: float
    reason: str


@dataclass(frozen=True)
class Placement:
    """The choice, every alternative with its cost, and what was impossible.

    `candidates` holds every pair, best first. `replay_manager`, `learner` and `storage` name the devices chosen
    among them: change them here with `with_choice`, or in the JSON document by hand.
    """

    replay_manager: str
    learner: str
    storage: str
    metric: Metric
    batch_size: int
    transition_bytes: int
    actor_count: int
    envs_per_actor: int
    host: str
    candidates: tuple[Candidate, ...]
    impossible: tuple[Impossible, ...] = ()
    unavailable: tuple[UnavailableDevice, ...] = ()

    FORMAT = "pearl-placement"
    VERSION = 1

    def __post_init__(self) -> None:
        storages = [option.device for option in self.chosen.storage]
        if self.storage not in storages:
            raise PlacementError(
                f"The Data Storage of RM on {self.replay_manager!r} and Learner on {self.learner!r} can be on "
                f"{', '.join(storages)}; found {self.storage!r}."
            )

    @property
    def chosen(self) -> Candidate:
        """The pair in use."""
        for candidate in self.candidates:
            if candidate.pair == (self.replay_manager, self.learner):
                return candidate
        pairs = ", ".join(f"{replay} + {learner}" for replay, learner in (c.pair for c in self.candidates))
        reason = next(
            (f" ({i.reason})" for i in self.impossible if (i.replay_manager, i.learner) == self._names[:2]), ""
        )
        raise PlacementError(
            f"RM on {self.replay_manager!r} and Learner on {self.learner!r} is not a pair of this placement{reason}. "
            f"The pairs are (RM + Learner): {pairs}."
        )

    @property
    def _names(self) -> tuple[str, str, str]:
        return self.replay_manager, self.learner, self.storage

    @property
    def replay_config(self) -> ReplayConfig:
        """The Replay Manager's device and parameters."""
        return self.chosen.replay

    @property
    def learner_config(self) -> LearnerConfig:
        """The Learner's device and parameters."""
        return self.chosen.learner

    @property
    def storage_option(self) -> StorageOption:
        """The Data Storage's device and its traffic."""
        return next(option for option in self.chosen.storage if option.device == self.storage)

    @property
    def setting(self) -> Literal[1, 2]:
        """2 where RM and Learner share a device, else 1."""
        return self.chosen.setting

    @property
    def terms(self) -> IterationTerms:
        """The terms of Eq. 7 of the choice."""
        return self.chosen.terms

    @property
    def t_itr_us(self) -> float:
        """Predicted microseconds of one iteration (Eq. 7)."""
        return self.chosen.t_itr_us

    @property
    def data_transfer_us(self) -> float:
        """Microseconds a batch takes from the Data Storage to the Learner; not part of `t_itr_us`."""
        return self.storage_option.data_transfer_us

    @property
    def eps(self) -> float:
        """Predicted training experiences per second."""
        return self.chosen.eps

    @property
    def gps(self) -> float:
        """Predicted gradient steps per second."""
        return self.chosen.eps / self.batch_size

    @property
    def watts(self) -> float | None:
        """Active power of the devices used, where the device CSV states it."""
        return self.chosen.watts

    @property
    def alternatives(self) -> tuple[Alternative, ...]:
        """Every other pair, best first."""
        chosen = self.chosen
        return tuple(
            Alternative(
                replay_manager=candidate.replay.device,
                learner=candidate.learner.device,
                t_itr_us=candidate.t_itr_us,
                eps=candidate.eps,
                watts=candidate.watts,
                times_worse=chosen.score(self.metric) / candidate.score(self.metric),
                reason=_reason(candidate, chosen, self.metric),
            )
            for candidate in self.candidates
            if candidate is not chosen
        )

    @property
    def storage_alternatives(self) -> tuple[StorageOption, ...]:
        """The other devices for the Data Storage of the choice, best first."""
        return tuple(option for option in self.chosen.storage if option.device != self.storage)

    def with_choice(
        self, *, replay_manager: str | None = None, learner: str | None = None, storage: str | None = None
    ) -> Placement:
        """The same placement with other devices chosen; what is left out stays.

        A Data Storage that is the pair's first option follows to the first option of the new pair; one chosen
        otherwise stays if the new pair offers it. PlacementError lists the pairs there are.
        """
        pair = (replay_manager or self.replay_manager, learner or self.learner)
        if storage is None:
            was_best = self.storage == self.chosen.storage[0].device
            options = next(([o.device for o in c.storage] for c in self.candidates if c.pair == pair), [self.storage])
            storage = options[0] if was_best or self.storage not in options else self.storage
        return dataclasses.replace(self, replay_manager=pair[0], learner=pair[1], storage=storage)

    def to_pandas(self) -> pd.DataFrame:
        """One row per pair, best first: devices, cost, the terms of Eq. 7, storage, whether chosen."""
        rows = []
        for candidate in self.candidates:
            is_chosen = candidate is self.chosen
            rows.append(
                {
                    "replay_manager": candidate.replay.device,
                    "learner": candidate.learner.device,
                    "storage": self.storage if is_chosen else candidate.storage[0].device,
                    "setting": candidate.setting,
                    "chosen": is_chosen,
                    "t_itr_us": candidate.t_itr_us,
                    "eps": candidate.eps,
                    "watts": math.nan if candidate.watts is None else candidate.watts,
                    **dataclasses.asdict(candidate.terms),
                    "reason": "" if is_chosen else _reason(candidate, self.chosen, self.metric),
                }
            )
        return pd.DataFrame(rows)

    def to_json(self) -> str:
        """A versioned JSON document that `from_json` reads back to an equal placement."""
        return to_document(self, self.FORMAT, self.VERSION)

    @classmethod
    def from_json(cls, text: str) -> Placement:
        """Read `to_json`'s document, edited or not; raises ConfigurationError, of which PlacementError is one."""
        return from_document(cls, text, cls.FORMAT, cls.VERSION)

    def __rich__(self) -> RenderableType:
        return Group(
            self._choice_table(), self._pairs_table(), self._storage_table(), *unavailable_lines(self.unavailable)
        )

    def __str__(self) -> str:
        return plain(self)

    def _choice_table(self) -> Table:
        table = Table(title=f"Placement for {self.metric}, setting {self.setting}", box=box.ASCII2)
        for heading in ("primitive", "device", "parameters"):
            table.add_column(heading)
        replay, learner = self.replay_config, self.learner_config
        tuning = f"threads {learner.threads}, sub-batches {learner.sub_batches}, streams {learner.streams}"
        actors = f"{self.actor_count} x {self.envs_per_actor} environments"
        for primitive, device, parameters in (
            ("Replay Manager", replay.device, f"fanout {replay.fanout}, workers {replay.workers}"),
            ("Learner", learner.device, f"batch {self.batch_size}, {tuning}"),
            ("Data Storage", self.storage, f"{self.transition_bytes:,} bytes per transition"),
            ("Actors", self.host, actors),
        ):
            table.add_row(primitive, Text(device), Text(parameters))
        power = "" if self.watts is None else f", {self.watts:,.0f} W"
        table.caption = (
            f"predicted: {microseconds(self.t_itr_us)} us per iteration, "
            f"{self.eps:,.0f} EPS, {self.gps:,.0f} GPS{power}"
        )
        return table

    def _pairs_table(self) -> Table:
        table = Table(title="Pairs of devices (PEARL Eq. 7), best first", box=box.ASCII2)
        for heading in ("RM", "Learner", "T_itr us", "EPS", "W", "why"):
            table.add_column(heading, justify="right" if heading in ("T_itr us", "EPS", "W") else "left")
        for candidate in self.candidates:
            reason = "chosen" if candidate is self.chosen else _reason(candidate, self.chosen, self.metric)
            watts = "" if candidate.watts is None else f"{candidate.watts:,.0f}"
            cost = (microseconds(candidate.t_itr_us), f"{candidate.eps:,.0f}", watts)
            table.add_row(*(Text(cell) for cell in (*candidate.pair, *cost, reason)))
        for pair in self.impossible:
            cells = (pair.replay_manager, pair.learner, "-", "-", "", f"not possible: {pair.reason}")
            table.add_row(*(Text(cell) for cell in cells))
        return table

    def _storage_table(self) -> Table:
        table = Table(title="Data Storage (Algorithm 1, Step 2)", box=box.ASCII2)
        for heading in ("device", "traffic us", "batch to Learner us", "why"):
            table.add_column(heading, justify="right" if heading.endswith("us") else "left")
        used = self.storage_option
        for option in self.chosen.storage:
            if option.device == self.storage:
                reason = "chosen"
            elif math.isclose(option.traffic_us, used.traffic_us, rel_tol=_TIE):
                reason = "equal traffic"
            else:
                difference = option.traffic_us - used.traffic_us
                sign = "more" if difference > 0 else "less"
                reason = f"{microseconds(abs(difference))} us {sign} traffic per iteration"
            times = (microseconds(option.traffic_us), microseconds(option.data_transfer_us))
            table.add_row(*(Text(cell) for cell in (option.device, *times, reason)))
        return table


def _reason(candidate: Candidate, chosen: Candidate, metric: Metric) -> str:
    """Why `chosen` is preferred to `candidate` (or by how much it is worse), in one line."""
    worse = chosen.score(metric) / candidate.score(metric)
    if math.isclose(worse, 1.0, rel_tol=_TIE):
        traffic = candidate.traffic_bytes - chosen.traffic_bytes
        if traffic:
            return f"equal: {abs(traffic):,.0f} bytes {'more' if traffic > 0 else 'less'} traffic per iteration"
        devices = candidate.devices_used - chosen.devices_used
        return f"equal: {candidate.devices_used} devices in use, not {chosen.devices_used}" if devices else "equal"
    ratio = max(worse, 1 / worse)
    times = f"{ratio:.2f}x" if ratio >= 1.01 else f"{ratio - 1:.2%}"
    if metric == "power_efficiency":
        share = (candidate.watts or 0.0) / (chosen.watts or 1.0) * (1 if worse > 1 else -1)
        slower = candidate.t_itr_us / chosen.t_itr_us * (1 if worse > 1 else -1)
        verdict = f"{times} {'fewer' if worse > 1 else 'more'} experiences per joule"
        if share > slower or chosen.watts is None or candidate.watts is None:
            return f"{verdict}: {candidate.watts or 0:,.0f} W instead of {chosen.watts or 0:,.0f} W"
        return f"{verdict}: {_largest_difference(candidate, chosen, more=candidate.t_itr_us > chosen.t_itr_us)}"
    return f"{times} {'slower' if worse > 1 else 'faster'}: {_largest_difference(candidate, chosen, more=worse > 1)}"


def _largest_difference(candidate: Candidate, chosen: Candidate, *, more: bool) -> str:
    """The term of the critical path that explains most of why `candidate` costs more (or less) than `chosen`."""
    ours, theirs = chosen.terms.critical(), candidate.terms.critical()
    differences = {name: theirs.get(name, 0.0) - ours.get(name, 0.0) for name in (*theirs, *ours)}
    name = (max if more else min)(differences, key=lambda term: differences[term])
    amount = microseconds(abs(differences[name]))
    through = "" if len(candidate.route) < 3 or "moving" not in name else f" through {candidate.route[1]}"
    return f"{name}{through} costs {amount} us {'more' if differences[name] > 0 else 'less'}"


def parse_metric(metric: str) -> Metric:
    """The metric named `throughput`, `Throughput`, `power_efficiency` or `PowerEfficiency`, in any case."""
    plain_name = str(metric).lower().replace("_", "")
    for known in METRICS:
        if plain_name == known.replace("_", ""):
            return known
    raise ConfigurationError(
        f"The metric to optimise must be 'throughput' or 'power_efficiency' (also 'Throughput', 'PowerEfficiency'); "
        f"found {metric!r}."
    )


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
) -> Placement:
    """Run PEARL's Algorithm 1 on `matrix`.

    Step 1 takes the pair that maximises experiences per second (or per joule) by Eq. 7; costs equal to 1e-9 go to
    the least traffic between devices, then to fewer devices, then to the order of the matrix. Step 2 puts the Data
    Storage where its traffic takes least time, or on `storage_forced`. `transition_bytes` is E; every environment
    (`actor_count` times `envs_per_actor`) inserts one transition per iteration.

    Raises PlacementError where no pair can take the primitives, ConfigurationError for an unknown metric, and for a
    missing active_watts where power counts.
    """
    search = _Search(
        matrix,
        platform,
        parse_metric(metric),
        batch_size,
        transition_bytes,
        actor_count * envs_per_actor,
        storage_forced,
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
        metric=search.metric,
        batch_size=batch_size,
        transition_bytes=transition_bytes,
        actor_count=actor_count,
        envs_per_actor=envs_per_actor,
        host=host,
        candidates=tuple(ranked),
        impossible=tuple(impossible),
        unavailable=matrix.unavailable,
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

    def pairs(self) -> tuple[list[Candidate], list[Impossible]]:
        """Every pair in the order of the matrix, with its cost or with why it has none."""
        candidates: list[Candidate] = []
        impossible: list[Impossible] = []
        for replay_device in self.matrix.devices:
            for learner_device in self.matrix.devices:
                cells = self._cells(replay_device, learner_device)
                missing = [cell.reason for cell in cells if isinstance(cell, MissingCell)]
                replay, learner = cells
                if isinstance(replay, MissingCell) or isinstance(learner, MissingCell):
                    impossible.append(Impossible(replay_device, learner_device, "; ".join(dict.fromkeys(missing))))
                    continue
                try:
                    candidates.append(self._candidate(replay_device, replay, learner_device, learner))
                except PlacementError as error:  # no route between two devices
                    impossible.append(Impossible(replay_device, learner_device, str(error)))
        return candidates, impossible

    def _cells(self, i: str, j: str) -> tuple[ReplayCell | MissingCell, LearnerCell | MissingCell]:
        if i != j:
            return self.matrix[i].replay, self.matrix[j].learner
        pair = self.matrix[i].pair
        return (pair, pair) if isinstance(pair, MissingCell) else (pair.replay, pair.learner)

    def _candidate(self, i: str, replay: ReplayCell, j: str, learner: LearnerCell) -> Candidate:
        host = self.platform.host.name
        batch_message, insert_message = self.batch_size * MESSAGE_BYTES, self.insertions * MESSAGE_BYTES
        to_learner = self.platform.link(i, j)
        terms = IterationTerms(
            sample_us=replay.sample.value_us,
            sample_transfer_us=to_learner.transfer_us(batch_message),
            insert_us=replay.insert.value_us,
            insert_transfer_us=self.platform.link(host, i).transfer_us(insert_message),
            learner_us=learner.step.value_us,
            priority_transfer_us=self.platform.link(j, i).transfer_us(batch_message),
            update_us=replay.update.value_us,
        )
        used = tuple(dict.fromkeys((host, i, j)))
        on_i, on_j = self.platform.device(i), self.platform.device(j)
        return Candidate(
            replay=ReplayConfig(i, on_i.backend, on_i.selector, replay.fanout, replay.workers),
            learner=LearnerConfig(
                j, on_j.backend, on_j.selector, learner.threads, learner.sub_batches, learner.streams
            ),
            terms=terms,
            t_itr_us=terms.t_itr_us,
            eps=self.batch_size / terms.t_itr_us * 1e6,
            watts=self._watts([self.platform.device(name) for name in used]),
            devices_used=len(used),
            message_bytes=(2 * batch_message if i != j else 0) + (insert_message if i != host else 0),
            route=to_learner.hops,
            storage=self._storage(learner_device=j, host=host, replay_device=i),
        )

    def _watts(self, devices: list[Device]) -> float | None:
        for device in devices:
            if device.active_watts is None:
                if self.metric == "power_efficiency":
                    raise ConfigurationError(
                        f"Power efficiency needs the power of every device used: fill the cell of device "
                        f"{device.name!r}, column 'active_watts', in the device CSV."
                    )
                return None
        return float(sum(device.active_watts or 0.0 for device in devices))

    def _storage(self, *, learner_device: str, host: str, replay_device: str) -> tuple[StorageOption, ...]:
        """Step 2: C_Learner = BS (E + 1), C_Actor = N_Actor E, C_RM = BS, in words of one index each."""
        experience = self.transition_bytes + WORD_BYTES
        flows = (
            (learner_device, self.batch_size * experience),
            (host, self.insertions * self.transition_bytes),
            (replay_device, self.batch_size * WORD_BYTES),
        )
        names = dict.fromkeys(device for device, _ in flows)
        if self.storage_forced is not None:
            names.setdefault(self.storage_forced)
        options = [self._storage_option(name, flows, learner_device) for name in names]
        return tuple(sorted(options, key=lambda option: (option.device != self.storage_forced, option.traffic_us)))

    def _storage_option(self, name: str, flows: tuple[tuple[str, int], ...], learner_device: str) -> StorageOption:
        traffic = sum(
            nbytes / (self.platform.link(name, device).bandwidth_gbps * _BYTES_PER_US_PER_GBPS)
            for device, nbytes in flows
        )
        batch = self.platform.link(name, learner_device).transfer_us(self.batch_size * self.transition_bytes)
        crossing = sum(nbytes for device, nbytes in flows if device != name)
        return StorageOption(name, traffic, batch, float(crossing))

    def ranked(self, candidates: list[Candidate]) -> list[Candidate]:
        """Best first. Within each group of equal scores: least traffic, then fewer devices, then their order."""
        by_score = sorted(candidates, key=lambda candidate: -candidate.score(self.metric))
        return [candidate for group in self._ties(by_score) for candidate in group]

    def _ties(self, by_score: list[Candidate]) -> Iterator[list[Candidate]]:
        while by_score:
            least = by_score[0].score(self.metric) * (1 - _TIE)
            count = sum(candidate.score(self.metric) >= least for candidate in by_score)
            yield sorted(by_score[:count], key=lambda candidate: (candidate.traffic_bytes, candidate.devices_used))
            by_score = by_score[count:]
