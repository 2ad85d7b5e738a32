"""Counters of what the graphs did: every call is a hit or a fallback with its reason."""

from dataclasses import dataclass, field


@dataclass
class GraphStats:
    """Attributes:
    hits: calls whose tower was replayed as a whole.
    fallbacks: reason to the number of calls that ran eagerly, in part or as a whole.
    replays: graphs launched; a call larger than the largest graph takes several.
    live_rows: rows that the replays had to compute.
    captured_rows: rows of the replayed graphs' capacities.
    memory_bytes: device memory that the graphs and their buffers hold.
    """

    hits: int = 0
    fallbacks: dict[str, int] = field(default_factory=dict)
    replays: int = 0
    live_rows: int = 0
    captured_rows: int = 0
    memory_bytes: int = 0

    @property
    def calls(self) -> int:
        return self.hits + sum(self.fallbacks.values())

    def count_fallback(self, reason: str) -> None:
        self.fallbacks[reason] = self.fallbacks.get(reason, 0) + 1
