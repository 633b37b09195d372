"""Chooses where the policy of Actors runs, where that is left to the composer (`policy_server="auto"`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

from composer.measurement import Measurement
from pearl.errors import EnvError, PolicyServerError
from pearl.spec import ActorSpec

_WORTH_IT = 1.05  # a smaller gain may be noise
_LEAST_ROUND_TRIP_US = 30.0  # estimated: two processes wake each other, and a GPU starts and ends its work


class ActorTimes(Protocol):
    """The profiler of a problem, as far as its Actors go."""

    @property
    def policy_us(self) -> float:
        """Microseconds in which an Actor on the host chooses the actions of its environments."""

    @property
    def together(self) -> Measurement:
        """Microseconds of an environment step of all Actors together."""


def fastest_place(
    actors: ActorSpec, devices: Sequence[str], profiler: Callable[[ActorSpec], ActorTimes], say: Callable[[str], None]
) -> ActorSpec:
    """The Actors with the policy server on the device with which they are fastest, or without one.

    A device has to make them 5 % faster; one on which the server fails is named and left out. Nothing is measured
    together where the policy takes less time in the Actor than a server takes to answer.
    """
    without = dataclasses.replace(actors, policy_server="none")
    times = profiler(without)
    if (policy_us := times.policy_us) < _LEAST_ROUND_TRIP_US:
        say(
            f"policy server: none, as the policy takes {policy_us:,.1f} us of an Actor's step, and the way to "
            f"{' or '.join(devices)} and back at least {_LEAST_ROUND_TRIP_US:.0f} us"
        )
        return without
    found: dict[str, tuple[float, ActorSpec]] = {"none": (times.together.value_us, without)}
    out: list[str] = []
    for device in devices:
        served = dataclasses.replace(actors, policy_server=device)
        try:
            found[device] = profiler(served).together.value_us, served
        except (EnvError, PolicyServerError) as error:
            out.append(f"{device}: {error}")
    best = min(found, key=lambda place: found[place][0])
    if found[best][0] * _WORTH_IT > found["none"][0]:
        best = "none"
    text = ", ".join(f"{place} {us:,.1f}" for place, (us, _) in sorted(found.items(), key=lambda item: item[1][0]))
    say(f"policy server: {best}, by microseconds of an environment step of all Actors together ({text})")
    for reason in out:
        say(f"policy server: not {reason}")
    return found[best][1]
