"""Small functions that draw SVG for a page: all text is escaped, all colours are classes of the page's style sheet.

Drawings are 360 units wide, so that their text reads on a phone, where a unit is about a pixel.
"""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
from markupsafe import Markup

WIDTH = 360.0

_CHARACTER = 6.1  # units of the width of a character at the usual size, an upper estimate
_MOST_POINTS = 400  # of a line; more would be finer than the screen
_MOST_MARKS = 600
_LEFT, _RIGHT, _TOP, _PLOT = 42.0, 8.0, 8.0, 160.0  # of a chart: margins, and the height of its plot

Attribute = str | float


def element(parent: ET.Element, tag: str, text: str = "", /, **attributes: Attribute) -> ET.Element:
    """Append an element; `class_` stands for class, and other underscores for hyphens. Numbers are rounded."""
    named = {
        name.rstrip("_").replace("_", "-"): f"{value:.2f}".rstrip("0").rstrip(".")
        if isinstance(value, float)
        else value
        for name, value in attributes.items()
    }
    child = ET.SubElement(parent, tag, {name: str(value) for name, value in named.items()})
    child.text = text or None
    return child


def drawing(title: str, description: str, height: float, class_: str = "") -> ET.Element:
    """An empty drawing, with its text alternative for those who cannot see it."""
    root = ET.Element("svg", {"viewBox": f"0 0 {WIDTH:.0f} {height:.1f}", "role": "img", "class": class_ or "drawing"})
    root.set("aria-label", f"{title}. {description}")
    return root


def markup(root: ET.Element) -> Markup:
    """The drawing as text that a page takes over as it is."""
    return Markup(ET.tostring(root, encoding="unicode"))


def fitting(text: str, width: float, size: float = 11.0) -> str:
    """`text`, cut to what fits `width` units at a font size."""
    most = max(1, int(width / (_CHARACTER * size / 11.0)))
    return text if len(text) <= most else f"{text[: most - 1]}…"


def label(
    parent: ET.Element, x: float, y: float, text: str, width: float = WIDTH, class_: str = "", anchor: str = "start"
) -> None:
    """A line of text that is cut to `width`; a cut one shows all of it to a pointer."""
    shown = fitting(text, width)
    node = element(parent, "text", shown, x=x, y=y, class_=class_ or "label", text_anchor=anchor)
    if shown != text:
        element(node, "title", text)


def compact(value: float) -> str:
    """A number in few characters, such as 1.5k or 2M."""
    for size, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size <= abs(value) < 1e15:
            return f"{value / size:.3g}{suffix}"
    return "0" if value == 0 else f"{value:.3g}"


def bar(share: float, class_: str) -> Markup:
    """A horizontal bar of a `share` of the width at hand; the number stands next to it."""
    root = ET.Element("svg", {"class": f"bar {class_}", "aria-hidden": "true", "viewBox": "0 0 100 8"})
    root.set("preserveAspectRatio", "none")
    element(root, "rect", class_="rail", width=100.0, height=8.0)
    element(root, "rect", class_="filled", width=100.0 * min(1.0, max(0.004, share)), height=8.0)
    return markup(root)


# --- Charts ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Series:
    """Points of a chart: x and y of equal shape `(n,)`, drawn as a line or as marks. `style` counts from 0."""

    name: str
    x: np.ndarray
    y: np.ndarray
    kind: Literal["line", "steps", "dots", "marks"] = "line"
    style: int = 0

    def finite(self) -> Series:
        """The series without points that no axis has."""
        kept = (np.abs(self.x) <= 1e300) & (np.abs(self.y) <= 1e300)
        return Series(self.name, self.x[kept], self.y[kept], self.kind, self.style)


def chart(title: str, x_label: str, y_label: str, series: Sequence[Series], from_zero: bool = False) -> Markup | None:
    """Lines and marks over two axes; None where there is no point to draw.

    Long lines are means over bins, long clouds of dots are thinned. The x axis includes 0; so does the y axis with
    `from_zero`.
    """
    drawn = [one for one in (given.finite() for given in series) if len(one.x)]
    if not drawn:
        return None
    xs = _ticks(*_extent([one.x for one in drawn], with_zero=True))
    ys = _ticks(*_extent([one.y for one in drawn], from_zero))
    rows = _legend_rows([one.name for one in drawn]) if len(drawn) > 1 else []
    bottom = _TOP + _PLOT
    root = drawing(title, _described(drawn, x_label, y_label), bottom + 36 + 16 * len(rows))
    right = WIDTH - _RIGHT

    def place(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        across = (x - xs[0]) / (xs[-1] - xs[0])
        up = (y - ys[0]) / (ys[-1] - ys[0])
        return _LEFT + across * (right - _LEFT), bottom - up * _PLOT

    for tick in ys:
        y = float(place(np.array([xs[0]]), np.array([tick]))[1][0])
        element(root, "line", x1=_LEFT, y1=y, x2=right, y2=y, class_="grid")
        label(root, _LEFT - 5, y + 4, compact(tick), class_="tick", anchor="end")
    for tick in xs:
        x = float(place(np.array([tick]), np.array([ys[0]]))[0][0])
        anchor = "end" if x > right - 12 else "middle"
        element(root, "line", x1=x, y1=bottom, x2=x, y2=bottom + 4, class_="axis")
        label(root, x, bottom + 16, compact(tick), class_="tick", anchor=anchor)
    element(root, "line", x1=_LEFT, y1=bottom, x2=right, y2=bottom, class_="axis")
    label(root, (_LEFT + right) / 2, bottom + 31, x_label, class_="axis-name", anchor="middle")
    for one in drawn:
        _draw(root, one, *place(*_thinned(one)))
    for number, row in enumerate(rows):
        for index, x in row:
            y = bottom + 36 + 16 * number + 8
            _swatch(root, drawn[index], x, y)
            label(root, x + 22, y + 4, drawn[index].name, WIDTH - x - 22)
    return markup(root)


def _extent(arrays: Sequence[np.ndarray], with_zero: bool) -> tuple[float, float]:
    low, high = min(float(a.min()) for a in arrays), max(float(a.max()) for a in arrays)
    if with_zero:
        low, high = min(0.0, low), max(0.0, high)
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        margin = 0.5 * abs(low) if low else 0.5
        low, high = low - (0 if with_zero else margin), high + margin
    return low, high


def _ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers at equal distances from at most `low` to at least `high`."""
    raw = max((high - low) / (most - 1), 1e-300)
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * size for factor in (1, 2, 2.5, 5, 10) if factor * size >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [step * number for number in range(first, max(last, first + 1) + 1)]


def _thinned(series: Series) -> tuple[np.ndarray, np.ndarray]:
    x, y = series.x, series.y
    if series.kind in ("dots", "marks"):
        every = -(-len(x) // _MOST_MARKS)
        return x[::every], y[::every]
    if len(x) <= _MOST_POINTS:
        return x, y
    edges = np.linspace(0, len(x), _MOST_POINTS + 1).astype(int)
    counts = np.diff(edges)
    return np.add.reduceat(x / counts.max(), edges[:-1]) * counts.max() / counts, np.add.reduceat(
        y / counts.max(), edges[:-1]
    ) * counts.max() / counts


def _draw(root: ET.Element, series: Series, x: np.ndarray, y: np.ndarray) -> None:
    style = f"s{series.style}"
    points = list(zip(x.tolist(), y.tolist(), strict=True))
    if series.kind in ("dots", "marks"):
        group = element(root, "g", class_=f"{series.kind} {style}")
        for place in points:
            _mark(group, *place, series)
        return
    if series.kind == "steps":
        points = [points[0]] + [corner for (_, y0), (x1, y1) in pairwise(points) for corner in ((x1, y0), (x1, y1))]
    path = "M" + "L".join(f"{px:.1f} {py:.1f}" for px, py in points)
    if len(points) == 1:
        element(root, "circle", cx=points[0][0], cy=points[0][1], r=2.5, class_=f"dots {style}")
    element(root, "path", d=path, class_=f"line {style}")


def _mark(group: ET.Element, x: float, y: float, series: Series) -> None:
    """A dot; or a mark whose shape differs from style to style."""
    if series.kind == "dots":
        element(group, "circle", cx=x, cy=y, r=1.6)
        return
    shapes = ("M0-4 4 0 0 4-4 0Z", "M-3.4-3.4H3.4V3.4H-3.4Z", "M0-4.4 4 3.4-4 3.4Z", "M-4-3.4 4-3.4 0 4.4Z")
    element(group, "path", d=shapes[series.style % len(shapes)], transform=f"translate({x:.1f} {y:.1f})")


def _swatch(root: ET.Element, series: Series, x: float, y: float) -> None:
    if series.kind in ("dots", "marks"):
        _mark(element(root, "g", class_=f"{series.kind} s{series.style}"), x + 9, y, series)
    else:
        element(root, "line", x1=x, y1=y, x2=x + 18, y2=y, class_=f"line s{series.style}")


def _legend_rows(names: Sequence[str]) -> list[list[tuple[int, float]]]:
    """The entries of a legend in rows: the index and the x of each."""
    rows: list[list[tuple[int, float]]] = [[]]
    x = 4.0
    for index, name in enumerate(names):
        width = 34 + _CHARACTER * len(name)
        if rows[-1] and x + width > WIDTH:
            rows.append([])
            x = 4.0
        rows[-1].append((index, x))
        x += width
    return rows


def _described(drawn: Sequence[Series], x_label: str, y_label: str) -> str:
    parts = [
        f"{one.name}: {len(one.x):,} points, {y_label} from {compact(float(one.y[0]))} at {x_label} "
        f"{compact(float(one.x[0]))} to {compact(float(one.y[-1]))} at {compact(float(one.x[-1]))}, "
        f"lowest {compact(float(one.y.min()))}, highest {compact(float(one.y.max()))}"
        for one in drawn
    ]
    return "; ".join(parts) + "."
