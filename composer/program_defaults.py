"""The defaults of a program's options."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pearl.actors.environment import reward_threshold
from pearl.runtime.options import check_goal
from pearl.spec import ActorSpec


@dataclass(frozen=True, kw_only=True)
class ProgramDefaults:
    """The defaults of a program's options, as `Composer.runtime_gen` takes them; `options` are those with a number."""

    timesteps: int
    run_dir: Path | None = None
    until_return: float | Literal["none"] | None = None
    options: Mapping[str, int] = field(default_factory=dict)

    def folder(self, program: Path) -> Path:
        """The run folder as the program has it: relative to the program's folder, or as the user gave it elsewhere."""
        if self.run_dir is None:
            return Path("runs") / program.stem
        here, place = program.resolve().parent, self.run_dir.resolve()
        if self.run_dir.is_absolute() and not place.is_relative_to(here):
            return self.run_dir
        return Path(os.path.relpath(place, here))

    def goal(self, actors: ActorSpec) -> float | None:
        """The return at which the program ends; None for no early end."""
        solved = reward_threshold(actors.evaluation)
        return check_goal(solved if self.until_return is None else self.until_return)
