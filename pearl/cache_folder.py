"""The folder in which PEARL keeps measurements, compiled kernels and downloads."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from pearl.errors import ConfigurationError, DeviceError
from pearl.process_limits import no_home

log = logging.getLogger(__name__)

_GROUP_OR_WORLD = stat.S_IWGRP | stat.S_IWOTH


def cache_folder() -> Path:
    """$PEARL_CACHE_DIR, else `pearl` of $XDG_CACHE_HOME, else `~/.cache/pearl`; it may not exist yet.

    Raises ConfigurationError if the user's home folder is not known.
    """
    if folder := os.environ.get("PEARL_CACHE_DIR"):
        return Path(folder)
    if cache := os.environ.get("XDG_CACHE_HOME"):
        return Path(cache) / "pearl"
    try:
        return Path.home() / ".cache" / "pearl"
    except RuntimeError as error:
        raise ConfigurationError(no_home()) from error


def make_private(folder: Path) -> None:
    """Make `folder` and its missing parents, accessible to their owner only. Raises OSError."""
    for each in (*reversed(folder.parents), folder):
        if not each.exists():
            each.mkdir(mode=0o700, exist_ok=True)
    if not folder.is_dir():
        raise NotADirectoryError(20, "Not a directory", str(folder))


def keeps_kernels(folder: Path, setting: str = "PEARL_CACHE_DIR") -> bool:
    """Make `folder` for compiled kernels; False, with a warning, if it cannot be made.

    Raises DeviceError if others may have written to it; see `check_private`.
    """
    try:
        make_private(folder)
    except OSError as error:
        log.warning(
            "Kernels are compiled again in every process: %s cannot be made (%s). Set %s to a writable folder.",
            folder,
            error.strerror or error,
            setting,
        )
        return False
    check_private(folder, setting)
    return True


def check_private(folder: Path, setting: str = "PEARL_CACHE_DIR") -> None:
    """Raise DeviceError if users other than this one and root may have written to `folder`.

    Native code is loaded from there, so a user who can write there could run code as this user. `setting` is the
    environment variable that names another folder.
    """
    try:
        top = folder.stat()
        shut = not top.st_mode & (stat.S_IRWXG | stat.S_IRWXO)  # then no other user can reach the files in it
        for path, found in _entries(folder, top):
            writable = not stat.S_ISLNK(found.st_mode) and found.st_mode & _GROUP_OR_WORLD
            if found.st_uid not in (os.geteuid(), 0):
                wrong = f"belongs to user {found.st_uid}"
            elif writable and (path == folder or not shut):
                wrong = f"may be written to by other users (mode {stat.S_IMODE(found.st_mode):04o})"
            else:
                continue
            raise DeviceError(
                f"Native code would be loaded from {folder}, and {path} {wrong}. If you trust what is in the folder, "
                f"make it yours alone (chown -R, chmod -R go-w), else remove it; or set {setting} to another folder."
            )
    except OSError as error:
        raise DeviceError(
            f"Native code would be loaded from {folder}, and whether others may write there cannot be seen: "
            f"{error.strerror or error}. Set {setting} to a folder of your own."
        ) from error


def _entries(folder: Path, top: os.stat_result) -> Iterator[tuple[Path, os.stat_result]]:
    """The folder itself and everything in it; links are not followed."""
    yield folder, top
    folders = [folder]
    while folders:
        at = folders.pop()
        try:
            with os.scandir(at) as entries:
                for entry in entries:
                    yield Path(entry.path), entry.stat(follow_symlinks=False)
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(Path(entry.path))
        except FileNotFoundError:  # another process has removed it meanwhile
            continue
