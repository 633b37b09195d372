"""Modelled devices: hardware of another machine, whose latencies are computed from its row of the device CSV.

These are the parameters that the equations need in addition to the CSV's columns, with their sources. A selector of the
`model` backend replaces any of them: `operation_us=25;sample_ns=139`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TypeAlias

from pearl.backends.key_values import key_values
from pearl.errors import ConfigurationError


@dataclass(frozen=True)
class ProcessorParameters:
    """What the roofline model of a CPU or a GPU needs in addition to its row.

    `flop_per_cycle` counts the float32 operations (a multiply-add is two) that one core (of a GPU: one multiprocessor)
    sustains in a matrix product. `operation_us` is the overhead of one operation of the Learner, `request_us` that of
    one request to the Replay Manager. A CPU takes `sample_ns` and `update_ns` for one item of a request on one level of
    the tree, on one thread. A GPU takes `level_us` for a level, for any number of items, and `update_ns` for each item,
    with its way from and to the host. `messages_us` is the time of a host's queues in an iteration of setting 1
    (measured: 33 us on the EPYC named below).
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
    """Parameters of a GPU, which works while the host launches the next operation.

    The Learner is this toolkit's or torch's, whichever is faster: torch's operations have other overheads, and cuBLAS.
    """

    torch_flop_per_cycle: float = 110.0
    torch_operation_us: float = 11.0


# CPU: this toolkit's kernels on one core of a 2-core AMD EPYC with AVX-512 (benchmarks/results): a DQN step of 64 x 64,
# batch 32, takes 15.8 us in 18 operations, about 9 us of which are overhead; large steps run at about 200 GFLOP/s, half
# of that without AVX-512; a batch of 2,048 from 1,000,000 leaves at fanout 16 (5 levels) takes 15.1 us to sample and
# 12.9 us to update, and small requests about 0.6 us.
CPU_PARAMETERS = ProcessorParameters(32.0, 0.5, 0.6, sample_ns=1.5, update_ns=1.3)
# GPU: this toolkit's kernels on an H100 (benchmarks/results/cuda.json and its note). The Learner's steps there (33.7 us
# for DQN 64 x 64 batch 32, 86 for DQN 256 x 256 batch 512, 142 for TD3 and 204 for SAC 256 x 256 batch 256, 5,990 for
# TD3 batch 32,768) give the first two numbers, by least squares of logarithms, within 35 %; those of torch in a CUDA
# graph (177, 303, 427, 686 and 2,510) the two of torch, within 35 %. A sample and an update from Python take 41.1 us
# for 256 items and 50.3 for 1,024, of 1,000,000 at fanout 16. A level is two dependent loads of about 100 ns each (80
# to 150 cycles: Sec. 4.3.3 of the CF'22 paper).
GPU_PARAMETERS = GpuParameters(36.0, 2.5, 18.0, sample_ns=0.2, update_ns=10.0, level_us=0.2)


@dataclass(frozen=True)
class FpgaParameters:
    """What the model of an FPGA needs in addition to its row.

    `dies` is how many dies (super logic regions) share the resources evenly, which matters for the papers' designs
    only. `dsp_per_mac` counts the DSP blocks of a float32 multiply-add: 1 on Intel's Agilex (in hardware), 5 on AMD's
    UltraScale+ (3 to multiply, 2 to add). `block_kbit` is the size of a block of on-chip memory: 20 for Intel's M20K,
    18 for half of AMD's BRAM36. `arithmetic_cycles` is the pipeline latency of a unit's adders; the papers' equations
    leave it out.
    """

    dies: int = 1
    dsp_per_mac: int = 1
    block_kbit: int = 20
    arithmetic_cycles: int = 0


ModelParameters: TypeAlias = "ProcessorParameters | FpgaParameters"

_DEFAULTS: dict[str, ModelParameters] = {"cpu": CPU_PARAMETERS, "gpu": GPU_PARAMETERS, "fpga": FpgaParameters()}
_BLOCKS_KBIT = (18, 20)
_MAY_BE_0 = ("level_us", "messages_us", "arithmetic_cycles")  # a device can be without


def model_parameters(kind: str, selector: str) -> ModelParameters:
    """The parameters of a modelled device of `kind` ("cpu", "gpu" or "fpga") whose row has this selector.

    Raises ConfigurationError for a key that is unknown or given twice, and for a value that is not a plain number
    above 0 (of an FPGA: a whole number up to 64); those in _MAY_BE_0 may be 0.
    """
    defaults = _DEFAULTS[kind]
    known = [f.name for f in dataclasses.fields(defaults)]
    form = f"of a {kind} is empty or reads like '{known[0]}={getattr(defaults, known[0])}', with ; between several"
    whole = isinstance(defaults, FpgaParameters)
    values = key_values(
        selector,
        known,
        backend="model",
        form=form,
        may_be_empty=True,
        most=64 if whole else None,
        may_be_0=_MAY_BE_0,
    )
    if whole:
        values = {key: int(value) for key, value in values.items()}
    if values.get("block_kbit", 18) not in _BLOCKS_KBIT:
        raise ConfigurationError(f"block_kbit of a model selector must be 18 or 20; found {values['block_kbit']}.")
    return dataclasses.replace(defaults, **values)  # type: ignore[arg-type]  # keys and types were checked
