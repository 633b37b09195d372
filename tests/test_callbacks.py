"""Callbacks are called when they say, see the run, stop it, and are named when they fail."""

from __future__ import annotations

import csv
import dataclasses
import importlib
import itertools
import json
import math
import re
import sys
import types
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from callbacks_of_tests import Noting, Raising, StopsAtOnce
from gymnasium.envs.classic_control import CartPoleEnv
from policies import WideDQN, run_folder
from programs import make_program, run, summary
from trainers import TinyDQN, TinyPPO

import pearl
from pearl.algorithms.trainer import is_as_built_in
from pearl.callbacks import Callback, KeepBest, MLflowLogger, RecordVideo, StopAtReturn, UserMetric, WandbLogger
from pearl.errors import CallbackError, ConfigurationError, EnvError, TrainerError
from pearl.runtime import Program, RolloutSession, Session, parse_options
from pearl.runtime.callback_calls import HOOKS, CallbackCalls
from pearl.runtime.evaluation import Evaluation
from pearl.runtime.run_context import Context
from pearl.spec import ActorSpec, ReplaySpec, RolloutSpec, TrainSpec


def evaluated(mean: float) -> Evaluation:
    return Evaluation(np.array([mean - 1, mean + 1]), np.array([3, 4]))


class Run:
    """As much of a run as callbacks ask for."""

    def __init__(self, folder: Path) -> None:
        self.run_dir, self.env_steps, self.stopped, self.error = folder, 0, "", ""
        self.logged: dict[str, float] = {}
        self.config = {"environment": "CartPole-v1", "evaluated_in": "CartPole-v1()", "seed": 1}

    def scalars(self) -> dict[str, float]:
        return {"eps": 5.0, "td_error": math.nan, **self.logged}

    def log(self, name: str, value: float) -> None:
        self.logged[name] = value

    def stop(self, reason: str) -> None:
        self.stopped = reason


def calls_of(*callbacks: object, folder: Path = Path()) -> tuple[CallbackCalls, list[str]]:
    failures: list[str] = []
    made = CallbackCalls((), list(callbacks), Run(folder), lambda error, reason: failures.append(str(error)))  # type: ignore[arg-type]
    return made, failures


# --- calling ----------------------------------------------------------------------------------------------------------


def test_only_what_is_overridden_is_called() -> None:
    calls, failures = calls_of(StopAtReturn(3.0), StopsAtOnce())
    assert [hook for hook in HOOKS if calls.has(hook)] == ["on_start", "on_step", "on_evaluation"]
    calls.call("on_step")
    calls.end()
    assert failures == []


@pytest.mark.parametrize("hook", HOOKS)
def test_a_callback_that_raises_is_named_and_left_alone(hook: str, tmp_path: Path) -> None:
    noting = Noting()
    calls, failures = calls_of(Raising(hook), noting, folder=tmp_path)
    for _ in range(2):
        calls.call(hook, *((Path(), evaluated(1.0)) if hook == "on_evaluation" else ()))
    assert len([text for text in failures if text.startswith("The callback Raising")]) == 1
    assert failures[0].startswith(f"The callback Raising failed in {hook}: RuntimeError: this is mine (")
    assert "callbacks_of_tests.py, line" in failures[0]


def test_a_callback_that_exits_is_one_that_raises() -> None:
    exits = types.SimpleNamespace(on_start=lambda run: sys.exit("no key"), on_step=lambda run: sys.exit(0))
    calls, failures = calls_of(exits)
    calls.call("on_step")
    assert failures[0].startswith("The callback SimpleNamespace failed in on_step: SystemExit: 0 (")
    with pytest.raises(CallbackError, match="failed in on_start: SystemExit: no key"):
        calls.start()


def test_callbacks_are_no_protocol() -> None:
    """Of one, type checkers take all methods without a body for abstract."""
    assert not getattr(Callback, "_is_protocol", False)


@pytest.mark.parametrize(
    ("callbacks", "message"),
    [
        (StopAtReturn(1.0), "must be a list or tuple, such as"),
        ([StopAtReturn], r"the class StopAtReturn; make an object of it: StopAtReturn\(\.\.\.\)"),
        ([3], "3 in callbacks is no callback: it defines none of on_start, on_step, on_rollout, on_evaluation"),
        ([Callback], "the class Callback"),
        ([types.SimpleNamespace(on_evaluations=print)], "never called. Did you mean 'on_evaluation'"),
        ([types.SimpleNamespace(on_step=print, state_dict=dict)], "only one of state_dict and load_state_dict"),
    ],
)
def test_what_is_no_callback_is_refused(callbacks: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        CallbackCalls((), callbacks, Run(Path()), lambda *a: None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: StopAtReturn("high"), "a mean return, a number; found 'high'"),  # type: ignore[arg-type]
        (lambda: StopAtReturn(1.0, 0), "a count of evaluations, at least 1; found 0"),
        (lambda: RecordVideo(0), "RecordVideo.every_steps must be a whole number"),
        (lambda: UserMetric("", len), "needs a name"),  # type: ignore[arg-type]
        (lambda: UserMetric("a", 3), "needs measure, a function"),  # type: ignore[arg-type]
        (lambda: WandbLogger(every_s=-1), "WandbLogger.every_s must be seconds"),
        (lambda: StopAtReturn(math.nan), "a mean return, a number; found nan"),
        (lambda: KeepBest(""), "KeepBest.file must be the name of a file"),
        (lambda: RecordVideo(1, folder=3), "RecordVideo.folder must be the name of a folder"),  # type: ignore[arg-type]
        (lambda: WandbLogger(init=3), "WandbLogger.init must be arguments of wandb.init"),  # type: ignore[arg-type]
        (lambda: WandbLogger(project=3), "WandbLogger.project must be"),  # type: ignore[arg-type]
        (lambda: MLflowLogger(tracking_uri=3), "MLflowLogger.tracking_uri must be an address"),  # type: ignore[arg-type]
    ],
)
def test_an_option_of_another_type_says_what_is_supported(make: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()


# --- the ready ones ---------------------------------------------------------------------------------------------------


def test_stop_at_return_counts_evaluations_in_a_row(tmp_path: Path) -> None:
    stop, seen = StopAtReturn(10.0, 2), Run(tmp_path)
    for kind, mean in (("progress", 11.0), ("progress", 9.0), ("progress", 10.0), ("solved check", 50.0)):
        stop.on_evaluation(seen, kind, evaluated(mean))  # type: ignore[arg-type]
        assert seen.stopped == ""
    stop.on_evaluation(seen, "progress", evaluated(12.0))  # type: ignore[arg-type]
    assert seen.stopped == "a mean return of 12 reached 10 (StopAtReturn)"
    another = Run(tmp_path)  # in the same process
    stop.on_start(another)  # type: ignore[arg-type]
    stop.on_evaluation(another, "progress", evaluated(12.0))  # type: ignore[arg-type]
    assert another.stopped == ""


@pytest.mark.parametrize(
    ("evaluated_in", "first"),
    [({}, "better"), ({"evaluated_in": "CartPole-v1()"}, "better"), ({"evaluated_in": "CartPole-v1(gravity=1)"}, "30")],
)
def test_a_resumed_run_keeps_its_better_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, evaluated_in: dict[str, str], first: str
) -> None:
    monkeypatch.setattr("pearl.policy.export.export_policy", lambda policy, file, form: file.write_text(str(policy)))
    (tmp_path / "best_policy.safetensors").write_text("better")
    keep, seen = KeepBest(), Run(tmp_path)
    seen.env_steps = 20
    keep.load_state_dict({"best": 7.0, **evaluated_in})
    keep.on_start(seen)  # type: ignore[arg-type]
    for seen.env_steps, mean, kept in ((30, 6.0, first), (40, 8.0, "40"), (50, 7.5, "40")):
        seen.policy = lambda: seen.env_steps  # type: ignore[attr-defined]
        keep.on_evaluation(seen, "progress", evaluated(mean))  # type: ignore[arg-type]
        assert (tmp_path / "best_policy.safetensors").read_text() == kept


def test_a_best_policy_that_cannot_be_written_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("pearl.policy.export.check_policy", lambda policy: None)
    monkeypatch.setattr("pearl.policy.export._safetensors", lambda policy: policy.encode())
    keep, seen = KeepBest("folder/best.safetensors"), Run(tmp_path)
    seen.policy = lambda: "policy"  # type: ignore[attr-defined]
    (tmp_path / "folder").write_text("in the way")
    keep.on_evaluation(seen, "progress", evaluated(9.0))  # type: ignore[arg-type]
    assert "cannot be written: File exists. Choose another path. The run goes on" in caplog.text
    (tmp_path / "folder").unlink()
    keep.on_evaluation(seen, "progress", evaluated(8.0))  # type: ignore[arg-type]
    assert (tmp_path / "folder" / "best.safetensors").read_text() == "policy"


def test_a_new_run_keeps_the_best_policy_and_the_videos_of_an_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("pearl.policy.export.export_policy", lambda policy, file, form: file.write_text(str(policy)))
    monkeypatch.setattr(
        "pearl.policy.playing.watch_policy", lambda policy, episodes, video: video.mkdir(parents=True) or []
    )
    keep = KeepBest()  # both runs in one process
    for number, mean in ((1, 50.0), (2, 10.0)):
        seen = Run(tmp_path)
        seen.policy = lambda number=number: number  # type: ignore[attr-defined]
        keep.on_start(seen)  # type: ignore[arg-type]
        assert not (tmp_path / "best_policy.safetensors").exists()
        seen.env_steps = 100
        keep.on_evaluation(seen, "progress", evaluated(mean))  # type: ignore[arg-type]
        RecordVideo(100).on_evaluation(seen, "progress", evaluated(mean))  # type: ignore[arg-type]
    assert (tmp_path / "best_policy.safetensors").read_text() == "2"
    assert (tmp_path / "best_policy-earlier-001.safetensors").read_text() == "1"
    assert {path.name for path in (tmp_path / "videos").iterdir()} == {
        "step-000000100",
        "step-000000100-earlier-001",
    }
    assert "of an earlier run was renamed to best_policy-earlier-001.safetensors" in caplog.text


def test_states_go_on_after_a_resumption(caplog: pytest.LogCaptureFixture) -> None:
    def stops() -> tuple[StopAtReturn, StopAtReturn, RecordVideo]:
        return StopAtReturn(10.0, 3), StopAtReturn(20.0, 3), RecordVideo(500)

    first, second, video = stops()
    calls, failures = calls_of(first, second, video, StopsAtOnce())
    for mean in (25.0, 15.0):
        calls.call("on_evaluation", "progress", evaluated(mean))
    video._next = 1500
    text = calls.states()
    assert json.loads(text) == {
        "StopAtReturn": {"reached": 2},
        "StopAtReturn 2": {"reached": 0},
        "RecordVideo": {"next": 1500},
    }
    first, second, video = stops()
    calls, _ = calls_of(first, second, video)
    with caplog.at_level("INFO", "pearl.runtime"):
        calls.load_states({**json.loads(text), "Gone": {}})
    assert (first._reached, second._reached, video._next) == (2, 0, 1500)
    assert "a state of the callback Gone, which this run does not have" in caplog.text
    assert failures == []


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ([1], "TypeError: state_dict must return a dictionary of values that JSON has, by name; found"),
        ({1: 2}, "TypeError: state_dict must return a dictionary"),
        ({"a": np.zeros(2)}, "TypeError: Object of type ndarray is not JSON serializable"),
    ],
)
def test_a_state_that_no_checkpoint_can_keep_is_named(state: Any, message: str) -> None:
    keeps = types.SimpleNamespace(on_step=print, state_dict=lambda: state, load_state_dict=print)
    calls, failures = calls_of(keeps)
    assert calls.states() == "{}"
    assert failures[0].startswith(f"The callback SimpleNamespace failed in state_dict: {message}")


def test_a_state_that_a_callback_cannot_take_is_an_error() -> None:
    calls, _ = calls_of(StopAtReturn(1.0))
    with pytest.raises(CallbackError, match="StopAtReturn failed in load_state_dict: KeyError"):
        calls.load_states({"StopAtReturn": {}})


def test_a_users_metric_is_logged_after_short_evaluations(tmp_path: Path) -> None:
    metric, seen = UserMetric("half", lambda r: r.env_steps / 2), Run(tmp_path)
    seen.env_steps = 7
    metric.on_evaluation(seen, "last", evaluated(1.0))  # type: ignore[arg-type]
    assert seen.logged == {}
    metric.on_evaluation(seen, "progress", evaluated(1.0))  # type: ignore[arg-type]
    assert seen.logged == {"half": 3.5}


def test_wandb_gets_the_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[Any] = []

    class Theirs:
        id = "abc"
        summary: dict[str, Any] = {}  # noqa: RUF012

        def log(self, values: dict[str, float]) -> None:
            log.append(values)

        def finish(self, exit_code: int) -> None:
            log.append(("finished", exit_code, self.summary["stopped"]))

    module = types.ModuleType("wandb")
    module.init = lambda **options: log.append(options) or Theirs()  # type: ignore[attr-defined, func-returns-value]
    monkeypatch.setitem(sys.modules, "wandb", module)
    logger, seen = WandbLogger(project="p", init={"mode": "offline"}), Run(tmp_path)
    logger.on_start(seen)  # type: ignore[arg-type]
    for _ in range(3):
        logger.on_step(seen)  # type: ignore[arg-type]
    seen.env_steps = 9
    logger.on_evaluation(seen, "last and best", evaluated(4.0))  # type: ignore[arg-type]
    seen.env_steps, seen.stopped = 12, "all steps done"
    logger.on_end(seen)  # type: ignore[arg-type]
    options, first, second, last, end = log
    assert (options["project"], options["name"], options["mode"]) == ("p", tmp_path.name, "offline")
    assert options["config"] == seen.config
    assert first == {"eps": 5.0, "env_steps": 0}
    scores = {"evaluation/last_and_best": 4.0, "evaluation/last_and_best_std": 1.0}
    assert second == {"eps": 5.0, "env_steps": 9, **scores}
    assert last == {"eps": 5.0, "env_steps": 12}
    assert end == ("finished", 0, "all steps done")
    seen.stopped, seen.error = "training failed", "TrainerError: it diverged"
    logger.on_end(seen)  # type: ignore[arg-type]
    assert log[-1] is end, "of a run that ended before it was begun there"
    logger.on_start(seen)  # type: ignore[arg-type]
    logger.on_end(seen)  # type: ignore[arg-type]
    assert log[-1] == ("finished", 1, seen.error)
    again = WandbLogger()
    again.load_state_dict(logger.state_dict())
    again.on_start(seen)  # type: ignore[arg-type]
    assert (log[-1]["id"], log[-1]["resume"]) == ("abc", "allow")
    logger.on_start(Run(tmp_path))  # type: ignore[arg-type]
    assert "id" not in log[-1], "another run of the same process"


class FailingService:
    """What PEARL uses of an MLflow client, and of a run of Weights & Biases; `fails` are calls that raise."""

    id = "abc"

    def __init__(self, *fails: str) -> None:
        self.fails, self.calls, self.summary = fails, [], dict[str, Any]()  # type: ignore[var-annotated]
        self.create_run = lambda *a, **k: types.SimpleNamespace(info=types.SimpleNamespace(run_id="r"))

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            self.calls.append((name, *arguments, *named.values()))
            if name in self.fails:
                raise OSError("no network")
            return types.SimpleNamespace(experiment_id="1")

        return call


@pytest.mark.parametrize(
    ("kind", "hook"),
    [
        (MLflowLogger, "on_start"),
        *itertools.product((MLflowLogger, WandbLogger), ("on_step", "on_evaluation", "on_end")),
    ],
)
def test_a_run_elsewhere_does_not_go_on_after_its_logger_failed(
    kind: type[Callback], hook: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sends = "log" if kind is WandbLogger else "log_batch"
    service = FailingService("log_param" if hook == "on_start" else sends)
    mlflow: Any = types.ModuleType("mlflow")
    mlflow.MlflowClient, mlflow.entities = lambda tracking_uri: service, types.SimpleNamespace(Metric=lambda *v: v)
    wandb: Any = types.ModuleType("wandb")
    wandb.init = lambda **_: service
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    calls, failures = calls_of(logger := kind(), folder=tmp_path)
    if hook == "on_start":
        with pytest.raises(CallbackError, match="no network"):
            calls.start()
    else:
        calls.start()
        arguments = {"on_evaluation": ("progress", evaluated(1.0))}.get(hook, ())
        calls.end() if hook == "on_end" else calls.call(hook, *arguments)
        assert "no network" in failures[0]
    calls.end()
    ends = [call for call in service.calls if call[0] in ("set_terminated", "finish")]
    assert ends == ([("finish", 1)] if kind is WandbLogger else [("set_terminated", "r", "FAILED")])
    stopped = service.summary.get("stopped") or service.calls[-1][-1]
    assert stopped == f"{kind.__name__} failed: OSError: no network"
    logger.on_end(Run(tmp_path))  # type: ignore[arg-type]
    assert service.calls[-1][0] in ("set_tag", "finish"), "nothing is sent to it any more"


@pytest.mark.slow
def test_mlflow_gets_the_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    logger, seen = MLflowLogger(experiment="e", tracking_uri=(tmp_path / "mlruns").as_uri()), Run(tmp_path)
    logger.on_start(seen)  # type: ignore[arg-type]
    logger.on_step(seen)  # type: ignore[arg-type]
    again = MLflowLogger(experiment="e", tracking_uri=(tmp_path / "mlruns").as_uri())
    again.load_state_dict(logger.state_dict())
    seen.env_steps = 5
    again.on_start(seen)  # type: ignore[arg-type]
    seen.env_steps, seen.stopped = 9, "all steps done"
    logger.on_evaluation(seen, "progress", evaluated(4.0))  # type: ignore[arg-type]
    logger.on_end(seen)  # type: ignore[arg-type]
    client = mlflow.MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())
    (found,) = client.search_runs([client.get_experiment_by_name("e").experiment_id])
    assert found.data.metrics == {"eps": 5.0, "evaluation/progress": 4.0, "evaluation/progress_std": 1.0}
    assert found.data.params == {name: str(value) for name, value in seen.config.items()}
    assert (found.data.tags["stopped"], found.info.status) == ("all steps done", "FINISHED")
    seen.stopped, seen.error = "training failed", "TrainerError: it diverged"
    logger.on_end(seen)  # type: ignore[arg-type]
    (found,) = client.search_runs([found.info.experiment_id])
    assert found.info.status == "FINISHED", "of a run that ended before it was begun there"
    logger.on_start(seen)  # type: ignore[arg-type]
    logger.on_end(seen)  # type: ignore[arg-type]
    (found,) = client.search_runs([found.info.experiment_id])
    assert (found.data.tags["stopped"], found.info.status) == (seen.error, "FAILED")


@pytest.mark.parametrize(
    ("callback", "module", "extra"),
    [(WandbLogger(), "wandb", "wandb"), (MLflowLogger(), "mlflow", "mlflow"), (RecordVideo(9), "moviepy", "video")],
)
def test_a_missing_extra_names_the_command_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, callback: Any, module: str, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(CallbackError, match=rf"{module} is not installed.*pip install 'pearl-toolkit\[{extra}\]'"):
        calls_of(callback, folder=tmp_path)[0].start()


# --- in programs ------------------------------------------------------------------------------------------------------


class WithCallbacks(TinyDQN):
    callbacks = (StopAtReturn(1.0),)


def test_callbacks_of_a_class_are_a_setting_and_no_code() -> None:
    assert is_as_built_in(WithCallbacks)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory, quick_profiles: None) -> Path:
    return make_program(tmp_path_factory.mktemp("program"), timesteps=400)


def with_callbacks(program: Path, folder: Path, callbacks: str) -> Path:
    """A copy of the program, edited as a user does."""
    text = program.read_text()
    assert text.count("        train=TRAIN,\n    ) as session") == 1
    text = text.replace("        train=TRAIN,\n", f"        train=TRAIN,\n        callbacks=[{callbacks}],\n")
    text = text.replace(
        "\nPROGRAM = ", "\nfrom callbacks_of_tests import *\nfrom pearl.callbacks import *\nPROGRAM = ", 1
    )
    edited = folder / "edited.py"
    edited.write_text(text)
    (folder / "callbacks_of_tests.py").write_text((Path(__file__).parent / "callbacks_of_tests.py").read_text())
    (folder / "trainers.py").write_text((Path(__file__).parent / "trainers.py").read_text())
    return edited


def test_a_run_calls_its_callbacks(program: Path, tmp_path: Path) -> None:
    made = with_callbacks(program, tmp_path, "Noting(), KeepBest(), UserMetric('steps/mine', gradient_steps)")
    results = tmp_path / "run"
    code, output = run(made, "--serial", "--eval-episodes", "2", "--run-dir", str(results))
    assert code == 0, output
    noted = json.loads((results / "noted.json").read_text())
    calls, seen = noted["calls"], noted["seen"]
    assert calls["start"] == 1
    assert calls["step"] > 10
    assert calls["rollout"] > 1
    assert calls["progress"] >= 10
    assert calls["checkpoint"] >= 9
    assert calls.get("last and best", 0) + calls.get("best", 0) == 1
    assert calls["end"] == 1
    assert seen["same actions"]
    assert (seen["stopped"], seen["error"]) == ("all steps done", "")
    assert seen["config"]["environment"] == "CartPole-v1"
    assert seen["config"]["batch_size"] == 16
    with (results / "progress.csv").open() as file:
        last = list(csv.DictReader(file))[-1]
    assert float(last["steps/mine"]) > 0
    assert float(last["mine"]) > 0
    assert float(last["at the end"]) == 7  # logged after the run's last row
    assert float(last["wall_s"]) <= summary(results)["wall_s"]
    best = pearl.load_policy(results / "best_policy.safetensors")
    assert best.origin.step is not None
    assert best.predict(np.zeros(4)) in (0, 1)


@pytest.mark.parametrize(
    "hook",
    ["on_evaluation", *(pytest.param(h, marks=pytest.mark.slow) for h in ("on_step", "on_checkpoint", "on_end"))],
)
def test_a_run_with_a_failing_callback_stops_and_is_saved(program: Path, tmp_path: Path, hook: str) -> None:
    made = with_callbacks(program, tmp_path, f"Noting(), Raising({hook!r})")
    code, output = run(made, "--serial", "--eval-episodes", "2", "--run-dir", str(tmp_path / "run"))
    assert code == 1
    assert f"Error: The callback Raising failed in {hook}: RuntimeError: this is mine" in output
    assert list((tmp_path / "run/checkpoints").glob("checkpoint-*/manifest.json"))
    noted = json.loads((tmp_path / "run/noted.json").read_text())
    assert noted["calls"]["end"] == 1
    expected = "" if hook == "on_end" else f"CallbackError: The callback Raising failed in {hook}: RuntimeError"
    assert noted["seen"]["error"].partition(": this is mine")[0] == expected
    assert "Traceback" in (tmp_path / "run/run.log").read_text()


def test_callbacks_learn_which_error_ended_a_run(tmp_path: Path) -> None:
    noting = Noting()
    session = Session(
        *(Program("p", 0.0), parse_options(None, timesteps=100, run_dir=tmp_path, arguments=[])),
        trainer_class=TinyDQN,
        settings={},
        actors=ActorSpec("CartPole-v1"),
        replay=ReplaySpec(1000),
        train=TrainSpec(),
        callbacks=[noting],
    )
    session._begun = True
    with pytest.raises(TrainerError, match="it diverged"), session:
        raise TrainerError("it diverged")
    assert noting.seen["error"] == "TrainerError: it diverged"


def test_a_run_stops_for_a_reason() -> None:
    reasons: list[str] = []
    run: Any = Context(types.SimpleNamespace(stop=reasons.append))  # type: ignore[arg-type]
    run.stop("enough")
    for nothing in ("", " \n"):
        with pytest.raises(ConfigurationError, match="stop needs the reason, a text that is not empty; found"):
            run.stop(nothing)
    assert reasons == ["enough"]


def test_a_number_of_a_callback_replaces_none_of_the_run() -> None:
    report = types.SimpleNamespace(further={}, scalars=lambda: {"epsilon": 0.5, **report.further})
    run: Any = Context(types.SimpleNamespace(report=report))  # type: ignore[arg-type]
    for taken in ("", 3, "env_steps", "epsilon"):
        with pytest.raises(ConfigurationError, match=f"name other than those of the run, such as .*; found {taken!r}"):
            run.log(taken, 1.0)
    for value in (1, 2):
        run.log("mine", value)
    assert report.further == {"mine": 2.0}


@pytest.mark.slow
def test_a_callback_stops_a_run(program: Path, tmp_path: Path) -> None:
    made = with_callbacks(program, tmp_path, "StopsAtOnce()")
    code, output = run(made, "--eval-episodes", "1", "--run-dir", str(tmp_path / "run"))
    assert code == 0, output
    found = summary(tmp_path / "run")
    assert found["stopped"] == "enough"
    assert found["env_steps"] < 400


@pytest.mark.slow
def test_videos_are_recorded_during_a_run(program: Path, tmp_path: Path) -> None:
    pytest.importorskip("moviepy")
    made = with_callbacks(program, tmp_path, "RecordVideo(200)")
    code, output = run(made, "--serial", "--eval-episodes", "1", "--run-dir", str(tmp_path / "run"))
    assert code == 0, output
    assert len(list((tmp_path / "run/videos").glob("step-*/*.mp4"))) == 2


def test_an_environment_that_cannot_be_recorded_is_named_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("moviepy")
    env, seen = gym.make("CartPole-v1"), Run(tmp_path)
    case = (WideDQN, env.observation_space, env.action_space)
    policy = pearl.load_policy(run_folder(tmp_path / "run", case, env="CartPole-v1"))
    seen.policy = lambda: policy  # type: ignore[attr-defined]
    RecordVideo(100).on_start(seen)  # type: ignore[arg-type]
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "pygame", None)  # CartPole looks for it when it draws
        with pytest.raises(EnvError, match="CartPole-v1 cannot be recorded: DependencyNotInstalled"):
            RecordVideo(100).on_start(seen)  # type: ignore[arg-type]
    monkeypatch.setitem(CartPoleEnv.metadata, "render_modes", [])
    with pytest.raises(EnvError, match=r'Recording needs render_mode="rgb_array"; CartPole-v1 has no render modes'):
        RecordVideo(100).on_start(seen)  # type: ignore[arg-type]


@pytest.mark.parametrize("callbacks", [(), (StopAtReturn(1.0),), (StopsAtOnce(),)])
def test_methods_are_replaced_only_where_a_callback_needs_it(tmp_path: Path, callbacks: Any) -> None:
    options = parse_options(None, timesteps=100, run_dir=tmp_path, arguments=[])
    common: dict[str, Any] = {"settings": {}, "actors": ActorSpec("CartPole-v1"), "callbacks": callbacks}
    sessions: list[Any] = [
        Session(
            *(Program("p", 0.0), options),
            trainer_class=TinyDQN,
            replay=ReplaySpec(1000),
            train=TrainSpec(),
            **common,
        ),
        RolloutSession(
            *(Program("p", 0.0), dataclasses.replace(options, run_dir=tmp_path / "b", checkpoint_dir=tmp_path / "c")),
            trainer_class=TinyPPO,
            rollout=RolloutSpec(),
            train=TrainSpec(batch_size=64),
            **common,
        ),
    ]
    on_step = any(isinstance(callback, StopsAtOnce) for callback in callbacks)
    for session in sessions:
        assert ("collected" in vars(session)) == on_step
        assert not {"inserted", "trained"} & set(vars(session))
        session.report.close(None, None, None)


def test_the_config_has_what_counts(tmp_path: Path) -> None:
    session = RolloutSession(
        *(Program("p", 0.0), parse_options(None, timesteps=100, run_dir=tmp_path, arguments=[])),
        trainer_class=TinyPPO,
        settings={"batch_size": 32, "horizon": 16, "learning_rate": 0.5},
        actors=ActorSpec("CartPole-v1"),
        rollout=RolloutSpec(horizon=8),
        train=TrainSpec(batch_size=64),
    )
    session.make_trainer("cpu")
    config = Context(session).config
    assert (config["batch_size"], config["horizon"], config["learning_rate"]) == (64, 8, 0.5)
    session.report.close(None, None, None)


@pytest.mark.slow
def test_a_benchmark_calls_none(program: Path, tmp_path: Path) -> None:
    made = with_callbacks(program, tmp_path, "Noting()")
    code, output = run(made, "--bench", "--bench-seconds", "0.2", "--run-dir", str(tmp_path / "run"))
    assert code == 0, output
    assert not (tmp_path / "run/noted.json").exists()


def test_the_error_is_one_of_pearls() -> None:
    assert issubclass(CallbackError, pearl.errors.PearlError)
    assert KeepBest().file.endswith(".safetensors")


@pytest.mark.slow
def test_the_example_of_the_documentation_runs(
    tmp_path: Path, quick_profiles: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (Path(__file__).parent.parent / "docs" / "callbacks.md").read_text(encoding="utf-8")
    (block,) = [b for b in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if b.startswith("# short_run.py\n")]
    (tmp_path / "short_run.py").write_text(block)
    monkeypatch.syspath_prepend(str(tmp_path))
    trainer = importlib.import_module("short_run").ShortDQN
    shown = make_program(tmp_path, trainer=trainer, training={"learning_starts": 100}, timesteps=300)
    code, output = run(shown, "--serial", "--eval-episodes", "2", "--run-dir", str(tmp_path / "run"))
    assert code == 0, output
    assert re.search(r"\d+ steps: progress evaluation \d+\.\d", output)
    assert re.search(r"the end: (all steps done|a mean return of [\d.]+ reached 20 \(StopAtReturn\))", output)
    assert (tmp_path / "run/best_policy.safetensors").exists()
    assert "weights/norm" in (tmp_path / "run/progress.csv").read_text().splitlines()[0]
    assert pearl.load_policy(tmp_path / "run").description.trainer.algorithm == "DQN"
