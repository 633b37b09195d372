"""Algorithm 1 for on-policy training: the devices of GAE and of the Learner, and the cost of the alternatives.

    T_itr = T_collect + T_comm + T_GAE(i) + T_comm(i, j) + T_Learner(j)          with policy_lag 0: in turn
    T_itr = max(T_collect, T_comm + T_GAE(i) + T_comm(i, j) + T_Learner(j))      with policy_lag 1: at the same time

Where collecting and training share the host's cores at the same time, an iteration takes at least the work of both,
divided by the cores.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from composer.matrix import LearnerCell
from composer.measurement import Measurement
from composer.nodes import NodeShare
from composer.on_policy.matrix import AdvantagesCell, RolloutMatrix
from composer.on_policy.problem import RolloutProblem
from composer.platform import Platform
from composer.report import ascii_table, plain, short_number
from composer.serialization import from_document, to_document
from composer.wording import require
from pearl.backends import backend_of
from pearl.errors import PlacementError

if TYPE_CHECKING:
    from composer.on_policy.explain import RolloutExplanation

WORTH_THREADS = 1.1  # a Learner with more threads must be so many times as fast
_FLOAT_BYTES = 4


@dataclass(frozen=True)
class AdvantagesConfig:
    """Where the advantages are estimated."""

    device: str


@dataclass(frozen=True)
class RolloutLearnerConfig:
    """Where and how the Learner trains."""

    device: str
    implementation: str
    threads: int = 1


@dataclass(frozen=True)
class RolloutTerms:
    """Microseconds of one iteration, which is one rollout."""

    collection_us: float
    advantages_us: float
    transfer_us: float
    training_us: float
    t_itr_us: float

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            require(0 <= value < math.inf, f"A rollout's {name} must be finite and at least 0; found {value!r}.")
        require(self.t_itr_us > 0, f"A rollout's t_itr_us must be above 0; found {self.t_itr_us!r}.")

    def parts(self) -> dict[str, float]:
        """By the names of `pearl.runtime.telemetry.ROLLOUT_PARTS`, without those that are 0."""
        found = {
            "collection": self.collection_us,
            "advantages": self.advantages_us,
            "training": self.training_us,
            "communication": self.transfer_us,
            "iteration": self.t_itr_us,
        }
        return {name: value for name, value in found.items() if value}


@dataclass(frozen=True)
class RolloutCandidate:
    """One way to place both primitives, and the times of an iteration: predicted, or `tried` if its program was."""

    advantages: AdvantagesConfig
    learner: RolloutLearnerConfig
    terms: RolloutTerms
    tried: Measurement | None = None

    @property
    def text(self) -> str:
        """Where both are, in words."""
        learner = self.learner
        where = f"{learner.implementation} Learner on {learner.device} with {learner.threads} thread(s)"
        return f"GAE on {self.advantages.device}, {where}"

    def differs_in_threads(self, other: RolloutCandidate) -> bool:
        """Whether all but the number of threads of the Learner is the same."""
        same = replace(self.learner, threads=other.learner.threads) == other.learner
        return same and self.advantages == other.advantages

    def is_worth_its_threads(self, fewer: RolloutCandidate) -> bool:
        """Whether it is faster by a tenth than the same with fewer threads."""
        return self.terms.t_itr_us * WORTH_THREADS < fewer.terms.t_itr_us


@dataclass(frozen=True)
class RolloutPlacement:
    """The chosen candidate is the first; the others follow, by the time of an iteration.

    `rows` transitions are a rollout, of `actor_count` actors with `envs_per_actor` environments on the `host`. `nodes`
    are that machine and the nodes of a cluster with their shares of the Actors, where these run with --ray; they are
    not part of any time here.
    """

    host: str
    rows: int
    policy_lag: int
    actor_count: int
    envs_per_actor: int
    candidates: tuple[RolloutCandidate, ...]
    nodes: tuple[NodeShare, ...] = ()

    FORMAT = "pearl-rollout-placement"
    VERSION = 1

    def __post_init__(self) -> None:
        for name in ("rows", "actor_count", "envs_per_actor"):
            value = getattr(self, name)
            require(value >= 1, f"A placement's {name} must be at least 1; found {value!r}.")
        require(bool(self.candidates), "A placement needs at least one candidate; found none.")

    @property
    def choice(self) -> RolloutCandidate:
        """The candidate that programs take."""
        return self.candidates[0]

    @property
    def text(self) -> str:
        """Where the primitives are, in words."""
        return self.choice.text

    @property
    def routes(self) -> tuple[tuple[str, str], ...]:
        """Between which devices messages pass, host included."""
        return (self.host, self.choice.advantages.device), (self.host, self.choice.learner.device)

    @property
    def eps(self) -> float:
        """Predicted transitions collected and trained on per second."""
        return self.rows / self.choice.terms.t_itr_us * 1e6

    @property
    def free_eps(self) -> float:
        """The same: Actors wait for the training on their rollouts, they cannot run free."""
        return self.eps

    @property
    def assumption(self) -> str:
        """The assumption of the prediction, in words."""
        how = "while the next rollout is collected" if self.policy_lag else "in turn with collecting"
        where = ", all Actors on this machine" if self.nodes else ""
        return f"each transition counted once, training {how}{where}"

    def with_choice(
        self, advantages: str, learner: str, implementation: str, threads: int | None = None
    ) -> RolloutPlacement:
        """The same with another candidate as choice: one with so many threads if there is one, else the first.

        PlacementError if no candidate has these devices and this implementation.
        """
        wanted = (advantages, learner, implementation)
        found = [
            c for c in self.candidates if (c.advantages.device, c.learner.device, c.learner.implementation) == wanted
        ]
        if found:
            return self.choosing(next((c for c in found if c.learner.threads == threads), found[0]))
        raise PlacementError(
            f"The placement has no candidate with GAE on {advantages} and the {implementation} Learner on {learner}. "
            f"It has: {'; '.join(candidate.text for candidate in self.candidates)}."
        )

    def explain(self, *, pairs: int = 4) -> RolloutExplanation:
        """Where the time goes, and why each of `pairs` other candidates was not chosen."""
        from composer.on_policy.explain import RolloutExplanation

        return RolloutExplanation(self, pairs)

    def choosing(self, candidate: RolloutCandidate) -> RolloutPlacement:
        """The same with one of its candidates as choice."""
        others = [other for other in self.candidates if other is not candidate]
        return replace(self, candidates=(candidate, *others))

    def to_json(self) -> str:
        """A versioned JSON document that `from_json` reads back to an equal placement."""
        return to_document(self, self.FORMAT, self.VERSION)

    @classmethod
    def from_json(cls, text: str) -> RolloutPlacement:
        """Read `to_json`'s document; ConfigurationError says where it is not one."""
        return from_document(cls, text, cls.FORMAT, cls.VERSION)

    def __rich__(self) -> RenderableType:
        headings = ("GAE on", "Learner on", "with", "collect", "GAE", "move", "train", "iteration us", "steps/s")
        table = ascii_table("Placements, the chosen one first; microseconds of one rollout", headings, headings[3:])
        for candidate in self.candidates:
            terms, learner = candidate.terms, candidate.learner
            us = (terms.collection_us, terms.advantages_us, terms.transfer_us, terms.training_us, terms.t_itr_us)
            table.add_row(
                candidate.advantages.device,
                learner.device,
                f"{learner.implementation}, {learner.threads} thread(s)",
                *map(short_number, us),
                f"{self.rows / terms.t_itr_us * 1e6:,.0f}" + (" (tried)" if candidate.tried is not None else ""),
            )
        lines = [f"Predicted: {self.eps:,.0f} environment steps per second, {self.assumption}."]
        lines += [
            f"With --ray, {share.actors} x {self.envs_per_actor} environments on {share.node or 'this machine'}: "
            f"{share.why}."
            for share in self.nodes
        ]
        return Group(table, *map(Text, lines))

    def __str__(self) -> str:
        return plain(self)


def place_rollouts(matrix: RolloutMatrix, platform: Platform, problem: RolloutProblem) -> RolloutPlacement:
    """Every pair of devices that has both primitives, the fastest first; PlacementError if there is none.

    More threads of the same Learner have to be faster by a tenth: they take cores from all else, and a program pays
    more for waking them than a measurement does.
    """
    found = sorted(_candidates(matrix, platform, problem), key=lambda candidate: candidate.terms.t_itr_us)
    if not found:
        raise PlacementError(
            "No device has both GAE and a Learner that can train "
            f"{problem.trainer_class.__name__}: the matrix says why. Add a cpu row to the device CSV."
        )
    actors = problem.actors
    placement = RolloutPlacement(
        platform.host.name,
        problem.rows,
        problem.rollout.policy_lag,
        actors.count,
        actors.envs_per_actor,
        tuple(found),
    )
    return placement.choosing(of_each_learner(found)[0])


def of_each_learner(candidates: Iterable[RolloutCandidate]) -> list[RolloutCandidate]:
    """One of those that differ in threads alone: the fewest, unless more are faster by a tenth; the fastest first."""
    found: list[RolloutCandidate] = []
    for candidate in sorted(candidates, key=lambda candidate: candidate.learner.threads):
        same = next((i for i, other in enumerate(found) if candidate.differs_in_threads(other)), None)
        if same is None:
            found.append(candidate)
        elif candidate.is_worth_its_threads(found[same]):
            found[same] = candidate
    return sorted(found, key=lambda candidate: candidate.terms.t_itr_us)


def _candidates(matrix: RolloutMatrix, platform: Platform, problem: RolloutProblem) -> Iterator[RolloutCandidate]:
    host, floats = platform.host.name, problem.rows * _FLOAT_BYTES
    batch = problem.rows * problem.transition.nbytes
    for i in matrix.rows:
        if not isinstance(i.advantages, AdvantagesCell):
            continue
        for j in matrix.rows:
            for cell in j.learners:
                if not isinstance(cell, LearnerCell):
                    continue
                # The cell of GAE has its own transfers: rewards and values come from the host and return there.
                moved = 0.0 if j.device == host else platform.link(host, j.device).transfer_us(batch + 2 * floats)
                collection, estimate = matrix.collection.value_us, i.advantages.estimate.value_us
                training = cell.step.value_us
                after = estimate + moved + training
                t_itr = collection + after
                if problem.rollout.policy_lag:
                    t_itr = max(collection, after, _work_us(platform, problem, cell, j.device, collection, after))
                yield RolloutCandidate(
                    AdvantagesConfig(i.device),
                    RolloutLearnerConfig(j.device, cell.implementation, cell.threads),
                    RolloutTerms(collection, estimate, moved, training, t_itr),
                )


def _work_us(
    platform: Platform, problem: RolloutProblem, cell: LearnerCell, learner: str, collection: float, after: float
) -> float:
    """The work of actors and Learner in an iteration, shared out among the host's cores."""
    cores = platform.host.cores or 1
    threads = cell.threads if backend_of(platform.device(learner)).on_host_cores(platform.device(learner)) else 0
    actors = min(problem.actors.count, cores)
    return (collection * actors + after * threads) / cores
