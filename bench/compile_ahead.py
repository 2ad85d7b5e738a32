"""Compiling many variants of a kernel at once, each by its first launch in a process of its own.

The processes leave what they compiled in Triton's cache on disk, where this process finds it.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import TypeVar

from triton import knobs

T = TypeVar("T")
R = TypeVar("R")
MOST_PROCESSES = 16  # each holds a CUDA context, about 0.5 GiB


def compile_ahead(launch: Callable[[T], R], variants: Sequence[T]) -> list[R]:
    """What ``launch``, a function of a module, returns for each variant; whatever it raises is raised here."""
    os.environ.setdefault("TRITON_CACHE_DIR", knobs.cache.dir)  # else torch.compile moves the cache of this process
    workers = min(len(variants), len(os.sched_getaffinity(0)), MOST_PROCESSES)
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        return list(pool.map(launch, variants))
