"""What the bindings of the kernels refuse, and what they hold: nothing that Python passes may end the process."""

from __future__ import annotations

import gc
import mmap
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pearl import _native
from pearl.backends.sycl.device import sycl_queue
from pearl.backends.sycl.runtime import sycl_runtime
from pearl.errors import DeviceError, PearlError, QueueError, ReplayError, TrainerError

HUGE = 2**63 + 1
LINKS = ("next", "prev", "episode", "position", "last", "stream", "tail", "free_episodes")
KEPT = ("kept", "free_kept")


def link_arrays(capacity: int = 4, *names: str) -> dict[str, np.ndarray]:
    arrays = {name: np.zeros(capacity, np.int64) for name in (*LINKS, *names)}
    return arrays | {
        "ending": np.zeros(capacity, np.uint8),
        **{name: np.zeros(1, np.int64) for name in ("open", "resumed", "awaited")},
        "counters": np.zeros(6, np.int64),
    }


def columns(capacity: int = 4) -> dict[str, np.ndarray]:
    return {"obs": np.zeros((capacity, 2)), "next_obs": np.zeros((capacity, 2))}


# --- memory that is shared --------------------------------------------------------------------------------------------


def test_buffers_with_gaps_are_refused() -> None:
    gaps = np.zeros(2 * _native.Snapshot.nbytes(64), np.uint8)[::2]
    for make in (
        lambda: _native.Snapshot(gaps, 64, True),
        lambda: _native.SlotQueue(np.zeros(2 * _native.SlotQueue.nbytes(2, 8), np.uint8)[::2], 2, 8, True),
        lambda: _native.Doorbell(np.zeros(2 * _native.Doorbell.nbytes, np.uint8)[::2]),
    ):
        with pytest.raises(PearlError, match="must be contiguous"):
            make()
    shot = _native.Snapshot(np.zeros(_native.Snapshot.nbytes(64), np.uint8), 64, True)
    wide = np.arange(128, dtype=np.uint8)
    for payload in (wide[::2], wide[::-1][:64], np.zeros((8, 16), np.uint8)[:, :8]):
        with pytest.raises(PearlError, match="must be contiguous"):
            shot.write(payload)
        with pytest.raises(PearlError, match="must be contiguous"):
            shot.read(payload, 0)
    assert shot.write(wide[:64].reshape(8, 8)) == 1
    assert shot.read(out := np.zeros(64, np.uint8), 0) == 1
    assert np.array_equal(out, wide[:64])


@pytest.mark.parametrize(("slots", "slot_bytes"), [(2**58, 64), (2**32, 2**32), (1, 2**64 - 1), (2**63, 8), (2**61, 1)])
def test_sizes_that_overflow_are_refused(slots: int, slot_bytes: int) -> None:
    for make in (
        lambda: _native.SlotQueue.nbytes(slots, slot_bytes),
        lambda: _native.SlotQueue(mmap.mmap(-1, 4096), slots, slot_bytes, True),
        lambda: _native.Snapshot.nbytes(2**64 - 1),
        lambda: _native.Snapshot(mmap.mmap(-1, 4096), 2**63, True),
    ):
        with pytest.raises(QueueError, match="fits no memory"):
            make()
    with pytest.raises(TypeError):
        _native.SlotQueue(mmap.mmap(-1, 4096), -1, 8, True)


def test_a_damaged_snapshot_is_an_error_not_a_wait() -> None:
    memory = np.zeros(_native.Snapshot.nbytes(8), np.uint8)
    shot = _native.Snapshot(memory, 8, True)
    shot.write(np.zeros(8, np.uint8))
    memory[64:72].view(np.int64)[0] = 77  # the version
    with pytest.raises(QueueError, match="damaged"):
        shot.read(np.zeros(8, np.uint8), 0)


def test_none_is_no_queue_to_wait_for() -> None:
    with pytest.raises(TypeError, match="None is no queue"):
        _native.wait_for_all([None], _native.Doorbell(np.zeros(64, np.uint8)), 0.0)  # type: ignore[list-item]


def test_probes_of_the_machine_measure_something() -> None:
    assert _native.copy_bandwidth(1 << 22, 3) > 0.1
    assert 0.1 < _native.random_access_ns(1 << 20, 100_000) < 10_000


# --- Data Storage -----------------------------------------------------------------------------------------------------


def test_links_hold_their_arrays_and_leave_the_callers_dictionary_alone() -> None:
    arrays, kept = link_arrays(4, *KEPT), columns()
    names = set(arrays)
    links = _native.EpisodeLinks(arrays, 0, kept["obs"], None, np.zeros((4, 2)))
    assert set(arrays) == names
    arrays.clear()
    kept.clear()
    gc.collect()
    rubbish = [np.full(1 << 10, -1, np.int64) for _ in range(1000)]
    rows = np.arange(8.0).reshape(4, 2)
    links.insert(0, 0, np.zeros(4, np.int64), np.zeros(4, np.uint8), None, rows, rows, None, None)
    assert links.damage(4, 0) == ""
    assert len(rubbish) == 1000


def test_links_refuse_what_does_not_fit() -> None:
    obs, other = columns()["obs"], columns()["next_obs"]
    for arrays, given in (
        (link_arrays(0), (0, None, None, None)),
        (link_arrays() | {"open": np.zeros(0, np.int64)}, (0, None, None, None)),
        (link_arrays() | {"last": np.zeros(3, np.int64)}, (0, None, None, None)),
        (link_arrays() | {"last": np.zeros(8, np.int64)[::2]}, (0, None, None, None)),
        (link_arrays(), (0, np.zeros((8, 2))[::2], other, None)),
        (link_arrays(), (0, np.zeros((4, 4))[:, :2], other, None)),
        (link_arrays(), (0, obs.astype(object), other.astype(object), None)),
        (link_arrays(), (0, obs, None, None)),
        (link_arrays(4, *KEPT), (0, None, None, other)),
    ):
        with pytest.raises(ReplayError):
            _native.EpisodeLinks(arrays, *given)
    links = _native.EpisodeLinks(link_arrays(), 0, obs, other, None)
    one, going_on = np.zeros(1, np.int64), np.zeros(1, np.uint8)
    rows = np.zeros((1, 2))
    for start, filled, positions, now, then in (
        (0, 5, None, rows, rows),
        (4, 0, None, rows, rows),
        (0, 0, None, None, None),
        (0, 0, None, rows, None),
        (0, 0, np.array([-1]), rows, rows),
        (0, 0, np.array([2**62]), rows, rows),
        (0, 0, None, np.zeros((1, 4))[:, ::2], rows),
    ):
        with pytest.raises(ReplayError):
            links.insert(start, filled, one, going_on, positions, now, then, None, None)
    with pytest.raises(ReplayError, match="Rows to insert"):
        links.insert(0, 0, one, going_on, None, rows, rows, _native.ColumnStore(columns()), None)
    links.insert(0, 0, one, going_on, None, rows, rows, None, None)
    assert links.remaining(one, 1).tolist() == [1]


def test_columns_of_objects_are_refused() -> None:
    with pytest.raises(ReplayError, match="objects"):
        _native.ColumnStore({"obs": np.array([[1], [2]], object)})


def test_sources_may_leave_the_callers_dictionary_during_an_insertion() -> None:
    """The copy goes on without Python's lock: the arrays must be held, not only the dictionary."""
    rows = 1 << 14
    store = _native.ColumnStore({"obs": np.zeros((rows, 64))})
    sources: dict[str, np.ndarray] = {}
    stop = threading.Event()

    def replace() -> None:
        while not stop.is_set():
            sources["obs"] = np.ones((rows, 64))

    sources["obs"] = np.ones((rows, 64))
    thread = threading.Thread(target=replace)
    thread.start()
    try:
        for _ in range(60):
            assert store.insert(0, rows, sources) is not None
    finally:
        stop.set()
        thread.join(30)


# --- Learner ----------------------------------------------------------------------------------------------------------


def linear(inputs: int, outputs: int) -> _native.Network:
    return _native.Network(inputs, [("linear", 0, -1, outputs, 0, inputs * outputs, 0.0)], (inputs + 1) * outputs)


def actor_critic(critics: list[_native.Network]) -> _native.ActorCriticLearner:
    zeros, ones = np.zeros, np.ones
    return _native.ActorCriticLearner(
        linear(2, 1),
        critics,
        zeros(3, np.float32),
        zeros(3, np.float32),
        zeros(4, np.float32),
        zeros(4, np.float32),
        zeros(2, np.float32),
        ones(2, np.float32),
        zeros(1, np.float32),
        ones(1, np.float32),
        1,
    )


def adam(size: int) -> _native.Optimizer:
    optimizer = _native.Optimizer()
    first, second = np.zeros(size, np.float32), np.zeros(size, np.float32)
    optimizer.set_adam(1e-3, 0.9, 0.999, 1e-8, 0.0, False, first, second, None, np.zeros(1, np.float32))
    return optimizer


def test_a_learner_holds_its_critics_not_the_list() -> None:
    critics = [linear(3, 1), linear(3, 1)]
    learner = actor_critic(critics[:1])
    made = actor_critic(critics)
    critics.clear()
    gc.collect()
    rubbish = [linear(3, 1) for _ in range(500)]
    learner.set(False, 0.0, 0.0, 0.0, -20.0, 2.0, 0.0, 0.005, 0.0)
    made.set(False, 0.0, 0.0, 0.0, -20.0, 2.0, 0.0, 0.005, 0.0)
    rows = 8
    obs, action, ones = np.ones((rows, 2), np.float32), np.ones((rows, 1), np.float32), np.ones(rows, np.float32)
    for each in (learner, made):
        found = each.step(obs, action, ones, obs, ones, ones, None, None, True, True, adam(4), adam(3), None, None)
        assert np.isfinite(found[0]).all()
    assert len(rubbish) == 500


@pytest.mark.parametrize("offset", [2**62, 2**63 - 1])
def test_networks_reach_for_no_parameters_beyond_theirs(offset: int) -> None:
    for op in (("linear", 0, -1, 2**62, 0, -1, 0.0), ("linear", 0, -1, 2, offset, -1, 0.0)):
        with pytest.raises(TrainerError):
            _native.Network(4, [op], 8)


def test_a_matrix_whose_rows_lie_between_numbers_is_refused() -> None:
    raw = np.zeros(64, np.uint8)
    odd = np.ndarray((2, 3), np.float32, raw, strides=(14, 4))
    with pytest.raises(TrainerError, match="gemm needs"):
        _native.gemm(odd, np.zeros((3, 2), np.float32), np.zeros((2, 2), np.float32))


# --- threads ----------------------------------------------------------------------------------------------------------

FEW_THREADS = """
import os, resource, signal, numpy as np
from pearl import _native
from pearl.errors import PearlError
network = _native.Network(4, [("linear", 0, -1, 2, 0, 8, 0.0)], 10)
weights = [np.zeros(10, np.float32) for _ in range(2)]
tree = _native.SumTree(1 << 16, 16, "prioritized", 0.6, 0, workers=64)
tree.insert(np.arange(1 << 16), None)
resource.setrlimit(resource.RLIMIT_NPROC, (12, 12))
if os.getuid() == 0:
    os.setgid(65534), os.setuid(65534)
for make in (
    lambda: _native.DqnLearner(network, *weights, 64),
    lambda: tree.sample(1 << 15, 0.4) and tree.sample(1 << 15, 0.4),
    lambda: [_native.ReplayAutorun(tree, 8) for _ in range(64)],
    lambda: [_native.end_with_parent(os.getppid()) for _ in range(64)],
):
    try:
        make()
    except PearlError as error:
        assert "ulimit -u" in str(error) and "fewer threads" in str(error), error
        print("refused")
print(_native.DqnLearner(network, *weights, 1) is not None, signal.pthread_sigmask(signal.SIG_BLOCK, []))
"""


@pytest.mark.skipif(not hasattr(resource, "RLIMIT_NPROC"), reason="threads cannot be limited here")
def test_a_system_without_threads_left_is_an_error() -> None:
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    shown = subprocess.run(
        [sys.executable, "-c", FEW_THREADS], capture_output=True, text=True, timeout=120, env=environment
    )
    assert shown.stdout.split() == ["refused"] * 4 + ["True", "set()"], (shown.returncode, shown.stderr[-2000:])


@pytest.mark.parametrize("count", [0, 10**6])
def test_absurd_numbers_of_threads_are_refused(count: int) -> None:
    online, target = np.zeros(10, np.float32), np.zeros(10, np.float32)
    with pytest.raises(PearlError, match=r"threads must"):
        _native.DqnLearner(linear(4, 2), online, target, count)
    if count:
        with pytest.raises(PearlError, match=r"workers must lie in \[1, 4096\]"):
            _native.SumTree(100, 16, "prioritized", 0.6, 0, workers=count)


ENDING = """
import threading, time
import numpy as np
from pearl import _native
bell = _native.Doorbell(np.zeros(64, np.uint8))
tree = _native.SumTree(64, 16, "uniform", 0.0, 0)
tree.insert(np.arange(64), None)
def draw():
    while True: tree.sample(4096, 0.4)
def wait():
    while True: bell.wait(0, 0.05)
for work in (draw, wait):
    threading.Thread(target=work, daemon=True).start()
time.sleep(0.1)
"""


def test_a_program_may_end_while_its_threads_are_in_kernels() -> None:
    ended = subprocess.run([sys.executable, "-c", ENDING], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")


# --- SYCL -------------------------------------------------------------------------------------------------------------


def refused(error: type[Exception], *calls: Callable[[], Any]) -> None:
    for call in calls:
        with pytest.raises(error):
            call()


@pytest.mark.sycl
def test_columns_on_a_device_refuse_what_does_not_fit() -> None:
    queue, module = sycl_queue("cpu"), sycl_runtime().module
    store = module.ColumnStore(queue, 8, [(np.dtype(np.float32), (3,)), (np.dtype(np.int64), ())])
    rows, numbers = np.arange(12, dtype=np.float32).reshape(4, 3), np.arange(4)
    store.insert(6, 4, [rows, numbers])
    assert store.read(1, 8).tolist() == [2, 3, 0, 0, 0, 0, 0, 1]
    assert store.gather(np.array([7, 0]))[0].tolist() == [[3, 4, 5], [6, 7, 8]]
    refused(
        TypeError,
        lambda: module.ColumnStore(None, 8, [(np.dtype(np.int64), ())]),
        lambda: module.SumTree(None, 8, 16, "uniform", 0.0, 0),
        lambda: module.Gae(None, 0.9, 0.9),
    )
    refused(
        ReplayError,
        lambda: store.insert(8, 1, [rows, numbers]),
        lambda: store.insert(0, 9, [np.zeros((9, 3), np.float32), np.zeros(9, np.int64)]),
        lambda: store.insert(0, 5, [rows, numbers]),
        lambda: store.insert(0, 4, [rows]),
        lambda: store.insert(0, 2, [rows[::2], numbers[::2]]),
        lambda: store.insert(0, 4, [rows.astype(np.float64), numbers]),
        lambda: store.insert(0, 4, [rows[:, :2].copy(), numbers]),
        lambda: store.gather(np.array([8])),
        lambda: store.gather(np.array([-1])),
        lambda: store.read(2, 1),
        lambda: store.read(0, 9),
        lambda: module.ColumnStore(queue, 0, [(np.dtype(np.float32), ())]),
        lambda: module.ColumnStore(queue, 8, []),
        lambda: module.ColumnStore(queue, 8, [(np.dtype(object), ())]),
        lambda: module.ColumnStore(queue, 8, [(np.dtype(np.float32), (-1,))]),
    )
    refused(
        DeviceError,
        lambda: queue.shared_floats(2**62 + 1),
        lambda: module.ColumnStore(queue, 2**40, [(np.dtype(np.float64), (2**40,))]),
    )
    store.close()
    refused(ReplayError, lambda: store.insert(0, 4, [rows, numbers]), lambda: store.gather(np.array([0])))


@pytest.mark.sycl
def test_a_learner_on_a_device_refuses_memory_of_other_sizes() -> None:
    queue, module = sycl_queue("cpu"), sycl_runtime().module
    layer = (2, [("linear", 0, -1, 3, 0, 6, 0.0)])
    none = np.zeros(0, np.float32)

    def make(parameters: list[Any], networks: Any = (layer,), observations: int = 2) -> Any:
        return module.Learner(queue, False, list(networks), parameters, none, observations, 1, None)

    right = [queue.shared_floats(9), queue.shared_floats(9), None, None]
    learner = make(right)
    first, second, steps = queue.shared_floats(9), queue.shared_floats(9), np.zeros(1, np.float32)
    settings = (1e-3, 0.9, 0.999, 1e-8, 0.0, False)
    learner.set_adam(0, *settings, first, second, None, steps)
    small, fixed = queue.shared_floats(8), np.zeros(1, np.float32)
    fixed.flags.writeable = False
    refused(
        TrainerError,
        lambda: make([queue.shared_floats(8), right[1], None, None]),
        lambda: make([right[0], queue.shared_floats(8), None, None]),
        lambda: make([right[0], None, None, None]),
        lambda: make(right, observations=3),
        lambda: make(right, networks=()),
        lambda: module.Learner(queue, True, [], right, none, 2, 1, None),
        lambda: learner.set_adam(0, *settings, small, second, None, steps),
        lambda: learner.set_adam(0, *settings, first, small, None, steps),
        lambda: learner.set_adam(0, *settings, first, second, small, steps),
        lambda: learner.set_adam(0, *settings, first, second, None, np.zeros(0, np.float32)),
        lambda: learner.set_adam(1, *settings, first, second, None, steps),
        lambda: learner.set_adam(3, *settings, first, second, None, steps),
        lambda: learner.set_sgd(0, 1e-3, 0.9, 0.0, 0.0, False, small, True),
        lambda: learner.set_sgd(2, 1e-3, 0.9, 0.0, 0.0, False, None, True),
        lambda: learner.set(stochastic=True),
        lambda: learner.set(target_interval=0),
        lambda: learner.step([none] * 5, none, 0),
    )
    refused(ValueError, lambda: learner.set_adam(0, *settings, first, second, None, fixed))
    tree = module.SumTree(queue, 16, 16, "prioritized", 0.6, 0)
    tree.insert(np.arange(16), None)
    refused(ReplayError, tree.launch_draw)
    tree.prepare_iteration(4, 0.4)
    tree.launch_draw()
    refused(ReplayError, lambda: tree.launch_update(np.ones(4, np.float32)))
