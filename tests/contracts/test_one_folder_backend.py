"""A new backend is one module and one line: composed, placed, generated and trained with, in both settings."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from programs import CsvPair, described, run
from toy_backend import BACKEND, ToyLearner

import pearl.backends
from composer import Composer
from composer.matrix import MissingCell
from composer.profiling.context import ProfilingContext
from composer.profiling.learner_column import measure_learner
from composer.profiling.profiler import Profiler
from pearl.devices import Device
from pearl.errors import ConfigurationError, DeviceError, TrainerError

HERE = Path(__file__).resolve().parent
HOST = "cpu0,cpu,cpu,,2,60"


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line; what is measured need not be measured well."""
    monkeypatch.setitem(pearl.backends.TABLE, "toy", "toy_backend")
    monkeypatch.setattr(
        "composer.replay_composing.Profiler", lambda *args, **more: Profiler(*args, **more, budget_s=0.02)
    )


def composed(csv_pair: CsvPair, selector: str = "", calibration: Path | None = None) -> Composer:
    files = csv_pair(HOST, f"toy0,gpu,toy,{selector},1,30", connections=["cpu0,toy0,5,10"])
    composer = described(files, calibration=calibration)
    composer.run()
    return composer


def test_a_row_of_the_new_backend_is_checked_like_any_other() -> None:
    assert pearl.backends.backend_of(Device("toy0", "gpu", "toy")) is BACKEND
    with pytest.raises(
        ConfigurationError, match="a cpu is driven by cpu or sycl or null or model; found backend 'toy'"
    ):
        Device("toy0", "cpu", "toy")
    with pytest.raises(ConfigurationError, match="A toy's selector"):
        Device("toy0", "gpu", "toy", "7")


def test_every_pair_with_it_is_priced_and_trains(
    csv_pair: CsvPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    composer = composed(csv_pair)
    cell = composer.matrix["toy0"].learner
    assert not isinstance(cell, MissingCell)
    assert (cell.implementation, cell.step.source) == ("toy", "measured")
    pairs = {(c.replay.device, c.learner.device) for c in composer.placement.candidates}
    assert pairs == {(i, j) for i in ("cpu0", "toy0") for j in ("cpu0", "toy0")}
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    for replay, learner, storage in (
        ("toy0", "toy0", "toy0"),
        ("cpu0", "toy0", "toy0"),
        ("toy0", "cpu0", "cpu0"),
    ):
        placement = composer.placement.with_choice(replay_manager=replay, learner=learner)
        placement = placement.with_choice(storage=storage)
        program = composer.runtime_gen(placement=placement, path=tmp_path / f"{replay}_{learner}.py", timesteps=400)
        text = program.read_text()
        made = {name for name in ("make_toy_replay", "ToyStorage", "ToyLearner") if f"{name}(" in text}
        wanted = {"make_toy_replay": replay, "ToyStorage": storage, "ToyLearner": learner}
        assert made == {name for name, device in wanted.items() if device == "toy0"}
        assert re.search(rf"Data Storage +{storage}$", text, re.MULTILINE)
        assert not [o for o in placement.chosen.storage if o.device == "toy0" and learner != "toy0"]
        code, output = run(program, "--serial", "--eval-episodes", "1")
        assert code == 0, output


def test_a_broken_one_is_a_named_missing_cell(csv_pair: CsvPair) -> None:
    composer = composed(csv_pair, "broken")
    row = composer.matrix["toy0"]
    assert row.replay == row.pair == MissingCell("the toy is broken")
    assert not isinstance(row.learner, MissingCell)
    assert composer.placement.replay_manager == "cpu0"


def test_a_learner_is_measured_again_where_its_batches_come_from_other_memory(
    csv_pair: CsvPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[str] = []

    def noted(context: ProfilingContext, device: Device, *arguments: Any, **more: Any) -> dict[str, list[float]]:
        measured.append(device.name)
        return measure_learner(context, device, *arguments, **more)

    monkeypatch.setattr("composer.profiling.learner_column.measure_learner", noted)
    files = csv_pair(HOST, "toy0,gpu,toy,,1,30", connections=["cpu0,toy0,5,10"])
    for share_next_obs, again in ((False, {"cpu0", "toy0"}), (True, {"toy0"}), (False, set())):
        measured.clear()
        composer = described(files, calibration=tmp_path / "new.json")
        composer.set_replay(2000, share_next_obs=share_next_obs)  # if True, the storage stays in the host's memory
        composer.run()
        assert set(measured) == again


class DriverError(Exception):
    """What a device's driver raises."""


def test_a_failure_of_its_driver_is_a_missing_cell_that_names_the_device(
    csv_pair: CsvPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise DriverError("out of order")

    monkeypatch.setattr(ToyLearner, "step", fail)
    monkeypatch.setattr(BACKEND, "is_failure", lambda error: isinstance(error, DriverError))
    row = composed(csv_pair, calibration=tmp_path / "new.json").matrix["toy0"]
    assert isinstance(row.learner, MissingCell)
    assert row.learner.reason.startswith("toy0 failed: DriverError: out of order")
    assert not isinstance(row.replay, MissingCell)
    monkeypatch.setattr(BACKEND, "is_failure", lambda error: False)
    with pytest.raises(TrainerError, match="TinyDQN failed while its training step was profiled: DriverError"):
        composed(csv_pair, calibration=tmp_path / "new.json")


def test_the_host_that_fails_ends_composing(csv_pair: CsvPair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BACKEND, "host_rank", lambda device: -1)
    with pytest.raises(DeviceError, match="the toy is broken"):
        composed(csv_pair, "broken")
