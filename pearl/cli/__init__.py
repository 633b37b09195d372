"""The command `pearl`: describe the machine, compose, run, measure, report. One file per command.

Commands import what they need when they run, so that help and errors of usage appear at once.
"""

from pearl.cli.app import app, main

# The help lists the commands in this order.
from pearl.cli import devices, suggest, compose, explain, calibrate  # isort: skip
from pearl.cli import fpga_report, run, sweep, report, policy, portability  # isort: skip

__all__ = [
    "app",
    "calibrate",
    "compose",
    "devices",
    "explain",
    "fpga_report",
    "main",
    "policy",
    "portability",
    "report",
    "run",
    "suggest",
    "sweep",
]
