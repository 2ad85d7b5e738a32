"""How far everybody's tokens, and hidden rows after each block, are from the same weights in float64."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from bench.encoders.encoder import Encoder
from bench.measure import ALLOWED_ERROR, relative_error
from bench.plan import Plan, pixels
from bench.records import Accuracy, Missing
from ernie_vit import ErnieVisionEncoder

PLAIN = "plain PyTorch"


def check_tokens(
    encoders: Sequence[Encoder], exact: ErnieVisionEncoder, plain: Encoder, plan: Plan
) -> tuple[list[Accuracy], list[Missing]]:
    """Errors of the tokens of ``plan.checked``, and the encoders that are more than ``ALLOWED_ERROR`` times as far off
    as plain PyTorch, or that raised: those are not to be timed."""
    errors: list[Accuracy] = []
    wrong: dict[str, Missing] = {}
    for name in plan.checked:
        sizes = plan.inputs[name]
        rows, grid = pixels(sizes, device=plan.device, dtype=plan.dtype), torch.tensor(sizes)
        truth = exact(rows.double(), grid)
        allowed = ALLOWED_ERROR * relative_error(plain(rows, grid), truth)
        for encoder in (plain, *encoders):
            if encoder.provider in wrong or not encoder.takes(sizes):
                continue
            try:
                error = relative_error(_same_shape(encoder(rows, grid), truth), truth)
            except Exception as failure:  # whatever a peer does not like here: the others are checked all the same
                wrong[encoder.provider] = Missing.of(encoder.provider, failure)
                continue
            errors.append(Accuracy(name, encoder.provider, None, error))
            if not error <= allowed:
                reason = f"wrong by value: {name}: error {error:.2e}, allowed {allowed:.2e}"
                wrong[encoder.provider] = Missing(encoder.provider, reason)
    return errors, list(wrong.values())


class Blocks:
    """The hidden rows of one of a plan's inputs in float64, after patch embedding (block 0) and after each block."""

    def __init__(self, name: str, exact: ErnieVisionEncoder, plan: Plan) -> None:
        sizes = plan.inputs[name]
        self.name, self.sizes, self._grid = name, sizes, torch.tensor(sizes)
        self._rows = pixels(sizes, device=plan.device, dtype=plan.dtype)
        self._truth = hidden_rows(exact.vision_tower, lambda: exact(self._rows.double(), self._grid))

    def errors(self, encoder: Encoder) -> Iterator[Accuracy]:
        """Those of an encoder after each block; none if nobody can look at its blocks.

        Raises:
            ValueError: it has another number of blocks, or they have other shapes.
        """
        if encoder.tower is None or not encoder.takes(self.sizes):
            return
        found = hidden_rows(encoder.tower, lambda: encoder.run(self._rows, self._grid))
        for block, (mine, true) in enumerate(zip(found, self._truth, strict=True)):
            yield Accuracy(self.name, encoder.provider, block, relative_error(_same_shape(mine, true), true))


def hidden_rows(tower: nn.Module, call: Callable[[], Any]) -> list[Tensor]:
    """What the tower's patch embedding and each of its blocks put out during ``call``, ``[rows, hidden_size]``."""
    with _recorded(tower) as rows:
        call()
    return rows


@contextmanager
def _recorded(tower: Any) -> Iterator[list[Tensor]]:
    rows: list[Tensor] = []

    def record(_module: nn.Module, _arguments: Any, out: Any) -> None:
        out = out[0] if isinstance(out, tuple) else out
        rows.append(out.detach().flatten(0, -2).clone())  # some have a batch of one in between

    hooks = [module.register_forward_hook(record) for module in (tower.patch_embed, *tower.blocks)]
    try:
        yield rows
    finally:
        for hook in hooks:
            hook.remove()


def _same_shape(out: Tensor, truth: Tensor) -> Tensor:
    if out.shape != truth.shape:
        raise ValueError(f"expected shape {list(truth.shape)}, got {list(out.shape)}")
    return out
