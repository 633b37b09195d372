"""PEARL: compose deep reinforcement learning for the heterogeneous machine at hand."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from composer import Composer as Composer
    from pearl.policy.loading import load_policy as load_policy

__version__ = "0.1.0"
__all__ = ["Composer", "__version__", "load_policy"]


def __getattr__(name: str) -> object:
    # Composer imports torch and pandas, so it is imported at first use.
    if name == "Composer":
        from composer import Composer

        return Composer
    if name == "load_policy":
        from pearl.policy.loading import load_policy

        return load_policy
    raise AttributeError(f"module 'pearl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
