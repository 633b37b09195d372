"""Where PEARL keeps what it measured, compiled or fetched."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """$PEARL_CACHE_DIR, else `pearl` of $XDG_CACHE_HOME, else `~/.cache/pearl`; it may not exist yet."""
    if folder := os.environ.get("PEARL_CACHE_DIR"):
        return Path(folder)
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path("~/.cache").expanduser()) / "pearl"
