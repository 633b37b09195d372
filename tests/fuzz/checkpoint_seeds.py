"""Real checkpoints, small ones, for the fuzzer to start from."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fuzz.checkpoint_property import CAPACITY, IN_MEMORY, MODES, REPAIR, pack

from pearl.backends.cpu.replay import NativeReplayManager
from pearl.runtime.checkpoint import CheckpointState, save_checkpoint

_LATER_THAN_FORMAT_1 = ("born", "times_sampled", "order", "exhausted", "max_times_sampled")


def _replay_states() -> Iterator[tuple[str, dict[str, Any]]]:
    for mode in MODES:
        for limit in (0, 2):
            replay = NativeReplayManager(CAPACITY, mode=mode, max_times_sampled=limit, seed=5)
            replay.insert(np.arange(6), np.linspace(0.0, 3.0, 6))
            replay.sample(3)
            yield f"{mode}-{limit}", dict(replay.state_dict())
    replay = NativeReplayManager(CAPACITY)
    replay.insert(np.arange(CAPACITY), np.geomspace(1e-3, 1e4, CAPACITY))
    state = dict(replay.state_dict())
    yield "format-1", {k: v for k, v in state.items() if k not in _LATER_THAN_FORMAT_1} | {"format": 1}


def _states() -> Iterator[tuple[str, CheckpointState]]:
    for name, replay in _replay_states():
        arrays = {f"replay/{key}": value for key, value in replay.items() if isinstance(value, np.ndarray)}
        counters = {f"replay/{key}": value for key, value in replay.items() if not isinstance(value, np.ndarray)}
        yield name, CheckpointState(12, {"trainer": "DQN"}, counters, {}, arrays)
    network = {"weight": torch.arange(4.0).reshape(2, 2), "half": torch.ones(2, dtype=torch.bfloat16)}
    yield (
        "tensors",
        CheckpointState(3, tensors={"q": network, "empty": {}, "u": {"": torch.zeros(0)}}),
    )
    kinds = ["?", "u1", "i2", ">i8", "f2", "c16", "M8[s]", "S3", "U2", "i4,f8"]
    arrays = {f"a{at}": np.zeros((2, at % 3), kind) for at, kind in enumerate(kinds)}
    yield "arrays", CheckpointState(2**40, counters={"mean": float("nan"), "on": True, "text": "é"}, arrays=arrays)
    yield "empty", CheckpointState(0)


def write_seeds(corpus: Path) -> None:
    """Write one input per checkpoint and way of reading it into the folder `corpus`."""
    corpus.mkdir(parents=True, exist_ok=True)
    for name, state in _states():
        with tempfile.TemporaryDirectory() as directory:
            folder = save_checkpoint(Path(directory), state)
            for flags in (REPAIR, REPAIR | IN_MEMORY):
                (corpus / f"{name}-{flags}").write_bytes(pack(folder, flags))
