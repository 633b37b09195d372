import importlib.util
import itertools
import math
import os
import textwrap
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import pearl.algorithms
from composer.codegen.trainer_source import UserImport, trainer_import
from composer.spec_file import ProgramOptions, load_spec
from pearl.errors import ConfigurationError, PearlError, TrainerError
from pearl.exploration import EpsilonGreedy, GaussianNoise
from pearl.replay import Constant, Linear
from pearl.runtime.options import check_goal
from pearl.spec import ReplaySpec

EXAMPLES = Path(__file__).parent.parent / "examples"
_SERIAL = itertools.count()

TRAINER = """
from pearl.algorithms import DQN


class SpecTrainer(DQN):
    hidden_sizes = (16,)
"""

LEAST = """
[actors]
env = "CartPole-v1"
[trainer]
class = "{module}.py:SpecTrainer"
[replay]
size = 1000
"""


@pytest.fixture
def module(tmp_path):
    """A trainer file beside the spec, under a name that no other test imports."""
    name = f"spec_trainer_{next(_SERIAL)}"
    (tmp_path / f"{name}.py").write_text(TRAINER)
    return name


@pytest.fixture
def spec(tmp_path, module):
    def write(text, name="spec.toml"):
        path = tmp_path / name
        path.write_text(textwrap.dedent(text).replace("{module}", module), encoding="utf-8")
        return path

    return write


def load(path):
    return load_spec(path, progress=False)


def test_the_least_that_is_needed_takes_defaults(spec, tmp_path):
    composer, program = load(spec(LEAST))
    assert composer.actors.env == "CartPole-v1"
    assert (composer.actors.count, composer.actors.envs_per_actor) == (1, 8)
    assert composer.replay.capacity == 1000
    assert composer.trainer_class.__name__ == "SpecTrainer"
    assert composer.metric == "throughput"
    run_dir = tmp_path / "runs" / "spec"
    assert program == ProgramOptions(run_dir / "program.py", Path(os.path.relpath(run_dir)), 100_000, None)


def test_every_key_reaches_the_composer(spec, tmp_path):
    composer, program = load(
        spec("""
        [platform]
        devices = "machine/devices.csv"
        connections = "machine/connections.csv"
        metric = "PowerEfficiency"
        [actors]
        env = "CartPole-v1"
        count = 2
        envs_per_actor = 3
        vectorization = "vector_entry_point"
        env_kwargs = { sutton_barto_reward = true }
        timeout_s = 20
        [trainer]
        class = "{module}.py:SpecTrainer"
        hidden_sizes = [32, 32]
        learning_rate = 1
        dueling = true
        [trainer.exploration]
        kind = "EpsilonGreedy"
        end = 0
        steps = 500
        [replay]
        size = 5_000
        mode = "uniform"
        fanout = "auto"
        alpha = 1
        beta = 0.5
        beta_final = 0.9
        [training]
        batch_size = 32
        replay_ratio = inf
        learning_starts = 10
        priority_update_delay = 2
        gamma = 0.9
        n_step = 3
        weight_sync_interval = 4
        [program]
        path = "out/train.py"
        run_dir = "out"
        timesteps = 2_000
        until_return = 200
        seed = 3
        eval_episodes = 10
        eval_interval = 400
        checkpoint_interval = 500
        """)
    )
    assert composer.device_file == tmp_path / "machine/devices.csv"
    assert composer.connection_file == tmp_path / "machine/connections.csv"
    assert composer.metric == "power_efficiency"
    assert (composer.actors.count, composer.actors.envs_per_actor) == (2, 3)
    assert composer.actors.vectorization == "vector_entry_point"
    assert composer.actors.env_kwargs == {"sutton_barto_reward": True}
    assert composer.actors.timeout_s == 20.0
    assert composer.settings == {
        "hidden_sizes": (32, 32),
        "learning_rate": 1.0,
        "dueling": True,
        "exploration": EpsilonGreedy(end=0.0, steps=500),
    }
    assert type(composer.settings["learning_rate"]) is float
    replay = composer.replay
    assert (replay.capacity, replay.mode, replay.fanout) == (5000, "uniform", "auto")
    assert (replay.alpha, replay.beta, replay.beta_final) == (1.0, 0.5, 0.9)
    assert composer.training["replay_ratio"] == math.inf
    assert composer.training["weight_sync_interval"] == 4
    run_dir = Path(os.path.relpath(tmp_path / "out"))
    assert program == ProgramOptions(tmp_path / "out/train.py", run_dir, 2000, 200.0, 3, 10, 400, 500)


def test_every_option_of_the_replay_can_be_said(spec):
    composer, _ = load(
        spec(
            LEAST
            + """
stratified = false
replacement = false
max_times_sampled = 32
initial_priority = "mean"
priority_epsilon = 1e-4
storage = "memmap"
share_next_obs = true
beta = { kind = "Constant", value = 1 }
[replay.alpha]
kind = "Linear"
start = 0.8
final = 0
steps = 50_000
"""
        )
    )
    assert composer.replay == ReplaySpec(
        1000,
        alpha=Linear(0.8, 0.0, 50_000),
        beta=Constant(1.0),
        stratified=False,
        replacement=False,
        max_times_sampled=32,
        initial_priority="mean",
        priority_epsilon=1e-4,
        storage="memmap",
        share_next_obs=True,
    )
    # A file that says nothing of a field leaves it as ReplaySpec has it.
    assert load(spec(LEAST))[0].replay == ReplaySpec(1000)


def test_a_trainer_can_be_named_by_module_beside_the_file(spec, module):
    composer, _ = load(spec(LEAST.replace("{module}.py", module)))
    assert composer.trainer_class.__module__ == module


def test_a_class_from_elsewhere_is_imported_from_the_module_that_was_named(spec, tmp_path, module):
    (tmp_path / f"{module}.py").write_text("from pearl.algorithms import DQN as SpecTrainer")
    composer, _ = load(spec(LEAST))
    assert composer.trainer_class.__module__ == "pearl.algorithms.dqn"
    found = trainer_import(composer.trainer_class, (), composer.imported_from)
    assert found == UserImport(module, "SpecTrainer", tmp_path)


def test_a_trainer_file_is_found_relative_to_the_spec_not_to_the_user(spec, tmp_path, module, monkeypatch):
    (tmp_path / "code").mkdir()
    (tmp_path / f"{module}.py").rename(tmp_path / "code" / f"{module}.py")
    path = spec(LEAST.replace('"{module}', '"code/{module}'))
    monkeypatch.chdir("/")
    composer, _ = load(path)
    assert composer.trainer_class.__module__ == module


@pytest.mark.parametrize("path", sorted((EXAMPLES / "zoo").glob("*.toml")), ids=lambda path: path.stem)
def test_every_composition_of_the_zoo_loads(path):
    if "Pong" in path.stem and importlib.util.find_spec("ale_py") is None:
        pytest.skip("needs pearl-toolkit[atari]")
    composer, program = load(path)
    algorithm, environment = path.stem.split("-", 1)
    assert issubclass(composer.trainer_class, getattr(pearl.algorithms, algorithm.upper()))
    assert composer.actors.env == environment
    assert program.run_dir.parts[-4:] == ("examples", "zoo", "runs", path.stem)


def test_the_example_loads():
    composer, program = load(EXAMPLES / "cartpole.toml")
    assert composer.trainer_class.__name__ == "DQNTrainer"
    assert program.run_dir.parts[-3:] == ("examples", "runs", "cartpole")


@pytest.mark.parametrize(
    ("old", "new", "parts"),
    [
        ("[actors]", "[actor]", ["the table 'actor'", "Did you mean 'actors'?"]),
        ("[actors]", "colour = 3\n[actors]", ["the key 'colour'"]),
        ('[actors]\nenv = "CartPole-v1"', "actors = 3", ["expected a table [actors]", "actors = 3"]),
        ("[replay]\nsize", "[[replay]]\nsize", ["expected a table [replay]"]),
        ("env =", "environment =", ["[actors]", "'environment'"]),
        ("size =", "sise =", ["[replay]", "'sise'", "Did you mean 'size'?"]),
        ("[replay]", "lerning_rate = 1e-3\n[replay]", ["[trainer]", "'lerning_rate'", "Did you mean 'learning_rate'?"]),
        ("size = 1000", "", ["[replay] size", "found nothing", "Add the key"]),
        ("size = 1000", 'size = "1000"', ["[replay] size", "a whole number", "'1000'"]),
        ("size = 1000", "size = 1e3", ["[replay] size", "a whole number", "1000.0"]),
        ("size = 1000", "size = true", ["[replay] size", "a whole number", "true"]),
        ("size = 1000", "size = 0", ["[replay]", "at least 1"]),
        ("size = 1000", "size = 1000\nfanout = 12", ["[replay]", "power of two", "12"]),
        ("size = 1000", "size = 1000\nfanout = 1.5", ["[replay] fanout", '"auto"', "1.5"]),
        ("size = 1000", "size = 1000\nmode = 'prioritised'", ["[replay]", "prioritized", "'prioritised'"]),
        ("size = 1000", "size = 1000\nalpha = nan", ["[replay] alpha", "a number", "nan"]),
        ("size = 1000", "size = 1000\nalpha = 2024-01-01", ["[replay] alpha", "a number"]),
        ("size = 1000", "size = 1000\nstratified = 1", ["[replay] stratified", "true or false", "1"]),
        ("size = 1000", "size = 1000\nstorage = 'disk'", ["[replay]", '"memmap"', "'disk'"]),
        ("size = 1000", "size = 1000\ninitial_priority = 'least'", ["[replay]", '"mean"', "'least'"]),
        ("size = 1000", "size = 1000\nmax_times_sampled = -1", ["[replay]", "max_times_sampled", "-1"]),
        ("size = 1000", "size = 1000\nalpha = {}", ["[replay] alpha.kind", "Constant, Linear", "found nothing"]),
        (
            "size = 1000",
            "size = 1000\nalpha = { kind = 'Liner' }",
            ["[replay] alpha.kind", "'Liner'", "Did you mean 'Linear'?"],
        ),
        (
            "size = 1000",
            "size = 1000\nbeta = { kind = 'Linear', start = 0.4, final = 1 }",
            ["[replay] beta", "start, final, steps", "found no 'steps'"],
        ),
        (
            "size = 1000",
            "size = 1000\nbeta = { kind = 'Linear', start = 0.4, final = 1, steps = 0 }",
            ["[replay] beta", "at least 1 step", "found 0"],
        ),
        (
            "size = 1000",
            "size = 1000\nbeta = { kind = 'Constant', value = true }",
            ["[replay] beta.value", "a number", "true"],
        ),
        (
            "size = 1000",
            "size = 1000\nbeta = { kind = 'Constant', value = 0.5 }\nbeta_final = 0.9",
            ["[replay]", "beta_final", "leave one out"],
        ),
        ("size = 1000", "size = 1000\n[training]\nbatch_size = 0", ["[training]", "batch_size", "found 0"]),
        ("size = 1000", "size = 1000\n[rollout]\nhorizn = 8", ["[rollout]", "Did you mean 'horizon'?"]),
        ("size = 1000", "size = 1000\n[training]\nbatchsize = 8", ["'batchsize'", "Did you mean 'batch_size'?"]),
        ("size = 1000", "size = 1000\n[program]\ntimesteps = 0", ["[program] timesteps", "at least 1"]),
        ("size = 1000", "size = 1000\n[program]\nuntil_return = 'never'", ["[program]", '"none" or inf', "'never'"]),
        ("size = 1000", "size = 1000\n[program]\nuntil_return = -inf", ["[program]", '"none" or inf', "-inf"]),
        ("size = 1000", "size = 1000\n[program]\nseed = -1", ["[program]", "seed must be", "below 2**62", "-1"]),
        ("size = 1000", "size = 1000\n[program]\neval_interval = -1", ["[program]", "eval_interval must be", "-1"]),
        ("size = 1000", 'size = 1000\n[program]\npath = ""', ["[program] path", "a path"]),
        ("size = 1000", 'size = 1000\n[program]\npath = "a\\u0000b"', ["[program] path", "a path"]),
        ("size = 1000", 'size = 1000\n[platform]\nmetric = "speed"', ["[platform] metric", "'speed'"]),
        ("size = 1000", 'size = 1000\n[platform]\ndevices = "d.csv"', ["[platform]", "both devices and connections"]),
        ('"CartPole-v1"', '"CartPole-v1"\ncount = 0', ["[actors]", "at least 1", "found 0"]),
        ('"CartPole-v1"', '"CartPole-v1"\nenv_kwargs = { a = [1] }', ["[actors] env_kwargs.a", "[1]"]),
        ("[replay]", "learner = 64\n[replay]", ["[trainer]", "'learner'"]),
        ("[replay]", "imported_from = 'os'\n[replay]", ["[trainer]", "'imported_from'"]),
        ("[replay]", "hidden_sizes = 64\n[replay]", ["[trainer] hidden_sizes", "a list", "64"]),
        ("[replay]", "learning_rate = 'fast'\n[replay]", ["[trainer] learning_rate", "a number", "'fast'"]),
        ("[replay]", "dueling = 1\n[replay]", ["[trainer] dueling", "true or false", "found 1"]),
        ("[replay]", "exploration = { kind = 'Epsilon' }\n[replay]", ["[trainer] exploration.kind", "EpsilonGreedy"]),
        (
            "[replay]",
            "exploration = 'EpsilonGreedy'\n[replay]",
            ["[trainer] exploration", "{ kind = ", "'EpsilonGreedy'"],
        ),
        ("[replay]", "exploration = { end = 0.1 }\n[replay]", ["[trainer] exploration.kind", "found nothing"]),
        (
            "[replay]",
            "exploration = { kind = 'GaussianNoise', sigm = 1 }\n[replay]",
            ["[trainer] exploration.sigm", "Did you mean 'sigma'?"],
        ),
        (
            "[replay]",
            "exploration = { kind = 'GaussianNoise', sigma = 'x' }\n[replay]",
            ["[trainer] exploration.sigma", "a number"],
        ),
    ],
)
def test_a_fault_names_file_table_and_key(spec, old, new, parts):
    assert old in LEAST
    path = spec(LEAST.replace(old, new, 1))
    with pytest.raises(ConfigurationError) as caught:
        load(path)
    assert str(caught.value).count(str(path)) == 1
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("stated", "part"),
    [
        ("SpecTrainer", "a built-in algorithm (DQN, "),
        ("dqn", "Did you mean 'DQN'?"),
        ("{module}.py", "file.py:Class"),
        ("{module}.py:Spec Trainer", "file.py:Class"),
        ("__import__('os').system('touch pwned'):X", "file.py:Class"),
        ("a b:X", "file.py:Class"),
        ("my-trainer:X", "'my-trainer' is no Python identifier"),
        ("2nd.py:X", "there is no file"),
        ("class:X", "'class' is a keyword of Python"),
        ("pkg.2nd:X", "'2nd' is no Python identifier"),
        ("absent.py:SpecTrainer", "there is no file"),
        ("absent_module:SpecTrainer", "there is no module 'absent_module'"),
        ("json.absent_module:SpecTrainer", "there is no module 'json.absent_module'"),
        ("{module}.py:SpecTrainr", "Did you mean 'SpecTrainer'?"),
        ("os:path", "a trainer class"),
        ("random.py:X", "there is no file"),
    ],
)
def test_a_trainer_that_cannot_be_had(spec, tmp_path, stated, part, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = spec(LEAST.replace("{module}.py:SpecTrainer", stated))
    with pytest.raises(ConfigurationError, match=r"\[trainer\] class") as caught:
        load(path)
    assert part in str(caught.value)
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("def broken(:", "SyntaxError"),
        ("import a_package_that_is_absent", "a_package_that_is_absent"),
        ("x = 1\nraise RuntimeError('not today')", "RuntimeError: not today ({file}, line 2)"),
        ("class SpecTrainer: pass", "lacks get_action() and update_policy()"),
    ],
)
def test_a_trainer_file_that_is_wrong(spec, tmp_path, module, text, part):
    (tmp_path / f"{module}.py").write_text(text)
    with pytest.raises(TrainerError) as caught:
        load(spec(LEAST))
    assert part.format(file=tmp_path / f"{module}.py") in str(caught.value)
    assert "[trainer] class" in str(caught.value)


@pytest.mark.parametrize("name", ["random.py", "my-trainer.py", "2nd.py", "class.py"])
def test_a_file_that_no_program_could_import_is_refused(spec, tmp_path, name):
    (tmp_path / name).write_text(TRAINER)
    with pytest.raises(ConfigurationError, match="rename it"):
        load(spec(LEAST.replace("{module}.py", name)))


def test_two_files_of_one_name_are_told_apart(spec, tmp_path, module):
    load(spec(LEAST))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / f"{module}.py").write_text(TRAINER)
    with pytest.raises(ConfigurationError, match="comes first"):
        load(spec(LEAST.replace('"{module}', '"other/{module}')))


def test_a_byte_order_mark_is_no_part_of_a_file(spec):
    path = spec(LEAST)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert load(path)[0].actors.env == "CartPole-v1"


def test_malformed_files(tmp_path):
    path = tmp_path / "spec.toml"
    with pytest.raises(ConfigurationError, match="There is no composition file"):
        load(path)
    path.write_text("[actors]\nenv = \n")
    with pytest.raises(ConfigurationError, match="line 2"):
        load(path)
    path.write_bytes(b"[actors]\nenv = '\xff'\n")
    with pytest.raises(ConfigurationError, match=r"line 2.*0xff"):
        load(path)
    path.write_text("a = " + "[" * 100_000)
    with pytest.raises(ConfigurationError, match="not a TOML file"):
        load(path)
    with pytest.raises(ConfigurationError, match="cannot be read"):
        load(tmp_path)
    path.write_text("")
    with pytest.raises(ConfigurationError, match=r"\[actors\] env"):
        load(path)


@pytest.mark.parametrize("goal", ['"none"', "inf"])
def test_a_program_may_never_stop_early(spec, goal):
    _, program = load(spec(f"{LEAST}\n[program]\nuntil_return = {goal}"))
    assert check_goal(program.until_return) is None


def test_random_steps_of_an_exploration(spec):
    table = "exploration = {{ kind = 'GaussianNoise', random_steps = {} }}\n[replay]"
    composer, _ = load(spec(LEAST.replace("[replay]", table.format(20))))
    assert composer.settings["exploration"] == GaussianNoise(random_steps=20)
    with pytest.raises(ConfigurationError, match=r"exploration\.random_steps: expected a whole number; found 'many'"):
        load(spec(LEAST.replace("[replay]", table.format("'many'"))))


def test_exploration_of_another_kind(spec):
    composer, _ = load(spec(LEAST.replace("[replay]", "exploration = { kind = 'GaussianNoise', sigma = 1 }\n[replay]")))
    assert composer.settings["exploration"] == GaussianNoise(sigma=1.0)


@given(st.text(max_size=60))
def test_any_text_either_loads_or_is_a_pearl_error(tmp_path_factory, text):
    path = tmp_path_factory.mktemp("fuzz") / "spec.toml"
    path.write_text(LEAST.replace("{module}", "nowhere") + text, encoding="utf-8", errors="replace")
    with pytest.raises(PearlError):  # the trainer is nowhere, so nothing loads
        load(path)


# --- environments and wrappers of a module --------------------------------------------------------------------------

ENVIRONMENTS = """
import gymnasium as gym


def make_cart(**kwargs):
    return gym.make("CartPole-v1", **kwargs)


class Halved(gym.RewardWrapper):
    def __init__(self, env, factor=0.5):
        super().__init__(env)
        self.factor = factor

    def reward(self, reward):
        return self.factor * reward
"""


def test_an_environment_and_wrappers_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "carts_of_spec.py").write_text(ENVIRONMENTS, encoding="utf-8")
    spec = tmp_path / "cart.toml"
    spec.write_text(
        """
        [actors]
        env = "carts_of_spec.py:make_cart"
        wrappers = [
            "gymnasium.wrappers:TimeAwareObservation", { class = "carts_of_spec.py:Halved", factor = 0.25 }
        ]
        vectorization = "async"
        [trainer]
        class = "pearl.algorithms:DQN"
        [replay]
        size = 1000
        """,
        encoding="utf-8",
    )
    composer, _ = load_spec(spec, progress=False)
    assert composer.actors is not None
    assert composer.actors.env_name == "carts_of_spec.make_cart"
    first, (second, options) = composer.actors.wrappers
    assert (first.__name__, second.__name__, options) == ("TimeAwareObservation", "Halved", {"factor": 0.25})


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('env = "carts_gone.py:make_cart"', ["[actors] env", "there is no file"]),
        (
            'env = "CartPole-v1"\nwrappers = ["gymnasium.wrappers:TimeAwar"]',
            ["[actors] wrappers", "no class 'TimeAwar'"],
        ),
        ('env = "CartPole-v1"\nwrappers = [3]', ["[actors] wrappers", '"module:Class"', "found 3"]),
        ('env = "CartPole-v1"\nwrappers = [{ low = 1 }]', ["[actors] wrappers", "found {'low': 1}"]),
        ('env = "CartPole-v1"\nwrappers = "TimeLimit"', ["[actors] wrappers", "a list of", "'TimeLimit'"]),
        ('env = "gymnasium:registry"', ["[actors]", "or be a class or function that makes one"]),
    ],
)
def test_environments_and_wrappers_that_are_not_there_are_named(tmp_path: Path, line: str, words: list[str]) -> None:
    spec = tmp_path / "cart.toml"
    spec.write_text(
        f'[actors]\n{line}\n[trainer]\nclass = "pearl.algorithms:DQN"\n[replay]\nsize = 100\n', encoding="utf-8"
    )
    with pytest.raises(PearlError) as raised:
        load_spec(spec, progress=False)
    for word in words:
        assert word in str(raised.value)
