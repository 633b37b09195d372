"""The documentation's site, as `make docs` builds it, in a real browser at the width of a phone and of a desktop."""

from __future__ import annotations

import functools
import http.server
import importlib.util
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from browser import WIDTHS, browse, found_in, needs_chromium

ROOT = Path(__file__).parent.parent
SITE = ROOT / "docs" / "_build" / "html"
WORDS = ("replay_ratio", "StopAtReturn", "LunarLander")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),  # the first build takes minutes
    needs_chromium,
    pytest.mark.skipif(
        any(importlib.util.find_spec(one) is None for one in ("sphinx", "myst_nb", "furo")),
        reason="no Sphinx to build the site with: make docs",
    ),
]

# Opens the pages one after another in a frame of a width, and writes into the page what is wrong with them.
PROBE = """<!DOCTYPE html><meta charset="utf-8"><iframe id="frame" style="border:0;width:WIDTHpx;height:900px"></iframe>
<pre id="found"></pre>
<script>
const frame = document.getElementById("frame"), pages = PAGES, words = WORDS;
const wait = (ms) => new Promise((done) => setTimeout(done, ms));
const load = (url) => new Promise((done) => { frame.onload = done; frame.contentWindow.location.replace(url); });
const ids = new Map(), links = [];
const found = {pages: {}, broken: [], searches: {}, menus: {}};
const view = () => frame.contentWindow;

// What is beyond the right edge, unless it is in something that scrolls, or in a drawer beside the page.
const beyond = (element) => {
  if (element.getBoundingClientRect().right <= view().innerWidth + 1) return false;
  for (let one = element; one; one = one.parentElement) {
    const style = view().getComputedStyle(one);
    if (style.position === "fixed" || (one !== element && ["auto", "scroll"].includes(style.overflowX))) return false;
  }
  return true;
};

const look = (page) => {
  const all = [...page.querySelectorAll("body *")];
  const outside = all.filter(beyond);
  const pictures = [...page.querySelectorAll("article img:not(.toggler)")].map((one) => ({
    source: one.getAttribute("src"),
    loaded: one.complete && one.naturalWidth > 0,
    natural: one.naturalWidth,
    shown: one.getBoundingClientRect().width,
  }));
  const shown = all.filter((one) => one.closest("article") && one.children.length === 0 && one.textContent.trim());
  return {
    scroll: page.documentElement.scrollWidth,
    beyond: outside.filter((one) => !outside.includes(one.parentElement)).map((one) => one.outerHTML.slice(0, 200)),
    pictures,
    text: Math.min(...shown.map((one) => parseFloat(view().getComputedStyle(one).fontSize))),
    title: page.title,
  };
};

const collect = (page) => {
  const here = view().location;
  ids.set(here.pathname, new Set([...page.querySelectorAll("[id], a[name]")].flatMap((one) => [one.id, one.name])));
  for (const link of page.querySelectorAll("a[href]"))
    if (link.origin === here.origin) links.push([here.pathname, link.pathname, decodeURIComponent(link.hash.slice(1))]);
};

// A label of a drawer, if there is one on the screen; the drawer is there after a click.
const open = (label, drawer) => {
  const page = view().document;
  const button = [...page.querySelectorAll(`label[for="${label}"]`)].find((one) => {
    const place = one.getBoundingClientRect();
    const style = view().getComputedStyle(one);
    return place.width > 0 && place.left >= 0 && place.right <= view().innerWidth && style.visibility === "visible";
  });
  const visible = () => {
    const place = page.querySelector(drawer).getBoundingClientRect();
    return place.width > 0 && place.left >= -1 && place.right <= view().innerWidth + 1;
  };
  page.head.append(Object.assign(page.createElement("style"), {textContent: "* { transition: none !important; }"}));
  const before = visible();
  if (button) button.click();
  return {before, button: Boolean(button), visible};
};

const run = async () => {
  for (const page of pages) {
    await load(page);
    await wait(20);
    found.pages[page] = look(view().document);
    collect(view().document);
  }
  const unknown = new Set();
  for (const [from, to, id] of links) {
    const target = to.endsWith("/") ? to + "index.html" : to;
    if (ids.has(target) ? id === "" || ids.get(target).has(id) : false) continue;
    if (!ids.has(target) && !target.endsWith(".html") && (await fetch(target)).ok) continue;
    unknown.add(`${from}: ${to}#${id}`);
  }
  found.broken = [...unknown];
  for (const [name, drawer] of [["__navigation", ".sidebar-drawer"], ["__toc", ".toc-drawer"]]) {
    await load("environments.html");
    const {before, button, visible} = open(name, drawer);
    await wait(20);
    found.menus[name] = {before, button, after: visible()};
  }
  for (const word of words) {
    await load("search.html?q=" + word);
    for (let i = 0; i < 100 && !view().document.querySelector("#search-results li a"); i++) await wait(100);
    await wait(500);
    found.searches[word] = [...view().document.querySelectorAll("#search-results li a")].map((one) => one.pathname);
  }
};
run().catch((error) => { found.error = String(error.stack); }).then(() => {
  document.getElementById("found").textContent = JSON.stringify(found);
});
</script>"""


@dataclass
class Served:
    """The site's address, and the paths that were asked for in vain."""

    address: str
    pages: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def site() -> Iterator[Served]:
    """The site, built and served on this machine."""
    command = [sys.executable, "-m", "sphinx", "--quiet", "-b", "html", str(SITE.parent.parent), str(SITE)]
    subprocess.run(command, check=True, timeout=1200)
    served = Served("")

    class Handler(http.server.SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            if (page := served.pages.get(self.path)) is None:
                super().do_GET()
                return
            content = page.encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
            served.missing.append(f"{code} {self.path}")
            super().send_error(code, message, explain)

        def log_message(self, *arguments: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=SITE)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        served.address = f"http://127.0.0.1:{server.server_address[1]}"
        yield served
        server.shutdown()


@pytest.mark.parametrize("width", WIDTHS)
def test_every_page_fits_the_screen_and_leads_on(site: Served, tmp_path: Path, width: int) -> None:
    pages = sorted(str(file.relative_to(SITE)) for file in SITE.rglob("*.html") if "_static" not in file.parts)
    assert len(pages) > 60
    probe = PROBE.replace("WIDTH", str(width)).replace("PAGES", json.dumps(pages)).replace("WORDS", json.dumps(WORDS))
    site.pages["/probe.html"] = probe
    site.missing.clear()
    options = ("--virtual-time-budget=600000", "--enable-logging=stderr", f"--window-size={width + 40},1000")
    done = browse(tmp_path, *options, "--dump-dom", f"{site.address}/probe.html", timeout_s=600.0)
    found = found_in(done.stdout)
    assert "error" not in found
    assert list(found["pages"]) == pages
    looks = found["pages"].items()
    assert {page: look["scroll"] for page, look in looks if look["scroll"] > width} == {}
    assert {page: look["beyond"] for page, look in looks if look["beyond"]} == {}
    assert {page: look["title"] for page, look in looks if "PEARL" not in look["title"]} == {}
    assert {page: look["text"] for page, look in looks if look["text"] is not None and look["text"] < 10} == {}
    pictures = [(page, one) for page, look in looks for one in look["pictures"]]
    assert len(pictures) >= 15
    assert [(page, one) for page, one in pictures if not one["loaded"]] == []
    for page, one in pictures:  # the text of drawings is small: on a phone they scroll
        least = 640 if one["source"].endswith(".svg") else min(640, 0.85 * width)
        assert one["shown"] >= min(one["natural"] - 1, least), (page, one)
    assert found["broken"] == []
    assert [one for one in site.missing if "favicon" not in one] == []
    assert [line for line in done.stderr.splitlines() if re.search(r":CONSOLE[:(]", line)] == []
    for name, menu in found["menus"].items():
        wide = width > 1000 and name == "__navigation"
        assert menu == ({**menu, "before": True} if wide else {"before": False, "button": True, "after": True}), name
    for word, results in found["searches"].items():
        assert results, word
    assert any("callbacks.html" in result for result in found["searches"]["StopAtReturn"])
