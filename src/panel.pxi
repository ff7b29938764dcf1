# A panel: the queries of `lanes` rows, transposed, and the state of their online softmax.

# Sums that come out as infinity or NaN are made once more, carefully: with weights this much smaller, so that sums of
# finite values stay finite, and without the values of excluded keys, which may be anything.
cdef double guard = 2.0 ** -33

cdef struct Lanes:                  # what each lane stands for; lanes past the last row repeat it
    int count                       # rows that are real
    int vectors                     # 1 when they fit into one register
    bint subnormal                  # some query in pairs holds a subnormal number
    Py_ssize_t head[max_lanes]
    Py_ssize_t query[max_lanes]
    Py_ssize_t first[max_lanes]     # visible keys [first, last)
    Py_ssize_t last[max_lanes]
    Py_ssize_t lowest_first, highest_first, lowest_last, highest_last


cdef inline void name_rows(Lanes* lanes, Py_ssize_t kv_head, Py_ssize_t group, Py_ssize_t first_row,
                           int n_lanes) noexcept nogil:
    """Which head and query each lane is."""
    cdef int lane
    cdef Py_ssize_t query = first_row // group, member = first_row % group
    if group == 1:
        for lane in range(n_lanes):     # of arithmetic alone: the compiler makes vectors of it
            lanes.query[lane], lanes.head[lane] = first_row + min(lane, lanes.count - 1), kv_head
        return
    for lane in range(n_lanes):
        lanes.query[lane], lanes.head[lane] = query, kv_head * group + member
        if lane + 1 < lanes.count:
            member += 1
            if member == group:
                query, member = query + 1, 0


cdef void place_lanes(const Problem* problem, const Entry* entry, Py_ssize_t kv_head, Py_ssize_t first_row,
                      Py_ssize_t n_rows, int n_lanes, Lanes* lanes) noexcept nogil:
    cdef int lane
    lanes.count = <int>min(n_rows - first_row, <Py_ssize_t>n_lanes)
    lanes.vectors = 1 if lanes.count <= n_lanes // 2 else 2
    name_rows(lanes, kv_head, problem.group, first_row, n_lanes)
    if problem.left == unbounded and problem.right == unbounded:
        for lane in range(n_lanes):
            lanes.first[lane], lanes.last[lane] = 0, entry.n_keys
        lanes.lowest_first = lanes.highest_first = 0
        lanes.lowest_last = lanes.highest_last = entry.n_keys
        return
    lanes.lowest_first, lanes.highest_first = PY_SSIZE_T_MAX, 0
    lanes.lowest_last, lanes.highest_last = PY_SSIZE_T_MAX, 0
    for lane in range(n_lanes):
        visible_keys(problem, entry, lanes.query[lane], &lanes.first[lane], &lanes.last[lane])
        lanes.lowest_last = min(lanes.lowest_last, lanes.last[lane])
        lanes.highest_last = max(lanes.highest_last, lanes.last[lane])
        lanes.highest_first = max(lanes.highest_first, lanes.first[lane])
        if lanes.last[lane] > lanes.first[lane]:
            lanes.lowest_first = min(lanes.lowest_first, lanes.first[lane])


cdef void pack_queries(const Problem* problem, const Entry* entry, Lanes* lanes, real* panel,
                       real* converted) noexcept nogil:
    """panel (head_dim, lanes) = the lanes' queries transposed, with the scale's sign; `converted` is scratch.
    In pairs they fill (words, lanes), half as many."""
    cdef const real* rows[max_lanes]
    cdef int lane, n_lanes = lanes.vectors * vector_lanes(panel)
    cdef int kind = kind_bfloat16_pairs if problem.pairs else problem.q.kind
    cdef char* source
    for lane in range(n_lanes):
        source = row_of(&problem.q, entry.index, lanes.head[lane], entry.first_query + lanes.query[lane])
        if problem.q.direct:
            rows[lane] = <const real*>source
        else:
            load_row(converted + lane * problem.head_dim, source, problem.q.column, problem.head_dim, kind)
            rows[lane] = converted + lane * problem.head_dim
    lanes.subnormal = problem.pairs and any_subnormal_pair(<const real*>converted, problem.head_dim, n_lanes,
                                                           n_words_of(problem))
    if problem.pairs:
        pack_words(lanes.vectors, panel, <const real**>rows, n_words_of(problem))
    else:
        pack_rows(lanes.vectors, panel, <const real**>rows, problem.head_dim, narrowed(problem.query_factor, panel))


cdef void close_softmax(const Problem* problem, const Entry* entry, const Lanes* lanes, const real* maximum,
                        const real* total, real* factor) noexcept nogil:
    """factor (lanes) = what the sums must be multiplied by; lse is written; the sink joins the total here, once."""
    cdef int lane
    cdef double top, weight, sink, share, natural = problem.unit / LOG2E
    for lane in range(lanes.count):
        top, weight, share = <double>maximum[lane] * natural, <double>total[lane], 1.0
        sink = problem.sinks[lanes.head[lane]] if problem.sinks != NULL else -INFINITY
        if weight == 0 and not sees_any(problem, entry, lanes, lane, maximum):
            weight, top, factor[lane] = 1, sink, 0
        else:
            if weight == 0:         # every visible score is -inf
                top = -INFINITY
            if sink > top:
                share = exp(top - sink)
                weight, top = weight * share + exp(sink - sink), sink
            elif sink != -INFINITY:     # also when it is NaN
                weight += exp(sink - top)
            if weight == 0:             # NaN, as in NumPy
                weight = NAN
            factor[lane] = <real>(share / weight)
        if problem.lse.data != NULL:
            (<real*>row_of(&problem.lse, entry.index, lanes.head[lane],
                           entry.first_query + lanes.query[lane]))[0] = <real>(top + log(weight))


cdef bint finish_panel(const Problem* problem, const Entry* entry, const Lanes* lanes, real* state,
                       real* converted, bint careful, bint* unusual) noexcept nogil:
    """Divide by the softmax totals, transpose back and write out and lse. True when some lanes' sums are not finite:
    those are marked as unusual. When `careful` only lanes marked before are written."""
    cdef real* rows[max_lanes]
    cdef int lane, n_lanes = panel_lanes(state)
    cdef real* maximum = state + problem.value_dim * n_lanes
    cdef real* total = maximum + 2 * n_lanes
    cdef real* factor = total + n_lanes
    cdef real* finite = factor + n_lanes
    cdef bint usual
    cdef char* target
    if problem.sinks != NULL or problem.lse.data != NULL or not reciprocals(lanes.vectors, factor, total):
        close_softmax(problem, entry, lanes, maximum, total, factor)
    for lane in range(lanes.count):
        target = row_of(&problem.out, entry.index, lanes.head[lane], entry.first_query + lanes.query[lane])
        rows[lane] = (<real*>target if problem.out.direct and (not careful or unusual[lane])
                      else converted + lane * problem.value_dim)
        if careful:
            factor[lane] /= <real>guard
    usual = unpack_rows(rows, lanes.count, state, problem.value_dim, factor, finite)
    for lane in range(lanes.count):
        if not problem.out.direct and (not careful or unusual[lane]):
            target = row_of(&problem.out, entry.index, lanes.head[lane], entry.first_query + lanes.query[lane])
            store_row(target, problem.out.column, rows[lane], problem.value_dim, problem.out.kind)
    if careful or usual:
        return False
    for lane in range(lanes.count):
        unusual[lane] = finite[lane] != 0
    return True
