"""What a placement optimises."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

from pearl.errors import ConfigurationError

Metric: TypeAlias = Literal["throughput", "power_efficiency"]
METRICS: tuple[Metric, ...] = get_args(Metric)


def parse_metric(metric: str) -> Metric:
    """The metric named `throughput`, `Throughput`, `power_efficiency` or `PowerEfficiency`, in any case."""
    plain_name = str(metric).lower().replace("_", "")
    for known in METRICS:
        if plain_name == known.replace("_", ""):
            return known
    raise ConfigurationError(
        f"The metric to optimise must be 'throughput' or 'power_efficiency' (also 'Throughput', 'PowerEfficiency'); "
        f"found {metric!r}."
    )
