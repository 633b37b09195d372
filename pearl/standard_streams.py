"""Standard output and error that never fail: when their reader is gone, the program continues silently."""

from __future__ import annotations

import codecs
import contextlib
import io
import logging
import os
import select
import sys
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_ESCAPES = "pearl-escapes"  # a handler of encoding errors
# The mark of a text that was cut, and the spinner's frames.
_ONE_CELL = {"…": "~", **dict.fromkeys(map(chr, range(0x2800, 0x2900)), "*")}
_PATIENCE_S = 1.0  # wait for a slow reader of a non-blocking stream

_log = logging.getLogger("pearl.runtime")


def keep_standard_streams() -> None:
    """Make writing to `sys.stdout` and `sys.stderr` never fail; may be called again.

    Output that cannot be written (the reader is gone, the disk is full, the terminal was closed) is dropped. Characters
    that the stream's encoding lacks, such as those of a path in an ASCII locale, are written as escapes; those with
    which rich shortens and draws lines as one ASCII character, as an escape would make the line too long. Closed
    descriptors 0 to 2 are opened on /dev/null, so that no file of the program gets their numbers. Streams that other
    code has replaced are left alone.
    """
    for descriptor in range(3):
        _fill(descriptor)
    if sys.stdin is None:
        sys.stdin = Path(os.devnull).open(encoding="utf-8")  # noqa: SIM115 (for good)
    sys.stdout = _kept(sys.stdout, sys.__stdout__, 1)
    sys.stderr = _kept(sys.stderr, sys.__stderr__, 2)


class _Forgiving(io.FileIO):
    """A descriptor that is redirected to /dev/null at its first error, which the writer does not see."""

    def write(self, data: ReadableBuffer, /) -> int:
        size = memoryview(data).nbytes
        try:
            written = super().write(data)
            if written is None:  # a non-blocking stream is full
                select.select([], [self.fileno()], [], _PATIENCE_S)
                written = super().write(data)
        except OSError as error:
            _lead_to_null(self.fileno())
            _log.info("File descriptor %d cannot be written any more (%s): the run goes on.", self.fileno(), error)
            return size
        return size if written is None else written


def _kept(stream: TextIO | None, original: TextIO | None, descriptor: int) -> TextIO:
    if stream is None:
        return Path(os.devnull).open("w", encoding="utf-8")
    if stream is not original or not isinstance(stream, io.TextIOWrapper):
        return stream
    try:
        stream.flush()
    except OSError:
        _lead_to_null(descriptor)
        with contextlib.suppress(OSError):
            stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_Forgiving(descriptor, "w", closefd=False)),
        encoding=stream.encoding,
        errors=_errors(stream),
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def _errors(stream: io.TextIOWrapper) -> str | None:
    """The stream's handler of characters that its encoding lacks, or one that does not raise in its place."""
    found = stream.errors
    # For the second, an ASCII locale's, only bytes that were no text are exempt; UTF-8 lacks nothing else.
    raises = found == "strict" or (found == "surrogateescape" and codecs.lookup(stream.encoding).name != "utf-8")
    return _ESCAPES if raises else found


def _escaped(error: UnicodeError) -> tuple[str | bytes, int]:
    """The escape of the first character that cannot be encoded, or what is written in its place."""
    if isinstance(error, UnicodeEncodeError):
        error.end = error.start + 1
        if short := _ONE_CELL.get(error.object[error.start]):
            return short, error.end
    return codecs.backslashreplace_errors(error)


codecs.register_error(_ESCAPES, _escaped)


def _fill(descriptor: int) -> None:
    try:
        os.fstat(descriptor)
    except OSError:
        _lead_to_null(descriptor)


def _lead_to_null(descriptor: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    if null == descriptor:
        os.set_inheritable(null, True)
    else:
        os.dup2(null, descriptor)
        os.close(null)
