"""Compiling ahead in other processes."""

import os

import pytest
from triton import knobs

from bench.compile_ahead import compile_ahead


def test_results_in_order():
    assert compile_ahead(abs, [-2, 3, -1]) == [2, 3, 1]


def test_what_a_variant_raises_is_raised():
    with pytest.raises(ZeroDivisionError):
        compile_ahead((1).__truediv__, [1, 0])


def test_the_cache_stays_where_the_processes_left_their_kernels(monkeypatch):
    """torch.compile gives a process without this variable a cache of its own, where nothing compiled ahead is."""
    monkeypatch.setenv("TRITON_CACHE_DIR", "")  # so that the test's end takes back what follows
    monkeypatch.delenv("TRITON_CACHE_DIR")
    before = knobs.cache.dir
    compile_ahead(abs, [1])
    assert os.environ["TRITON_CACHE_DIR"] == before
