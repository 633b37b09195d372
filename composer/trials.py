"""Tries the most promising placements as the programs that they become, and takes the fastest."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from composer.placement import Candidate, Placement, Trial
from pearl.errors import ConfigurationError, GenerationError

LEAST_BUDGET_S = 15.0  # a program starts, warms up and is measured
_MEASURED_S = 2.0  # of each run
_WITHIN = 1.5  # how many times slower than the best prediction a placement may be predicted, and still be tried
_LONGEST_RUN_S = 120.0


def check_budget(budget_s: float) -> None:
    """Raise ConfigurationError for a time in which nothing can be measured."""
    if not (isinstance(budget_s, int | float) and LEAST_BUDGET_S <= budget_s < math.inf):
        raise ConfigurationError(
            f"A time budget must be at least {LEAST_BUDGET_S:g} s, in which one program starts and is measured; found "
            f"{budget_s!r}. Raise it, or leave it out to place by the separate measurements alone."
        )


def with_trials(
    placement: Placement,
    write: Callable[[Placement, Path], Path],
    folder: Path,
    budget_s: float,
    report: Callable[[str], None],
) -> Placement:
    """The placement with what its most promising programs did, and the best of these chosen.

    `write` writes a placement's program to a path. Programs run by turns in `folder`, at their replay ratio, until
    `budget_s` seconds are over; the best by prediction comes first. A program that cannot be written or fails is
    reported, and not chosen.
    """
    until = time.monotonic() + budget_s
    best = placement.candidates[0].score(placement.metric)
    tried = [c for c in placement.candidates if best / c.score(placement.metric) <= _WITHIN]
    programs: dict[tuple[str, str, str], Path] = {}
    found: dict[tuple[str, str, str], list[float]] = {}
    longest_s, turn = 0.0, 0
    while tried and time.monotonic() + longest_s < until:
        candidate = tried[turn % len(tried)]
        began = time.monotonic()
        try:
            if candidate.names not in programs:
                choice = placement.with_choice(**candidate.choice)
                programs[candidate.names] = write(choice, folder / f"{len(programs)}.py")
            eps = _run(programs[candidate.names], min(_LONGEST_RUN_S, until - time.monotonic()))
        except (GenerationError, _FailedError) as error:
            report(f"not tried: {_name(candidate)}: {error}")
            tried.remove(candidate)
            found.pop(candidate.names, None)
            continue
        except subprocess.TimeoutExpired:
            break
        report(f"tried {_name(candidate)}: {eps:,.0f} EPS, predicted {candidate.eps:,.0f}")
        found.setdefault(candidate.names, []).append(eps)
        longest_s, turn = max(longest_s, time.monotonic() - began), turn + 1
    if not found:
        report("no placement could be tried in the time given: the choice is by separate measurements")
        return placement
    trials = tuple(Trial(*names, tuple(values)) for names, values in found.items())
    confirmed = dataclasses.replace(placement, trials=trials)
    fastest = max((c for c in placement.candidates if c.names in found), key=confirmed.tried_score)
    return confirmed.with_choice(**fastest.choice)


class _FailedError(Exception):
    """A program that was tried ended with an error."""


def _name(candidate: Candidate) -> str:
    replay, learner, implementation = candidate.names
    return f"RM on {replay}, {implementation} Learner on {learner}"


def _run(program: Path, limit_s: float) -> float:
    """Experiences that the program trains per second; raises subprocess.TimeoutExpired after `limit_s`."""
    folder = program.with_suffix("")
    command = [sys.executable, str(program), "--bench", "--bench-paced", "--bench-seconds", str(_MEASURED_S)]
    done = subprocess.run(
        [*command, "--run-dir", str(folder)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=limit_s,
    )
    if done.returncode:
        raise _FailedError(done.stdout.strip().splitlines()[-1] if done.stdout.strip() else "it wrote nothing")
    return float(json.loads((folder / "bench.json").read_text(encoding="utf-8"))["measured_eps"])
