# The keys of one decode block as runs of rows that lie one after another: the whole block, or what each page holds of
# it. The tiles read them where they lie, in any element type, and a run brings the rows nearer that come later.

cdef enum:
    decode_block = 64               # keys per softmax: their values are in the second-level cache when they are summed

cdef Py_ssize_t prefetch_distance = 8192    # bytes of keys

cdef struct DecodeBlock:
    Py_ssize_t start, end           # keys
    Py_ssize_t next_head            # from this head to the one whose rows are read next, 0: this one's next block
    bint careful                    # take care of excluded values and of sums beyond the type's range
    int k_kind, v_kind              # element kinds of the rows
    Py_ssize_t k_stride, v_stride   # elements from row to row
    Py_ssize_t v_row, v_bytes       # bytes from row to row and of one row to bring nearer while the keys are read
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


cdef inline Py_ssize_t bytes_ahead(const Problem* problem, const Tensor* tensor, const Entry* entry,
                                   const Place* place, Py_ssize_t skip, Py_ssize_t next_head) noexcept nogil:
    """From a key's row to the one to bring nearer. To the same head's, `prefetch_distance` later, in pages at the same
    place of a later page; where heads walk together to the next head's, or in the next block to the first one's."""
    cdef const int64_t* page
    cdef Place later
    if next_head > 0:
        return next_head * tensor.head
    if next_head < 0:
        later = place_of(problem, place.key + decode_block)
        if later.key >= entry.n_keys:
            return 0
        return (row_at(problem, tensor, entry, 0, &later) - row_at(problem, tensor, entry, 0, place)
                + next_head * tensor.head)
    if problem.pages == NULL:
        return prefetch_distance
    if (place.page + skip) * problem.page_size + place.row >= entry.n_keys:
        return 0
    page = problem.pages + entry.index * problem.pages_per_entry + place.page
    return (page[skip] - page[0]) * tensor.entry


cdef inline Py_ssize_t bytes_with_key(const Problem* problem, Py_ssize_t next_head) noexcept nogil:
    """Of a value, brought nearer when its key is read. 0 where it was faster to bring the next block's values nearer
    while this one's are summed."""
    if next_head != 0 and (problem.pages == NULL or problem.v.kind == kind_int8):
        return 0
    return problem.value_dim << item_bits(problem.v.kind)


cdef inline void fetch_scales(const Problem* problem, const Tensor* tensor, const Entry* entry, Py_ssize_t kv_head,
                              const Place* place, const Run* run, Py_ssize_t skip, Py_ssize_t next_head,
                              real* scales) noexcept nogil:
    """Factors of a run's int8 rows. Those of a page are less than the hardware would fetch ahead by itself."""
    cdef char* source = row_at(problem, tensor, entry, kv_head, place)
    load_row(scales + run.first, source, tensor.row, run.n_keys, kind_float32)
    if problem.pages != NULL:
        source += bytes_ahead(problem, tensor, entry, place, skip, next_head)
        prefetch_rows(<const float*>source, 0, 1, run.n_keys)


cdef inline void pad_scales(real* scales, Py_ssize_t n_keys) noexcept nogil:
    """Up to a whole vector."""
    cdef int lane
    for lane in range(vector_lanes(scales)):
        scales[n_keys + lane] = 0


cdef void fetch_runs(const Problem* problem, const Entry* entry, Py_ssize_t kv_head, DecodeBlock* block,
                     real* key_rows, real* value_rows, real* scales) noexcept nogil:
    """The block's runs. Rows that cannot be read where they lie are converted into key_rows (decode_block, D) and
    value_rows (decode_block, E). scales (2, decode_block + a vector) takes the codes'."""
    cdef bint k_in_place = problem.k.packed and not block.careful
    cdef bint v_in_place = problem.v.packed and not block.careful
    cdef Py_ssize_t end, n_keys = block.end - block.start, skip = pages_to_skip(problem)
    cdef Place place = place_of(problem, block.start)
    cdef const real* k = NULL
    cdef const real* v = NULL
    cdef Run* run
    block.k_kind, block.k_stride = problem.k.kind, problem.k.row >> item_bits(problem.k.kind)
    block.v_kind, block.v_stride = problem.v.kind, problem.v.row >> item_bits(problem.v.kind)
    block.v_row, block.v_bytes = problem.v.row, bytes_with_key(problem, block.next_head)
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
        run.first, run.n_keys, run.k_ahead, run.v_ahead = place.key - block.start, end - place.key, 0, 0
        if k_in_place:
            run.k = row_at(problem, &problem.k, entry, kv_head, &place)
            run.k_ahead = bytes_ahead(problem, &problem.k, entry, &place, skip, block.next_head)
        else:
            run.k = k + run.first * block.k_stride
        if v_in_place:
            run.v = row_at(problem, &problem.v, entry, kv_head, &place)
            if block.v_bytes == 0:
                run.v_ahead = bytes_ahead(problem, &problem.v, entry, &place, skip, block.next_head)
        else:
            run.v = v + run.first * block.v_stride
        if block.k_scales != NULL:
            fetch_scales(problem, &problem.k_scales, entry, kv_head, &place, run, skip, block.next_head,
                         <real*>block.k_scales)
        if block.v_scales != NULL:
            fetch_scales(problem, &problem.v_scales, entry, kv_head, &place, run, skip, block.next_head,
                         <real*>block.v_scales)
        block.n_runs += 1
        place.key, place.page, place.row = end, place.page + 1, 0
    if block.k_scales != NULL:
        pad_scales(<real*>block.k_scales, n_keys)
    if block.v_scales != NULL:
        pad_scales(<real*>block.v_scales, n_keys)
