"""Generalized advantage estimation, for every backend of the table alike; NumPy's reference is what they must equal."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from references import CUDA

from pearl.backends import backends
from pearl.backends.cpu.gae import NativeGae
from pearl.backends.cuda.gae import CudaGae
from pearl.backends.fpga.gae import FpgaGae
from pearl.backends.protocol import Factory
from pearl.backends.sycl.gae import SyclGae
from pearl.backends.sycl.selector import EMULATOR_SELECTOR
from pearl.devices import Device
from pearl.errors import ConfigurationError
from pearl.rollout import AdvantageEstimator, Codes, NumpyGae, quantized

GAMMA, LAMBDA = 0.99, 0.95
# Every class that a backend of the table names, and one row of the device CSV that leads to it.
ROWS = {
    "NativeGae": Device("cpu", "cpu", "cpu"),
    "SyclGae": Device("sycl", "cpu", "sycl", "opencl:cpu"),
    "CudaGae": Device("gpu", "gpu", "cuda", CUDA),
    "FpgaGae": Device("fpga", "fpga", "sycl", EMULATOR_SELECTOR),
}
BACKENDS = {"NativeGae": "cpu", "SyclGae": "sycl", "CudaGae": "cuda", "FpgaGae": "fpga"}
CLASSES = {"NativeGae": NativeGae, "SyclGae": SyclGae, "CudaGae": CudaGae, "FpgaGae": FpgaGae}
# With lookahead, the FPGA adds in another order.
REORDERED = {"FpgaGae": 2e-5}
MARKS = {"SyclGae": pytest.mark.sycl, "FpgaGae": pytest.mark.fpga}

SIZES = [(1, 1), (1, 33), (7, 1), (7, 7), (33, 33), (33, 2), (7, 1000), (1000, 3), (40, 65)]
SMALL = [(1, 1), (7, 7), (33, 2), (5, 33)]  # for the FPGA: each transition takes a microsecond or more on the emulator
ENDS = ["nowhere", "everywhere", "random"]

Rollout = dict[str, np.ndarray]


def factory_of(name: str) -> Factory:
    backend = next(each for each in backends() if each.name == BACKENDS[name])
    factory = backend.advantages(ROWS[name])
    assert factory is not None
    return factory


@functools.cache
def made(name: str) -> AdvantageEstimator:
    """One estimator for all tests: an FPGA's is a pipeline that runs until the process ends."""
    return NumpyGae(GAMMA, LAMBDA) if name == "NumpyGae" else factory_of(name).make_advantages(GAMMA, LAMBDA)


each_class = [pytest.param(name, marks=MARKS.get(name, ())) for name in CLASSES]


@pytest.fixture(params=each_class)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=[*each_class, "NumpyGae"])
def estimator(request: pytest.FixtureRequest) -> AdvantageEstimator:
    return made(request.param)


def rollout(horizon: int, envs: int, ends: str = "random", seed: int = 0) -> Rollout:
    rng = np.random.default_rng((seed, horizon, envs))
    found: Rollout = {key: rng.normal(size=(horizon, envs)).astype(np.float32) for key in ("rewards", "values")}
    found["last_values"] = rng.normal(size=envs).astype(np.float32)
    chance = {"nowhere": 0.0, "everywhere": 1.0, "random": 0.15}[ends]
    found["ends"] = (rng.random((horizon, envs)) < chance).astype(np.uint8) * rng.integers(1, 256, dtype=np.uint8)
    return found


def copied(arrays: Rollout) -> Rollout:
    return {key: array.copy() for key, array in arrays.items()}


def assert_equal(name: str, found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    """The bits of the reference, or where sums have another order numbers as near as float32 gives them."""
    for ours, theirs in zip(found, expected, strict=True):
        if name in REORDERED:
            np.testing.assert_allclose(ours, theirs, rtol=REORDERED[name], atol=REORDERED[name])
        else:
            np.testing.assert_array_equal(ours.view(np.uint32), theirs.view(np.uint32))


def sizes(name: str) -> list[tuple[int, int]]:
    return SMALL if name == "FpgaGae" else SIZES


# --- the table --------------------------------------------------------------------------------------------------------


def test_every_estimator_of_the_table_is_held_to_the_contract() -> None:
    answers = {
        factory.name: backend.name
        for backend in backends()
        for row in ROWS.values()
        if row.kind in backend.kinds and row.backend == backend.csv_name and (factory := backend.advantages(row))
    }
    assert answers == BACKENDS


def test_a_factory_makes_the_class_that_it_names(name: str) -> None:
    assert factory_of(name).load() is CLASSES[name]
    assert isinstance(made(name), CLASSES[name])
    assert isinstance(made(name).backend, str)


# --- results ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ends", ENDS)
def test_advantages_and_returns_are_the_references(name: str, ends: str) -> None:
    for size in sizes(name):
        given = rollout(*size, ends)
        expected, found = copied(given), copied(given)
        NumpyGae(GAMMA, LAMBDA).estimate(**expected)
        assert made(name).estimate(**found) is None
        assert_equal(name, [found["rewards"], found["values"]], [expected["rewards"], expected["values"]])
        for key in ("last_values", "ends"):
            np.testing.assert_array_equal(found[key], given[key])


@pytest.mark.parametrize("bits", [2, 8, 12])
@pytest.mark.parametrize("with_bonus", [False, True])
def test_codes_give_what_the_numbers_that_they_stand_for_give(name: str, bits: int, with_bonus: bool) -> None:
    for size in sizes(name):
        given = rollout(*size)
        rewards = quantized(given["rewards"], bits, 0.1, 1.3, restored=False)
        values = quantized(given["values"], bits, -0.2, 0.8, restored=True)
        bonus = rollout(*size, seed=1)["rewards"] if with_bonus else None
        before = rewards.codes.copy(), values.codes.copy()
        results = []
        for each in (NumpyGae(GAMMA, LAMBDA), made(name)):
            outputs = [np.full(size, np.nan, np.float32) for _ in range(2)]
            each.estimate_codes(rewards, values, bonus, given["last_values"], given["ends"], *outputs)
            results.append(outputs)
        assert_equal(name, results[1], results[0])
        np.testing.assert_array_equal(rewards.codes, before[0])
        np.testing.assert_array_equal(values.codes, before[1])


def test_a_larger_rollout_may_follow_a_smaller_one_and_precede_it(name: str) -> None:
    """Memory on the device is kept between calls."""
    for size in ((3, 2), (33, 20), (3, 2), (1, 1)):
        expected, found = rollout(*size), rollout(*size)
        NumpyGae(GAMMA, LAMBDA).estimate(**expected)
        made(name).estimate(**found)
        assert_equal(name, [found["rewards"], found["values"]], [expected["rewards"], expected["values"]])


def test_nothing_passes_the_end_of_an_episode(estimator: AdvantageEstimator) -> None:
    given = rollout(4, 9, "nowhere")
    given["ends"][1] = 1
    given["values"][2:] = np.inf
    given["last_values"][:] = np.nan
    with np.errstate(invalid="ignore"):
        estimator.estimate(**given)
    assert np.isfinite(given["rewards"][:2]).all()
    assert np.isfinite(given["values"][:2]).all()


@pytest.mark.parametrize("size", [(0, 3), (3, 0), (0, 0)])
def test_an_empty_rollout_changes_nothing(estimator: AdvantageEstimator, size: tuple[int, int]) -> None:
    given = rollout(*size)
    estimator.estimate(**given)
    assert given["rewards"].shape == size


# --- what is refused --------------------------------------------------------------------------------------------------


def read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


Change = Callable[[np.ndarray], Any]
WRONG: list[tuple[str, Change, str]] = [
    ("rewards", lambda a: a.astype(np.float64), r"rewards must be float32 of shape \(4, 3\); found float64 of .*4, 3"),
    ("rewards", lambda a: a[0], r"rewards must be float32 of shape \(horizon, envs\); found float32 of shape \(3,\)"),
    ("rewards", lambda a: a.tolist(), "rewards must be an array, float32 .*; found list"),
    ("rewards", read_only, "rewards must be contiguous and writeable; found read-only"),
    ("values", lambda a: a[:3].copy(), r"values must be float32 of shape \(4, 3\); found float32 of shape \(3, 3\)"),
    ("values", lambda a: np.repeat(a, 2, axis=1)[:, ::2], "values must be contiguous and writeable; found gaps"),
    ("values", lambda a: a.astype(">f4"), r"values must be float32 of shape \(4, 3\); found >f4"),
    ("values", read_only, "values must be contiguous and writeable; found read-only"),
    ("last_values", lambda a: a[:2].copy(), r"last_values must be float32 of shape \(3,\); found .* of shape \(2,\)"),
    ("last_values", lambda a: a.astype(np.float16), r"last_values must be float32 of shape \(3,\); found float16"),
    ("ends", lambda a: a.astype(bool), r"ends must be uint8 of shape \(4, 3\); found bool"),
    ("ends", lambda a: a.T.copy(), r"ends must be uint8 of shape \(4, 3\); found uint8 of shape \(3, 4\)"),
    ("ends", lambda a: None, "ends must be an array, uint8 .*; found NoneType"),
]  # fmt: skip


@pytest.mark.parametrize(("which", "change", "message"), WRONG)
def test_arrays_that_do_not_fit_are_refused_and_named(
    estimator: AdvantageEstimator, which: str, change: Change, message: str
) -> None:
    given = rollout(4, 3)
    given[which] = change(given[which])
    before = {key: np.array(array) for key, array in given.items()}
    with pytest.raises(ConfigurationError, match=message):
        estimator.estimate(**given)
    for key, array in before.items():
        np.testing.assert_array_equal(given[key], array)


def test_rewards_and_values_must_not_overlap(estimator: AdvantageEstimator) -> None:
    given = rollout(4, 3)
    both = np.zeros((7, 3), np.float32)
    with pytest.raises(ConfigurationError, match="rewards and values must not overlap"):
        estimator.estimate(both[:4], both[3:], given["last_values"], given["ends"])
    estimator.estimate(np.zeros((4, 3), np.float32), both[3:], given["last_values"], given["ends"])


CODES = np.zeros((4, 3), np.uint8)
WRONG_CODES: list[tuple[str, Any, str]] = [
    ("rewards", Codes(CODES.astype(np.int32), 0.0, 1.0), "rewards.codes must be uint8 or uint16 .*; found int32"),
    ("values", Codes(CODES.astype(np.uint16), 0.0, 1.0), "values.codes must be uint8 of shape .*; found uint16"),
    ("values", Codes(CODES[:3], 0.0, 1.0), r"values.codes must be uint8 of shape \(4, 3\); found uint8 .*\(3, 3\)"),
    ("bonus", np.zeros((4, 2), np.float32), r"bonus must be float32 of shape \(4, 3\); found .* of shape \(4, 2\)"),
    ("advantages", np.zeros((4, 3)), r"advantages must be float32 of shape \(4, 3\); found float64"),
    ("returns", np.zeros((3, 4), np.float32), r"returns must be float32 of shape \(4, 3\); found .* of shape \(3, 4\)"),
    ("last_values", np.zeros(4, np.float32), r"last_values must be float32 of shape \(3,\); found float32 of .*\(4,\)"),
]  # fmt: skip


@pytest.mark.parametrize(("which", "wrong", "message"), WRONG_CODES)
def test_codes_that_do_not_fit_are_refused_and_named(
    estimator: AdvantageEstimator, which: str, wrong: Any, message: str
) -> None:
    given: dict[str, Any] = {
        "rewards": Codes(CODES, 0.0, 1.0),
        "values": Codes(CODES, 0.0, 1.0),
        "bonus": None,
        **{key: array for key, array in rollout(4, 3).items() if key in ("last_values", "ends")},
        "advantages": np.zeros((4, 3), np.float32),
        "returns": np.zeros((4, 3), np.float32),
    }
    with pytest.raises(ConfigurationError, match=message):
        estimator.estimate_codes(**{**given, which: wrong})
    estimator.estimate_codes(**given)


def test_wrong_arguments_are_type_errors(name: str) -> None:
    given = rollout(4, 3)
    estimate: Any = made(name).estimate
    with pytest.raises(TypeError):
        estimate(given["rewards"], given["values"], given["last_values"])
    with pytest.raises(TypeError):
        estimate(**given, more=1)
    with pytest.raises(TypeError):
        estimate(*given.values(), rewards=given["rewards"])
    with pytest.raises(TypeError):
        estimate(*given.values(), None)


@pytest.mark.parametrize(("factors", "message"), [((1.5, 0.9), "gamma .*1.5"), ((0.9, -0.5), "gae_lambda .*-0.5")])
def test_factors_outside_their_range_are_refused(name: str, factors: tuple[float, float], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        factory_of(name).make_advantages(*factors)


# --- the FPGA's pipeline ----------------------------------------------------------------------------------------------


@pytest.fixture
def pipeline(request: pytest.FixtureRequest) -> Iterator[FpgaGae]:
    lookahead, rows = request.param
    with contextlib.closing(FpgaGae(GAMMA, LAMBDA, lookahead=lookahead, rows=rows)) as made_here:
        yield made_here


@pytest.mark.fpga
@pytest.mark.parametrize("pipeline", [(1, 1), (3, 3)], indirect=True, ids=["one step", "three steps"])
@pytest.mark.parametrize("ends", ENDS)
def test_any_lookahead_gives_the_same_advantages(pipeline: FpgaGae, ends: str) -> None:
    for size in SMALL:
        expected, found = rollout(*size, ends), rollout(*size, ends)
        NumpyGae(GAMMA, LAMBDA).estimate(**expected)
        pipeline.estimate(**found)
        exact = pipeline.lookahead == 1
        assert_equal(
            "" if exact else "FpgaGae", [found["rewards"], found["values"]], [expected["rewards"], expected["values"]]
        )


@pytest.mark.fpga
@pytest.mark.parametrize("pipeline", [(2, 2)], indirect=True)
def test_elements_are_launched_once_and_a_closed_pipeline_says_so(pipeline: FpgaGae) -> None:
    for _ in range(3):
        pipeline.estimate(**rollout(5, 3))
    assert pipeline.kernel.stage_launches == 2
    assert pipeline.kernel.bridge_launches == 2 + 3 * 4  # the factors; then a load and a store in each row
    pipeline.close()
    pipeline.close()
    with pytest.raises(ConfigurationError, match="closed"):
        pipeline.estimate(**rollout(5, 3))


@pytest.mark.fpga
@pytest.mark.parametrize(
    ("design", "message"), [({"lookahead": 4}, r"lookahead .*\[1, 3\]; found 4"), ({"rows": 0}, "rows .*found 0")]
)
def test_a_design_that_does_not_exist_is_refused(design: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        FpgaGae(GAMMA, LAMBDA, **design)
