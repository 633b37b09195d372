"""Takes an edited placement back: a choice may be edited, a result may not."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from composer.wording import shortened
from pearl.errors import PlacementError

if TYPE_CHECKING:
    from composer.placement import Placement

# The fields of a placement that a user may edit. All others are results or inputs.
CHOICES = ("replay_manager", "learner", "storage", "implementation")
PARAMETERS: Mapping[str, tuple[str, ...]] = {
    "replay": ("fanout", "workers"),
    "learner": ("threads", "sub_batches", "prefetch"),
}
_ROUNDING = 1e-9


def check_edited(edited: Placement, composed: Placement) -> None:
    """Raise PlacementError, which names the field, unless `edited` differs from `composed` in choices alone.

    Editable are the fields in `CHOICES`, and in each candidate the parameters in `PARAMETERS`.
    """
    if edited == composed:
        return
    theirs, ours = (dataclasses.asdict(placement) for placement in (edited, composed))
    for place, expected, found in _differences(ours, theirs, ""):
        if _editable(place):
            continue
        raise PlacementError(
            f"The edited placement's {place}: expected {shortened(repr(expected))}, as composed here; found "
            f"{shortened(repr(found))}. Only {', '.join(CHOICES)} and the parameters of a candidate ("
            f"{', '.join(name for names in PARAMETERS.values() for name in names)}) can be edited. Undo the change and "
            "state the budget (--budget, budget_s) with which it was composed, if there was one; or compose again and "
            "edit the new file if something was measured again since."
        )


def _differences(ours: Any, theirs: Any, place: str) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for name, value in ours.items():
            yield from _differences(value, theirs[name], f"{place}.{name}" if place else name)
    elif isinstance(ours, (list, tuple)) and isinstance(theirs, (list, tuple)):
        if len(ours) != len(theirs):
            yield f"count of {place}", len(ours), len(theirs)
        for number, (mine, other) in enumerate(zip(ours, theirs, strict=False)):
            yield from _differences(mine, other, f"{place}[{number}]")
    elif isinstance(ours, float) and isinstance(theirs, float):
        if not math.isclose(ours, theirs, rel_tol=_ROUNDING):
            yield place, ours, theirs
    elif ours != theirs:
        yield place, ours, theirs


def _editable(place: str) -> bool:
    if place in CHOICES:
        return True
    parts = place.split(".")
    return len(parts) == 3 and parts[0].startswith("candidates[") and parts[2] in PARAMETERS.get(parts[1], ())
