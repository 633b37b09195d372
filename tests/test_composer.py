from __future__ import annotations

import copy
import dataclasses
import importlib
import json
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trainers
from gymnasium.wrappers import TimeAwareObservation
from programs import ONE_CPU, TWO_CPUS, CsvPair, described
from trainers import FailsInRollouts, FailsInTraining, ForgetsRollouts, TinyDQN

from composer import AssignmentMatrix, Placement
from composer import Composer as ComposerItself
from composer.calibration import CalibrationStore
from composer.replay_composing import ReplayComposing
from pearl import Composer
from pearl.errors import ConfigurationError, EnvError, GenerationError, PlacementError, TrainerError
from pearl.exploration import EpsilonGreedy
from pearl.replay import Constant

pytestmark = pytest.mark.usefixtures("quick_profiles")

NULL_GPU = "gpu0,gpu,null,sample_us=500;insert_us=500;update_us=500;learner_us=0.001,,200"


def test_the_dozen_lines_in_the_papers_spelling(csv_pair: CsvPair, tmp_path: Path) -> None:
    device_file, connection_file = csv_pair(*ONE_CPU)
    composer = Composer(progress=False)
    composer.set_device_file(device_file)
    composer.set_connection_file(connection_file)
    composer.set_opt_metric("Throughput")
    composer.set_actors(4, env="CartPole-v1")
    composer.set_train_function(learner=TinyDQN)
    composer.set_replay(2000, mode="prioritized", fanout=16)
    replay, learner = composer.run()
    written = composer.RuntimeGen(replay=replay, learner=learner, path=tmp_path / "cartpole_runtime.py")

    assert written == tmp_path / "cartpole_runtime.py"
    assert replay.device == learner.device == "cpu0"
    text = written.read_text()
    compile(text, str(written), "exec")
    for chosen in ('env="CartPole-v1"', "count=4", "capacity=2000", "fanout=16", 'folder="', "batch_size=16"):
        assert chosen in text
    assert device_file.name in text
    shown = subprocess.run([sys.executable, written, "--help"], capture_output=True, text=True, check=True).stdout
    assert "--timesteps" in shown


def test_what_was_written_is_said_with_a_command_that_runs_it(
    csv_pair: CsvPair, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    composer = described(csv_pair(*ONE_CPU), progress=True)
    replay, learner = composer.run()
    path = tmp_path / "my runs" / "l'été.py"
    options = {"seed": 5, "eval_episodes": 7, "eval_interval": 123, "checkpoint_interval": 456}
    composer.runtime_gen(replay, learner, path, until_return="none", **options)
    said = dict(line.split(":", 1) for line in capsys.readouterr().out.splitlines()[-2:])
    assert said["Program"].strip() == "my runs/l'été.py"
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    command = f"{said['Run it']} --help"
    shown = subprocess.run(command, shell=True, capture_output=True, text=True, check=True).stdout
    for default in (*options.values(), None):
        assert f"(default: {default})" in " ".join(shown.split())


@pytest.mark.parametrize(
    "default", [{"seed": -1}, {"eval_episodes": 1.5}, {"eval_interval": "often"}, {"until_return": float("nan")}]
)
def test_defaults_that_the_program_would_refuse_are_refused(
    csv_pair: CsvPair, tmp_path: Path, default: dict[str, Any]
) -> None:
    composer = described(csv_pair(*ONE_CPU))
    composer.run()
    with pytest.raises(ConfigurationError, match=rf"{next(iter(default))} must be a "):
        composer.runtime_gen(path=tmp_path / "program.py", **default)


@pytest.mark.parametrize(("name", "value", "message"), [("seed", 3, "--seed"), ("device", "cuda", "by the composer")])
def test_what_is_no_setting_of_a_trainer_is_refused(name: str, value: object, message: str) -> None:
    with pytest.raises(ConfigurationError, match=f"takes settings of the trainer class; {name} is .*{message}"):
        Composer(progress=False).set_train_function(TinyDQN, **{name: value})


def test_pearl_re_exports_the_composer() -> None:
    assert Composer is ComposerItself


def test_results_print_and_convert(csv_pair: CsvPair) -> None:
    composer = described(csv_pair(*TWO_CPUS, connections=["cpu0,cpu1,1,10"]))
    composer.run()
    matrix, placement = composer.matrix, composer.placement
    for text in (str(matrix), str(placement)):
        assert "cpu0" in text
        assert "cpu1" in text
    for column in ("RM only", "Learner only", "RM & Learner", "measured"):
        assert column in str(matrix)
    assert set(matrix.to_pandas().reset_index().astype(str).to_numpy().ravel()) >= {"cpu0", "cpu1", "measured"}
    assert len(placement.to_pandas()) == 4 * 2, "every pair, with the Learner in torch and the native one"
    assert AssignmentMatrix.from_json(matrix.to_json()) == matrix
    assert Placement.from_json(placement.to_json()) == placement
    assert json.loads(placement.to_json())
    (network,) = composer.networks
    assert network.parameters == 4 * 16 + 16 + 16 * 2 + 2


def test_results_exist_after_run_only(csv_pair: CsvPair) -> None:
    composer = described(csv_pair(*ONE_CPU))
    for name in ("matrix", "placement", "platform"):
        with pytest.raises(ConfigurationError, match=r"Composer\.run\(\)"):
            getattr(composer, name)
    with pytest.raises(ConfigurationError, match=r"Composer\.run\(\)"):
        composer.runtime_gen(path="never_written.py")


def test_only_what_is_new_is_measured(csv_pair: CsvPair, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def said(batch_size: int) -> str:
        composer = described(
            csv_pair(*ONE_CPU),
            training={"batch_size": batch_size},
            progress=True,
            calibration=tmp_path / "calibration.json",
        )
        composer.run()
        return capsys.readouterr().out

    assert "profiled: 0 measured" not in said(16)
    assert "profiled: 0 measured" in said(16)
    assert "profiled: 0 measured" not in said(32)


@pytest.fixture
def measured(csv_pair: CsvPair, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[[Composer], int]:
    """Runs a composer and tells how many measurements it took itself."""

    def count(composer: Composer) -> int:
        capsys.readouterr()
        composer.run()
        found = re.search(r"profiled: (\d+) measured", capsys.readouterr().out)
        assert found
        return int(found[1])

    return count


def test_what_a_measurement_depends_on_is_measured_anew(
    csv_pair: CsvPair, tmp_path: Path, measured: Callable[[Composer], int]
) -> None:
    def problem(**settings: Any) -> Composer:
        calibration = tmp_path / "calibration.json"
        one_core = csv_pair("cpu0,cpu,cpu,,1,60")  # with more, how many are measured depends on how fast they are
        return described(one_core, settings=settings, progress=True, calibration=calibration)

    everything = measured(problem())
    assert everything > 0
    assert measured(problem()) == 0
    # Of settings, Replay Managers know nothing.
    assert 0 < measured(problem(learning_rate=0.5)) < everything
    assert measured(problem(learning_rate=0.5)) == 0
    # Insertions bring as many transitions as there are environments, of all actors together.
    for actors in (
        {"num_actors": 1, "envs_per_actor": 16},
        {"num_actors": 2, "envs_per_actor": 4},
        {"num_actors": 1, "envs_per_actor": 4, "vectorization": "vector_entry_point"},
    ):
        composer = problem()
        composer.set_actors(env="CartPole-v1", **actors)
        assert measured(composer) == everything, actors
        assert measured(composer) == 0, actors


def test_an_edited_trainer_is_measured_anew(
    csv_pair: CsvPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measured: Callable[[Composer], int]
) -> None:
    source = tmp_path / "my_edited_trainer.py"
    source.write_text("from trainers import TinyDQN\n\n\nclass Mine(TinyDQN):\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, source.stem, raising=False)
    trainer = importlib.import_module(source.stem).Mine
    composer = described(csv_pair(*ONE_CPU), trainer=trainer, progress=True, calibration=tmp_path / "calibration.json")
    everything = measured(composer)
    assert measured(composer) == 0
    source.write_text(source.read_text() + "\n    gamma = 0.9\n")
    assert 0 < measured(composer) < everything, "the Replay Manager's alone are still valid"


def test_auto_fanout_picks_a_candidate_and_writes_it(csv_pair: CsvPair, tmp_path: Path) -> None:
    composer = described(csv_pair(*ONE_CPU), fanout="auto", capacity=5000)
    replay, learner = composer.run()
    assert replay.fanout in (4, 8, 16, 32, 64)
    text = composer.runtime_gen(replay, learner, tmp_path / "program.py").read_text()
    assert f"fanout={replay.fanout}," in text


def test_two_cpus_offer_both_settings(csv_pair: CsvPair, tmp_path: Path) -> None:
    composer = described(csv_pair(*TWO_CPUS, connections=["cpu0,cpu1,1,10"]))
    replay, learner = composer.run()
    pairs = {(a.replay_manager, a.learner) for a in composer.placement.alternatives} | {composer.placement.chosen.pair}
    assert pairs == {(i, j) for i in ("cpu0", "cpu1") for j in ("cpu0", "cpu1")}

    replay = dataclasses.replace(replay, device="cpu0")
    apart = composer.runtime_gen(replay, dataclasses.replace(learner, device="cpu1"), tmp_path / "apart.py")
    together = composer.runtime_gen(replay, dataclasses.replace(learner, device="cpu0"), tmp_path / "together.py")
    assert "setting 1" in apart.read_text()
    assert "LearnerWorker(" in apart.read_text()
    assert "setting 2" in together.read_text()
    assert "TrainingLoop(" in together.read_text()


def test_a_priority_update_delay_without_effect_is_named(
    csv_pair: CsvPair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = csv_pair(*TWO_CPUS, connections=["cpu0,cpu1,1,10"])
    composer = described(files, progress=True, training={"priority_update_delay": 3})
    replay, learner = composer.run()
    capsys.readouterr()
    replay = dataclasses.replace(replay, device="cpu0")
    apart = composer.runtime_gen(replay, dataclasses.replace(learner, device="cpu1"), tmp_path / "apart.py")
    assert "priority_update_delay=3," in apart.read_text()
    assert "no effect" not in capsys.readouterr().out
    together = composer.runtime_gen(replay, dataclasses.replace(learner, device="cpu0"), tmp_path / "together.py")
    assert "priority_update_delay=0," in together.read_text()
    assert "priority_update_delay=3 has no effect in setting 2" in capsys.readouterr().out


def test_one_edited_configuration_is_enough(csv_pair: CsvPair, tmp_path: Path) -> None:
    composer = described(csv_pair(*TWO_CPUS, connections=["cpu0,cpu1,1,10"]))
    replay, _ = composer.run()
    together = composer.placement.with_choice(replay_manager="cpu0", learner="cpu0")
    moved = dataclasses.replace(replay, device="cpu1")
    text = composer.runtime_gen(replay=moved, placement=together, path=tmp_path / "program.py").read_text()
    apart = next(c for c in composer.placement.candidates if c.pair == ("cpu1", "cpu0"))
    assert "setting 1" in text
    assert f"predicted_eps={round(apart.eps, 1)!r}," in text


def test_edited_configurations_are_checked(csv_pair: CsvPair, tmp_path: Path) -> None:
    composer = described(csv_pair(*ONE_CPU))
    replay, learner = composer.run()
    program = tmp_path / "program.py"
    with pytest.raises(PlacementError, match="cpu7"):
        composer.runtime_gen(replay, dataclasses.replace(learner, device="cpu7"), program)
    with pytest.raises(GenerationError, match=r"threads must be .* found 0"):
        composer.runtime_gen(replay, dataclasses.replace(learner, threads=0), program)
    with pytest.raises(ConfigurationError, match=r"power of two .* found 7"):
        composer.runtime_gen(dataclasses.replace(replay, fanout=7), learner, program)
    with pytest.raises(ConfigurationError, match="device of a LearnerConfig must be a name of one; found None"):
        composer.runtime_gen(replay, dataclasses.replace(learner, device=None), program)
    order = r"runtime_gen takes what run\(\) returned, in this order: ReplayConfig and LearnerConfig, or None; found "
    swapped: Any = (learner, replay)
    for wrong, found in (
        (swapped, "LearnerConfig in the place of ReplayConfig"),
        ([(replay, learner)], "tuple in the place of ReplayConfig"),
        ([replay, str(program)], "str in the place of LearnerConfig"),
    ):
        with pytest.raises(ConfigurationError, match=order + found):
            composer.runtime_gen(*wrong, path=program)
    assert not program.exists()


EXPLORATION = EpsilonGreedy(0.5)
AGAIN: dict[str, Callable[[Composer, tuple[Path, Path]], object]] = {
    "set_device_file": lambda c, files: c.set_device_file(files[0]),
    "set_connection_file": lambda c, files: c.set_connection_file(files[1]),
    "set_opt_metric": lambda c, _: c.set_opt_metric("Throughput"),
    "set_actors": lambda c, _: c.set_actors(1, env="CartPole-v1", envs_per_actor=4),
    "set_wrappers": lambda c, _: c.set_wrappers([]),
    "set_train_function": lambda c, _: c.set_train_function(
        TinyDQN, exploration=EpsilonGreedy(0.5), hidden_sizes=[8, 8]
    ),
    "set_replay": lambda c, _: c.set_replay(2000, beta=Constant(0.5)),
    "set_training": lambda c, _: c.set_training(batch_size=32),
    "set_learners": lambda c, _: c.set_learners(1),
}
OTHERWISE: dict[str, Callable[[Composer], object]] = {
    "set_device_file": lambda c: c.set_device_file("other.csv"),
    "set_connection_file": lambda c: c.set_connection_file("other.csv"),
    "set_cluster": lambda c: c.set_cluster("auto"),
    "set_opt_metric": lambda c: c.set_opt_metric("power_efficiency"),
    "set_actors": lambda c: c.set_actors(2, env="CartPole-v1", envs_per_actor=4),
    "set_wrappers": lambda c: c.set_wrappers([TimeAwareObservation]),
    "set_train_function": lambda c: c.set_train_function(TinyDQN, exploration=EXPLORATION, hidden_sizes=np.ones(2)),
    "set_replay": lambda c: c.set_replay(2001),
    "set_training": lambda c: c.set_training(batch_size=32, insertion_rows="auto"),
    "set_learners": lambda c: c.set_learners("auto"),
    "set_rollout": lambda c: c.set_rollout(horizon=8),
    "set_placement": lambda c: c.set_placement(c.placement),
    "set_actors, set_training": lambda c: (c.set_actors("auto", env="CartPole-v1"), c.set_training()),
}


IN_NUMPY: tuple[Callable[[Composer], object], ...] = (
    lambda c: c.set_actors(np.int64(1), env=np.str_("CartPole-v1"), envs_per_actor=np.int8(4)),
    lambda c: c.set_replay(np.uint16(2000), beta=Constant(0.5), stratified=np.True_),
    lambda c: c.set_training(batch_size=np.int32(32)),
    lambda c: c.set_learners(np.int64(1)),
)
IN_PLACE: dict[str, Callable[[Composer], object]] = {
    "set_train_function": lambda c: c.settings["hidden_sizes"].append(4),
    "set_training": lambda c: c.training.update(batch_size=16),
}


def test_a_program_is_of_what_was_set_when_run_composed(csv_pair: CsvPair, tmp_path: Path) -> None:
    files = csv_pair(*ONE_CPU)
    composer = described(files)
    for set_again in AGAIN.values():
        set_again(composer, files)
    composer.run(timesteps=2000)
    before = composer.runtime_gen(path=tmp_path / "program.py").read_text()
    for names, change_in_place in IN_PLACE.items():
        changed = copy.deepcopy(composer)
        change_in_place(changed)
        with pytest.raises(ConfigurationError, match=rf"since run\(\) composed: {names}\. "):
            changed.runtime_gen(path=tmp_path / "never_written.py")
    for set_again in AGAIN.values():
        set_again(composer, files)
    for set_again_in_numpy in IN_NUMPY:
        set_again_in_numpy(composer)
    composer.missing_measurements()
    assert composer.runtime_gen(path=tmp_path / "program.py").read_text() == before
    placement = composer.placement
    for names, set_otherwise in OTHERWISE.items():
        changed = copy.copy(composer)
        set_otherwise(changed)
        with pytest.raises(ConfigurationError, match=rf"since run\(\) composed: {names}\. .* Call run\(\) again"):
            changed.runtime_gen(path=tmp_path / "never_written.py")
        assert changed.placement is placement, "results stay those of run()"
    assert not (tmp_path / "never_written.py").exists()
    composer.set_training(batch_size=64)
    composer.run()
    assert "batch_size=64," in composer.runtime_gen(path=tmp_path / "program.py").read_text()


def test_a_composer_can_be_pickled_and_copied_with_its_results(csv_pair: CsvPair, tmp_path: Path) -> None:
    composer = described(csv_pair(*ONE_CPU))
    composer.run()
    text = composer.runtime_gen(path=tmp_path / "program.py").read_text()
    for other in (pickle.loads(pickle.dumps(composer)), copy.deepcopy(composer)):
        assert other.runtime_gen(path=tmp_path / "program.py").read_text() == text
        assert other.networks == composer.networks


def test_devices_without_a_backend_are_named_and_left_out(csv_pair: CsvPair) -> None:
    rows = (*ONE_CPU, "arc,gpu,sycl,level_zero:gpu:9", "agilex,fpga,sycl,opencl:accelerator:9")
    composer = described(csv_pair(*rows, connections=["cpu0,arc,5,10", "cpu0,agilex,5,10"]))
    replay, learner = composer.run()
    assert replay.device == learner.device == "cpu0"
    assert {d.device for d in composer.matrix.unavailable} == {"arc", "agilex"}
    assert composer.matrix.devices == ("cpu0",)
    for text in (str(composer.matrix), str(composer.placement)):
        assert "arc" in text
        assert "SYCL" in text


@pytest.mark.fpga
def test_the_emulator_does_not_stand_in_the_way_of_composing(csv_pair: CsvPair) -> None:
    composer = described(csv_pair(*ONE_CPU, "fpga_emu0,fpga,sycl,fpga_emu", connections=["cpu0,fpga_emu0,5,10"]))
    replay, learner = composer.run()
    assert replay.device == learner.device == "cpu0"
    assert "fpga_emu0" in str(composer.matrix)


def test_power_efficiency_takes_the_devices_that_save_energy(csv_pair: CsvPair) -> None:
    times = "sample_us=0.001;insert_us=0.001;update_us=0.001;learner_us={learner_us}"  # no CPU is as fast
    rows = [
        "cpu0,cpu,cpu,,2,10",
        f"fast,gpu,null,{times.format(learner_us=0.01)},,100000",
        f"frugal,gpu,null,{times.format(learner_us=0.03)},,1",
    ]
    files = csv_pair(*rows, connections=["cpu0,fast,0.001,1000", "cpu0,frugal,0.001,1000"])
    chosen = {}
    for metric in ("throughput", "PowerEfficiency"):
        composer = described(files)
        composer.set_opt_metric(metric)
        _, learner = composer.run()
        chosen[metric] = learner.device
    assert chosen == {"throughput": "fast", "PowerEfficiency": "frugal"}


def test_a_connection_that_programs_do_not_use_is_warned_of(
    csv_pair: CsvPair, caplog: pytest.LogCaptureFixture
) -> None:
    links = ["cpu0,gpu0,5,10", "cpu0,gpu1,5,10", "gpu0,gpu1,0.01,900"]
    composer = described(csv_pair(*ONE_CPU, NULL_GPU, NULL_GPU.replace("gpu0", "gpu1"), connections=links))
    platform = ReplayComposing(composer, CalibrationStore()).stated_platform()
    assert platform is not None
    assert platform.link("gpu0", "gpu1").hops == ("gpu0", "cpu0", "gpu1")
    assert "from gpu0 to gpu1 does not count: programs send messages between them through cpu0" in caplog.text
    assert "gpu0 to cpu0" not in caplog.text


def test_power_efficiency_needs_watts(csv_pair: CsvPair) -> None:
    composer = described(csv_pair("cpu0,cpu,cpu,,2,"))
    composer.set_opt_metric("power_efficiency")
    with pytest.raises(ConfigurationError, match=r"'cpu0'.*'active_watts'"):
        composer.run()


def test_null_devices_are_placed_but_never_programmed(csv_pair: CsvPair, tmp_path: Path) -> None:
    # Torch needs longer for a step than anybody for the way to the GPU; the native Learner of a tiny network may not.
    composer = described(
        csv_pair(*ONE_CPU, NULL_GPU, connections=["cpu0,gpu0,0.001,1000"]), settings={"implementation": "torch"}
    )
    replay, learner = composer.run()
    assert learner.device == "gpu0"
    assert "modelled" in str(composer.matrix)
    with pytest.raises(GenerationError, match=r"gpu0.*null device"):
        composer.runtime_gen(replay, learner, tmp_path / "program.py")
    assert not (tmp_path / "program.py").exists()


def test_own_memory_is_checked_before_anything_is_measured(csv_pair: CsvPair, monkeypatch: pytest.MonkeyPatch) -> None:
    composer = described(csv_pair(*ONE_CPU), capacity=10**13)
    monkeypatch.setattr("composer.replay_composing.Profiler", None)  # profiling would fail
    with pytest.raises(ConfigurationError, match="memory are free"):
        composer.run()


def local_class() -> type:
    class Inside(TinyDQN):
        pass

    return Inside


class Odd(float):
    """A number that no program can state."""


def unguarded_class() -> type:
    return type("Typed", (TinyDQN,), {"__module__": "__main__"})  # as in a console, by -c or stdin


@pytest.mark.parametrize(
    ("problem", "error", "words"),
    [
        ({"trainer": local_class}, GenerationError, "defined inside a function"),
        ({"trainer": unguarded_class}, GenerationError, "no source file"),
        ({"settings": {"imported_from": "json"}}, GenerationError, "imported_from='json'"),
        ({"settings": {"learning_rate": Odd(0.5)}}, GenerationError, "cannot be written into a program"),
        ({"training": {"gamma": Odd(0.5)}}, GenerationError, "cannot be written into a program"),
        ({"env": "Counting-v0", "env_kwargs": {"pause_s": Odd(0)}}, GenerationError, "cannot be written"),
        ({"env": "Pendulum-v1"}, EnvError, "Discrete"),
        ({"env": "Absent-v0"}, EnvError, "Absent"),
        ({"training": {"batch_size": 3000}}, ConfigurationError, "A batch of 3000"),
        ({"settings": {"hidden_sise": 1}}, TrainerError, "Did you mean 'hidden_sizes'"),
    ],
)
def test_what_no_program_can_be_made_of_is_refused_before_the_machine_is_looked_at(
    problem: dict[str, Any], error: type[Exception], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("composer.replay_composing.Profiler", None)
    monkeypatch.setattr("composer.composing.discover", None)
    if "trainer" in problem:
        problem = {"trainer": problem["trainer"]()}
    composer = described((Path(), Path()), **problem)
    composer.device_file = composer.connection_file = None
    with pytest.raises(error, match=words):
        composer.run()


def test_what_the_devices_cannot_do_is_refused_before_anything_is_measured(
    csv_pair: CsvPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("composer.replay_composing.Profiler", None)
    with pytest.raises(PlacementError, match=r"sycl Learner runs on sycl devices.*among cpu0.*implementation='sycl'"):
        described(csv_pair(*ONE_CPU), settings={"implementation": "sycl"}).run()
    composer = described(csv_pair("cpu0,cpu,cpu,,2,60", "cpu1,cpu,cpu,,2,", connections=["cpu0,cpu1,1,10"]))
    composer.set_opt_metric("power_efficiency")
    with pytest.raises(ConfigurationError, match="device 'cpu1', column 'active_watts'"):
        composer.run()


def test_a_trainer_that_raises_while_it_is_profiled_is_named_with_its_line(csv_pair: CsvPair) -> None:
    composer = described(csv_pair(*ONE_CPU), trainer=FailsInTraining, training={"batch_size": 16})
    line = next(n for n, text in enumerate(Path(trainers.__file__).read_text().splitlines(), 1) if '["oops"]' in text)
    where = re.escape(f"KeyError: 'oops' ({trainers.__file__}, line {line}, in update_policy)")
    with pytest.raises(TrainerError, match=f"FailsInTraining failed while its training step was profiled: {where}"):
        composer.run()


@pytest.mark.parametrize(
    ("trainer", "message"),
    [
        (
            FailsInRollouts,
            r"FailsInRollouts failed while its training step was profiled: KeyError: 'columns' \(.*, line",
        ),
        (ForgetsRollouts, r"ForgetsRollouts.update_minibatch\(\) must return the parts .*; found None\."),
    ],
)
def test_a_trainer_of_rollouts_that_fails_while_it_is_profiled_is_named(trainer: type, message: str) -> None:
    composer = Composer(progress=False)
    composer.set_actors(1, env="CartPole-v1", envs_per_actor=2)
    composer.set_train_function(trainer)
    with pytest.raises(TrainerError, match=message):
        composer.run(budget_s=0)


def test_missing_calls_are_named(csv_pair: CsvPair) -> None:
    devices, connections = csv_pair(*ONE_CPU)
    composer = Composer(progress=False)
    composer.set_device_file(devices)
    composer.set_connection_file(connections)
    with pytest.raises(ConfigurationError) as caught:
        composer.run()
    for call in ("set_actors", "set_train_function", "set_replay"):
        assert call in str(caught.value)


def test_one_file_without_the_other(csv_pair: CsvPair) -> None:
    composer = described(csv_pair(*ONE_CPU))
    composer.connection_file = None
    with pytest.raises(ConfigurationError, match="set_connection_file"):
        composer.run()
    composer = described(csv_pair(*ONE_CPU))
    composer.device_file = None
    with pytest.raises(ConfigurationError, match="set_device_file"):
        composer.run()
