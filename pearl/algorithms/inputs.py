"""Inputs of networks: images, vectors, and elements that are scaled by their bounds."""

from __future__ import annotations

import copy
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from pearl.errors import TrainerError

_WIDEST = 1e3  # wider observation bounds say nothing about the values


def nature_features(pixels: int) -> int:
    """Output positions of the Nature CNN's convolutions for a height or width in pixels; below 1: it is too small."""
    for kernel, stride in ((8, 4), (4, 2), (3, 1)):
        pixels = (pixels - kernel) // stride + 1
    return pixels


# Convolutional trunks by name, and the smallest height and width of the images that they take.
SMALLEST_IMAGES = {"nature": 36, "impala": 8}


def impala_features(pixels: int) -> int:
    """Output positions of the IMPALA CNN's three poolings for a height or width in pixels."""
    for _ in range(3):
        pixels = (pixels - 1) // 2 + 1
    return pixels


def _is_image(channels: int, height: int, width: int, cnn: str) -> bool:
    return channels <= min(height, width) and min(height, width) >= SMALLEST_IMAGES[cnn]


def takes_cnn(obs_shape: tuple[int, ...], cnn: str = "nature") -> bool:
    """Whether observations of that shape are images `(channels, height, width)` that the CNN `cnn` takes.

    Raises TrainerError for images with the channels last, from which an MLP would learn almost nothing.
    """
    if len(obs_shape) != 3:
        return False
    height, width, channels = obs_shape
    if _is_image(*obs_shape, cnn) or not _is_image(channels, height, width, cnn):
        return _is_image(*obs_shape, cnn)
    raise TrainerError(
        f"Observations of shape {obs_shape} look like images (height, width, channels); the {cnn.capitalize()} CNN "
        "needs (channels, height, width). Wrap the environment: gymnasium.wrappers.GrayscaleObservation, "
        "ResizeObservation((84, 84)) and FrameStackObservation(4). Atari games: set_actors(..., "
        'vectorization="atari"). Or use your own network.'
    )


def scaled_observations(box: spaces.Box, asked: bool) -> np.ndarray:
    """Which elements of an observation the networks of an actor-critic scale by their bounds, `(size,)` bool.

    Of unsigned bytes, and of others if the user `asked` for it, all elements with bounds of at most 1000.
    """
    low, high = box.low.astype(np.float64).ravel(), box.high.astype(np.float64).ravel()
    fit: np.ndarray = (low >= -_WIDEST) & (high <= _WIDEST) & (high > low)
    return fit & (asked or box.dtype == np.uint8)


def unit_scale(box: spaces.Box, scaled: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Center and half range, `(size,)` float32 each, by which `[low, high]` becomes [-1, 1].

    They change nothing where `scaled` `(size,)` is False; by default, all elements are scaled. An element whose bounds
    are equal becomes 0: critics see numbers from [-1, 1] in its place, too, which must not be far from it.
    """
    low, high = box.low.astype(np.float64).ravel(), box.high.astype(np.float64).ravel()
    chosen = np.ones(low.shape, bool) if scaled is None else scaled
    with np.errstate(invalid="ignore", over="ignore"):
        center = np.where(chosen, (high + low) / 2, 0.0)
        half_range = np.where(chosen & (high > low), (high - low) / 2, 1.0)
    return center.astype(np.float32), half_range.astype(np.float32)


def without_wide_bounds(space: gym.Space[Any], widest: float = _WIDEST) -> gym.Space[Any]:
    """The space to draw numbers from: bounds beyond `widest` that are further apart than twice that count as none.

    Others are left as they are. NumPy draws nothing between the largest numbers of float64.
    """
    if type(space) is not spaces.Box or not np.issubdtype(space.dtype, np.floating):
        return space
    low, high, infinity = space.low, space.high, space.dtype.type(np.inf)
    with np.errstate(over="ignore"):
        wide = high - low > 2 * widest
    low, high = np.where(wide & (low < -widest), -infinity, low), np.where(wide & (high > widest), infinity, high)
    return spaces.Box(low, high, dtype=space.dtype.type)


def random_observations(space: gym.Space[Any], count: int, seed: int) -> np.ndarray:
    """`count` observations of `space` `(count, *shape)`, the same for the same `seed`.

    Numbers with bounds that say nothing about the values are drawn as those without bounds: networks may not take the
    numbers between such bounds.
    """
    drawn = without_wide_bounds(copy.deepcopy(space))  # seeding must not change the environment's own samples
    drawn.seed(seed)
    return np.stack([np.asarray(drawn.sample()) for _ in range(count)])
