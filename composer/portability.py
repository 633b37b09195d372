"""Portability: PEARL Eq. 8 over placements of one machine and over machines, and the code divergence of user code."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from composer.matrix import AssignmentMatrix, MatrixRow, PairCell, StorageCell
from composer.placement import IterationTerms
from composer.report import ascii_table, plain
from pearl.errors import ConfigurationError

if TYPE_CHECKING:
    from composer.placement import Placement
    from pearl.devices.description import Device

PEERS = "Stable-Baselines3 and RLlib"

# On which devices the peers run what, by kind and backend of the device CSV (docs/paper.md cites their documentation).
# Their replay is in the host's memory; their Learner is PyTorch on CPUs and CUDA GPUs.
_HOST_AND_LEARNER = "replay and Learner"
_LEARNER = "Learner"
_MAYBE = "Learner, if it is a CUDA GPU"
_NOTHING = "nothing"
_PEERS_RUN = {
    ("cpu", "cpu"): _HOST_AND_LEARNER,
    ("cpu", "model"): _HOST_AND_LEARNER,
    ("gpu", "cuda"): _LEARNER,
    ("gpu", "model"): _MAYBE,
}


def phi(eps: Sequence[float]) -> float:
    """PEARL Eq. 8: |H| / sum(1 / EPS_i), the harmonic mean of the experiences per second; 0 if one of them is 0.

    A choice or machine that cannot run has 0. ConfigurationError for no values, and for values that are negative or not
    finite.
    """
    if not eps or not all(0 <= value < math.inf for value in eps):
        raise ConfigurationError(f"Portability needs EPS of at least 0, and one or more; found {list(eps)!r}.")
    return 0.0 if 0 in eps else len(eps) / sum(1 / value for value in eps)


def user_lines(source: str) -> Counter[str]:
    """The lines of user code with their counts: without blank lines, comment lines and surrounding spaces."""
    lines = (line.strip() for line in source.splitlines())
    return Counter(line for line in lines if line and not line.startswith("#"))


def code_divergence(first: str, second: str) -> float:
    """1 - |a & b| / |a | b| over the lines of user code for two platforms (PEARL Sec. VII-E); 0 for equal code.

    Lines that occur several times count as often. ConfigurationError where neither has a line.
    """
    a, b = user_lines(first), user_lines(second)
    either = (a | b).total()
    if not either:
        raise ConfigurationError("Code divergence needs lines of user code; found none in either source.")
    return 1 - (a & b).total() / either


def peers_run(device: Device) -> str:
    """What Stable-Baselines3 and RLlib run on the device, in words."""
    return _PEERS_RUN.get((device.kind, device.backend), _NOTHING)


@dataclass(frozen=True)
class AssignmentChoice:
    """One choice of devices for Replay Manager and Learner, with its best EPS; 0 and a reason if it cannot run."""

    replay_manager: str
    learner: str
    eps: float
    reason: str = ""


@dataclass(frozen=True)
class PlatformPortability:
    """The choices of one machine. `problem` is equal for machines that can be compared; `devices` may be unknown."""

    name: str
    problem: tuple[tuple[str, int], ...]
    choices: tuple[AssignmentChoice, ...]
    devices: tuple[Device, ...] = ()

    @property
    def phi_devices(self) -> float:
        """Phi(D), Eq. 8 over all choices of devices, impossible ones included."""
        return phi([choice.eps for choice in self.choices])

    @property
    def phi_running(self) -> float:
        """Eq. 8 over the choices that run."""
        return phi([choice.eps for choice in self.choices if choice.eps] or [0.0])

    @property
    def best_eps(self) -> float:
        """The highest EPS of the machine, which counts in Phi(P)."""
        return max((choice.eps for choice in self.choices), default=0.0)


def of_placement(name: str, placement: Placement) -> PlatformPortability:
    """The choices of a placement: every pair, with its fastest implementation of the Learner; impossible ones too."""
    best: dict[tuple[str, str], AssignmentChoice] = {}
    for candidate in placement.candidates:
        found = AssignmentChoice(*candidate.pair, candidate.eps)
        if candidate.pair not in best or best[candidate.pair].eps < found.eps:
            best[candidate.pair] = found
    impossible = (AssignmentChoice(i.replay_manager, i.learner, 0.0, i.reason) for i in placement.impossible)
    devices = () if placement.evidence is None else placement.evidence.devices
    problem = (("batch size", placement.batch_size), ("bytes of a transition", placement.transition_bytes))
    return PlatformPortability(name, problem, (*best.values(), *impossible), devices)


def of_matrix(name: str, matrix: AssignmentMatrix, batch_size: int | None = None) -> PlatformPortability:
    """The choices with both primitives and the Data Storage on one device, priced as the composer prices a program.

    A matrix knows no links and no Actors. So these are missing: pairs of two devices, messages (in the device's own
    memory, and of what arrives, from the host), and the cost of sharing cores with the Actors. A row without times of
    the Data Storage counts 0 for storing, and for gathering too unless the pair's own gather is known.

    `batch_size` is for matrices that do not state theirs. ConfigurationError if neither does, or if they differ.
    """
    size = _batch_size(name, matrix, batch_size)
    choices = []
    for row in matrix.rows:
        pairs = [option.pair for option in row.learners]
        times = [_alone(pair, row).t_itr_us for pair in pairs if isinstance(pair, PairCell)]
        reason = "" if times else row.pair.parameters
        fastest = min(times, default=0.0)
        eps = size / fastest * 1e6 if fastest else 0.0
        choices.append(AssignmentChoice(row.device, row.device, eps, reason))
    if not choices:
        raise ConfigurationError(f"The matrix {name} has no rows, so no device to compute the portability of.")
    return PlatformPortability(name, (("batch size", size),), tuple(choices))


def _batch_size(name: str, matrix: AssignmentMatrix, given: int | None) -> int:
    """The batch size for which the matrix holds."""
    if given is not None and given < 1:
        raise ConfigurationError(f"The batch size of {name} must be at least 1; found {given}.")
    if not matrix.batch_size:
        if given is None:
            raise ConfigurationError(f"{name} is a matrix that states no batch size. Give --batch-size.")
        return given
    if given not in (None, matrix.batch_size):
        raise ConfigurationError(
            f"{name} is a matrix of batch size {matrix.batch_size}; found a batch size of {given}. Leave --batch-size "
            "out, or give that of the matrix."
        )
    return matrix.batch_size


def _alone(pair: PairCell, row: MatrixRow) -> IterationTerms:
    """The terms of an iteration on the device of `row`, which holds the Data Storage too; without any transfer."""
    stored = row.storage if isinstance(row.storage, StorageCell) else None
    gather = pair.gather or (stored and stored.gather)
    return IterationTerms(
        sample_us=pair.replay.sample.value_us,
        sample_transfer_us=0.0,
        insert_us=pair.replay.insert.value_us,
        insert_transfer_us=0.0,
        learner_us=pair.learner.step.value_us,
        priority_transfer_us=0.0,
        update_us=pair.replay.update.value_us,
        gather_us=gather.value_us if gather else 0.0,
        store_us=stored.store.value_us if stored else 0.0,
        inserts_between=pair.joined,
    )


@dataclass(frozen=True)
class Portability:
    """Eq. 8 for each machine, and over machines; printable as text and with rich."""

    platforms: tuple[PlatformPortability, ...]

    def __post_init__(self) -> None:
        problems = {platform.problem for platform in self.platforms}
        if len(problems) > 1:
            said = "; ".join(
                f"{platform.name}: {', '.join(f'{what} {value:,}' for what, value in platform.problem)}"
                for platform in self.platforms
            )
            raise ConfigurationError(
                f"Portability over machines compares one problem; found several. {said}. Name files of one problem."
            )

    @property
    def phi_platforms(self) -> float:
        """Phi(P), Eq. 8 over the best EPS of each machine."""
        return phi([platform.best_eps for platform in self.platforms])

    def __rich__(self) -> RenderableType:
        parts: list[RenderableType] = []
        for platform in self.platforms:
            parts += [_choices_table(platform), *_phi_lines(platform), Text("")]
        best = ", ".join(f"{platform.name} {platform.best_eps:,.0f}" for platform in self.platforms)
        machines = "1 machine" if len(self.platforms) == 1 else f"{len(self.platforms)} machines"
        parts.append(Text(f"Phi(P), harmonic mean of the best EPS over {machines}: {self.phi_platforms:,.0f} ({best})"))
        return Group(*parts)

    def __str__(self) -> str:
        return plain(self)


def _choices_table(platform: PlatformPortability) -> RenderableType:
    table = ascii_table(Text(platform.name), ("RM", "Learner", "EPS", PEERS), right=("EPS",))
    table.title_justify = "left"
    kinds = {device.name: device for device in platform.devices}
    for choice in platform.choices:
        eps = f"{choice.eps:,.0f}" if choice.eps else "0: cannot run"
        cells = (choice.replay_manager, choice.learner, eps, _peers_text(choice, kinds))
        table.add_row(*map(Text, cells))
    return table


def _peers_text(choice: AssignmentChoice, devices: dict[str, Device]) -> str:
    """Whether the peers can run the choice, as far as the devices are known."""
    if choice.replay_manager not in devices or choice.learner not in devices:
        return "not known: the file states no kinds of devices"
    replay, learner = peers_run(devices[choice.replay_manager]), peers_run(devices[choice.learner])
    if replay != _HOST_AND_LEARNER:
        return f"no: no replay on {choice.replay_manager}"
    return {_NOTHING: f"no: no Learner on {choice.learner}", _MAYBE: "yes, if the Learner's is a CUDA GPU"}.get(
        learner, "yes"
    )


def _phi_lines(platform: PlatformPortability) -> list[Text]:
    count, running = len(platform.choices), sum(choice.eps > 0 for choice in platform.choices)
    lines = [Text(f"Phi(D), harmonic mean of EPS over all {count} choices of devices: {platform.phi_devices:,.0f}")]
    if running < count:
        lines.append(Text(f"  over the {running} of them that run: {platform.phi_running:,.0f}"))
        seen = dict.fromkeys(choice.reason for choice in platform.choices if choice.reason)
        lines += [Text(f"  cannot run: {reason}") for reason in list(seen)[:3]]
    kinds = {device.name: device for device in platform.devices}
    refused = [choice for choice in platform.choices if _peers_text(choice, kinds).startswith("no:")]
    if refused:
        lines.append(Text(f"Phi(D) of {PEERS}: 0, as they run {count - len(refused)} of the {count} choices at most"))
    return lines
