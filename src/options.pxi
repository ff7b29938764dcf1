# The options of one call, taken from the Python object that the checks made, and kept alive during the call.

cdef inline double largest_unit(const real* kind) noexcept nogil:
    """Of the exponent. It and its reciprocal leave room for the 127 or 1023 of `lowest_exponent`."""
    return 1e36 if sizeof(real) == 4 else 1e300


cdef void begin(Problem* problem, const Py_ssize_t* q_shape, const Py_ssize_t* k_shape, const Py_ssize_t* v_shape,
                double scale, const real* kind) noexcept nogil:
    """A problem of these sizes without any option."""
    cdef double largest = largest_unit(kind)
    memset(problem, 0, sizeof(Problem))
    problem.n_entries, problem.n_heads, problem.n_queries, problem.head_dim = (
        q_shape[0], q_shape[1], q_shape[2], q_shape[3])
    problem.n_kv_heads, problem.n_keys, problem.value_dim = k_shape[1], k_shape[2], v_shape[3]
    problem.group = problem.n_heads // problem.n_kv_heads if problem.n_kv_heads else 1
    problem.query_factor, problem.score_scale, problem.unit = -1 if scale < 0 else 1, 1, fabs(scale) * LOG2E
    if not 1 / largest < problem.unit < largest:    # what is beyond goes into the queries
        problem.unit = max(1 / largest, min(problem.unit, largest))
        problem.query_factor = scale / (problem.unit / LOG2E)
    problem.left = problem.right = unbounded


cdef Tensor describe_rows(char* data, Py_ssize_t* strides) noexcept nogil:
    """A tensor of one number per row: (entries, H, N)."""
    cdef Tensor tensor
    memset(&tensor, 0, sizeof(Tensor))
    tensor.data, tensor.entry, tensor.head, tensor.row = data, strides[0], strides[1], strides[2]
    return tensor


cdef class Options:
    """Borrows the arrays of an `fastattn._options.Options` for one call."""
    cdef object source
    cdef const int64_t[::1] lengths, offsets, query_bounds, key_bounds
    cdef const int64_t[:, ::1] pages
    cdef const double[::1] slopes, sinks
    cdef Py_buffer mask, bias

    def __cinit__(self, source):
        self.source = source
        self.lengths, self.offsets = source.lengths, source.offsets
        self.query_bounds, self.key_bounds = source.query_bounds, source.key_bounds
        self.pages, self.slopes, self.sinks = source.pages, source.slopes, source.sinks
        if source.mask is not None:
            PyObject_GetBuffer(source.mask, &self.mask, PyBUF_STRIDES)
        if source.bias is not None:
            PyObject_GetBuffer(source.bias, &self.bias, PyBUF_STRIDES)

    def __dealloc__(self):
        PyBuffer_Release(&self.mask)
        PyBuffer_Release(&self.bias)

    cdef int apply(self, Problem* problem) except -1:
        source = self.source
        problem.left, problem.right = source.left, source.right
        problem.softcap = source.softcap
        if self.lengths is not None:
            problem.lengths = &self.lengths[0]
        if self.offsets is not None:
            problem.offsets = &self.offsets[0]
        if self.slopes is not None:
            problem.slopes = &self.slopes[0]
        if self.sinks is not None:
            problem.sinks = &self.sinks[0]
        if self.query_bounds is not None:
            problem.n_entries = self.query_bounds.shape[0] - 1
            problem.query_bounds, problem.key_bounds = &self.query_bounds[0], &self.key_bounds[0]
            problem.n_queries, problem.n_keys = source.longest_queries, source.longest_keys
            problem.q.entry = problem.k.entry = problem.v.entry = problem.out.entry = problem.lse.entry = 0
        if self.pages is not None:
            problem.pages, problem.pages_per_entry = &self.pages[0, 0], self.pages.shape[1]
            problem.page_size = problem.n_keys
            problem.n_keys = problem.pages_per_entry * problem.page_size
        if source.mask is not None:
            problem.mask = self.describe_bias(&self.mask, source.mask_kind)
        if source.bias is not None:
            problem.bias = self.describe_bias(&self.bias, source.bias_kind)
        problem.has_bias = source.mask is not None or source.bias is not None or self.slopes is not None
        problem.byte_mask = (source.mask is not None and problem.mask.kind == kind_bool and problem.mask.column == 1
                             and source.bias is None and self.slopes is None)
        problem.single_bias = (source.mask is None) != (source.bias is None) and self.slopes is None
        if problem.softcap != 0 or self.slopes is not None or source.bias is not None or (
                source.mask is not None and source.mask_kind != kind_bool):
            problem.score_scale, problem.unit = problem.unit / LOG2E, LOG2E
        return 0

    cdef Tensor describe_bias(self, Py_buffer* buffer, int kind) noexcept:
        return describe(<char*>buffer.buf, buffer.shape, buffer.strides, kind, buffer.itemsize,
                        kind == self.source.computing_kind)
