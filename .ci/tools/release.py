"""Make a release from the changelog: `make release VERSION=x.y.z`, or `python .ci/tools/release.py x.y.z [--dry-run]`.

[Unreleased] of CHANGELOG.md becomes the section of the version, with the date; the version goes into all files that
state it; both are committed and tagged. Nothing is pushed.
"""

from __future__ import annotations

import argparse
import datetime
import difflib
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from pearl.errors import PearlError

ROOT = Path(__file__).resolve().parents[2]
CHANGELOG = "CHANGELOG.md"
# Where the version stands, and what precedes it on its line.
VERSION_LINES = {"pyproject.toml": 'version = "', "pearl/__init__.py": '__version__ = "', "CITATION.cff": 'version: "'}
UNRELEASED = "## [Unreleased]\n"


class ReleaseError(PearlError):
    """The version cannot be released from the present state of the repository."""


def git(root: Path, *arguments: str) -> str:
    """Return the output of a git command in `root`; raises ReleaseError with its message if it fails."""
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, timeout=60)
    if done.returncode != 0:
        raise ReleaseError(f"git {' '.join(arguments)} failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def present_version(root: Path) -> str:
    """Return the version that all files state; raises ReleaseError if one lacks it or differs."""
    found = {}
    for name, before in VERSION_LINES.items():
        match = re.search(rf'^{re.escape(before)}([^"]+)"', (root / name).read_text(encoding="utf-8"), re.MULTILINE)
        if match is None:
            raise ReleaseError(f"Expected a line that begins with {before!r} in {name}; found none.")
        found[name] = match[1]
    if len(set(found.values())) != 1:
        raise ReleaseError(f"Expected one version in all files; found {found}. Make them equal first.")
    return next(iter(found.values()))


def numbers(version: str) -> tuple[int, ...]:
    """Return the three numbers of a version; raises ReleaseError for anything but x.y.z."""
    if not re.fullmatch(r"(0|[1-9][0-9]*)(\.(0|[1-9][0-9]*)){2}", version, re.ASCII):
        raise ReleaseError(f"Expected a version x.y.z, such as 0.2.0; found {version!r}.")
    return tuple(map(int, version.split(".")))


def released_changelog(text: str, version: str, date: str) -> str:
    """Return the changelog with the entries of [Unreleased] as those of `version`, under an empty [Unreleased].

    Raises ReleaseError if there is no such section, if it has no entry, or if it has one for `version`.
    """
    if text.count(UNRELEASED) != 1:
        raise ReleaseError(f"Expected one line {UNRELEASED.strip()!r} in {CHANGELOG}; found {text.count(UNRELEASED)}.")
    if f"## [{version}]" in text:
        raise ReleaseError(f"{CHANGELOG} has a section of {version} already.")
    before, after = text.split(UNRELEASED)
    entries = after.split("\n## [")[0]
    if not re.search(r"^- ", entries, re.MULTILINE):
        raise ReleaseError(f"[Unreleased] of {CHANGELOG} has no entry: there is nothing to release.")
    return f"{before}{UNRELEASED}\n## [{version}] - {date}\n{after}"


def changed_files(root: Path, version: str, date: str) -> dict[str, str]:
    """Return the new text of each file that the release changes; raises ReleaseError if `version` cannot follow."""
    present = present_version(root)
    if numbers(version) <= numbers(present):
        raise ReleaseError(f"Expected a version after {present}; found {version}.")
    texts = {name: (root / name).read_text(encoding="utf-8") for name in (CHANGELOG, *VERSION_LINES)}
    for name, before in VERSION_LINES.items():
        texts[name] = texts[name].replace(f'{before}{present}"', f'{before}{version}"', 1)
    texts["CITATION.cff"] = re.sub(r"^date-released: .*\n", "", texts["CITATION.cff"], flags=re.MULTILINE)
    texts["CITATION.cff"] += f"date-released: {date}\n"
    texts[CHANGELOG] = released_changelog(texts[CHANGELOG], version, date)
    return texts


def release(root: Path, version: str, date: str, *, dry_run: bool) -> str:
    """Commit and tag `version`; return the changes as a diff. With `dry_run`, only return them.

    Raises ReleaseError, having changed nothing, if files differ from the last commit, if the tag exists, or if
    `changed_files` does.
    """
    texts = changed_files(root, version, date)
    tag = f"v{version}"
    if git(root, "tag", "--list", tag).strip():
        raise ReleaseError(f"The tag {tag} exists already.")
    if dirty := git(root, "status", "--porcelain").splitlines():
        raise ReleaseError(
            f"Expected no uncommitted change; found {len(dirty)}, the first: {dirty[0]}. Commit or stash."
        )
    diff: list[str] = []
    for name, text in texts.items():
        lines = (root / name).read_text(encoding="utf-8").splitlines(keepends=True)
        diff += difflib.unified_diff(lines, text.splitlines(keepends=True), f"a/{name}", f"b/{name}", n=1)
        if not dry_run:
            (root / name).write_text(text, encoding="utf-8")
    if not dry_run:
        git(root, "add", *texts)
        git(root, "commit", "--quiet", "--message", f"Release {version}")
        git(root, "tag", "--annotate", tag, "--message", f"PEARL {version}")
    return "".join(diff)


def main(arguments: Sequence[str] | None = None) -> None:
    """Release the version that the command line names."""
    parser = argparse.ArgumentParser(prog="python .ci/tools/release.py", description=__doc__)
    parser.add_argument("version", metavar="x.y.z")
    parser.add_argument("--dry-run", action="store_true", help="show what would change, and change nothing")
    options = parser.parse_args(arguments)
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    print(release(ROOT, options.version, today, dry_run=options.dry_run), end="")
    if options.dry_run:
        print("Dry run: nothing was changed.")
    else:
        print(f"Committed and tagged v{options.version}. Publish it: git push --follow-tags")


if __name__ == "__main__":
    try:
        main()
    except ReleaseError as error:
        sys.exit(f"Error: {error}")
