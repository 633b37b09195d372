"""Runs that start with the networks of another run, or refuse weights of other networks in words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from policies import CASES, VECTOR, Case, NormalizedPPO, WideDQN, run_folder, trained
from programs import make_program, run
from safetensors.numpy import load_file

import pearl
from pearl.algorithms.trainer import make_trainer
from pearl.backends.cpu.replay import NativeReplayManager
from pearl.errors import PolicyError
from pearl.policy import export_policy
from pearl.policy.warm_start import load_weights_of
from pearl.replay.storage import DataStorage
from pearl.runtime.experience import ReplayExperience
from pearl.runtime.run_state import Best, Counters, RunState
from pearl.runtime.trainer_state import module_tensors, network_groups
from pearl.spec import RETURN_STATISTICS, TransitionSpec


def same(first: Any, second: Any, groups: list[str]) -> bool:
    """Whether all tensors of the groups are equal."""
    one, other = module_tensors(first), module_tensors(second)
    return all(np.array_equal(one[group][name], other[group][name]) for group in groups for name in one[group])


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_all_networks_are_loaded_and_nothing_else(tmp_path: Path, case: Case) -> None:
    source, trainer, untouched = trained(case, seed=5), make_trainer(*case, seed=6), make_trainer(*case, seed=6)
    networks = [group for group in network_groups(source) if group != RETURN_STATISTICS]
    others = [group for group in module_tensors(source) if group not in networks]
    assert not same(source, trainer, networks)
    file = load_weights_of(trainer, run_folder(tmp_path, case, source))
    assert file == str(tmp_path / "weights.safetensors")
    assert same(source, trainer, networks)
    assert same(untouched, trainer, others)


def test_of_a_run_the_best_weights_are_taken_and_a_file_chooses_others(tmp_path: Path) -> None:
    case = CASES["DDPG"]
    last, best, trainer = trained(case, 1), trained(case, 2), trained(case, 3)
    run_folder(tmp_path, case, last, best=best)
    load_weights_of(trainer, tmp_path)
    assert same(best, trainer, network_groups(best))
    load_weights_of(trainer, tmp_path / "weights.safetensors")
    assert same(last, trainer, network_groups(last))


def test_a_run_under_way_has_them_in_its_checkpoint(tmp_path: Path) -> None:
    case = CASES["SAC"]
    last, best, trainer = trained(case, 1), trained(case, 2), trained(case, 3)
    replay, storage = NativeReplayManager(8, seed=1), DataStorage(TransitionSpec.from_spaces(case[1], case[2]), 8)
    state = RunState({}, last, ReplayExperience(replay, storage))
    state.save(tmp_path / "checkpoints", Counters(env_steps=70, gradient_steps=20))
    load_weights_of(trainer, tmp_path)
    assert same(last, trainer, network_groups(last))
    selected = Best(1.0, 3, 50, 10, module_tensors(best))
    state.save(tmp_path / "checkpoints", Counters(env_steps=71, gradient_steps=20), selected)
    load_weights_of(trainer, tmp_path)
    assert same(best, trainer, network_groups(best))


class NarrowDQN(WideDQN):
    hidden_sizes = (8, 24)


class RawPPO(NormalizedPPO):
    normalize_observations = False


@pytest.mark.parametrize(
    ("case", "of", "said"),
    [
        ((NarrowDQN, VECTOR, spaces.Discrete(6)), "DQN", r"q\.0\.bias has the shape \(24,\), not \(8,\)"),
        (
            (WideDQN, VECTOR, spaces.Discrete(6)),
            "dueling DQN",
            r"without q\.2\.bias, .*\.\.\.; also with q\.2\.advantage",
        ),
        ((WideDQN, VECTOR, spaces.Discrete(6)), "normalised DQN", "also with observation_statistics"),
        ((RawPPO, VECTOR, spaces.Discrete(5)), "PPO", "also with networks.observation_mean"),
        (CASES["normalised TD3"], "DDPG", "also with|without"),
        (CASES["SAC"], "PPO", "without"),
    ],
)
def test_weights_of_other_networks_are_named_and_change_nothing(tmp_path: Path, case: Case, of: str, said: str) -> None:
    trainer = make_trainer(*case, seed=3)
    with pytest.raises(PolicyError, match=said) as refusal:
        load_weights_of(trainer, run_folder(tmp_path, CASES[of]))
    assert f"The weights in {tmp_path / 'weights.safetensors'} are those of other networks" in str(refusal.value)
    assert same(trainer, make_trainer(*case, seed=3), network_groups(trainer))


def test_weights_for_other_bounds_are_refused_and_change_nothing(tmp_path: Path) -> None:
    run = run_folder(tmp_path, CASES["SAC"])  # which scales observations and actions by their bounds
    trainer_class, seen, actions = CASES["SAC"]
    assert isinstance(seen, spaces.Box)
    assert isinstance(actions, spaces.Box)
    wide = spaces.Box(actions.low * 20, actions.high * 20, dtype=np.float32)
    other = spaces.Box(seen.low * 2, seen.high * 2, dtype=seen.dtype.type)
    for kind, case in (("action", (trainer_class, seen, wide)), ("observation", (trainer_class, other, actions))):
        trainer = make_trainer(*case, seed=3)
        with pytest.raises(PolicyError, match=rf"of another environment\. Its networks scale {kind}s from bounds of"):
            load_weights_of(trainer, run)
        assert same(trainer, make_trainer(*case, seed=3), network_groups(trainer))


def test_what_is_no_run_and_a_policy_alone_are_refused(tmp_path: Path) -> None:
    case = CASES["normalised TD3"]
    with pytest.raises(PolicyError, match="no run and no weights file at"):
        load_weights_of(trained(case), tmp_path / "absent")
    with pytest.raises(PolicyError, match="saved nothing yet"):
        load_weights_of(trained(case), tmp_path)
    policy = tmp_path / "policy.safetensors"
    export_policy(pearl.load_policy(run_folder(tmp_path, case)), policy, "safetensors")
    with pytest.raises(PolicyError, match=r"policy\.safetensors has the policy alone.*other networks of NormalizedTD3"):
        load_weights_of(trained(case), policy)


def test_a_program_starts_with_them_and_resume_goes_on_from_its_own(tmp_path: Path, quick_profiles: None) -> None:
    program = make_program(tmp_path)
    begin = ("--timesteps", "40", "--eval-episodes", "0", "--run-dir")  # trains nothing
    code, said = run(program, *begin, str(tmp_path / "first"))
    assert code == 0, said
    command = (*begin, str(tmp_path / "second"), "--seed", "7", "--serial")
    code, said = run(program, *command, "--weights-from", str(tmp_path / "first"))
    assert code == 0, said
    assert f"Starting with the weights in {tmp_path / 'first' / 'weights.safetensors'}." in said
    first, second = (load_file(tmp_path / name / "weights.safetensors") for name in ("first", "second"))
    assert all(np.array_equal(first[name], second[name]) for name in first | second)
    code, said = run(program, *command, "--weights-from", str(tmp_path / "absent"), "--resume")
    assert code == 0, said
    code, said = run(program, *command, "--weights-from", str(tmp_path / "absent"))
    assert code == 1
    assert f"Error: There is no run and no weights file at {tmp_path / 'absent'}." in said
