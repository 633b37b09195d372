"""Default latencies and bandwidths of links, used where nothing is measured."""

from __future__ import annotations

# PCIe 3.0 x16 with its driver, and a load from memory.
HOST_LINK_LATENCY_US = 10.0
HOST_LINK_GBPS = 12.0
MEMORY_LATENCY_US = 0.1
# Host and device are one piece of silicon: the runtime copies within memory.
SHARED_LINK_LATENCY_US = 3.0
SHARED_LINK_GBPS = 10.0
