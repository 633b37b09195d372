"""The predicted times that a run compares with its measurements."""

from __future__ import annotations

from composer.on_policy.placement import RolloutPlacement
from composer.placement import Placement
from pearl.runtime.telemetry import INSERTION, PARTS


def predicted_us(placement: Placement | RolloutPlacement) -> dict[str, float]:
    """Predicted microseconds of an iteration's parts, by the names and in the order of `PARTS`; none is 0.

    `INSERTION` is per transition: PEARL Eq. 7 inserts one per environment in each iteration, while a program inserts
    what its replay ratio, or the speed of its Actors, brings.
    """
    if isinstance(placement, RolloutPlacement):
        return placement.choice.terms.parts()
    parts = placement.terms.by_primitive()
    if insertion_us := parts.pop("insertion", 0.0):
        parts[INSERTION] = insertion_us / (placement.actor_count * placement.envs_per_actor)
    return {name: parts[name] for name in PARTS if name in parts}
