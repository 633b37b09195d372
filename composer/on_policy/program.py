"""Writes the runtime program of a placement with rollouts."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pearl
from composer.codegen.program import (
    Source,
    actors_on_nodes,
    composer_inputs,
    installed,
    origin,
    policy_note,
    powered,
    rendered,
    taken_names,
    user_values,
    write_program,
)
from composer.codegen.python_source import documented
from composer.codegen.trainer_source import trainer_import
from composer.on_policy.placement import AdvantagesConfig, RolloutLearnerConfig, RolloutPlacement
from composer.on_policy.problem import RolloutProblem
from composer.predicted_parts import predicted_us
from pearl.backends import backend_of
from pearl.devices.description import Device
from pearl.errors import GenerationError
from pearl.spec import ActorSpec, RolloutSpec

_ALWAYS = ("horizon", "epochs", "gae_lambda")  # fields of RolloutSpec that every program states


@dataclass(frozen=True, kw_only=True)
class RolloutSource(Source):
    """The input of a program with rollouts."""

    placement: RolloutPlacement
    advantages: AdvantagesConfig
    learner: RolloutLearnerConfig
    problem: RolloutProblem


def render_rollouts(source: RolloutSource, devices: Mapping[str, Device]) -> str:
    """The program's text."""
    problem, placement, learner = source.problem, source.placement, source.learner
    on_gae, on_learner = devices[source.advantages.device], devices[learner.device]
    for device in (on_gae, on_learner):
        if (why := backend_of(device).no_program(device)) is not None:
            raise GenerationError(
                f"{device.name} is {why.reason}. No program can run there. Take {why.remedy} out of the device CSV, or "
                "choose another candidate of the placement."
            )
    gae = backend_of(on_gae).advantages(on_gae)
    made = backend_of(on_learner).rollout_learners.get(learner.implementation)
    if gae is None or made is None:
        raise GenerationError(
            f"No program can estimate advantages on {on_gae.name} and train with the {learner.implementation} Learner "
            f"on {on_learner.name}. Choose a pair of the placement."
        )
    trainer = trainer_import(problem.trainer_class, taken_names(), problem.imported_from)
    place = {"device": backend_of(on_learner).device_string(on_learner), "threads": learner.threads}
    values: dict[str, object] = {
        "version": pearl.__version__,
        "name": Path(os.path.normpath(source.path.resolve().parent / source.run_dir)).name,
        **user_values(source, trainer),
        "placement_note": _note(source),
        "composed_from": origin(source.device_file, source.connection_file),
        "power": powered(source.power),
        "composer_inputs": composer_inputs(source, trainer.name, placement.text),
        "predicted_eps": round(placement.eps, 1),
        "predicted_free_eps": round(placement.eps, 1),
        "predicted_spread": None,
        "predicted_us": {name: round(value, 3) for name, value in predicted_us(placement).items()},
        "devices": {"actors": placement.host, "advantages": on_gae.name, "learner": on_learner.name},
        "assumption": placement.assumption,
        "default_timeout_s": ActorSpec.timeout_s,
        "session_class": "RolloutSession",
        "data_argument": "rollout=ROLLOUT",
        "rollout_options": _options(problem.rollout),
        "learner_class": made.name,
        "learner_arguments": {name: place[name] for name in made.arguments},
        "make_advantages": gae.name,
        "advantages_arguments": gae.arguments,
        "trainer_device": backend_of(on_learner).torch_device(on_learner),
        "waits_asleep": made.spins and learner.threads > 1 and on_learner.name == placement.host,
        "lag_note": ", and collect one more meanwhile" if problem.rollout.policy_lag else "",
        "source": source,
        "problem": problem,
    }
    imported = [(gae.module, gae.name), (made.module, made.name), *installed(source, trainer)]
    return rendered("rollout_program.py.j2", values, imported)


def generate_rollouts(source: RolloutSource, devices: Mapping[str, Device]) -> Path:
    """Write the program to its path and return the path; GenerationError if it cannot be written."""
    return write_program(source.path, render_rollouts(source, devices))


def _options(rollout: RolloutSpec) -> dict[str, object]:
    """The fields that are not always in the program and differ from their defaults."""
    fields = (f for f in dataclasses.fields(rollout) if f.name not in _ALWAYS)
    return {f.name: getattr(rollout, f.name) for f in fields if getattr(rollout, f.name) != f.default}


def _note(source: RolloutSource) -> str:
    placement, learner, rollout = source.placement, source.learner, source.problem.rollout
    lines = [
        "Placement for throughput (on-policy):",
        f"    Advantages      {source.advantages.device}",
        f"    Learner         {learner.device}, {learner.implementation}, {learner.threads} thread(s)",
        f"    Actors          {placement.host}, {placement.actor_count} x {placement.envs_per_actor} environments, "
        f"{rollout.horizon} steps each{policy_note(source.problem.actors)}",
        *actors_on_nodes(placement.nodes),
        f"Predicted: {placement.eps:,.0f} environment steps per second,",
        f"    {placement.assumption}.",
    ]
    return "\n".join(map(documented, lines))
