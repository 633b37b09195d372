"""Draws the platform: the host, under it every other device with its connection, and the primitives on them."""

from __future__ import annotations

import xml.etree.ElementTree as ET

from markupsafe import Markup

from composer.html_report.svg import WIDTH, drawing, element, label, markup
from composer.html_report.view import View
from composer.platform import Link, Platform
from pearl.devices.description import Connection, Device
from pearl.errors import PlacementError

_BOX, _GAP, _INDENT = 62.0, 30.0, 34.0  # height of a device, space above it, its distance from the left
_BADGE, _CHARACTER = 20.0, 6.4


def facts(device: Device) -> str:
    """The device CSV's facts about a device, in a line."""
    numbers = (
        ("cores", device.cores),
        ("GB", device.memory_gb),
        ("DSPs", device.dsp),
        ("W", device.active_watts),
    )
    known = [f"{value:,.4g} {unit}" for unit, value in numbers if value is not None]
    return ", ".join([*dict.fromkeys((device.kind, device.backend)), *known])


def link_text(platform: Platform, source: str, target: str) -> str:
    """Latency and bandwidth of a connection; both directions where they differ."""
    try:
        there, back = platform.link(source, target), platform.link(target, source)
    except PlacementError:
        return "no connection"
    texts = _text_of(there), _text_of(back)
    return texts[0] if texts[0] == texts[1] else f"{texts[0]} to it; {texts[1]} back"


def _text_of(link: Link | Connection | None) -> str:
    return "no connection" if link is None else f"{link.latency_us:,.4g} µs, {link.bandwidth_gbps:,.4g} GB/s"


def platform_diagram(platform: Platform, view: View) -> Markup:
    """The host on top; each other device hangs on the line from it, next to the latency and bandwidth.

    The nodes of a cluster come last.
    """
    host = platform.device(view.host)
    links = {
        device.name: link_text(platform, host.name, device.name)
        for device in platform.devices
        if device.name != host.name
    }
    links |= {node.device.name: f"node {node.device.node}: {_text_of(node.link)}" for node in platform.nodes}
    others = [device for device in platform.devices if device.name != host.name]
    others += [node.device for node in platform.nodes]
    reasons = {unavailable.device: unavailable.reason for unavailable in view.unavailable}
    description = ". ".join(
        f"{device.name}: {', '.join(view.roles(device.name)) or 'no primitive'}"
        + (f", connected to {host.name} with {links[device.name]}" if device != host else "")
        for device in (host, *others)
    )
    root = drawing("Platform", description, _BOX + len(others) * (_GAP + _BOX) + 3)
    _device(root, host, view, 1.0, 1.0, reasons.get(host.name, ""))
    y = _BOX + 1.0
    for device in others:
        middle = y + _GAP + _BOX / 2
        element(root, "path", d=f"M14 {_BOX + 1:.0f}V{middle:.0f}H{_INDENT:.0f}", class_="wire")
        label(root, _INDENT, y + _GAP - 8, links[device.name], WIDTH - _INDENT, "link")
        _device(root, device, view, _INDENT, y + _GAP, reasons.get(device.name, ""))
        y += _GAP + _BOX
    return markup(root)


def _device(root: ET.Element, device: Device, view: View, x: float, y: float, unused: str) -> None:
    placed = view.roles(device.name)
    kind = "chosen" if placed else "unused" if unused else "idle"
    element(root, "rect", x=x, y=y, width=WIDTH - x - 1, height=_BOX, rx=6.0, class_=f"device {kind}")
    width = WIDTH - x - 18
    name_width = min(width / 2, 7.5 * len(device.name))
    label(root, x + 9, y + 17, device.name, width / 2, "name")
    label(root, WIDTH - 10, y + 17, facts(device), width - name_width, "facts", anchor="end")
    if not placed:
        label(root, x + 9, y + 44, f"not used: {unused}" if unused else "no primitive is placed here", width, "facts")
    # At most four badges, which fit the width of the host's box.
    left = x + 9
    for name in placed:
        badge = 14 + _CHARACTER * len(name)
        element(root, "rect", x=left, y=y + 30, width=badge, height=_BADGE, rx=10.0, class_="badge")
        label(root, left + badge / 2, y + 44, name, class_="badge-name", anchor="middle")
        left += badge + 5
