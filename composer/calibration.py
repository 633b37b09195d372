"""The calibration store: measurements kept between runs, so that a second composition is instant.

The store is one versioned JSON file. Writers take a lock file, merge their entries into the current ones and replace
the file in one step, so readers need no lock and never see half a file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from composer.matrix import Measurement
from composer.serialization import from_document, to_document
from pearl import __version__
from pearl.atomic_file import write_text
from pearl.cache_folder import cache_folder
from pearl.errors import ConfigurationError
from pearl.spec import Scalar

log = logging.getLogger(__name__)

FORMAT = "pearl-calibration"
VERSION = 1
LOCK_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class CalibrationKey:
    """Everything that a measurement depends on; `shapes` is a signature such as `NetworkSpec.signature`."""

    primitive: str
    device_fingerprint: str
    parameters: tuple[tuple[str, Scalar], ...]
    shapes: str
    dtype: str
    pearl_version: str
    torch_version: str
    kernel_hash: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "parameters", tuple(sorted((str(k), v) for k, v in self.parameters)))

    @property
    def digest(self) -> str:
        """The name of the entry: equal for equal keys, in every process and version of Python."""
        text = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class _Entry:
    key: CalibrationKey
    measurements: tuple[tuple[str, Measurement], ...]

    def __post_init__(self) -> None:
        names = [name for name, _ in self.measurements]
        if len(set(names)) < len(names):
            raise ConfigurationError(f"An entry measures each latency once; found {', '.join(names)}.")

    @property
    def imported(self) -> bool:
        return any(measurement.source == "imported" for _, measurement in self.measurements)


@dataclass(frozen=True)
class _Document:
    """The content of a calibration file."""

    entries: tuple[_Entry, ...]


_Entries: TypeAlias = "dict[str, _Entry]"


def default_path() -> Path:
    """`calibration-N.json` in $PEARL_CACHE_DIR or else `~/.cache/pearl`; N is the version of the format.

    Versions of PEARL that share a cache folder thus use separate files.
    """
    return cache_folder() / f"calibration-{VERSION}.json"


class _OtherVersionError(Exception):
    """The file is a calibration store of another version of the format."""


@dataclass(frozen=True)
class Imported:
    """Counts of an imported file: all entries, those that are new here, and those of other versions of PEARL."""

    new: int
    total: int
    other_versions: int


class CalibrationStore:
    """Measurements by CalibrationKey, in `path` (default: `default_path()`).

    With `remeasure`, entries of earlier runs are not returned, unless they were imported: they are measured again and
    replaced. Safe for several processes; one store object belongs to one thread. Where the file cannot be written, or
    is of another version of the format, the store keeps its measurements in memory and warns once.
    """

    def __init__(self, path: Path | str | None = None, *, remeasure: bool = False) -> None:
        self.path = Path(path) if path is not None else default_path()
        self._remeasure = remeasure
        self._measured_now: set[str] = set()
        self._warned = False
        self._entries: _Entries = {}
        try:
            self._entries = self._load()
        except _OtherVersionError as error:
            self._warn_once(f"{error}, and measurements stay in memory", "Choose another file.")

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: CalibrationKey) -> dict[str, Measurement] | None:
        """The measurements of `key` by name, or None."""
        entry = self._entries.get(key.digest)
        if entry is None or (self._remeasure and not entry.imported and key.digest not in self._measured_now):
            return None
        return dict(entry.measurements)

    def put(self, key: CalibrationKey, measurements: Mapping[str, Measurement]) -> None:
        """Keep `measurements` in place of any others of this key, and write the file."""
        self._measured_now.add(key.digest)
        self._write({key.digest: _Entry(key, tuple(measurements.items()))})

    def import_file(self, path: Path | str) -> Imported:
        """Add the measurements of another machine's calibration file.

        Every value that is taken becomes `imported`. A key that was measured here keeps its own values.
        ConfigurationError if the file is no calibration file, or if the store cannot be written.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"The calibration file {path} cannot be read: {error}") from error
        try:
            theirs = _decode_entries(text)
        except ConfigurationError as error:
            raise ConfigurationError(f"{path} is no calibration file of this version: {error}") from error
        new: _Entries = {}
        for digest, entry in theirs.items():
            mine = self._entries.get(digest)
            if mine is None or mine.imported:
                taken = tuple((n, dataclasses.replace(m, source="imported")) for n, m in entry.measurements)
                new[digest] = _Entry(entry.key, taken)
        self._write(new, required=True)
        others = sum(entry.key.pearl_version != __version__ for entry in theirs.values())
        return Imported(len(new), len(theirs), others)

    def _load(self) -> _Entries:
        try:
            text = self.path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return {}
        except UnicodeDecodeError as error:
            return self._set_aside(str(error))
        except OSError as error:
            self._warn_once(f"cannot be read ({error.strerror or error})")
            return {}
        try:
            return _decode_entries(text)
        except ConfigurationError as error:
            version = _version(text)
            if version not in (None, VERSION):
                raise _OtherVersionError(
                    f"is of version {version}, and this PEARL reads version {VERSION}: the file is not changed"
                ) from error
            return self._set_aside(str(error))

    def _set_aside(self, reason: str) -> _Entries:
        aside = self.path.with_name(f"{self.path.name}.corrupt-{time.time_ns()}")
        try:
            self.path.replace(aside)
        except FileNotFoundError:
            return {}  # another process has just renamed it
        except OSError as error:
            self._warn_once(f"is corrupt ({reason}) and cannot be renamed ({error.strerror or error})")
            return {}
        log.warning("The calibration file %s is corrupt and was renamed to %s: %s", self.path, aside, reason)
        return {}

    def _write(self, new: _Entries, *, required: bool = False) -> None:
        self._entries = self._entries | new
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self._lock():
                self._entries = self._entries | self._load() | new
                document = _Document(tuple(entry for _, entry in sorted(self._entries.items())))
                write_text(self.path, to_document(document, FORMAT, VERSION, indent=None))
        except _OtherVersionError as error:
            if required:
                raise ConfigurationError(f"The calibration file {self.path} {error}. Choose another file.") from error
            self._warn_once(f"{error}, and measurements stay in memory", "Choose another file.")
        except OSError as error:
            if required:
                raise ConfigurationError(
                    f"The calibration file {self.path} cannot be written: {error.strerror or error}. Set "
                    "PEARL_CACHE_DIR to a writable folder."
                ) from error
            self._warn_once(f"cannot be written ({error.strerror or error}); measurements stay in memory")

    def _warn_once(self, what: str, advice: str = "Set PEARL_CACHE_DIR to a writable folder.") -> None:
        if not self._warned:
            self._warned = True
            log.warning("The calibration file %s %s. %s", self.path, what, advice)

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        """Hold the lock file; TimeoutError after LOCK_TIMEOUT_S. The file remains: removing it would be a race."""
        descriptor = os.open(
            self.path.with_name(f"{self.path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644
        )
        try:
            deadline = time.monotonic() + LOCK_TIMEOUT_S
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise TimeoutError(f"its lock was not free within {LOCK_TIMEOUT_S:g} s") from None
                    time.sleep(0.01)
            yield
        finally:
            os.close(descriptor)  # releases the lock


def _version(text: str) -> int | None:
    """The version of the format in the calibration file `text`; None if it is no calibration file."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(document, dict) or document.get("format") != FORMAT or type(document.get("version")) is not int:
        return None
    version: int = document["version"]
    return version


def _decode_entries(text: str) -> _Entries:
    entries = from_document(_Document, text, FORMAT, VERSION).entries
    found = {entry.key.digest: entry for entry in entries}
    if len(found) < len(entries):
        raise ConfigurationError(f"{FORMAT}: expected one entry for each key; found a key twice.")
    return found
