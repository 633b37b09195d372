"""The HTML report in a real browser."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from browser import WIDTHS, browse, found_in, needs_chromium
from report_runs import server, write_run
from test_html_report import HOSTILE, hostile_run

from composer.html_report.page import report_page

# Loads the report into a frame of a width, and writes into the page what the frame looks like.
PROBE = """<!DOCTYPE html><meta charset="utf-8"><iframe id="frame" style="border:0;width:WIDTHpx;height:900px"></iframe>
<pre id="found"></pre>
<script>
const frame = document.getElementById("frame");
frame.onload = () => {
  const inner = frame.contentWindow, page = inner.document, all = [...page.querySelectorAll("body *")];
  const style = (selector) => inner.getComputedStyle(page.querySelector(selector));
  document.getElementById("found").textContent = JSON.stringify({
    width: page.documentElement.scrollWidth,
    beyond: all.filter((e) => e.getBoundingClientRect().right > inner.innerWidth + 1).map((e) => e.outerHTML),
    drawings: [...page.querySelectorAll("svg.drawing")].map((e) => e.getBoundingClientRect().width),
    text: Math.min(...[...page.querySelectorAll("svg.drawing text")].map((e) => e.getBoundingClientRect().height)),
    requests: inner.performance.getEntriesByType("resource").length,
    owned: [inner.owned ?? null, window.owned ?? null],
    scripts: page.scripts.length,
    styled: style("main").maxWidth,
    background: style("body").backgroundColor,
    title: page.title,
  });
};
frame.srcdoc = PAGE;
</script>"""


pytestmark = needs_chromium


def look(folder: Path, page: str, width: int, *arguments: str) -> dict[str, Any]:
    """What the browser makes of the page, at a width in pixels."""
    source = json.dumps(page).replace("</", "<\\/").replace("<!--", "<\\!--")
    probe = folder / "probe.html"
    probe.write_text(PROBE.replace("WIDTH", str(width)).replace("PAGE", source), encoding="utf-8")
    dumped = browse(folder, "--virtual-time-budget=5000", "--dump-dom", *arguments, probe.as_uri()).stdout
    return dict(found_in(dumped))


@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_fits_the_screen_and_loads_nothing(tmp_path: Path, width: int) -> None:
    long_name = "a-device-with-a-name-of-the-most-characters-that-are-allowed-0123"
    page = report_page(write_run(tmp_path / "run", server(cpu=long_name[:64])))
    found = look(tmp_path, page, width)
    assert found["width"] <= width
    assert found["beyond"] == []
    assert len(found["drawings"]) >= 9
    assert min(found["drawings"]) > 300
    assert found["text"] >= 11
    assert (found["requests"], found["scripts"]) == (0, 0)
    assert found["styled"] == "1120px"  # the policy lets the page's own style sheet through
    assert found["title"] == "dqn-Pong: PEARL report"


def test_a_run_with_a_hostile_name_runs_nothing(tmp_path: Path) -> None:
    found = look(tmp_path, report_page(hostile_run(tmp_path / "run")), 390)
    assert found["owned"] == [None, None]
    assert (found["requests"], found["scripts"]) == (0, 0)
    assert found["width"] <= 390
    assert found["title"].startswith(HOSTILE[:30])


def test_the_page_is_light_or_dark_as_the_reader_likes(tmp_path: Path) -> None:
    page = report_page(write_run(tmp_path / "run"))
    light = look(tmp_path, page, 1280, "--blink-settings=preferredColorScheme=1")
    dark = look(tmp_path, page, 1280, "--blink-settings=preferredColorScheme=0")
    assert light["background"] == "rgb(246, 247, 249)"
    assert dark["background"] == "rgb(13, 17, 23)"


def test_the_page_prints(tmp_path: Path) -> None:
    path, printed = tmp_path / "report.html", tmp_path / "report.pdf"
    path.write_text(report_page(write_run(tmp_path / "run")), encoding="utf-8")
    browse(tmp_path, f"--print-to-pdf={printed}", path.as_uri())
    content = printed.read_bytes()
    assert content.startswith(b"%PDF")
    assert 3 <= len(re.findall(rb"/Type\s*/Page\b", content)) <= 12
