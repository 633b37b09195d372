"""The folder of the Jinja templates, which the wheel ships inside this package."""

from __future__ import annotations

from pathlib import Path


def template_folders() -> list[Path]:
    """Where templates are: in an installed package, or next to it in a checkout."""
    here = Path(__file__).resolve().parent
    return [folder for folder in (here / "runtime_templates", here.parent / "runtime_templates") if folder.is_dir()]
