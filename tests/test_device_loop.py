"""Setting 2 on devices, SYCL and the emulator of CUDA: the loop in C++, its launches, and what stops it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
from gymnasium import spaces
from references import CUDA
from test_native_loop import (
    BATCH,
    CAPACITY,
    DISCRETE,
    INTERVAL,
    Deterministic,
    Dueling,
    Gradual,
    Setup,
    Soft,
    Twin,
    assert_same_state,
)

from pearl import _cuda
from pearl.algorithms import Trainer
from pearl.backends.cuda import runtime
from pearl.backends.cuda.device import EMULATOR
from pearl.backends.cuda.learner import CudaLearner
from pearl.backends.cuda.storage import CudaDataStorage
from pearl.backends.sycl.learner import SyclLearner
from pearl.backends.sycl.storage import SyclDataStorage
from pearl.errors import TrainerError
from pearl.replay import make_replay_manager
from pearl.replay.storage import DataStorage
from pearl.spec import ReplaySpec, TransitionSpec


class Place(NamedTuple):
    """A device's primitives, and the module of their kernels."""

    learner: Any
    storage: Any
    replay: dict[str, str]
    module: str


PLACES = {
    "sycl": Place(SyclLearner, SyclDataStorage, {"backend": "sycl"}, "pearl._sycl"),
    "cuda": Place(
        partial(CudaLearner, device=CUDA),
        partial(CudaDataStorage, device=CUDA),
        {"backend": "cuda", "device": CUDA},
        "pearl._cuda",
    ),
}


class OnDevice(Setup):
    """All three parts on one device; `native` False: the interpreted loop over them."""

    place: Place

    def __init__(self, trainer_class: type[Trainer], *, native: bool = True, **more: Any) -> None:
        super().__init__(trainer_class, native=native, learner=self.place.learner, **more)

    def make_replay(self) -> Any:
        return make_replay_manager(ReplaySpec(CAPACITY), seed=5, **self.place.replay)

    def make_storage(self, spec: TransitionSpec, **options: Any) -> Any:
        return self.place.storage(spec, CAPACITY, **options)


@pytest.fixture(params=[pytest.param("sycl", marks=pytest.mark.sycl), "cuda"], autouse=True)
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Place:
    found = PLACES[request.param]
    monkeypatch.setattr(OnDevice, "place", found, raising=False)
    return found


def published(setup: Setup) -> Any:
    return setup.wsq.reader().poll()


def assert_same_replay(found: Setup, expected: Setup) -> None:
    theirs = expected.replay.state_dict()
    for name, value in found.replay.state_dict().items():
        np.testing.assert_array_equal(value, theirs[name], err_msg=name)


@pytest.mark.parametrize("trainer_class", [Dueling, Gradual, Deterministic, Twin, Soft])
def test_the_loop_on_the_device_and_the_interpreted_one_agree_to_the_bit(trainer_class: type[Trainer]) -> None:
    device, interpreted = OnDevice(trainer_class), OnDevice(trainer_class, native=False)
    assert type(device.loop.kernel).__module__ == device.place.module
    for setup in (device, interpreted):
        setup.run(7)
        with setup.loop.insertion_window():
            setup.replay.insert(setup.storage.insert({name: rows[200:240] for name, rows in setup.rows.items()}))
        setup.run(30)
        setup.run(1)
    assert_same_state(device.trainer, interpreted.trainer)
    assert_same_replay(device, interpreted)
    assert device.trainer.gradient_steps == 38
    np.testing.assert_array_equal(published(device), published(interpreted))


def test_uniform_draws_count_their_updates(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def uniform(_: OnDevice) -> Any:
        return make_replay_manager(ReplaySpec(CAPACITY, "uniform"), seed=5, **place.replay)

    monkeypatch.setattr(OnDevice, "make_replay", uniform)
    device, interpreted = OnDevice(Dueling), OnDevice(Dueling, native=False)
    for setup in (device, interpreted):
        setup.run(20)
    assert_same_state(device.trainer, interpreted.trainer)
    assert_same_replay(device, interpreted)
    assert device.replay.statistics().updates == 20 * BATCH


def test_draws_for_recordings_are_those_of_the_cpu() -> None:
    device, cpu = OnDevice(Dueling), Setup(Dueling, native=True)
    kernel, storage = device.replay.kernel, device.storage.kernel
    for beta in np.linspace(0, 1, 70):  # more than are prepared at once
        kernel.prepare_iteration(BATCH, beta)
        kernel.launch_draw(storage)
        expected = cpu.replay.sample(BATCH, beta)
        indices, weights, _ = kernel.read_batch()
        np.testing.assert_array_equal(indices, expected.indices)
        np.testing.assert_array_equal(weights, expected.weights)


def test_it_draws_what_the_cpu_draws() -> None:
    device, cpu = OnDevice(Dueling), Setup(Dueling, native=True)
    for setup in (device, cpu):
        setup.run(1)
    np.testing.assert_array_equal(device.loop.last_batch()["indices"], cpu.loop.last_batch()["indices"])
    for name, column in cpu.loop.last_batch().items():
        np.testing.assert_array_equal(device.loop.last_batch()[name], column, err_msg=name)


@pytest.mark.parametrize(("trainer_class", "launches"), [(Gradual, 5), (Deterministic, 6)])
def test_an_iteration_is_few_launches(trainer_class: type[Trainer], launches: int, place: Place) -> None:
    """One draws with the rows, one updates, the others train; Gradual clips gradients, which takes one more.

    CUDA records iterations that it has launched before, up to the next publication: INTERVAL is 2 and 1 of them.
    """
    setup = OnDevice(trainer_class)
    setup.run(4 * INTERVAL)
    before = setup.storage.queue.launches
    setup.run(20 * INTERVAL)
    once = 20 * (2 if place.module == "pearl._cuda" else INTERVAL * launches)
    assert setup.storage.queue.launches - before == once


def test_settings_that_change_between_grants_are_followed() -> None:
    """The rates, other kernels, other launches, and what these are recorded with."""

    def changed(trainer: Any, at: int) -> None:
        for optimizer in (trainer.actor_optimizer, trainer.critic_optimizer):
            for group in optimizer.param_groups:
                group["lr"] *= 0.5
        if at == 1:
            trainer.max_grad_norm = 0.5
        if at == 2:
            trainer.policy_delay = 2
        if at == 3:
            trainer.tau, trainer.target_noise = 0.02, 0.4

    device, interpreted = OnDevice(Twin), OnDevice(Twin, native=False)
    for at in range(5):
        for setup in (device, interpreted):
            changed(setup.trainer, at)
            setup.loop.refresh()
            setup.run(17)
    assert_same_state(device.trainer, interpreted.trainer)
    assert_same_replay(device, interpreted)


def test_a_resumed_loop_goes_on_to_the_bit() -> None:
    whole = OnDevice(Soft)
    whole.run(24)
    resumed = OnDevice(Soft, seed=8, resumes=whole)
    for setup in (whole, resumed):
        setup.loop.restarted()
        setup.run(13)
    assert_same_state(resumed.trainer, whole.trainer)
    assert_same_replay(resumed, whole)


def test_the_host_inserts_while_the_loop_runs() -> None:
    setup = OnDevice(Dueling)
    setup.loop.launch()
    try:
        setup.laq.grant(400, 0.4)
        for start in range(0, CAPACITY, 20):
            with setup.loop.insertion_window():
                part = {name: rows[start : start + 20] for name, rows in setup.rows.items()}
                setup.replay.insert(setup.storage.insert(part))
        assert setup.answer()[0] == 400
    finally:
        setup.loop.stop()
    setup.loop.check()
    assert setup.replay.statistics().inserts == 200 + CAPACITY
    assert setup.trainer.gradient_steps == 400


@pytest.fixture
def late(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches and copies are made when they are waited for, and some blocks run at once."""
    if place.module != "pearl._cuda" or CUDA != EMULATOR:
        pytest.skip("only the emulator of CUDA makes launches late")
    queue = _cuda.EmulatedQueue(64, "shuffled", 1)
    monkeypatch.setattr(runtime, "_queue", lambda _: queue)


@pytest.mark.usefixtures("late")
def test_late_launches_of_a_loop_give_what_early_ones_give() -> None:
    late, cpu = OnDevice(Soft), Setup(Soft, native=True)
    for setup in (late, cpu):
        setup.run(7)
        with setup.loop.insertion_window():
            setup.replay.insert(setup.storage.insert({name: rows[200:240] for name, rows in setup.rows.items()}))
        setup.run(1)
    np.testing.assert_array_equal(late.loop.last_batch()["indices"], cpu.loop.last_batch()["indices"])


def test_what_diverges_stops_the_loop_with_its_batch() -> None:
    setup = OnDevice(Dueling)
    setup.run(2)
    before = setup.policy()
    rows = {name: column[:CAPACITY].copy() for name, column in setup.rows.items()}
    rows["reward"][:] = np.nan
    setup.replay.insert(setup.storage.insert(rows))
    setup.laq.grant(5, 0.4)
    with pytest.raises(TrainerError, match="diverged"):
        setup.loop.run_once()
    np.testing.assert_array_equal(setup.policy(), before)
    assert setup.trainer.gradient_steps == 2
    batch = setup.loop.last_batch()
    assert np.isnan(batch["reward"]).all()
    assert batch["obs"].shape == (BATCH, *setup.storage.spec.fields[0].shape)
    with setup.loop.insertion_window():  # the host is not shut out
        pass


def test_the_batch_that_failed_stays_though_more_iterations_were_launched() -> None:
    setup = OnDevice(Dueling)
    setup.run(4 * INTERVAL)
    rows = {name: column[:CAPACITY].copy() for name, column in setup.rows.items()}
    rows["reward"][:] = np.nan
    setup.replay.insert(setup.storage.insert(rows))
    host = make_replay_manager(ReplaySpec(CAPACITY), seed=5)
    host.load_state_dict(setup.replay.state_dict())
    setup.laq.grant(INTERVAL, 0.4)
    with pytest.raises(TrainerError, match="diverged"):
        setup.loop.run_once()
    np.testing.assert_array_equal(setup.loop.last_batch()["indices"], host.sample(BATCH, 0.4).indices)


def test_priorities_of_a_batch_that_failed_are_not_stored() -> None:
    setup = OnDevice(Soft)
    setup.run(2)
    rows = {name: column[:CAPACITY].copy() for name, column in setup.rows.items()}
    rows["reward"][:] = 1e25  # finite errors, whose squares are not
    slots = setup.storage.insert(rows)
    setup.replay.insert(slots)
    before = setup.replay.retrieve(slots)
    setup.laq.grant(INTERVAL, 0.4)
    with pytest.raises(TrainerError, match="diverged"):
        setup.loop.run_once()
    np.testing.assert_array_equal(setup.replay.retrieve(slots), before)


def test_what_is_not_on_the_device_throughout_is_interpreted() -> None:
    class HostStorage(OnDevice):
        def make_storage(self, spec: TransitionSpec, **options: Any) -> Any:
            return DataStorage(spec, CAPACITY)

    setup = HostStorage(Dueling)
    assert type(setup.loop.kernel).__name__ == "_InterpretedLoop"
    setup.run(3)


def test_parts_that_do_not_fit_are_refused(place: Place) -> None:
    setup = OnDevice(Dueling)
    learner = place.learner(setup.trainer)
    queues = (setup.laq.native, setup.ldq.native, setup.wsq.native)
    other = make_replay_manager(ReplaySpec(CAPACITY + 1), seed=5, **place.replay)
    with pytest.raises(TrainerError, match=f"differ in capacity: {CAPACITY + 1} and {CAPACITY}"):
        learner.fused_loop(other, setup.storage, BATCH, queues, 1)
    wide = place.storage(TransitionSpec.from_spaces(spaces.Box(-1.0, 1.0, (9,), np.float32), DISCRETE), CAPACITY)
    with pytest.raises(TrainerError, match="bytes of column 0"):
        learner.fused_loop(setup.replay, wide, BATCH, queues, 1)
    fields = tuple(replace(f, dtype="int32") if f.name == "reward" else f for f in setup.storage.spec.fields)
    whole = place.storage(TransitionSpec(fields), CAPACITY)
    with pytest.raises(TrainerError, match="'reward' must have dtype float32; found int32"):  # as many bytes
        learner.fused_loop(setup.replay, whole, BATCH, queues, 1)
