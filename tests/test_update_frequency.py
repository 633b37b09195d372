"""Stable-Baselines3's train_freq and gradient_steps, and the replay ratio that they become."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from programs import CsvPair, described
from trainers import TinyDQN, TinyPPO

import composer.composing
from composer.explain import Explanation
from composer.spec_file import load_spec
from pearl.algorithms import DQN, SAC
from pearl.algorithms.trainer import is_as_built_in, make_trainer
from pearl.algorithms.update_frequency import frequency_of
from pearl.errors import ConfigurationError, TrainerError

DOCS = Path(__file__).resolve().parent.parent / "docs" / "rl_zoo.md"
OBS, ACTIONS = spaces.Box(-1.0, 1.0, (3,), np.float32), spaces.Discrete(2)


class AsInSb3(DQN):
    hidden_sizes = (16,)
    batch_size = 16
    train_freq = 8
    gradient_steps = 2  # type: ignore[assignment]
    learning_starts = 100


class OfBoth(AsInSb3):
    replay_ratio = 4.0


@pytest.mark.parametrize(
    ("settings", "ratio", "reason"),
    [
        ({"train_freq": 4}, 8.0, "batch_size 32 x gradient_steps 1 / train_freq 4"),
        ({"gradient_steps": 3}, 96.0, "batch_size 32 x gradient_steps 3 / train_freq 1"),
        ({"train_freq": (16, "step"), "gradient_steps": 8}, 16.0, "x gradient_steps 8 / train_freq 16"),
        ({"train_freq": 16, "gradient_steps": -1}, 32.0, "gradient_steps -1 (as many as train_freq) / train_freq 16"),
    ],
)
def test_the_pair_is_a_ratio(settings: dict[str, Any], ratio: float, reason: str) -> None:
    frequency = frequency_of(SAC, settings)
    assert frequency is not None
    assert frequency.replay_ratio(32) == ratio
    assert reason in frequency.reason(32)
    assert frequency_of(SAC, {"batch_size": 32}) is None


def test_a_class_states_the_pair_and_still_counts_its_steps() -> None:
    trainer = AsInSb3(OBS, ACTIONS)
    assert trainer.gradient_steps == 0
    trainer.gradient_steps += 1
    assert (trainer.gradient_steps, trainer.gradient_steps_each, trainer.train_freq) == (1, 2, 8)
    assert is_as_built_in(AsInSb3)
    assert AsInSb3(OBS, ACTIONS, gradient_steps=5).gradient_steps_each == 5
    assert frequency_of(AsInSb3, {"train_freq": None}) is not None  # the class's gradient_steps remain


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"train_freq": 0}, r"TinyDQN\.train_freq must be a whole number of at least 1, .* or None; found 0\."),
        ({"train_freq": 2.5}, r"found 2\.5\."),
        ({"train_freq": True}, r"found True\."),
        ({"train_freq": (1, "episode")}, r"counts transitions: .*found \(1, 'episode'\).*usual length"),
        ({"gradient_steps": 0}, r"TinyDQN\.gradient_steps must be .*-1 for as many as transitions, or None; found 0\."),
        ({"gradient_steps": -2}, r"found -2\."),
        ({"gradient_steps": "all"}, r"found 'all'\."),
        ({"gradient_steps": 1, "gradient_steps_each": 1}, "are the same setting. Leave one of them out"),
    ],
)
def test_what_the_pair_cannot_be_is_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(TrainerError, match=message):
        make_trainer(TinyDQN, OBS, ACTIONS, settings=settings)
    with pytest.raises(TrainerError, match=r"train_freq must be None, as it learns from rollouts: .*; found 4\."):
        TinyPPO(OBS, ACTIONS, train_freq=4)


@pytest.mark.usefixtures("quick_profiles")
def test_the_composer_says_what_they_become_and_the_program_states_it(
    csv_pair: CsvPair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, files = tmp_path / "store.json", csv_pair("cpu0,cpu,cpu,,2,60")
    composer = described(files, trainer=AsInSb3, calibration=store, progress=True)
    composer.run(budget_s=0)
    reason = "batch_size 16 x gradient_steps 2 / train_freq 8"
    assert f"replay_ratio: 4, {reason}" in capsys.readouterr().out
    assert (composer.placement.replay_ratio, composer.placement.replay_ratio_reason) == (4.0, reason)
    assert f"replay ratio 4: {reason}" in str(composer.placement)
    assert f"The replay ratio: {reason}." in str(Explanation((composer.placement,)))
    composer.set_train_function(learner=AsInSb3, train_freq=1)
    composer.run(budget_s=0)
    text = composer.runtime_gen(path=tmp_path / "program.py").read_text(encoding="utf-8")
    assert "    replay_ratio=32.0,\n" in text
    assert "SETTINGS: dict[str, object] = {}" in text
    composer.set_train_function(learner=TinyDQN)
    composer.run(budget_s=0)
    assert (composer.placement.replay_ratio, composer.placement.replay_ratio_reason) == (2.0, None)


@pytest.mark.parametrize(
    ("trainer", "settings", "training", "who"),
    [
        (TinyDQN, {"train_freq": 4}, {}, "TinyDQN states replay_ratio=2.0"),
        (AsInSb3, {"replay_ratio": 8.0}, {}, "set_train_function states replay_ratio=8.0"),
        (AsInSb3, {}, {"replay_ratio": 8.0}, r"set_training ([training]) states replay_ratio=8.0"),
        (AsInSb3, {}, {"replay_ratio": "auto"}, "states replay_ratio='auto'"),
        (OfBoth, {}, {"batch_size": 32}, "OfBoth states replay_ratio=4.0"),
    ],
)
def test_a_ratio_that_contradicts_them_is_refused(
    csv_pair: CsvPair, trainer: type, settings: dict[str, Any], training: dict[str, Any], who: str
) -> None:
    composer = described(csv_pair("cpu0,cpu,cpu,,2,60"), trainer=trainer, settings=settings, training=training)
    with pytest.raises(ConfigurationError, match=re.escape(who)) as caught:
        composer.run(budget_s=0)
    assert "mean a replay_ratio of" in str(caught.value)
    assert "Leave one of them out." in str(caught.value)


def test_composition_files_take_them(tmp_path: Path) -> None:
    file = tmp_path / "made.toml"
    file.write_text(
        '[actors]\nenv = "CartPole-v1"\n[trainer]\nclass = "pearl.algorithms:DQN"\n'
        'train_freq = [4, "step"]\ngradient_steps = -1\n[replay]\nsize = 1000\n',
        encoding="utf-8",
    )
    composer, _ = load_spec(file, progress=False)
    assert composer.settings == {"train_freq": (4, "step"), "gradient_steps_each": -1}


class Reached(Exception):
    pass


def test_the_snippet_composes(monkeypatch: pytest.MonkeyPatch) -> None:
    def reached(*arguments: object, **options: object) -> None:
        raise Reached

    monkeypatch.setattr(composer.composing, "discover", reached)
    block = DOCS.read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    with pytest.raises(Reached):
        exec(compile(block, "compose_train_freq.py", "exec"), {"__name__": "snippet"})
