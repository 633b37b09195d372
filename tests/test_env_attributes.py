"""Callbacks set attributes of the Actors' environments, and later Actors begin with them."""

from __future__ import annotations

import dataclasses
import json
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from curriculum import STEPS, Rising, Stairs
from programs import make_program, run
from trainers import TinyDQN

from pearl.actors.actor import ActorSetup
from pearl.actors.notices import Notices, attribute_queue, write_attributes
from pearl.actors.process import ActorGroup
from pearl.actors.rollout_actor import make_actor
from pearl.algorithms.trainer import transition_of
from pearl.errors import ConfigurationError, EnvError
from pearl.ipc.queues import WeightSyncQueue
from pearl.runtime.env_attributes import EnvAttributes
from pearl.runtime.queues import DataCollectionQueue
from pearl.runtime.run_context import Context
from pearl.runtime.run_state import Counters
from pearl.runtime.serial import InlineActor
from pearl.spec import ActorSpec, TrainSpec

PATIENCE_S = 60.0


class RisingDQN(TinyDQN):
    callbacks = (Rising(),)


class Doubled(gym.Wrapper[Any, Any, Any, Any]):
    """Has an attribute of its own."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        self.factor = 2.0


def setup_of(vectorization: str) -> ActorSetup:
    spec = ActorSpec(Stairs, envs_per_actor=2, vectorization=vectorization)
    env = Stairs()
    transition = transition_of(TinyDQN, env.observation_space, env.action_space)
    return ActorSetup(TinyDQN, {}, spec, TrainSpec(n_step=1), seed=0, transition=transition)


def queue_of(setup: ActorSetup) -> DataCollectionQueue:
    assert setup.transition is not None
    return DataCollectionQueue(setup.transition, setup.message_rows(), 2)


def levels(queue: DataCollectionQueue) -> list[float]:
    """The levels in which the steps of the next message were made."""
    deadline = time.monotonic() + PATIENCE_S
    while (peeked := queue.peek(0.1)) is None:
        assert time.monotonic() < deadline
    message, rows = peeked
    found = sorted(set(message["reward"][:rows].tolist()))
    queue.release()
    return found


@pytest.fixture
def attributes() -> Iterator[EnvAttributes]:
    made = EnvAttributes(ActorSpec(Stairs, wrappers=((Doubled, {}),)))
    yield made
    made.close()


# --- what may be set --------------------------------------------------------------------------------------------------


def test_attributes_add_up_and_are_those_of_the_environment_or_a_wrapper(attributes: EnvAttributes) -> None:
    attributes.set({"level": 2, "most": 7})
    attributes.set({"factor": 3.0, "level": 4})
    assert attributes.values == {"level": 4, "most": 7, "factor": 3.0}
    assert Notices(None, attributes.queue.reader()).newest_attributes() == attributes.values


def test_what_a_callback_does_to_the_values_it_reads_changes_nothing(attributes: EnvAttributes) -> None:
    attributes.set({"level": [1, 2]})
    attributes.values["level"].append(3)
    assert attributes.values == {"level": [1, 2]}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"levle": 2}, "no attribute 'levle' that can be set"),
        ({"step": 2}, "no attribute 'step' that can be set"),
        ({"_played": 2}, "no attribute '_played' that can be set"),
        ({"observation_space": 2}, "no attribute 'observation_space' that can be set"),
        ({"env": 2}, "no attribute 'env' that can be set"),
        ({"most": 0}, "does not take most=0: .*at least one step"),
        ({"half": 1.0}, "does not take half=1.0"),
    ],
)
def test_what_the_environment_lacks_or_refuses_is_named(
    attributes: EnvAttributes, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(EnvError, match=f"Stairs.*{message}"):
        attributes.set(values)
    assert attributes.values == {}
    assert attributes.queue.reader().poll() is None


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.ones(2), r"level=array\(\[1., 1.\]\)"),
        ({1, 2}, r"level=\{1, 2\}"),
        ([{1: 0.5}], "keys .* must be texts, not int"),
        ("x" * 9000, "take 9,0"),
    ],
)
def test_what_cannot_be_sent_is_named(attributes: EnvAttributes, value: object, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        attributes.set({"level": value})


def test_vectors_whose_environments_are_out_of_reach_are_named() -> None:
    attributes = EnvAttributes(ActorSpec("CartPole-v1", vectorization="vector_entry_point"))
    with pytest.raises(ConfigurationError, match=r'vectorization="vector_entry_point".*Choose "sync" or "async"'):
        attributes.set({"gravity": 5.0})


def test_a_run_says_what_has_changed_alone(attributes: EnvAttributes) -> None:
    said: list[str] = []
    parts = {"env_attributes": attributes, "report": types.SimpleNamespace(say=said.append)}
    run: Any = Context(types.SimpleNamespace(**parts, counters=Counters(env_steps=1200)))  # type: ignore[arg-type]
    run.set_env_attributes()
    run.set_env_attributes(level=np.float64(2), most=7)
    run.set_env_attributes(level=2.0)
    run.set_env_attributes(level=2.0, most=8)
    begin = "From step 1,200 on, the environments of the Actors have"
    assert said == [f"{begin} level=2.0, most=7.", f"{begin} most=8."]


# --- Actors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_environments_change_between_messages_and_new_ones_begin_changed(vectorization: str) -> None:
    queue = attribute_queue()
    setup = setup_of(vectorization)
    actor = make_actor(dataclasses.replace(setup, env_attributes={"level": 5.0}))
    try:
        assert actor.envs.get_attr("level") == (5.0, 5.0)  # type: ignore[attr-defined]
        notices = Notices(None, queue.reader())
        notices.tell(actor)
        write_attributes(queue, {"level": [6.0]}, {"level": 1})
        notices.tell(actor)
        assert actor.envs.get_attr("level") == ([6.0], [6.0])  # type: ignore[attr-defined]
    finally:
        actor.close()


def test_attributes_that_an_environment_changes_itself_stay_until_they_are_set_again(attributes: EnvAttributes) -> None:
    attributes.set({"level": 5.0, "most": 9})
    notices = Notices(None, attributes.queue.reader())
    actor = make_actor(dataclasses.replace(setup_of("sync"), env_attributes=notices.newest_attributes()))
    try:
        found = []
        for values in ({"most": 7}, {"level": 5.0}):
            actor.envs.set_attr("level", 6.0)  # type: ignore[attr-defined]
            attributes.set(values)
            notices.tell(actor)
            found.append((actor.envs.get_attr("level"), actor.envs.get_attr("most")))  # type: ignore[attr-defined]
        assert found == [((6.0, 6.0), (7, 7)), ((5.0, 5.0), (7, 7))]
    finally:
        actor.close()
    assert list(Notices(None, attributes.queue.reader()).newest_attributes()) == ["most", "level"]  # as they were set


def test_an_inline_actor_and_its_successor_have_them() -> None:
    setup, queue = setup_of("sync"), attribute_queue()
    dcq = queue_of(setup)
    actor = InlineActor(setup, dcq, WeightSyncQueue(8), Notices(None, queue))
    seen = []
    for level in (None, 2.0, None):
        if level is not None:
            write_attributes(queue, {"level": level}, {"level": 1})
        actor.run_once()
        seen.append(levels(dcq))
    successor = actor.restarted(8)
    successor.run_once()
    seen.append(levels(dcq))
    successor.close()
    assert seen == [[1.0], [1.0], [2.0], [2.0]]  # the second one ends the episodes of the first


def test_a_process_that_is_restarted_begins_with_them() -> None:
    setup, queue = setup_of("async"), attribute_queue()
    dcq = queue_of(setup)
    group = ActorGroup([setup], [dcq], WeightSyncQueue(8), notices=Notices(None, queue))
    deadline = time.monotonic() + PATIENCE_S
    try:
        write_attributes(queue, {"level": 2.0}, {"level": 1})
        while levels(dcq) != [2.0]:
            assert time.monotonic() < deadline
        group._running[0].process.kill()
        while not group.restarts:
            assert time.monotonic() < deadline
            group.check(0)
        while dcq.peek(0.0) is not None:  # of the one that is dead
            dcq.release()
        assert levels(dcq) == [2.0]
    finally:
        group.stop(0.5)


# --- programs ---------------------------------------------------------------------------------------------------------


def test_a_callback_changes_the_environments_of_a_run_and_of_one_that_goes_on(
    tmp_path: Path, quick_profiles: None
) -> None:
    program = make_program(tmp_path, trainer=RisingDQN, env=Stairs, timesteps=800)
    folder = tmp_path / "run"
    code, output = run(program, "--run-dir", str(folder), "--eval-episodes", "2", "--serial")
    assert code == 0, output
    assert "the environments of the Actors have level=3.0." in output
    assert json.loads((folder / "stairs.json").read_text()) == {
        "began with": {},
        "have": {"level": 3.0},
        "mean": 3.0 * STEPS,
    }
    assert f"{STEPS}.0" in (folder / "evaluations.csv").read_text()  # evaluations stay as they were
    code, output = run(program, "--run-dir", str(folder), "--eval-episodes", "2", "--resume", "--timesteps", "1600")
    assert code == 0, output
    assert json.loads((folder / "stairs.json").read_text()) == {
        "began with": {"level": 3.0},
        "have": {"level": 3.0},
        "mean": 3.0 * STEPS,
    }
