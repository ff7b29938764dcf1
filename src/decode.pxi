# Few queries against many keys: lanes are features.
#
# The rows of one (entry, key/value head), padded to 1, 2, 4 or 8, walk the keys in chunks whose size depends on
# nothing, each from an empty state; chunk states are merged in order. So a long cache can be divided among threads,
# and the result is bitwise the same however it was divided.
#
# Where the heads' keys lie between one another, in pages and in views of (B, N, H, D), a team of heads walks together,
# block by block: so memory is read in order, and what the hardware fetches beyond one head's rows the next one uses.

cdef enum:
    chunk_keys = 1024
    keys_worth_together = 256       # fewer are in the caches anyway

cdef struct Decoding:               # the rows of one (entry, key/value head)
    Lanes lanes
    Py_ssize_t kv_head
    int rows                        # 1, 2, 4 or 8


cdef bint is_decode(const Problem* problem, const Entry* entry, const real* kind) noexcept nogil:
    return 0 < entry.n_queries * problem.group <= decode_rows(kind)


cdef inline Py_ssize_t n_chunks_of(const Entry* entry) noexcept nogil:
    return max(1, (entry.n_keys + chunk_keys - 1) // chunk_keys)


cdef int heads_together(const Problem* problem) noexcept nogil:
    """Key/value heads of a team."""
    cdef bint paged = problem.pages != NULL
    cdef Py_ssize_t apart = problem.k.entry if paged else problem.k.row, n_teams
    if not (problem.k.packed and problem.v.packed) or problem.n_keys < keys_worth_together:
        return 1
    if (paged and problem.page_size > decode_block(problem) and problem.k.kind != kind_int8
            and row_bytes(&problem.k, decode_block(problem) * problem.head_dim) < long_run):
        return 1                    # head by head is no longer the order of memory, and the runs are short
    if max(problem.k.head, -problem.k.head) >= max(apart, -apart):
        return 1
    n_teams = (problem.n_kv_heads + most_heads_together - 1) // most_heads_together
    return <int>((problem.n_kv_heads + n_teams - 1) // n_teams)


cdef inline Py_ssize_t query_size(const Problem* problem, const real* kind) noexcept nogil:
    """Numbers of one head's queries (rows, D rounded up to whole vectors)."""
    return decode_rows(kind) * (problem.head_dim + vector_lanes(kind))


cdef inline Py_ssize_t state_size(const Problem* problem, const real* kind) noexcept nogil:
    """Numbers of one chunk's state: sums (rows, E), then maximum and total (rows)."""
    return decode_rows(kind) * (problem.value_dim + 2)


cdef inline Py_ssize_t scores_size(const real* kind) noexcept nogil:
    """Numbers of one head's scores of a block."""
    return most_decode_block * decode_rows(kind) + vector_lanes(kind)


cdef inline Py_ssize_t bias_size(const Problem* problem, const real* kind) noexcept nogil:
    """Numbers of what is added to one head's scores of a block, and of what it is made from."""
    return 2 * scores_size(kind) + most_decode_block * decode_rows(kind) if problem.has_bias else 0


cdef size_t decode_scratch(const Problem* problem, int n_heads, const real* kind) noexcept nogil:
    """Numbers of scratch that one worker needs."""
    cdef size_t of_head = (query_size(problem, kind) + 2 * state_size(problem, kind) + scores_size(kind)
                           + 2 * scales_size(kind) + bias_size(problem, kind))
    return n_heads * of_head + vector_lanes(kind) + most_decode_block * (problem.head_dim + problem.value_dim)


cdef void place_decoding(const Problem* problem, const Entry* entry, Py_ssize_t kv_head, Decoding* decoding,
                         real* q) noexcept nogil:
    """The rows, and q (rows, D rounded up to whole vectors) = their queries, with the scale's sign."""
    cdef Py_ssize_t n_rows = entry.n_queries * problem.group, n = vector_lanes(q), i
    cdef Py_ssize_t width = (problem.head_dim + n - 1) // n * n
    cdef real factor = narrowed(problem.query_factor, q)
    cdef int row
    decoding.kv_head, decoding.rows = kv_head, 1
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


cdef void weigh_values(const Problem* problem, const Decoding* decoding, const DecodeBlock* block, int head,
                       BlockContent content, real* state, real* scores, real* scales, real* rescale,
                       real* bias) noexcept nogil:
    """What follows a head's scores of a block: softmax and weighted sum. A careful block is one run of the computing
    type."""
    cdef Py_ssize_t n_keys = block.end - block.start, n = vector_lanes(scores)
    cdef Py_ssize_t padded = (n_keys * decoding.rows + n - 1) // n * n, i
    cdef int rows = decoding.rows
    cdef real* maximum = state + rows * problem.value_dim
    cdef Py_ssize_t first[max_lanes]
    cdef Py_ssize_t last[max_lanes]
    cdef bint all_visible = (block.start >= decoding.lanes.highest_first
                             and block.end <= decoding.lanes.lowest_last)
    if block.k_scaled:
        multiply_scores(rows, scores, <const real*>scales, n_keys)
    apply_bias(problem, content, <const real*>bias, <const real**>NULL, n_keys, padded, scores, <real*>NULL)
    for i in range(n_keys * rows, padded):
        scores[i] = -INFINITY
    if not all_visible:
        exclude_keys(decoding, scores, block.start, n_keys)
    decode_softmax(rows, <real>problem.unit, scores, n_keys, maximum, maximum + rows, rescale)
    if block.careful:
        scale_weights(scores, n_keys * rows, <real>guard)
    if block.v_scaled:
        multiply_weights(rows, scores, <const real*>(scales + scales_size(scores)), n_keys)
    if block.careful and not (all_visible and content == block_open) and not all_finite(
            <const real*>block.runs[0].v, block.v_stride, n_keys, problem.value_dim):
        for i in range(rows):
            first[i] = max(decoding.lanes.first[i] - block.start, 0)
            last[i] = min(decoding.lanes.last[i] - block.start, n_keys)
        decode_selected(rows, state, scores, <const real*>block.runs[0].v, block.v_stride, problem.value_dim, rescale,
                        <const Py_ssize_t*>first, <const Py_ssize_t*>last,
                        <real*>NULL if content == block_open else bias)
        return
    decode_values(rows, state, <const real*>scores, &block.runs[head], block.n_runs - head, block.n_heads,
                  block.v_kind, block.v_stride, problem.value_dim, block.later_row, block.later_bytes,
                  <const real*>rescale)


cdef void decode_keys(const Problem* problem, const Entry* entry, const Decoding* decodings, DecodeBlock* block,
                      const real* q, real* states, real* scratch) noexcept nogil:
    """One block of keys of some heads."""
    cdef Py_ssize_t n_keys = block.end - block.start, n = vector_lanes(q)
    cdef int n_heads = block.n_heads, rows = decodings[0].rows, head
    cdef Py_ssize_t padded = (n_keys * rows + n - 1) // n * n
    cdef real* rescale = scratch
    cdef real* scores = rescale + n
    cdef real* scales = scores + n_heads * scores_size(q)
    cdef real* bias = scales + 2 * n_heads * scales_size(q)
    cdef real* key_rows = bias + n_heads * bias_size(problem, q)
    cdef real* value_rows = key_rows + most_decode_block * problem.head_dim
    cdef real* added
    cdef BlockContent contents[most_heads_together]
    cdef bint hidden = problem.has_bias
    for head in range(n_heads):
        contents[head] = block_open
        if problem.has_bias:
            added = bias + head * bias_size(problem, q)
            contents[head] = build_bias(problem, entry, &decodings[head].lanes, rows, block.start, n_keys, padded,
                                        added, added + padded, added + 2 * padded)
            hidden &= contents[head] == block_hidden
    if hidden:
        return
    fetch_runs(problem, entry, decodings[0].kv_head, block, key_rows, value_rows, scales)
    decode_scores(rows, scores, scores_size(q), q, query_size(problem, q), block.runs, block.n_runs, block.k_kind,
                  block.k_stride, problem.head_dim, block.v_row, block.v_bytes)
    for head in range(n_heads):
        if contents[head] != block_hidden:
            weigh_values(problem, &decodings[head], block, head, contents[head],
                         states + head * state_size(problem, q), scores + head * scores_size(q),
                         scales + 2 * head * scales_size(q), rescale, bias + head * bias_size(problem, q))


cdef void decode_chunk(const Problem* problem, const Entry* entry, const Decoding* decodings, int n_heads,
                       Py_ssize_t chunk, bint careful, const real* q, real* states, real* scratch) noexcept nogil:
    """states (n_heads, state_size) = attention over the keys of one chunk, from nothing."""
    cdef const Lanes* lanes = &decodings[0].lanes   # all heads' queries see the same keys
    cdef Py_ssize_t start = max(chunk * chunk_keys, lanes.lowest_first)
    cdef Py_ssize_t end = min((chunk + 1) * chunk_keys, lanes.highest_last)
    cdef DecodeBlock block
    cdef int at_once = heads_at_once(problem, n_heads), head
    for head in range(n_heads):
        clear_state(problem, states + head * state_size(problem, q), decodings[head].rows)
    begin_blocks(problem, n_heads, at_once, careful, &block, q)
    while start < end:
        block.start, block.end = start, min(end, start - start % block.size + block.size)
        head = 0
        while head < n_heads:
            block.first_head, block.n_heads = head, min(at_once, n_heads - head)
            decode_keys(problem, entry, &decodings[head], &block, q + head * query_size(problem, q),
                        states + head * state_size(problem, q), scratch)
            head += block.n_heads
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
    cdef real* sums
    cdef bint finite, any_unusual = False
    cdef char* target
    cdef int row
    close_softmax(problem, entry, &decoding.lanes, maximum, maximum + decoding.rows, factor)
    for row in range(decoding.lanes.count):
        if careful:
            if not unusual[row]:
                continue
            factor[row] /= <real>guard
        sums = state + row * problem.value_dim
        finite = scale_sums(sums, problem.value_dim, factor[row])
        if not careful:
            unusual[row] = not finite
            any_unusual |= unusual[row]
        target = row_of(&problem.out, entry.index, decoding.lanes.head[row],
                        entry.first_query + decoding.lanes.query[row])
        store_row(target, problem.out.column, sums, problem.value_dim, problem.out.kind)
    return any_unusual


cdef void decode_chunks(const Problem* problem, const Entry* entry, const Decoding* decodings, int n_heads,
                        bint careful, bint* unusual, Watch* watch, const real* q, real* states, real* others,
                        real* scratch) noexcept nogil:
    """All chunks of a team, merged in order, and the result, unless the call stops meanwhile. states and others
    (n_heads, state_size) are scratch."""
    cdef Py_ssize_t chunk, size = state_size(problem, q)
    cdef Py_ssize_t operations = n_heads * chunk_keys * decode_rows(q) * (problem.head_dim + problem.value_dim + 16)
    cdef int i
    decode_chunk(problem, entry, decodings, n_heads, 0, careful, q, states, scratch)
    for chunk in range(1, n_chunks_of(entry)):
        if not goes_on(watch, operations):
            return
        decode_chunk(problem, entry, decodings, n_heads, chunk, careful, q, others, scratch)
        for i in range(n_heads):
            merge_state(problem, decodings[i].rows, states + i * size, <const real*>(others + i * size))
    for i in range(n_heads):
        if finish_decoding(problem, entry, &decodings[i], states + i * size, scratch, careful, unusual):
            decode_chunks(problem, entry, &decodings[i], 1, True, unusual, watch, q + i * query_size(problem, q),
                          states + i * size, others, scratch)


cdef void place_decodings(const Problem* problem, const Entry* entry, Py_ssize_t kv_head, int n_heads,
                          Decoding* decodings, real* q) noexcept nogil:
    cdef int i
    for i in range(n_heads):
        place_decoding(problem, entry, kv_head + i, &decodings[i], q + i * query_size(problem, <const real*>q))


cdef void decode_all(const Problem* problem, const Entry* entry, Py_ssize_t kv_head, int n_heads, Watch* watch,
                     real* q) noexcept nogil:
    """Key/value heads from kv_head on. q is scratch: the queries, followed by all else."""
    cdef Decoding decodings[most_heads_together]
    cdef bint unusual[max_lanes]
    cdef real* states = q + n_heads * query_size(problem, <const real*>q)
    cdef real* others = states + n_heads * state_size(problem, <const real*>q)
    place_decodings(problem, entry, kv_head, n_heads, decodings, q)
    decode_chunks(problem, entry, decodings, n_heads, False, unusual, watch, <const real*>q, states, others,
                  others + n_heads * state_size(problem, <const real*>q))


cdef void decode_part(const Problem* problem, const Entry* entry, Py_ssize_t kv_head, int n_heads, Py_ssize_t chunk,
                      real* states, real* q) noexcept nogil:
    """One chunk of the key/value heads from kv_head on, left in states (n_heads, state_size) for merge_parts."""
    cdef Decoding decodings[most_heads_together]
    place_decodings(problem, entry, kv_head, n_heads, decodings, q)
    decode_chunk(problem, entry, decodings, n_heads, chunk, False, <const real*>q, states,
                 q + n_heads * query_size(problem, <const real*>q))


cdef void merge_parts(const Problem* problem, const Entry* entry, Py_ssize_t kv_head, real* states, Py_ssize_t apart,
                      Watch* watch, real* q) noexcept nogil:
    """The chunks' states, `apart` numbers from one to the next, merged in order, and the result. q is scratch."""
    cdef Decoding decoding
    cdef bint unusual[max_lanes]
    cdef Py_ssize_t chunk
    cdef real* other = q + query_size(problem, <const real*>q)
    cdef real* rest = other + state_size(problem, <const real*>q)
    place_decoding(problem, entry, kv_head, &decoding, q)
    for chunk in range(1, n_chunks_of(entry)):
        merge_state(problem, decoding.rows, states, <const real*>(states + chunk * apart))
    if finish_decoding(problem, entry, &decoding, states, rest, False, unusual):
        decode_chunks(problem, entry, &decoding, 1, True, unusual, watch, <const real*>q, states, other, rest)
