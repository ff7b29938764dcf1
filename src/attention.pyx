# Exact attention on strided arrays: the entry points of one kernel module.
#
# Scores, softmax and weighted sum follow each other block by block of keys; no array of queries x keys exists.
# `prefill.pxi` is the loop for many queries, `decode.pxi` the one for few. Tiles in C++ headers keep the innermost
# loops in registers.

from cython.parallel cimport prange
from libc.math cimport INFINITY, NAN, exp, exp2, fabs, log, sqrt
from libc.stdint cimport int8_t, int64_t, uint16_t
from libc.string cimport memcpy, memset
from cpython.exc cimport PyErr_CheckSignals
from cpython.object cimport PyObject
from cpython.ref cimport Py_DECREF, Py_INCREF
from cpython.buffer cimport PyBUF_STRIDES, PyBuffer_Release, PyObject_GetBuffer

from tiles cimport *

import atexit
import os
from threading import get_ident, main_thread

ctypedef fused real:
    float
    double

cdef extern from "Python.h":
    const Py_ssize_t PY_SSIZE_T_MAX

cdef double LOG2E = 1.4426950408889634

include "problem.pxi"
include "progress.pxi"
include "panel.pxi"
include "ahead.pxi"
include "bias.pxi"
include "prefill.pxi"
include "runs.pxi"
include "decode.pxi"
include "work.pxi"
include "options.pxi"
include "common_call.pxi"

isa = isa_name.decode()
openmp = bool(has_openmp)
vector_bits = 8 * vector_bytes
vector_extension = bool(has_vector_extension)


def max_threads():
    """OpenMP's own limit at this moment; 1 in a build without OpenMP."""
    return openmp_max_threads()


def decodes_into_first_level(wanted=None):
    """Whether decoding brings memory into the first-level cache. `wanted` changes that where the level has both, on
    which no number depends."""
    global into_first_level
    if wanted is not None and either_cache:
        into_first_level = wanted
    return bool(into_first_level)


def attention_float32(const float[:, :, :, :] q, const float[:, :, :, :] k, const float[:, :, :, :] v,
                      float[:, :, :, :] out, float[:, :, :] lse, double scale, int num_threads, options=None):
    """out (B, H, N, E) = attention of q (B, H, N, D), k (B, K, S, D), v (B, K, S, E); lse (B, H, N) or None."""
    cdef Problem problem
    begin(&problem, q.shape, k.shape, v.shape, scale, <const float*>NULL)
    problem.q = describe(<char*>&q[0, 0, 0, 0], q.shape, q.strides, kind_float32, 4, True)
    problem.k = describe(<char*>&k[0, 0, 0, 0], k.shape, k.strides, kind_float32, 4, True)
    problem.v = describe(<char*>&v[0, 0, 0, 0], v.shape, v.strides, kind_float32, 4, True)
    problem.out = describe(<char*>&out[0, 0, 0, 0], out.shape, out.strides, kind_float32, 4, True)
    if lse is not None:
        problem.lse = describe_rows(<char*>&lse[0, 0, 0], lse.strides)
    run[float](&problem, num_threads, options, NULL)


def attention_float64(const double[:, :, :, :] q, const double[:, :, :, :] k, const double[:, :, :, :] v,
                      double[:, :, :, :] out, double[:, :, :] lse, double scale, int num_threads, options=None):
    """As attention_float32, in float64."""
    cdef Problem problem
    begin(&problem, q.shape, k.shape, v.shape, scale, <const double*>NULL)
    problem.q = describe(<char*>&q[0, 0, 0, 0], q.shape, q.strides, kind_float64, 8, True)
    problem.k = describe(<char*>&k[0, 0, 0, 0], k.shape, k.strides, kind_float64, 8, True)
    problem.v = describe(<char*>&v[0, 0, 0, 0], v.shape, v.strides, kind_float64, 8, True)
    problem.out = describe(<char*>&out[0, 0, 0, 0], out.shape, out.strides, kind_float64, 8, True)
    if lse is not None:
        problem.lse = describe_rows(<char*>&lse[0, 0, 0], lse.strides)
    run[double](&problem, num_threads, options, NULL)


def attention_half(const uint16_t[:, :, :, :] q, const uint16_t[:, :, :, :] k, const uint16_t[:, :, :, :] v,
                   uint16_t[:, :, :, :] out, float[:, :, :] lse, double scale, int num_threads, bint bfloat16,
                   options=None):
    """As attention_float32, on the bits of float16 or bfloat16 numbers."""
    cdef Problem problem
    cdef int kind = kind_bfloat16 if bfloat16 else kind_float16
    begin(&problem, q.shape, k.shape, v.shape, scale, <const float*>NULL)
    problem.pairs = has_pair_products and bfloat16 and problem.query_factor == 1
    problem.q = describe(<char*>&q[0, 0, 0, 0], q.shape, q.strides, kind, 2, False)
    problem.k = describe(<char*>&k[0, 0, 0, 0], k.shape, k.strides, kind, 2, False)
    problem.v = describe(<char*>&v[0, 0, 0, 0], v.shape, v.strides, kind, 2, False)
    problem.out = describe(<char*>&out[0, 0, 0, 0], out.shape, out.strides, kind, 2, False)
    if lse is not None:
        problem.lse = describe_rows(<char*>&lse[0, 0, 0], lse.strides)
    run[float](&problem, num_threads, options, NULL)


def attention_float32_half(const float[:, :, :, :] q, const uint16_t[:, :, :, :] k, const uint16_t[:, :, :, :] v,
                           float[:, :, :, :] out, float[:, :, :] lse, double scale, int num_threads, bint bfloat16,
                           options=None):
    """As attention_float32, with keys and values in float16 or bfloat16."""
    cdef Problem problem
    cdef int kind = kind_bfloat16 if bfloat16 else kind_float16
    begin(&problem, q.shape, k.shape, v.shape, scale, <const float*>NULL)
    problem.q = describe(<char*>&q[0, 0, 0, 0], q.shape, q.strides, kind_float32, 4, True)
    problem.k = describe(<char*>&k[0, 0, 0, 0], k.shape, k.strides, kind, 2, False)
    problem.v = describe(<char*>&v[0, 0, 0, 0], v.shape, v.strides, kind, 2, False)
    problem.out = describe(<char*>&out[0, 0, 0, 0], out.shape, out.strides, kind_float32, 4, True)
    if lse is not None:
        problem.lse = describe_rows(<char*>&lse[0, 0, 0], lse.strides)
    run[float](&problem, num_threads, options, NULL)


def attention_int8(const float[:, :, :, :] q, const int8_t[:, :, :, :] k, const int8_t[:, :, :, :] v,
                   const float[:, :, :] k_scales, const float[:, :, :] v_scales, float[:, :, :, :] out,
                   float[:, :, :] lse, double scale, int num_threads, options=None):
    """As attention_float32, with keys and values as int8 codes, and one scale per key and head (B, K, S)."""
    cdef Problem problem
    begin(&problem, q.shape, k.shape, v.shape, scale, <const float*>NULL)
    problem.q = describe(<char*>&q[0, 0, 0, 0], q.shape, q.strides, kind_float32, 4, True)
    problem.k = describe(<char*>&k[0, 0, 0, 0], k.shape, k.strides, kind_int8, 1, False)
    problem.v = describe(<char*>&v[0, 0, 0, 0], v.shape, v.strides, kind_int8, 1, False)
    problem.k_scales = describe_rows(<char*>&k_scales[0, 0, 0], k_scales.strides)
    problem.v_scales = describe_rows(<char*>&v_scales[0, 0, 0], v_scales.strides)
    problem.out = describe(<char*>&out[0, 0, 0, 0], out.shape, out.strides, kind_float32, 4, True)
    if lse is not None:
        problem.lse = describe_rows(<char*>&lse[0, 0, 0], lse.strides)
    run[float](&problem, num_threads, options, NULL)
