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


cdef struct Place:                  # of a key: with pages its page, counted within the entry, and its row there
    Py_ssize_t key, page, row


cdef inline Place place_of(const Problem* problem, Py_ssize_t key) noexcept nogil:
    cdef Place place
    place.key, place.page, place.row = key, 0, 0
    if problem.pages != NULL:
        place.page = key // problem.page_size
        place.row = key - place.page * problem.page_size
    return place


cdef inline char* row_at(const Problem* problem, const Tensor* tensor, const Entry* entry, Py_ssize_t kv_head,
                         const Place* place) noexcept nogil:
    """As key_row, which divides each time."""
    if problem.pages == NULL:
        return row_of(tensor, entry.index, kv_head, entry.first_key + place.key)
    return row_in_page(problem, tensor, entry, kv_head, place.page, place.row)


cdef inline Py_ssize_t pages_to_skip(const Problem* problem) noexcept nogil:
    """From a page to the one to bring nearer; 0 without pages."""
    if problem.pages == NULL:
        return 0
    return prefetch_distance // max(1, (problem.head_dim << item_bits(problem.k.kind)) * problem.page_size) + 1


cdef inline Py_ssize_t bytes_ahead(const Problem* problem, const Entry* entry, const Place* place,
                                   Py_ssize_t skip) noexcept nogil:
    """From a key's row to the one `prefetch_distance` later, in pages the one at the same place of a later page."""
    cdef const int64_t* page
    if problem.pages == NULL:
        return prefetch_distance
    if (place.page + skip) * problem.page_size + place.row >= entry.n_keys:
        return 0
    page = problem.pages + entry.index * problem.pages_per_entry + place.page
    return (page[skip] - page[0]) * problem.k.entry


cdef void fetch_runs(const Problem* problem, const Entry* entry, Py_ssize_t kv_head, DecodeBlock* block,
                     real* key_rows, real* value_rows, real* scales) noexcept nogil:
    """The block's runs. Rows that cannot be read where they lie are converted into key_rows (decode_block, D) and
    value_rows (decode_block, E). scales (2, decode_block + a vector) takes the codes'."""
    cdef bint k_in_place = problem.k.packed and not block.careful
    cdef bint v_in_place = problem.v.packed and not block.careful
    cdef Py_ssize_t end, n_keys = block.end - block.start, skip = pages_to_skip(problem), lane
    cdef Place place = place_of(problem, block.start)
    cdef const real* k = NULL
    cdef const real* v = NULL
    cdef Run* run
    block.k_kind, block.k_stride = problem.k.kind, problem.k.row >> item_bits(problem.k.kind)
    block.v_kind, block.v_stride = problem.v.kind, problem.v.row >> item_bits(problem.v.kind)
    block.v_row, block.v_bytes = problem.v.row, problem.value_dim << item_bits(problem.v.kind)
    block.k_scales = block.v_scales = NULL
    if not k_in_place:
        k = fetch_rows(problem, &problem.k, &problem.k_scales, entry, kv_head, place.key, n_keys, problem.head_dim,
                       True, key_rows, &block.k_stride)
        block.k_kind = kind_of_number(k)
    if not v_in_place:
        v = fetch_rows(problem, &problem.v, &problem.v_scales, entry, kv_head, place.key, n_keys, problem.value_dim,
                       True, value_rows, &block.v_stride)
        block.v_kind, block.v_bytes = kind_of_number(v), 0
    if k_in_place and problem.k.kind == kind_int8:
        block.k_scales = scales
    if v_in_place and problem.v.kind == kind_int8:
        block.v_scales = scales + decode_block + vector_lanes(scales)
    block.n_runs = 0
    while place.key < block.end:
        end = block.end
        if problem.pages != NULL and (k_in_place or v_in_place):
            end = min(end, place.key - place.row + problem.page_size)
        run = &block.runs[block.n_runs]
        run.first, run.n_keys, run.ahead = place.key - block.start, end - place.key, 0
        if k_in_place:
            run.k = row_at(problem, &problem.k, entry, kv_head, &place)
            run.ahead = bytes_ahead(problem, entry, &place, skip)
        else:
            run.k = k + run.first * block.k_stride
        if v_in_place:
            run.v = row_at(problem, &problem.v, entry, kv_head, &place)
        else:
            run.v = v + run.first * block.v_stride
        if block.k_scales != NULL:
            load_row(<real*>block.k_scales + run.first, row_at(problem, &problem.k_scales, entry, kv_head, &place),
                     problem.k_scales.row, run.n_keys, kind_float32)
        if block.v_scales != NULL:
            load_row(<real*>block.v_scales + run.first, row_at(problem, &problem.v_scales, entry, kv_head, &place),
                     problem.v_scales.row, run.n_keys, kind_float32)
        block.n_runs += 1
        place.key, place.page, place.row = end, place.page + 1, 0
    for lane in range(vector_lanes(scales)):    # up to a whole vector
        if block.k_scales != NULL:
            (<real*>block.k_scales)[n_keys + lane] = 0
        if block.v_scales != NULL:
            (<real*>block.v_scales)[n_keys + lane] = 0
