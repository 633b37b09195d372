"""The Learner's implementations: which are measured, which is placed, how one is forced, and the programs they give."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from programs import ONE_CPU, TWO_CPUS, CsvPair, described, make_program, run
from trainers import OwnTrainer, TinyDQN, TinyTD3
from typer.testing import CliRunner

from composer.algorithm1 import place
from composer.matrix import (
    AssignmentMatrix,
    LearnerCell,
    LearnerOption,
    MatrixRow,
    MissingCell,
    PairCell,
    ReplayCell,
    UnsupportedLearner,
)
from composer.measurement import Measurement
from composer.placement import Placement
from composer.platform import Platform
from composer.profiling import keys
from composer.spec_file import load_spec
from pearl.actors.actor import ActorSetup
from pearl.algorithms.trainer import make_trainer
from pearl.backends import check_implementation, learners
from pearl.backends.cpu import BACKEND as CPU_BACKEND
from pearl.backends.cpu.learner import NativeLearner
from pearl.backends.protocol import LearnerImplementation
from pearl.cli import app
from pearl.devices import Connection, Device
from pearl.errors import ConfigurationError, PlacementError, TrainerError
from pearl.learner.torch_learner import TorchLearner

EACH = pytest.mark.parametrize("name", ["torch", "native"])


class OwnNoise(TinyTD3):
    """Its steps need Python."""

    def draw_noise(self, rows: int, draw: int) -> torch.Tensor:
        return torch.zeros(rows, self.action_size)


# --- the registry ---------------------------------------------------------------------------------------------------


def trainer_of(kind: type) -> Any:
    return make_trainer(kind, spaces.Box(-1.0, 1.0, (4,), np.float32), spaces.Discrete(2))


@EACH
def test_an_entry_makes_its_learner_with_the_threads_asked_for(name: str) -> None:
    learner: Any = learners()[name].make(trainer_of(TinyDQN), threads=2)
    assert type(learner) is {"torch": TorchLearner, "native": NativeLearner}[name]
    assert (learner.backend, learner.threads) == (name, 2)


def test_torch_trains_any_trainer_and_the_native_learner_says_which_it_does_not() -> None:
    own = trainer_of(OwnTrainer)
    assert learners()["torch"].supports(own) is None
    assert learners()["native"].supports(trainer_of(TinyDQN)) is None
    reason = learners()["native"].supports(own)
    assert reason is not None
    assert "OwnTrainer" in reason
    assert "\n" not in reason
    with pytest.raises(TrainerError, match="OwnTrainer"):
        learners()["native"].make(own)


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    assert check_implementation("auto", auto=True) == "auto"
    for name, advice in (("nativ", r"Did you mean 'native'\?"), ("auto", "'torch', 'native'"), (None, "found None")):
        with pytest.raises(ConfigurationError, match=advice):
            check_implementation(name)


# --- Algorithm 1 over implementations -------------------------------------------------------------------------------

CPUS = Platform((Device("cpu0", "cpu", "cpu"), Device("cpu1", "cpu", "cpu")), (Connection("cpu0", "cpu1", 1.0, 10.0),))
WITH_GPU = Platform((Device("cpu0", "cpu", "cpu"), Device("gpu0", "gpu", "cuda")), (Connection("cpu0", "gpu0", 5, 12),))
UNSUPPORTED = UnsupportedLearner("exotic", "the update rule of TinyDQN")


def row_of(device: str, **steps: tuple[float, float]) -> MatrixRow:
    """A row whose Learners take (alone, beside the Replay Manager) microseconds, the fastest first."""
    managing = Measurement.modelled(5.0)
    replay = ReplayCell(managing, managing, managing, fanout=16)
    options = []
    for name, times in steps.items():
        alone, together = (LearnerCell(Measurement.modelled(us), 2, implementation=name) for us in times)
        options.append(LearnerOption(alone, PairCell(replay, together)))
    first, *others = options
    return MatrixRow(device, replay, first.learner, first.pair, tuple(others))


def placed(*rows: MatrixRow, platform: Platform = CPUS) -> Placement:
    matrix = AssignmentMatrix(rows, unsupported=(UNSUPPORTED,))
    return place(matrix, platform, batch_size=64, transition_bytes=48, actor_count=1)


@pytest.mark.parametrize(("native_us", "torch_us", "faster"), [(10.0, 100.0, "native"), (100.0, 10.0, "torch")])
def test_the_faster_implementation_is_placed_and_the_other_is_an_alternative(
    native_us: float, torch_us: float, faster: str
) -> None:
    steps = {"native": (native_us, native_us), "torch": (torch_us, torch_us)}
    placement = placed(row_of("cpu0", **dict(sorted(steps.items(), key=lambda item: item[1]))))
    slower = ({"native", "torch"} - {faster}).pop()
    assert placement.learner_config.implementation == placement.implementation == faster
    (other,) = placement.alternatives
    assert other.implementation == slower
    assert other.t_itr_us - placement.t_itr_us == pytest.approx(90.0)
    assert other.times_worse == pytest.approx(other.t_itr_us / placement.t_itr_us)
    assert "training costs 90.00 us more" in other.reason
    shown = str(placement)
    assert re.search(rf"cpu0 \({faster}\).*chosen", shown)
    assert re.search(rf"cpu0 \({slower}\).*5\.\d\dx slower", shown)
    assert "the exotic Learner is left out (unsupported: the update rule of TinyDQN" in shown
    assert list(placement.to_pandas()["implementation"]) == [faster, slower]


def test_on_a_shared_device_the_times_beside_the_replay_manager_decide() -> None:
    placement = placed(row_of("cpu0", torch=(10.0, 60.0), native=(20.0, 30.0)))
    assert placement.implementation == "native"
    assert placement.terms.learner_us == 30.0


def test_an_implementation_can_be_chosen_afterwards() -> None:
    slow = (500.0, 500.0)
    placement = placed(
        row_of("cpu0", native=(10.0, 10.0), torch=(20.0, 20.0)), row_of("gpu0", torch=slow), platform=WITH_GPU
    )
    assert placement.with_choice(implementation="torch").terms.learner_us == 20.0
    # What the new device has not is not kept.
    on_gpu = placement.with_choice(learner="gpu0")
    assert (on_gpu.learner, on_gpu.implementation) == ("gpu0", "torch")
    assert placement.with_choice(replay_manager="gpu0").implementation == "native"
    with pytest.raises(PlacementError, match=r"native Learner on 'gpu0' is not .*cpu0 \+ gpu0 \(torch\)"):
        placement.with_choice(learner="gpu0", implementation="native")
    with pytest.raises(PlacementError, match=r"unsupported: the update rule of TinyDQN"):
        placement.with_choice(implementation="exotic")


def test_a_placement_keeps_its_implementation_as_json_and_may_be_edited_there() -> None:
    placement = placed(row_of("cpu0", native=(10.0, 10.0), torch=(20.0, 20.0)))
    text = placement.to_json()
    assert Placement.from_json(text) == placement
    document = json.loads(text)
    assert document["implementation"] == "native"
    document["implementation"] = "torch"
    assert Placement.from_json(json.dumps(document)) == placement.with_choice(implementation="torch")
    # A document that does not say is from when there was torch only.
    older = json.loads(placement.with_choice(implementation="torch").to_json())
    del older["implementation"], older["unsupported"]
    assert Placement.from_json(json.dumps(older)).learner_config.implementation == "torch"
    document["implementation"] = "numpy"
    with pytest.raises(ConfigurationError, match="numpy Learner"):
        Placement.from_json(json.dumps(document))


def test_the_matrix_shows_every_implementation() -> None:
    matrix = AssignmentMatrix((row_of("cpu0", native=(10.0, 12.0), torch=(310.0, 312.0)),), unsupported=(UNSUPPORTED,))
    assert AssignmentMatrix.from_json(matrix.to_json()) == matrix
    text = str(matrix)
    step, other = text.index("| step"), text.index("| or step")
    assert step < text.index("10.00 modelled") < text.index("native, threads 2") < other
    assert other < text.index("310.0 modelled") < text.index("torch, threads 2")
    assert "the exotic Learner is left out" in text
    assert all(len(line) <= 120 for line in text.splitlines())
    table = matrix.to_pandas()
    assert list(table[table["latency"] == "step"]["p50_us"]) == [10.0, 12.0, 310.0, 312.0]


def test_a_device_without_a_replay_manager_still_offers_its_learners() -> None:
    host = row_of("cpu0", torch=(900.0, 900.0))
    none = MissingCell("no Replay Manager")
    times = [LearnerCell(Measurement.modelled(us), implementation=name) for name, us in (("a", 10.0), ("b", 20.0))]
    remote = MatrixRow("gpu0", none, times[0], none, (LearnerOption(times[1], none),))
    placement = placed(host, remote, platform=WITH_GPU)
    assert [c.names for c in placement.candidates][:2] == [("cpu0", "gpu0", "a"), ("cpu0", "gpu0", "b")]
    # Each pair that is not possible is there once, whatever would have run on it.
    assert [(i.replay_manager, i.learner) for i in placement.impossible] == [("gpu0", "cpu0"), ("gpu0", "gpu0")]


# --- profiling ------------------------------------------------------------------------------------------------------


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`made_up(native=..., torch=...)`: a step takes that many microseconds with one thread, and everything else 5.

    Each further thread adds `gain` of the first one's speed.
    """

    def patch(collection_us: float = 1e9, gain: float = 1.0, ahead: float = 1.0, **steps: float) -> None:
        def step(implementation: str, threads: int) -> list[float]:
            return [steps[implementation] / (1.0 + gain * (threads - 1))] * 3

        def measure_replay(*_: object) -> dict[str, list[float]]:
            return {name: [5.0, 5.0, 5.0] for name in ("sample", "insert", "update")}

        def measure_actor(setup: ActorSetup, _budget_s: float) -> list[float]:
            return [collection_us * setup.spec.envs_per_actor * setup.steps_per_message] * 3

        def measure_learner(
            _: object, __: object, name: str, threads: int, parts: int, **___: object
        ) -> dict[str, list[float]]:
            return {"step": step(name, threads)}

        def measure_pair(
            _: object, __: object, name: str, replay: ReplayCell, threads: int, *, prefetch: bool
        ) -> dict[str, list[float]]:
            parts = {**measure_replay(), "gather": [0.0] * 3, "step": step(name, threads)}
            return {name: [s * ahead for s in samples] if prefetch else samples for name, samples in parts.items()}

        def measure_storage(*_: object) -> dict[str, list[float]]:
            return {"gather": [0.0] * 3, "store": [0.0] * 3}

        monkeypatch.setattr("composer.profiling.replay_column.measure_replay", measure_replay)
        monkeypatch.setattr("composer.profiling.storage_column.measure_storage", measure_storage)
        monkeypatch.setattr("composer.profiling.context.measure_actor", measure_actor)
        monkeypatch.setattr("composer.profiling.learner_column.measure_learner", measure_learner)
        monkeypatch.setattr("composer.profiling.pair_column.measure_pair", measure_pair)
        # The device files of these tests state more cores than the machine may have.
        monkeypatch.setattr("composer.composing.with_cores_of_host", lambda platform: (platform, ()))

    return patch


@pytest.mark.parametrize(("times", "faster"), [((20.0, 400.0), "NativeLearner"), ((400.0, 20.0), "TorchLearner")])
def test_the_composer_places_and_writes_the_faster_one(
    csv_pair: CsvPair,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    made_up: Callable[..., None],
    times: tuple[float, float],
    faster: str,
) -> None:
    made_up(native=times[0], torch=times[1])
    composer = described(csv_pair(*ONE_CPU), calibration=tmp_path / "calibration.json", progress=True)
    replay, learner = composer.run()
    slower = ({"NativeLearner", "TorchLearner"} - {faster}).pop()
    assert learners()[learner.implementation].name == faster
    last = capsys.readouterr().out.splitlines()[-1]
    assert f"{learner.implementation} 20.00 us a step (placed)" in last
    assert "400.0 us a step" in last
    text = composer.runtime_gen(replay, learner, tmp_path / "program.py").read_text()
    assert f"learner = {faster}(" in text
    assert slower not in text


def test_each_implementation_gets_the_fewest_threads_that_keep_up_with_the_actors(
    csv_pair: CsvPair, tmp_path: Path, made_up: Callable[..., None]
) -> None:
    devices = csv_pair("cpu0,cpu,cpu,,9,60")  # a core for the actor, eight for the Learner
    # A batch of 16 at 2 samples a transition is collected in 8 transitions, 800 us.
    made_up(collection_us=100.0, native=20.0, torch=1500.0)
    composer = described(devices, calibration=tmp_path / "calibration.json")
    _, learner = composer.run()
    assert (learner.implementation, learner.threads) == ("native", 1)
    (other,) = composer.matrix["cpu0"].others
    assert isinstance(other.learner, LearnerCell)
    assert (other.learner.implementation, other.learner.threads) == ("torch", 2)
    # Where none keeps up, the fastest.
    made_up(collection_us=0.1, native=20.0, torch=1500.0)
    composer = described(devices, calibration=tmp_path / "other.json")
    assert composer.run()[1].threads == 8


@pytest.mark.parametrize(
    ("cores", "gain", "ratio", "ahead", "prefetch"),
    [
        (3, 0.0, math.inf, 0.8, True),  # a core for the Actor, one for the Learner, one to draw batches on
        (3, 0.0, math.inf, 0.97, False),  # not worth a core
        (3, 1.0, math.inf, 0.8, False),  # the third core is the Learner's second thread's
        (2, 0.0, math.inf, 0.8, False),
        (3, 0.0, 2.0, 0.8, False),  # what the Actor collects, the Learner trains in time
    ],
)
def test_batches_are_drawn_ahead_where_a_core_is_idle_and_that_is_faster(
    csv_pair: CsvPair,
    tmp_path: Path,
    made_up: Callable[..., None],
    cores: int,
    gain: float,
    ratio: float,
    ahead: float,
    prefetch: bool,
) -> None:
    made_up(collection_us=100.0, gain=gain, ahead=ahead, native=90.0, torch=900.0)
    composer = described(
        csv_pair(f"cpu0,cpu,cpu,,{cores},60"),
        calibration=tmp_path / "calibration.json",
        training={"replay_ratio": ratio},
    )
    replay, learner = composer.run()
    assert (learner.implementation, learner.prefetch) == ("native", prefetch)
    assert ("prefetching" in str(composer.placement)) == prefetch
    factor = ahead if prefetch else 1.0
    assert composer.placement.t_itr_us == pytest.approx(factor * (90.0 / (1.0 + gain) + 10.0), rel=0.01)
    assert Placement.from_json(composer.placement.to_json()) == composer.placement
    text = composer.runtime_gen(replay, learner, tmp_path / "program.py").read_text()
    assert ("prefetch=True" in text) == prefetch


def test_nothing_is_drawn_ahead_for_a_loop_in_python(
    csv_pair: CsvPair, tmp_path: Path, made_up: Callable[..., None]
) -> None:
    made_up(collection_us=100.0, gain=0.0, ahead=0.8, native=90.0, torch=900.0)
    for trainer, prefetch in ((TinyTD3, True), (OwnNoise, False)):
        composer = described(
            csv_pair("cpu0,cpu,cpu,,3,60"),
            calibration=tmp_path / f"{trainer.__name__}.json",
            trainer=trainer,
            env="Pendulum-v1",
            training={"replay_ratio": math.inf},
        )
        _, learner = composer.run()
        assert (learner.implementation, learner.prefetch) == ("native", prefetch)


# A batch of 16 at 2 samples a transition is collected in 8 transitions. With an Actor that waits for the Learner most
# of the time, a second thread is worth it; not with one that needs its core, nor where the second thread gains little.
@pytest.mark.parametrize(
    ("transition_us", "gain", "threads", "beside_us"),
    [
        (10.0, 1.0, 2, 580.0),  # a thread of 500 us and an Actor of 80 us on one of two cores
        (10.0, 0.25, 2, 880.0),
        (70.0, 1.0, 1, 1000.0),  # 1,060 us for a thread of 500 us and an Actor of 560 us
        (70.0, 0.25, 1, 1000.0),
        (10.0, 0.1, 1, 1000.0),  # 989 us: not worth the risk
        (1000.0, 1.0, 1, 1000.0),  # one thread keeps up
    ],
)
def test_the_learner_may_share_the_cores_of_actors_that_wait_for_it(
    csv_pair: CsvPair,
    tmp_path: Path,
    made_up: Callable[..., None],
    transition_us: float,
    gain: float,
    threads: int,
    beside_us: float,
) -> None:
    made_up(collection_us=transition_us, gain=gain, torch=1000.0)
    settings = {"implementation": "torch"}
    composer = described(csv_pair(*ONE_CPU), settings=settings, calibration=tmp_path / "calibration.json")
    replay, learner = composer.run()
    assert learner.threads == threads
    # The matrix says what was measured, the prediction what that comes to beside the Actors.
    pair = composer.matrix.cell("cpu0", "RM & Learner")
    assert isinstance(pair, PairCell)
    assert pair.learner.step.value_us == 1000.0 / (1.0 + gain * (threads - 1))
    assert composer.placement.terms.learner_us == pytest.approx(beside_us)
    assert composer.placement.eps == pytest.approx(16 / (beside_us + 10.0) * 1e6, rel=1e-3)
    text = composer.runtime_gen(replay, learner, tmp_path / "program.py").read_text()
    assert f"    threads={threads},\n" in text
    assert f"predicted_eps={composer.placement.eps:.1f}" in text


def test_actors_that_run_free_keep_a_core_each(csv_pair: CsvPair, tmp_path: Path, made_up: Callable[..., None]) -> None:
    made_up(collection_us=10.0, torch=1000.0)
    settings, training = {"implementation": "torch"}, {"replay_ratio": float("inf")}
    for cores, actors, threads, beside_us in ((2, 1, 1, 1000.0), (5, 1, 4, 250.0), (2, 2, 1, 1500.0)):
        composer = described(
            csv_pair(f"cpu0,cpu,cpu,,{cores},60"),
            settings=settings,
            training=training,
            actors=actors,
            calibration=tmp_path / f"{cores}-{actors}.json",
        )
        assert composer.run()[1].threads == threads
        assert composer.placement.terms.learner_us == pytest.approx(beside_us)


@pytest.mark.usefixtures("quick_profiles")
def test_every_cell_says_how_it_was_measured(csv_pair: CsvPair) -> None:
    composer = described(csv_pair(*ONE_CPU))
    composer.run()
    row = composer.matrix["cpu0"]
    found = [cell for option in row.learners for _, cell in option.cells()]
    assert len(found) == 4
    for cell in found:
        for _, latency in cell.measurements():
            assert latency.source == "measured"
            assert latency.n >= 10
            assert 0 < latency.p20_us <= latency.value_us <= latency.p80_us


@EACH
def test_a_forced_implementation_is_the_only_one_measured(
    csv_pair: CsvPair, tmp_path: Path, made_up: Callable[..., None], name: str
) -> None:
    made_up(**{name: 100.0})  # the other has no time: measuring it would fail
    composer = described(
        csv_pair(*ONE_CPU), settings={"implementation": name}, calibration=tmp_path / "calibration.json"
    )
    _, learner = composer.run()
    assert learner.implementation == name
    assert {c.learner.implementation for c in composer.placement.candidates} == {name}


def test_forcing_what_cannot_train_the_trainer_says_why_before_anything_is_measured(
    csv_pair: CsvPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"implementation": "native"}
    composer = described(csv_pair(*ONE_CPU), trainer=OwnTrainer, env="Counting-v0", settings=settings)
    monkeypatch.setattr("composer.replay_composing.Profiler", None)  # profiling would fail
    with pytest.raises(TrainerError, match=r"native Learner cannot train OwnTrainer \(unsupported: .*leave .* out"):
        composer.run()


def test_an_unknown_implementation_is_refused_at_once() -> None:
    from pearl import Composer

    with pytest.raises(
        ConfigurationError, match=r"'auto', 'torch', 'native', 'cuda', 'sycl', 'fpga'; found 'Native'.*mean 'native'"
    ):
        Composer(progress=False).set_train_function(learner=TinyDQN, implementation="Native")


def test_one_line_names_what_was_unsupported(
    csv_pair: CsvPair,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    made_up: Callable[..., None],
) -> None:
    made_up(torch=100.0)
    composer = described(
        csv_pair(*TWO_CPUS, connections=["cpu0,cpu1,1,10"]),
        trainer=OwnTrainer,
        env="Counting-v0",
        training={"batch_size": 16},
        progress=True,
        calibration=tmp_path / "calibration.json",
    )
    with caplog.at_level(logging.INFO, logger="pearl.composer"):
        _, learner = composer.run()
    assert learner.implementation == "torch"
    line = re.compile(r"the native Learner is left out \(unsupported: .*OwnTrainer")
    for text in (capsys.readouterr().out, caplog.text, str(composer.matrix), str(composer.placement)):
        assert len(line.findall(text)) == 1, text
    with pytest.raises(PlacementError, match=r"unsupported: .*OwnTrainer"):
        composer.runtime_gen(learner=dataclasses.replace(learner, implementation="native"), path=tmp_path / "p.py")


def test_an_edited_implementation_is_taken_from_the_alternatives(
    csv_pair: CsvPair, tmp_path: Path, made_up: Callable[..., None]
) -> None:
    made_up(native=10.0, torch=90.0)
    composer = described(csv_pair(*ONE_CPU), calibration=tmp_path / "calibration.json")
    replay, learner = composer.run()
    edited = dataclasses.replace(learner, implementation="torch")
    text = composer.runtime_gen(replay, edited, tmp_path / "program.py").read_text()
    assert "TorchLearner(" in text
    (torch,) = composer.placement.alternatives
    assert f"predicted_eps={round(torch.eps, 1)}," in text


def test_measurements_hold_for_one_implementation_and_its_sources(
    csv_pair: CsvPair,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    made_up: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made_up(native=10.0, torch=90.0)
    files, calibration = csv_pair("cpu0,cpu,cpu,,1,60"), tmp_path / "calibration.json"

    def measured(**settings: Any) -> list[int]:
        described(files, settings=settings, calibration=calibration, progress=True).run()
        found = re.search(r"profiled: (\d+) measured, (\d+) known", capsys.readouterr().out)
        assert found
        return [int(count) for count in found.groups()]

    # The Actors, Replay Manager, Data Storage, and of each implementation the Learner alone and beside them.
    assert measured(implementation="torch") == [5, 0]
    assert measured() == [2, 5]
    assert measured(implementation="native") == [0, 5]
    usual = keys.kernel_hash
    for changed, anew in (("native", 2), ("torch", 2), (None, 7 - 1)):
        # The compiled kernels are no part of what torch's Learner alone does; of the pair they are.
        names = ("native", None) if changed is None else (changed,)
        monkeypatch.setattr(
            keys,
            "kernel_hash",
            lambda name=None, module="pearl._native", *, names=names, changed=changed: (
                f"{changed} edited" if name in names else usual(name, module)
            ),
        )
        assert measured() == [anew, 7 - anew], changed


def test_the_replay_manager_gets_the_threads_with_which_it_is_fastest(
    csv_pair: CsvPair, tmp_path: Path, made_up: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    made_up(native=10.0, torch=90.0)

    def measure_replay(_: object, __: object, fanout: int, workers: int) -> dict[str, list[float]]:
        return {name: [100.0 + 10 * abs(workers - 2)] * 3 for name in ("sample", "insert", "update")}

    monkeypatch.setattr("composer.profiling.replay_column.measure_replay", measure_replay)
    for batch, workers in ((4096, 2), (64, 1)):
        composer = described(
            csv_pair("cpu0,cpu,cpu,,5,60"), training={"batch_size": batch}, calibration=tmp_path / f"{batch}.json"
        )
        composer.set_replay(8192)
        replay, learner = composer.run()
        assert replay.workers == workers
        text = composer.runtime_gen(replay, learner, tmp_path / "program.py").read_text()
        assert ("workers=2" in text) == (workers == 2)


class Mine(TorchLearner):
    """A third implementation."""


def test_a_new_implementation_is_one_entry(
    csv_pair: CsvPair, tmp_path: Path, made_up: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = LearnerImplementation(__name__, "Mine", ("threads",))
    monkeypatch.setitem(CPU_BACKEND.learners, "mine", entry)
    made_up(native=10.0, torch=90.0, mine=5.0)
    composer = described(csv_pair(*ONE_CPU), calibration=tmp_path / "calibration.json")
    replay, learner = composer.run()
    assert learner.implementation == "mine"
    assert {c.learner.implementation for c in composer.placement.candidates} == {"mine", "native", "torch"}
    assert isinstance(entry.make(trainer_of(TinyDQN)), Mine)
    text = composer.runtime_gen(replay, learner, tmp_path / "program.py").read_text()
    assert f"from {__name__} import Mine\n" in text
    assert "learner = Mine(" in text


# --- composition files and the command ------------------------------------------------------------------------------

SPEC = """
[actors]
env = "CartPole-v1"
[trainer]
class = "trainers:TinyDQN"
{line}
[replay]
size = 1000
"""


def test_a_composition_file_may_name_the_implementation(tmp_path: Path) -> None:
    path = tmp_path / "spec.toml"

    def implementation(line: str, **options: Any) -> str:
        path.write_text(SPEC.format(line=line))
        return load_spec(path, progress=False, **options)[0].implementation

    assert implementation("") == "auto"
    assert implementation('implementation = "native"') == "native"
    assert implementation('implementation = "native"', implementation="torch") == "torch"
    with pytest.raises(
        ConfigurationError, match=r"\[trainer\] implementation: .*'torch', 'native', 'cuda', 'sycl', 'fpga'; found 'c'"
    ):
        implementation('implementation = "c"')
    with pytest.raises(ConfigurationError, match=r"\[trainer\] implementation: expected one of auto, torch, native"):
        implementation("implementation = 1")


def test_the_command_takes_an_implementation(tmp_path: Path, made_up: Callable[..., None], csv_pair: CsvPair) -> None:
    made_up(torch=77.0)
    devices, connections = csv_pair(*ONE_CPU)
    path = tmp_path / "spec.toml"
    platform = f'[platform]\ndevices = "{devices}"\nconnections = "{connections}"\n'
    path.write_text(platform + SPEC.format(line=""))
    done = CliRunner().invoke(app, ["compose", str(path), "--implementation", "torch"])
    assert done.exit_code == 0, done.output
    assert "TorchLearner(" in (tmp_path / "runs" / "spec" / "program.py").read_text()
    assert "torch 77.00 us a step (placed)" in done.output
    wrong = CliRunner().invoke(app, ["compose", str(path), "--implementation", "fast"])
    assert wrong.exit_code == 1
    assert "found 'fast'" in wrong.output


# --- the programs ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def native_programs(tmp_path_factory: pytest.TempPathFactory, quick_profiles: None) -> dict[int, Path]:
    """A DQN on CartPole as composed without a word about implementations, in both settings."""
    folder = tmp_path_factory.mktemp("programs")
    programs = {setting: make_program(folder, setting=setting, name=f"setting{setting}") for setting in (1, 2)}
    for program in programs.values():
        assert "learner = NativeLearner(" in program.read_text(), "on this machine torch was the faster one"
    return programs


def steps(run_dir: Path) -> tuple[int, int]:
    found = json.loads((run_dir / "summary.json").read_text())
    return found["env_steps"], found["gradient_steps"]


@pytest.mark.parametrize(("setting", "goes_on"), [(1, "torch"), pytest.param(2, "native", marks=pytest.mark.slow)])
def test_a_native_program_trains_in_threads_and_either_learner_goes_on(
    native_programs: dict[int, Path], tmp_path: Path, setting: int, goes_on: str
) -> None:
    common = ("--eval-episodes", "0", "--run-dir", str(tmp_path / "run"))
    code, output = run(native_programs[setting], "--timesteps", "1500", *common)
    assert code == 0, output
    env_steps, gradient_steps = steps(tmp_path / "run")
    assert env_steps >= 1500
    assert gradient_steps > 100
    program = tmp_path / "goes_on.py"
    text = native_programs[setting].read_text()
    if goes_on == "torch":  # programs may be edited
        text = text.replace("pearl.backends.cpu.learner", "pearl.learner.torch_learner")
        text = text.replace("NativeLearner", "TorchLearner")
    program.write_text(text)
    code, output = run(program, "--resume", "--timesteps", "2500", *common)
    assert code == 0, output
    assert f"at step {env_steps:,}" in output
    assert steps(tmp_path / "run")[1] > gradient_steps


def test_a_native_program_resumes_to_the_bit_in_serial_mode(native_programs: dict[int, Path], tmp_path: Path) -> None:
    common = ("--serial", "--seed", "7", "--eval-episodes", "0", "--checkpoint-interval", "512")

    def weights(name: str, *arguments: str) -> bytes:
        code, output = run(native_programs[2], *common, "--run-dir", str(tmp_path / name), *arguments)
        assert code == 0, output
        return (tmp_path / name / "weights.safetensors").read_bytes()

    whole = weights("whole", "--timesteps", "1024")
    half = next(p for p in sorted((tmp_path / "whole" / "checkpoints").iterdir()) if p.name.startswith("checkpoint-"))
    (tmp_path / "half").mkdir()
    shutil.copytree(half, tmp_path / "half" / half.name)
    resumed = weights("resumed", "--timesteps", "1024", "--resume", "--checkpoint-dir", str(tmp_path / "half"))
    assert resumed == whole
    assert steps(tmp_path / "resumed") == steps(tmp_path / "whole")


def test_a_native_program_whose_trainer_has_changed_says_why_it_cannot_run(
    csv_pair: CsvPair, tmp_path: Path, made_up: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "changing_trainer.py"
    source.write_text("from trainers import TinyDQN\n\n\nclass Changing(TinyDQN):\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    made_up(native=10.0, torch=90.0)
    import changing_trainer  # type: ignore[import-not-found]

    composer = described(csv_pair(*ONE_CPU), trainer=changing_trainer.Changing, calibration=tmp_path / "c.json")
    composer.run()
    program = composer.runtime_gen(path=tmp_path / "program.py")
    assert "NativeLearner(" in program.read_text()
    source.write_text(source.read_text() + "\n    def finish_step(self):\n        super().finish_step()\n")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=":")
    code, output = run(program, "--serial", "--timesteps", "500")
    assert code == 1
    assert "Error: The native learner cannot train Changing (unsupported: Changing overrides finish_step" in output
    assert "TorchLearner" in output
