"""The modelled device: hardware that is not here, whose latencies equations give from what its row states.

What the equations need beyond the columns of the device CSV is here, with its source; a selector of the `model` backend
replaces any of it: `operation_us=25;sample_ns=139`.
"""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass
from typing import TypeAlias

from pearl.errors import ConfigurationError

_NUMBER = re.compile(r"[0-9]{1,20}(\.[0-9]{1,20})?([eE][+-]?[0-9]{1,2})?")


@dataclass(frozen=True)
class ProcessorParameters:
    """What the roofline of a CPU or a GPU needs beyond its row.

    `flop_per_cycle` is float32 operations (a multiply-add counts two) that one core (of a GPU: a multiprocessor)
    sustains in a matrix product; `operation_us` the overhead of one operation of the Learner, `request_us` that of one
    request to the Replay Manager. A CPU takes `sample_ns` and `update_ns` for one item of a request on one level of the
    tree, on one thread. A GPU takes `level_us` for a level, whatever the items, and `update_ns` for each item, because
    all meet at the root. `messages_us` is what the queues of a host take in an iteration of setting 1 (33 us measured
    on that EPYC).
    """

    flop_per_cycle: float
    operation_us: float
    request_us: float
    sample_ns: float
    update_ns: float
    level_us: float = 0.0
    messages_us: float = 33.0


@dataclass(frozen=True)
class GpuParameters(ProcessorParameters):
    """Those of a GPU, which works while the host launches what comes next."""


# CPU: this toolkit's kernels on one core of a 2-core AMD EPYC with AVX-512 (benchmarks/results): a DQN step of 64 x 64,
# batch 32, takes 15.8 us in 18 operations, about 9 us of which are overhead; large steps run at about 200 GFLOP/s, half
# of that without AVX-512; a batch of 2,048 from 1,000,000 leaves at fanout 16 (5 levels) takes 15.1 us to sample and
# 12.9 us to update, and small requests about 0.6 us.
CPU_PARAMETERS = ProcessorParameters(32.0, 0.5, 0.6, sample_ns=1.5, update_ns=1.3)
# GPU: 128 lanes of a multiprocessor, half of whose peak a matrix product of such sizes reaches; a launch takes about
# 5 us of the host (an operation of torch three of them), a request a launch and a wait; a level two dependent loads of
# about 100 ns each (80 to 150 cycles: Sec. 4.3.3 of the CF'22 paper); an atomic addition to one word about 2 ns. None
# of these was measured for this toolkit.
GPU_PARAMETERS = GpuParameters(128.0, 15.0, 12.0, sample_ns=0.0, update_ns=2.0, level_us=0.2)


@dataclass(frozen=True)
class FpgaParameters:
    """What the model of an FPGA needs beyond its row.

    `dies` is how many dies (super logic regions) share the resources evenly; `dsp_per_mac` the DSP blocks of a float32
    multiply-add: 1 on Intel's Agilex, which has them in hardware, 5 on AMD's UltraScale+ (3 to multiply, 2 to add).
    `block_kbit` is a block of on-chip memory: 20 for Intel's M20K, 18 for half of AMD's BRAM36.
    `arithmetic_cycles` is the latency of a unit's adders, by which it gives an item on later than it takes the next; no
    equation of the papers has it.
    """

    dies: int = 1
    dsp_per_mac: int = 1
    block_kbit: int = 20
    arithmetic_cycles: int = 0


ModelParameters: TypeAlias = "ProcessorParameters | FpgaParameters"

_DEFAULTS: dict[str, ModelParameters] = {"cpu": CPU_PARAMETERS, "gpu": GPU_PARAMETERS, "fpga": FpgaParameters()}
_BLOCKS_KBIT = (18, 20)


def model_parameters(kind: str, selector: str) -> ModelParameters:
    """The parameters of a modelled device of `kind` ("cpu", "gpu" or "fpga") whose row has this selector.

    Raises ConfigurationError for a key that is unknown or given twice, and for a value that is not a plain number
    above 0 (of an FPGA: a whole number).
    """
    defaults = _DEFAULTS[kind]
    known = [f.name for f in dataclasses.fields(defaults)]
    whole = isinstance(defaults, FpgaParameters)
    values: dict[str, float] = {}
    for item in (item.strip() for item in selector.split(";") if item.strip()):
        key, equals, text = (part.strip() for part in item.partition("="))
        if not equals or key not in known:
            raise ConfigurationError(
                f"A model selector of a {kind} is empty or reads like '{known[0]}={getattr(defaults, known[0])}', with "
                f"; between several; found {item!r}, expected one of {', '.join(known)} followed by = and a number."
            )
        if key in values:
            raise ConfigurationError(f"A model selector gives {key} twice: {selector!r}. Keep one.")
        value = float(text) if _NUMBER.fullmatch(text) else math.nan
        if not (math.isfinite(value) and value > 0 and (not whole or (value.is_integer() and value <= 64))):
            wanted = "whole number from 1 to 64" if whole else "number above 0"
            raise ConfigurationError(f"{key} of a model selector must be a {wanted}; found {text!r}.")
        if key == "block_kbit" and value not in _BLOCKS_KBIT:
            raise ConfigurationError(f"block_kbit of a model selector must be 18 or 20; found {text!r}.")
        values[key] = int(value) if whole else value
    return dataclasses.replace(defaults, **values)  # type: ignore[arg-type]  # keys and types were checked
