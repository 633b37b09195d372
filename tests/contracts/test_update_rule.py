"""Each algorithm of the table describes itself, and nothing outside `pearl.algorithms` asks for its class."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
import types
from pathlib import Path

import numpy as np
import pytest
from gymnasium import spaces

import composer
import pearl
from pearl.algorithms import ALGORITHMS, Trainer, one_of_algorithms
from pearl.algorithms.update_rule import ClippedStep, RuleStep, UpdateRule, update_rule_of
from pearl.backends import learners

OBS = spaces.Box(-1, 1, (5,), np.float32)
FROM_REPLAY = [name for name, found in ALGORITHMS.items() if found.data_flow() == "replay"]
WITH_STEPS = [name for name in FROM_REPLAY if name not in ("CrossQ", "RecurrentDQN")]  # which only torch trains
FROM_ROLLOUTS = [name for name in ALGORITHMS if name not in (*FROM_REPLAY, "RecurrentPPO")]  # which only torch trains
SPACES = (spaces.Discrete(3), spaces.Box(-2, 2, (2,), np.float32))


def made(trainer_class: type[Trainer], **settings: object) -> Trainer:
    """A trainer for the one of the action spaces that its algorithm takes."""
    for space in SPACES:
        try:
            return trainer_class(OBS, space, **settings)
        except Exception:
            continue
    raise AssertionError(f"{trainer_class.__name__} takes none of {SPACES}")


def rule_of(trainer: object) -> UpdateRule:
    rule = update_rule_of(trainer)
    assert rule is not None
    return rule


@pytest.mark.parametrize("name", WITH_STEPS)
def test_an_algorithm_states_networks_step_and_policy(name: str) -> None:
    trainer = made(ALGORITHMS[name], max_grad_norm=3.0, tau=0.25)
    rule = rule_of(trainer)
    step = rule.step
    assert isinstance(step, RuleStep)
    assert (step.scalars().max_grad_norm, step.scalars().tau) == (3.0, 0.25)
    assert rule.policy.departure is None
    assert rule.policy.module is trainer.policy
    moved = {id(p) for network in rule.networks for p in network.module.parameters()}
    optimized = [part.parameters for part in (step.critics, step.actor) if part is not None]
    assert sum(len(flat._views) for flat in optimized) == len(moved)
    assert (step.actor is None) == (rule.actor is None)
    assert all(critic.target is not None for critic in rule.critics)


@pytest.mark.parametrize("name", WITH_STEPS)
def test_scalars_are_those_of_now(name: str) -> None:
    trainer = made(ALGORITHMS[name])
    step = rule_of(trainer).step
    assert isinstance(step, RuleStep)
    trainer.tau = 0.125  # type: ignore[attr-defined]
    assert step.scalars().tau == 0.125


@pytest.mark.parametrize("name", WITH_STEPS)
@pytest.mark.parametrize("member", ["update_policy", "end_of_step", "finish_step"])
def test_a_step_of_ones_own_has_no_rule_but_the_policy_has(name: str, member: str) -> None:
    base = ALGORITHMS[name]
    own = type("Own", (base,), {member: lambda self, *arguments: getattr(super(own, self), member)(*arguments)})
    rule = rule_of(made(own))
    assert rule.step == f"Own overrides {member}, a part of {name}'s update rule"
    assert rule.policy.departure is None


def members_of_step(base: type[Trainer]) -> dict[str, object]:
    """The methods and properties that a step calls on the trainer, directly or through each other."""
    classes = [kind for kind in base.__mro__ if kind.__module__.startswith("pearl.algorithms")]
    found: dict[str, object] = {}
    waiting = ["update_policy", "end_of_step", "phases", "finish_step"]
    while waiting:
        name = waiting.pop()
        defined = [vars(kind)[name] for kind in classes if name in vars(kind)]
        members = [one for one in defined if isinstance(one, (types.FunctionType, property, staticmethod))]
        if name in found or not members:
            continue
        found[name] = members[0]
        for member in members:
            code = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
            tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
            waiting += [
                n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and ast.unparse(n.value) == "self"
            ]
    return found


@pytest.mark.parametrize("name", WITH_STEPS)
def test_whatever_a_step_calls_may_be_overridden_and_then_there_is_no_rule(name: str) -> None:
    base = ALGORITHMS[name]
    # The noise has a departure of its own; the others describe the trainer, and engines ask for them as they are.
    members = members_of_step(base).keys() - {"draw_noise", "action_size", "device", "gradient_steps", "parts"}
    assert len(members) >= 6
    for member in members:
        inherited = inspect.getattr_static(base, member)
        if isinstance(inherited, property):
            again: object = property(inherited.fget)
        elif isinstance(inherited, staticmethod):
            again = staticmethod(lambda *arguments, inherited=inherited: inherited.__func__(*arguments))
        else:
            again = lambda self, *arguments, inherited=inherited: inherited(self, *arguments)  # noqa: E731
        rule = rule_of(made(type("Own", (base,), {member: again}), hidden_sizes=(8,)))
        assert rule.step == f"Own overrides {member}, a part of {name}'s update rule"


@pytest.mark.parametrize("name", FROM_REPLAY)
def test_a_policy_of_ones_own_is_named(name: str) -> None:
    own = type("Own", (ALGORITHMS[name],), {"get_action": lambda self, obs: obs})
    assert rule_of(made(own)).policy.departure == "Own overrides get_action"


@pytest.mark.parametrize("name", FROM_ROLLOUTS)
def test_an_algorithm_of_rollouts_states_both_networks_and_its_step(name: str) -> None:
    trainer = made(ALGORITHMS[name], max_grad_norm=3.0)
    rule = rule_of(trainer)
    assert isinstance(rule.step, ClippedStep)
    assert rule.step.scalars()["max_grad_norm"] == 3.0
    trainer.max_grad_norm = 2.0  # type: ignore[attr-defined]
    assert rule.step.scalars()["max_grad_norm"] == 2.0
    assert rule.policy.departure is None
    assert rule.policy.module is trainer.policy
    assert rule.policy.value is not None
    assert [network.name for network in rule.networks] == ["policy", "value"]
    own = type("Own", (ALGORITHMS[name],), {"explore": lambda self, *arguments: arguments})
    assert rule_of(made(own)).policy.departure == "Own overrides explore"
    own = type("Own", (ALGORITHMS[name],), {"loss": lambda self, minibatch: minibatch})
    assert rule_of(made(own)).step == "Own overrides loss, a part of PPO's update rule"


@pytest.mark.parametrize("name", FROM_ROLLOUTS)
def test_learners_that_sample_a_replay_refuse_an_algorithm_of_rollouts(name: str) -> None:
    trainer = made(ALGORITHMS[name])
    engines = {found: made_ for found, made_ in learners().items() if found != "torch"}  # which makes any step
    refusals = {found: made_.supports(trainer) for found, made_ in engines.items()}
    assert refusals == dict.fromkeys(refusals, f"{name}, which trains on rollouts, not on samples of a replay")


def test_names_are_listed_from_the_table() -> None:
    everything = "DQN, QRDQN, RecurrentDQN, DDPG, TD3, SAC, REDQ, DroQ, CrossQ, TQC, PPO, A2C or RecurrentPPO"
    assert one_of_algorithms() == everything
    assert one_of_algorithms("Discrete") == "DQN, QRDQN, RecurrentDQN, PPO, A2C or RecurrentPPO"
    assert one_of_algorithms("Box") == "DDPG, TD3, SAC, REDQ, DroQ, CrossQ, TQC, PPO, A2C or RecurrentPPO"
    assert one_of_algorithms("MultiDiscrete") == one_of_algorithms("MultiBinary") == "PPO, A2C or RecurrentPPO"
    assert all(name in pearl.algorithms.__dict__ for name in ALGORITHMS)


def test_nothing_else_asks_for_an_algorithms_class() -> None:
    modules = {found.__module__ for found in ALGORITHMS.values()} | {"pearl.algorithms.actor_critic"}
    names = "|".join(ALGORITHMS)
    asked = re.compile(
        rf"from ({'|'.join(map(re.escape, modules))}) import|from pearl\.algorithms import .*\b({names})\b"
        rf"|isinstance\([^)]*\b({names}|ActorCritic|TwinCriticTrainer)\b"
    )
    found = set()
    for package in (pearl, composer):
        root = Path(str(package.__file__)).parent
        for path in root.rglob("*.py"):
            name = f"{root.name}/{path.relative_to(root)}"
            if not name.startswith("pearl/algorithms/") and asked.search(path.read_text(encoding="utf-8")):
                found.add(name)
    assert found == set()
