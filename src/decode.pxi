# Few queries against many keys: lanes are features.
#
# The rows of one (entry, key/value head), padded to 1, 2, 4 or 8, walk the keys in chunks whose size depends on
# nothing, each from an empty state; chunk states are merged in order. So a long cache can be divided among threads,
# and the result is bitwise the same however it was divided.

cdef enum:
    chunk_keys = 1024

cdef struct Decoding:               # the rows of one (entry, key/value head)
    Lanes lanes
    int rows                        # 1, 2, 4 or 8


cdef bint is_decode(const Problem* problem, const Entry* entry, const real* kind) noexcept nogil:
    return 0 < entry.n_queries * problem.group <= decode_rows(kind)


cdef inline Py_ssize_t n_chunks_of(const Entry* entry) noexcept nogil:
    return max(1, (entry.n_keys + chunk_keys - 1) // chunk_keys)


cdef inline Py_ssize_t state_size(const Problem* problem, const real* kind) noexcept nogil:
    """Numbers of one chunk's state: sums (rows, E), then maximum and total (rows)."""
    return decode_rows(kind) * (problem.value_dim + 2)


cdef size_t decode_scratch(const Problem* problem, const real* kind) noexcept nogil:
    """Numbers of scratch that one worker needs."""
    cdef size_t rows = decode_rows(kind), lanes = vector_lanes(kind)
    cdef size_t block = decode_block * rows + lanes
    cdef size_t numbers = (rows * (problem.head_dim + lanes) + 2 * state_size(problem, kind) + 4 * lanes + block
                           + 2 * (decode_block + lanes) + decode_block * (problem.head_dim + problem.value_dim))
    if problem.has_bias:
        numbers += 2 * block + decode_block * rows
    return numbers


cdef void place_decoding(const Problem* problem, const Entry* entry, Py_ssize_t kv_head, Decoding* decoding,
                         real* q) noexcept nogil:
    """The rows, and q (rows, D rounded up to whole vectors) = their queries, with the scale's sign."""
    cdef Py_ssize_t n_rows = entry.n_queries * problem.group, n = vector_lanes(q), i
    cdef Py_ssize_t width = (problem.head_dim + n - 1) // n * n
    cdef real factor = narrowed(problem.query_factor, q)
    cdef int row
    decoding.rows = 1
    while decoding.rows < n_rows:
        decoding.rows *= 2
    place_lanes(problem, entry, kv_head, 0, n_rows, decoding.rows, &decoding.lanes)
    for row in range(decoding.rows):
        load_row(q + row * width, row_of(&problem.q, entry.index, decoding.lanes.head[row],
                                         entry.first_query + decoding.lanes.query[row]),
                 problem.q.column, problem.head_dim, problem.q.kind)
        for i in range(problem.head_dim):
            q[row * width + i] *= factor
        for i in range(problem.head_dim, width):
            q[row * width + i] = 0


cdef void clear_state(const Problem* problem, real* state, int rows) noexcept nogil:
    cdef Py_ssize_t i, sums = rows * problem.value_dim
    for i in range(sums):
        state[i] = 0
    for i in range(rows):
        state[sums + i], state[sums + rows + i] = -INFINITY, 0


cdef void exclude_keys(const Decoding* decoding, real* scores, Py_ssize_t start, Py_ssize_t n_keys) noexcept nogil:
    """scores (n_keys, rows) become -inf outside each row's visible keys."""
    cdef Py_ssize_t key
    cdef int row
    for row in range(decoding.rows):
        for key in range(n_keys):
            if not decoding.lanes.first[row] <= start + key < decoding.lanes.last[row]:
                scores[key * decoding.rows + row] = -INFINITY


cdef void decode_keys(const Problem* problem, const Entry* entry, const Decoding* decoding, const real* q,
                      const DecodeBlock* block, real* state, real* scores, real* rescale, real* bias) noexcept nogil:
    """One block of keys: scores, softmax, weighted sum. A careful block is one run of the computing type."""
    cdef Py_ssize_t n_keys = block.end - block.start, n = vector_lanes(q)
    cdef Py_ssize_t padded = (n_keys * decoding.rows + n - 1) // n * n, i
    cdef int rows = decoding.rows
    cdef real* maximum = state + rows * problem.value_dim
    cdef real ones[max_lanes]
    cdef Py_ssize_t first[max_lanes]
    cdef Py_ssize_t last[max_lanes]
    cdef const Run* run
    cdef BlockContent content = block_open
    cdef bint all_visible = (block.start >= decoding.lanes.highest_first
                             and block.end <= decoding.lanes.lowest_last)
    if problem.has_bias:
        content = build_bias(problem, entry, &decoding.lanes, rows, block.start, n_keys, padded, bias, bias + padded,
                             bias + 2 * padded)
        if content == block_hidden:
            return
    for i in range(block.n_runs):
        run = &block.runs[i]
        decode_scores(rows, scores + run.first * rows, q, run.k, block.k_kind, block.k_stride, run.n_keys,
                      problem.head_dim, run.ahead, run.v, block.v_row, block.v_bytes)
    if block.k_scales != NULL:
        multiply_scores(rows, scores, <const real*>block.k_scales, n_keys)
    apply_bias(problem, content, <const real*>bias, <const real**>NULL, n_keys, padded, scores, <real*>NULL)
    for i in range(n_keys * rows, padded):
        scores[i] = -INFINITY
    if not all_visible:
        exclude_keys(decoding, scores, block.start, n_keys)
    decode_softmax(rows, <real>problem.unit, scores, n_keys, maximum, maximum + rows, rescale)
    if block.careful:
        scale_weights(scores, n_keys * rows, <real>guard)
    if block.v_scales != NULL:
        multiply_weights(rows, scores, <const real*>block.v_scales, n_keys)
    if block.careful and not (all_visible and content == block_open) and not all_finite(
            <const real*>block.runs[0].v, block.v_stride, n_keys, problem.value_dim):
        for i in range(rows):
            first[i] = max(decoding.lanes.first[i] - block.start, 0)
            last[i] = min(decoding.lanes.last[i] - block.start, n_keys)
        decode_selected(rows, state, scores, <const real*>block.runs[0].v, block.v_stride, problem.value_dim, rescale,
                        <const Py_ssize_t*>first, <const Py_ssize_t*>last,
                        <real*>NULL if content == block_open else bias)
        return
    for i in range(rows):
        ones[i] = 1
    for i in range(block.n_runs):
        run = &block.runs[i]
        decode_values(rows, state, scores + run.first * rows, run.v, block.v_kind, block.v_stride, run.n_keys,
                      problem.value_dim, rescale if i == 0 else ones)


cdef void decode_chunk(const Problem* problem, const Entry* entry, Py_ssize_t kv_head, const Decoding* decoding,
                       Py_ssize_t chunk, bint careful, const real* q, real* state, real* scratch) noexcept nogil:
    """state = attention over the keys of one chunk, from nothing."""
    cdef Py_ssize_t start = max(chunk * chunk_keys, decoding.lanes.lowest_first)
    cdef Py_ssize_t end = min((chunk + 1) * chunk_keys, decoding.lanes.highest_last)
    cdef Py_ssize_t n = vector_lanes(q)
    cdef real* rescale = scratch
    cdef real* scores = rescale + n
    cdef real* scales = scores + decode_block * decode_rows(q) + n
    cdef real* key_rows = scales + 2 * (decode_block + n)
    cdef real* value_rows = key_rows + decode_block * problem.head_dim
    cdef real* bias = value_rows + decode_block * problem.value_dim
    cdef DecodeBlock block
    clear_state(problem, state, decoding.rows)
    block.careful = careful
    while start < end:
        block.start, block.end = start, min(end, start - start % decode_block + decode_block)
        fetch_runs(problem, entry, kv_head, &block, key_rows, value_rows, scales)
        decode_keys(problem, entry, decoding, q, &block, state, scores, rescale, bias)
        start = block.end


cdef void merge_state(const Problem* problem, int rows, real* into, const real* other) noexcept nogil:
    """into = both states together, by their maxima; a state that saw nothing leaves the other bit for bit."""
    cdef Py_ssize_t sums = rows * problem.value_dim, feature
    cdef real* maximum = into + sums
    cdef real* total = maximum + rows
    cdef real top, unit = <real>problem.unit, a, b
    cdef int row
    for row in range(rows):
        if other[sums + rows + row] == 0 and other[sums + row] == -INFINITY:
            continue
        top = max(maximum[row], other[sums + row])
        a, b = <real>exp2((maximum[row] - top) * unit), <real>exp2((other[sums + row] - top) * unit)
        if top == -INFINITY:        # scores of -inf or NaN only: nothing to scale by
            a = b = 1
        maximum[row] = top
        total[row] = total[row] * a + other[sums + rows + row] * b
        for feature in range(row * problem.value_dim, (row + 1) * problem.value_dim):
            into[feature] = into[feature] * a + other[feature] * b


cdef bint finish_decoding(const Problem* problem, const Entry* entry, const Decoding* decoding, real* state,
                          real* factor, bint careful, bint* unusual) noexcept nogil:
    """As finish_panel: True when some rows' sums are not finite. When `careful` only those marked before are
    written."""
    cdef real* maximum = state + decoding.rows * problem.value_dim
    cdef Py_ssize_t feature
    cdef real finite
    cdef bint any_unusual = False
    cdef char* target
    cdef int row
    close_softmax(problem, entry, &decoding.lanes, maximum, maximum + decoding.rows, factor)
    for row in range(decoding.lanes.count):
        if careful:
            if not unusual[row]:
                continue
            factor[row] /= <real>guard
        finite = 0
        for feature in range(row * problem.value_dim, (row + 1) * problem.value_dim):
            finite += state[feature] * 0
            state[feature] *= factor[row]
        if not careful:
            unusual[row] = finite != 0
            any_unusual |= unusual[row]
        target = row_of(&problem.out, entry.index, decoding.lanes.head[row],
                        entry.first_query + decoding.lanes.query[row])
        store_row(target, problem.out.column, state + row * problem.value_dim, problem.value_dim, problem.out.kind)
    return any_unusual


cdef void decode_chunks(const Problem* problem, const Entry* entry, Py_ssize_t kv_head, const Decoding* decoding,
                        bint careful, bint* unusual, Watch* watch, real* scratch) noexcept nogil:
    """All chunks of one (entry, key/value head), merged in order, and the result, unless the call stops meanwhile. The
    queries are in scratch."""
    cdef Py_ssize_t chunk, n = vector_lanes(scratch)
    cdef Py_ssize_t operations = chunk_keys * decode_rows(scratch) * (problem.head_dim + problem.value_dim + 16)
    cdef real* state = scratch + decode_rows(scratch) * (problem.head_dim + n)  # after the queries
    cdef real* other = state + state_size(problem, scratch)
    cdef real* rest = other + state_size(problem, scratch)
    decode_chunk(problem, entry, kv_head, decoding, 0, careful, <const real*>scratch, state, rest)
    for chunk in range(1, n_chunks_of(entry)):
        if not goes_on(watch, operations):
            return
        decode_chunk(problem, entry, kv_head, decoding, chunk, careful, <const real*>scratch, other, rest)
        merge_state(problem, decoding.rows, state, <const real*>other)
    if finish_decoding(problem, entry, decoding, state, rest, careful, unusual):
        decode_chunks(problem, entry, kv_head, decoding, True, unusual, watch, scratch)


cdef void decode_all(const Problem* problem, const Entry* entry, Py_ssize_t kv_head, Watch* watch,
                     real* scratch) noexcept nogil:
    cdef Decoding decoding
    cdef bint unusual[max_lanes]
    place_decoding(problem, entry, kv_head, &decoding, scratch)
    decode_chunks(problem, entry, kv_head, &decoding, False, unusual, watch, scratch)


cdef void decode_part(const Problem* problem, const Entry* entry, Py_ssize_t kv_head, Py_ssize_t chunk, real* state,
                      real* scratch) noexcept nogil:
    """One chunk of one (entry, key/value head), left in state for merge_parts."""
    cdef Decoding decoding
    cdef Py_ssize_t n = vector_lanes(scratch)
    place_decoding(problem, entry, kv_head, &decoding, scratch)
    decode_chunk(problem, entry, kv_head, &decoding, chunk, False, <const real*>scratch, state,
                 scratch + decode_rows(scratch) * (problem.head_dim + n))


cdef void merge_parts(const Problem* problem, const Entry* entry, Py_ssize_t kv_head, real* states, Watch* watch,
                      real* scratch) noexcept nogil:
    """The chunks' states (n_chunks, state_size) merged in order, and the result."""
    cdef Decoding decoding
    cdef bint unusual[max_lanes]
    cdef Py_ssize_t chunk, n = vector_lanes(scratch), size = state_size(problem, scratch)
    place_decoding(problem, entry, kv_head, &decoding, scratch)
    for chunk in range(1, n_chunks_of(entry)):
        merge_state(problem, decoding.rows, states, <const real*>(states + chunk * size))
    if finish_decoding(problem, entry, &decoding, states, scratch + decode_rows(scratch) * (problem.head_dim + n),
                       False, unusual):
        decode_chunks(problem, entry, kv_head, &decoding, True, unusual, watch, scratch)
