from __future__ import annotations

import ast
import dataclasses
import difflib
import importlib
import os
import re
import subprocess
import sys
import types
from collections.abc import Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from programs import ONE_CPU, CsvPair, described
from trainers import TinyDQN

from composer.algorithm1 import place
from composer.codegen.program import ProgramSource, generate, render
from composer.codegen.python_source import documented, laid_out, literal
from composer.codegen.trainer_source import UserImport, trainer_import
from composer.matrix import (
    AssignmentMatrix,
    LearnerCell,
    LearnerOption,
    MatrixRow,
    PairCell,
    ReplayCell,
)
from composer.measurement import Measurement
from composer.placement import Placement
from composer.platform import Platform
from composer.problem import Problem
from composer.storage_rule import STAYS, StorageRule
from pearl.algorithms import DQN
from pearl.backends import backend_of
from pearl.devices.description import Connection, Device
from pearl.errors import ConfigurationError, GenerationError, PlacementError
from pearl.exploration import EpsilonGreedy
from pearl.replay import Constant, Linear
from pearl.spec import ONE_LEARNER, ActorSpec, LearnersSpec, ReplaySpec, TrainSpec, TransitionSpec

TESTS = Path(__file__).parent
GOLDEN = TESTS / "golden"
DEVICES = (
    Device("cpu0", "cpu", "cpu", cores=8),
    Device("cpu1", "cpu", "cpu", cores=8),
    Device("gpu0", "gpu", "cuda", "cuda:1"),
    Device("sycl:cpu0", "cpu", "sycl", "cpu", cores=8, shares_with="cpu0"),
)
CONNECTIONS = (
    Connection("cpu0", "cpu1", 1.0, 10.0),
    Connection("cpu0", "gpu0", 5.0, 12.0),
    Connection("cpu0", "sycl:cpu0", 3.0, 9.0),
)


def placed(
    replay_manager: str,
    learner: str,
    storage: str | None = None,
    implementation: str | None = None,
    replay_spec: ReplaySpec | None = None,
) -> Placement:
    """A placement on the devices above, whose latencies are made up; on CPUs the native Learner takes twice as long."""
    rows = []
    for number, device in enumerate(DEVICES, start=1):
        latency = Measurement.modelled(10.0 * number)
        usual = "sycl" if device.backend == "sycl" else "torch"
        replay = ReplayCell(latency, latency, latency, fanout=16)
        learned = LearnerCell(latency, threads=number, implementation=usual)
        native = LearnerCell(Measurement.modelled(20.0 * number), threads=number, implementation="native")
        others = (LearnerOption(native, PairCell(replay, native)),) if device.backend == "cpu" else ()
        rows.append(MatrixRow(device.name, replay, learned, PairCell(replay, learned), others))
    placement = place(
        AssignmentMatrix(tuple(rows), ()),
        Platform(DEVICES, CONNECTIONS),
        batch_size=64,
        transition_bytes=48,
        actor_count=4,
        envs_per_actor=8,
        replay_ratio=TrainSpec().replay_ratio,
        storage_rule=StorageRule(
            {device.name: device for device in DEVICES}, "cpu0", replay_spec or ReplaySpec(100_000), 48
        ),
    )
    return placement.with_choice(
        replay_manager=replay_manager, learner=learner, storage=storage, implementation=implementation
    )


def source(
    placement: Placement,
    *,
    trainer: type = DQN,
    settings: Mapping[str, Any] | None = None,
    actors: ActorSpec | None = None,
    replay_spec: ReplaySpec | None = None,
    learners: LearnersSpec = ONE_LEARNER,
    **changes: Any,
) -> ProgramSource:
    observations, actions = spaces.Box(-1.0, 1.0, (4,), np.float32), spaces.Discrete(2)
    problem = Problem(
        trainer_class=trainer,
        settings=settings or {},
        observation_space=observations,
        action_space=actions,
        transition=TransitionSpec.from_spaces(observations, actions),
        replay=replay_spec or ReplaySpec(100_000),
        train=TrainSpec(),
        actors=actors or ActorSpec("CartPole-v1", count=4),
        learners=learners,
    )
    values: dict[str, Any] = {
        "path": TESTS / "programs" / "cartpole.py",
        "placement": placement,
        "replay": placement.replay_config,
        "learner": placement.learner_config,
        "problem": problem,
        "device_file": None,
        "connection_file": None,
        "timesteps": 100_000,
        "run_dir": Path("runs/cartpole"),
        "until_return": 475.0,
    }
    return ProgramSource(**{**values, **changes})


def on_threads(threads: int, placement: Placement) -> ProgramSource:
    return source(placement, learner=dataclasses.replace(placement.learner_config, threads=threads))


def text_of(program: ProgramSource) -> str:
    return render(program, {device.name: device for device in DEVICES})


# --- golden files ---------------------------------------------------------------------------------------------------

PROGRAMS = {
    "setting1": lambda: source(placed("cpu0", "cpu1"), trainer=TinyDQN, until_return=None),
    "setting2": lambda: source(
        placed("cpu0", "cpu0"),
        settings={"hidden_sizes": (256, 256), "exploration": EpsilonGreedy(steps=8000), "tau": 1.0},
        actors=ActorSpec("LunarLander-v3", env_kwargs={"enable_wind": True, "gravity": -9.5}),
    ),
    "setting2_shared_cores": lambda: on_threads(2, placed("cpu0", "cpu0")),
    "setting1_native": lambda: source(placed("cpu0", "cpu1", implementation="native"), trainer=TinyDQN),
    "setting2_native": lambda: source(placed("cpu0", "cpu0", implementation="native")),
    "setting1_storage_on_gpu": lambda: source(placed("cpu0", "gpu0", storage="gpu0")),
    "setting1_sycl_learner": lambda: source(placed("cpu0", "sycl:cpu0")),
    "setting1_sycl_replay": lambda: source(placed("sycl:cpu0", "cpu0", implementation="native")),
    "setting2_sycl": lambda: source(placed("sycl:cpu0", "sycl:cpu0")),
    "learners": lambda: source(
        placed("cpu0", "cpu0", implementation="native"), learners=LearnersSpec(4, average_every=32, moments="average")
    ),
}
# Of these programs, only what differs from another one is accepted.
BASES = {
    "setting1_native": "setting1",
    "setting1_storage_on_gpu": "setting1",
    "setting1_sycl_learner": "setting1",
    "setting1_sycl_replay": "setting1",
    "setting2_shared_cores": "setting2_native",
    "setting2_sycl": "setting2_native",
}


def differences(base: str, text: str) -> str:
    """The lines of `base` that `text` lacks and the other way round; `...` stands for what they share."""
    lines = list(difflib.unified_diff(base.splitlines(), text.splitlines(), n=0, lineterm=""))[2:]
    return "".join(f"{'...' if line.startswith('@@') else line}\n" for line in lines)


def golden_of(name: str) -> Path:
    return GOLDEN / f"{name}.{'diff' if name in BASES else 'py'}"


@pytest.fixture
def fixed_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pearl.__version__", "1.2.3")


@pytest.mark.usefixtures("fixed_version")
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_read_as_accepted(name: str, request: pytest.FixtureRequest) -> None:
    text, golden = text_of(PROGRAMS[name]()), golden_of(name)
    if name in BASES:
        text = differences(text_of(PROGRAMS[BASES[name]]()), text)
    if request.config.getoption("--accept-golden"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(text, encoding="utf-8")
    assert text == golden.read_text(encoding="utf-8"), "if this is meant, accept it: pytest --accept-golden"


def test_every_golden_file_is_in_use() -> None:
    assert set(GOLDEN.iterdir()) == {golden_of(name) for name in PROGRAMS}


def test_threads_that_use_cores_of_the_actors_do_not_spin_while_they_wait() -> None:
    policy = 'os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")'
    text = text_of(on_threads(2, placed("cpu0", "cpu0")))
    assert 0 < text.index(policy) < text.index("\nfrom pearl")  # which may load torch, which reads it then
    for other in (
        on_threads(1, placed("cpu0", "cpu0")),
        on_threads(2, placed("cpu0", "cpu1")),  # where no Actor is
        on_threads(2, placed("cpu0", "cpu0", implementation="native")),
    ):
        assert policy not in text_of(other)


LONG = "a_rather_long_name_of_a_folder/" * 5
WORDY = {
    "note": "words and more words " * 12,
    "quoted": 'it\'s "both" ' * 15,
    "sizes": tuple(range(1000, 1040)),
    "nested": {"of": [list(range(100, 140)), {"deep": ("word " * 30,)}], "exploration": None},
    "exploration": EpsilonGreedy(start=0.123456789, end=0.0123456789, steps=8000),
    "one": (1,),
    "none": [],
    "infinite": float("inf"),
}


EVERY_OPTION = ReplaySpec(
    100_000,
    alpha=Linear(1.0, 0.25, 50_000),
    beta=Constant(0.5),
    stratified=False,
    replacement=False,
    max_times_sampled=32,
    initial_priority="mean",
    priority_epsilon=1e-4,
    storage="memmap",
    share_next_obs=True,
)


@pytest.fixture(scope="session")
def written_programs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The golden programs, and one whose values are all long."""
    folder = tmp_path_factory.mktemp("written")
    files = [folder / f"{'devices and ' * 8}{kind}.csv" for kind in ("devices", "connections")]
    for file in files:
        file.write_text("")
    wordy = source(
        placed("cpu0", "cpu1"),
        trainer=TinyDQN,
        settings=WORDY,
        actors=ActorSpec("Counting-v0", env_kwargs={f"a_long_keyword_argument_{i}": f"value {i}" for i in range(8)}),
        replay_spec=EVERY_OPTION,
        run_dir=Path(LONG),
        device_file=files[0],
        connection_file=files[1],
    )
    texts = {name: text_of(make()) for name, make in PROGRAMS.items()} | {"wordy": text_of(wordy)}
    for name, text in texts.items():
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
    return [folder / f"{name}.py" for name in texts]


def module_run(module: str, *arguments: str | Path, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", module, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, **kwargs)


def test_programs_are_formatted_and_linted(written_programs: list[Path]) -> None:
    tomllib = pytest.importorskip("tomllib", reason="reading the rules needs Python 3.11")
    pytest.importorskip("ruff", reason="ruff is not installed")
    rules = tomllib.loads((TESTS.parent / "pyproject.toml").read_text())["tool"]["ruff"]["lint"]
    style = ("--isolated", "--line-length", "120", "--target-version", "py310")
    select = ("--select", ",".join(rules["select"]), "--ignore", ",".join(rules["ignore"]))
    checked = module_run("ruff", "check", *style, *select, *written_programs)
    assert checked.returncode == 0, checked.stdout
    formatted = module_run("ruff", "format", "--diff", *style, *written_programs)
    assert formatted.returncode == 0, formatted.stdout


@pytest.mark.slow
def test_programs_are_typed(written_programs: list[Path], tmp_path: Path) -> None:
    pytest.importorskip("mypy", reason="mypy is not installed")
    flags = ("--strict", "--follow-imports=silent", "--config-file", os.devnull, "--cache-dir", tmp_path)
    environment = {**os.environ, "MYPYPATH": str(TESTS.parent)}
    checked = module_run("mypy", *flags, *written_programs, env=environment, cwd=tmp_path)
    assert checked.returncode == 0, checked.stdout


def replay_of(text: str) -> list[str]:
    """The lines of a program that make its REPLAY."""
    block = text[text.index("REPLAY = ") : text.index("TRAIN = ")]
    return [line.strip() for line in block.splitlines()[1:-1]]


def test_the_replay_is_written_out_where_it_is_not_as_by_default() -> None:
    usual = ["capacity=100_000", 'mode="prioritized"', "fanout=16", "alpha=0.6", "beta=0.4", "beta_final=1.0"]
    assert replay_of(text_of(source(placed("cpu0", "cpu1")))) == [f"{part.replace('_000', '000')}," for part in usual]
    text = text_of(source(placed("cpu0", "cpu1"), replay_spec=EVERY_OPTION))
    assert replay_of(text)[3:] == [
        "alpha=Linear(start=1.0, final=0.25, steps=50000),",
        "beta=Constant(value=0.5),",
        "stratified=False,",
        "replacement=False,",
        "max_times_sampled=32,",
        'initial_priority="mean",',
        "priority_epsilon=0.0001,",
        'storage="memmap",',
        "share_next_obs=True,",
    ]
    # What is read back is what was said.
    assignments = {n.targets[0].id: n.value for n in ast.parse(text).body if isinstance(n, ast.Assign)}  # type: ignore[attr-defined]
    names = {"ReplaySpec": ReplaySpec, "Linear": Linear, "Constant": Constant}
    assert eval(ast.unparse(assignments["REPLAY"]), names) == EVERY_OPTION


def test_the_timeout_of_actors_is_written_where_it_is_not_as_by_default() -> None:
    assert "timeout_s" not in text_of(source(placed("cpu0", "cpu0")))
    for timeout_s, written in ((20.0, "20.0"), (float("inf"), 'float("inf")')):
        text = text_of(source(placed("cpu0", "cpu0"), actors=ActorSpec("CartPole-v1", timeout_s=timeout_s)))
        assert f"    timeout_s={written},\n)" in text


def test_what_a_gpu_cannot_store_stays_with_the_host() -> None:
    for replay_manager, device in (("cpu0", "gpu0"), ("sycl:cpu0", "sycl:cpu0")):
        for replay in (ReplaySpec(1000, storage="memmap"), ReplaySpec(1000, share_next_obs=True)):
            placement = placed(replay_manager, device, replay_spec=replay)
            assert [option.device for option in placement.chosen.storage] == ["cpu0"]
            text = text_of(source(placement, replay_spec=replay))
            assert "session.make_storage()" in text
            assert not re.search(r"(Torch|Sycl)DataStorage", text)
            assert re.search(r"Data Storage +cpu0$", text, re.MULTILINE)
            with pytest.raises(GenerationError, match=f"is placed on {device}, which cannot keep it: storage=, share"):
                text_of(source(placed(replay_manager, device, storage=device), replay_spec=replay))
        on_device = placed(replay_manager, device, storage=device)
        assert re.search(rf"Data Storage +{device}$", text_of(source(on_device)), re.MULTILINE)


def test_a_data_storage_is_never_placed_away_from_its_learner() -> None:
    placement = placed("sycl:cpu0", "cpu0", implementation="native")
    assert [option.device for option in placement.chosen.storage] == ["cpu0"]
    text = text_of(source(placement))
    assert "SyclDataStorage" not in text
    assert re.search(r"Data Storage +cpu0$", text, re.MULTILINE)
    with pytest.raises(PlacementError, match="cpu0"):
        placed("sycl:cpu0", "cpu0", storage="sycl:cpu0", implementation="native")


def test_a_data_storage_goes_where_there_is_room() -> None:
    small = Device("sycl:gpu0", "gpu", "sycl", "gpu", memory_gb=1.0)
    cuda = dataclasses.replace(DEVICES[2], memory_gb=1.0)
    rule = StorageRule({d.name: d for d in (DEVICES[0], small, cuda)}, "cpu0", ReplaySpec(100_000_000), 48)
    assert rule.refusal(small.name, small.name) == "it has 1 GB of memory, 4.8 are needed"
    assert rule.refusal("cpu0", small.name) is None
    assert rule.refusal(cuda.name, cuda.name) is None  # it reads rows in the host's memory


@pytest.mark.parametrize("setting", [{"storage": "memmap"}, {"share_next_obs": True}, {"share_frames": True}])
def test_a_data_storage_that_needs_the_host_stays_there(setting: dict[str, Any]) -> None:
    cuda = dataclasses.replace(DEVICES[2], memory_gb=1.0)
    rule = StorageRule({d.name: d for d in (DEVICES[0], cuda)}, "cpu0", ReplaySpec(1000, **setting), 48)
    assert rule.refusal(cuda.name, cuda.name) == STAYS
    assert rule.refusal("cpu0", cuda.name) is None


def test_a_schedule_that_cannot_be_written_is_refused() -> None:
    with pytest.raises(GenerationError, match=r"cannot be written into a program\. Use one of pearl.replay: Constant"):
        text_of(source(placed("cpu0", "cpu1"), replay_spec=ReplaySpec(1000, beta=lambda step: 0.5)))


# --- values ---------------------------------------------------------------------------------------------------------

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text(), inner) | st.lists(inner, min_size=1)
    ),
    max_leaves=20,
)


@given(plain)
def test_values_survive_being_written(value: Any) -> None:
    names = {"float": float}
    assert eval(literal(value), names) == value
    assert "\n" not in literal(value)
    assert eval(laid_out(value, 100), names) == value


@given(st.text(min_size=150))
def test_long_text_survives_being_wrapped(text: str) -> None:
    assert ast.literal_eval(laid_out(text, 60, 4)) == text


@given(st.text())
def test_text_survives_a_docstring(text: str) -> None:
    assert ast.literal_eval(f'"""First {documented(text)} last.\n"""') == f"First {text} last.\n"


@pytest.mark.parametrize("value", [{1, 2}, object(), np.float64(0.5), b"bytes", len, [object()]])
def test_values_without_source_are_refused(value: object) -> None:
    with pytest.raises(GenerationError, match=r"cannot be written .* subclass of the trainer"):
        literal(value)


def test_numpy_text_is_written_as_text() -> None:
    assert literal(np.str_("quick")) == '"quick"'


@pytest.mark.parametrize(("ratio", "said"), [(0.5, "collect at a replay ratio of 0.5"), (None, "run free")])
def test_a_program_says_what_its_prediction_assumes(ratio: float | None, said: str) -> None:
    text = text_of(source(dataclasses.replace(placed("cpu0", "cpu0"), replay_ratio=ratio)))
    assert len(re.findall(rf"not waiting for data, with Actors that {said}", text)) == 2
    assert "free-running" not in text


def test_explorations_are_imported() -> None:
    text = text_of(source(placed("cpu0", "cpu0"), settings={"exploration": EpsilonGreedy(steps=5)}))
    names: dict[str, Any] = {"__name__": "generated", "__doc__": None, "__file__": "generated.py"}
    exec(compile(text, "generated", "exec"), names)
    assert names["SETTINGS"] == {"exploration": EpsilonGreedy(steps=5)}


HOSTILE = [
    pytest.param("'; open('{proof}', 'w'); '", id="quote"),
    pytest.param('"; open("{proof}", "w"); "', id="double-quote"),
    pytest.param('"""\nopen("{proof}", "w")\n"""', id="triple-quote"),
    pytest.param("'''\nopen('{proof}', 'w')\n'''", id="single-triple-quote"),
    pytest.param('\\"; open("{proof}", "w") #', id="backslash"),
    pytest.param('\\"""\nopen("{proof}", "w")\n\\"""', id="backslash-triple-quote"),
    pytest.param("x\nopen('{proof}', 'w')", id="newline"),
    pytest.param("x\r\x0copen('{proof}', 'w')", id="other-line-ends"),
    pytest.param("{{ ''.__class__.__mro__ }}{{% for x in y %}}{{# '{proof}' #}}", id="jinja"),
    pytest.param("{{open('{proof}', 'w')}}", id="braces"),
    pytest.param("${{{proof}}} %s %(x)s", id="format"),
    pytest.param("\u2028open('{proof}', 'w')\u202e\ud800", id="unicode"),
]


def shape(text: str) -> str:
    """The syntax tree with every literal value taken out."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant):
            node.value = type(node.value).__name__
    return ast.dump(tree)


@pytest.mark.parametrize("text", HOSTILE)
def test_no_value_breaks_out_of_its_literal(text: str, tmp_path: Path) -> None:
    proof = tmp_path / "proof"
    hostile = text.replace("{proof}", str(proof))

    def program(value: str) -> str:
        placement = dataclasses.replace(placed("cpu0", "cpu1"), host=value)
        object.__setattr__(placement, "metric", value)
        object.__setattr__(placement.replay_config, "backend", value)
        return text_of(
            source(
                placement,
                settings={value: value, "list": [value], "text": value * 10},
                actors=ActorSpec(value, env_kwargs={value: value}),
                run_dir=Path(value),
                device_file=None,
            )
        )

    written = program(hostile)
    assert shape(written) == shape(program("harmless"))
    names: dict[str, Any] = {"__name__": "generated", "__file__": "generated.py"}
    exec(compile(written, "generated", "exec"), names)
    assert not proof.exists()
    assert names["ACTORS"].env == hostile
    assert names["SETTINGS"][hostile] == hostile
    assert hostile in names["__doc__"]


def test_device_files_cannot_break_out(tmp_path: Path) -> None:
    file = tmp_path / '"); open("proof", "w"); ("""'
    file.write_text("")
    written = text_of(source(placed("cpu0", "cpu1"), device_file=file, connection_file=file))
    assert shape(written) == shape(text_of(source(placed("cpu0", "cpu1"))))


# --- parameters -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("timesteps", [0, -1, 1.5, True, "1000; import os"])
def test_wrong_timesteps_are_refused(timesteps: Any) -> None:
    with pytest.raises(GenerationError, match=rf"timesteps must be .* found {re.escape(repr(timesteps))}"):
        text_of(source(placed("cpu0", "cpu0"), timesteps=timesteps))


@pytest.mark.parametrize(
    ("learner", "change", "expected"),
    [
        (
            "cpu0",
            {"implementation": "nativ"},
            r"must be one of 'torch', 'native', 'cuda', 'sycl', 'fpga'; found 'nativ'\. Did you mean 'native'",
        ),
        (
            "gpu0",
            {"implementation": "native"},
            r"native Learner runs on cpu devices; found gpu0, .* implementation torch",
        ),
        ("cpu0", {"implementation": "native", "sub_batches": 2}, r"sub_batches must be 1; found 2"),
        ("cpu0", {"implementation": "torch", "prefetch": True}, r"torch Learner draws no batches ahead"),
        ("cpu0", {"implementation": "sycl"}, r"sycl Learner runs on sycl devices; found cpu0, .* torch or native"),
        ("sycl:cpu0", {"implementation": "torch"}, r"torch Learner runs on cpu and cuda .* or the implementation sycl"),
    ],
)
def test_a_learner_that_cannot_be_is_refused(learner: str, change: dict[str, Any], expected: str) -> None:
    placement = placed("cpu0", learner)
    with pytest.raises(GenerationError, match=expected):
        text_of(source(placement, learner=dataclasses.replace(placement.learner_config, **change)))


def test_the_threads_of_the_replay_manager_reach_the_program() -> None:
    placement = placed("cpu0", "cpu0")
    two = dataclasses.replace(placement.replay_config, workers=2)
    program = source(placement, replay=two)
    large = dataclasses.replace(program.problem, train=TrainSpec(batch_size=4096))
    text = text_of(dataclasses.replace(program, problem=large))
    assert "make_replay_manager(REPLAY, seed=options.seed, workers=2)" in text
    with pytest.raises(GenerationError, match=r"cpu0 runs batches of \d+ with 1 worker\(s\); found 2"):
        text_of(source(placement, replay=two))


def test_batches_that_the_tree_does_not_share_out_have_one_thread() -> None:
    header = (TESTS.parent / "kernels/include/pearl/sum_tree_replay.hpp").read_text()
    chunk = re.search(r"kChunk = (\d+);", header)
    assert chunk is not None
    shared = 2 * int(chunk[1])
    counts = [tuple(backend_of(DEVICES[0]).replay_workers(DEVICES[0], batch, 8)) for batch in (shared - 1, shared)]
    assert counts == [(1,), (1, 2, 4, 8)]


def test_a_program_imports_the_learner_it_uses() -> None:
    native, torch = (text_of(source(placed("cpu0", "cpu0", implementation=name))) for name in ("native", "torch"))
    assert "from pearl.backends.cpu.learner import NativeLearner" in native
    assert "TorchLearner" not in native
    assert "NativeLearner" not in torch


def test_wrong_fanout_is_refused() -> None:
    placement = placed("cpu0", "cpu0")
    with pytest.raises(ConfigurationError, match="power of two"):
        text_of(source(placement, replay=dataclasses.replace(placement.replay_config, fanout=12)))


# --- where the trainer class comes from -----------------------------------------------------------------------------

CLASS = "class Mine:\n    pass\n"
GUARD = 'if __name__ == "__main__":\n    print("composing")\n'


@pytest.fixture
def as_main(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """Runs a script's text as Python runs a script, and gives its class `Mine`."""

    def run(text: str, name: str = "my_script.py") -> type:
        script = tmp_path / name
        script.write_text(text)
        module = types.ModuleType("__main__")
        module.__file__ = str(script)
        monkeypatch.setitem(sys.modules, "__main__", module)
        exec(compile(text, str(script), "exec"), vars(module))
        return vars(module)["Mine"]

    return run


def test_class_of_the_composing_script(as_main: Any, tmp_path: Path) -> None:
    for text in (CLASS + GUARD, "if True:\n    class Mine: pass\n" + GUARD):
        assert trainer_import(as_main(text), ()) == UserImport("my_script", "Mine", tmp_path.resolve())


@pytest.mark.parametrize(
    ("text", "name", "advice"),
    [
        pytest.param(CLASS + "if True:\n    composed = 1\n", "s.py", 'if __name__ == "__main__":', id="no-guard"),
        pytest.param(CLASS + GUARD, "my-script.py", "rename", id="no-identifier"),
        pytest.param('if __name__ == "__main__":\n    class Mine: pass\n', "s.py", "top level", id="inside-guard"),
        pytest.param("Mine = type('Mine', (), {})\n" + GUARD, "s.py", "top level", id="made-by-a-call"),
    ],
)
def test_class_of_a_script_that_cannot_be_imported(as_main: Any, text: str, name: str, advice: str) -> None:
    with pytest.raises(GenerationError, match=re.escape(advice)):
        trainer_import(as_main(text, name), ())


@pytest.mark.parametrize("installed", [False, True])
def test_class_of_a_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, installed: bool) -> None:
    """Of the user's own, the program is told the folder; of an installed one, the shortest name is imported."""
    name = "pearl_test_installed" if installed else "pearl_test_own"
    root = tmp_path / "site-packages" if installed else tmp_path
    (root / name / "deep").mkdir(parents=True)
    (root / name / "__init__.py").write_text(f"from {name}.deep.part import Shown\n{CLASS}")
    (root / name / "deep" / "part.py").write_text("class Shown: pass\nclass Hidden: pass\n")
    monkeypatch.syspath_prepend(str(root))
    package = importlib.import_module(name)
    classes = (package.Mine, package.Shown, package.deep.part.Hidden)
    modules = (name, name if installed else f"{name}.deep.part", f"{name}.deep.part")
    for made, module in zip(classes, modules, strict=True):
        assert trainer_import(made, ()) == UserImport(module, made.__name__, None if installed else root.resolve())


@pytest.mark.parametrize(
    ("module", "name", "with_file", "wrong"),
    [
        ("shown", "Mine", True, None),
        ("shown", "Alias", True, None),
        ("shown", "Session", True, "cannot have a trainer class named 'Session'"),
        ("not-shown", "Mine", True, "cannot be imported by the name 'not-shown'"),
        ("shown", "Mine", False, "no source file"),
        ("__main__", "Mine", True, "no source file"),  # a module that each program calls its own
    ],
)
def test_class_of_a_module_that_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, module: str, name: str, with_file: bool, wrong: str | None
) -> None:
    made = types.ModuleType(module)
    mine = type("Mine", (DQN,), {})
    setattr(made, name, mine)
    if with_file:
        made.__file__ = str(tmp_path / "shown.py")
    monkeypatch.setitem(sys.modules, module, made)
    if wrong is None:
        assert trainer_import(mine, {"Session"}, module) == UserImport(module, name, tmp_path.resolve())
    else:
        with pytest.raises(GenerationError, match=wrong):
            trainer_import(mine, {"Session"}, module)


@pytest.mark.parametrize("file", [None, "<stdin>"])
def test_class_of_a_console_or_notebook(monkeypatch: pytest.MonkeyPatch, file: str | None) -> None:
    module = types.ModuleType("__main__")
    if file is not None:  # a console's has no __file__
        module.__file__ = file
    monkeypatch.setitem(sys.modules, "__main__", module)
    exec(CLASS, vars(module))
    with pytest.raises(GenerationError, match=r"notebook.*\.py file"):
        trainer_import(vars(module)["Mine"], ())


@pytest.mark.parametrize("module", ["__main__", "nowhere", "trainers"])
def test_class_made_by_exec(module: str) -> None:
    names: dict[str, Any] = {"__name__": module}
    exec(CLASS, names)
    with pytest.raises(GenerationError, match=r"no source file.*\.py file"):
        trainer_import(names["Mine"], ())


class Outer:
    class Inner(DQN):
        pass


def test_nested_class() -> None:
    with pytest.raises(GenerationError, match=r"Outer\.Inner.*top level"):
        trainer_import(Outer.Inner, ())


@pytest.mark.parametrize("name", ["Session", "Linear", "NativeLearner", "SETTINGS", "print", "class", "not a name"])
def test_class_whose_name_the_program_needs(name: str) -> None:
    taken = type(name, (DQN,), {"__module__": __name__, "__qualname__": name})
    with pytest.raises(GenerationError, match="another name"):
        text_of(source(placed("cpu0", "cpu0"), trainer=taken))


def test_script_without_guard_says_so_to_its_user(csv_pair: CsvPair, tmp_path: Path) -> None:
    devices, connections = csv_pair(*ONE_CPU)
    script = tmp_path / "compose.py"
    script.write_text(
        "import functools\n\n"
        "import composer.replay_composing as quick\n"
        "from pearl import Composer\n"
        "from pearl.algorithms import DQN\n\n"
        "quick.Profiler = functools.partial(quick.Profiler, budget_s=0.01)\n\n\n"
        "class Mine(DQN):\n    hidden_sizes = (4,)\n\n\n"
        "composer = Composer(progress=False)\n"
        f"composer.set_device_file({str(devices)!r})\n"
        f"composer.set_connection_file({str(connections)!r})\n"
        "composer.set_actors(1, env='CartPole-v1')\n"
        "composer.set_train_function(learner=Mine)\n"
        "composer.set_replay(100)\n"
        "composer.runtime_gen(*composer.run(), path='program.py')\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1
    assert "GenerationError" in done.stderr
    assert 'if __name__ == "__main__":' in done.stderr
    assert not (tmp_path / "program.py").exists()


# --- where the program goes -----------------------------------------------------------------------------------------


def test_unwritable_path_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    devices = {device.name: device for device in DEVICES}
    for path in (tmp_path / "file" / "program.py", tmp_path, Path("/proc/program.py")):
        with pytest.raises(GenerationError) as caught:
            generate(source(placed("cpu0", "cpu0"), path=path), devices)
        assert str(path) in str(caught.value)
        assert "another path" in str(caught.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file"]


def test_a_program_names_the_files_that_it_was_composed_from(tmp_path: Path) -> None:
    devices, connections = tmp_path / "devices.csv", tmp_path / "connections.csv"
    for file in (devices, connections):
        file.write_text(file.name)
    made = dataclasses.replace(source(placed("cpu0", "cpu0")), device_file=devices, connection_file=connections)
    named = [f"{path.name} sha256:{sha256(path.read_bytes()).hexdigest()[:12]}" for path in (devices, connections)]
    assert f'composed_from="{", ".join(named)}"' in text_of(made)


def test_failed_generation_leaves_the_earlier_program(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    devices = {device.name: device for device in DEVICES}
    generate(source(placed("cpu0", "cpu0"), path=path), devices)
    before = path.read_text()
    with pytest.raises(GenerationError):
        generate(source(placed("cpu0", "cpu0"), path=path, settings={"value": object()}), devices)
    assert path.read_text() == before
    assert os.access(path, os.X_OK)


@pytest.mark.usefixtures("quick_profiles")
def test_program_in_a_new_folder(csv_pair: CsvPair, tmp_path: Path) -> None:
    composer = described(csv_pair(*ONE_CPU))
    composer.run()
    path = composer.runtime_gen(path=tmp_path / "new" / "folder" / "my_program.py")
    assert 'run_dir="runs/my_program"' in path.read_text()
