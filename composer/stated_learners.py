"""Reads the user's settings for the number of Learners and their nodes (`Composer.set_learners`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pearl.backends import AUTO
from pearl.errors import ConfigurationError
from pearl.spec import ONE_LEARNER, Nodes


def stated_learners(count: int | str, average_every: int | str, overlap: int) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The first values for `LearnersSpec`, and the names of those that the composer chooses ("auto").

    Raises ConfigurationError for another text.
    """
    given = {"count": count, "average_every": average_every}
    for name, value in given.items():
        if isinstance(value, str) and value != AUTO:
            raise ConfigurationError(
                f'{name} of set_learners ([learners]) must be a whole number, or "auto"; found {value!r}.'
            )
    auto = tuple(name for name, value in given.items() if value == AUTO and count != 1)
    start = {"count": ONE_LEARNER.count, "average_every": ONE_LEARNER.average_every}
    if isinstance(overlap, int):
        start["average_every"] = max(start["average_every"], overlap)  # which has at most so many
    return {name: start[name] if value == AUTO else value for name, value in given.items()}, auto


def stated_nodes(nodes: object, count: int | str) -> Nodes:
    """The nodes of Learners, as a program has them; ConfigurationError unless names are mapped to numbers."""
    if nodes is None:
        return ()
    if not isinstance(nodes, Mapping) or isinstance(count, str):
        raise ConfigurationError(
            "nodes of set_learners ([learners]) maps names of nodes to how many of a stated count of Learners each "
            f'has, such as {{"": 1, "10.0.0.2": 2}}; found {nodes!r} with a count of {count!r}.'
        )
    if count == 1:
        raise ConfigurationError(
            f"One Learner stays with its replay on the machine of the run: nodes are for several; found {nodes!r}."
        )
    return tuple((name, number) for name, number in nodes.items() if number != 0)
