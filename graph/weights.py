"""Whether a captured encoder's weights are still where its graphs read them."""

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain
from operator import attrgetter, is_, is_not
from typing import Any

from torch import Tensor, nn

_END = object()  # behind the last entry, so that one more or one less is a difference


class WeightWatch:
    """Remembers where captured modules' weights are, and keeps their memory; made when the graphs are.

    Every call asks it about some hundred parameters, so it walks the modules' own dictionaries, without a Python loop.

    Args:
        captured: modules whose weights the graphs read.
        eager: modules that compute behind the graphs.
    """

    def __init__(self, captured: Iterable[nn.Module], eager: Iterable[nn.Module]) -> None:
        modules = [module for root in captured for module in root.modules()]
        # views: they follow what happens to a module
        self._children = [module._modules.values() for module in modules if module._modules]
        self._tables = [module._parameters.values() for module in modules if module._parameters]
        self._modules = [*chain.from_iterable(self._children)]
        self._entries = [*self._present()]
        self._weights = [entry for entry in self._entries if isinstance(entry, Tensor)]
        self._where = self._addresses()
        self._kept = [weight.detach() for weight in self._weights]
        self._behind = [module._parameters.values() for root in eager for module in root.modules()]

    def moved(self) -> bool:
        """Whether a weight lies elsewhere, has another dtype, or a module was replaced. In-place edits move nothing."""
        if [*chain.from_iterable(self._children)] != self._modules:
            return True
        # one by one: == of tensors compares what they hold
        return not all(map(is_, self._present(), self._entries)) or self._addresses() != self._where

    def let_go(self) -> None:
        """Keep the captured weights' memory no longer."""
        self._modules, self._entries, self._weights, self._kept = [], [], [], []

    def want_gradient(self) -> bool:
        """Whether a parameter asks for a gradient. Those behind the graphs count: what they read is overwritten."""
        behind = (parameter for parameter in chain.from_iterable(self._behind) if parameter is not None)
        return any(map(attrgetter("requires_grad"), chain(self._weights, behind)))

    def _present(self) -> Iterator[object]:
        # without a bias that there is none of: vLLM puts reloaded weights back behind it
        return chain(filter(partial(is_not, None), chain.from_iterable(self._tables)), (_END,))

    def _addresses(self) -> list[Any]:
        # memory that went away and came back may hold another dtype
        return [self._weights[0].dtype, *map(Tensor.data_ptr, self._weights)]
