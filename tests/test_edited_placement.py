"""An edited placement is taken back if only choices differ; everything else is refused by the name of the field."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from programs import ONE_CPU, described
from test_cli import SPEC, invoke

from composer import Composer, Placement
from composer.edited import CHOICES, PARAMETERS
from composer.on_policy.placement import (
    AdvantagesConfig,
    RolloutCandidate,
    RolloutLearnerConfig,
    RolloutPlacement,
    RolloutTerms,
)
from pearl.errors import ConfigurationError, GenerationError, PlacementError

pytestmark = pytest.mark.usefixtures("quick_profiles")

Edit = Callable[[dict[str, Any]], object]


@pytest.fixture(scope="module")
def composer(tmp_path_factory: pytest.TempPathFactory) -> Composer:
    folder = tmp_path_factory.mktemp("edited")
    devices, connections = folder / "devices.csv", folder / "connections.csv"
    devices.write_text(f"name,kind,backend,selector,cores,active_watts\n{ONE_CPU[0]}\n")
    connections.write_text("source,target,latency_us,bandwidth_gbps\ncpu0,cpu0,0.1,20\n")
    made = described((devices, connections))
    made.run()
    assert {candidate.learner.implementation for candidate in made.placement.candidates} == {"native", "torch"}
    return made


def edited(composer: Composer, edit: Edit) -> Placement:
    document = json.loads(composer.placement.to_json())
    edit(document)
    return Placement.from_json(json.dumps(document))


def other(composer: Composer) -> tuple[int, str]:
    """The number and implementation of the candidate that was not chosen."""
    number = next(n for n, c in enumerate(composer.placement.candidates) if c is not composer.placement.chosen)
    return number, composer.placement.candidates[number].learner.implementation


def test_the_program_is_that_of_the_edited_choice(composer: Composer, tmp_path: Path) -> None:
    _, implementation = other(composer)
    placement = edited(composer, lambda d: d.update(implementation=implementation))
    text = composer.runtime_gen(path=tmp_path / "program.py", placement=placement).read_text()
    assert f", {implementation}, " in text
    assert composer.placement.implementation != implementation, "for this program only"


def test_parameters_of_the_choice_may_be_edited(composer: Composer, tmp_path: Path) -> None:
    number, implementation = other(composer)

    def edit(document: dict[str, Any]) -> None:
        document["implementation"] = implementation
        document["candidates"][number]["learner"]["threads"] = 2
        document["candidates"][number]["replay"]["fanout"] = 64

    program = composer.runtime_gen(path=tmp_path / "program.py", placement=edited(composer, edit)).read_text()
    assert "2 thread(s)" in program
    assert "fanout=64" in program


def put(value: object, *keys: str | int) -> Edit:
    def edit(document: dict[str, Any]) -> None:
        place: Any = document
        for key in keys[:-1]:
            place = place[key]
        place[keys[-1]] = value

    return edit


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (put("gpu7", "replay_manager"), "replay_manager: RM on 'gpu7'"),
        (put("gpu7", "learner"), "learner: .*'gpu7'"),
        (put("exotic", "implementation"), "implementation: .*exotic Learner"),
        (put("gpu7", "storage"), "storage: .*found 'gpu7'"),
        (put(3, "learner"), "learner: expected str; found 3"),
        (put("latency", "metric"), "metric: expected one of 'throughput', 'power_efficiency'"),
        (put(99, "version"), f"version {Placement.VERSION}; found 99"),
        (put(0, "version"), f"version {Placement.VERSION}; found 0"),
        (put("1", "version"), f"version {Placement.VERSION}; found '1'"),
        (put("other", "format"), "format 'pearl-placement'; found 'other'"),
        (put("x", "lerner"), "found 'lerner'. Did you mean 'learner'"),
        (put(99.0, "candidates", 0, "t_itr_us"), "t_itr_us 99.0"),
        (put(99.0, "candidates", 0, "eps"), "eps are 99.0"),
        (put(-1.0, "candidates", 0, "terms", "sample_us"), "sample_us of its terms of at least 0"),
        (put(1e999, "candidates", 0, "watts"), "finite"),
        (put(7, "batch_size"), "batch_size of 7"),
        (put("fast", "candidates", 0, "learner", "threads"), r"candidates\[0\].learner.threads: expected int"),
        (lambda d: d.pop("candidates"), "candidates missing"),
        (lambda d: d["candidates"].append(d["candidates"][0]), "each pair once"),
    ],
)
def test_what_cannot_be_a_placement_is_refused_when_it_is_read(composer: Composer, edit: Edit, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        edited(composer, edit)


@pytest.mark.parametrize(
    ("edit", "field"),
    [
        (put(5.0, "candidates", 0, "watts"), "candidates[0].watts"),
        (put(5.0, "candidates", 1, "message_bytes"), "candidates[1].message_bytes"),
        (put(0.5, "candidates", 0, "storage", 0, "traffic_us"), "candidates[0].storage[0].traffic_us"),
        (put("cuda", "candidates", 0, "learner", "backend"), "candidates[0].learner.backend"),
        (put("cuda:1", "candidates", 1, "replay", "selector"), "candidates[1].replay.selector"),
        (put("gpu0", "host"), "host"),
        (put(1000, "transition_bytes"), "transition_bytes"),
        (put(64, "actor_count"), "actor_count"),
        (put(64, "envs_per_actor"), "envs_per_actor"),
        (put(0.25, "replay_ratio"), "replay_ratio"),
        (put(9, "priority_update_delay"), "priority_update_delay"),
        (put("power_efficiency", "metric"), "metric"),
        (put(1, "evidence", "replay_capacity"), "evidence.replay_capacity"),
        (put(1.0, "evidence", "break_evens", 0, "at"), "evidence.break_evens[0].at"),
        (lambda d: d["evidence"]["devices"][0].update(memory_gb=1.0), "evidence.devices[0].memory_gb"),
        (lambda d: d["candidates"].pop(), "count of candidates"),
    ],
)
def test_a_changed_result_is_refused_by_its_field(composer: Composer, tmp_path: Path, edit: Edit, field: str) -> None:
    placement = edited(composer, edit)
    with pytest.raises(PlacementError) as caught:
        composer.runtime_gen(path=tmp_path / "program.py", placement=placement)
    assert f"edited placement's {field}: expected" in str(caught.value)
    assert "--budget" in str(caught.value)
    assert "compose again" in str(caught.value)
    assert not (tmp_path / "program.py").exists()


def test_every_number_of_a_candidate_but_its_parameters_is_a_result(composer: Composer, tmp_path: Path) -> None:
    document = json.loads(composer.placement.to_json())
    editable = {name for names in PARAMETERS.values() for name in names} | set(CHOICES)

    def numbers(value: Any, keys: tuple[str | int, ...]) -> list[tuple[str | int, ...]]:
        if isinstance(value, dict):
            return [found for key, item in value.items() for found in numbers(item, (*keys, key))]
        if isinstance(value, list):
            return [found for n, item in enumerate(value) for found in numbers(item, (*keys, n))]
        return [keys] if type(value) in (int, float) and keys[-1] not in editable else []

    places = numbers(document["candidates"][0], ("candidates", 0))
    assert len(places) > 10
    for keys in places:
        changed = copy.deepcopy(document)
        place: Any = changed
        for key in keys[:-1]:
            place = place[key]
        place[keys[-1]] += 1
        with pytest.raises(ConfigurationError):
            composer.runtime_gen(path=tmp_path / "program.py", placement=Placement.from_json(json.dumps(changed)))


@pytest.mark.parametrize(("part", "name"), [("learner", "threads"), ("learner", "sub_batches"), ("replay", "workers")])
def test_parameters_that_no_program_can_have_are_refused(
    composer: Composer, tmp_path: Path, part: str, name: str
) -> None:
    chosen = composer.placement.candidates.index(composer.placement.chosen)
    placement = edited(composer, put(0, "candidates", chosen, part, name))
    with pytest.raises(GenerationError, match=f"{name} must be a whole number of at least 1; found 0"):
        composer.runtime_gen(path=tmp_path / "program.py", placement=placement)


def test_profiling_takes_an_edited_placement_as_a_run_does(composer: Composer, tmp_path: Path) -> None:
    _, implementation = other(composer)
    profiled = copy.copy(composer)
    profiled.set_placement(edited(composer, lambda d: d.update(implementation=implementation)))
    profiled.profile()
    assert profiled.placement.implementation == implementation
    assert f", {implementation}, " in profiled.runtime_gen(path=tmp_path / "program.py").read_text()
    profiled.set_placement(edited(composer, put(64, "actor_count")))
    with pytest.raises(PlacementError, match="actor_count: expected"):
        profiled.profile()


def test_what_is_no_placement_of_a_replay_cannot_be_set() -> None:
    with pytest.raises(PlacementError, match=r"takes a Placement, .*; found a dict"):
        Composer(progress=False).set_placement({})  # type: ignore[arg-type]


def test_a_placement_of_another_version_without_evidence_cannot_be_set(composer: Composer) -> None:
    with pytest.raises(PlacementError, match="has no evidence"):
        Composer(progress=False).set_placement(edited(composer, lambda d: d.pop("evidence")))


def test_compose_takes_an_edited_placement_though_discovery_would_measure_other_bandwidths(tmp_path: Path) -> None:
    spec = tmp_path / "my.toml"
    spec.write_text(SPEC)
    first = invoke("compose", spec)
    assert first.exit_code == 0, first.output
    written = tmp_path / "runs" / "my" / "program.placement.json"
    document = json.loads(written.read_text())
    implementation = next(
        c["learner"]["implementation"]
        for c in document["candidates"]
        if c["learner"]["implementation"] != document["implementation"]
    )
    file = tmp_path / "edited.json"
    file.write_text(json.dumps({**document, "implementation": implementation}))
    again = invoke("compose", spec, "--placement", file, "--output", tmp_path / "out" / "mine.py")
    assert again.exit_code == 0, again.output
    assert f", {implementation}, " in (tmp_path / "out" / "mine.py").read_text()
    kept = Placement.from_json((tmp_path / "out" / "mine.placement.json").read_text())
    assert kept.implementation == implementation

    spec.write_text(SPEC.replace("batch_size = 32", "batch_size = 64"))
    refused = invoke("compose", spec, "--placement", file)
    assert refused.exit_code == 1
    assert "batch_size: expected 64, as composed here; found 32" in refused.output


def test_compose_refuses_a_file_that_is_no_placement_before_it_measures(tmp_path: Path) -> None:
    spec = tmp_path / "my.toml"
    spec.write_text(SPEC)
    for file in (spec, tmp_path / "absent.json", tmp_path):
        refused = invoke("compose", spec, "--placement", file)
        assert refused.exit_code == 1
        assert "profiling" not in refused.output
        assert str(file) in refused.output


def test_compose_says_what_to_do_with_a_placement_of_rollouts(tmp_path: Path) -> None:
    learner = RolloutCandidate(
        AdvantagesConfig("cpu0"), RolloutLearnerConfig("cpu0", "native"), RolloutTerms(1.0, 1.0, 0.0, 1.0, 3.0)
    )
    spec, file = tmp_path / "my.toml", tmp_path / "rollouts.json"
    spec.write_text(SPEC)
    file.write_text(RolloutPlacement("cpu0", 32, 0, 1, 4, (learner,)).to_json())
    refused = invoke("compose", spec, "--placement", file)
    assert refused.exit_code == 1
    for said in ("found one of a trainer that learns from rollouts", "runtime_gen(placement="):
        assert said in " ".join(refused.output.split())
