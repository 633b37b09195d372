"""The Learner on the FPGA emulator: gradients against float64 autograd, beside torch, one program with the tree."""

from __future__ import annotations

import copy
import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from references import without_biases
from test_native_actor_critic import ACTIONS as BOX_ACTIONS
from test_native_actor_critic import OBS as BOX_OBS
from test_native_actor_critic import assert_gradients, exact_gradients, show_gradients
from test_native_actor_critic import batch_of as actions_batch
from test_native_learner import ShowsGradients, assert_dqn_gradients, batch_of, one_torch_thread
from test_native_loop import BATCH, CAPACITY, Deterministic, Setup, Twin, assert_same_state, rows_of
from torch import nn

from pearl.algorithms import DDPG, DQN, SAC, TD3, Trainer
from pearl.algorithms.batch import Batch
from pearl.backends.fpga.learner import FpgaLearner
from pearl.backends.sycl.device import sycl_availability
from pearl.backends.sycl.selector import EMULATOR_SELECTOR
from pearl.backends.sycl.storage import SyclDataStorage
from pearl.errors import ConfigurationError, DeviceError, TrainerError
from pearl.learner.torch_learner import TorchLearner
from pearl.replay import make_replay_manager
from pearl.spec import ReplaySpec, TransitionSpec

EMULATOR = sycl_availability(EMULATOR_SELECTOR)
pytestmark = [
    pytest.mark.fpga,
    pytest.mark.skipif(not EMULATOR.ok, reason=f"no FPGA emulator: {EMULATOR.reason}"),
]

RELATIVE = 1e-4
TIMEOUT_S = 60.0

__all__ = ["one_torch_thread"]  # a fixture that every test here uses


class Plain(DQN):
    hidden_sizes, target_update_interval = (24,), 4


class Small(Deterministic):
    hidden_sizes, scale_observations = (24,), True


class SmallTwin(Twin):
    hidden_sizes, policy_delay = (12,), 2


class SmallSoft(SAC):
    hidden_sizes, log_std_bounds, scale_observations = (12,), (-1.0, 0.1), True


class EqualSoft(SmallSoft):
    def build(self) -> None:
        super().build()
        self.critic.second.load_state_dict(self.critic.first.state_dict())


class Soft(SAC):
    hidden_sizes, temperature_learning_rate = (), 0.02


class Fixed(SAC):
    hidden_sizes, temperature = (), 0.3


class BothFirst:
    """A trainer whose actor learns from the critic of before the step: all gradients, then all steps."""

    def update_policy(self, batch: Any, weights: torch.Tensor) -> Any:
        trainer: Any = self
        columns = Batch(*(torch.as_tensor(batch[name]) for name in Batch._fields))
        weights = torch.as_tensor(weights)
        moves = not isinstance(self, TD3) or (trainer.gradient_steps + 1) % trainer.policy_delay == 0
        priorities = trainer._compute_critic(columns, weights, len(weights))
        if moves:
            trainer._compute_actor(columns, weights, len(weights))
        trainer._apply_critic()
        if moves:
            trainer._apply_actor()
        trainer.gradient_steps += 1
        trainer.finish_step()
        return priorities.numpy()


# --- gradients --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("obs", "hidden", "actions", "rows", "copies", "double", "unroll"),
    [
        (4, (20,), 2, 9, 2, True, 16),
        pytest.param(33, (7, 40), 5, 33, 1, False, [[4, 64, 1]], marks=pytest.mark.slow),
        pytest.param(1, (1,), 1, 1, 3, True, 32, marks=pytest.mark.slow),
    ],
)
def test_dqn_gradients_are_those_of_float64(
    obs: int, hidden: tuple[int, ...], actions: int, rows: int, copies: int, double: bool, unroll: Any
) -> None:
    trainer: Any = ShowsGradients(
        spaces.Box(-5.0, 5.0, (obs,), np.float32), spaces.Discrete(actions), hidden_sizes=hidden, double=double
    )
    learner = FpgaLearner(trainer, sub_batches=copies, unroll=unroll, timeout_s=TIMEOUT_S)
    assert_dqn_gradients(learner, *batch_of(rows, rows, obs, actions), RELATIVE)
    learner.close()


@pytest.mark.parametrize(
    ("trainer_class", "copies"),
    [
        pytest.param(Small, 1, marks=pytest.mark.slow),
        pytest.param(Small, 2, marks=pytest.mark.slow),
        pytest.param(SmallTwin, 1, marks=pytest.mark.slow),
        (SmallSoft, 1),
        pytest.param(EqualSoft, 1, marks=pytest.mark.slow),
    ],
)
def test_critic_and_actor_learn_from_the_critic_of_before(trainer_class: type[Trainer], copies: int) -> None:
    trainer: Any = trainer_class(BOX_OBS, BOX_ACTIONS, seed=4)  # either critic is the smaller for half of the items
    show_gradients(trainer)
    trainer.gradient_steps = getattr(trainer, "policy_delay", 1) - 1
    learner = FpgaLearner(trainer, sub_batches=copies, timeout_s=TIMEOUT_S)
    batch, weights = actions_batch(3, 37)
    critic, actor = exact_gradients(trainer, batch, weights)
    learner.step(batch, weights)
    learner.close()
    assert_gradients(trainer.critic, trainer._critic_flat, trainer.critic_optimizer, critic, RELATIVE)
    assert_gradients(trainer.actor, trainer._actor_flat, trainer.actor_optimizer, actor, RELATIVE)


@pytest.mark.slow
def test_the_temperature_learns_from_the_policys_densities() -> None:
    trainer = Soft(BOX_OBS, BOX_ACTIONS)
    trainer.temperature_optimizer = torch.optim.SGD([trainer.log_alpha], lr=0.1, momentum=0.9)
    learner = FpgaLearner(trainer, sub_batches=2, timeout_s=TIMEOUT_S)
    expected, momentum = 0.0, 0.0
    for seed in range(2):
        batch, weights = actions_batch(seed, 37)
        policy, noise = copy.deepcopy(trainer.actor).double(), trainer.draw_noise(37, 1).double()
        with torch.no_grad():
            _, log_density = policy.sample(torch.as_tensor(batch["obs"]).double(), noise)
        momentum = 0.9 * momentum - float((log_density + trainer._target_entropy).mean())
        expected -= 0.1 * momentum
        assert learner.step(batch, weights).metrics["temperature"] == pytest.approx(math.exp(expected), rel=RELATIVE)
    learner.close()
    assert abs(expected) > 0.01


# --- training ---------------------------------------------------------------------------------------------------------


def weights_of(trainer: Trainer) -> np.ndarray:
    """Of all networks, targets too, and SAC's log temperature."""
    modules = (value for value in vars(trainer.in_torch()).values() if isinstance(value, nn.Module))
    own = [trainer.log_alpha] if isinstance(trainer, SAC) else []
    return torch.cat([p.detach().reshape(-1) for p in (*own, *(p for m in modules for p in m.parameters()))]).numpy()


def test_dqn_trains_as_torch_does() -> None:
    box, discrete = spaces.Box(-5.0, 5.0, (4,), np.float32), spaces.Discrete(3)
    ours, theirs = Plain(box, discrete, seed=1), Plain(box, discrete, seed=1)
    learner, reference = FpgaLearner(ours, timeout_s=TIMEOUT_S), TorchLearner(theirs)
    for seed in range(40):
        batch, weights = batch_of(seed, 16, 4, 3)
        found, expected = learner.step(batch, weights), reference.step(batch, weights)
        np.testing.assert_allclose(found.priorities, expected.priorities, rtol=RELATIVE, atol=1e-5)
    assert learner.kernel.stage_launches == learner.sub_batches * 10 + 2  # once each: 2 of WU, 10 of each copy
    assert learner.kernel.bridge_launches == 2 * 40
    learner.close()
    np.testing.assert_allclose(weights_of(ours), weights_of(theirs), rtol=1e-3, atol=1e-5)
    assert ours.gradient_steps == 40


class ReferenceSmall(BothFirst, Small):
    pass


class ReferenceTwin(BothFirst, SmallTwin):
    pass


class ReferenceSoft(BothFirst, Soft):
    pass


class ReferenceFixed(BothFirst, Fixed):
    pass


class ReferenceSmallSoft(BothFirst, SmallSoft):
    pass


@pytest.mark.parametrize(
    ("trainer_class", "reference", "copies"),
    [
        (Small, ReferenceSmall, 1),
        pytest.param(SmallTwin, ReferenceTwin, 1, marks=pytest.mark.slow),
        pytest.param(Soft, ReferenceSoft, 2, marks=pytest.mark.slow),
        pytest.param(Fixed, ReferenceFixed, 1, marks=pytest.mark.slow),
    ],
)
def test_actor_critics_train_as_torch_does_with_a_lagged_critic(
    trainer_class: type[Trainer], reference: type[Any], copies: int
) -> None:
    ours, theirs = trainer_class(BOX_OBS, BOX_ACTIONS, seed=1), reference(BOX_OBS, BOX_ACTIONS, seed=1)
    before = weights_of(ours)
    learner = FpgaLearner(ours, sub_batches=copies, timeout_s=TIMEOUT_S)
    for seed in range(25):
        batch, weights = actions_batch(seed, 16)
        found = learner.step(batch, weights)
        np.testing.assert_allclose(found.priorities, theirs.update_policy(batch, weights), rtol=1e-3, atol=1e-5)
        if isinstance(ours, SAC):
            assert found.metrics["temperature"] == pytest.approx(theirs.metrics()["temperature"], rel=1e-4)
    learner.close()
    np.testing.assert_allclose(weights_of(ours), weights_of(theirs), rtol=1e-3, atol=1e-5)
    assert np.abs(weights_of(ours) - before).max() > 1e-3


@pytest.mark.parametrize("max_grad_norm", [0.05, pytest.param(0.0, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("trainer_class", "reference", "bare"),
    [
        (Plain, Plain, (0, 1)),
        pytest.param(Plain, Plain, (1,), marks=pytest.mark.slow),
        pytest.param(Small, ReferenceSmall, (0,), marks=pytest.mark.slow),
        pytest.param(SmallTwin, ReferenceTwin, (0, 1), marks=pytest.mark.slow),
        pytest.param(SmallSoft, ReferenceSmallSoft, (1,), marks=pytest.mark.slow),
    ],
)
def test_layers_without_biases_train_as_torch_does(
    trainer_class: type[Trainer], reference: type[Any], bare: tuple[int, ...], max_grad_norm: float
) -> None:
    spaces_ = BOX_OBS, spaces.Discrete(3) if issubclass(trainer_class, DQN) else BOX_ACTIONS
    ours, theirs = (
        without_biases(kind, bare)(*spaces_, seed=1, max_grad_norm=max_grad_norm) for kind in (trainer_class, reference)
    )
    for trainer in (ours, theirs):
        for name, value in vars(trainer).items():
            if name.endswith("optimizer"):
                setattr(trainer, name, torch.optim.SGD(value.param_groups[0]["params"], lr=0.1))
    before = weights_of(ours)
    learner = FpgaLearner(ours, sub_batches=1, timeout_s=TIMEOUT_S)
    for seed in range(4):
        batch, weights = batch_of(seed, 16, 6, 3) if isinstance(ours, DQN) else actions_batch(seed, 16)
        learner.step(batch, weights)
        TorchLearner(theirs).step(batch, weights) if isinstance(ours, DQN) else theirs.update_policy(batch, weights)
    learner.close()
    found, expected = weights_of(ours) - before, weights_of(theirs) - before
    assert np.linalg.norm(found - expected) < 1e-3 * np.linalg.norm(expected)


def trained_on_one_batch(**settings: Any) -> tuple[FpgaLearner, list[float]]:
    """Losses of 60 steps on one batch, against a target that stays."""
    trainer = Plain(spaces.Box(-5.0, 5.0, (4,), np.float32), spaces.Discrete(3), seed=1, learning_rate=1e-2)
    trainer.target_update_interval = 1000
    learner = FpgaLearner(trainer, timeout_s=TIMEOUT_S, **settings)
    return learner, [learner.step(*batch_of(0, 16, 4, 3)).metrics["loss"] for _ in range(60)]


@pytest.mark.slow
def test_the_loss_falls() -> None:
    learner, losses = trained_on_one_batch()
    assert losses[-1] < 0.5 * losses[0]
    learner.close()


@pytest.mark.slow
def test_batches_may_grow_and_stages_start_anew() -> None:
    learner, losses = trained_on_one_batch(sub_batches=1)
    assert learner.step(*batch_of(1, 40, 4, 3)).priorities.shape == (40,)  # another program
    assert learner.step(*batch_of(0, 16, 4, 3)).priorities.shape == (16,)
    learner.close()
    assert learner.step(*batch_of(0, 16, 4, 3)).metrics["loss"] < losses[0]
    learner.close()


# --- what goes wrong --------------------------------------------------------------------------------------------------


def test_what_diverges_moves_no_weight() -> None:
    trainer = Plain(spaces.Box(-5.0, 5.0, (4,), np.float32), spaces.Discrete(3))
    learner = FpgaLearner(trainer, timeout_s=TIMEOUT_S)
    batch, weights = batch_of(0, 16, 4, 3)
    before = weights_of(trainer)
    bad = {**batch, "reward": np.full(16, np.nan, np.float32)}
    with pytest.raises(TrainerError, match="diverged"):
        learner.step(bad, weights)
    wrong = batch["action"].copy()
    wrong[5] = 3
    with pytest.raises(TrainerError, match=r"must lie in \[0, 3\); found one that does not at position 5"):
        learner.step({**batch, "action": wrong}, weights)
    np.testing.assert_array_equal(weights_of(trainer), before)
    assert trainer.gradient_steps == 0
    learner.step(batch, weights)
    assert trainer.gradient_steps == 1
    learner.close()


@pytest.mark.slow
def test_what_diverges_moves_no_temperature() -> None:
    trainer = Soft(BOX_OBS, BOX_ACTIONS)
    learner = FpgaLearner(trainer, sub_batches=2, timeout_s=TIMEOUT_S)
    batch, weights = actions_batch(0, 16)
    before = weights_of(trainer)
    with pytest.raises(TrainerError, match="diverged"):
        learner.step({**batch, "obs": np.full_like(batch["obs"], np.nan)}, weights)
    np.testing.assert_array_equal(weights_of(trainer), before)
    learner.step(batch, weights)
    learner.close()
    assert trainer.log_alpha.item() != before[0]


class Dueling(DQN):
    dueling = True


def test_no_more_stages_than_run_at_once(caplog: pytest.LogCaptureFixture) -> None:
    box, discrete = spaces.Box(-5.0, 5.0, (4,), np.float32), spaces.Discrete(3)
    assert FpgaLearner(Plain(box, discrete)).sub_batches == 2
    assert FpgaLearner(Plain(box, discrete), sub_batches=64).sub_batches == 9
    assert "has 9 copies, not 64" in caplog.text
    with pytest.raises(TrainerError, match=r"of these networks has 1\d\d stages; at most 100 run at once"):
        FpgaLearner(Plain(box, discrete, hidden_sizes=(2,) * 20))


def test_what_the_pipeline_cannot_train_is_named() -> None:
    box = spaces.Box(-5.0, 5.0, (4,), np.float32)
    dueling = Dueling(box, spaces.Discrete(3))
    assert "chains of linear layers" in str(FpgaLearner.supports(dueling))
    with pytest.raises(TrainerError, match="The fpga learner cannot train"):
        FpgaLearner(dueling)
    for algorithm in (DDPG, TD3, SAC):
        assert FpgaLearner.supports(algorithm(BOX_OBS, BOX_ACTIONS)) is None
    plain = Plain(box, spaces.Discrete(3))
    for factor in (3, 2**31):
        with pytest.raises(ConfigurationError, match=f"unroll must be a power of two up to 1,048,576; found {factor}"):
            FpgaLearner(plain, unroll=factor)
    with pytest.raises(ConfigurationError, match=r"or a list for each network .* \(\(256, 32\),\); found \[16, 4\]"):
        FpgaLearner(plain, unroll=[16, 4])
    with pytest.raises(TrainerError, match="takes an unroll factor for each of its 2 layers; found 3"):
        FpgaLearner(plain, unroll=[[16, 4, 1]])
    with pytest.raises(ConfigurationError, match="sub_batches"):
        FpgaLearner(plain, sub_batches=-1)
    with pytest.raises(DeviceError, match="needs an FPGA or its emulator"):
        FpgaLearner(plain, device="opencl:cpu")


# --- setting 2 --------------------------------------------------------------------------------------------------------


class OnFpga(Setup):
    """Replay Manager, Data Storage and Learner on the emulator; `joined` False: the interpreted loop over them."""

    def __init__(self, trainer_class: type[Trainer], *, joined: bool, **more: Any) -> None:
        def learner(trainer: Trainer) -> FpgaLearner:
            made = FpgaLearner(trainer, sub_batches=2 if issubclass(trainer_class, DQN) else 1, timeout_s=TIMEOUT_S)
            if not joined:
                made.fused_iteration = lambda *_: None  # type: ignore[method-assign]
            self.learner = made
            return made

        super().__init__(trainer_class, native=True, learner=learner, **more)  # type: ignore[arg-type]

    def make_replay(self) -> Any:
        return make_replay_manager(ReplaySpec(CAPACITY), seed=5, backend="fpga")

    def make_storage(self, spec: TransitionSpec, **options: Any) -> Any:
        return SyclDataStorage(spec, CAPACITY, EMULATOR_SELECTOR, **options)

    def close(self) -> None:
        self.replay.close()
        self.learner.close()


@pytest.mark.parametrize(
    "trainer_class", [Plain, *(pytest.param(other, marks=pytest.mark.slow) for other in (Small, Soft))]
)
def test_joined_by_pipes_they_do_to_the_bit_what_they_do_apart(trainer_class: type[Trainer]) -> None:
    joined = OnFpga(trainer_class, joined=True)
    states = []
    for setup in (joined, OnFpga(trainer_class, joined=False)):
        setup.run(7)
        with setup.loop.insertion_window():
            setup.replay.insert(setup.storage.insert({name: rows[200:240] for name, rows in setup.rows.items()}))
        setup.run(6)
        states.append((setup, setup.loop.last_batch(), setup.replay.state_dict()))
        setup.close()
    (ours, batch, state), (theirs, other_batch, other_state) = states
    assert_same_state(ours.trainer, theirs.trainer)
    for name, column in other_batch.items():
        np.testing.assert_array_equal(batch[name], column, err_msg=name)
    for name, value in other_state.items():
        np.testing.assert_array_equal(state[name], value, err_msg=name)
    assert ours.trainer.gradient_steps == 13


def test_its_priorities_lead_to_the_batches_of_the_reference() -> None:
    fpga, reference = OnFpga(Plain, joined=True), Setup(Plain, native=False, learner=TorchLearner)
    for _ in range(20):
        for setup in (fpga, reference):
            setup.run(1)
        ours, theirs = fpga.loop.last_batch(), reference.loop.last_batch()
        np.testing.assert_array_equal(ours["indices"], theirs["indices"])
        np.testing.assert_allclose(ours["weights"], theirs["weights"], rtol=RELATIVE)
        assert len(ours["indices"]) == BATCH
    np.testing.assert_allclose(fpga.policy(), reference.policy(), rtol=1e-3, atol=1e-5)
    fpga.close()


@pytest.mark.slow
def test_priorities_beyond_the_scale_go_through_the_host_and_the_scale_recovers() -> None:
    states = []
    for joined in (True, False):
        setup = OnFpga(Plain, joined=joined)
        rows = {name: 1e6 * rows[:100] if name == "reward" else rows[:100] for name, rows in setup.rows.items()}
        setup.replay.insert(setup.storage.insert(rows))
        setup.run(5)
        states.append((setup.replay.state_dict(), setup.policy()))
        rows = {name: rows[:CAPACITY] for name, rows in setup.rows.items()}
        setup.replay.insert(setup.storage.insert(rows), np.r_[1e5, np.ones(CAPACITY - 1)])
        setup.run(16)  # which draw that one first
        states.append((setup.replay.state_dict(), setup.policy()))
        setup.close()
    assert states[0][0]["scale"] < states[1][0]["scale"]
    assert states[1][0]["recoveries"] > 0
    for found, expected in zip(states[:2], states[2:], strict=True):
        for name, value in expected[0].items():
            np.testing.assert_array_equal(found[0][name], value, err_msg=name)
        np.testing.assert_array_equal(found[1], expected[1])


def test_a_joined_learner_takes_no_batches_of_others() -> None:
    setup = OnFpga(Plain, joined=True)
    with pytest.raises(TrainerError, match="joined to its Replay Manager"):
        setup.learner.step(*batch_of(0, 16, 3, 4))
    setup.close()


def test_rows_may_be_stored_on_the_fpga_while_the_stages_start() -> None:
    """A thread that waits for the emulator must not be given a stage to run."""
    box, discrete = spaces.Box(-1.0, 1.0, (3,), np.float32), spaces.Discrete(4)
    spec = TransitionSpec.from_spaces(box, discrete)
    storage, rows = SyclDataStorage(spec, CAPACITY, EMULATOR_SELECTOR), rows_of(spec, 20)
    learner, inserted = FpgaLearner(Plain(box, discrete), sub_batches=2, timeout_s=TIMEOUT_S), 0
    with ThreadPoolExecutor(1) as pool:
        step = pool.submit(learner.step, rows, np.ones(20, np.float32))
        while not step.done():
            storage.insert(rows)
            inserted += 1
    assert step.result().priorities.shape == (20,)
    assert inserted > 10
    np.testing.assert_array_equal(storage.gather([0, 19])["obs"], rows["obs"][[0, 19]])
    learner.close()
