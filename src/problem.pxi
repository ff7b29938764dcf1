# What one call asks for, without Python: strided arrays, sizes, options. Strides are in bytes.
#
# Legend: an *entry* is one leading (batch) index or one member of a packed batch; a *row* is one query of one head.
# The query rows of all `group` heads that share a key/value head form one list, query by query
# (row = query * group + head in group), so that keys and values are read once for all of them.

cdef enum:
    max_lanes = 32                  # lanes of the widest panel: 2 x 16
    panels_per_item = 8             # panels that share a key block while it is in cache

cdef int64_t unbounded = 1 << 61    # a window side without a bound: sums of two of them still fit 64 bits

cdef struct Tensor:
    char* data                      # NULL: absent
    Py_ssize_t entry, head, row, column
    int kind
    bint packed                     # rows of neighbouring, aligned elements
    bint direct                     # that, and of the computing type: usable in place

cdef struct Problem:
    Tensor q, k, v, out             # (entries, H or K, N or S, D or E)
    Tensor k_scales, v_scales       # (entries, K, S), of int8 keys and values; else absent
    Tensor mask, bias               # (entries, H, N, S), stride 0 where broadcast
    Tensor lse                      # (entries, H, N)
    Py_ssize_t n_entries, n_heads, n_kv_heads, group
    Py_ssize_t n_queries, n_keys, head_dim, value_dim
    bint pairs                      # bfloat16 queries and keys are multiplied in pairs, see products.hpp
    double softcap                  # 0: off
    double query_factor             # of the queries: the scale's sign, which is exact; or all of an extreme one
    double score_scale              # of scores: |scale| when something is added to them, in natural units, else 1
    double unit                     # weight = 2**(unit * (score - maximum)): where |scale| is otherwise
    bint has_bias                   # mask, bias or slopes given
    bint byte_mask                  # a bool mask of contiguous rows, and nothing is added
    bint single_bias                # of the three one, a mask or a bias
    int64_t left, right             # window around the diagonal, in keys
    const int64_t* lengths          # (entries,) valid keys, or NULL
    const int64_t* offsets          # (entries,) position of query 0 among the keys, or NULL: end-aligned
    const int64_t* query_bounds     # (entries + 1,) rows of a packed batch, or NULL
    const int64_t* key_bounds
    const int64_t* pages            # (entries, pages_per_entry) page numbers, or NULL
    Py_ssize_t pages_per_entry, page_size
    const double* slopes            # (entries, H) ALiBi slopes, or NULL
    const double* sinks             # (H,) or NULL

cdef struct Entry:
    Py_ssize_t index, n_queries, n_keys
    Py_ssize_t first_query, first_key
    int64_t offset                  # the key on query 0's diagonal


cdef Tensor describe(char* data, const Py_ssize_t* shape, const Py_ssize_t* strides, int kind, Py_ssize_t item_size,
                     bint in_place) noexcept nogil:
    """Strides of axes of one element, which may be anything, become those of a contiguous array or 0."""
    cdef Tensor tensor
    tensor.data = data
    tensor.entry = strides[0] if shape[0] > 1 else 0
    tensor.head = strides[1] if shape[1] > 1 else 0
    tensor.row = strides[2] if shape[2] > 1 else 0
    tensor.column = strides[3] if shape[3] > 1 else item_size
    tensor.kind = kind
    tensor.packed = (tensor.column == item_size
                     and (<size_t>data | <size_t>tensor.entry | <size_t>tensor.head | <size_t>tensor.row)
                     % <size_t>item_size == 0)
    tensor.direct = in_place and tensor.packed
    return tensor


cdef Entry entry_of(const Problem* problem, Py_ssize_t index) noexcept nogil:
    cdef Entry entry
    entry.index = index
    entry.n_queries, entry.n_keys = problem.n_queries, problem.n_keys
    entry.first_query = entry.first_key = 0
    if problem.query_bounds != NULL:
        entry.first_query = problem.query_bounds[index]
        entry.n_queries = problem.query_bounds[index + 1] - entry.first_query
        entry.first_key = problem.key_bounds[index]
        entry.n_keys = problem.key_bounds[index + 1] - entry.first_key
    if problem.lengths != NULL:
        entry.n_keys = problem.lengths[index]
    entry.offset = entry.n_keys - entry.n_queries
    if problem.offsets != NULL:
        entry.offset = problem.offsets[index]
    return entry


cdef inline void visible_keys(const Problem* problem, const Entry* entry, Py_ssize_t query,
                              Py_ssize_t* first, Py_ssize_t* last) noexcept nogil:
    """The keys [first, last) that causality, window and length leave to a query; 0, 0 when there are none."""
    cdef int64_t diagonal = query + entry.offset
    first[0] = max(<int64_t>0, diagonal - problem.left)
    last[0] = min(<int64_t>entry.n_keys, diagonal + problem.right + 1)
    if last[0] <= first[0]:
        first[0] = last[0] = 0


cdef inline Py_ssize_t n_words_of(const Problem* problem) noexcept nogil:
    """Words of a query or key, see products.hpp."""
    return (problem.head_dim + 1) // 2 if problem.pairs else problem.head_dim


cdef inline char* row_of(const Tensor* tensor, Py_ssize_t entry, Py_ssize_t head, Py_ssize_t row) noexcept nogil:
    return tensor.data + entry * tensor.entry + head * tensor.head + row * tensor.row


cdef inline char* row_in_page(const Problem* problem, const Tensor* tensor, const Entry* entry, Py_ssize_t kv_head,
                              Py_ssize_t page, Py_ssize_t row) noexcept nogil:
    """Where a row of an entry's page, the first of which is 0, lies."""
    return row_of(tensor, problem.pages[entry.index * problem.pages_per_entry + page], kv_head, row)


cdef inline char* key_row(const Problem* problem, const Tensor* tensor, const Entry* entry, Py_ssize_t kv_head,
                          Py_ssize_t key) noexcept nogil:
    """Where the row of an entry's key lies, of keys, values or scales, with pages or without."""
    if problem.pages == NULL:
        return row_of(tensor, entry.index, kv_head, entry.first_key + key)
    return row_in_page(problem, tensor, entry, kv_head, key // problem.page_size, key % problem.page_size)


cdef void dequantize_rows(const Problem* problem, const Tensor* tensor, const Tensor* scales, const Entry* entry,
                          Py_ssize_t kv_head, Py_ssize_t first, Py_ssize_t count, Py_ssize_t width,
                          real* rows) noexcept nogil:
    """rows (count, width) = int8 keys or values [first, first + count), times their scales."""
    cdef Py_ssize_t key
    cdef real scale
    for key in range(first, first + count):
        load_row(&scale, key_row(problem, scales, entry, kv_head, key), 0, 1, kind_float32)
        dequantize_row(rows + (key - first) * width, key_row(problem, tensor, entry, kv_head, key), tensor.column,
                       width, scale)


cdef inline bint is_spread(const Tensor* tensor, Py_ssize_t width, const real* kind) noexcept nogil:
    """Whether rows lie far apart, as in a view of (B, N, H, D): then they fall into few sets of a cache and each into
    a page of its own, and a block of them that is read several times is better copied together."""
    return tensor.row >= 1024 and tensor.row > width * <Py_ssize_t>sizeof(real)


cdef const real* fetch_rows(const Problem* problem, const Tensor* tensor, const Tensor* scales, const Entry* entry,
                            Py_ssize_t kv_head, Py_ssize_t first, Py_ssize_t count, Py_ssize_t width, bint in_place,
                            real* scratch, Py_ssize_t* stride) noexcept nogil:
    """Keys or values [first, first + count) as rows of the computing type, `stride` elements apart: in place when
    wanted and the caller's array allows it, else converted into scratch (count, width)."""
    cdef Py_ssize_t key
    cdef char* start
    if tensor.kind == kind_int8:
        dequantize_rows(problem, tensor, scales, entry, kv_head, first, count, width, scratch)
    elif problem.pages == NULL:
        start = key_row(problem, tensor, entry, kv_head, first)
        if tensor.direct and in_place:
            stride[0] = tensor.row // <Py_ssize_t>sizeof(real)
            return <const real*>start
        for key in range(count):
            load_row(scratch + key * width, start + key * tensor.row, tensor.column, width, tensor.kind)
    else:
        start = key_row(problem, tensor, entry, kv_head, first)
        if tensor.direct and first // problem.page_size == (first + count - 1) // problem.page_size:
            stride[0] = tensor.row // <Py_ssize_t>sizeof(real)
            return <const real*>start
        for key in range(first, first + count):
            if key % problem.page_size == 0:
                start = key_row(problem, tensor, entry, kv_head, key)
            load_row(scratch + (key - first) * width, start, tensor.column, width, tensor.kind)
            start += tensor.row
    stride[0] = width
    return scratch
