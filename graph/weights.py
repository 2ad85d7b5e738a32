"""Whether a captured encoder's weights are still where its graphs read them."""

from collections.abc import Iterable
from itertools import chain
from operator import attrgetter, is_
from typing import Any

from torch import Tensor, nn


class WeightWatch:
    """Remembers where captured modules' weights are, and keeps their memory; made when the graphs are.

    Every call asks it about some hundred parameters, so it walks the modules' own dictionaries, and none in Python.

    Args:
        captured: modules whose weights the graphs read.
        eager: modules that compute behind the graphs.
    """

    def __init__(self, captured: Iterable[nn.Module], eager: Iterable[nn.Module]) -> None:
        modules = [module for root in captured for module in root.modules()]
        self._tables = [table for module in modules for table in (module._modules, module._parameters) if table]
        self._eager_tables = [module._parameters for root in eager for module in root.modules() if module._parameters]
        self._entries = _entries(self._tables)
        self._weights = [entry for entry in self._entries if isinstance(entry, Tensor)]
        self._where = self._addresses()
        self._kept = [weight.detach() for weight in self._weights]

    def moved(self) -> bool:
        """Whether a weight lies elsewhere, has another dtype, or a module was replaced. In-place edits move nothing."""
        entries = _entries(self._tables)
        same = len(entries) == len(self._entries) and all(map(is_, entries, self._entries))
        return not same or self._addresses() != self._where

    def let_go(self) -> None:
        """Keep the captured weights' memory no longer."""
        self._entries, self._weights, self._kept = [], [], []

    def want_gradient(self) -> bool:
        """Whether a parameter asks for a gradient. Those behind the graphs count: what they read is overwritten."""
        entries = _entries(self._eager_tables)
        return any(map(attrgetter("requires_grad"), (*self._weights, *filter(_is_tensor, entries))))

    def _addresses(self) -> list[Any]:
        # memory that went away and came back may hold another dtype
        return [self._weights[0].dtype, *map(Tensor.data_ptr, self._weights)]


def _entries(tables: Iterable[dict[str, Any]]) -> list[Any]:
    return list(chain.from_iterable(map(dict.values, tables)))


def _is_tensor(entry: Any) -> bool:
    return isinstance(entry, Tensor)
