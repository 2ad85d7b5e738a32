"""Whether a captured tower's weights are still where its graphs read them."""

from torch import Tensor

from ernie_vit.model.resampler import Resampler
from ernie_vit.model.tower import VisionTower


class WeightWatch:
    """Remembers where a tower's weights are, and keeps their memory; made when the graphs are.

    Every call asks it, so it walks plain dictionaries.
    """

    def __init__(self, tower: VisionTower, resampler: Resampler) -> None:
        self._tower = tower
        self._children = [module._modules for module in tower.modules() if module._modules]
        self._parameters = [module._parameters for module in tower.modules() if module._parameters]
        self._resampler_parameters = [module._parameters for module in resampler.modules() if module._parameters]
        self._where = self._fingerprint()
        self._kept = [parameter.detach() for parameter in tower.parameters()]

    def moved(self) -> bool:
        """Whether a weight lies elsewhere, has another dtype, or a module was replaced. In-place edits move nothing."""
        return self._fingerprint() != self._where

    def let_go(self) -> None:
        """Keep the captured weights' memory no longer."""
        self._kept.clear()

    def want_gradient(self) -> bool:
        """Whether a parameter asks for a gradient. The resampler's count: it reads what the next replay overwrites."""
        return any(
            parameter is not None and parameter.requires_grad
            for parameters in (*self._parameters, *self._resampler_parameters)
            for parameter in parameters.values()
        )

    def _fingerprint(self) -> list[object]:
        modules = [child for children in self._children for child in children.values()]
        addresses = [
            parameter.data_ptr()
            for parameters in self._parameters
            for parameter in parameters.values()
            if parameter is not None
        ]
        # memory that went away and came back may hold another dtype
        weight: Tensor = self._tower.patch_embed.proj.weight
        return [weight.dtype, modules, addresses]
