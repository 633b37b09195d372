"""Files that are replaced atomically: a reader finds the old content or the new, never a part, even after a kill."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replace_file(path: Path | str, *, durable: bool = True, executable: bool = False) -> Iterator[BinaryIO]:
    """Open a new file for writing; when the block ends without an error, the file takes the place of `path`.

    The folder must exist. Permissions follow the umask, with execution if `executable`. `durable` flushes the content
    to the disk before the rename, so that the file also survives a power cut; without it, only a kill of the process.
    A link at `path` stays, and its target is replaced. Raises OSError and leaves `path` unchanged. A path that is not a
    plain file (/dev/stdout) is written to directly.
    """
    if Path(path).exists() and not Path(path).is_file():  # /dev/stdout, /dev/null: nothing there can be replaced
        with Path(path).open("wb") as stream:
            yield stream
        return
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f".{target.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    temporary.unlink(missing_ok=True)  # left by a killed process with the same id
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o777 if executable else 0o666)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            yield stream
            stream.flush()
            if durable:
                os.fsync(stream.fileno())
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_bytes(path: Path | str, content: bytes, *, durable: bool = True, executable: bool = False) -> None:
    """Replace the content of `path`, as `replace_file` does."""
    with replace_file(path, durable=durable, executable=executable) as stream:
        stream.write(content)


def write_text(path: Path | str, text: str, *, durable: bool = True, executable: bool = False) -> None:
    """Replace the content of `path` with `text` in UTF-8, as `replace_file` does."""
    write_bytes(path, text.encode("utf-8"), durable=durable, executable=executable)
