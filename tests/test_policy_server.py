"""The policy server's process: in programs that train, when it or an Actor dies, and as the composer chooses it."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
from programs import CsvPair, Running, children, is_alive, make_program, run, running, summary
from test_lifecycle import edited
from test_recurrent import SmallRecurrentDQN
from trainers import FailsOnSeven, TinyDQN, TinyPPO, TinySAC

from composer import Composer
from composer.policy_server import fastest_place
from pearl.actors import report
from pearl.actors.actor import ActorSetup
from pearl.actors.process import ActorGroup
from pearl.algorithms.trainer import make_trainer
from pearl.backends.cuda import CudaBackend
from pearl.errors import ConfigurationError, EnvError, PolicyServerError
from pearl.ipc.queues import WeightSyncQueue
from pearl.runtime.checkpoint import load_checkpoint
from pearl.runtime.policy_server import PolicyServerProcess, ServerSetup, check_served, why_not_served
from pearl.runtime.queues import DataCollectionQueue
from pearl.spec import ActorSpec, RolloutSpec, TrainSpec, TransitionSpec

SERVED = '    vectorization="sync",\n    policy_server="cpu",\n'
SHORT = ("--timesteps", "2000", "--checkpoint-interval", "1000", "--eval-episodes", "2")
LONG = ("--timesteps", "500000", "--eval-episodes", "0", "--checkpoint-interval", "500000")


def until(condition: Callable[[], object], meanwhile: Callable[[], object] = lambda: None) -> None:
    deadline = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < deadline, "not met in time"
        meanwhile()
        time.sleep(0.02)


# --- with actors' processes -------------------------------------------------------------------------------------------


class Together:
    """A server and its actors."""

    def __init__(self, counts: tuple[int, ...], trainer: type = TinyDQN) -> None:
        env = gym.make("CartPole-v1")
        spec = TransitionSpec.from_spaces(env.observation_space, env.action_space)
        setups = [
            ActorSetup(
                trainer, {}, ActorSpec("CartPole-v1", len(counts), count), TrainSpec(), 0, index, transition=spec
            )
            for index, count in enumerate(counts)
        ]
        own = make_trainer(trainer, env.observation_space, env.action_space)
        setup = ServerSetup(trainer, {}, env.observation_space, env.action_space, seed=0, device="cpu")
        wsq = WeightSyncQueue(sum(p.numel() for p in own.q.parameters()))  # type: ignore[attr-defined]
        self.server = PolicyServerProcess(setup, spec, counts, wsq, exploration=TinyDQN.exploration, timeout_s=60.0)
        setups = [dataclasses.replace(s, service=one) for s, one in zip(setups, self.server.services, strict=True)]
        self.queues = [DataCollectionQueue(spec, s.message_rows(), 2) for s in setups]
        self.group = ActorGroup(setups, self.queues, wsq)

    def check(self) -> None:
        self.server.check()
        self.group.check(0)

    def messages(self, count: int, index: int) -> None:
        """Take so many messages of an actor."""
        for _ in range(count):
            until(lambda: len(self.queues[index]), self.check)
            assert self.queues[index].peek() is not None
            self.queues[index].release()

    def drain(self) -> None:
        """Take all messages."""
        for queue in self.queues:
            while queue.peek() is not None:
                queue.release()

    def stop(self) -> None:
        self.server.stop()
        self.group.stop(5.0)


@pytest.fixture
def together() -> Iterator[Callable[..., Together]]:
    made: list[Together] = []

    def make(*arguments: Any) -> Together:
        made.append(Together(*arguments))
        return made[-1]

    yield make
    for one in made:
        one.stop()


def loads_torch(pid: int) -> bool:
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


def test_actors_of_different_sizes_are_served_without_torch_of_their_own(together: Callable[..., Together]) -> None:
    found = together((1, 4, 3))
    for index in range(3):
        found.messages(5, index)
    assert loads_torch(found.server.pid)
    assert not any(map(loads_torch, found.group.pids))
    pids = [found.server.pid, *found.group.pids]
    found.stop()
    assert not any(map(is_alive, pids))


def test_an_actor_that_is_killed_blocks_no_other_and_is_replaced(
    together: Callable[..., Together], caplog: pytest.LogCaptureFixture
) -> None:
    found = together((2, 2))
    found.messages(3, 0)
    os.kill(found.server.pid, signal.SIGSTOP)  # so that both wait for answers
    services = found.server.services
    until(lambda: all(len(service.queue) for service in services), found.drain)
    os.kill(found.group.pids[0], signal.SIGKILL)
    os.kill(found.server.pid, signal.SIGCONT)
    found.messages(4, 1)
    until(lambda: found.group.restarts == 1, found.check)
    found.drain()  # what the dead one has left
    found.messages(4, 0)
    assert caplog.messages == ["actor-0 died (signal SIGKILL) and is restarted."]


def test_a_server_that_dies_or_fails_is_an_error_that_names_it(together: Callable[..., Together]) -> None:
    found = together((2, 2))
    found.messages(2, 1)
    os.kill(found.server.pid, signal.SIGKILL)
    with pytest.raises(PolicyServerError, match=r"policy server \(process \d+, on cpu\).* died \(signal SIGKILL\)"):
        until(lambda: False, found.check)
    found.stop()  # ends the actors, which wait for answers
    assert found.group.restarts == 0


def test_a_failing_policy_is_told_with_its_traceback(together: Callable[..., Together]) -> None:
    found = together((7,), FailsOnSeven)
    with pytest.raises(PolicyServerError, match=r"died \(exit code 1\)(.|\n)*in get_action(.|\n)*no more actions"):
        until(lambda: False, found.check)


def test_a_hung_server_is_ended(together: Callable[..., Together], monkeypatch: pytest.MonkeyPatch) -> None:
    found = together((2,))
    found.messages(1, 0)
    os.kill(found.server.pid, signal.SIGSTOP)
    monkeypatch.setattr(report, "LONGEST_GAP_S", 100.0)
    monkeypatch.setattr(found.server, "_timeout_s", 0.5)
    with pytest.raises(PolicyServerError, match=r"hung for .* s while it inferred"):
        until(lambda: False, found.server.check)
    assert not is_alive(found.server.pid)


# --- programs ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory, quick_profiles: None) -> Path:
    made = make_program(tmp_path_factory.mktemp("composed"), actors=2)
    return edited(made, tmp_path_factory.mktemp("served"), '    vectorization="sync",\n', SERVED)


def processes(started: Running) -> tuple[int, list[int]]:
    """The server and the actors, once all infer."""
    pids = started.until(lambda: pids if len(pids := started.actor_pids()) == 3 else [])
    (server,) = started.until(lambda: [pid for pid in pids if loads_torch(pid)])
    return server, [pid for pid in pids if pid != server]


def under_way(started: Running, run_dir: Path) -> None:
    episodes = run_dir / "episodes.csv"
    started.until(lambda: episodes.exists() and episodes.read_text().count("\n") > 5)


def test_a_program_trains_with_a_policy_server(program: Path, tmp_path: Path) -> None:
    code, output = run(program, *SHORT, "--run-dir", str(tmp_path))
    assert code == 0, output
    assert summary(tmp_path)["env_steps"] >= 2000
    assert summary(tmp_path)["actor_restarts"] == 0
    assert summary(tmp_path)["gradient_steps"] > 100


def test_a_server_that_is_killed_ends_the_run_which_can_be_resumed(program: Path, tmp_path: Path) -> None:
    with running(program, *LONG, "--run-dir", str(tmp_path)) as started:
        under_way(started, tmp_path)
        server, actors = processes(started)
        os.kill(server, signal.SIGKILL)
        assert started.wait() == 1
        assert "Stopping: the policy server failed." in started.output
        assert f"The policy server (process {server}, on cpu)" in started.output
        assert "Traceback" not in started.output
        assert not any(map(is_alive, actors))
    saved = load_checkpoint(tmp_path / "checkpoints").counters
    further = ("--timesteps", str(int(saved["env_steps"]) + 500), "--eval-episodes", "0", "--resume")  # type: ignore[arg-type]
    code, output = run(program, *further, "--run-dir", str(tmp_path))
    assert code == 0, output
    assert "Resumed from" in output
    assert summary(tmp_path)["gradient_steps"] > saved["gradient_steps"]


def test_ctrl_c_ends_all(program: Path, tmp_path: Path) -> None:
    with running(program, *LONG, "--run-dir", str(tmp_path)) as started:
        under_way(started, tmp_path)
        server, actors = processes(started)
        started.interrupt()
        assert started.wait() == 130
        assert "Stopping: SIGINT received." in started.output
        assert "Traceback" not in started.output
        assert not any(map(is_alive, [server, *actors]))
        assert children(started.process.pid) == []


def test_a_killed_actor_is_replaced_in_a_program(program: Path, tmp_path: Path) -> None:
    with running(program, *LONG, "--timesteps", "10000", "--run-dir", str(tmp_path)) as started:
        under_way(started, tmp_path)
        _, actors = processes(started)
        os.kill(actors[0], signal.SIGKILL)
        assert started.wait() == 0
        assert "actor-" in started.output
    assert summary(tmp_path)["actor_restarts"] == 1


def test_serial_mode_has_no_server_and_says_so(program: Path, tmp_path: Path) -> None:
    code, output = run(program, *SHORT, "--serial", "--run-dir", str(tmp_path))
    assert code == 0, output
    assert "In serial mode there is no policy server" in output


def test_actors_on_a_cluster_are_refused(program: Path, tmp_path: Path) -> None:
    code, output = run(program, *SHORT, "--ray", "auto", "--run-dir", str(tmp_path))
    assert code == 1
    assert "--ray is for Actors that run the policy themselves" in output


@pytest.mark.slow
@pytest.mark.parametrize(("trainer", "env"), [(TinySAC, "Pendulum-v1"), (TinyPPO, "CartPole-v1")])
def test_other_algorithms_train_with_a_policy_server(
    csv_pair: CsvPair, tmp_path: Path, quick_profiles: None, trainer: type, env: str
) -> None:
    composer = composed(csv_pair("cpu0,cpu,cpu,,2,60"), trainer, env, "cpu")
    composer.run()
    path = composer.runtime_gen(path=tmp_path / "program.py", timesteps=2000)
    assert "policy served on cpu" in path.read_text()
    code, output = run(path, "--eval-episodes", "2", "--run-dir", str(tmp_path / "run"))
    assert code == 0, output
    assert summary(tmp_path / "run")["gradient_steps"] > 0


# --- what it does not support -----------------------------------------------------------------------------------------


def composed(files: tuple[Path, Path], trainer: type, env: str, policy_server: str, **rollout: Any) -> Composer:
    composer = Composer(progress=True)
    composer.set_device_file(files[0])
    composer.set_connection_file(files[1])
    composer.set_actors(2, env=env, envs_per_actor=2, policy_server=policy_server)
    composer.set_train_function(learner=trainer)
    if composer.learns_from_rollouts:
        composer.set_rollout(**rollout)
    else:
        composer.set_replay(2000)
    return composer


def test_recurrent_policies_and_rollouts_of_several_policies_are_refused_by_name(csv_pair: CsvPair) -> None:
    files = csv_pair("cpu0,cpu,cpu,,2,60")
    with pytest.raises(ConfigurationError, match=r"policy_server='cpu' does not support recurrent.*SmallRecurrentDQN"):
        composed(files, SmallRecurrentDQN, "CartPole-v1", "cpu").check()
    with pytest.raises(ConfigurationError, match=r"does not support policy_lag=1"):
        composed(files, TinyPPO, "CartPole-v1", "cpu", policy_lag=1).check()
    assert why_not_served(object(), RolloutSpec(horizon=8)) is None


def test_a_stated_device_that_is_not_there_is_told_when_composing(csv_pair: CsvPair, quick_profiles: None) -> None:
    composer = composed(csv_pair("cpu0,cpu,cpu,,2,60"), TinyDQN, "CartPole-v1", "cuda:99")
    with pytest.raises(PolicyServerError, match=r"policy_server='cuda:99' cannot be used here: "):
        composer.run()


@pytest.mark.parametrize("place", ["gpu", "tpu:0", "auto"])
def test_a_device_that_no_backend_knows_is_refused(place: str) -> None:
    actors = ActorSpec("CartPole-v1", policy_server=place)
    with pytest.raises(ConfigurationError, match=f"a device that a backend knows, .* found '{place}'"):
        check_served(actors, object())


@pytest.mark.parametrize("place", ["GPU", "cuda:x", "", None, "cuda:1234"])
def test_a_place_that_is_no_device_is_refused(place: Any) -> None:
    with pytest.raises(ConfigurationError, match='must be "none", a device such as "cuda:0"'):
        ActorSpec("CartPole-v1", policy_server=place)


# --- the composer's choice --------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Times:
    policy_us: float
    step_us: dict[str, float | Exception]
    measured: list[str] = dataclasses.field(default_factory=list)

    def of(self, actors: ActorSpec) -> Any:
        def together() -> Any:
            self.measured.append(actors.policy_server)
            found = self.step_us[actors.policy_server]
            if isinstance(found, Exception):
                raise found
            return dataclasses.make_dataclass("Found", ["value_us"])(found)

        lazily = type("Lazily", (), {"together": property(lambda _: together()), "policy_us": self.policy_us})
        return lazily()


@pytest.mark.parametrize(
    ("policy_us", "step_us", "chosen", "measured"),
    [
        (200.0, {"none": 10.0, "cuda:0": 6.0, "cuda:1": 7.0}, "cuda:0", ["none", "cuda:0", "cuda:1"]),
        (200.0, {"none": 10.0, "cuda:0": 9.8, "cuda:1": 12.0}, "none", ["none", "cuda:0", "cuda:1"]),
        (5.0, {}, "none", []),
        (200.0, {"none": 9.0, "cuda:0": PolicyServerError("no memory"), "cuda:1": 5.0}, "cuda:1", None),
        (200.0, {"none": 9.0, "cuda:0": EnvError("fails"), "cuda:1": EnvError("too")}, "none", None),
    ],
)
def test_the_device_is_taken_if_actors_become_faster(
    policy_us: float, step_us: dict[str, Any], chosen: str, measured: list[str] | None
) -> None:
    times, said = Times(policy_us, step_us), []
    found = fastest_place(ActorSpec("CartPole-v1"), ["cuda:0", "cuda:1"], times.of, said.append)
    assert found.policy_server == chosen
    assert measured is None or times.measured == measured
    assert said[0].startswith(f"policy server: {chosen}, ")
    failed = [place for place, us in step_us.items() if isinstance(us, Exception)]
    assert [line.split(":")[1] for line in said[1:]] == [f" not {place.split(':')[0]}" for place in failed]


def test_without_a_gpu_nothing_is_measured_for_the_choice(csv_pair: CsvPair, quick_profiles: None, capsys: Any) -> None:
    composer = composed(csv_pair("cpu0,cpu,cpu,,2,60"), TinyDQN, "CartPole-v1", "auto")
    composer.run()
    printed = capsys.readouterr().out
    assert "policy server" not in printed
    assert "side by side" not in printed


@pytest.mark.parametrize("trainer", [TinyDQN, TinyPPO])
def test_with_a_gpu_the_run_s_own_server_is_measured(
    csv_pair: CsvPair,
    tmp_path: Path,
    quick_profiles: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    trainer: type,
) -> None:
    """The emulator's device stands for a GPU, and torch's CPU for torch's CUDA device."""
    monkeypatch.setattr(CudaBackend, "policy_device", lambda *_: "cpu")
    monkeypatch.setattr("composer.policy_server._LEAST_ROUND_TRIP_US", 0.0)
    files = csv_pair("cpu0,cpu,cpu,,2,60", "gpu0,gpu,cuda,emulator,,250", connections=["cpu0,gpu0,10,12"])
    composer = composed(files, trainer, "CartPole-v1", "auto")
    composer.run()
    printed = capsys.readouterr().out
    assert "cpu0: 2 Actor(s) side by side\n" in printed
    assert "cpu0: 2 Actor(s) side by side, policy on cpu\n" in printed
    assert "by microseconds of an environment step of all Actors together (" in printed
