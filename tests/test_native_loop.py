"""Setting 2 in C++: the native loop does, to the bit, what the interpreted one does with the same native parts."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from test_native_learner import random_masks

from pearl import _native
from pearl.algorithms import DDPG, DQN, REDQ, SAC, TD3, DroQ
from pearl.algorithms.trainer import Trainer, policy_tensors, transition_of
from pearl.backends.cpu.learner import NativeLearner
from pearl.errors import ReplayError, TrainerError
from pearl.ipc.queues import Bell, WeightSyncQueue
from pearl.learner.torch_learner import TorchLearner
from pearl.replay import DataStorage, make_replay_manager
from pearl.runtime.trainer_state import load_module_tensors, module_tensors
from pearl.runtime.workers import GrantQueue, ProgressQueue, TrainingLoop
from pearl.spec import ReplaySpec, TransitionSpec

OBS = spaces.Box(-1.0, 1.0, (3,), np.float32)
DISCRETE, BOX = spaces.Discrete(4), spaces.Box(-2.0, 2.0, (2,), np.float32)
BATCH, CAPACITY, INTERVAL = 20, 300, 3


class Dueling(DQN):
    hidden_sizes, dueling, target_update_interval = (16, 16), True, 4


class Gradual(DQN):
    hidden_sizes, tau, double = (24,), 0.05, False


class Deterministic(DDPG):
    hidden_sizes = (16, 8)


class Twin(TD3):
    hidden_sizes, policy_delay, noise_clip = (16, 8), 3, 0.3


class Soft(SAC):
    hidden_sizes, max_grad_norm = (16, 8), 0.5


class Ensemble(REDQ):
    hidden_sizes, num_critics, policy_delay = (16, 8), 4, 3


class Dropping(DroQ):
    hidden_sizes, dropout, policy_delay = (16, 8), 0.2, 2


class Fixed(SAC):
    hidden_sizes, temperature = (16,), 0.2


class Masked(DQN):
    hidden_sizes, target_update_interval, action_masks = (16, 16), 4, True


class MaskedPlainly(Masked):
    double = False


class Pixels(DQN):
    target_update_interval, dueling, hidden_sizes = 4, True, (8,)


SEEN = {Pixels: spaces.Box(0, 255, (2, 36, 37), np.uint8)}


LOOPED = [Dueling, Gradual, Masked, MaskedPlainly, Pixels, Deterministic, Twin, Soft, Ensemble, Dropping, Fixed]


class OwnNoise(TD3):
    hidden_sizes = (16,)

    def draw_noise(self, rows: int, draw: int) -> torch.Tensor:
        return torch.zeros(rows, self.action_size)


def rows_of(spec: TransitionSpec, count: int, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    rows = spec.empty(count)
    for name, column in rows.items():
        whole = {np.dtype(np.int64): 4, np.dtype(np.uint8): 256}.get(column.dtype)
        column[...] = rng.uniform(-1, 1, column.shape) if whole is None else rng.integers(0, whole, column.shape)
        if name == "discount":
            column[...] = 0.99 * (rng.random(count) > 0.1)
        if name == "next_action_mask":
            column[...] = random_masks(rng, count, (4,))
    return rows


class Setup:
    """A loop with everything around it; `native` False: the interpreted loop over the same native Learner."""

    def __init__(
        self,
        trainer_class: type[Trainer],
        *,
        native: bool,
        learner: type = NativeLearner,
        seed: int = 3,
        resumes: Any = None,
        arguments: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        space = DISCRETE if issubclass(trainer_class, DQN) else BOX
        seen = SEEN.get(trainer_class, OBS)
        spec = transition_of(trainer_class, seen, space)
        self.trainer = trainer_class(seen, space, seed=seed)
        self.replay = self.make_replay()
        self.storage = self.make_storage(spec, **options)
        self.rows = rows_of(spec, CAPACITY)
        self.replay.insert(self.storage.insert({name: rows[:200] for name, rows in self.rows.items()}))
        if resumes is not None:
            load_module_tensors(self.trainer, module_tensors(resumes.trainer))
            self.trainer.gradient_steps = resumes.trainer.gradient_steps
            self.replay.load_state_dict(resumes.replay.state_dict())
        self.bell, made = Bell(), learner(self.trainer, **(arguments or {}))
        self.laq, self.ldq = GrantQueue(2), ProgressQueue(2, self.bell)
        self.wsq = WeightSyncQueue(made.weight_count)
        if not native:
            made.fused_loop = lambda *_: None
        self.loop = TrainingLoop(
            self.laq,
            self.ldq,
            self.wsq,
            self.bell,
            replay=self.replay,
            storage=self.storage,
            learner=made,
            batch_size=BATCH,
            transition=spec,
            weight_sync_interval=INTERVAL,
        )

    def make_replay(self) -> Any:
        return make_replay_manager(ReplaySpec(CAPACITY), seed=5)

    def make_storage(self, spec: TransitionSpec, **options: Any) -> Any:
        return DataStorage(spec, CAPACITY, **options)

    def run(self, iterations: int) -> None:
        self.laq.grant(iterations, 0.4)
        assert self.loop.run_once()
        assert self.answer()[0] == iterations

    def answer(self) -> tuple[int, float]:
        found = self.ldq.peek(60.0)
        assert found is not None
        done = int(found[0]["iterations"][0]), float(found[0]["td_error"][0])
        self.ldq.release()
        return done

    def policy(self) -> np.ndarray:
        return torch.cat([t.detach().reshape(-1) for t in policy_tensors(self.trainer)]).numpy()


def assert_same_state(found: Trainer, expected: Trainer) -> None:
    """To the bit: networks and targets, what the optimizers remember, the temperature, the noise's seed."""
    tensors = module_tensors(expected)
    for group, content in module_tensors(found).items():
        for name, tensor in content.items():
            assert np.array_equal(tensor, tensors[group][name]), f"{group}.{name}"
    assert found.gradient_steps == expected.gradient_steps
    assert found.metrics() == expected.metrics()


@pytest.mark.parametrize("trainer_class", LOOPED)
def test_native_and_interpreted_loops_agree_to_the_bit(trainer_class: type[Trainer]) -> None:
    native, interpreted = Setup(trainer_class, native=True), Setup(trainer_class, native=False)
    assert isinstance(native.loop.kernel, _native.TrainingLoop)
    assert not isinstance(interpreted.loop.kernel, _native.TrainingLoop)
    readers = [setup.wsq.reader() for setup in (native, interpreted)]
    for number, iterations in enumerate((1, 7, 30)):
        answers = []
        for setup in (native, interpreted):
            assert not setup.loop.run_once()
            setup.laq.grant(iterations, 0.4 + 0.1 * number)
            assert setup.loop.run_once()
            answers.append(setup.answer())
            with setup.loop.insertion_window():
                more = {name: rows[200 + 10 * number : 210 + 10 * number] for name, rows in setup.rows.items()}
                setup.replay.insert(setup.storage.insert(more))
        assert answers[0][0] == answers[1][0] == iterations
        assert answers[0][1] == pytest.approx(answers[1][1], rel=1e-6)
        published = [reader.poll() for reader in readers]
        np.testing.assert_array_equal(published[0], published[1])
    assert_same_state(native.trainer, interpreted.trainer)
    assert native.trainer.gradient_steps == 38
    states = [setup.replay.state_dict() for setup in (native, interpreted)]
    for name in ("priorities", "leaves", "times_sampled", "call", "updates"):
        np.testing.assert_array_equal(states[0][name], states[1][name], err_msg=name)
    for setup in (native, interpreted):
        spent = setup.loop.kernel.seconds()
        assert set(spent) == {"sample", "gather", "train", "update", "publish"}
        assert all(seconds > 0 for seconds in spent.values())
        setup.loop.keep_events(5)
        setup.run(INTERVAL)
        (events,) = setup.loop.events().values()
        assert len(events) == 5, "the newest"
        assert {"sample", "gather", "train", "update"} <= {part for part, _, _ in events}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("trainer_class", LOOPED)
def test_batches_drawn_ahead_change_nothing(trainer_class: type[Trainer], threads: int) -> None:
    plain, ahead = (
        Setup(trainer_class, native=True, arguments={"threads": threads, "prefetch": prefetch})
        for prefetch in (False, True)
    )
    for number, iterations in enumerate((1, 2, 40, 30)):
        batches = []
        for setup in (plain, ahead):
            setup.laq.grant(iterations, 0.4 + 0.1 * number)
            assert setup.loop.run_once()
            batches.append((setup.answer(), setup.loop.last_batch()))
            more = {name: rows[200 + 10 * number : 210 + 10 * number] for name, rows in setup.rows.items()}
            setup.replay.insert(setup.storage.insert(more))
        assert batches[0][0] == batches[1][0]
        for name, column in batches[0][1].items():
            np.testing.assert_array_equal(column, batches[1][1][name], err_msg=name)
    assert_same_state(ahead.trainer, plain.trainer)
    assert ahead.trainer.gradient_steps == 73
    states = [setup.replay.state_dict() for setup in (plain, ahead)]
    for name in ("priorities", "leaves", "times_sampled", "call", "updates"):
        np.testing.assert_array_equal(states[0][name], states[1][name], err_msg=name)


@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("trainer_class", [Deterministic, Twin, Soft])
def test_a_resumed_loop_goes_on_to_the_bit(trainer_class: type[Trainer], prefetch: bool) -> None:
    arguments = {"prefetch": prefetch}
    straight, saved = (Setup(trainer_class, native=True, arguments=arguments) for _ in range(2))
    straight.run(12)
    saved.run(5)
    resumed = Setup(trainer_class, native=True, seed=4, resumes=saved, arguments=arguments)
    resumed.run(7)
    assert_same_state(resumed.trainer, straight.trainer)
    states = [setup.replay.state_dict() for setup in (resumed, straight)]
    for name in ("priorities", "leaves", "times_sampled", "call"):
        np.testing.assert_array_equal(states[0][name], states[1][name], err_msg=name)


def test_the_first_policy_is_out_at_once_and_again_after_a_restart() -> None:
    setup = Setup(Dueling, native=True)
    reader = setup.wsq.reader()
    np.testing.assert_array_equal(reader.poll(), setup.policy())
    setup.laq.grant(INTERVAL - 1, 0.4)
    setup.loop.run_once()
    assert reader.poll() is None
    setup.loop.restarted()
    np.testing.assert_array_equal(reader.poll(), setup.policy())


@pytest.mark.parametrize(
    ("trainer_class", "learner", "options"),
    [
        (OwnNoise, NativeLearner, {}),
        (Dueling, TorchLearner, {}),
        (Dueling, NativeLearner, {"streams": 1, "share_next_obs": True}),  # no column of next observations
    ],
)
def test_what_is_not_native_throughout_is_interpreted(
    trainer_class: type[Trainer], learner: type, options: dict[str, Any]
) -> None:
    setup = Setup(trainer_class, native=True, learner=learner, **options)
    assert not isinstance(setup.loop.kernel, _native.TrainingLoop)
    setup.laq.grant(2, 0.4)
    assert setup.loop.run_once()
    assert setup.answer()[0] == 2
    assert setup.trainer.gradient_steps == 2


@pytest.mark.parametrize("prefetch", [False, True])
def test_the_loop_needs_no_gil_and_lets_the_host_insert(prefetch: bool) -> None:
    setup = Setup(Dueling, native=True, arguments={"prefetch": prefetch})
    setup.loop.launch()
    try:
        inserted = 0
        setup.laq.grant(3000, 0.4)
        while setup.ldq.peek() is None:
            with setup.loop.insertion_window():
                part = {name: rows[:5] for name, rows in setup.rows.items()}
                setup.replay.insert(setup.storage.insert(part))
            inserted += 1
            time.sleep(1e-4)
        assert setup.answer()[0] == 3000
        assert inserted > 1
        setup.loop.check()
        assert setup.trainer.gradient_steps == 3000
    finally:
        setup.loop.stop()


@pytest.mark.parametrize("prefetch", [False, True])
def test_stopping_ends_a_long_grant(prefetch: bool) -> None:
    setup = Setup(Dueling, native=True, arguments={"prefetch": prefetch})
    setup.loop.launch()
    setup.laq.grant(10**12, 0.4)
    while setup.trainer.gradient_steps < 10:
        time.sleep(1e-3)
    setup.loop.stop(timeout_s=30.0)
    assert setup.answer()[0] == setup.trainer.gradient_steps
    state = setup.replay.state_dict()  # as a checkpoint holds it: all that was sampled is trained
    assert state["call"] == setup.trainer.gradient_steps
    assert state["updates"] == setup.trainer.gradient_steps * BATCH


@pytest.mark.parametrize("prefetch", [False, True])
def test_a_step_that_diverges_is_told_to_the_host_and_leaves_the_weights(prefetch: bool) -> None:
    setup = Setup(Dueling, native=True, arguments={"prefetch": prefetch})
    before = setup.policy().copy()
    setup.storage.insert({name: np.full_like(rows[:100], np.nan) if name == "reward" else rows[:100]
                          for name, rows in setup.rows.items()})  # fmt: skip
    for slots in (np.arange(100), np.arange(200, 300)):
        setup.replay.insert(slots)
    setup.loop.launch()
    try:
        setup.laq.grant(50, 0.4)
        setup.bell.wait(0, 60.0)
        with pytest.raises(TrainerError, match="diverged"):
            setup.loop.check()
        assert np.isfinite(setup.policy()).all()
        np.testing.assert_array_equal(setup.policy(), before)
        with setup.loop.insertion_window():  # the host is not shut out
            pass
    finally:
        setup.loop.stop()


# Observations that squares of gradients overflow from, and the loss (Huber, squared) does not.
@pytest.mark.parametrize(("trainer_class", "huge"), [(Dueling, 1e25), (Deterministic, 1e17)])
def test_gradients_that_are_not_finite_leave_the_batch_that_failed(trainer_class: type[Trainer], huge: float) -> None:
    setups, batches = [], []
    for prefetch in (False, True):
        setup = Setup(trainer_class, native=True, arguments={"prefetch": prefetch})
        rows = {name: np.full_like(rows[:1], huge) if name == "obs" else rows[:1] for name, rows in setup.rows.items()}
        setup.replay.insert(setup.storage.insert(rows))
        setup.laq.grant(1000, 0.4)
        with pytest.raises(TrainerError, match=r"loss is -?\d[\d.]*, the gradients' norm (inf|-?nan)"):
            setup.loop.run_once()
        setups.append(setup)
        batches.append(setup.loop.last_batch())
    assert (batches[0]["obs"] == np.float32(huge)).any()
    for name, column in batches[0].items():
        np.testing.assert_array_equal(column, batches[1][name], err_msg=name)
    assert_same_state(setups[1].trainer, setups[0].trainer)
    # The next batch had been drawn before the gradients were there.
    states = [setup.replay.state_dict() for setup in setups]
    assert [state["call"] - states[0]["call"] for state in states] == [0, 1]
    assert [state["updates"] - states[0]["updates"] for state in states] == [0, BATCH]


class Scarce(Setup):
    def make_replay(self) -> Any:
        return make_replay_manager(ReplaySpec(CAPACITY, max_times_sampled=2), seed=5)


@pytest.mark.parametrize("prefetch", [False, True])
def test_a_replay_that_has_nothing_left_to_sample_is_told_to_the_host(prefetch: bool) -> None:
    setup = Scarce(Dueling, native=True, arguments={"prefetch": prefetch})
    setup.loop.launch()
    try:
        setup.laq.grant(1000, 0.4)
        setup.bell.wait(0, 60.0)
        with pytest.raises(ReplayError, match="sampled 2 times"):
            setup.loop.check()
        assert setup.trainer.gradient_steps == 2 * 200 // BATCH
        with setup.loop.insertion_window():
            pass
    finally:
        setup.loop.stop()


def test_parts_that_do_not_fit_are_refused() -> None:
    setup = Setup(Dueling, native=True)
    learner = NativeLearner(setup.trainer)
    queues = (setup.laq.native, setup.ldq.native, setup.wsq.native)
    wide = DataStorage(TransitionSpec.from_spaces(spaces.Box(-1.0, 1.0, (9,), np.float32), DISCRETE), CAPACITY)
    with pytest.raises(TrainerError, match="bytes of column 0"):
        learner.fused_loop(setup.replay, wide, BATCH, queues, 1)
    fields = tuple(replace(f, dtype="int32") if f.name == "reward" else f for f in setup.storage.spec.fields)
    with pytest.raises(TrainerError, match="'reward' must have dtype float32; found int32"):  # as many bytes
        learner.fused_loop(setup.replay, DataStorage(TransitionSpec(fields), CAPACITY), BATCH, queues, 1)
    other = make_replay_manager(ReplaySpec(CAPACITY + 1), seed=5)
    with pytest.raises(TrainerError, match="differ in capacity: 301 and 300"):
        learner.fused_loop(other, setup.storage, BATCH, queues, 1)
    small = WeightSyncQueue(3)
    with pytest.raises(TrainerError, match="the queue to the Actors takes 3"):
        learner.fused_loop(setup.replay, setup.storage, BATCH, (*queues[:2], small.native), 1)


def test_threads_do_not_outlive_the_loop() -> None:
    before = threading.active_count()
    setup = Setup(Gradual, native=True)
    setup.loop.launch()
    setup.laq.grant(5, 0.4)
    assert setup.answer()[0] == 5
    setup.loop.stop()
    assert threading.active_count() == before


@pytest.mark.parametrize("native", [True, False])
def test_the_last_batch_is_what_was_trained_whatever_was_inserted_since(native: bool) -> None:
    setup = Setup(Gradual, native=native)
    setup.run(1)
    before = {name: column.copy() for name, column in setup.loop.last_batch().items()}
    with setup.loop.insertion_window():
        setup.replay.insert(setup.storage.insert(rows_of(setup.storage.spec, CAPACITY, seed=1)))
    for name, column in setup.loop.last_batch().items():
        np.testing.assert_array_equal(column, before[name], err_msg=name)


@pytest.mark.parametrize("native", [True, False])
def test_a_window_that_an_interrupt_left_open_does_not_keep_the_loop_from_stopping(native: bool) -> None:
    setup = Setup(Dueling, native=native)
    setup.loop.launch()
    setup.loop.kernel.open_window()  # a second Ctrl-C came before the block that closes it
    setup.laq.grant(3, 0.4)
    setup.loop.stop(60.0)
    setup.loop.kernel.close_window()
