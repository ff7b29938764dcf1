"""What type checkers make of calls. `test_typing.py` and pyright read this file; nothing here is run."""

from typing import TYPE_CHECKING, Any, assert_type

import numpy as np
from numpy.typing import NDArray

import fastattn
from fastattn import reference

if TYPE_CHECKING:
    from fastattn._kernels import avx2, avx512, avx512_bf16, baseline, cpu

Single = NDArray[np.float32]
Half = NDArray[np.float16]
Double = NDArray[np.float64]
Unknown = NDArray[Any]


def results_have_the_dtype_of_q(single: Single, half: Half, double: Double, integers: NDArray[np.int64]) -> None:
    assert_type(fastattn.attention(single, single, single), Single)
    assert_type(fastattn.attention(single, half, half, mask=double, causal=True, window=(3, None)), Single)
    assert_type(fastattn.attention(half, half, half, scale=np.float32(0.1), num_threads=np.int64(2)), Half)
    assert_type(fastattn.attention(double, double, double, kv_lens=[3, 4], out=double), Double)
    assert_type(fastattn.attention(integers, integers, integers, progress=print), Double)
    assert_type(fastattn.attention([[1, 0], [0.5, 1]], [[1, 2]], [[3, 4]]), Double)
    assert_type(fastattn.multi_head_attention(single, single, single, 4, num_kv_heads=2, causal=True), Single)
    assert_type(fastattn.multi_head_attention([[1, 2]], [[1, 2]], [[1, 2]], 2), Double)
    assert_type(fastattn.attention_varlen(half, half, half, [0, 2, 5], sinks=[0.5]), Half)
    assert_type(fastattn.attention_varlen(double, double, double, integers, integers), Double)
    assert_type(fastattn.scaled_dot_product_attention(single, single, single, None, 0.0, True), Single)
    assert_type(fastattn.scaled_dot_product_attention(integers, integers, integers, enable_gqa=True), Double)
    assert_type(fastattn.linear_attention(half, half, half, causal=True, progress=lambda done: done), Half)
    assert_type(fastattn.linear_attention([[1]], [[1]], [[1]], scale=2), Double)
    assert_type(fastattn.mhsa_forward(single, single, progress=[0.0].append), Single)
    assert_type(fastattn.mhsa_forward([[1, 2]], double), Double)


def return_lse_decides_what_comes(single: Single, half: Half, double: Double, flag: bool) -> None:
    assert_type(fastattn.attention(single, single, single, return_lse=False), Single)
    assert_type(fastattn.attention(single, single, single, return_lse=True), tuple[Single, Single])
    assert_type(fastattn.attention(half, half, half, return_lse=True), tuple[Half, Single])
    assert_type(fastattn.attention(double, double, double, return_lse=True), tuple[Double, Double])
    assert_type(fastattn.attention(single, single, single, return_lse=flag), Unknown | tuple[Unknown, Unknown])
    assert_type(fastattn.multi_head_attention(half, half, half, 2, return_lse=True), tuple[Half, Single])
    assert_type(fastattn.attention_varlen(half, half, half, [0, 5], return_lse=True), tuple[Half, Single])
    assert_type(fastattn.merge_states([half, half], [single, single]), tuple[Half, Single])
    assert_type(fastattn.merge_states(double, double), tuple[Double, Double])
    assert_type(reference.attention(single, single, single), Unknown)
    assert_type(reference.attention(single, single, single, causal=True, return_lse=True), tuple[Unknown, Unknown])
    assert_type(reference.multi_head_attention(single, single, single, 2, return_lse=True), tuple[Unknown, Unknown])
    assert_type(reference.attention_varlen(single, single, single, [0, 5], return_lse=True), tuple[Unknown, Unknown])


def caches_answer_in_the_dtype_of_q(single: Single, half: Half, double: Double, flag: bool) -> None:
    cache = fastattn.KVCache(2, 4, 100, np.int64(64), value_dim=32, dtype=np.int8)
    cache.append(single, single, lengths=[3, 4])
    assert_type(cache.attend(single, window=(3, None), causal=False), Single)
    assert_type(cache.attend(half, return_lse=True), tuple[Half, Single])
    assert_type(cache.attend(double, return_lse=flag), Unknown | tuple[Unknown, Unknown])
    assert_type(cache.nbytes, int)
    pages = fastattn.PagedKVCache(10, 16, 4, 64, dtype="float16")
    pages.append(half, half, [pages.allocate(), pages.fork(0, 3)], [1, 2])
    assert_type(pages.attend(half, [0, 1], mask=[True]), Half)
    assert_type(pages.attend(double, 0, return_lse=True), tuple[Double, Double])
    assert_type(pages.attend(single, [0], return_lse=flag), Unknown | tuple[Unknown, Unknown])
    assert_type(pages.sequences, list[int])


def the_rest(arrays: list[Single]) -> None:
    assert_type(fastattn.attention(arrays, arrays, arrays), Unknown)
    assert_type(fastattn.available_isas(), tuple[str, ...])
    assert_type(fastattn.get_num_threads(), int)
    assert_type(fastattn.show_config("dict"), dict[str, str | int | tuple[str, ...]])
    assert_type(fastattn.__version__, str)


if TYPE_CHECKING:  # importing a kernel module runs instructions of its level
    assert_type(baseline.isa, str)
    assert_type(avx2.vector_bits, int)
    assert_type(avx512.openmp, bool)
    assert_type(avx512_bf16.isa, str)
    assert_type(cpu.supported_levels(), tuple[str, ...])
