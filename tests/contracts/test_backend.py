"""The backend's contract, for every entry of the table alike, and for the toy backend of one module.

A device that fails leaves a named missing cell in the matrix: test_one_folder_backend.py.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import math
import re
from typing import Any, get_args

import numpy as np
import pytest
from gymnasium import spaces
from references import on_host
from trainers import OwnTrainer, TinyDQN, TinyTD3

from composer.modelled_rows import ESTIMATORS
from pearl.algorithms import make_trainer
from pearl.backends import TABLE, backend_for, backend_of, backends, csv_names, learners, runs_on
from pearl.backends.protocol import Backend, Discovery, HostCores, NoProgram
from pearl.backends.replay_managers import replay_managers
from pearl.backends.sycl.selector import EMULATOR_SELECTOR
from pearl.devices import Connection, Device
from pearl.errors import ConfigurationError, PearlError, TrainerError
from pearl.spec import FieldSpec, ReplaySpec, TransitionSpec

NULL = "sample_us=5;insert_us=2;update_us=3;learner_us=100;sharing=1.5"
# Rows of the device CSV that each backend answers for: at least one of each of its kinds.
ROWS: dict[str, list[tuple[str, str, str]]] = {
    "cpu": [("cpu", "cpu", "")],
    "cuda": [("gpu", "cuda", "cuda:0")],
    "sycl": [("cpu", "sycl", "opencl:cpu:0"), ("gpu", "sycl", "level_zero:gpu:0")],
    "fpga": [("fpga", "sycl", EMULATOR_SELECTOR), ("fpga", "sycl", "opencl:accelerator:0")],
    "null": [(kind, "null", NULL) for kind in ("cpu", "gpu", "fpga")],
    "model": [(kind, "model", "") for kind in ("cpu", "gpu", "fpga")],
    "toy": [("gpu", "toy", ""), ("gpu", "toy", "broken")],
}
MARKS = {"sycl": (pytest.mark.sycl,), "fpga": (pytest.mark.fpga,)}
each_backend = pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS.get(name, ())) for name in ROWS])


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TABLE, "toy", "toy_backend")


def backend_called(name: str) -> Backend:
    return backends()[list(TABLE).index(name)]


def rows_of(name: str) -> list[Device]:
    return [Device(f"{name}{i}", *row, cores=4) for i, row in enumerate(ROWS[name])]  # type: ignore[arg-type]


def usable(name: str) -> list[Device]:
    """Those of its rows that are hardware of this machine, and work."""
    backend = backend_called(name)
    here = [device for device in rows_of(name) if backend.is_here and device.availability().ok]
    return [device for device in here if device.selector != "broken"]


def test_every_backend_is_held_to_the_contract() -> None:
    assert set(ROWS) == set(TABLE)


# --- rows of the device CSV -------------------------------------------------------------------------------------------


@each_backend
def test_rows_of_each_kind_lead_to_the_backend(name: str) -> None:
    backend = backend_called(name)
    assert backend.name == name
    assert {row[0] for row in ROWS[name]} == set(backend.kinds)
    for kind in backend.kinds:
        assert backend_for(kind, backend.csv_name) is backend
        assert backend.csv_name in csv_names(kind)
    assert all(backend_of(device) is backend for device in rows_of(name))


@each_backend
def test_a_selector_that_means_nothing_to_it_is_named(name: str) -> None:
    backend = backend_called(name)
    for kind in backend.kinds:
        with pytest.raises(ConfigurationError, match=r"found .*banana"):
            Device("d", kind, backend.csv_name, "banana")


@each_backend
def test_what_is_absent_has_a_reason(name: str) -> None:
    backend = backend_called(name)
    candidates = backend.candidates()
    for device in (*candidates.values(), *rows_of(name)):
        assert device.backend == backend.csv_name
        found = device.availability()
        assert isinstance(found.ok, bool)
        assert found.ok != bool(found.reason)
        assert "\n" not in found.reason
    assert all(isinstance(label, str) and label for label in candidates)


@each_backend
def test_discovered_devices_can_be_used(name: str) -> None:
    said: list[str] = []
    host = Device("cpu0", "cpu", "cpu", cores=2, active_watts=60.0)
    found = backend_called(name).discover(Discovery(measure=False, report=said.append, host=host))
    names = [device.name for device in found.devices]
    assert len(set(names)) == len(names)
    for device in found.devices:
        assert device.backend == backend_called(name).csv_name
        assert backend_of(device).is_here
        assert device.availability().ok
    assert {end for link in found.connections for end in (link.source, link.target)} <= {"cpu0", *names}
    assert all(isinstance(link, Connection) for link in found.connections)
    assert all(isinstance(line, str) and line for line in said)


@each_backend
def test_hardware_does_not_change_between_calls_nor_with_the_name(name: str) -> None:
    backend = backend_called(name)
    for device in rows_of(name):
        hardware = backend.hardware(device)
        assert hardware is None or (isinstance(hardware, str) and hardware)
        assert backend.hardware(device) == hardware
        renamed = Device("other", device.kind, device.backend, device.selector, cores=4)
        assert renamed.fingerprint() == device.fingerprint()


# --- what the composer asks -------------------------------------------------------------------------------------------


@each_backend
def test_answers_have_the_types_that_the_composer_takes(name: str) -> None:
    backend = backend_called(name)
    assert backend.host_cores in get_args(HostCores)
    assert not backend.is_failure(ValueError("of the user's trainer"))
    assert isinstance(backend.needs_messages, bool)
    assert importlib.util.find_spec(backend.kernels) or backend.csv_name == "sycl"  # SYCL's may not be built
    for device in rows_of(name):
        assert backend.usual_memory_gbps[device.kind] > 0
        rank, messages = backend.host_rank(device), backend.messages_us(device)
        assert rank is None or isinstance(rank, int)
        assert messages is None or (math.isfinite(messages) and messages >= 0)
        for answer in (backend.on_host_cores, backend.emulated, backend.takes_primitives):
            assert isinstance(answer(device), bool)
        for with_learner in (True, False):
            assert isinstance(backend.keeps_storage(device, with_learner=with_learner), bool)
        texts = backend.note(device), backend.torch_device(device), backend.device_string(device)
        assert all(isinstance(text, str) for text in texts)
        refused = backend.no_program(device)
        assert refused is None or (isinstance(refused, NoProgram) and refused.reason and refused.remedy)
        assert refused is not None or backend.is_here, "a program would run on what is not here"


@each_backend
def test_a_row_that_is_not_measured_names_an_estimator_that_exists(name: str) -> None:
    backend = backend_called(name)
    for device in rows_of(name):
        estimator = backend.estimator(device)
        assert estimator is None or estimator in ESTIMATORS
        assert isinstance(backend.estimator_parameters(device), str)
        assert estimator is not None or backend.learners, "there is nothing to measure"


@each_backend
@pytest.mark.parametrize("most", [1, 3, 8])
def test_parameters_of_a_learner_rise_within_their_limits(name: str, most: int) -> None:
    backend = backend_called(name)
    for device in rows_of(name):
        found = backend.learner_parameters(device, most_threads=most, most_sub_batches=most)
        sizes = [(each.threads, each.sub_batches) for each in found]
        assert sizes
        assert sizes == sorted(set(sizes))
        assert min(map(min, sizes)) >= 1
        assert all(threads <= most for threads, *_ in sizes) or backend.host_cores != "threads"
        assert all(parts <= most for _, parts in sizes)


# --- Replay Managers and Data Storages --------------------------------------------------------------------------------

# Each shape of an FPGA's tree is compiled: this one, for tests/test_fpga_replay.py too.
SMALL = {"capacity": 50, "fanout": 4}
SPECS = [
    ReplaySpec(**SMALL),
    ReplaySpec(**SMALL, mode="uniform"),
    ReplaySpec(**SMALL, mode="fifo"),
    ReplaySpec(**SMALL, replacement=False),
    ReplaySpec(**SMALL, max_times_sampled=3),
    ReplaySpec(**SMALL, initial_priority="mean"),
    ReplaySpec(**{**SMALL, "fanout": "auto"}),
]


@each_backend
def test_a_replay_manager_is_made_or_what_it_lacks_is_named(name: str) -> None:
    backend = backend_called(name)
    for spec in SPECS:
        for device in rows_of(name):
            lacking, factory = backend.replay_lacks(device, spec), backend.replay(device)
            assert lacking is None or (lacking and "\n" not in lacking)
            if factory is None:
                assert lacking or backend.no_program(device), "it can be placed and not be made"
            elif device in usable(name) and lacking:
                with pytest.raises(PearlError):
                    factory.make_replay(spec, seed=0)
            elif device in usable(name):
                with contextlib.closing(factory.make_replay(spec, seed=0)) as replay:
                    assert (replay.capacity, replay.mode) == (spec.capacity, spec.mode)
                    replay.insert([3])
                    assert replay.sample(1).indices.tolist() == [3]


@each_backend
def test_factories_are_named_and_can_be_imported(name: str) -> None:
    backend = backend_called(name)
    for device in rows_of(name):
        for factory in filter(None, (backend.replay(device), backend.storage(device), backend.advantages(device))):
            assert callable(factory.load())
            assert factory.name in backend.factory_names
            assert all(isinstance(text, str) for text in (*factory.arguments, *factory.arguments.values()))
    for entry in backend.replay_managers.values():
        assert set(entry.arguments) <= set(inspect.signature(entry.load()).parameters)
    assert set(backend.replay_managers) <= set(replay_managers())


@each_backend
def test_a_storage_gives_back_what_it_was_given(name: str) -> None:
    spec = TransitionSpec((FieldSpec("obs", (3,), "float32"), FieldSpec("action", (), "int64")))
    rows = {"obs": np.arange(12, dtype=np.float32).reshape(4, 3), "action": np.arange(4)}
    for device in usable(name):
        factory = backend_called(name).storage(device)
        if factory is None:
            continue
        storage = factory.make_storage(spec, 10, backend_called(name).device_string(device))
        assert storage.insert(rows).tolist() == [0, 1, 2, 3]
        for column, values in storage.gather([3, 0]).items():
            np.testing.assert_array_equal(on_host(values), rows[column][[3, 0]])
        storage.close()


# --- Learners ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trainers() -> list[Any]:
    """A trainer of discrete actions, one of continuous actions, and one that derives from nothing."""
    obs, choice, box = spaces.Box(-1.0, 1.0, (4,)), spaces.Discrete(2), spaces.Box(-1.0, 1.0, (2,))
    return [make_trainer(*each) for each in ((TinyDQN, obs, choice), (TinyTD3, obs, box), (OwnTrainer, obs, choice))]


@each_backend
def test_its_learners_say_what_they_take_and_which_trainers_they_train(name: str, trainers: list[Any]) -> None:
    backend = backend_called(name)
    for implementation, entry in backend.learners.items():
        assert learners()[implementation].module == entry.module
        assert all(runs_on(implementation, device) for device in rows_of(name))
        assert set(entry.arguments) <= {"device", "threads", "sub_batches", "unroll", "prefetch"}
        assert set(entry.arguments) <= set(inspect.signature(entry.load()).parameters)
        assert "prefetch" not in entry.arguments or isinstance(entry.load().loops_natively, property)
        assert all(file.is_file() for file in entry.sources)
        for trainer in trainers:
            reason = entry.supports(trainer)
            assert reason is None or (reason and "\n" not in reason)
        for device in usable(name):
            learner = entry.make(trainers[0], device=backend.device_string(device))
            assert learner.backend == implementation
            assert learner.weight_count > 0
            for trainer in trainers:
                if reason := entry.supports(trainer):
                    with pytest.raises(TrainerError, match=re.escape(reason)):
                        entry.make(trainer, device=backend.device_string(device))
