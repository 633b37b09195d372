"""What the composer measures is what a run will do: the Actor in its process, setting 2's loop in C++."""

from __future__ import annotations

import dataclasses
import importlib
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from programs import ONE_CPU, CsvPair, described
from trainers import OwnTrainer, TinyDQN

from composer.composer import Composer
from composer.profiling import actors as actor_profiling
from composer.profiling.actors import measure_actor
from composer.profiling.full_replay import FullReplay
from composer.profiling.pair_column import measure_loop
from composer.profiling.profiler import Profiler
from composer.profiling.together import _Together
from pearl.actors import report as report_module
from pearl.actors.actor import Actor, ActorSetup
from pearl.actors.environment import make_vector_env
from pearl.actors.native_policy import PolicyPlan
from pearl.actors.report import Report
from pearl.backends.cpu.learner import NativeLearner
from pearl.backends.protocol import Factory
from pearl.errors import EnvError
from pearl.ipc.queues import Bell
from pearl.learner.native_plan import UnsupportedError
from pearl.runtime.workers import GrantQueue, ProgressQueue
from pearl.spec import ActorSpec, ReplaySpec, TrainSpec

# Greedy actions are all 0, of three observed numbers.
PLAN = PolicyPlan(3, (("linear", 0, -1, 2, 0, 6, 0.0),), "argmax", np.zeros(8, np.float32))

# An environment of a module that knows no torch. It says in which processes it was, and does as it is told there.
WITNESS = """
import os, sys, time
from pathlib import Path
import gymnasium as gym
import numpy as np
from gymnasium import spaces


class Witness(gym.Env):
    observation_space, action_space = spaces.Box(0.0, 1.0, (3,), np.float32), spaces.Discrete(2)

    def __init__(self, path="", fate="lives", program=0):
        self.path, self.fate, self.steps = path, fate, 0
        if fate == "needs the program" and os.getpid() != program:
            raise RuntimeError("this is not the program")
        if path:
            Path(path, str(os.getpid())).write_text(" ".join(sys.modules))

    def reset(self, seed=None, options=None):
        return np.zeros(3, np.float32), {}

    def step(self, action):
        self.steps += 1
        if self.steps > 10 and self.fate == "loses count":
            return np.full(3, np.nan, np.float32), 1.0, False, False, {}
        if self.steps > 10 and self.fate in FATES:
            FATES[self.fate]()
        return np.zeros(3, np.float32), 1.0, False, False, {}


def fail():
    raise ValueError("the wheel came off")


gym.register("Witness-v0", "witness_env:Witness", disable_env_checker=True)
FATES = {
    "fails": fail,
    "crashes": lambda: os.kill(os.getpid(), 11),
    "leaves": lambda: os._exit(7),
    "hangs": lambda: time.sleep(600),
}
"""


@pytest.fixture
def witness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ActorSetup]]:
    """`witness(fate)` is the setup of an actor in such an environment; its processes leave files in `tmp_path`/seen."""
    (tmp_path / "witness_env.py").write_text(WITNESS)
    (tmp_path / "seen").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "witness_env", raising=False)
    gym.register("Witness-v0", "witness_env:Witness", disable_env_checker=True)

    def setup(fate: str = "lives", *, trainer: type | None = None, **options: Any) -> ActorSetup:
        kwargs = {"path": str(tmp_path / "seen"), "fate": fate, **options}
        actors = ActorSpec("Witness-v0", envs_per_actor=2, env_kwargs=kwargs)
        policy = PLAN if trainer is None else None
        return ActorSetup(trainer or TinyDQN, {}, actors, TrainSpec(), seed=0, policy=policy)

    yield setup
    del gym.registry["Witness-v0"]


@pytest.fixture
def seen(tmp_path: Path) -> Callable[[], dict[int, set[str]]]:
    """The modules loaded in each process that the environment was in."""
    return lambda: {int(file.name): set(file.read_text().split()) for file in (tmp_path / "seen").iterdir()}


# --- the Actor's process --------------------------------------------------------------------------------------------


def test_an_actor_is_timed_in_a_process_of_its_own_with_torch_where_it_needs_that(
    witness: Callable[..., ActorSetup], seen: Callable[[], dict[int, set[str]]]
) -> None:
    assert len(measure_actor(witness(), 0.03)) >= 10
    ((pid, modules),) = seen().items()
    assert pid != os.getpid()
    assert "numpy" in modules
    assert not {"torch", "pandas", "trainers"} & modules
    assert min(measure_actor(witness(trainer=OwnTrainer), 0.03)) > 0
    ((pid, modules),) = (item for item in seen().items() if item[0] != pid)
    assert pid != os.getpid()
    assert {"torch", "trainers"} <= modules


def test_a_module_that_registers_its_environment_overrides_nothing(
    witness: Callable[..., ActorSetup], capfd: pytest.CaptureFixture[str]
) -> None:
    setup = witness()
    assert len(measure_actor(setup, 0.0)) >= 10
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_vector_env(setup.spec).close()
    assert "Overriding" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("fate", "words"),
    [
        ("crashes", ["signal SIGSEGV", "python -X faulthandler -c", 'gym.make("Witness-v0", path=']),
        ("leaves", ["exit code 7"]),
        ("fails", ["ValueError: the wheel came off", "FATES[self.fate]()"]),
        ("loses count", ["returned an observation that is NaN or infinite, in environment 0"]),
    ],
)
def test_an_environment_that_ends_its_process_is_named(
    witness: Callable[..., ActorSetup], fate: str, words: list[str]
) -> None:
    with pytest.raises(EnvError) as caught:
        measure_actor(witness(fate), 0.03)
    if fate != "loses count":
        words = ["an actor was profiled", *words]
    assert "Witness-v0" in str(caught.value)
    for word in words:
        assert str(caught.value).count(word) == 1, word


def test_the_command_that_shows_a_crash_crashes(witness: Callable[..., ActorSetup], tmp_path: Path) -> None:
    setup = witness("crashes")
    made_by = importlib.import_module("witness_env").Witness
    with pytest.raises(EnvError) as caught:
        measure_actor(dataclasses.replace(setup, spec=dataclasses.replace(setup.spec, env=made_by)), 0.03)
    command = shlex.split(str(caught.value).partition("to see where: python ")[2])
    done = subprocess.run([sys.executable, *command], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGSEGV, done.stderr
    assert "witness_env.py" in done.stderr


def test_a_crash_leaves_the_composer_alive(
    witness: Callable[..., ActorSetup], csv_pair: CsvPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "composer.replay_composing.Profiler", lambda *args, **more: Profiler(*args, **more, budget_s=0.03)
    )
    kwargs = dict(witness("crashes").spec.env_kwargs)
    composer = described(csv_pair(*ONE_CPU), env="Witness-v0", env_kwargs=kwargs, calibration=tmp_path / "c.json")
    with pytest.raises(EnvError, match=r"Witness-v0 ended the process.*SIGSEGV"):
        composer.run()


def test_an_environment_that_hangs_is_ended(
    witness: Callable[..., ActorSetup], seen: Callable[[], dict[int, set[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actor_profiling, "_SILENCE_S", 2.0)
    with pytest.raises(
        EnvError, match=r"Witness-v0 gave no sign of life for 2 s.*a step of 2 environments.*on its own"
    ):
        measure_actor(witness("hangs"), 0.03)
    for pid in seen():
        with pytest.raises(ProcessLookupError):
            os.kill(pid, signal.SIG_DFL)


def test_every_step_is_a_sign_of_life(witness: Callable[..., ActorSetup], monkeypatch: pytest.MonkeyPatch) -> None:
    """So the time allowed is for one step, not for all of the measurement."""
    clock, report, samples = 0.0, Report(3), [1.0, 2.0, 3.0]
    monkeypatch.setattr(report_module, "time", SimpleNamespace(monotonic=lambda: clock))

    class Slow:
        """A process in which a step takes 50 s."""

        def wait(self, timeout_s: float) -> bool:
            nonlocal clock
            if not clock:
                clock = 3600.0  # both processes were stopped meanwhile, as with a container
                return False
            clock += 50.0
            if clock < 4100.0:
                report.beat()
            else:
                report.deliver(samples)
            return False

    assert actor_profiling._samples(witness(), Slow(), report) == samples  # type: ignore[arg-type]
    steps = 0

    def count() -> None:
        nonlocal steps
        steps += 1

    assert len(actor_profiling._time_actor(Actor(witness(), on_step=count), 0.0)) >= 10
    assert steps >= 10 * witness().steps_per_message


@pytest.mark.parametrize("reason", ["unpicklable", "not importable", "fails elsewhere"])
def test_what_another_process_cannot_have_is_timed_in_this_one(
    witness: Callable[..., ActorSetup],
    seen: Callable[[], dict[int, set[str]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    reason: str,
) -> None:
    setup = witness()
    if reason == "fails elsewhere":
        setup = witness("needs the program", program=os.getpid())
    else:
        import witness_env  # type: ignore[import-not-found]

        of_here = type("Local", (witness_env.Witness,), {}) if reason == "unpicklable" else witness_env.Witness
        del gym.registry["Witness-v0"]
        gym.register("Witness-v0", of_here, disable_env_checker=True)
        (tmp_path / "witness_env.py").unlink()
    assert len(measure_actor(setup, 0.03)) >= 10
    assert set(seen()) == {os.getpid()}


def test_what_fails_in_this_process_too_is_told_once(witness: Callable[..., ActorSetup]) -> None:
    with pytest.raises(EnvError, match="failed in its constructor: RuntimeError: this is not the program"):
        measure_actor(witness("needs the program", program=0), 0.03)


PROGRAM = '''
import os
import gymnasium as gym
import numpy as np
from composer.profiling.actors import measure_actor
from pearl.actors.actor import Actor, ActorSetup
from pearl.actors.native_policy import PolicyPlan
from pearl.spec import ActorSpec, ReplaySpec, TrainSpec
from witness_env import Witness

PLAN = PolicyPlan(3, (("linear", 0, -1, 2, 0, 6, 0.0),), "argmax", np.zeros(8, np.float32))


class Mine(Witness):
    """Of the program itself."""


gym.register("Mine-v0", Mine, disable_env_checker=True)
{guard}
    actors = ActorSpec("Mine-v0", envs_per_actor=2, env_kwargs={{"path": "seen"}})
    samples = measure_actor(ActorSetup(None, {{}}, actors, TrainSpec(), seed=0, policy=PLAN), 0.03)
    print("measured", len(samples) >= 10, os.getpid())
'''


@pytest.mark.parametrize(("guard", "own_process"), [('if __name__ == "__main__":', True), ("if True:", False)])
def test_a_program_is_imported_by_the_process_only_where_that_is_no_second_composing(
    witness: Callable[..., ActorSetup],
    seen: Callable[[], dict[int, set[str]]],
    tmp_path: Path,
    guard: str,
    own_process: bool,
) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(guard=guard))
    done = subprocess.run([sys.executable, program], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    measured, enough, pid = line.split()
    assert (measured, enough) == ("measured", "True")
    assert (set(seen()) != {int(pid)}) == own_process
    assert len(seen()) == 1


# --- the Actor's policy ---------------------------------------------------------------------------------------------


@pytest.fixture
def setups(monkeypatch: pytest.MonkeyPatch) -> list[ActorSetup]:
    """The actors that were measured; everything takes next to no time."""
    asked: list[ActorSetup] = []

    def measured(setup: ActorSetup, budget_s: float) -> list[float]:
        asked.append(setup)
        return [64_000.0] * 3  # so slow that a Learner with one thread keeps up

    monkeypatch.setattr("composer.profiling.context.measure_actor", measured)
    monkeypatch.setattr(
        "composer.replay_composing.Profiler", lambda *args, **more: Profiler(*args, **more, budget_s=0.003)
    )
    return asked


def measured_by(composer: Composer, capsys: pytest.CaptureFixture[str]) -> int:
    composer.run()
    found = re.search(r"profiled: (\d+) measured", capsys.readouterr().out)
    assert found
    return int(found[1])


def test_actors_are_measured_with_the_policy_that_a_run_gives_them(
    csv_pair: CsvPair,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    setups: list[ActorSetup],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def problem(trainer: type = TinyDQN) -> Composer:
        files, calibration = csv_pair(*ONE_CPU), tmp_path / "calibration.json"
        training = {"batch_size": 16}
        return described(files, trainer=trainer, training=training, progress=True, calibration=calibration)

    # Both Learners alone and beside the Replay Manager, and the Actor; more where the machine is busy.
    assert measured_by(problem(OwnTrainer), capsys) >= 5
    assert measured_by(problem(), capsys) >= 5
    own, native = setups
    assert own.policy is None
    assert native.policy is not None
    assert native.policy.head == "argmax"
    assert measured_by(problem(), capsys) == 0

    def unsupported(trainer: object) -> PolicyPlan:
        raise UnsupportedError("anything")

    # The same trainer, acting in torch: of the Actor alone, what was measured does not hold.
    monkeypatch.setattr("composer.profiling.context.read_policy", unsupported)
    assert measured_by(problem(), capsys) == 1
    assert setups[-1].policy is None


def test_an_edited_environment_is_measured_again_and_nothing_else(
    csv_pair: CsvPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "env_of_all.py").write_text(WITNESS)
    (tmp_path / "edited_env.py").write_text("import env_of_all\n\n\nclass Edited(env_of_all.Witness):\n    pass\n")
    (tmp_path / "edited_wrapper.py").write_text("import gymnasium\n\n\nclass Same(gymnasium.Wrapper):\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    edited_env, edited_wrapper = map(importlib.import_module, ("edited_env", "edited_wrapper"))

    def missing() -> frozenset[str]:
        composer = described(csv_pair(*ONE_CPU), calibration=tmp_path / "none.json")
        composer.set_actors(1, env=edited_env.Edited)
        composer.set_wrappers([edited_wrapper.Same])
        return composer.missing_measurements()

    before = missing()
    assert missing() == before
    for file in ("edited_env.py", "env_of_all.py", "edited_wrapper.py"):
        with (tmp_path / file).open("a") as source:
            source.write("# slower now\n")
        now = missing()
        assert len(now - before) == len(before - now) == 1, "the Actor alone"
        before = now


REGISTERED: dict[str, Any] = {"kwargs": {"fate": "lives"}, "max_episode_steps": 50}


@pytest.mark.parametrize(
    "changed",
    [
        {"kwargs": {"fate": "loses count"}},
        {"max_episode_steps": 60},
        {"additional_wrappers": (gym.wrappers.TimeAwareObservation.wrapper_spec(),)},
    ],
)
def test_an_environment_that_is_registered_otherwise_is_measured_again(
    csv_pair: CsvPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, witness: object, changed: dict[str, Any]
) -> None:
    monkeypatch.setattr("composer.replay_composing.check_problem", lambda problem: None)  # no program is written

    def missing(**registered: Any) -> frozenset[str]:
        gym.register("Witness-v0", "witness_env:Witness", **(REGISTERED | registered))
        return described(
            csv_pair(*ONE_CPU), env="Witness-v0", calibration=tmp_path / "none.json"
        ).missing_measurements()

    before = missing()
    assert missing() == before
    assert before - missing(**changed)


OWN_VECTOR = """
import gymnasium as gym
import witness_env


class Own(gym.vector.SyncVectorEnv):
    def __init__(self, num_envs, **kwargs):
        super().__init__([lambda: witness_env.Witness(**kwargs)] * num_envs)
"""


def test_an_edited_vector_of_an_environment_is_measured_again(
    csv_pair: CsvPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, witness: object
) -> None:
    monkeypatch.setattr("composer.replay_composing.check_problem", lambda problem: None)  # no program is written
    monkeypatch.delitem(sys.modules, "own_vector", raising=False)
    own = tmp_path / "own_vector.py"
    own.write_text(OWN_VECTOR)
    gym.register("Witness-v0", "witness_env:Witness", vector_entry_point="own_vector:Own")
    composer = described(csv_pair(*ONE_CPU), calibration=tmp_path / "none.json")
    composer.set_actors(1, env="Witness-v0", vectorization="vector_entry_point")
    before = composer.missing_measurements()
    own.write_text(OWN_VECTOR + "# slower now\n")
    assert len(before - composer.missing_measurements()) == 1, "the Actor alone"


@pytest.mark.parametrize(("variable", "value"), [("PEARL_ISA", "plain"), ("PEARL_MATMUL", "high")])
def test_other_kernels_are_measured_again(
    csv_pair: CsvPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    composer = described(csv_pair(*ONE_CPU), calibration=tmp_path / "none.json")
    monkeypatch.delenv(variable, raising=False)
    before = composer.missing_measurements()
    monkeypatch.setenv(variable, value)
    assert not before & composer.missing_measurements()
    monkeypatch.setenv(variable, "")
    assert composer.missing_measurements() == before


# --- setting 2's loop -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [False, True])
def test_setting_2_is_measured_by_the_loop_that_a_run_takes(
    csv_pair: CsvPair, tmp_path: Path, setups: list[ActorSetup], monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    loops: list[NativeLearner] = []
    steps: list[NativeLearner] = []
    fused_loop, step = NativeLearner.fused_loop, NativeLearner.step

    def started(self: NativeLearner, *args: Any) -> Any:
        if (loop := fused_loop(self, *args)) is not None:
            loops.append(self)
        return loop

    monkeypatch.setattr(NativeLearner, "fused_loop", started)
    monkeypatch.setattr(NativeLearner, "step", lambda self, *args: (steps.append(self), step(self, *args))[1])
    composer = described(
        csv_pair(*ONE_CPU), settings={"implementation": "native"}, calibration=tmp_path / "calibration.json"
    )
    composer.set_replay(2000, fanout=16, share_next_obs=shared)
    composer.run()
    # Next observations that are stored once are no column: then Python gathers, and steps.
    if shared:
        assert not loops
        assert len(set(steps)) == 2  # the Learner alone, and beside the Replay Manager
    else:
        (looped,) = loops
        assert looped not in steps
        assert looped.trainer.gradient_steps >= 15
    for name, latency in composer.matrix.cell("cpu0", "RM & Learner").measurements():
        assert latency.n >= 10, name
        assert 0 < latency.p20_us <= latency.value_us <= latency.p80_us, name


class Scripted:
    """A loop whose parts take the same time in each iteration; every eighth publishes."""

    def __init__(self, laq: GrantQueue, ldq: ProgressQueue) -> None:
        self.laq, self.ldq, self.iterations = laq, ldq, 0

    def seconds(self) -> dict[str, float]:
        each = {"sample": 3e-6, "gather": 4e-6, "train": 100e-6, "update": 5e-6}
        spent = {name: self.iterations * seconds for name, seconds in each.items()}
        return {**spent, "publish": self.iterations // 8 * 16e-6}

    def run_once(self, timeout_s: float) -> bool:
        found = self.laq.peek(timeout_s)
        assert found is not None
        self.iterations += int(found[0]["iterations"][0])
        self.laq.release()
        assert self.ldq.reserve() is not None
        self.ldq.publish()
        return True


def test_seconds_that_add_up_become_microseconds_of_an_iteration() -> None:
    laq, ldq = GrantQueue(1), ProgressQueue(1, Bell())
    loop = Scripted(laq, ldq)
    inserted: list[int] = []

    def insert() -> float:
        inserted.append(loop.iterations)
        return 2.0

    context: Any = SimpleNamespace(budget_s=0.0, problem=SimpleNamespace(train=TrainSpec()))
    full = FullReplay(ReplaySpec(64), 16, Factory("pearl.replay", "make_replay_manager"))
    found = measure_loop(context, loop, laq, ldq, insert, full, apart=False)
    assert found["sample"] == pytest.approx([3.0] * 10)
    assert found["gather"] == pytest.approx([4.0] * 10)
    assert found["update"] == pytest.approx([5.0] * 10)
    assert found["step"] == pytest.approx([102.0] * 10, abs=0.2)  # publications are borne by all steps alike
    assert found["insert"] == [2.0] * 10
    assert np.all(np.diff(inserted) == 4)  # 500 us at 112 to 128 us an iteration, then an insertion


def test_a_pause_of_the_composer_is_no_silence_of_actors_that_are_measured_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0

    def wait(seen: int, longest_s: float) -> None:
        nonlocal now
        now += waits.pop()

    together = object.__new__(_Together)
    together._name, together._server, together.steps = "E-v0", None, 0
    together._queues, together._messages, together._processes = [], [], []
    together._bell = SimpleNamespace(value=lambda: 0, wait=wait)  # type: ignore[assignment]
    monkeypatch.setattr(time, "monotonic", lambda: now)
    waits = [1.0] * 30 + [1000.0]  # the longest comes first
    together.run(lambda: not waits)
    waits = [1.0] * 70
    with pytest.raises(EnvError, match="Actors in E-v0 sent nothing for 60 s"):
        together.run(lambda: not waits)
    assert len(waits) < 10
