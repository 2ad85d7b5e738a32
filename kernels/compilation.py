"""How many kernels Triton has compiled, so that a caller can prove that serving compiles none."""

from typing import Any

_count = 0
_counting = False


def compilations() -> int:
    """How many kernels Triton has compiled in this process since the first call of this function.

    A kernel that comes from Triton's disk cache counts too: with an empty cache it would have been compiled. Counts
    every kernel of the process, not this library's alone. 0 for ever in Triton's interpreter.
    """
    global _counting
    if not _counting:
        _count_from_now_on()
        _counting = True
    return _count


def _count_from_now_on() -> None:
    from triton import knobs

    earlier = knobs.runtime.jit_post_compile_hook

    def hook(**kernel: Any) -> Any:
        global _count
        _count += 1
        return earlier(**kernel) if earlier is not None else None

    knobs.runtime.jit_post_compile_hook = hook
