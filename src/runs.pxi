# The keys of one decode block as runs of rows that lie one after another: the whole block, or what each page holds of
# it. The tiles read them where they lie, in any element type, and a run brings the rows nearer that come later.

cdef enum:
    decode_block = 64               # keys per softmax: their values are in the second-level cache when they are summed

cdef Py_ssize_t prefetch_distance = 8192    # bytes of keys

cdef struct Run:
    Py_ssize_t first, n_keys        # keys [first, first + n_keys) of the block
    Py_ssize_t ahead                # bytes from a key to the one to bring nearer
    const void* k
    const void* v

cdef struct DecodeBlock:
    Py_ssize_t start, end           # keys
    bint careful                    # take care of excluded values and of sums beyond the type's range
    int k_kind, v_kind              # element kinds of the rows
    Py_ssize_t k_stride, v_stride   # elements from row to row
    Py_ssize_t v_row, v_bytes       # bytes from row to row and of one row, for bringing it nearer
    const void* k_scales            # int8 codes: one per key, padded to whole vectors; else NULL
    const void* v_scales
    int n_runs
    Run runs[decode_block]


cdef inline int item_bits(int kind) noexcept nogil:
    """The binary logarithm of an element's size."""
    return 3 if kind == kind_float64 else 2 if kind == kind_float32 else 0 if kind == kind_int8 else 1


cdef inline Py_ssize_t bytes_ahead(const Problem* problem, const Entry* entry, Py_ssize_t kv_head,
                                   Py_ssize_t key) noexcept nogil:
    """From a key's row to the one `prefetch_distance` later, in pages the one at the same place of a later page."""
    cdef Py_ssize_t keys
    if problem.pages == NULL:
        return prefetch_distance
    keys = prefetch_distance // max(1, problem.head_dim << item_bits(problem.k.kind))
    keys = (keys // problem.page_size + 1) * problem.page_size
    if key + keys >= entry.n_keys:
        return 0
    return (key_row(problem, &problem.k, entry, kv_head, key + keys)
            - key_row(problem, &problem.k, entry, kv_head, key))


cdef void load_scales(const Problem* problem, const Tensor* tensor, const Entry* entry, Py_ssize_t kv_head,
                      const DecodeBlock* block, real* scales) noexcept nogil:
    """The codes' scales, one per key of the block and zeros up to a whole vector."""
    cdef Py_ssize_t n_keys = block.end - block.start, lane
    cdef int i
    for i in range(block.n_runs):
        load_row(scales + block.runs[i].first,
                 key_row(problem, tensor, entry, kv_head, block.start + block.runs[i].first), tensor.row,
                 block.runs[i].n_keys, kind_float32)
    for lane in range(vector_lanes(scales)):
        scales[n_keys + lane] = 0


cdef void fetch_runs(const Problem* problem, const Entry* entry, Py_ssize_t kv_head, DecodeBlock* block,
                     real* key_rows, real* value_rows, real* scales) noexcept nogil:
    """The block's runs. Rows that cannot be read where they lie are converted into key_rows (decode_block, D) and
    value_rows (decode_block, E). scales (2, decode_block + a vector) takes the codes'."""
    cdef bint k_in_place = problem.k.packed and not block.careful
    cdef bint v_in_place = problem.v.packed and not block.careful
    cdef Py_ssize_t key = block.start, end, n_keys = block.end - block.start
    cdef const real* k = NULL
    cdef const real* v = NULL
    cdef Run* run
    block.k_kind, block.k_stride = problem.k.kind, problem.k.row >> item_bits(problem.k.kind)
    block.v_kind, block.v_stride = problem.v.kind, problem.v.row >> item_bits(problem.v.kind)
    block.v_row, block.v_bytes = problem.v.row, problem.value_dim << item_bits(problem.v.kind)
    block.k_scales = block.v_scales = NULL
    if not k_in_place:
        k = fetch_rows(problem, &problem.k, &problem.k_scales, entry, kv_head, key, n_keys, problem.head_dim, True,
                       key_rows, &block.k_stride)
        block.k_kind = kind_of_number(k)
    if not v_in_place:
        v = fetch_rows(problem, &problem.v, &problem.v_scales, entry, kv_head, key, n_keys, problem.value_dim, True,
                       value_rows, &block.v_stride)
        block.v_kind, block.v_bytes = kind_of_number(v), 0
    block.n_runs = 0
    while key < block.end:
        end = block.end
        if problem.pages != NULL and (k_in_place or v_in_place):
            end = min(end, key - key % problem.page_size + problem.page_size)
        run = &block.runs[block.n_runs]
        run.first, run.n_keys, run.ahead = key - block.start, end - key, 0
        if k_in_place:
            run.k = key_row(problem, &problem.k, entry, kv_head, key)
            run.ahead = bytes_ahead(problem, entry, kv_head, key)
        else:
            run.k = k + run.first * block.k_stride
        if v_in_place:
            run.v = key_row(problem, &problem.v, entry, kv_head, key)
        else:
            run.v = v + run.first * block.v_stride
        block.n_runs += 1
        key = end
    if k_in_place and problem.k.kind == kind_int8:
        block.k_scales = scales
        load_scales(problem, &problem.k_scales, entry, kv_head, block, scales)
    if v_in_place and problem.v.kind == kind_int8:
        block.v_scales = scales + decode_block + vector_lanes(scales)
        load_scales(problem, &problem.v_scales, entry, kv_head, block, <real*>block.v_scales)
