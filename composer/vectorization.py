"""Chooses how Actors step several environments where that is left to the composer (`vectorization="auto"`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from pearl.actors.environment import probe
from pearl.actors.vectorization import VECTORIZATIONS, is_game
from pearl.errors import EnvError
from pearl.spec import ActorSpec

_WORTH_IT = 1.05  # a smaller gain may be noise

Say = Callable[[str], None]


def first_choice(actors: ActorSpec) -> ActorSpec:
    """The kind that the others must agree with: ale-py's vector for a game whose frames nothing else prepares."""
    try:
        known = VECTORIZATIONS["atari"].find(actors)
    except EnvError:  # without ale-py there are no games
        known = None
    preprocessed = known is not None and is_game(known) and isinstance(actors.env, str) and not actors.wrappers
    return dataclasses.replace(actors, vectorization="atari" if preprocessed else "sync")


def fastest(first: ActorSpec, measure: Callable[[ActorSpec], float], say: Say) -> ActorSpec:
    """The kind with the least microseconds of a transition (`measure`), of those that make the same environment.

    That is, of those with the spaces of `first`. A kind that fails is named and left out.
    """
    if first.vectorization == "atari":  # the others show other frames
        say("vectorization: atari, ale-py's vector with its preprocessing of frames")
        return first
    wanted = probe(first)
    found: dict[str, tuple[float, ActorSpec]] = {first.vectorization: (measure(first), first)}
    out: list[str] = []
    for kind in VECTORIZATIONS:
        if kind in (first.vectorization, "atari"):
            continue
        other = dataclasses.replace(first, vectorization=kind)  # type: ignore[arg-type]
        try:
            probed = probe(other)
            if (probed.observation_space, probed.action_space) != (wanted.observation_space, wanted.action_space):
                out.append(f"{kind}: its spaces differ")
                continue
            found[kind] = measure(other), other
        except EnvError as error:
            out.append(f"{kind}: {str(error).splitlines()[0].split('. ')[0].rstrip('.')}")
    best = min(found, key=lambda kind: found[kind][0])
    if found[best][0] * _WORTH_IT > found[first.vectorization][0]:
        best = first.vectorization
    times = ", ".join(f"{kind} {us:,.1f}" for kind, (us, _) in sorted(found.items(), key=lambda item: item[1][0]))
    say(f"vectorization: {best}, by microseconds per transition of the Actors alone ({times})")
    for reason in out:
        say(f"vectorization: not {reason}")
    return found[best][1]
