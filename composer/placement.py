"""The placement: which device takes the Replay Manager, the Learner and the Data Storage, and why."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rich.console import RenderableType

from composer.evidence import Evidence
from composer.learners_choice import LearnersChoice
from composer.matrix import UnavailableDevice, UnsupportedLearner
from composer.measurement import Measurement
from composer.metric import Metric
from composer.nodes import NodeShare
from composer.report import placement_report, plain, short_number
from composer.serialization import from_document, to_document
from pearl.errors import ConfigurationError, PlacementError

if TYPE_CHECKING:
    import pandas as pd

    from composer.explain import Explanation


BEYOND_PARTS = "what its parts do not explain"  # the difference between an iteration measured as a whole and its parts

TIE = 1e-9  # costs with a smaller relative difference are equal


@dataclass(frozen=True)
class IterationTerms:
    """The terms of PEARL Eq. 7 in microseconds; each transfer includes its latency.

    Not in the paper are the Data Storage's `gather_us`, `batch_transfer_us` of a batch from it to the Learner, and its
    `store_us` of the transitions that arrived; `messages_us` of the host's queues and threads between two devices; and
    `beyond_parts_us`, by how much an iteration of the whole program, where that was tried, took longer than its parts
    explain (less, if negative). The Learner gathers, if `learner_gathers`, else the host does.

    Several Learners average their parameters after every H steps: `average_us` is an iteration's share of that, and
    `waiting_us` the rest by which it is longer than an iteration of one that trains alone: they share caches and
    memory, and wait for the slowest of a round.

    With `inserts_between` the program inserts between iterations, not while the Learner trains.

    Eq. 7 assumes strict order. With a priority update `delay` of D, the next D batches are sampled while one is
    trained: an iteration then takes as long as the slowest stage (`stages`).
    """

    sample_us: float
    sample_transfer_us: float  # T_comm(i -> j): indices, weights and generations
    insert_us: float
    insert_transfer_us: float  # T_comm(cpu -> i): the new transitions' indices
    learner_us: float
    priority_transfer_us: float  # T_comm(j -> i): indices, priorities and generations
    update_us: float
    messages_us: float = 0.0
    beyond_parts_us: float = 0.0
    replay_transfer_us: float = 0.0  # of both messages' transfers, the part on the Replay Manager's own link
    delay: int = 0
    gather_us: float = 0.0
    batch_transfer_us: float = 0.0
    store_us: float = 0.0
    learner_gathers: bool = False
    inserts_between: bool = False
    average_us: float = 0.0
    waiting_us: float = 0.0

    @property
    def training_us(self) -> float:
        """The Learner's branch of the maximum."""
        return self.learner_us + self.priority_transfer_us + self.update_us

    @property
    def insertion_us(self) -> float:
        """The Actors' branch of the maximum."""
        return self.insert_us + self.insert_transfer_us

    @property
    def eq7_us(self) -> float:
        """T_itr of Eq. 7 as printed: in strict order, without Data Storage, the host's messages, and trials."""
        return self.sample_us + self.sample_transfer_us + max(self.insertion_us, self.training_us)

    @property
    def t_itr_us(self) -> float:
        """The time of an iteration in the steady state: the slowest stage, and time that a trial found beyond it."""
        return sum(self.critical().values())

    def by_primitive(self) -> dict[str, float]:
        """Microseconds of an iteration's parts, by the names that programs measure them under; none is 0.

        "communication" joins all messages and transfers; "iteration" is the whole, less than the sum of its parts where
        these overlap.
        """
        transfers = (
            self.sample_transfer_us + self.insert_transfer_us + self.priority_transfer_us + self.batch_transfer_us
        )
        parts = {
            "sampling": self.sample_us,
            "gather": self.gather_us,
            "insertion": self.insert_us + self.store_us,
            "update": self.update_us,
            "training": self.learner_us,
            "communication": transfers + self.messages_us + self.average_us + self.waiting_us,
            "iteration": self.t_itr_us,
        }
        return {name: value for name, value in parts.items() if value}

    def stages(self) -> tuple[dict[str, float], ...]:
        """The parts of an iteration that run side by side, each with its terms by their names in a report.

        In strict order (delay 0) these are Eq. 7's two branches, each with what comes before it. Otherwise: a batch's
        way through all devices, where `delay` + 1 batches are under way at a time; and for a batch, the work of the
        Learner, of the Replay Manager, and of the host. A batch waits for the host's messages in full, as they wake one
        thread after another; of its own time, a device spends the share of one batch on them.
        """
        gathering = {"gathering the batch": self.gather_us}
        moving = {"moving the batch to the Learner": self.batch_transfer_us}
        storing = {"storing transitions": self.store_us}
        sampling = {
            "sampling": self.sample_us,
            "moving samples to the Learner": self.sample_transfer_us,
            **gathering,
            **moving,
        }
        training = {
            "training": self.learner_us,
            "returning priorities": self.priority_transfer_us,
            "updating priorities": self.update_us,
        }
        if self.average_us:
            training["averaging"] = self.average_us
        if self.waiting_us:
            training["waiting for other Learners"] = self.waiting_us
        insertion = {"insertion": self.insert_us, "moving insertions to the RM": self.insert_transfer_us}
        messages = {"talking through the host": self.messages_us}
        if self.inserts_between:
            return (sampling | storing | insertion | training | messages,)
        if not self.delay:
            return sampling | training | messages, sampling | storing | insertion | messages
        at_learner = max(0.0, self.sample_transfer_us + self.priority_transfer_us - self.replay_transfer_us)
        replay = {
            "sampling": self.sample_us,
            "updating priorities": self.update_us,
            "moving batches to and from the RM": self.replay_transfer_us,
        }
        learner = {"training": self.learner_us, "moving batches to and from the Learner": at_learner, **moving}
        learner, host = (learner | gathering, storing) if self.learner_gathers else (learner, gathering | storing)
        share = self._shared_out(messages)
        way = self._shared_out(sampling | training) | messages
        return way, learner | share, replay | insertion | share, host | share

    def with_storage(self, option: StorageOption, *, learner: str) -> IterationTerms:
        """The same with the Data Storage of `option`; the device `learner` gathers if it holds it."""
        return dataclasses.replace(
            self,
            gather_us=option.gather_us,
            batch_transfer_us=option.data_transfer_us,
            store_us=option.store_us,
            learner_gathers=option.device == learner,
        )

    def _shared_out(self, terms: Mapping[str, float]) -> dict[str, float]:
        """The terms per batch of all that are under way."""
        return {name: value / (self.delay + 1) for name, value in terms.items()}

    def critical(self) -> dict[str, float]:
        """The terms of the slowest stage, and the time that a trial found beyond it, by their names in a report."""
        slowest = max(self.stages(), key=lambda stage: sum(stage.values()))
        return slowest | {BEYOND_PARTS: self.beyond_parts_us}


@dataclass(frozen=True)
class ReplayConfig:
    """The Replay Manager's device and parameters."""

    device: str
    backend: str
    selector: str
    fanout: int
    workers: int


@dataclass(frozen=True)
class LearnerConfig:
    """The Learner's device and parameters; `implementation` is a name of `pearl.backends.learners()`.

    With `prefetch`, in setting 2 with the native Learner only, an extra thread draws the next batch during a step.
    `unroll` is UF of each layer of each network, for the FPGA's Learner only.
    """

    device: str
    backend: str
    selector: str
    threads: int
    sub_batches: int
    implementation: str = "torch"
    prefetch: bool = False
    unroll: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class StorageOption:
    """One device for the Data Storage.

    `traffic_us` is Step 2's sum of C_x / bandwidth. `data_transfer_us` is the transfer time of one batch of transitions
    to the Learner, 0 on the Learner's device; `gather_us` and `store_us` are the storage's own times for an iteration:
    Eq. 7 leaves all three out. `crossing_bytes` are the bytes that leave or enter the device per iteration.
    """

    device: str
    traffic_us: float
    data_transfer_us: float
    crossing_bytes: float
    gather_us: float = 0.0
    store_us: float = 0.0


@dataclass(frozen=True)
class WholeIteration:
    """An iteration of a program that was tried: at its replay ratio, and with Actors that run free.

    Each is the mean of a run (of several, their median), with the spread of the means of a quarter of a second.
    `overall` is at the replay ratio too, with all waiting for data included.
    """

    paced: Measurement
    free: Measurement
    overall: Measurement


@dataclass(frozen=True)
class Candidate:
    """One pair of devices for Replay Manager and Learner, and an implementation of the latter, with its cost.

    `terms`, `t_itr_us` and `eps`, training experiences per second, are with the best Data Storage. `watts` is the
    active power of all devices used, including the host, and of their memories and links; None where the device CSV
    does not state it. `idle_watts` is the power of the machine's devices that stay idle; `idle_unstated` names those
    for which the device CSV states none, which counts as 0. `storage` lists the devices for the Data Storage, best
    first. `free_us` is `t_itr_us` with Actors that run free. `whole` is what its program did, if it was tried; both
    times are then those.
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
    free_us: float | None = None
    idle_watts: float = 0.0
    idle_unstated: tuple[str, ...] = ()
    whole: WholeIteration | None = None

    def __post_init__(self) -> None:
        """Refuse values that no search gives, such as those of a document that was cut or edited wrongly."""
        where = f"The pair {' + '.join(self.pair)}"
        for part, values in (
            ("terms", vars(self.terms)),
            *((f"storage on {option.device}", vars(option)) for option in self.storage),
            ("pair", {"message_bytes": self.message_bytes, "idle_watts": self.idle_watts}),
        ):
            for name, value in values.items():
                least = -math.inf if name == "beyond_parts_us" else 0
                if isinstance(value, float | int) and not least <= value < math.inf:
                    raise ConfigurationError(f"{where} needs {name} of its {part} of at least 0; found {value!r}.")
        if not math.isclose(self.terms.t_itr_us, self.t_itr_us, rel_tol=1e-6):
            raise ConfigurationError(
                f"{where} has t_itr_us {self.t_itr_us!r}, but its terms add up to {self.terms.t_itr_us!r}."
            )
        if len({option.device for option in self.storage}) < len(self.storage):
            raise ConfigurationError(f"{where} lists a device for the Data Storage twice.")
        costs = (self.t_itr_us, self.eps, *(() if self.watts is None else (self.watts,)))
        if not all(0 < cost < math.inf for cost in costs) or not self.storage:
            raise ConfigurationError(
                f"{where} needs t_itr_us, eps and watts above 0 and a device for the Data "
                f"Storage; found {self.t_itr_us!r}, {self.eps!r}, {self.watts!r} and {len(self.storage)} devices."
            )

    @property
    def pair(self) -> tuple[str, str]:
        """The devices of Replay Manager and Learner."""
        return self.replay.device, self.learner.device

    @property
    def names(self) -> tuple[str, str, str]:
        """The devices of Replay Manager and Learner, and the latter's implementation; unique among candidates."""
        return (*self.pair, self.learner.implementation)

    @property
    def setting(self) -> Literal[1, 2]:
        """2 where RM and Learner share a device and talk directly, 1 where they talk through the host."""
        return 2 if self.replay.device == self.learner.device else 1

    @property
    def traffic_bytes(self) -> float:
        """Bytes per iteration between devices, including those of the best Data Storage."""
        return self.message_bytes + self.storage[0].crossing_bytes

    def terms_with(self, option: StorageOption) -> IterationTerms:
        """The terms with the Data Storage of `option`, one of `storage`."""
        return self.terms.with_storage(option, learner=self.learner.device)

    @property
    def machine_watts(self) -> float | None:
        """The power of the devices used and of those that stay idle; None where the device CSV does not state it."""
        return None if self.watts is None else self.watts + self.idle_watts

    @property
    def eps_per_watt(self) -> float | None:
        """EPS per watt of the devices used, which is experiences per joule; None where their power is not stated."""
        return None if self.watts is None else self.eps / self.watts

    @property
    def eps_per_machine_watt(self) -> float | None:
        """EPS per watt of the whole machine, the devices that stay idle included."""
        return None if self.machine_watts is None else self.eps / self.machine_watts

    @property
    def choice(self) -> dict[str, str]:
        """The arguments of `Placement.with_choice` that choose it."""
        return dict(zip(("replay_manager", "learner", "implementation"), self.names, strict=True))

    def score(self, metric: Metric) -> float:
        """The value to maximise: experiences per second, or per joule of the whole machine."""
        if metric == "throughput":
            return self.eps
        if self.eps_per_machine_watt is None:
            raise ConfigurationError(
                f"The watts of {' and '.join(self.pair)} are not known, so the pair has no power efficiency. "
                "Fill active_watts in the device CSV and compose again."
            )
        return self.eps_per_machine_watt


@dataclass(frozen=True)
class Impossible:
    """A pair of devices that cannot run the primitives, and why."""

    replay_manager: str
    learner: str
    reason: str


@dataclass(frozen=True)
class Alternative:
    """A pair that was not chosen: its cost, how many times worse it is than the choice, and why."""

    replay_manager: str
    learner: str
    implementation: str
    t_itr_us: float
    eps: float
    watts: float | None
    times_worse: float
    reason: str


@dataclass(frozen=True)
class Placement:
    """The choice, every alternative with its cost, and the impossible pairs.

    `candidates` holds every pair, once for each implementation of the Learner, best first. `replay_manager`, `learner`
    and `storage` name the chosen devices, `implementation` the chosen implementation of the Learner. To change the
    choice, call `with_choice` or edit the JSON document. `replay_ratio` is the assumed ratio at which the Actors
    collect while the Learner trains; None: they run free. `replay_ratio_reason` says why, if the composer chose it.
    `evidence` is what `explain` shows beyond the costs. Several Learners (`learner_count`) have the parts of a batch of
    `batch_size`, and average after every `average_every` steps; an iteration is a step of each. `learners_choice` says
    why there are so many, and on these nodes, if the composer chose. `nodes` are the machine and the nodes of a cluster
    with the Actors and Learners of each; empty: all are on the machine.
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
    implementation: str = "torch"
    unsupported: tuple[UnsupportedLearner, ...] = ()
    replay_ratio: float | None = None
    priority_update_delay: int = 1
    replay_ratio_reason: str | None = None
    evidence: Evidence | None = None
    learner_count: int = 1
    average_every: int = 0
    learners_choice: LearnersChoice | None = None
    nodes: tuple[NodeShare, ...] = ()

    FORMAT = "pearl-placement"
    VERSION = 3

    def __post_init__(self) -> None:
        for name in ("batch_size", "transition_bytes", "actor_count", "envs_per_actor"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"A placement's {name} must be at least 1; found {getattr(self, name)!r}.")
        if self.replay_ratio is not None and not 0 < self.replay_ratio < math.inf:
            raise ConfigurationError(
                f"A placement's replay_ratio must be a number above 0, or None; found {self.replay_ratio!r}."
            )
        if self.priority_update_delay < 0:
            raise ConfigurationError(
                f"A placement's priority_update_delay must be at least 0; found {self.priority_update_delay!r}."
            )
        if len({candidate.names for candidate in self.candidates}) < len(self.candidates):
            raise ConfigurationError("A placement lists each pair once for each implementation; found one twice.")
        for candidate in self.candidates:
            if not math.isclose(candidate.eps * candidate.t_itr_us, self.batch_size * 1e6, rel_tol=1e-6):
                raise ConfigurationError(
                    f"The pair {' + '.join(candidate.pair)} trains a batch_size of {self.batch_size} experiences in "
                    f"t_itr_us of {candidate.t_itr_us!r}, but its eps are {candidate.eps!r}."
                )
        storages = [option.device for option in self.chosen.storage]
        if self.storage not in storages:
            raise PlacementError(
                f"storage: the Data Storage of RM on {self.replay_manager!r} and Learner on {self.learner!r} can be on "
                f"{', '.join(storages)}; found {self.storage!r}."
            )

    @property
    def chosen(self) -> Candidate:
        """The pair in use."""
        for candidate in self.candidates:
            if candidate.names == self._names:
                return candidate
        pairs = ", ".join("{} + {} ({})".format(*candidate.names) for candidate in self.candidates)
        reasons = [i.reason for i in self.impossible if (i.replay_manager, i.learner) == self._names[:2]]
        reasons += [u.cause for u in self.unsupported if u.implementation == self.implementation]
        because = f" ({'; '.join(reasons)})" if reasons else ""
        known = {name for candidate in self.candidates for name in candidate.names}
        fields = dict(zip(("replay_manager", "learner", "implementation"), self._names, strict=True))
        wrong = [name for name, value in fields.items() if value not in known] or list(fields)
        raise PlacementError(
            f"{', '.join(wrong)}: RM on {self.replay_manager!r} and the {self.implementation} Learner on "
            f"{self.learner!r} is not a pair of this placement{because}. The pairs are (RM + Learner): {pairs}."
        )

    @property
    def _names(self) -> tuple[str, str, str]:
        return self.replay_manager, self.learner, self.implementation

    @property
    def replay_config(self) -> ReplayConfig:
        """The Replay Manager's device and parameters."""
        return self.chosen.replay

    @property
    def learners(self) -> tuple[LearnerConfig, ...]:
        """Device and parameters of each Learner; they are alike."""
        return (self.chosen.learner,) * self.learner_count

    def ranks_on(self, node: str) -> str:
        """The ranks of the Learners on a node, as in "0, 1"; empty for none, and for one Learner alone."""
        first = 0
        for share in self.nodes if self.learner_count > 1 else ():
            if share.node == node:
                return ", ".join(map(str, range(first, first + share.learners)))
            first += share.learners
        return ""

    @property
    def learner_config(self) -> LearnerConfig:
        """Device and parameters of the first Learner."""
        return self.learners[0]

    @property
    def text(self) -> str:
        """Where the primitives are, in words."""
        return (
            f"Replay Manager on {self.replay_manager}, {self.implementation} Learner on {self.learner}, "
            f"Data Storage on {self.storage}"
        )

    @property
    def routes(self) -> tuple[tuple[str, str], ...]:
        """Between which devices messages pass, host included."""
        i, j = self.chosen.pair
        return (self.host, i), (self.host, j), (i, j)

    @property
    def storage_option(self) -> StorageOption:
        """The Data Storage's device and its traffic."""
        return next(option for option in self.chosen.storage if option.device == self.storage)

    @property
    def setting(self) -> Literal[1, 2]:
        """2 where RM and Learner share a device, else 1."""
        return self.chosen.setting

    @property
    def delay_in_effect(self) -> int:
        """The priority updates that a sampling may run ahead; 0 in setting 2, whose loop samples after the update."""
        return self.priority_update_delay if self.setting == 1 else 0

    @property
    def terms(self) -> IterationTerms:
        """The terms of an iteration of the choice."""
        return self.chosen.terms_with(self.storage_option)

    @property
    def t_itr_us(self) -> float:
        """Predicted microseconds of one iteration."""
        return self.terms.t_itr_us

    @property
    def data_transfer_us(self) -> float:
        """Microseconds a batch takes from the Data Storage's device to the Learner's."""
        return self.storage_option.data_transfer_us

    @property
    def eps(self) -> float:
        """Predicted training experiences per second, under `assumption`."""
        return self.batch_size / self.t_itr_us * 1e6

    @property
    def free_eps(self) -> float:
        """Predicted training experiences per second with Actors that run free, as in a program's --bench."""
        chosen = self.chosen
        slower_us = 0.0 if chosen.free_us is None else chosen.free_us - chosen.t_itr_us
        return self.batch_size / (self.t_itr_us + slower_us) * 1e6

    @property
    def overall_eps(self) -> float | None:
        """EPS at the replay ratio with all waiting for data included; None where the program was not tried."""
        whole = self.chosen.whole
        return None if whole is None else self.batch_size / whole.overall.value_us * 1e6

    @property
    def eps_spread(self) -> float | None:
        """By which share the prediction varies, (p80 - p20) / 2 p50; None where the program was not tried."""
        return None if self.chosen.whole is None else self.chosen.whole.paced.spread / 2

    @property
    def eps_text(self) -> str:
        """The predicted EPS with their spread."""
        return f"{self.eps:,.0f}" + ("" if self.eps_spread is None else f" +-{self.eps_spread:.0%}")

    @property
    def assumption(self) -> str:
        """The assumption of the prediction, in words."""
        if self.chosen.whole is not None:
            pace = "free Actors" if self.replay_ratio is None else f"a replay ratio of {self.replay_ratio:g}"
            return f"not waiting for data, as its program did when it was tried with {pace}"
        if self.replay_ratio is None:
            return "not waiting for data, with Actors that run free"
        return f"not waiting for data, with Actors that collect at a replay ratio of {self.replay_ratio:g}"

    @property
    def gps(self) -> float:
        """Predicted gradient steps per second."""
        return self.eps / self.batch_size

    @property
    def watts(self) -> float | None:
        """Active power of the devices used, where the device CSV states it."""
        return self.chosen.watts

    @property
    def idle_watts(self) -> float:
        """Power of the machine's devices that stay idle, as far as the device CSV states it."""
        return self.chosen.idle_watts

    @property
    def eps_per_watt(self) -> float | None:
        """Predicted EPS per watt of the devices used; None where the device CSV does not state their power."""
        return None if self.watts is None else self.eps / self.watts

    @property
    def eps_per_machine_watt(self) -> float | None:
        """Predicted EPS per watt of the whole machine, the devices that stay idle included."""
        watts = self.chosen.machine_watts
        return None if watts is None else self.eps / watts

    @property
    def alternatives(self) -> tuple[Alternative, ...]:
        """Every other pair, best first."""
        chosen = self.chosen
        return tuple(
            Alternative(
                replay_manager=candidate.replay.device,
                learner=candidate.learner.device,
                implementation=candidate.learner.implementation,
                t_itr_us=candidate.t_itr_us,
                eps=candidate.eps,
                watts=candidate.watts,
                times_worse=chosen.score(self.metric) / candidate.score(self.metric),
                reason=self.why_not(candidate),
            )
            for candidate in self.candidates
            if candidate is not chosen
        )

    def with_choice(
        self,
        *,
        replay_manager: str | None = None,
        learner: str | None = None,
        storage: str | None = None,
        implementation: str | None = None,
    ) -> Placement:
        """The same placement with other devices chosen, or another implementation of the Learner.

        Without `storage`, the new pair's best Data Storage is chosen if the current one is the best of its pair;
        otherwise the current one stays if the new pair offers it. Without `implementation`, the current one stays if
        the new pair has it; else the pair's best is chosen. PlacementError lists the possible pairs.
        """
        pair = (replay_manager or self.replay_manager, learner or self.learner)
        offered = [candidate.learner.implementation for candidate in self.candidates if candidate.pair == pair]
        if implementation is None:
            stays = self.implementation in offered or not offered
            implementation = self.implementation if stays else offered[0]
        if storage is None:
            was_best = self.storage == self.chosen.storage[0].device
            options = next(([o.device for o in c.storage] for c in self.candidates if c.pair == pair), [self.storage])
            storage = options[0] if was_best or self.storage not in options else self.storage
        return dataclasses.replace(
            self, replay_manager=pair[0], learner=pair[1], storage=storage, implementation=implementation
        )

    def why_not(self, candidate: Candidate) -> str:
        """One line that says why the choice is preferred to `candidate`, or by how much the choice is worse."""
        reason = _reason(candidate, self.chosen, self.metric)
        return reason if candidate.whole is None else f"tried: {reason}"

    def why_not_storage(self, option: StorageOption) -> str:
        """One line that says how much more or less traffic the Data Storage on another device causes."""
        difference = option.traffic_us - self.storage_option.traffic_us
        if math.isclose(option.traffic_us, self.storage_option.traffic_us, rel_tol=TIE):
            return "equal traffic"
        return f"{short_number(abs(difference))} us {'more' if difference > 0 else 'less'} traffic per iteration"

    def to_pandas(self) -> pd.DataFrame:
        """One row per candidate, best first: devices, implementation, cost, its terms, storage, whether chosen."""
        import pandas as pd  # here, because loading pandas takes 0.2 s

        rows = []
        for candidate in self.candidates:
            is_chosen = candidate is self.chosen
            rows.append(
                {
                    "replay_manager": candidate.replay.device,
                    "learner": candidate.learner.device,
                    "implementation": candidate.learner.implementation,
                    "storage": self.storage if is_chosen else candidate.storage[0].device,
                    "setting": candidate.setting,
                    "chosen": is_chosen,
                    "t_itr_us": candidate.t_itr_us,
                    "eq7_us": candidate.terms.eq7_us,
                    "tried": candidate.whole is not None,
                    "eps": candidate.eps,
                    "watts": math.nan if candidate.watts is None else candidate.watts,
                    "idle_watts": candidate.idle_watts,
                    "eps_per_watt": math.nan if candidate.eps_per_watt is None else candidate.eps_per_watt,
                    "eps_per_machine_watt": (
                        math.nan if candidate.eps_per_machine_watt is None else candidate.eps_per_machine_watt
                    ),
                    **dataclasses.asdict(candidate.terms),
                    "reason": "" if is_chosen else self.why_not(candidate),
                }
            )
        return pd.DataFrame(rows)

    def to_json(self) -> str:
        """A versioned JSON document that `from_json` reads back to an equal placement."""
        return to_document(self, self.FORMAT, self.VERSION)

    @classmethod
    def from_json(cls, text: str) -> Placement:
        """Read a document of `to_json`, which may have been edited; raises ConfigurationError or PlacementError."""
        return from_document(cls, text, cls.FORMAT, cls.VERSION)

    def explain(self, *, pairs: int = 4) -> Explanation:
        """The costs term by term of the choice and the next best `pairs`, the deciding term, and break-even values.

        Print the result as text, or with rich.
        """
        from composer.explain import Explanation

        return Explanation((self,), pairs)

    def __rich__(self) -> RenderableType:
        return placement_report(self)

    def __str__(self) -> str:
        return plain(self)


def _reason(candidate: Candidate, chosen: Candidate, metric: Metric) -> str:
    worse = chosen.score(metric) / candidate.score(metric)
    if math.isclose(worse, 1.0, rel_tol=TIE):
        traffic = candidate.traffic_bytes - chosen.traffic_bytes
        if traffic:
            return f"equal: {abs(traffic):,.0f} bytes {'more' if traffic > 0 else 'less'} traffic per iteration"
        devices = candidate.devices_used - chosen.devices_used
        return f"equal: {candidate.devices_used} devices in use, not {chosen.devices_used}" if devices else "equal"
    ratio = max(worse, 1 / worse)
    times = f"{ratio:.2f}x" if ratio >= 1.01 else f"{ratio - 1:.2%}"
    if metric == "power_efficiency":
        ours, theirs = chosen.machine_watts or 0.0, candidate.machine_watts or 0.0
        share = theirs / (ours or 1.0) * (1 if worse > 1 else -1)
        slower = candidate.t_itr_us / chosen.t_itr_us * (1 if worse > 1 else -1)
        verdict = f"{times} {'fewer' if worse > 1 else 'more'} experiences per joule"
        if share > slower or not ours or not theirs:
            return f"{verdict}: {theirs:,.0f} W instead of {ours:,.0f} W"
        return f"{verdict}: {_largest_difference(candidate, chosen, more=candidate.t_itr_us > chosen.t_itr_us)}"
    return f"{times} {'slower' if worse > 1 else 'faster'}: {_largest_difference(candidate, chosen, more=worse > 1)}"


def _largest_difference(candidate: Candidate, chosen: Candidate, *, more: bool) -> str:
    """The term of the critical path with the largest share in why `candidate` costs more (or less) than `chosen`."""
    ours, theirs = chosen.terms.critical(), candidate.terms.critical()
    differences = {name: theirs.get(name, 0.0) - ours.get(name, 0.0) for name in (*theirs, *ours)}
    name = (max if more else min)(differences, key=lambda term: differences[term])
    amount = short_number(abs(differences[name]))
    through = "" if len(candidate.route) < 3 or "moving" not in name else f" through {candidate.route[1]}"
    return f"{name}{through} costs {amount} us {'more' if differences[name] > 0 else 'less'}"
