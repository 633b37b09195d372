"""Find CUDA devices and measure their links. A device that fails is reported and left out."""

from __future__ import annotations

import logging
from collections.abc import Callable

from pearl.backends.cuda import device as cuda
from pearl.backends.links import HOST_LINK_GBPS, HOST_LINK_LATENCY_US, MEMORY_LATENCY_US
from pearl.backends.protocol import Discovered, Discovery
from pearl.devices.description import Connection, Device
from pearl.errors import ConfigurationError

log = logging.getLogger(__name__)


def discover(search: Discovery) -> Discovered:
    """The devices that torch sees, one after the other, and their links to the host and to each other."""
    measure, report = search.measure, search.report
    devices: list[Device] = []
    links: list[Connection] = []
    indices: list[int] = []
    facts = cuda.query_smi()
    index = 0
    while (available := cuda.cuda_availability(index)).ok:
        name = f"gpu{index}"
        try:
            device = cuda.describe_cuda(index, name, facts, measure=measure)
            if measure:
                report(f"Measuring the links of {name}")
                own_links = cuda.measure_host_links(index, "cpu0", name)
                if device.memory_bandwidth_gbps:
                    # Not the latency of a copy, since measurements of the primitives include the launches.
                    own_links.append(Connection(name, name, MEMORY_LATENCY_US, device.memory_bandwidth_gbps))
            else:
                own_links = [Connection("cpu0", name, HOST_LINK_LATENCY_US, HOST_LINK_GBPS)]
        except (RuntimeError, AssertionError, ConfigurationError) as error:
            report(f"{name} is left out: {error}")
            log.warning("CUDA device %d is left out: %s", index, error)
        else:
            report(f"GPU: {name}, {device.cores} multiprocessors, {device.memory_gb} GB")
            devices.append(device)
            links += own_links
            indices.append(index)
        index += 1
    if index == 0:
        report(f"No CUDA device: {available.reason}")
    if measure:
        links += _peer_links(devices, indices, report)
    return Discovered(devices, links)


def _peer_links(devices: list[Device], indices: list[int], report: Callable[[str], None]) -> list[Connection]:
    links: list[Connection] = []
    for first, source in zip(indices, devices, strict=True):
        for second, target in zip(indices, devices, strict=True):
            if first == second:
                continue
            try:
                link = cuda.measure_peer_link(first, second, source.name, target.name)
            except (RuntimeError, AssertionError) as error:
                report(f"The link {source.name} -> {target.name} is left out: {error}")
                log.warning("The link %s -> %s is left out: %s", source.name, target.name, error)
                continue
            links += [link] if link else []
    return links
