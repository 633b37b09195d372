"""The calibration store: measurements kept between runs, so that a second composition is instant.

The store is one versioned JSON file. Writers take a lock file, merge their entries into the current ones and replace
the file in one step, so readers need no lock and never see half a file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from composer.measurement import Measurement
from composer.serialization import document_of, from_document, json_of
from pearl import __version__
from pearl.atomic_file import write_text
from pearl.cache_folder import cache_folder
from pearl.devices.description import Connection, Device
from pearl.errors import ConfigurationError
from pearl.spec import Scalar

log = logging.getLogger(__name__)

FORMAT = "pearl-calibration"
VERSION = 2
LOCK_TIMEOUT_S = 10.0

SIZES = ("batch_size", "capacity")
"""The parameters of a key between whose values measurements can be interpolated."""
SOFTWARE = ("trainer_source", "env_source", "replay_kernels")
"""The parameters of a key that are hashes of code."""
VENDOR_REPORT = "fpga_report"
"""The primitive of entries that come from an FPGA compiler's report: `imported` on every machine."""


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

    @functools.cached_property
    def digest(self) -> str:
        """The name of the entry: equal for equal keys, in every process and version of Python."""
        text = json.dumps({f.name: getattr(self, f.name) for f in dataclasses.fields(self)}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def subject(self) -> tuple[object, ...]:
        """The subject of the measurement, whatever the sizes and the versions of the software."""
        rest = tuple((name, value) for name, value in self.parameters if name not in SIZES + SOFTWARE)
        return (self.primitive, self.device_fingerprint, self.shapes, self.dtype, rest)


@dataclass(frozen=True)
class Entry:
    """The measurements of one key, by name."""

    key: CalibrationKey
    measurements: tuple[tuple[str, Measurement], ...]

    def __post_init__(self) -> None:
        names = [name for name, _ in self.measurements]
        if len(set(names)) < len(names):
            raise ConfigurationError(f"An entry measures each latency once; found {', '.join(names)}.")

    @functools.cached_property
    def text(self) -> str:
        """As JSON: each measurement writes the whole store again."""
        return json_of(self)

    @property
    def imported(self) -> bool:
        """Whether another machine measured it."""
        return any(measurement.source == "imported" for _, measurement in self.measurements)


@dataclass(frozen=True)
class Machine:
    """A machine that was measured: its devices, each with its fingerprint in `calibration`, and their connections.

    `discovered`: PEARL measured the connections itself, with the version `pearl_version`. `imported`: it is not this
    machine.
    """

    devices: tuple[Device, ...]
    connections: tuple[Connection, ...]
    pearl_version: str
    discovered: bool = False
    imported: bool = False

    @property
    def identity(self) -> tuple[object, ...]:
        """Equal for records of the same machine: the newest is kept."""
        return (self.discovered, self.imported, frozenset((d.name, d.calibration) for d in self.devices))


@dataclass(frozen=True)
class _Document:
    """The content of a calibration file."""

    entries: tuple[Entry, ...]
    machines: tuple[Machine, ...] = ()


_Entries: TypeAlias = "dict[str, Entry]"


def default_path() -> Path:
    """`calibration-N.json` in $PEARL_CACHE_DIR or else `~/.cache/pearl`; N is the version of the format.

    Versions of PEARL that share a cache folder thus use separate files.
    """
    return cache_folder() / f"calibration-{VERSION}.json"


@dataclass(frozen=True)
class Imported:
    """Counts of an imported file: all entries, those that are new here, and those of other versions of PEARL."""

    new: int
    total: int
    other_versions: int
    machines: tuple[Machine, ...] = ()


class _UnusableError(Exception):
    """The file is no calibration store of this version; `kind` is part of the name under which it is set aside."""

    def __init__(self, kind: str, what: str) -> None:
        super().__init__(what)
        self.kind = kind


class CalibrationStore:
    """Measurements by CalibrationKey, in `path` (default: `default_path()`).

    With `remeasure`, entries of earlier runs are not returned, unless they were imported, and their machines are not
    current: all is measured again and replaced. Safe for several processes; one store object belongs to one thread. A
    file that is corrupt, or of another version of the format, is renamed, with a warning that names it. Where the file
    cannot be written, the store keeps its measurements in memory and warns once.
    """

    def __init__(self, path: Path | str | None = None, *, remeasure: bool = False) -> None:
        self.path = Path(path) if path is not None else default_path()
        self._remeasure = remeasure
        self._measured_now: set[str] = set()
        self._recorded_now: list[Machine] = []
        self._warned = False
        self._entries: _Entries = {}
        self._machines: tuple[Machine, ...] = ()
        self._seen: tuple[int, ...] = ()  # of the file whose content is in memory
        self._subjects: dict[tuple[object, ...], list[Entry]] | None = None
        try:
            self._read()
        except _UnusableError as found:
            try:
                with self._lock():  # another process may have just replaced the file
                    self._read_or_set_aside()
            except OSError as error:
                self._warn_once(f"cannot be renamed ({error.strerror or error}), but {found}")

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def machines(self) -> tuple[Machine, ...]:
        """The machines that were measured, the newest last."""
        return self._machines

    def is_current(self, machine: Machine) -> bool:
        """Whether the connections of a recorded machine need not be measured again."""
        return not self._remeasure or machine in self._recorded_now

    def get(self, key: CalibrationKey) -> dict[str, Measurement] | None:
        """The measurements of `key` by name, or None."""
        entry = self._entries.get(key.digest)
        if entry is None or (self._remeasure and not entry.imported and key.digest not in self._measured_now):
            return None
        return dict(entry.measurements)

    def similar(self, key: CalibrationKey) -> Sequence[Entry]:
        """The entries that differ from `key` at most in sizes and in versions of the software."""
        if self._subjects is None:
            self._subjects = {}
            for entry in self._entries.values():
                self._subjects.setdefault(entry.key.subject, []).append(entry)
        return self._subjects.get(key.subject, ())

    def has_device(self, fingerprint: str) -> bool:
        """Whether there are measurements of a device with this fingerprint."""
        return any(entry.key.device_fingerprint == fingerprint for entry in self._entries.values())

    def has_actor(self, env: str) -> bool:
        """Whether an Actor in the environment named `env` was measured here."""
        entries = (entry for entry in self._entries.values() if not entry.imported and not self._remeasure)
        return any("actor" in entry.key.primitive and ("env", env) in entry.key.parameters for entry in entries)

    def put(self, key: CalibrationKey, measurements: Mapping[str, Measurement]) -> None:
        """Keep `measurements` in place of any others of this key, and write the file."""
        self._measured_now.add(key.digest)
        self._write({key.digest: Entry(key, tuple(measurements.items()))})

    def record(self, machine: Machine) -> None:
        """Keep the machine in place of an earlier record of it."""
        self._recorded_now.append(machine)
        if machine not in self._machines:
            self._write({}, (machine,))

    def require_writable(self) -> None:
        """Raise ConfigurationError if the file cannot be written."""
        self._write({}, required=True)

    def export(self) -> tuple[str, int]:
        """The text of a calibration file for another machine, and the count of its entries: all that this one measured.

        ConfigurationError if there are none.
        """
        entries = {
            digest: entry
            for digest, entry in self._entries.items()
            if not entry.imported or entry.key.primitive == VENDOR_REPORT
        }
        if not entries:
            raise ConfigurationError(
                f"{self.path} has no measurements of this machine to export. Make some: pearl calibrate SPEC"
            )
        own = tuple(machine for machine in self._machines if not machine.imported)
        return _encode(entries, own), len(entries)

    def import_file(self, path: Path | str) -> Imported:
        """Add the measurements of another machine's calibration file.

        Every value that is taken becomes `imported`. A key that was measured here keeps its own values.
        ConfigurationError if the file is no calibration file, or if the store cannot be written.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or error
            raise ConfigurationError(
                f"The calibration file {path} cannot be read: {why}. `pearl calibrate --export FILE` writes one on the "
                "other machine."
            ) from error
        try:
            theirs, machines = _decode(text)
        except ConfigurationError as error:
            raise ConfigurationError(
                f"{path} is no calibration file of this version: {error} `pearl calibrate --export FILE` writes one."
            ) from error
        new: _Entries = {}
        for digest, entry in theirs.items():
            mine = self._entries.get(digest)
            if mine is None or mine.imported:
                taken = tuple((n, dataclasses.replace(m, source="imported")) for n, m in entry.measurements)
                new[digest] = Entry(entry.key, taken)
        machines = tuple(dataclasses.replace(machine, imported=True) for machine in machines)
        self._write(new, machines, required=True)
        others = sum(entry.key.pearl_version != __version__ for entry in theirs.values())
        return Imported(len(new), len(theirs), others, machines)

    # --- the file ---------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        """Merge the file into memory, unless its content is known; raises _UnusableError."""
        try:
            seen = self._stamp()
            text = self.path.read_text(encoding="utf-8") if seen != self._seen else None
        except FileNotFoundError:
            return
        except UnicodeDecodeError as error:
            raise _UnusableError("corrupt", f"is corrupt: {error}") from error
        except OSError as error:
            self._warn_once(f"cannot be read ({error.strerror or error})")
            return
        if text is None:
            return
        try:
            entries, machines = _decode(text)
        except ConfigurationError as error:
            version = _version(text)
            if version in (None, VERSION):
                raise _UnusableError("corrupt", f"is corrupt: {error}") from error
            what = f"is of version {version}, and this PEARL reads version {VERSION}."
            raise _UnusableError(f"version-{version}", what) from error
        self._keep(self._entries | entries, _newest((*self._machines, *machines)))
        self._seen = seen

    def _read_or_set_aside(self) -> None:
        """`_read` under the lock; a file that cannot be used is renamed, and its content is kept."""
        try:
            self._read()
        except _UnusableError as error:
            aside = self.path.with_name(f"{self.path.name}.{error.kind}-{time.time_ns()}")
            self.path.replace(aside)
            log.warning("The calibration file %s was renamed to %s. It %s", self.path, aside, error)

    def _write(self, new: _Entries, machines: tuple[Machine, ...] = (), *, required: bool = False) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self._lock():
                self._read_or_set_aside()
                self._keep(self._entries | new, _newest((*self._machines, *machines)))
                write_text(self.path, _encode(self._entries, self._machines))
                self._seen = self._stamp()
        except OSError as error:
            self._keep(self._entries | new, _newest((*self._machines, *machines)))
            if required:
                raise ConfigurationError(
                    f"The calibration file {self.path} cannot be written: {error.strerror or error}. Set "
                    "PEARL_CACHE_DIR to a writable folder."
                ) from error
            self._warn_once(f"cannot be written ({error.strerror or error}); measurements stay in memory")

    def _keep(self, entries: _Entries, machines: tuple[Machine, ...]) -> None:
        self._entries, self._machines, self._subjects = entries, machines, None

    def _stamp(self) -> tuple[int, ...]:
        """Numbers that change when the file is replaced or edited."""
        found = self.path.stat()
        return (found.st_ino, found.st_mtime_ns, found.st_size)

    def _warn_once(self, what: str) -> None:
        if not self._warned:
            self._warned = True
            log.warning("The calibration file %s %s. Set PEARL_CACHE_DIR to a writable folder.", self.path, what)

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


def _newest(machines: tuple[Machine, ...]) -> tuple[Machine, ...]:
    """One record of each machine, the newest."""
    found: dict[tuple[object, ...], Machine] = {}
    for machine in machines:
        found.pop(machine.identity, None)  # the newest is last
        found[machine.identity] = machine
    return tuple(found.values())


def _encode(entries: _Entries, machines: tuple[Machine, ...]) -> str:
    texts = ", ".join(entry.text for _, entry in sorted(entries.items()))
    return document_of(FORMAT, VERSION, entries=f"[{texts}]", machines=json_of(machines))


def _decode(text: str) -> tuple[_Entries, tuple[Machine, ...]]:
    document = from_document(_Document, text, FORMAT, VERSION)
    found = {entry.key.digest: entry for entry in document.entries}
    if len(found) < len(document.entries):
        raise ConfigurationError(f"{FORMAT}: expected one entry for each key; found a key twice.")
    return found, document.machines
