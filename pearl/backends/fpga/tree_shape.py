"""A sum tree in hardware, one pipeline stage for each level: its bits and words, and the cycles of its requests.

`kernels/rtl` generates this pipeline, simulates it cycle by cycle and synthesises it; docs/rtl.md compares the cycles
and cells. PEARL's own equations are `eq4` and `eq5`, without transfers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pearl.errors import ConfigurationError

LEAF_BITS = 28  # significant bits of a quantised priority: kernels/include/pearl/quantise.hpp

ROOT_BITS_MAX = 64
LANES_MAX = 32  # a word of about 1,500 bits: wider ones are hard to route, and Amaranth cannot simulate them


def eq4(batch: int, depth: int, fanout: int) -> int:
    """Return PEARL's T_sampling (Eq. 4): 2 F (BS + D)."""
    return 2 * fanout * (batch + depth)


def eq5(batch: int, depth: int) -> int:
    """Return PEARL's T_update or T_insert (Eq. 5): 2 (BS + D)."""
    return 2 * (batch + depth)


@dataclass(frozen=True)
class LevelMemory:
    """The memory of one tree level: `rows` words of `lanes` nodes of `bits` bits."""

    level: int
    nodes: int
    bits: int
    lanes: int
    rows: int

    @property
    def total_bits(self) -> int:
        """Bits stored."""
        return self.rows * self.lanes * self.bits


@dataclass(frozen=True)
class TreeShape:
    """A K-ary sum tree in hardware: level 0 is the root's register, levels 1 to `depth` one pipeline stage each.

    `lanes` siblings share one memory word and are read together (default: all `fanout` of them, at most 32; 1 is the
    sequential sampler of CF'22 Fig. 5). `cycles_per_access` is 2 if a read and the following write take turns, as in
    PEARL's Eq. 4-5, and 1 if they overlap: then a bypass forwards a write to a read of the same word. `assigns` adds a
    copy of the leaves before the root, which turns "set this leaf to v" into the difference that goes down the tree;
    without it, an update is a retrieval followed by an update by difference, as in PEARL Sec. V. `slots` leaves are in
    use (default: `fanout ** depth`).

    Raises ConfigurationError for invalid combinations.
    """

    depth: int
    fanout: int
    lanes: int = 0
    leaf_bits: int = LEAF_BITS
    cycles_per_access: Literal[1, 2] = 1
    assigns: bool = True
    slots: int = 0

    def __post_init__(self) -> None:
        if not 2 <= self.fanout <= 256 or self.fanout & (self.fanout - 1):
            raise ConfigurationError(f"Fanout must be a power of two from 2 to 256; found {self.fanout}.")
        if not self.lanes:
            object.__setattr__(self, "lanes", min(self.fanout, LANES_MAX))
        most = min(self.fanout, LANES_MAX)
        if not 1 <= self.lanes <= most or self.lanes & (self.lanes - 1):
            raise ConfigurationError(
                f"Lanes must be a power of two from 1 to {most} for a fanout of {self.fanout}; found {self.lanes}."
            )
        if not 1 <= self.leaf_bits <= LEAF_BITS:
            raise ConfigurationError(f"Leaves have 1 to {LEAF_BITS} bits; found {self.leaf_bits}.")
        deepest = (ROOT_BITS_MAX - self.leaf_bits) // self.digit_bits
        if not 1 <= self.depth <= deepest:
            raise ConfigurationError(
                f"Depth must lie in [1, {deepest}] for a fanout of {self.fanout}, as a total of at most "
                f"{ROOT_BITS_MAX} bits allows; found {self.depth}."
            )
        if self.cycles_per_access not in (1, 2):
            raise ConfigurationError(f"An access takes 1 or 2 cycles; found {self.cycles_per_access}.")
        if not self.slots:
            object.__setattr__(self, "slots", self.fanout**self.depth)
        if not self.fanout ** (self.depth - 1) < self.slots <= self.fanout**self.depth:
            raise ConfigurationError(
                f"A tree of fanout {self.fanout} and depth {self.depth} holds {self.fanout ** (self.depth - 1) + 1} to "
                f"{self.fanout**self.depth} slots; found {self.slots}. TreeShape.holding chooses the depth."
            )

    @classmethod
    def holding(
        cls,
        slots: int,
        fanout: int,
        lanes: int = 0,
        *,
        cycles_per_access: Literal[1, 2] = 1,
        assigns: bool = True,
    ) -> TreeShape:
        """Return the shallowest tree of this fanout with `slots` (2 or more) leaves."""
        if slots < 2:
            raise ConfigurationError(f"A replay pipeline holds at least 2 slots; found {slots}.")
        depth = 1
        while max(fanout, 2) ** depth < slots:
            depth += 1
        return cls(depth, fanout, lanes, LEAF_BITS, cycles_per_access, assigns, slots)

    @property
    def digit_bits(self) -> int:
        """log2 of the fanout: the bits of an index that one level adds."""
        return self.fanout.bit_length() - 1

    @property
    def lane_bits(self) -> int:
        """log2 of the lanes."""
        return self.lanes.bit_length() - 1

    @property
    def index_bits(self) -> int:
        """Bits of a leaf's index."""
        return self.depth * self.digit_bits

    @property
    def beats(self) -> int:
        """Memory words that one node's children take."""
        return self.fanout // self.lanes

    @property
    def sample_cycles(self) -> int:
        """Cycles from one sampling to the next."""
        return self.cycles_per_access * self.beats

    @property
    def other_cycles(self) -> int:
        """Cycles from a request that is not a sampling to the next."""
        return self.cycles_per_access

    @property
    def level_latency(self) -> int:
        """Cycles that any request spends in one level.

        The last word of a family is requested after `cycles_per_access * (beats - 1)` cycles. Then follow its read, its
        prefix sums (one level of adders in each cycle), the comparison and the choice. Requests that need less time
        wait, so that requests keep their spacing in every level and no level ever stalls another.
        """
        return self.cycles_per_access * (self.beats - 1) + self.lane_bits + 3

    @property
    def head_latency(self) -> int:
        """Cycles before the first level: the root's register, and the copy of the leaves if there is one."""
        return 1 + 2 * self.assigns

    @property
    def latency(self) -> int:
        """Cycles from the acceptance of a request to its result."""
        return self.head_latency + self.depth * self.level_latency

    def bits(self, level: int) -> int:
        """Return the bits of a node of `level`, 0 being the root: log2 K fewer in each level (CF'22 Sec. 3.1)."""
        return self.leaf_bits + (self.depth - level) * self.digit_bits

    def nodes(self, level: int) -> int:
        """Return the number of nodes of `level` above a leaf in use."""
        below = 1 << (self.depth - level) * self.digit_bits
        return -(-self.slots // below)

    def memory(self, level: int) -> LevelMemory:
        """Return the memory of `level`, 1 to `depth`: whole families of siblings."""
        nodes = self.nodes(level - 1) * self.fanout
        return LevelMemory(level, nodes, self.bits(level), self.lanes, nodes // self.lanes)

    @property
    def memories(self) -> tuple[LevelMemory, ...]:
        """The memories of all levels, from the root down."""
        return tuple(self.memory(level) for level in range(1, self.depth + 1))

    @property
    def memory_bits(self) -> int:
        """Bits of all levels, the root's register and the copy of the leaves."""
        levels = sum(memory.total_bits for memory in self.memories)
        return self.bits(0) + levels + self.assigns * self.slots * self.leaf_bits

    # --- cycles from the acceptance of the first request to the last result, both included --------------------------

    def sampling_cycles(self, batch: int) -> int:
        """Return the cycles of a batch of samplings.

        `c * F / P * (B - 1)` for the requests, with `c` = `cycles_per_access` and `P` lanes, plus for filling
        `D * (c * (F / P - 1) + log2 P + 3) + h + 1`, with `h` cycles of the head. Eq. 4 is `c = 2`, `P = 1`, with
        `2 F D` for filling.
        """
        return self._cycles(self.sample_cycles, batch)

    def pass_cycles(self, batch: int) -> int:
        """Return the cycles of a batch of retrievals, differences or assignments: `c * (B - 1)`, and the filling above.

        Filling is a sampling's: all requests spend the same time in a level.
        """
        return self._cycles(self.other_cycles, batch)

    def update_cycles(self, batch: int) -> int:
        """Return the cycles of an update or insertion of a batch whose sender does not know the old leaves.

        With the copy of the leaves (`assigns`), one pass. Without it, one pass that retrieves and one that adds the
        differences (PEARL Sec. V); each difference is sent as soon as its leaf has been read.
        """
        if self.assigns:
            return self.pass_cycles(batch)
        # The first difference is sent after the first leaf is read and after the last retrieval is sent.
        return max(batch * self.other_cycles, self.latency + 1) + self.pass_cycles(batch)

    def mixed_cycles(self, samplings: Sequence[bool]) -> int:
        """Return the cycles of a stream in any order, each request a sampling (True) or another (False)."""
        spacing = sum(self.sample_cycles if sampling else self.other_cycles for sampling in samplings[:-1])
        return spacing + self.latency + 1

    def _cycles(self, spacing: int, batch: int) -> int:
        if batch < 1:
            raise ConfigurationError(f"A batch has at least one request; found {batch}.")
        return spacing * (batch - 1) + self.latency + 1
