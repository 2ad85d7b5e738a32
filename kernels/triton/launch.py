"""Launching a kernel: the first time through Triton's JIT, afterwards what it compiled, directly.

The JIT binds arguments, asks each for its specialisation and looks the kernel up at every launch: about two thirds of
a launch's time on the host. Here a launch looks up the compiled kernel by what the JIT would specialise on, which for
these kernels is little: dtypes, absent pointers, alignment where the kernel asks for it, constexprs and options.
"""

from math import gcd
from typing import Any

import torch
from torch import Tensor

from ernie_vit.kernels.dispatch import interpreting, triton_version

# The releases in which ``compiled[grid](*arguments)`` was tested: all arguments in order, constexprs too.
DIRECT_TRITON = ("3.6", "3.7", "3.8", "3.9")
INT32 = 2**31


class Launcher:
    """Launches of one kernel.

    Args:
        kernel: decorated by ``triton.jit`` or ``gluon.jit``. Its constexprs stand last in its signature; its run-time
            integers are ``do_not_specialize``, so that no number of rows compiles another kernel.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._compiled: dict[tuple[Any, ...], Any] = {}
        self._direct = (
            not interpreting()
            # AMD's backend specialises on the sizes of tensors as well
            and torch.version.hip is None
            and ".".join(str(triton_version()).split(".")[:2]) in DIRECT_TRITON
            and self._learn()
        )

    def _learn(self) -> bool:
        """Read what direct launches need of Triton's internals; False in a build that does not have it."""
        try:
            from triton.compiler import CompiledKernel

            runtime = [param for param in self.kernel.params if not param.is_constexpr]
            self._aligned = [not (p.do_not_specialize or p.do_not_specialize_on_alignment) for p in runtime]
            self._launchable = CompiledKernel
            return hasattr(CompiledKernel, "__getitem__")
        except (ImportError, AttributeError):
            return False

    def __call__(
        self,
        programs: int,
        device: torch.device,
        arguments: tuple[Any, ...],
        constexprs: tuple[Any, ...],
        **options: Any,
    ) -> None:
        """Launch on the current stream of ``device``.

        Args:
            programs: how many, at least 1.
            device: of the tensors.
            arguments: the run-time arguments in order: tensors, None for an absent one, numbers, descriptors. What a
                descriptor says beside its address and shape (dtype, blocks, layout) follows from ``constexprs``.
            constexprs: the constexprs in order, hashable.
            options: compile options such as ``num_warps``, always the same ones for a kernel.
        """
        if not self._direct:
            if device.type == "cpu":
                self.kernel[(programs,)](*arguments, *constexprs, **options)
            else:
                with torch.cuda.device(device):
                    self.kernel[(programs,)](*arguments, *constexprs, **options)
            return
        current = torch.cuda.current_device()
        if device.index != current:
            with torch.cuda.device(device):
                self(programs, device, arguments, constexprs, **options)
            return
        key = self.key(current, arguments, constexprs, options)
        compiled = self._compiled.get(key)
        if compiled is None:
            self._first(key, programs, arguments, constexprs, options)
        else:
            compiled[(programs, 1, 1)](*arguments, *constexprs)

    def key(
        self, device: int, arguments: tuple[Any, ...], constexprs: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[Any, ...]:
        """What decides which compiled kernel serves a launch."""
        return (device, constexprs, *options.values(), *map(_specialisation, arguments, self._aligned))

    def _first(
        self,
        key: tuple[Any, ...],
        programs: int,
        arguments: tuple[Any, ...],
        constexprs: tuple[Any, ...],
        options: dict[str, Any],
    ) -> None:
        compiled = self.kernel[(programs,)](*arguments, *constexprs, **options)
        if isinstance(compiled, self._launchable):  # and not one that is compiled in the background
            self._compiled[key] = compiled


def row_alignment(matrix: Tensor) -> int:
    """Bytes, at most 16, that divide the address of every row: a constexpr where kernels load rows at any address.

    All slices of rows of a buffer have the same one if its rows are less aligned than itself.
    """
    return gcd(matrix.data_ptr(), matrix.stride(0) * matrix.element_size(), 16)


def _specialisation(argument: Any, aligned: bool) -> Any:
    """What of a run-time argument decides which kernel is compiled."""
    if argument is None:
        return None
    if isinstance(argument, Tensor):
        return (argument.dtype, argument.data_ptr() % 16 == 0) if aligned else argument.dtype
    if type(argument) is int:
        return -INT32 <= argument < INT32
    return type(argument)
