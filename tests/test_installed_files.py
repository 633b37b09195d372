"""Files of installed distributions: those of a wheel by its RECORD, of others as their metadata lists them."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

import pytest

from pearl.backends.installed_files import installed_files

LIBRARY = re.compile(r"libfoo\.so\.(\d+)")


def metadata(folder: Path, name: str, kind: str) -> Path:
    """The metadata folder of a distribution in `folder`, as pip makes it."""
    made = folder / f"{name.replace('-', '_')}-1.0.{kind}"
    made.mkdir(parents=True)
    (made / ("METADATA" if kind == "dist-info" else "PKG-INFO")).write_text(f"Name: {name}\nVersion: 1.0\n")
    return made


def test_files_of_a_wheel_are_found_by_their_own_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = metadata(tmp_path, "foo-rt", "dist-info") / "RECORD"
    record.write_text(
        'foo/libfoo.so.12,sha256=abc,5\n../../lib/libfoo.so.13,,\n"a, b/libfoo.so.14",,\n'
        "foo/libfoo.so.txt,,\nlibfoo.so.12/readme,,\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    found = installed_files("foo-rt", LIBRARY.fullmatch)
    assert [file.name for file in found] == ["libfoo.so.12", "libfoo.so.13", "libfoo.so.14"]
    assert found[0] == tmp_path / "foo" / "libfoo.so.12"
    assert found[1].resolve() == (tmp_path / "../../lib/libfoo.so.13").resolve()
    assert found[2].parent == tmp_path / "a, b"
    assert found == [Path(f.locate()) for f in importlib.metadata.files("foo-rt") or [] if LIBRARY.fullmatch(f.name)]
    record.write_text(f"\n{record.read_text()}\n")
    assert installed_files("foo-rt", LIBRARY.fullmatch) == found, "lines may be empty"


def test_files_of_another_distribution_are_found_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = metadata(tmp_path, "foo-egg", "egg-info")
    (folder / "SOURCES.txt").write_text("foo/libfoo.so.12\nfoo/other.py\n")
    (tmp_path / "foo").mkdir()
    (tmp_path / "foo" / "libfoo.so.12").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert installed_files("foo-egg", LIBRARY.fullmatch) == [tmp_path / "foo" / "libfoo.so.12"]


def test_what_is_not_installed_has_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert installed_files("foo-that-nobody-installs", LIBRARY.fullmatch) == []
    metadata(tmp_path, "foo-bare", "dist-info")
    monkeypatch.syspath_prepend(tmp_path)
    assert installed_files("foo-bare", LIBRARY.fullmatch) == []
