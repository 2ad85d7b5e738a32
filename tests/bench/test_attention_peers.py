"""Finding and calling others' attention, with stand-ins for what is not installed here."""

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from pretended_measure import attend
from torch import Tensor

from bench import attention_peers, bench_attention
from bench.attention_peers import Peer, Sequences, fa3_library, plain_triton, vllm_triton
from bench.measure import ALLOWED_ERROR, Case, relative_error
from bench.sizes import DTYPE, HEAD_DIM, HEADS
from ernie_vit.kernels.attention import attention_ref

SEQUENCES = Sequences((5, 17, 3))


def heads(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = torch.randn(rows, 3, HEADS, HEAD_DIM, dtype=DTYPE).unbind(1)
    return q, k, v


def assert_right(out: Tensor, q: Tensor, k: Tensor, v: Tensor) -> None:
    plain, exact = (
        attention_ref(*(x.to(dtype) for x in (q, k, v)), SEQUENCES.cu_seqlens, SEQUENCES.longest)
        for dtype in (DTYPE, torch.float64)
    )
    assert out.shape == exact.shape
    assert relative_error(out, exact) <= ALLOWED_ERROR * relative_error(plain, exact)


def test_sequences() -> None:
    assert SEQUENCES.cu_seqlens.tolist() == [0, 5, 22, 25]
    assert SEQUENCES.cu_seqlens.dtype == SEQUENCES.on_device.dtype == torch.int32
    assert SEQUENCES.on_device.tolist() == [5, 17, 3]
    assert (SEQUENCES.rows, SEQUENCES.longest, SEQUENCES.equal) == (25, 17, False)
    assert Sequences((4, 4)).equal


def test_fa3_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ERNIE_VIT_FA3", str(tmp_path / "fa3.so"))
    assert fa3_library() == tmp_path / "fa3.so"


def test_fa3_is_found_in_vllm_without_importing_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("ERNIE_VIT_FA3", raising=False)
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    package = tmp_path / "vllm"
    library = package / "vllm_flash_attn" / "_vllm_fa3_C.abi3.so"
    library.parent.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(FileNotFoundError, match="ERNIE_VIT_FA3"):
        fa3_library()
    library.touch()
    assert fa3_library() == library
    assert "vllm" not in sys.modules


def test_vllm_triton_gets_starts_and_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    def context_attention_fwd(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        b_start_loc: Tensor,
        b_seq_len: Tensor,
        max_input_len: int,
        is_causal: bool = True,
    ) -> None:
        assert not is_causal
        assert o.is_contiguous()
        for start, length in zip(b_start_loc.tolist(), b_seq_len.tolist(), strict=True):
            rows = slice(start, start + length)
            o[rows] = attend(Sequences((length,)))(q[rows], k[rows], v[rows])
        assert max_input_len == int(b_seq_len.max())

    path = "vllm.v1.attention.ops.triton_prefill_attention"
    for end in range(1, path.count(".") + 2):
        name = ".".join(path.split(".")[:end])
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules[path], "context_attention_fwd", context_attention_fwd, raising=False)
    q, k, v = heads(SEQUENCES.rows)
    assert_right(vllm_triton()(SEQUENCES)(q, k, v), q, k, v)


@pytest.mark.interpreter
def test_our_plain_kernel() -> None:
    q, k, v = heads(SEQUENCES.rows)
    assert_right(plain_triton()(SEQUENCES)(q, k, v), q, k, v)


@pytest.mark.interpreter
def test_heads_of_80_and_of_128_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    cases: list[Case] = []
    monkeypatch.setitem(bench_attention.LENGTHS, "few", SEQUENCES.lengths)
    bench_attention.test_channels("few", cases.append)
    (case,) = cases
    for provider in case.providers.values():
        exact, plain = provider.reference.exact(case.make(0)), provider.reference.plain(case.make(0))
        out = provider.reference.part(provider.run(case.make(0)))
        assert out.shape == exact.shape == (SEQUENCES.rows, bench_attention.CHECKED_HEADS, HEAD_DIM)
        assert relative_error(out, exact) <= ALLOWED_ERROR * relative_error(plain, exact)


def test_what_is_not_installed_is_told_and_slow_peers_are_not_asked_in_a_quick_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def not_installed() -> attention_peers.Adapter:
        raise ModuleNotFoundError("No module named 'flash_attn'")

    peers = {
        "there": Peer(lambda: attend),
        "absent": Peer(not_installed),
        "slow": Peer(lambda: attend, quick=False),
        "slow and absent": Peer(not_installed, quick=False),
    }
    monkeypatch.setattr(attention_peers, "PEERS", peers)
    found, why_not = attention_peers.available(quick=True)
    assert list(found) == ["there"]
    assert why_not == {"absent": "ModuleNotFoundError: No module named 'flash_attn'"}
    found, why_not = attention_peers.available(quick=False)
    assert list(found) == ["there", "slow"]
    assert list(why_not) == ["absent", "slow and absent"]
