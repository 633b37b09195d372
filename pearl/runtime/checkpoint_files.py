"""The files of one checkpoint: a manifest, safetensors files and .npy files, each written once and checked when read.

Every file is flushed to the disk as it is written, and its size and CRC-32 go into the manifest. Arrays of any size
are streamed in chunks. What is read is never unpickled, and only what the manifest names inside the folder is read.
Every CheckpointError says what is wrong with which file; `checkpoint.py` adds which checkpoint that is.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import json
import math
import os
import re
import stat
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import numpy as np

from pearl.errors import CheckpointError, CheckpointReadError
from pearl.lazy_torch import is_tensor
from pearl.process_limits import limit_reached

if TYPE_CHECKING:
    import torch

JsonValue: TypeAlias = "bool | int | float | str | list[JsonValue] | dict[str, JsonValue] | None"
Scalar: TypeAlias = "bool | int | float | str"
Stored: TypeAlias = "torch.Tensor | np.ndarray"
Tensors: TypeAlias = "Mapping[str, Mapping[str, Stored]]"
NumpyArray: TypeAlias = "np.ndarray[Any, Any]"

FORMAT_VERSION = 2
MANIFEST = "manifest.json"

_MANIFEST_LIMIT = 64 * 2**20
_NPY_HEADER_LIMIT = 10_000  # as NumPy's own
_CHUNK_BYTES = 4 * 2**20
_NAME = re.compile(r"\w[\w.-]*(?:/\w[\w.-]*)*")
_CRC32 = re.compile(r"[0-9a-f]{8}")


@dataclass(frozen=True)
class FileEntry:
    """The manifest's entry for one file; the CRC-32 in hexadecimal."""

    bytes: int
    crc32: str


@dataclass(frozen=True)
class Manifest:
    """The content of manifest.json, with the entry of every other file by its path inside the folder."""

    step: int
    identity: Mapping[str, str]
    counters: Mapping[str, Scalar]
    files: Mapping[str, FileEntry]


def tensors_path(group: str) -> str:
    """Where a group of tensors lies in the folder."""
    return f"tensors/{group}.safetensors"


def array_path(name: str) -> str:
    """Where an array lies in the folder."""
    return f"arrays/{name}.npy"


def is_name(name: str) -> bool:
    """Whether `name` may name a group or an array: parts joined by "/" that cannot leave the folder."""
    return _NAME.fullmatch(name) is not None


def is_count(value: object) -> bool:
    """Whether `value` is a whole number in [0, 2**63)."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and 0 <= int(value) < 2**63


# --- Writing --------------------------------------------------------------------------------------------------------


def write_tensors(file: Path, group: str, tensors: Mapping[str, Stored]) -> FileEntry:
    """Write one group of tensors; CheckpointError names the group that safetensors cannot hold."""
    return _write_file(file, [_safetensors_bytes(group, tensors)])


def write_array(file: Path, array: NumpyArray) -> FileEntry:
    """Write `array` as a .npy file in C order, in chunks."""
    return _write_file(file, _npy_chunks(np.asarray(array)))


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write manifest.json: the last file of a checkpoint."""
    content: dict[str, JsonValue] = {
        "format": "pearl checkpoint",
        "format_version": FORMAT_VERSION,
        "pearl_version": _pearl_version(),
        "step": int(manifest.step),
        "identity": dict(manifest.identity),
        "counters": {k: v.item() if isinstance(v, np.generic) else v for k, v in manifest.counters.items()},
        "files": {name: asdict(entry) for name, entry in manifest.files.items()},
    }
    content["crc32"] = manifest_crc32(content)
    _write_file(folder / MANIFEST, [json.dumps(content, indent=1).encode()])


def sync_folder(folder: Path) -> None:
    """Flush the names in `folder` to the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def manifest_crc32(manifest: Mapping[str, JsonValue]) -> str:
    """CRC-32 of a manifest's content, itself left out."""
    content = {key: value for key, value in manifest.items() if key != "crc32"}
    return f"{zlib.crc32(json.dumps(content, sort_keys=True).encode()):08x}"


def _pearl_version() -> str:
    try:
        return importlib.metadata.version("pearl-toolkit")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _write_file(path: Path, chunks: Iterable[bytes]) -> FileEntry:
    """Write `chunks` to a new file, flush it to the disk, and return its entry in the manifest."""
    path.parent.mkdir(parents=True, exist_ok=True)
    size, crc = 0, 0
    with path.open("xb") as stream:
        for chunk in chunks:
            stream.write(chunk)
            size, crc = size + len(chunk), zlib.crc32(chunk, crc)
        stream.flush()
        os.fsync(stream.fileno())
    return FileEntry(size, f"{crc:08x}")


def _npy_chunks(array: NumpyArray) -> Iterator[bytes]:
    """The bytes of a .npy file in C order, at most `_CHUNK_BYTES` of them at once.

    A chunk is copied before it is written and summed, so file and checksum agree even if the array were changing.
    """
    yield _npy_header(array)
    if array.size == 0:
        return
    items = max(1, _CHUNK_BYTES // max(1, array.itemsize))
    if array.flags.c_contiguous:
        flat = array.reshape(-1)
        for start in range(0, array.size, items):
            yield flat[start : start + items].tobytes()
    else:
        flags: Any = ["external_loop", "buffered", "zerosize_ok"]
        chunks: Iterable[Any] = np.nditer(array, flags=flags, buffersize=items, order="C")
        for chunk in chunks:
            yield chunk.tobytes()


def _npy_header(array: NumpyArray) -> bytes:
    stream = io.BytesIO()
    np.lib.format.write_array_header_2_0(
        stream,
        {"descr": np.lib.format.dtype_to_descr(array.dtype), "fortran_order": False, "shape": array.shape},
    )
    return stream.getvalue()


def safetensors_of(tensors: Mapping[str, Stored]) -> bytes:
    """The tensors, or arrays, in the safetensors format."""
    arrays = {name: np.array(value, order="C") for name, value in tensors.items() if isinstance(value, np.ndarray)}
    if len(arrays) == len(tensors):
        import safetensors.numpy

        return safetensors.numpy.save(arrays)
    import safetensors.torch

    return safetensors.torch.save({name: value for name, value in tensors.items() if is_tensor(value)})


def _safetensors_bytes(group: str, tensors: Mapping[str, Stored]) -> bytes:
    import safetensors

    seen: set[int] = set()  # the format cannot express shared storage: tied weights are stored twice
    plain: dict[str, Stored] = {}
    try:
        for name, tensor in tensors.items():
            if isinstance(tensor, np.ndarray):
                plain[name] = tensor
                continue
            copy = tensor.detach().cpu().contiguous()
            storage = copy.untyped_storage().data_ptr()
            plain[name] = copy.clone() if storage in seen else copy
            seen.add(storage)
        return safetensors_of(plain)
    except (RuntimeError, ValueError, KeyError, NotImplementedError, safetensors.SafetensorError) as error:
        raise CheckpointError(
            f"Tensor group {group!r} cannot be stored: {error}. Dense tensors of a common dtype can."
        ) from error


# --- Reading --------------------------------------------------------------------------------------------------------


def read_manifest(folder: Path) -> Manifest:
    """Read and check manifest.json."""
    path = folder / MANIFEST
    try:
        if _plain_file(folder, MANIFEST).st_size > _MANIFEST_LIMIT:
            raise CheckpointError(f"{MANIFEST} is longer than {_MANIFEST_LIMIT} bytes.")
        content = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_object_of)
    except OSError as error:
        raise _unreadable(MANIFEST, error) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{MANIFEST} is not JSON ({error}).") from error
    if not isinstance(content, dict) or content.get("format") != "pearl checkpoint":
        raise CheckpointError(f'{MANIFEST} does not say "format": "pearl checkpoint".')
    version = content.get("format_version")
    if type(version) is not int or version != FORMAT_VERSION:  # True == 1
        raise CheckpointError(
            f"its format version is {version!r} (written by PEARL {content.get('pearl_version')!r}); "
            f"this PEARL reads version {FORMAT_VERSION}. Load it with the PEARL that wrote it."
        )
    try:
        crc = manifest_crc32(content)
    except RecursionError as error:  # writing needs a deeper stack than reading
        raise CheckpointError(f"{MANIFEST} is nested too deeply ({error}).") from error
    if content.get("crc32") != crc:
        raise CheckpointError(
            f"{MANIFEST} was changed or damaged (CRC-32 {crc}; {content.get('crc32')!r} was written)."
        )
    return _parse_manifest(content)


def _unreadable(name: str, error: OSError) -> CheckpointReadError:
    return CheckpointReadError(f"{name} cannot be read ({error}). {limit_reached(error) or ''}".rstrip())


def _object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; a repeated key is refused, because JSON readers differ in which value they use."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key stands twice in one object")
    return found


def _parse_manifest(content: dict[str, Any]) -> Manifest:
    expected = {"format", "format_version", "pearl_version", "crc32"} | set(Manifest.__dataclass_fields__)
    if unknown := sorted(set(content) - expected):
        raise CheckpointError(f"{MANIFEST} has unknown keys {unknown}.")
    if missing := sorted(expected - set(content)):
        raise CheckpointError(f"{MANIFEST} lacks the keys {missing}.")
    if not isinstance(content["pearl_version"], str):
        raise CheckpointError(f"its pearl_version is {content['pearl_version']!r}; a text was expected.")
    if not is_count(content["step"]):
        raise CheckpointError(f"its step is {content['step']!r}; a whole number in [0, 2**63) was expected.")
    for key, kinds in (
        ("identity", (str,)),
        ("counters", (bool, int, float, str)),
        ("files", (dict,)),
    ):
        if not isinstance(content[key], dict) or not all(isinstance(v, kinds) for v in content[key].values()):
            raise CheckpointError(f"{key!r} in {MANIFEST} does not map names to values of the expected type.")
    files = {name: _parse_entry(name, entry) for name, entry in content["files"].items()}
    return Manifest(content["step"], content["identity"], content["counters"], files)


def _parse_entry(name: str, entry: dict[str, Any]) -> FileEntry:
    in_tensors = name.startswith("tensors/") and name.endswith(".safetensors")
    in_arrays = name.startswith("arrays/") and name.endswith(".npy")
    if not is_name(name) or not (in_tensors or in_arrays):
        raise CheckpointError(
            f"{MANIFEST} names the file {name!r}; only tensors/<group>.safetensors and arrays/<name>.npy "
            "inside the checkpoint are read."
        )
    sound = set(entry) == {"bytes", "crc32"} and is_count(entry["bytes"]) and isinstance(entry["crc32"], str)
    if not sound or not _CRC32.fullmatch(entry["crc32"]):
        raise CheckpointError(f"{MANIFEST} does not give bytes and crc32 of {name!r}; found {entry!r}.")
    return FileEntry(entry["bytes"], entry["crc32"])


def _plain_file(folder: Path, name: str) -> os.stat_result:
    """The status of the file `name`; CheckpointError where it, or a folder on the way to it, is a link.

    A link could lead outside the checkpoint.
    """
    path = folder
    *parents, _ = parts = name.split("/")
    for count, part in enumerate(parts, 1):
        path = path / part
        status = path.lstat()
        if count <= len(parents) and not stat.S_ISDIR(status.st_mode):
            raise CheckpointError(f"{'/'.join(parts[:count])} is not a plain folder.")
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{name} is not a plain file.")
    return status


def check_file(folder: Path, name: str, entry: FileEntry) -> None:
    """Raise CheckpointError unless the file `name` has the size and CRC-32 of its entry."""
    file = folder / name
    try:
        status = _plain_file(folder, name)
        if status.st_size != entry.bytes:
            raise CheckpointError(f"{name} has {status.st_size} bytes; {entry.bytes} were written.")
        crc = 0
        with file.open("rb", buffering=0) as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                crc = zlib.crc32(chunk, crc)
    except FileNotFoundError:
        raise CheckpointError(f"{name} is missing.") from None
    except OSError as error:
        raise _unreadable(name, error) from error
    if f"{crc:08x}" != entry.crc32:
        raise CheckpointError(f"{name} has CRC-32 {crc:08x}; {entry.crc32} was written. Its content is damaged.")


def read_tensors(folder: Path, name: str) -> dict[str, Stored]:
    """The tensors of the safetensors file `name` as arrays, which do not need torch.

    Where one has a dtype that NumPy lacks, such as bfloat16, they are tensors on the CPU.
    """
    import safetensors.numpy

    file = folder / name
    try:
        found: Mapping[str, Any] = {}
        with contextlib.suppress(KeyError, TypeError):  # for a dtype that NumPy lacks
            found = safetensors.numpy.load_file(file)
        # Another package, such as ml_dtypes, may have registered the dtype in NumPy; torch does not know it there.
        if not found or any(array.dtype.isbuiltin != 1 for array in found.values()):
            import safetensors.torch

            return {key: tensor.clone() for key, tensor in safetensors.torch.load_file(file).items()}
        # Copied, because they may lie in a map of the file.
        return {key: np.array(array) for key, array in found.items()}
    except OSError as error:
        raise _unreadable(name, error) from error
    except Exception as error:  # SafetensorError, and what torch and Python make of a header: RuntimeError, ...
        raise CheckpointError(f"{name} is not a safetensors file ({error}).") from error


def read_array(folder: Path, name: str, mmap: bool) -> NumpyArray:
    """The array in the .npy file `name`; with `mmap` a read-only map of it."""
    try:
        _check_npy(folder / name)
        array: NumpyArray = np.load(folder / name, mmap_mode="r" if mmap else None, allow_pickle=False)
    except OSError as error:
        raise _unreadable(name, error) from error
    except Exception as error:  # NumPy promises ValueError, and lets TokenError, SyntaxError, OverflowError out
        raise CheckpointError(f"{name} is not a .npy file of plain numbers ({error}).") from error
    return array


def _check_npy(file: Path) -> None:
    """Raise ValueError unless the header promises what the file holds: NumPy would also open archives and pickles."""
    with file.open("rb") as stream:
        version = np.lib.format.read_magic(stream)
        if version != (2, 0):
            raise ValueError(f"its format is {version}; (2, 0) was written")
        start = stream.tell()
        length = int.from_bytes(stream.read(4), "little")
        if length > _NPY_HEADER_LIMIT:  # before NumPy allocates it
            raise ValueError(f"its header is said to be {length} bytes long; at most {_NPY_HEADER_LIMIT} are read")
        stream.seek(start)
        shape, _, dtype = np.lib.format.read_array_header_2_0(stream)
        held = file.stat().st_size - stream.tell()
    promised = math.prod(shape) * dtype.itemsize
    if dtype.hasobject or min(shape, default=0) < 0 or promised != held:
        raise ValueError(f"its header promises shape {shape} of {dtype}, {promised} bytes; {held} follow")


def refuse(where: Path, name: str, expected: str, found: object) -> NoReturn:
    """Raise CheckpointError: `name` of the checkpoint in `where` is `found` instead of `expected`."""
    text = repr(found)
    shown = text if len(text) <= 80 else f"{text[:77]}..."
    raise CheckpointError(
        f"{name} of the checkpoint in {where} must be {expected}; found {shown}. "
        "The checkpoint is damaged: move it away, and resume from another."
    )


def saved_count(counters: Mapping[str, Any], name: str, where: Path) -> int:
    """The whole number `name` of a checkpoint in `where`; CheckpointError if it is something else."""
    if not is_count(counters.get(name)):
        refuse(where, name, "a whole number of at least 0", counters.get(name))
    return int(counters[name])
