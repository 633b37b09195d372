"""The trainer's contract, for every algorithm of the table alike, and for the one of test_one_file_algorithm.py."""

from __future__ import annotations

import csv
import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from programs import make_program, run
from references import BOX, DISCRETE, OBS, ROWS, all_tensors, columns_of, each_device, estranged
from references import batch_of as common_batch_of
from test_one_file_algorithm import C51
from trainers import TinyCrossQ, TinyDroQ, TinySAC, TinyTD3

from pearl.algorithms import ALGORITHMS, SAC, TD3, Batch, Trainer, make_trainer, one_of_algorithms
from pearl.algorithms.on_policy import Minibatch, rollout_transition
from pearl.algorithms.trainer import batch_type_of, modules_of, policy_tensors, transition_of
from pearl.errors import EnvError, TrainerError
from pearl.learner.torch_learner import TorchLearner
from pearl.replay.synthetic import random_transitions
from pearl.runtime.trainer_state import load_module_tensors, module_tensors
from pearl.spec import TrainSpec

TRAINERS: dict[str, type[Trainer]] = {**ALGORITHMS, "C51": C51}
each_trainer = pytest.mark.parametrize("name", TRAINERS)
FROM_REPLAY = [name for name, found in TRAINERS.items() if found.data_flow() == "replay"]
each_replay_trainer = pytest.mark.parametrize("name", FROM_REPLAY)
OF_SEQUENCES = ("RecurrentDQN",)
each_of_independent_rows = pytest.mark.parametrize(
    "name", [n for n in FROM_REPLAY if TRAINERS[n]._rows_are_independent]
)


def actions_of(name: str) -> spaces.Space[Any]:
    return BOX if TRAINERS[name]._action_kinds == ("Box",) else DISCRETE


def made(name: str, **settings: Any) -> Any:
    return make_trainer(TRAINERS[name], OBS, actions_of(name), settings={"hidden_sizes": (8,), **settings})


def batch_of(name: str, seed: int = 0, rows: int = ROWS) -> tuple[Batch, torch.Tensor]:
    """Random transitions with the columns that the algorithm declares, and importance weights."""
    batch, weights = common_batch_of(actions_of(name), seed, rows)
    generator = torch.Generator().manual_seed(seed)
    if TRAINERS[name].data_flow() == "rollout":
        numbers = torch.randn(4, rows, generator=generator)
        minibatch = Minibatch(batch.obs, batch.action, numbers[0] - 1.0, *numbers[1:])
        if (sequences := rollout_transition(TRAINERS[name], OBS, actions_of(name), {}).rollout_sequences) is not None:
            begins = torch.rand(rows, generator=generator) < 0.2
            minibatch = minibatch._replace(begins=begins, state=torch.zeros(rows // 4, sequences.state_size))
        return minibatch, weights  # type: ignore[return-value]
    spec = transition_of(TRAINERS[name], OBS, actions_of(name))
    if spec.sequence is not None:
        columns = random_transitions(spec, actions_of(name), TrainSpec(), rows, np.random.default_rng(seed))
        columns["position"] = np.arange(rows) % 2  # half of them begin an episode
        sequences = (torch.from_numpy(columns[field]) for field in batch_type_of(made(name))._fields)
        return batch_type_of(made(name))(*sequences), weights
    declared = spec.fields[len(batch) :]
    more = [torch.rand((rows, *field.shape), generator=generator) for field in declared]
    return batch_type_of(made(name))(*batch, *more), weights


def trained(trainer: Any, name: str, seeds: range = range(3)) -> list[torch.Tensor]:
    return [trainer.update_policy(*batch_of(name, seed)) for seed in seeds]


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(a is b or torch.equal(a, b) for a, b in zip(one, other, strict=True))  # None: no action masks


# --- actions ----------------------------------------------------------------------------------------------------------

WIDE = spaces.Box(-np.float32(5e4), np.float32(1e5), (2, 2), np.float32)


@each_trainer
@pytest.mark.parametrize("wide", [False, True])
def test_actions_fill_their_space_and_never_leave_it(name: str, wide: bool) -> None:
    actions = actions_of(name)
    if wide:
        actions = WIDE if actions is BOX else spaces.Discrete(7)
    trainer = estranged(TRAINERS[name], actions)
    with torch.no_grad():
        assert trainer.get_action(torch.zeros(1, 6)).shape == (1, *actions.shape)
        action = trainer.get_action(torch.randn(500, 6) * 100).numpy()
    assert action.shape == (500, *actions.shape)
    assert action.dtype == actions.dtype
    if isinstance(actions, spaces.Discrete):
        assert set(action.tolist()) <= set(range(int(actions.n)))
        assert len(set(action.tolist())) > 1
    else:
        assert isinstance(actions, spaces.Box)
        assert (action >= actions.low).all()
        assert (action <= actions.high).all()
        assert (np.ptp(action, axis=0) > 0.9 * (actions.high - actions.low)).all()


# --- the update -------------------------------------------------------------------------------------------------------


@each_trainer
def test_a_step_moves_the_policy_and_gives_each_row_a_priority(name: str) -> None:
    trainer = made(name)
    before = [parameter.detach().clone() for parameter in trainer.policy.parameters()]
    batch, weights = batch_of(name)
    steps = max(2, getattr(trainer, "policy_delay", 1))
    for _ in range(steps):
        priorities = trainer.update_policy(batch, weights)
        assert (priorities.shape, priorities.dtype) == ((ROWS,), torch.float32)
        assert not priorities.requires_grad
        assert bool((priorities >= 0).all())
        assert bool(priorities.isfinite().all())
    assert trainer.gradient_steps == steps
    assert all(not torch.equal(a, b) for a, b in zip(before, trainer.policy.parameters(), strict=True))
    assert equal(list(batch), list(batch_of(name)[0])), "the batch is the caller's"
    assert all(math.isfinite(value) for value in trainer.metrics().values())


@pytest.mark.parametrize(
    "name", [n for n in FROM_REPLAY if TRAINERS[n]._rows_are_independent and n not in OF_SEQUENCES]
)
def test_a_discount_of_zero_stops_the_bootstrap(name: str) -> None:
    batch, weights = batch_of(name)
    ended, went_on = (batch._replace(discount=torch.full((ROWS,), discount)) for discount in (0.0, 0.9))
    assert bool(ended.terminated.all())

    def priorities(batch: Batch) -> torch.Tensor:
        return estranged(TRAINERS[name], actions_of(name)).update_policy(batch, weights)  # type: ignore[no-any-return]

    torch.testing.assert_close(priorities(ended), priorities(ended._replace(next_obs=batch.next_obs * 100 - 7)))
    assert not torch.allclose(priorities(went_on), priorities(went_on._replace(next_obs=batch.next_obs * 3)))


@each_of_independent_rows
def test_a_weight_of_zero_takes_a_transition_out_of_the_td_loss(name: str) -> None:
    batch, weights = batch_of(name)
    other, _ = batch_of(name, seed=9)
    weights[ROWS // 2 :] = 0
    mixed = type(batch)(*(torch.cat((x[: ROWS // 2], y[ROWS // 2 :])) for x, y in zip(batch, other, strict=True)))
    gradients = []
    for rows in (batch, mixed):
        trainer = estranged(TRAINERS[name], actions_of(name))
        trainer.phases[0].compute(rows, weights, ROWS)
        parameters = [p for module in modules_of(trainer).values() for p in module.parameters()]
        gradients.append([p.grad for p in parameters if p.grad is not None and bool(p.grad.any())])
    assert gradients[0]
    for found, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)


@each_device
@each_of_independent_rows
@pytest.mark.parametrize("sub_batches", [2, 3])
def test_sub_batches_train_as_the_whole_batch(name: str, sub_batches: int, device: str) -> None:
    if name == "C51" and device != "cpu":
        pytest.skip("C51 keeps its atoms on the CPU")
    settings: dict[str, Any] = {"hidden_sizes": (32, 16)}
    if hasattr(TRAINERS[name], "max_grad_norm"):
        settings["max_grad_norm"] = 0.5
    trainers = [TRAINERS[name](OBS, actions_of(name), seed=1, device=device, **settings) for _ in range(2)]
    learners = [TorchLearner(t, device=device, sub_batches=n) for t, n in zip(trainers, (1, sub_batches), strict=True)]
    for learner in learners:
        learner.prepare()
    for step in range(4):
        batch, weights = batch_of(name, step, rows=50)  # 3 does not divide it
        whole, parts = (learner.step(columns_of(batch), weights.numpy()) for learner in learners)
        np.testing.assert_allclose(parts.priorities, whole.priorities, rtol=1e-4, atol=1e-5)
        for metric, value in whole.metrics.items():
            if name != "C51":  # it logs the loss of its last sub-batch
                assert parts.metrics[metric] == pytest.approx(value, rel=1e-4, abs=1e-6)
    expected, found = (all_tensors(trainer) for trainer in trainers)
    for tensor_name, tensor in expected.items():
        difference = float((found[tensor_name] - tensor).norm() / tensor.norm().clamp(min=1e-12))
        # Adam divides by the gradient's own size: where that is nearly 0, summation order shows.
        assert difference <= (1e-6 if device == "cpu" else 1e-4), tensor_name


@each_trainer
def test_the_seed_decides_weights_and_steps_and_the_programs_random_numbers_do_not(name: str) -> None:
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    first, again, other = (TRAINERS[name](OBS, actions_of(name), seed=seed) for seed in (5, 5, 6))
    assert equal(policy_tensors(first), policy_tensors(again))
    assert not equal(policy_tensors(first), policy_tensors(other))
    found = trained(first, name)
    assert torch.equal(torch.rand(3), expected), "it drew from the program's random numbers"
    assert equal(found, trained(again, name))


@each_trainer
def test_a_restored_trainer_goes_on_to_the_bit(name: str) -> None:
    trainer, twin = (TRAINERS[name](OBS, actions_of(name), seed=seed) for seed in (1, 2))
    trained(trainer, name)
    load_module_tensors(twin, module_tensors(trainer))
    twin.gradient_steps = trainer.gradient_steps
    assert equal(trained(trainer, name, range(3, 6)), trained(twin, name, range(3, 6)))
    expected, found = all_tensors(trainer), all_tensors(twin)
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())
    assert twin.metrics() == trainer.metrics()


# --- what it states ---------------------------------------------------------------------------------------------------


@each_replay_trainer
def test_it_states_its_columns_phases_and_checkpoint_identity(name: str) -> None:
    trainer = made(name)
    columns = [field.name for field in transition_of(TRAINERS[name], OBS, actions_of(name)).fields]
    if name in OF_SEQUENCES:  # the next observation of a step is the following one of its sequence
        assert columns == ["obs", "action", "reward", "discount", "steps", "state", "position"]
    else:
        assert columns[:5] == list(Batch._fields)
    assert list(batch_type_of(trainer)._fields) == columns
    phases = [phase.name for phase in trainer.phases]
    assert phases
    assert len(set(phases)) == len(phases)
    identity = trainer.checkpoint_identity()
    assert all(isinstance(text, str) for text in (*identity, *identity.values()))
    assert isinstance(trainer.describe_inputs(), str)
    assert trainer.policy in modules_of(trainer).values()


# --- settings ---------------------------------------------------------------------------------------------------------


@each_trainer
def test_an_unknown_setting_names_its_nearest_match(name: str) -> None:
    has_targets = hasattr(TRAINERS[name], "tau") and "tau" not in TRAINERS[name]._unused
    own = ("horizn", "horizon") if hasattr(TRAINERS[name], "horizon") else ("policy_dela", "policy_delay")
    third = ("ta", "tau") if has_targets else own
    for wrong, meant in (("learning_rat", "learning_rate"), ("hiden_sizes", "hidden_sizes"), third):
        with pytest.raises(TrainerError, match=rf"{name} has no setting '{wrong}'.*'{meant}'.*batch_size"):
            made(name, **{wrong: 1})
    with pytest.raises(TrainerError, match="no setting 'get_action'"):
        made(name, get_action=None)


UNUSABLE: dict[str, tuple[object, ...]] = {
    "hidden_sizes": (64, (64, 0), ("wide",), (1.5,)),
    "learning_rate": (math.nan, 0.0, -1e-3, "fast", True),
    "actor_learning_rate": (math.nan, -1e-3),
    "tau": (math.nan, -0.1, 1.5),
    "target_update_interval": (0, 1.5),
    "policy_delay": (0,),
    "num_critics": (0, 1.5, 256),
    "most_updates_per_step": (0, math.nan, "many"),
    "least_updates_per_step": (-1, math.nan, 2000),
    "target_critics": (0, 11),
    "dropout": (1.0, -0.1, math.nan, "some"),
    "critic_hidden_sizes": (64, (64, 0)),
    "adam_beta1": (1.0, -0.1, math.nan),
    "batch_norm_momentum": (1.0, True),
    "renorm_warmup_steps": (-1, 0.5),
    "target_noise": (-0.1, math.nan),
    "noise_clip": (-1.0, math.nan),
    "temperature": (-0.1, math.nan),
    "initial_temperature": (0.0, math.nan),
    "log_std_bounds": ((2.0, -20.0), (1.0,)),
    "scale_observations": (1.0,),
    "clip_range": (0.0, math.nan, "small"),
    "value_clip_range": (-0.1, math.nan),
    "value_coefficient": (-0.5,),
    "entropy_coefficient": (-0.01,),
    "target_kl": (0.0, math.nan),
    "activation": ("sigmoid",),
    "learning_rate_schedule": ("falling", ("linear", -1.0)),
    "clip_range_schedule": (None, ((0.5, 1.0), (0.0, 1.0))),
}


@each_trainer
@pytest.mark.parametrize("setting", UNUSABLE)
def test_an_unusable_setting_is_named_with_its_value(name: str, setting: str) -> None:
    if not hasattr(TRAINERS[name], setting):
        assert any(hasattr(each, setting) for each in TRAINERS.values())
        return
    for value in UNUSABLE[setting]:
        with pytest.raises(TrainerError, match=rf"{name}\.{setting} must be .*; found {re.escape(repr(value))}\."):
            made(name, **{setting: value})


# --- spaces -----------------------------------------------------------------------------------------------------------

ARM = spaces.Box(-1.0, 1.0, (2,), np.float32)
OTHER_ACTIONS: list[gym.Space[Any]] = [
    *(spaces.Discrete(3), ARM, spaces.MultiDiscrete([3, 2]), spaces.MultiBinary(3)),
    *(spaces.Box(-np.inf, 1.0, (2,), np.float32), spaces.Box(-1.0, 1.0, ()), spaces.Box(0, 5, (2,), np.int64)),
    spaces.Box(np.finfo(np.float32).min, np.finfo(np.float32).max, (2,), np.float32),
]


@each_trainer
@pytest.mark.parametrize("actions", OTHER_ACTIONS, ids=str)
def test_actions_that_an_algorithm_cannot_take_are_named(name: str, actions: gym.Space[Any]) -> None:
    kind = (*TRAINERS[name]._action_kinds, "Discrete")[0]
    drawn = TRAINERS[name].data_flow() == "rollout"
    discrete = (spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
    fits = isinstance(actions, discrete) or (actions.dtype == np.float32 and actions.shape != ())
    if fits if drawn else type(actions).__name__ == kind and actions in (DISCRETE, ARM):
        make_trainer(TRAINERS[name], OBS, actions)
        return
    with pytest.raises((EnvError, TrainerError)) as caught:
        make_trainer(TRAINERS[name], OBS, actions)
    message = str(caught.value)
    assert name in message
    assert str(actions) in message
    if name == "C51":  # which says no more
        return
    if drawn and actions.shape == () and actions.dtype == np.float32:
        assert "needs actions of one dimension or more" in message
        return
    if drawn:
        assert f"{name} takes Discrete, MultiDiscrete, MultiBinary and Box actions of floating point" in message
        return
    if isinstance(actions, (spaces.MultiDiscrete, spaces.MultiBinary)):
        said = [
            "Discrete actions (DQN, QRDQN, RecurrentDQN, PPO, A2C, RecurrentPPO)",
            "Box actions (DDPG, TD3, SAC, REDQ, DroQ, CrossQ, TQC, PPO, A2C, RecurrentPPO)",
            "trainer class of your own",
        ]
        said += [
            *(f"{kind} actions (PPO, A2C, RecurrentPPO)" for kind in ("MultiDiscrete", "MultiBinary")),
            "ActionWrapper",
        ]
        assert "derive from" not in message, "an algorithm that refuses them too"
    elif type(actions).__name__ != kind:
        other = "Box" if kind == "Discrete" else "Discrete"
        said = [f"{name} is a {name} and needs a {kind} action space", f"pearl.algorithms.{one_of_algorithms(other)}."]
    elif actions.shape == ():
        said = ["actions of one dimension or more", "of shape ()"]
    elif actions.dtype == np.int64:
        said = ["actions of floating point"]
    else:
        said = ["needs bounded actions", "finite bounds"]
    assert [words for words in said if words not in message] == []


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("actions", [spaces.Box(-1.0, 1.0, (2, 0)), spaces.MultiDiscrete([])], ids=["Box", "choices"])
def test_actions_that_hold_no_numbers_are_named(name: str, actions: gym.Space[Any]) -> None:
    takes = type(actions).__name__ in TRAINERS[name]._action_kinds
    with pytest.raises(EnvError, match="which holds none" if takes else name):
        make_trainer(TRAINERS[name], OBS, actions)


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize(
    ("observations", "message"),
    [
        (spaces.Discrete(5), r"needs Box observations; the environment has Discrete\(5\).*Flatten"),
        (spaces.Dict({"a": OBS}), "needs Box observations; the environment has Dict.*FlattenObservation"),
        (spaces.Box(-1.0, 1.0, (), np.float32), r"of shape \(\)\. Wrap it with gymnasium\.wrappers\.ReshapeObs"),
        (spaces.Box(-1.0, 1.0, (0,), np.float32), "which holds none"),
    ],
    ids=["discrete", "dict", "no dimension", "no numbers"],
)
def test_observations_that_an_algorithm_cannot_take_are_named(
    name: str, observations: gym.Space[Any], message: str
) -> None:
    with pytest.raises(EnvError, match=f"{name} .*{message}"):
        make_trainer(TRAINERS[name], observations, actions_of(name))


# --- whole runs of TD3 and SAC: those of DQN and DDPG are everywhere, that of C51 is in its file ----------------------

each_tiny = pytest.mark.parametrize("trainer", [TinyTD3, TinySAC])


@each_tiny
def test_a_program_trains_with_actor_processes_and_logs_its_metrics(
    tmp_path: Path, quick_profiles: None, trainer: type[Trainer]
) -> None:
    program = make_program(tmp_path, trainer=trainer, env="Pendulum-v1", actors=2)
    code, output = run(program, "--timesteps", "1500", "--eval-episodes", "2", "--run-dir", str(tmp_path / "run"))
    assert code == 0, output
    found = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert found["gradient_steps"] > 20
    assert found["last"]["episodes"] == 2
    with (tmp_path / "run" / "progress.csv").open() as file:
        *_, last = csv.DictReader(file)
    assert all(math.isfinite(float(last[metric])) for metric in trainer(OBS, BOX).metrics())
    if trainer is TinySAC:
        assert 0 < float(last["temperature"]) < 1


@pytest.mark.parametrize(
    "trainer", [TinySAC, *(pytest.param(other, marks=pytest.mark.slow) for other in (TinyTD3, TinyDroQ, TinyCrossQ))]
)
def test_a_serial_run_resumes_to_the_bit(tmp_path: Path, quick_profiles: None, trainer: type[Trainer]) -> None:
    program = make_program(tmp_path, trainer=trainer, env="Pendulum-v1")
    common = ("--serial", "--timesteps", "1000", "--checkpoint-interval", "512", "--eval-episodes", "0")
    whole, half = tmp_path / "whole", tmp_path / "half"
    code, output = run(program, *common, "--run-dir", str(whole))
    assert code == 0, output
    saved = sorted((whole / "checkpoints").glob("checkpoint-*"))[0]
    shutil.copytree(saved, half / "checkpoints" / saved.name)
    code, output = run(program, *common, "--run-dir", str(half), "--resume")
    assert code == 0, output
    assert "Resumed from" in output
    assert (half / "weights.safetensors").read_bytes() == (whole / "weights.safetensors").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(("trainer", "timesteps"), [(TD3, 8000), (SAC, 7000)])
def test_it_learns_pendulum(tmp_path: Path, quick_profiles: None, trainer: type[Trainer], timesteps: int) -> None:
    settings = {"hidden_sizes": (64, 64), "learning_rate": 2e-3, "actor_learning_rate": 2e-3, "learning_starts": 500}
    if trainer is SAC:
        settings["temperature_learning_rate"] = 2e-3
    training = {"batch_size": 64, "replay_ratio": 64.0, "gamma": 0.98}
    program = make_program(
        tmp_path, trainer=trainer, settings=settings, training=training, env="Pendulum-v1", capacity=20_000
    )
    arguments = ("--timesteps", str(timesteps), "--eval-episodes", "20", "--run-dir", str(tmp_path / "run"))
    code, output = run(program, *arguments)
    assert code == 0, output
    # Chance returns about -1200; a pendulum that is swung up and held, about -150.
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["best"]["mean"] > -400
