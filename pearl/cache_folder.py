"""Where PEARL keeps what it measured, compiled or fetched."""

from __future__ import annotations

import os
from pathlib import Path

from pearl.errors import ConfigurationError
from pearl.process_limits import no_home


def cache_folder() -> Path:
    """$PEARL_CACHE_DIR, else `pearl` of $XDG_CACHE_HOME, else `~/.cache/pearl`; it may not exist yet.

    Raises ConfigurationError where nothing says which folder is the user's.
    """
    if folder := os.environ.get("PEARL_CACHE_DIR"):
        return Path(folder)
    if cache := os.environ.get("XDG_CACHE_HOME"):
        return Path(cache) / "pearl"
    try:
        return Path.home() / ".cache" / "pearl"
    except RuntimeError as error:
        raise ConfigurationError(no_home()) from error
