"""Values that describe a run: what they refuse, and what they say about it."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from pearl.errors import ConfigurationError
from pearl.replay import Constant, Linear
from pearl.spec import (
    ActorSpec,
    FieldSpec,
    LayerSpec,
    NetworkSpec,
    ReplaySpec,
    TrainSpec,
    TransitionSpec,
    check_batch_fits,
)

FLAT = spaces.Box(-1.0, 1.0, (3,), np.float32)


def layer(kind: str, out: tuple[int, ...], parameters: int = 0, macs: int = 0) -> LayerSpec:
    return LayerSpec(kind, kind, (4,), out, (-1,), parameters, macs)


# --- what is refused: the message names the field, what was expected and what was found -------------------------------


@pytest.mark.parametrize(
    ("settings", "named", "expected", "found"),
    [
        ({"capacity": 0}, "capacity", "at least 1", "0"),
        ({"capacity": 1.5}, "capacity", "whole number", "1.5"),
        ({"capacity": "many"}, "capacity", "whole number", "'many'"),
        ({"mode": "random"}, "mode", '"prioritized" or "uniform"', "'random'"),
        ({"fanout": 12}, "Fanout", "power of two from 2 to 256", "12"),
        ({"fanout": 1}, "Fanout", "power of two from 2 to 256", "1"),
        ({"fanout": 512}, "Fanout", "power of two from 2 to 256", "512"),
        ({"fanout": -16}, "Fanout", "power of two from 2 to 256", "-16"),
        ({"fanout": 16.0}, "Fanout", "power of two from 2 to 256", "16.0"),
        ({"fanout": "most"}, "Fanout", '"auto"', "'most'"),
        ({"alpha": -0.1}, "alpha", "[0, 4]", "-0.1"),
        ({"alpha": math.nan}, "alpha", "[0, 4]", "nan"),
        ({"beta": 4.5}, "beta", "[0, 4]", "4.5"),
        ({"beta_final": -1.0}, "beta_final", "[0, 4]", "-1.0"),
        ({"alpha": "0.6"}, "alpha", "a number or a schedule", "'0.6'"),
        ({"beta_final": Constant(1.0)}, "beta_final", "Give a number.", "Constant(value=1.0)"),
        ({"storage": "disk"}, "replay's storage", '"ram", "memmap" or "shared"', "'disk'"),
        ({"share_next_obs": 1}, "share_next_obs", "True or False", "1"),
    ],
)
def test_a_replay_that_cannot_be(settings: dict[str, Any], named: str, expected: str, found: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        ReplaySpec(**{"capacity": 1000, **settings})
    message = str(error.value)
    assert message.startswith((named, "Replay " + named, "The " + named))
    assert expected in message
    assert f"found {found}" in message


@pytest.mark.parametrize(
    ("name", "schedule", "step"), [("alpha", Linear(5.0, 1.0, 100), 0), ("beta", Linear(1.0, -1.0, 100), 10**15)]
)
def test_a_schedule_of_an_exponent_lies_in_its_range_at_both_ends(name: str, schedule: Linear, step: int) -> None:
    with pytest.raises(ConfigurationError, match=rf"{name} must lie in \[0, 4\] at every step.*at {step}"):
        ReplaySpec(1000, **{name: schedule})


def test_a_beta_that_is_a_schedule_has_no_other_end() -> None:
    assert ReplaySpec(1000, beta=Constant(0.5)).beta == Constant(0.5)
    with pytest.raises(ConfigurationError, match="leave one out"):
        ReplaySpec(1000, beta=Constant(0.5), beta_final=0.7)


@pytest.mark.parametrize("fanout", [2, 4, 8, 16, 32, 64, 128, 256, "auto"])
def test_every_fanout_of_the_contract_is_taken(fanout: Any) -> None:
    assert ReplaySpec(1000, fanout=fanout).fanout == fanout


@pytest.mark.parametrize(
    ("settings", "named", "expected", "found"),
    [
        ({"env": ""}, "environment", "Gymnasium id", "''"),
        ({"env": 7}, "environment", "Gymnasium id", "7"),
        ({"count": 0}, "count", "at least 1", "0"),
        ({"count": True}, "count", "whole number", "True"),
        ({"envs_per_actor": 2.0}, "envs_per_actor", "whole number", "2.0"),
        ({"envs_per_actor": -1}, "envs_per_actor", "at least 1", "-1"),
        ({"vectorization": "threads"}, "vectorization", "sync, async, vector_entry_point", "'threads'"),
    ],
)
def test_actors_that_cannot_be(settings: dict[str, Any], named: str, expected: str, found: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        ActorSpec(**{"env": "CartPole-v1", **settings})
    message = str(error.value)
    assert named in message.split(";")[0]
    assert expected in message
    assert f"found {found}" in message


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("batch_size", 0, "at least 1"),
        ("batch_size", 32.0, "whole number"),
        ("batch_size", True, "whole number"),
        ("learning_starts", -1, "at least 0"),
        ("priority_update_delay", -1, "at least 0"),
        ("n_step", 0, "at least 1"),
        ("weight_sync_interval", 0, "at least 1"),
        ("replay_ratio", 0.0, "a number above 0, at most 1e6, or inf"),
        ("replay_ratio", -2.0, "a number above 0, at most 1e6, or inf"),
        ("replay_ratio", math.nan, "a number above 0, at most 1e6, or inf"),
        ("gamma", 1.01, "[0, 1]"),
        ("gamma", -0.5, "[0, 1]"),
        ("gamma", math.nan, "[0, 1]"),
    ],
)
def test_a_schedule_that_cannot_be(name: str, value: float, expected: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        TrainSpec(**{name: value})  # type: ignore[arg-type]
    message = str(error.value)
    assert message.startswith(name)
    assert expected in message
    assert f"found {value!r}" in message


def test_the_edges_of_a_schedule_are_taken() -> None:
    edge = TrainSpec(1, math.inf, 0, 0, 1.0, 1, 1)
    assert dataclasses.replace(edge, gamma=0.0).gamma == 0.0


def test_specs_do_not_change_after_their_check() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        ReplaySpec(10).capacity = 0  # type: ignore[misc]


def test_a_batch_must_fit_the_replay() -> None:
    check_batch_fits(ReplaySpec(64), TrainSpec(batch_size=64))
    with pytest.raises(ConfigurationError, match=r"batch of 65 .* replay of 64 slots.*Lower batch_size or raise"):
        check_batch_fits(ReplaySpec(64), TrainSpec(batch_size=65))


def test_environments_are_counted_over_all_actors() -> None:
    assert ActorSpec("CartPole-v1", count=3, envs_per_actor=5).env_count == 15


# --- transitions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("observations", "actions", "obs", "action"),
    [
        (FLAT, spaces.Discrete(4), ((3,), "float32"), ((), "int64")),
        (FLAT, spaces.Discrete(4, start=1), ((3,), "float32"), ((), "int64")),
        (FLAT, spaces.MultiDiscrete([2, 3]), ((3,), "float32"), ((2,), "int64")),
        (FLAT, spaces.Box(-2.0, 2.0, (2, 2), np.float64), ((3,), "float32"), ((2, 2), "float32")),
        (spaces.Box(-1.0, 1.0, (3,), np.float64), FLAT, ((3,), "float32"), ((3,), "float32")),
        (spaces.Box(0, 255, (4, 84, 84), np.uint8), spaces.Discrete(6), ((4, 84, 84), "uint8"), ((), "int64")),
        (spaces.Box(0, 9, (2,), np.int32), spaces.Discrete(2), ((2,), "float32"), ((), "int64")),
        (spaces.Discrete(16), spaces.Discrete(4), ((), "float32"), ((), "int64")),
    ],
)
def test_columns_follow_the_spaces(
    observations: gym.Space[Any],
    actions: gym.Space[Any],
    obs: tuple[tuple[int, ...], str],
    action: tuple[tuple[int, ...], str],
) -> None:
    assert TransitionSpec.from_spaces(observations, actions).fields == (
        FieldSpec("obs", *obs),
        FieldSpec("action", *action),
        FieldSpec("reward", (), "float32"),
        FieldSpec("next_obs", *obs),
        FieldSpec("discount", (), "float32"),
    )


@pytest.mark.parametrize(
    ("observations", "actions", "wrapper"),
    [
        (spaces.Dict({"a": FLAT}), spaces.Discrete(2), "gymnasium.ObservationWrapper"),
        (spaces.Tuple((FLAT, FLAT)), spaces.Discrete(2), "gymnasium.ObservationWrapper"),
        (FLAT, spaces.Tuple((FLAT, spaces.Discrete(2))), "ActionWrapper"),
    ],
)
def test_spaces_that_are_no_arrays_are_refused_with_a_way_out(
    observations: gym.Space[Any], actions: gym.Space[Any], wrapper: str
) -> None:
    strange = observations if observations.shape is None else actions
    message = (
        rf"that are arrays: Box, Discrete, MultiDiscrete or MultiBinary; found {re.escape(str(strange))}.*{wrapper}"
    )
    with pytest.raises(ConfigurationError, match=message):
        TransitionSpec.from_spaces(observations, actions)


def test_bytes_of_a_transition() -> None:
    images = TransitionSpec.from_spaces(spaces.Box(0, 255, (4, 84, 84), np.uint8), spaces.Discrete(6))
    assert images.nbytes == 2 * 4 * 84 * 84 + 8 + 4 + 4
    pendulum = TransitionSpec.from_spaces(FLAT, spaces.Box(-2.0, 2.0, (1,), np.float32))
    assert pendulum.nbytes == 2 * 3 * 4 + 4 + 4 + 4
    columns = pendulum.empty(10)
    assert sum(column.nbytes for column in columns.values()) == 10 * pendulum.nbytes
    assert {name: (c.shape, str(c.dtype)) for name, c in columns.items()} == {
        "obs": ((10, 3), "float32"),
        "action": ((10, 1), "float32"),
        "reward": ((10,), "float32"),
        "next_obs": ((10, 3), "float32"),
        "discount": ((10,), "float32"),
    }


def test_columns_differ_in_name() -> None:
    with pytest.raises(ConfigurationError, match=r"differ in name; found \['obs', 'obs'\]"):
        TransitionSpec((FieldSpec("obs", (1,), "float32"), FieldSpec("obs", (2,), "float32")))


# --- networks ---------------------------------------------------------------------------------------------------------


def test_a_network_sums_its_layers() -> None:
    network = NetworkSpec(
        "q", (4,), (2,), (layer("linear", (8,), 40, 32), layer("relu", (8,)), layer("linear", (2,), 18, 16))
    )
    assert network.parameters == 58
    assert network.macs == 48
    assert NetworkSpec("none", (4,), (4,), ()).macs == 0


def test_a_signature_tells_structures_apart_and_nothing_else() -> None:
    network = NetworkSpec("q", (4,), (2,), (layer("linear", (8,)), layer("relu", (8,)), layer("linear", (2,))))
    assert dataclasses.replace(network, name="other").signature == network.signature
    others = [
        dataclasses.replace(network, input_shape=(5,)),
        dataclasses.replace(network, layers=network.layers[:2]),
        dataclasses.replace(network, layers=(layer("linear", (16,)), *network.layers[1:])),
        dataclasses.replace(network, layers=(layer("linear", (8,), parameters=40), *network.layers[1:])),
        dataclasses.replace(network, layers=(network.layers[0], layer("tanh", (8,)), network.layers[2])),
    ]
    assert len({network.signature, *(other.signature for other in others)}) == 6
