"""Files that are replaced, wherever PEARL replaces one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from pearl.atomic_file import replace_file, write_bytes, write_text
from pearl.byte_size import readable_size
from pearl.runtime.outcome import save_weights, write_summary


@pytest.fixture
def umask() -> Iterator[Callable[[int], int]]:
    """Sets the umask for one test."""
    before = os.umask(0o022)
    yield os.umask
    os.umask(before)


class Trainer:
    """As much of one as has weights."""

    def __init__(self) -> None:
        self.network = torch.nn.Linear(2, 1)


def weights(path: Path) -> None:
    save_weights(Trainer(), path)  # type: ignore[arg-type]


def summary(path: Path) -> None:
    write_summary(path, {"program": "p"})


WRITERS = pytest.mark.parametrize("write", [weights, summary, lambda path: write_text(path, "text")])


@WRITERS
def test_a_reader_never_sees_a_part(tmp_path: Path, write: Callable[[Path], None]) -> None:
    path = tmp_path / "file"
    write(path)
    with path.open("rb") as reader:
        write(path)
        assert os.fstat(reader.fileno()).st_nlink == 0, "the file that a reader has open was rewritten in place"
    assert path.stat().st_size > 0
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


@WRITERS
@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_the_umask_is_respected(
    tmp_path: Path, umask: Callable[[int], int], write: Callable[[Path], None], mask: int, mode: int
) -> None:
    umask(mask)
    write(tmp_path / "file")
    assert (tmp_path / "file").stat().st_mode & 0o777 == mode


def test_a_program_may_be_executed_by_those_who_may_read_it(tmp_path: Path, umask: Callable[[int], int]) -> None:
    umask(0o027)
    write_text(tmp_path / "program", "#!/bin/sh\n", executable=True)
    assert (tmp_path / "program").stat().st_mode & 0o777 == 0o750


def test_a_failure_leaves_the_old_content_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(TypeError), replace_file(path) as stream:
        stream.writelines([b"new", "text"])  # type: ignore[list-item]
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    (tmp_path / "link").symlink_to("file")
    write_bytes(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "new"


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    receive, send = os.pipe()
    try:
        write_text(f"/dev/fd/{send}", "text")
        assert os.read(receive, 100) == b"text"
    finally:
        os.close(receive)
        os.close(send)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 KB"), (999_940, "999.9 KB"), (999_950, "1.0 MB"), (56.44e9, "56.4 GB")],
)
def test_sizes_are_readable(nbytes: float, text: str) -> None:
    assert readable_size(nbytes) == text
    assert readable_size(5e15) == "5,000.0 TB"
