"""What must hold of the checkpoint reader, whatever bytes a checkpoint consists of.

One input is a whole checkpoint folder: a byte of flags, then its files, each after `SEPARATOR` as a path, a line feed
and the content. With the flag `REPAIR` sizes and checksums of the manifest are made to fit, so that a changed byte is
met by the parser behind the checksum and not by the checksum alone.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch  # noqa: F401 - or the first input that holds tensors pays for its import

from pearl.backends.cpu.replay import NativeReplayManager
from pearl.errors import CheckpointError, ReplayError
from pearl.replay.reference import ReferenceReplayManager
from pearl.runtime.checkpoint import CheckpointState, load_checkpoint, save_checkpoint
from pearl.runtime.checkpoint_files import manifest_crc32

SEPARATOR = b"\n--\xff--\n"
REPAIR, IN_MEMORY = 1, 2
CAPACITY = 8  # of the replays that the seeds are of
MODES = ("prioritized", "uniform", "top_k", "fifo", "lifo")

# Reading takes a chunk of 4 MiB; a byte of JSON or of a header may become an object of some 100 bytes.
_MEMORY_BASE, _MEMORY_FACTOR = 16 * 2**20, 400
_PATH = re.compile(rb"[A-Za-z0-9_][A-Za-z0-9_.-]*(?:/[A-Za-z0-9_][A-Za-z0-9_.-]*){0,3}")
_unpickled: list[str] = []


def _note_unpickling(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "pickle.find_class":
        _unpickled.append(repr(arguments))


sys.addaudithook(_note_unpickling)


def pack(folder: Path, flags: int) -> bytes:
    """The input that stands for the checkpoint `folder`."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    parts = [str(path.relative_to(folder)).encode() + b"\n" + path.read_bytes() for path in files]
    return SEPARATOR.join([bytes([flags]), *parts])


def unpack(data: bytes, folder: Path) -> int:
    """Write the files of `data` into a new `folder` and return its flags."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    head, *parts = data.split(SEPARATOR)
    files: dict[str, bytes] = {}
    for part in parts:
        name, _, content = part.partition(b"\n")
        if _PATH.fullmatch(name) and len(name) < 100:
            files[name.decode()] = content
    flags = head[0] if head else 0
    if flags & REPAIR:
        files["manifest.json"] = _repaired(files)
    for name, content in files.items():
        path = folder / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        except OSError:  # one path is a folder of another
            continue
    return flags


def _repaired(files: dict[str, bytes]) -> bytes:
    """The manifest, with sizes and checksums that fit the files it names."""
    manifest = files.get("manifest.json", b"")
    try:
        content = json.loads(manifest)
        for name in content["files"].keys() & files.keys():
            content["files"][name] = {"bytes": len(files[name]), "crc32": f"{zlib.crc32(files[name]):08x}"}
        content["crc32"] = manifest_crc32(content)
        return json.dumps(content).encode()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return manifest


def check(data: bytes, workspace: Path, *, traced: bool = True) -> CheckpointState | None:
    """Assert that `data` is read as a valid state, or refused by CheckpointError; return the state, if any.

    Any other exception passes through. `workspace` is a folder for the files, preferably in memory. `traced` is whether
    the memory that reading takes is asserted too.
    """
    folder = workspace / "checkpoint-000000001"
    flags = unpack(data, folder)
    _unpickled.clear()
    if traced:
        tracemalloc.start()
    try:
        state = load_checkpoint(folder, mmap=not flags & IN_MEMORY)
    except CheckpointError:
        state = None
    finally:
        taken = tracemalloc.get_traced_memory()[1]  # 0 where it is not traced
        tracemalloc.stop()
        assert not _unpickled, f"unpickled {_unpickled}"
        assert taken <= _MEMORY_BASE + _MEMORY_FACTOR * len(data), f"{taken} bytes for an input of {len(data)}"
    if state is not None:
        _check_round_trip(state, len(data), workspace / "again")
        _check_replay(state)
    return state


def _check_round_trip(state: CheckpointState, size: int, directory: Path) -> None:
    """Assert that what was loaded can be saved, comes back the same, and is no larger than what it was read from."""
    held = sum(array.nbytes for array in state.arrays.values())
    held += sum(tensor.nbytes for group in state.tensors.values() for tensor in group.values())
    assert held <= size
    shutil.rmtree(directory, ignore_errors=True)
    again = load_checkpoint(save_checkpoint(directory, state), state.identity)
    assert (again.step, again.identity, again.tensors.keys()) == (state.step, state.identity, state.tensors.keys())
    assert repr(again.counters) == repr(state.counters)  # NaN is unequal to itself, but written alike
    for name, array in state.arrays.items():
        found = again.arrays[name]
        assert (found.dtype, found.shape, found.tobytes()) == (array.dtype, array.shape, array.tobytes()), name
    for group, tensors in state.tensors.items():
        assert {n: (t.dtype, t.shape) for n, t in again.tensors[group].items()} == {
            n: (t.dtype, t.shape) for n, t in tensors.items()
        }


def _check_replay(state: CheckpointState) -> None:
    """Assert that both Replay Managers take the state over alike, or refuse it alike and stay as they were."""
    parts = {**state.arrays, **state.counters}
    saved = {name.removeprefix("replay/"): value for name, value in parts.items() if name.startswith("replay/")}
    mode, limit = state.counters.get("replay/mode"), state.counters.get("replay/max_times_sampled")
    options: dict[str, Any] = {"mode": mode if mode in MODES else MODES[0], "max_times_sampled": 2 if limit == 2 else 0}
    outcomes = []
    for manager in (NativeReplayManager, ReferenceReplayManager):
        replay = manager(CAPACITY, **options)
        try:
            replay.load_state_dict(saved)
        except CheckpointError as error:
            outcomes.append([str(error)])
            assert replay.filled == 0
            continue
        drawn: list[object] = [replay.filled, replay.total]
        try:
            sample = replay.sample(4)
        except ReplayError:
            drawn.append("nothing can be sampled")
        else:
            assert np.all((sample.indices >= 0) & (sample.indices < CAPACITY))
            assert np.all(np.asarray(saved["generations"])[sample.indices] > 0)
            drawn += [column.tobytes() for column in sample]
        outcomes.append(drawn)
    assert outcomes[0] == outcomes[1]
