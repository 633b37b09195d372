"""What NumPy does about overflow and the like in PEARL's own arithmetic, whatever the user's code has set."""

from __future__ import annotations

import numpy as np


def own_error_state() -> np.errstate:
    """NumPy's defaults, as a context or a decorator: code of an environment may have called `np.seterr`."""
    return np.errstate(over="warn", under="ignore", divide="warn", invalid="warn")
