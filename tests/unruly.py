"""An environment that misbehaves as it is told. It brings no torch: processes that import it start quickly."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from pearl.actors.actor import ActorSetup
from pearl.actors.native_policy import PolicyPlan
from pearl.spec import ActorSpec, TrainSpec

# Greedy actions are all 0, of three observed numbers.
PLAN = PolicyPlan(3, (("linear", 0, -1, 2, 0, 6, 0.0),), "argmax", np.zeros(8, np.float32))
LONG_MESSAGE = "the beginning, " + "and so on, " * 30_000 + "the end"


class Nobody:
    """In the place of a trainer: naming it imports this module, which registers the environment."""


class Unruly(gym.Env[np.ndarray, np.int64]):
    """Of several, only the one misbehaves that first creates the file `once` of `folder`. Most have no end.

    `folder` also gets files that are named like the processes that the environment starts.
    """

    def __init__(self, fate: str = "", folder: str = ".") -> None:
        self.observation_space, self.action_space = spaces.Box(0.0, 1.0, (3,), np.float32), spaces.Discrete(2)
        self._folder, self._fate, self._ends = Path(folder), fate, fate == "pool"
        if fate and fate != "pool":
            try:
                (self._folder / "once").touch(exist_ok=False)
            except FileExistsError:
                self._fate = ""
            else:
                self._misbehave("in constructor")

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        return np.zeros(3, np.float32), {}

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        if self._fate:
            self._misbehave("in step")
        return np.zeros(3, np.float32), 1.0, False, self._ends, {}

    def _misbehave(self, place: str) -> None:
        if self._fate == f"hangs {place}":
            self._start_child(multiprocessing.get_context("fork"))
            ctypes.PyDLL(None).sleep(600)  # keeps Python's lock, as native code may
        if place == "in constructor":
            return
        if self._fate == "fails at length":
            raise ValueError(LONG_MESSAGE)
        if self._fate == "fails with a thread":
            threading.Thread(target=time.sleep, args=(600,)).start()
            raise ValueError("the feed is lost")
        if self._fate == "forks":
            if (pid := os.fork()) == 0:
                time.sleep(600)
                os._exit(0)
            self._note(pid)
            os.kill(os.getpid(), signal.SIGKILL)
        if self._fate == "real-time signal":
            os.kill(os.getpid(), signal.SIGRTMIN + 3)
        if self._fate == "leaves a child":
            self._start_child(multiprocessing.get_context("fork"))
            self._fate = ""
        if self._fate == "pool":
            for method in ("fork", "spawn"):
                with multiprocessing.get_context(method).Pool(1) as pool:
                    assert pool.apply(abs, (-3,)) == 3
            self._fate = ""

    def _start_child(self, context: BaseContext) -> None:
        child = context.Process(target=time.sleep, args=(600,))  # type: ignore[attr-defined]
        child.start()
        self._note(child.pid)

    def _note(self, pid: int) -> None:
        (self._folder / f"{pid}.pid").touch()


gym.register("Unruly-v0", Unruly, disable_env_checker=True)  # type: ignore[arg-type]


def unruly_setup(fate: str, folder: Path, index: int = 0, count: int = 1) -> ActorSetup:
    """An actor in such an environment."""
    spec = ActorSpec("Unruly-v0", count=count, envs_per_actor=1, env_kwargs={"fate": fate, "folder": str(folder)})
    return ActorSetup(Nobody, {}, spec, TrainSpec(), seed=0, index=index, policy=PLAN)


def note_program(path: Path) -> None:
    """Note which program this process knows."""
    path.write_text(str(getattr(sys.modules["__main__"], "__file__", None)))
