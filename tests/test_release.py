"""A release: from the changelog into a commit and a tag, or a refusal that changes nothing."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tools import release as tool

import pearl

CHANGELOG = """\
# Changelog

## [Unreleased]

### Added

- A thing.

## [0.1.0]

- The first thing.
"""


def git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A repository with one commit."""
    root = tmp_path_factory.mktemp("begun")
    for name, text in {
        "CHANGELOG.md": CHANGELOG,
        "pyproject.toml": '[project]\nname = "pearl-toolkit"\nversion = "0.1.0"\n',
        "pearl/__init__.py": '__version__ = "0.1.0"\n',
        "CITATION.cff": 'cff-version: 1.2.0\nversion: "0.1.0"\n',
    }.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        for role in ("AUTHOR", "COMMITTER"):
            patch.setenv(f"GIT_{role}_NAME", "tester")
            patch.setenv(f"GIT_{role}_EMAIL", "tester@localhost")
        git(root, "init", "--quiet")
        git(root, "add", ".")
        git(root, "commit", "--quiet", "--message", "Begin")
        yield root


@pytest.fixture
def root(begun, tmp_path):
    shutil.copytree(begun, tmp_path, dirs_exist_ok=True)
    return tmp_path


def state(root: Path) -> tuple[str, ...]:
    return git(root, "for-each-ref"), git(root, "status", "--porcelain")


def test_a_release_is_one_commit_and_one_tag(root):
    tool.release(root, "0.2.0", "2026-12-01", dry_run=False)
    assert git(root, "log", "--format=%s").splitlines() == ["Release 0.2.0", "Begin"]
    assert git(root, "describe").strip() == "v0.2.0"
    assert git(root, "status", "--porcelain") == ""
    assert tool.present_version(root) == "0.2.0"
    changelog = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    dated = "## [Unreleased]\n\n## [0.2.0] - 2026-12-01\n\n### Added\n\n- A thing.\n\n## [0.1.0]\n"
    assert dated in changelog
    assert (root / "CITATION.cff").read_text(encoding="utf-8").endswith("date-released: 2026-12-01\n")


def test_the_date_of_a_second_release_replaces_that_of_the_first(root):
    tool.release(root, "0.2.0", "2026-12-01", dry_run=False)
    changelog = root / "CHANGELOG.md"
    changelog.write_text(changelog.read_text().replace("[Unreleased]\n", "[Unreleased]\n\n- More.\n"), encoding="utf-8")
    git(root, "commit", "--all", "--quiet", "--message", "More")
    tool.release(root, "0.10.0", "2026-12-24", dry_run=False)
    assert (root / "CITATION.cff").read_text(encoding="utf-8").count("date-released") == 1
    assert "- More." in changelog.read_text(encoding="utf-8").split("## [0.2.0]")[0]


def test_a_dry_run_shows_the_changes_and_makes_none(root):
    before = state(root)
    diff = tool.release(root, "1.0.0", "2026-12-01", dry_run=True)
    assert '+version = "1.0.0"' in diff
    assert "+## [1.0.0] - 2026-12-01" in diff
    assert state(root) == before


def test_a_version_that_cannot_follow_is_refused(root):
    before = state(root)
    for version in ("0.1.0", "0.0.9", "v0.2.0", "0.2", "0.2.0rc1", "0.2.0\n", "0.02.0", "", "--help"):
        with pytest.raises(tool.ReleaseError, match="Expected a version"):
            tool.release(root, version, "2026-12-01", dry_run=False)
        assert state(root) == before, version


def refuses(root: Path, message: str) -> None:
    before = state(root)
    with pytest.raises(tool.ReleaseError, match=message):
        tool.release(root, "0.2.0", "2026-12-01", dry_run=False)
    assert state(root) == before


def test_uncommitted_changes_and_new_files_are_refused(root):
    (root / "note.txt").write_text("left behind", encoding="utf-8")
    refuses(root, r"found 1, the first: \?\? note.txt")


def test_a_tag_that_exists_is_refused(root):
    git(root, "tag", "v0.2.0")
    refuses(root, "The tag v0.2.0 exists already")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("- A thing.\n", "", "nothing to release"),
        ("## [Unreleased]\n", "", "found 0"),
        ("## [0.1.0]", "## [0.2.0]", "has a section of 0.2.0 already"),
    ],
)
def test_a_changelog_without_entries_of_its_own_is_refused(root, old, new, message):
    (root / "CHANGELOG.md").write_text(CHANGELOG.replace(old, new), encoding="utf-8")
    git(root, "commit", "--all", "--quiet", "--message", "Change")
    refuses(root, message)


def test_files_that_state_different_versions_are_refused(root):
    (root / "pearl" / "__init__.py").write_text('__version__ = "0.1.1"\n', encoding="utf-8")
    git(root, "commit", "--all", "--quiet", "--message", "Change")
    refuses(root, "Expected one version in all files")


def test_the_files_of_this_repository_state_one_version():
    assert tool.present_version(tool.ROOT) == pearl.__version__


def test_an_error_is_one_message_with_exit_status_1():
    command = (sys.executable, ".ci/tools/release.py", "0.0.1", "--dry-run")
    done = subprocess.run(command, cwd=tool.ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.startswith("Error: Expected a version after")
    assert "Traceback" not in done.stderr
