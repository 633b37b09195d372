"""What a user may say of the replay reaches the program, the run and its checkpoints."""

from __future__ import annotations

import csv
import dataclasses
import json
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from programs import described, run, write_machine
from trainers import CheckedDQN, TinyDQN

from composer import Composer
from pearl.actors.actor import Actor, ActorSetup
from pearl.errors import ConfigurationError
from pearl.replay import Constant, DataStorage, Linear
from pearl.runtime.data_storage import FILE_NAME, ChainedStorage, make_storage
from pearl.runtime.queues import DataCollectionQueue
from pearl.runtime.replay_ratio import ReplayRatio, check_samples_last
from pearl.runtime.run_state import Counters
from pearl.spec import ActorSpec, ReplaySpec, TrainSpec, TransitionSpec


def make_program(
    folder: Path, *, setting: int = 2, size: int = 2000, training: dict[str, Any] | None = None, **replay: Any
) -> Path:
    files = write_machine(folder, setting)
    ordered = replay.get("mode", "prioritized") != "prioritized"
    composer = described(files, trainer=CheckedDQN, settings={"weights_are_one": ordered}, training=training)
    composer.set_replay(size, **replay)
    replay_config, learner = composer.run()
    replay_config = dataclasses.replace(replay_config, device="cpu0")
    learner = dataclasses.replace(learner, device="cpu0" if setting == 2 else "cpu1")
    return composer.runtime_gen(replay_config, learner, folder / "program.py", timesteps=1100)


def train(program: Path, results: Path, *arguments: str, timesteps: int = 1500) -> dict[str, Any]:
    common = ("--serial", "--timesteps", str(timesteps), "--eval-episodes", "0", "--run-dir", str(results))
    code, output = run(program, *common, *arguments)
    assert code == 0, output
    summary: dict[str, Any] = json.loads((results / "summary.json").read_text())
    return summary


def weights(results: Path) -> bytes:
    return (results / "weights.safetensors").read_bytes()


# --- programs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "options"),
    [
        pytest.param(1, {"mode": "fifo", "max_times_sampled": 2}, id="fifo-setting1"),
        pytest.param(2, {"mode": "fifo", "max_times_sampled": 2}, id="fifo-setting2", marks=pytest.mark.slow),
        pytest.param(2, {"mode": "lifo", "storage": "shared"}, id="lifo"),
        pytest.param(1, {"mode": "top_k"}, id="top_k", marks=pytest.mark.slow),
    ],
)
def test_modes_that_take_in_order_train(
    tmp_path: Path, quick_profiles: None, setting: int, options: dict[str, Any]
) -> None:
    summary = train(make_program(tmp_path, setting=setting, **options), tmp_path / "results", timesteps=1000)
    assert summary["gradient_steps"] > 50
    with (tmp_path / "results" / "progress.csv").open() as file:
        last = list(csv.DictReader(file))[-1]
    assert last["env_steps"] == str(summary["env_steps"])
    # All weights are 1, so that a batch counts in full.
    assert float(last["replay/effective_sample_size"]) == 16
    if "max_times_sampled" in options:
        # The oldest batch is trained on twice, and leaves.
        assert float(last["replay/exhausted"]) == summary["gradient_steps"] // 2 * 16
    if options["mode"] == "lifo":
        assert float(last["replay/age_max"]) == 15


@pytest.mark.slow
def test_every_option_at_once_resumes_to_the_bit_and_storage_changes_nothing(
    tmp_path: Path, quick_profiles: None
) -> None:
    program = make_program(
        tmp_path,
        size=1000,
        training={"n_step": 3},
        alpha=Linear(1.0, 0.2, 1500),
        beta=Linear(0.2, 0.8, 1500),
        stratified=False,
        replacement=False,
        max_times_sampled=4,
        initial_priority="mean",
        storage="memmap",
        share_next_obs=True,
    )
    plain = tmp_path / "plain.py"
    text = program.read_text()
    for line in ('    storage="memmap",\n', "    share_next_obs=True,\n"):
        assert text.count(line) == 1
        text = text.replace(line, "")
    plain.write_text(text)
    interval = ("--checkpoint-interval", "1024")
    with ThreadPoolExecutor(2) as pool:
        for run_of in [
            pool.submit(train, path, tmp_path / name, *interval, timesteps=2000)
            for path, name in ((program, "whole"), (plain, "plain"))
        ]:
            run_of.result()
    assert (tmp_path / "whole" / FILE_NAME).exists()
    assert not (tmp_path / "plain" / FILE_NAME).exists()
    assert weights(tmp_path / "whole") == weights(tmp_path / "plain")

    half, _ = sorted((tmp_path / "whole" / "checkpoints").glob("checkpoint-*"))
    shutil.copytree(half, tmp_path / "resumed" / "checkpoints" / half.name)
    # An interrupted run leaves a file behind, whose rows may be half written.
    (tmp_path / "resumed" / FILE_NAME).write_bytes(b"rubbish")
    train(program, tmp_path / "resumed", *interval, "--resume", timesteps=2000)
    assert weights(tmp_path / "resumed") == weights(tmp_path / "whole")
    with (tmp_path / "resumed" / "progress.csv").open() as file:
        last = list(csv.DictReader(file))[-1]
    assert (float(last["replay/alpha"]), float(last["replay/beta"])) == (0.2, 0.8)

    code, output = run(plain, "--resume", "--run-dir", str(tmp_path / "resumed"))
    assert code == 1
    assert "next observations" in output


def test_a_program_may_change_the_replay_ratio_on_the_way(tmp_path: Path, quick_profiles: None) -> None:
    program = make_program(tmp_path)
    steps = train(program, tmp_path / "before")["gradient_steps"]
    loop = "        while session.running():\n"
    change = "            session.set_replay_ratio(8.0 if session.counters.env_steps >= 800 else 2.0)\n"
    text = program.read_text()
    assert text.count(loop) == 1
    program.write_text(text.replace(loop, loop + change))
    # 2 samples a transition for the first 800 or so, then 8 for the other 700.
    more = train(program, tmp_path / "after")["gradient_steps"] - steps
    assert more * 16 == pytest.approx(6 * 700, rel=0.3)


# --- the composer -----------------------------------------------------------------------------------------------------


def test_the_composer_takes_what_the_specification_has() -> None:
    composer = Composer(progress=False)
    composer.set_replay(100, alpha=Constant(0.5), storage="shared", replacement=False)
    assert composer.replay == ReplaySpec(100, alpha=Constant(0.5), storage="shared", replacement=False)
    with pytest.raises(
        ConfigurationError, match=r"beta must be .* \(Constant or Linear of pearl.replay\); found <func"
    ):
        composer.set_replay(100, beta=lambda step: 0.5)


def test_a_replay_larger_than_memory_is_composed_for_a_file(
    tmp_path: Path, quick_profiles: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("composing", "replay_composing"):
        monkeypatch.setattr(f"composer.{module}.free_memory", lambda: 50_000)
    with pytest.raises(ConfigurationError, match=r'free.*share_next_obs=True.*storage="memmap"'):
        make_program(tmp_path, size=2000)
    assert 'storage="memmap"' in make_program(tmp_path, size=2000, storage="memmap").read_text()


def test_items_that_would_not_last_are_refused_before_anything_is_measured(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"max_times_sampled.*replay_ratio of 2: .*Lower replay_ratio to 0\."):
        make_program(tmp_path, size=2000, max_times_sampled=1)


# --- how long items last ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["prioritized", "uniform", "fifo", "lifo", "top_k"])
@pytest.mark.parametrize("replacement", [True, False])
@pytest.mark.parametrize("most", [1, 3])
def test_items_last_at_the_largest_ratio_that_is_taken(mode: Any, replacement: bool, most: int) -> None:
    from pearl.replay import make_replay_manager

    # Batches are large for the replay, so that a ratio that is a little too large runs out of items.
    spec = ReplaySpec(300, mode=mode, replacement=replacement, max_times_sampled=most)
    insertion, message, batch = 32, 20, 64
    train = TrainSpec(batch_size=batch, learning_starts=0)

    def fits(ratio: float) -> bool:
        try:
            check_samples_last(spec, dataclasses.replace(train, replay_ratio=ratio), insertion + message)
        except ConfigurationError:
            return False
        return True

    ratio = max(most * k / 64 for k in range(1, 65) if fits(most * k / 64))
    assert not fits(most * 1.01)
    train = dataclasses.replace(train, replay_ratio=ratio)
    replay, rng = make_replay_manager(spec, seed=0), np.random.default_rng(0)
    counters = Counters()
    pace = ReplayRatio(train, counters, insertion + message)
    while counters.collected < 6000:
        # Training as early, or as late, as it may.
        eager = counters.collected % 2000 < 1000
        if pace.batches_allowed() and (eager or not pace.collection_allowed()):
            sample = replay.sample(batch)
            replay.update(sample.indices, rng.random(batch, np.float32) ** 8 + 1e-3, sample.generations)
            counters.samples += batch
        else:
            assert pace.collection_allowed()
            counters.collected += int(rng.integers(1, message + 1))
            if counters.collected - counters.stored >= insertion:
                replay.insert(np.arange(counters.stored, counters.collected) % spec.capacity)
                counters.stored = counters.collected
    assert pace.achieved == pytest.approx(ratio, rel=0.05)


@pytest.mark.parametrize(
    ("mode", "capacity", "most", "advice"),
    [
        ("uniform", 300, 1, "Lower replay_ratio to 0.426,"),  # (300 - 2 * 64) / (300 + 2 * 52)
        ("uniform", 300, 3, "Lower replay_ratio to 1.59,"),  # (900 - 4 * 64) / 404
        ("fifo", 300, 3, "Lower replay_ratio to 3,"),
        ("uniform", 128, 1, "Raise the replay's size,"),
    ],
)
def test_the_largest_ratio_leaves_samples_for_two_batches(mode: Any, capacity: int, most: int, advice: str) -> None:
    spec = ReplaySpec(capacity, mode=mode, max_times_sampled=most)
    with pytest.raises(ConfigurationError, match=re.escape(advice)):
        check_samples_last(spec, TrainSpec(batch_size=64, replay_ratio=10.0), 52)


def test_another_ratio_holds_for_what_comes_after_it() -> None:
    counters = Counters()
    pace = ReplayRatio(TrainSpec(batch_size=10, replay_ratio=4.0, learning_starts=100), counters, 50)
    counters.collected = counters.stored = 1100
    counters.samples = 4000
    assert pace.batches_allowed() == 0
    pace.set(1.0)
    # What was trained more of before is not made up for.
    counters.collected = counters.stored = 1200
    assert pace.batches_allowed() == 10
    counters.samples += 100
    pace.set(1.0)  # the ratio that holds changes nothing
    assert (counters.ratio_stored, counters.ratio_samples) == (1100, 4000)
    # A checkpoint keeps it.
    resumed = ReplayRatio(TrainSpec(batch_size=10, replay_ratio=1.0, learning_starts=100), counters, 50)
    counters.collected = counters.stored = 1300
    assert pace.batches_allowed() == resumed.batches_allowed() == 10
    pace.set(float("inf"))
    assert pace.batches_allowed() > 1000
    with pytest.raises(ConfigurationError, match="replay_ratio must be a number above 0"):
        pace.set(0.0)


# --- next observations stored once ------------------------------------------------------------------------------------


def collected(n_step: int, messages: int) -> tuple[TransitionSpec, list[dict[str, np.ndarray]], int]:
    """Messages of two actors in turn, the episodes of whose environments end for both reasons; how many ended."""
    spec = ActorSpec("CartPole-v1", envs_per_actor=4, env_kwargs={"max_episode_steps": 20})
    setups = [ActorSetup(TinyDQN, {}, spec, TrainSpec(n_step=n_step), seed=3, index=index) for index in (0, 1)]
    actors = [Actor(setup) for setup in setups]
    envs = actors[0].envs
    transition = TransitionSpec.from_spaces(envs.single_observation_space, envs.single_action_space)
    queue = DataCollectionQueue(transition, setups[0].message_rows(), 2)
    found, episodes = [], 0
    for number in range(messages):
        message = queue.reserve()
        assert message is not None
        rows = actors[number % 2].collect(message)
        episodes += int(message["counts"][0])
        found.append({field.name: message[field.name][:rows].copy() for field in transition.fields})
    for actor in actors:
        actor.close()
    return transition, found, episodes


@pytest.mark.parametrize("n_step", [1, 3])
def test_rows_are_chained_whoever_sends_them(n_step: int) -> None:
    transition, messages, episodes = collected(n_step, 120)
    rows = sum(len(message["obs"]) for message in messages)
    capacity = rows - 300  # the ring turns over
    shared = ChainedStorage(transition, capacity, chains=8 * n_step, gamma=0.99)
    plain = DataStorage(transition, capacity)
    for message in messages:
        assert (shared.insert(message) == plain.insert(message)).all()
    assert len(shared.insert(messages[0], 0)) == 0
    everything = np.arange(capacity)
    expected = plain.gather(everything)
    for name, column in shared.gather(everything).items():
        np.testing.assert_array_equal(column, expected[name])
    # Chains end where episodes do, and go on everywhere else: each has one last step for each of the n.
    last = int((shared.remaining(everything) == 1).sum())
    assert last <= n_step * (episodes + 8)
    assert last < capacity / 2
    # A checkpoint goes back into the storage of a run with fewer environments.
    other = ChainedStorage(transition, capacity, chains=2, gamma=0.99)
    other.restore(shared.columns, size=shared.size, cursor=shared.cursor, inserted=shared.inserted)
    other.insert(messages[0])
    plain.insert(messages[0])
    expected = plain.gather(everything)
    for name, column in other.gather(everything).items():
        np.testing.assert_array_equal(column, expected[name])


def test_sharing_takes_half_the_disk(tmp_path: Path) -> None:
    from gymnasium import spaces

    transition = TransitionSpec.from_spaces(spaces.Box(0.0, 1.0, (4096,), np.float32), spaces.Discrete(2))
    rng = np.random.default_rng(0)
    used = {}
    for share in (False, True):
        folder = tmp_path / str(share)
        folder.mkdir()
        replay = ReplaySpec(800, storage="memmap", share_next_obs=share)
        storage = make_storage(transition, replay, ActorSpec("CartPole-v1", envs_per_actor=2), TrainSpec(), folder)
        obs = rng.random((2, 4096), np.float32)
        for step in range(400):
            next_obs = rng.random((2, 4096), np.float32)
            ends = step % 25 == 24  # by a time limit
            rows = {"obs": obs, "next_obs": next_obs, "action": np.zeros(2, np.int64)}
            storage.insert({**rows, "reward": np.zeros(2, np.float32), "discount": np.full(2, 0.99, np.float32)})
            obs = rng.random((2, 4096), np.float32) if ends else next_obs
        storage.flush()
        used[share] = (folder / FILE_NAME).stat().st_blocks
        storage.close()
    assert used[True] < 0.6 * used[False]


def test_a_checkpoint_of_a_file_copies_next_observations_to_disk_not_into_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pearl.runtime.data_storage._CHUNK", 64)
    transition, messages, _ = collected(1, 40)
    storage = ChainedStorage(transition, 500, "memmap", tmp_path / FILE_NAME, chains=8, gamma=0.99)
    plain = DataStorage(transition, 500)
    for message in messages:
        storage.insert(message)
        plain.insert(message)
    saved = storage.columns
    assert isinstance(saved["next_obs"], np.memmap)
    np.testing.assert_array_equal(saved["next_obs"], plain.gather(np.arange(500))["next_obs"])
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]


def test_the_file_of_a_run_under_way_is_left_alone(tmp_path: Path) -> None:
    from gymnasium import spaces

    transition = TransitionSpec.from_spaces(spaces.Box(0.0, 1.0, (4,), np.float32), spaces.Discrete(2))
    arguments = (ReplaySpec(100, storage="memmap"), ActorSpec("CartPole-v1"), TrainSpec(), tmp_path)
    first = make_storage(transition, *arguments)
    with pytest.raises(ConfigurationError, match=r"in use by another run.*--run-dir"):
        make_storage(transition, *arguments)
    first.close()
    assert make_storage(transition, *arguments).size == 0


# --- the documentation ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("page", "name"), [("concepts.md", "replay_alone.py"), ("getting_started.md", "replay_options.py")]
)
def test_what_the_documentation_shows_runs(tmp_path: Path, page: str, name: str) -> None:
    text = (Path(__file__).parent.parent / "docs" / page).read_text(encoding="utf-8")
    (block,) = [b for b in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if b.startswith(f"# {name}\n")]
    (tmp_path / name).write_text(block, encoding="utf-8")
    done = subprocess.run([sys.executable, name], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    if name == "replay_alone.py":
        assert float(done.stdout) > 4.0


def test_the_documentation_lists_every_argument() -> None:
    text = (Path(__file__).parent.parent / "docs" / "concepts.md").read_text(encoding="utf-8")
    for field in dataclasses.fields(ReplaySpec):
        assert f"`{field.name}`" in text or field.name == "capacity", field.name
