# The call without options on float32 arrays. It borrows the arrays' buffers directly: four typed memoryviews would
# cost more than a small attention does.

cdef bint borrow(object array, Py_buffer* buffer) except -1:
    """Borrow an array's buffer; whether it is 4-D. That it is float32 of native byte order the caller has seen: to have
    the format written out costs as much as all the rest of borrowing."""
    PyObject_GetBuffer(array, buffer, PyBUF_STRIDES)
    return buffer.ndim == 4


cdef bint fit_together(const Py_ssize_t* q, const Py_ssize_t* k, const Py_ssize_t* v) noexcept:
    """Whether shapes (B, H, N, D), (B, K, S, D), (B, K, S, E) are those of one plain call."""
    return (q[0] == k[0] == v[0] and q[3] == k[3] and k[1] == v[1] and k[2] == v[2]
            and k[1] != 0 and q[1] % k[1] == 0 and q[3] != 0)


cdef object attend_plainly(Py_buffer* q, Py_buffer* k, Py_buffer* v, Py_buffer* out, object empty, object dtype,
                           object ask_threads):
    cdef Problem problem
    result = empty((q.shape[0], q.shape[1], q.shape[2], v.shape[3]), dtype)
    borrow(result, out)
    begin(&problem, q.shape, k.shape, v.shape, 1 / sqrt(<double>q.shape[3]), <const float*>NULL)
    problem.q = describe(<char*>q.buf, q.shape, q.strides, kind_float32, 4, True)
    problem.k = describe(<char*>k.buf, k.shape, k.strides, kind_float32, 4, True)
    problem.v = describe(<char*>v.buf, v.shape, v.strides, kind_float32, 4, True)
    problem.out = describe(<char*>out.buf, out.shape, out.strides, kind_float32, 4, True)
    run[float](&problem, ask_threads() if operations_of(&problem) > serial_operations else 1, None, NULL)
    return result


def attention_common(q, k, v, empty, dtype, ask_threads):
    """A new result, or None when the arrays, which are float32, are not 4-D or do not fit together.

    `empty` and dtype allocate; `ask_threads` gives the number of threads, asked only by calls worth dividing."""
    cdef Py_buffer buffers[4]
    memset(buffers, 0, sizeof(buffers))
    try:
        if (borrow(q, &buffers[0]) and borrow(k, &buffers[1]) and borrow(v, &buffers[2])
                and fit_together(buffers[0].shape, buffers[1].shape, buffers[2].shape)):
            return attend_plainly(&buffers[0], &buffers[1], &buffers[2], &buffers[3], empty, dtype, ask_threads)
        return None
    finally:
        for i in range(4):
            PyBuffer_Release(&buffers[i])
