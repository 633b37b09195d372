"""Calls the callbacks of a run, each only for the methods that it overrides."""

from __future__ import annotations

import difflib
import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pearl.callbacks.protocol import Callback, RunContext
from pearl.error_place import described
from pearl.errors import CallbackError, ConfigurationError

logger = logging.getLogger("pearl.runtime")

HOOKS = ("on_start", "on_step", "on_rollout", "on_evaluation", "on_checkpoint", "on_end")
_FAILURES = (Exception, SystemExit)  # of the user's code: one that calls sys.exit() does not end the run in silence


class CallbackCalls:
    """The callbacks of one run, by what they override: the trainer class's `own`, then those of the program.

    `fail` takes the error of one that raised; such a callback is not called again. Raises ConfigurationError for an
    object that is no callback.
    """

    def __init__(
        self, own: object, callbacks: object, run: RunContext, fail: Callable[[CallbackError, str], None]
    ) -> None:
        self._run, self._fail = run, fail
        self._failed: set[int] = set()
        self._ended = False
        self._of: dict[str, list[tuple[object, Callable[..., None]]]] = {hook: [] for hook in HOOKS}
        self._kept: dict[str, Any] = {}  # callbacks with a state, by the name that it has in checkpoints
        count: Counter[str] = Counter()
        for callback in (*checked_callbacks(own), *checked_callbacks(callbacks)):
            for hook in HOOKS:
                if _overrides(callback, hook):
                    self._of[hook].append((callback, getattr(callback, hook)))
            kind = type(callback).__name__
            count[kind] += 1
            if _overrides(callback, "state_dict"):
                self._kept[kind if count[kind] == 1 else f"{kind} {count[kind]}"] = callback

    def has(self, hook: str) -> bool:
        """Whether any callback overrides `hook`."""
        return bool(self._of[hook])

    def call(self, hook: str, *arguments: object) -> None:
        """Call `hook` of all that override it."""
        for callback, method in self._of[hook]:
            if id(callback) in self._failed:
                continue
            try:
                method(self._run, *arguments)
            except _FAILURES as error:
                self._report(callback, hook, error)

    def _report(self, callback: object, hook: str, error: BaseException) -> None:
        self._failed.add(id(callback))
        failure = _failure(callback, hook, error)
        logger.debug("%s", failure, exc_info=error)
        if self._ended:  # callback errors are no longer raised at the end of a run
            logger.warning("%s", failure)
        self._fail(failure, f"the callback {type(callback).__name__} failed")

    def start(self) -> None:
        """Call `on_start` of all; CallbackError for one that raises, since nothing is lost yet."""
        for callback, method in self._of["on_start"]:
            try:
                method(self._run)
            except _FAILURES as error:
                self._failed.add(id(callback))
                raise _failure(callback, "on_start", error) from error

    def end(self) -> None:
        """Call `on_end` of all, the first time."""
        if not self._ended:
            self._ended = True
            self.call("on_end")

    def states(self) -> str:
        """The result of each `state_dict`, as JSON by class name; further callbacks of a class get a number."""
        found = {}
        for name, callback in self._kept.items():
            if id(callback) in self._failed:
                continue
            try:
                found[name] = json.loads(json.dumps(_checked_state(callback.state_dict())))
            except _FAILURES as error:
                self._report(callback, "state_dict", error)
        return json.dumps(found)

    def load_states(self, states: Mapping[str, Any]) -> None:
        """Pass each callback its state; CallbackError for one that cannot take it. The others start fresh."""
        for name, state in states.items():
            if name not in self._kept:
                logger.info("The checkpoint has a state of the callback %s, which this run does not have.", name)
                continue
            try:
                self._kept[name].load_state_dict(state)
            except _FAILURES as error:
                raise _failure(self._kept[name], "load_state_dict", error) from error


def checked_callbacks(callbacks: object) -> Sequence[Any]:
    """The callbacks; ConfigurationError names an object that is no callback, and what is expected."""
    if not isinstance(callbacks, list | tuple):
        raise ConfigurationError(
            f"callbacks must be a list or tuple, such as (StopAtReturn(475.0),); found {callbacks!r:.100}."
        )
    for callback in callbacks:
        if isinstance(callback, type):
            raise ConfigurationError(
                f"callbacks holds the class {callback.__name__}; make an object of it: {callback.__name__}(...)."
            )
        named = [name for name in dir(callback) if name.startswith("on_") and callable(getattr(callback, name))]
        for name in named:
            if name not in HOOKS:
                close = difflib.get_close_matches(name, HOOKS, n=1)
                hint = f" Did you mean {close[0]!r}?" if close else ""
                raise ConfigurationError(
                    f"The callback {type(callback).__name__} defines {name}, which is never called.{hint} A callback "
                    f"may define {', '.join(HOOKS)}."
                )
        if _overrides(callback, "state_dict") != _overrides(callback, "load_state_dict"):
            raise ConfigurationError(
                f"The callback {type(callback).__name__} defines only one of state_dict and load_state_dict. What the "
                "first returns at a checkpoint goes to the second when a run is resumed: define both."
            )
        if not any(_overrides(callback, hook) for hook in HOOKS):
            raise ConfigurationError(
                f"{callback!r:.100} in callbacks is no callback: it defines none of {', '.join(HOOKS)}."
            )
    return callbacks


def _failure(callback: object, hook: str, error: BaseException) -> CallbackError:
    failure = CallbackError(f"The callback {type(callback).__name__} failed in {hook}: {described(error)}.")
    failure.__cause__ = error
    return failure


def _checked_state(state: object) -> Mapping[str, Any]:
    if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
        raise TypeError(f"state_dict must return a dictionary of values that JSON has, by name; found {state!r:.100}")
    return state


def _overrides(callback: object, hook: str) -> bool:
    found = getattr(callback, "__dict__", {}).get(hook, getattr(type(callback), hook, None))
    return callable(found) and found is not getattr(Callback, hook)
