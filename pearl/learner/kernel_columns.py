"""Columns of a batch as the learners' kernels read them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from pearl.errors import TrainerError


def kernel_column(name: str, column: np.ndarray | torch.Tensor, dtype: np.dtype[Any]) -> np.ndarray:
    """The column, contiguous, of `dtype`; raises TrainerError for another dtype."""
    found = column.detach().numpy() if isinstance(column, torch.Tensor) else np.asarray(column)
    if found.dtype != dtype:
        raise TrainerError(f"Column {name!r} must have dtype {dtype}; found {found.dtype}. Convert it first.")
    return found if found.flags.c_contiguous else np.ascontiguousarray(found)
