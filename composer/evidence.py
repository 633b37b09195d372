"""Evidence that a placement keeps for explanations: break-even values, and the memory of the Data Storage.

Break-even values come from Algorithm 1 itself, run again with one input changed. No formula here knows the terms of an
iteration.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from composer.matrix import AssignmentMatrix, LearnerCell
from composer.measurement import Measurement
from composer.platform import Platform
from composer.storage_rule import StorageRule
from pearl.devices.description import Connection, Device

if TYPE_CHECKING:
    from composer.placement import Candidate, Placement

_BEST = 3  # the pairs whose devices and links are varied, best first
_STEPS = (1.25, 2.0, 8.0, 64.0, 1000.0)  # factors at which the choice is looked up, in both directions
_HALVINGS = 10
_NEIGHBOURS = 3  # the powers of two above and below a batch size or a fanout
_LEAST_US = 1e-3  # of a latency that is varied, and of an iteration
_FANOUTS = range(2, 257)

_Names: TypeAlias = tuple[str, str, str]
Decide: TypeAlias = Callable[..., "Placement"]  # (matrix, platform, *, batch_size=...)
MatrixAt: TypeAlias = Callable[[int, int], AssignmentMatrix]  # (batch size, fanout)

SPEED = "all times of the device scale alike"
OTHERS = "all other times stay"
LINK = "the times of the devices stay"
MODELLED = "times modelled again"
UNKNOWN = "not known: the times of {} hold for this value only; explain placements of several values together"


@dataclass(frozen=True)
class BreakEven:
    """A value of one input of Algorithm 1 at which another pair becomes the choice.

    `at` is the value nearest to `now` in its direction that changes the choice, to `replay_manager`, `learner` and
    `implementation`; None: `reason` says that no value does, or why none is known. `assumption` says what was kept.
    """

    quantity: str
    now: float
    at: float | None
    replay_manager: str = ""
    learner: str = ""
    implementation: str = ""
    assumption: str = ""
    reason: str = ""


@dataclass(frozen=True)
class StorageSite:
    """Facts about a device as a place for the Data Storage.

    `with_learner` is the reason why it cannot hold the Data Storage of a Learner on the same device, `without_learner`
    of one elsewhere; None: it can.
    """

    device: str
    with_learner: str | None
    without_learner: str | None


@dataclass(frozen=True)
class Evidence:
    """Further facts of a composition: the platform, the replay's capacity, places for its data, break-even values.

    The break-even values are those of the pair that Algorithm 1 chose.
    """

    devices: tuple[Device, ...]
    connections: tuple[Connection, ...]
    replay_capacity: int
    sites: tuple[StorageSite, ...]
    break_evens: tuple[BreakEven, ...]

    @property
    def platform(self) -> Platform:
        """The platform that was composed for."""
        return Platform(self.devices, self.connections)

    def site(self, device: str) -> StorageSite | None:
        """The site called `device`, if it is known."""
        return next((site for site in self.sites if site.device == device), None)

    def device(self, name: str) -> Device | None:
        """The device called `name`, if it is known."""
        return next((device for device in self.devices if device.name == name), None)


def gather_evidence(
    decide: Decide,
    placement: Placement,
    matrix: AssignmentMatrix,
    platform: Platform,
    rule: StorageRule,
    matrix_at: MatrixAt | None = None,
) -> Evidence:
    """Vary the inputs of a decision, one at a time.

    `decide` is Algorithm 1 with all arguments but the matrix, the platform, and whole iterations; it must take
    `batch_size` and `messages_us`. `placement` is its result with whole iterations: by how much these change the time
    of a pair stays as it is. `matrix_at` gives the matrix of another batch size and fanout where all of it is modelled;
    None: the times at another value are not known.
    """
    search = _Search(decide, placement, matrix, platform, matrix_at)
    sites = tuple(
        StorageSite(device.name, rule.refusal(device.name, device.name), rule.refusal(device.name, ""))
        for device in platform.devices
    )
    break_evens = tuple(search.break_evens())
    return Evidence(platform.devices, platform.connections, rule.replay.capacity, sites, break_evens)


@dataclass(frozen=True)
class _Search:
    decide: Decide
    placement: Placement
    whole: AssignmentMatrix
    platform: Platform
    matrix_at: MatrixAt | None

    @functools.cached_property
    def devices(self) -> tuple[str, ...]:
        """The devices of the best pairs, and the host."""
        pairs = dict.fromkeys(candidate.pair for candidate in self.placement.candidates)
        names = [name for pair in list(pairs)[:_BEST] for name in pair]
        return tuple(dict.fromkeys((self.platform.host.name, *names)))

    @functools.cached_property
    def matrix(self) -> AssignmentMatrix:
        """The rows of those devices and of all that may take their place, so that large machines are cheap to vary."""
        candidates, kept = self.placement.candidates, set(self.devices)
        for name in self.devices:
            for others in (
                (c for c in candidates if name not in c.pair),
                (c for c in candidates if c.learner.device != name),
            ):
                kept.update(next((c.pair for c in others), ()))
        for setting in (1, 2):
            kept.update(next((c.pair for c in candidates if c.setting == setting), ()))
        return dataclasses.replace(self.whole, rows=tuple(row for row in self.whole.rows if row.device in kept))

    @functools.cached_property
    def beyond_us(self) -> dict[_Names, float]:
        """By how much a pair's time, measured as a whole, differs from its parts; only of pairs that differ."""
        parts = {candidate.names: candidate.t_itr_us for candidate in self.decide(self.whole, self.platform).candidates}
        found = {c.names: c.t_itr_us - parts.get(c.names, c.t_itr_us) for c in self.placement.candidates}
        return {names: beyond_us for names, beyond_us in found.items() if beyond_us}

    def choice(self, matrix: AssignmentMatrix, platform: Platform, **changed: Any) -> _Names:
        """The pair that Algorithm 1 chooses."""
        found = self.decide(matrix, platform, **changed)
        if not self.beyond_us:
            return found.chosen.names

        def score(candidate: Candidate) -> float:
            t_itr_us = max(candidate.t_itr_us + self.beyond_us.get(candidate.names, 0.0), _LEAST_US)
            return candidate.score(found.metric) * candidate.t_itr_us / t_itr_us

        return max(found.candidates, key=score).names

    def break_evens(self) -> Iterator[BreakEven]:
        for device in self.devices:
            if any(row.device == device for row in self.matrix.rows):
                vary = functools.partial(self._with_speed, device)
                yield from self._varied(f"speed of {device}, times", 1.0, vary, SPEED)
        for device, implementation in dict.fromkeys(c.names[1:] for c in self.placement.candidates[:_BEST]):
            vary = functools.partial(self._with_learner, device, implementation)
            yield from self._varied(f"speed of the {implementation} Learner on {device}, times", 1.0, vary, OTHERS)
        for number, link in enumerate(self.platform.connections):
            if not {link.source, link.target} <= set(self.devices) or link in self.platform.unused_connections:
                continue
            between = f"between {link.source} and {link.target}"
            if link.source == link.target:
                between = f"of the memory of {link.source}"
            vary = functools.partial(self._with_link, number, True)
            yield from self._varied(f"bandwidth {between}, GB/s", link.bandwidth_gbps, vary, LINK)
            vary = functools.partial(self._with_link, number, False)
            yield from self._varied(f"latency {between}, us", max(link.latency_us, _LEAST_US), vary, LINK)
        if messages_us := max(candidate.terms.messages_us for candidate in self.placement.candidates):
            quantity = "messages through the host in setting 1, us"
            yield from self._varied(quantity, messages_us, self._with_messages, OTHERS)
        yield from self._by_batch()
        yield from self._by_fanout()

    def _with_speed(self, device: str, times: float) -> _Names:
        rows = tuple(_scaled(row, 1 / times) if row.device == device else row for row in self.matrix.rows)
        return self.choice(dataclasses.replace(self.matrix, rows=rows), self.platform)

    def _with_learner(self, device: str, implementation: str, times: float) -> _Names:
        """The choice if one implementation of the Learner on one device were `times` as fast."""

        def scaled(value: Any) -> Any:
            if isinstance(value, LearnerCell) and value.implementation == implementation:
                return _scaled(value, 1 / times)
            return value

        rows = tuple(_mapped(row, scaled) if row.device == device else row for row in self.matrix.rows)
        return self.choice(dataclasses.replace(self.matrix, rows=rows), self.platform)

    def _with_link(self, number: int, bandwidth: bool, value: float) -> _Names:
        links = list(self.platform.connections)
        old = links[number]
        links[number] = (
            dataclasses.replace(old, bandwidth_gbps=value) if bandwidth else dataclasses.replace(old, latency_us=value)
        )
        return self.choice(self.matrix, dataclasses.replace(self.platform, connections=tuple(links)))

    def _with_messages(self, messages_us: float) -> _Names:
        return self.choice(self.matrix, self.platform, messages_us=messages_us)

    def _varied(
        self, quantity: str, now: float, choice: Callable[[float], _Names], assumption: str
    ) -> Iterator[BreakEven]:
        """The nearest change of the choice above and below `now`; one entry without a value if there is none."""
        chosen, found = self.chosen_names, False
        for sign in (1, -1):
            same = now
            for step in _STEPS:
                other = now * step**sign
                names = choice(other)
                if names == chosen:
                    same = other
                    continue
                for _ in range(_HALVINGS):
                    middle = (same * other) ** 0.5
                    at_middle = choice(middle)
                    if at_middle == chosen:
                        same = middle
                    else:
                        other, names = middle, at_middle
                found = True
                yield BreakEven(quantity, now, other, *names, assumption=assumption)
                break
        if not found:
            reason = f"no change within a factor of {_STEPS[-1]:,.0f}"
            yield BreakEven(quantity, now, None, assumption=assumption, reason=reason)

    @functools.cached_property
    def chosen_names(self) -> _Names:
        return self.choice(self.matrix, self.platform)

    # --- batch size and fanout --------------------------------------------------------------------------------------

    def _by_batch(self) -> Iterator[BreakEven]:
        batch, fanout = self.placement.batch_size, self.placement.chosen.replay.fanout

        def choice(value: int) -> _Names:
            assert self.matrix_at is not None
            return self.choice(self.matrix_at(value, fanout), self.platform, batch_size=value)

        yield from self._by_doubling("batch size", batch, choice)

    def _by_fanout(self) -> Iterator[BreakEven]:
        batch, fanout = self.placement.batch_size, self.placement.chosen.replay.fanout

        def choice(value: int) -> _Names:
            assert self.matrix_at is not None
            return self.choice(self.matrix_at(batch, value), self.platform)

        yield from self._by_doubling("fanout of the tree", fanout, choice, _FANOUTS)

    def _by_doubling(
        self, quantity: str, now: int, choice: Callable[[int], _Names], allowed: range = range(1, 1 << 31)
    ) -> Iterator[BreakEven]:
        """The first value above and below `now` that changes the choice, by doubling and halving."""
        if self.matrix_at is None:
            measured = ", ".join(self._measured_devices())
            yield BreakEven(quantity, now, None, reason=UNKNOWN.format(measured))
            return
        found = False
        chosen, tried = self.choice(self.whole, self.platform), [now]
        above = [now << k for k in range(1, _NEIGHBOURS + 1)]
        below = [now >> k for k in range(1, _NEIGHBOURS + 1)]
        for values in (above, below):
            for value in (value for value in values if value in allowed):
                tried.append(value)
                names = choice(value)
                if names != chosen:
                    found = True
                    yield BreakEven(quantity, now, value, *names, assumption=f"{MODELLED}, at powers of two")
                    break
        if not found:
            reason = f"no change from {min(tried):,} to {max(tried):,}"
            yield BreakEven(quantity, now, None, assumption=f"{MODELLED}, at powers of two", reason=reason)

    def _measured_devices(self) -> tuple[str, ...]:
        return tuple(row.device for row in self.whole.rows if not all_modelled(row)) or self.devices


def all_modelled(value: Any) -> bool:
    """Whether every latency in a matrix, or in a part of one, is modelled."""
    return all(measurement.source == "modelled" for measurement in _measurements(value))


def _measurements(value: Any) -> Iterator[Measurement]:
    if isinstance(value, Measurement):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _measurements(item)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _measurements(getattr(value, field.name))


def _scaled(value: Any, factor: float) -> Any:
    """A part of the matrix with every latency multiplied by `factor`."""

    def scaled(part: Any) -> Any:
        if not isinstance(part, Measurement):
            return part
        latencies = {name: getattr(part, name) * factor for name in ("value_us", "p20_us", "p80_us")}
        return dataclasses.replace(part, samples=None, **latencies)

    return _mapped(value, scaled)


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """A part of the matrix in which `change` has replaced the records that it changes."""
    if (changed := change(value)) is not value:
        return changed
    if isinstance(value, tuple):
        return tuple(_mapped(item, change) for item in value)
    if isinstance(value, Measurement) or not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    parts = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return dataclasses.replace(value, **{name: _mapped(part, change) for name, part in parts.items()})
