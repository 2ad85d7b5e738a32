"""``torch.compile`` of a piece, once for all row counts: compiling takes seconds."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor


def compiled(function: Callable[..., Tensor], *with_rows: str, backend: str = "inductor") -> Callable[..., Tensor]:
    """``function``, compiled at its first call with the first dimension of the arguments ``with_rows`` free."""

    @cache
    def program() -> Callable[..., Tensor]:
        return torch.compile(function, backend=backend)  # only here: this imports for seconds

    def run(**arguments: Any) -> Tensor:
        for name in with_rows:
            if arguments[name] is not None:
                torch._dynamo.maybe_mark_dynamic(arguments[name], 0)
        out: Tensor = program()(**arguments)
        return out

    return run
