"""Optional dependencies: what is missing, and the command that installs it."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

from pearl.errors import MissingExtraError


def require_extra(module: str, extra: str, purpose: str) -> None:
    """Raise MissingExtraError as `import_extra` does, without importing what is installed."""
    if importlib.util.find_spec(module) is None:
        import_extra(module, extra, purpose)


def import_extra(module: str, extra: str, purpose: str) -> ModuleType:
    """The module of an optional dependency; MissingExtraError names the pip command where it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        if importlib.util.find_spec(module.partition(".")[0]) is None:
            reason = f"{module.partition('.')[0]} is not installed"
        else:
            reason = f"{module} cannot be imported ({error})"
        raise MissingExtraError(
            f"{purpose} needs the extra {extra!r}, but {reason}. Install it with: pip install 'pearl-toolkit[{extra}]'"
        ) from error
