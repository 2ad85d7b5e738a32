#!/usr/bin/env bash
# Packs vLLM with FlashAttention-3, and on request FlashAttention-4, for a GPU host without network: see bench/offline.md.
#
# usage: bench/bundle_vllm.sh [--fa4] FOLDER
#
# FOLDER gets bundle.tar.xz.00, .01 and so on, none larger than $PIECE. It is a tree for PYTHONPATH on a host with
# Linux x86-64, Python $PYTHON and torch 2.11 for CUDA 13; needed here: pip, xz, 3 GB of disk, five minutes.
set -euo pipefail

PYTHON=${PYTHON:-3.12}
PIECE=${PIECE:-60M}

# vLLM's wheel without what it asks for: torch and CUDA are the host's. These are what importing its encoder needs.
VLLM=(vllm==0.33.0 apache-tvm-ffi==0.1.15.post2 annotated-types cachetools cbor2 fastapi==0.136.3 httpcore2 httpx2 jiter
    llguidance==1.7.6 msgspec openai==3.57.0 oss-harmony partial-json-parser pybase64 pydantic==2.14.4
    pydantic-core==2.50.5 pyzmq sniffio starlette truststore typing-inspection uvloop xgrammar==0.2.8)
FA4=(flash-attn-4==4.0.0b36 nvidia-cutlass-dsl==4.8.1 nvidia-cutlass-dsl-libs-base==4.8.1
    nvidia-cutlass-dsl-libs-core==4.8.1 nvidia-cutlass-dsl-libs-cu13==4.8.1 quack-kernels==0.6.5
    torch-c-dlpack-ext==0.1.5)

packages=("${VLLM[@]}")
if [[ ${1-} == --fa4 ]]; then
    packages+=("${FA4[@]}")
    shift
fi
[[ $# == 1 && $1 != -* ]] || { sed -n 's/^# usage: /usage: /p' "$0" >&2; exit 2; }
mkdir -p "$1"
out=$(cd "$1" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

platforms=()
for platform in manylinux_2_{17,24,26,27,28,31,34,35} manylinux2014 manylinux_2_5 manylinux1; do
    platforms+=(--platform "${platform}_x86_64")
done
python3 -m pip download --quiet --no-deps --only-binary=:all: --dest "$work/wheels" --python-version "$PYTHON" \
    --implementation cp --abi "cp${PYTHON/./}" --abi abi3 --abi none "${platforms[@]}" --platform any "${packages[@]}"

mkdir "$work/tree"
for wheel in "$work"/wheels/*.whl; do
    python3 -m zipfile -e "$wheel" "$work/tree"
    rm "$wheel"
done
# Of vLLM's extensions the two that its encoder runs stay; both are built for torch's stable interface.
find "$work/tree/vllm" -name '*.so' ! -name '_vllm_fa3_C*' ! -name '_C_stable_libtorch*' -delete
rm -rf "$work/tree/vllm/vllm-rs" "$work/tree/vllm/third_party/deep_gemm"
find "$work/tree/vllm" -path '*configs*' -name '*.json' -delete

rm -f "$out"/bundle.tar.xz.*
tar -C "$work/tree" -c . | xz -T0 -3 | split -d -b "$PIECE" - "$out/bundle.tar.xz."
ls -l "$out"
