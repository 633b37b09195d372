"""Pages in a real browser: Chromium on the PATH, or one that Playwright installed."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

WIDTHS = (390, 1280)  # of a phone and of a desktop, in pixels
_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_FOUND = re.compile(r'<pre id="found">(.*?)</pre>', re.DOTALL)


def chromium() -> str | None:
    """The path of a Chromium, or None."""
    for name in _NAMES:
        if found := shutil.which(name):
            return found
    cache = Path(os.environ.get("PLAYWRIGHT_BROWSERS_PATH") or Path.home() / ".cache" / "ms-playwright")
    installed = sorted(cache.glob("chromium*/*/chrome")) + sorted(cache.glob("chromium*/*/headless_shell"))
    return str(installed[-1]) if installed else None


needs_chromium = pytest.mark.skipif(
    chromium() is None,
    reason="no Chromium on the PATH or from Playwright: apt-get install chromium, or playwright install chromium",
)


def browse(folder: Path, *arguments: str, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
    """Run Chromium without a window, a profile of its user, or a network other than this machine's."""
    program = chromium()
    assert program is not None
    options = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run")
    profile = f"--user-data-dir={folder / 'profile'}"
    rules = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
    command = [program, *options, profile, rules, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=True)


def found_in(dumped: str) -> Any:
    """What a probe wrote as JSON into its element "found", from the page as --dump-dom printed it."""
    found = _FOUND.search(dumped)
    assert found is not None, dumped[-2000:]
    return json.loads(html.unescape(found[1]))
