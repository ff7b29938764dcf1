# What is brought nearer while a panel is scored, a few lines per tile, whose arithmetic hides them: mask and bias of
# the panel that comes next, and in a large call the rows of the panel's results and the queries of the worker's next
# item.

cdef enum:
    most_ahead = 4

cdef Py_ssize_t large_call = 8 << 20        # bytes: less is in a cache anyway

cdef struct Item:                   # of many queries: rows [first_row, n_rows) of an (entry, key/value head)
    Entry entry
    Py_ssize_t kv_head, first_row, n_rows

cdef struct Ahead:                  # rows, of which so many cache lines each come nearer
    Py_ssize_t n_rows, lines        # n_rows is a multiple of rows_nearer: the last row is repeated
    const char* row[max_lanes + rows_nearer]


cdef inline void complete(Ahead* ahead) noexcept nogil:
    while ahead.n_rows % rows_nearer != 0:
        ahead.row[ahead.n_rows] = ahead.row[ahead.n_rows - 1]
        ahead.n_rows += 1


cdef inline bint is_large(const Problem* problem) noexcept nogil:
    """Of queries, keys, values and results together."""
    cdef double rows = <double>problem.n_heads * problem.n_queries + <double>problem.n_kv_heads * problem.n_keys
    return (problem.n_entries * rows * (problem.head_dim + problem.value_dim) * row_bytes(&problem.q, 1)
            > large_call)


cdef void look_ahead(const Tensor* tensor, const Entry* entry, const Lanes* lanes, Py_ssize_t start,
                     Py_ssize_t n_keys, Ahead* ahead) noexcept nogil:
    """Mask or bias of keys [start, start + n_keys): each row is a short run, over before any hardware has foreseen
    it."""
    cdef char* source
    cdef char* previous = NULL
    cdef int lane
    ahead.n_rows, ahead.lines = 0, n_keys * tensor.column // 64 + 1
    if tensor.data == NULL or not 0 < tensor.column <= 8:
        return
    for lane in range(lanes.count):
        source = (row_of(tensor, entry.index, lanes.head[lane], entry.first_query + lanes.query[lane])
                  + start * tensor.column)
        if source != previous:
            ahead.row[ahead.n_rows] = source
            ahead.n_rows += 1
        previous = source
    complete(ahead)


cdef void look_at_rows(const Problem* problem, const Tensor* tensor, Py_ssize_t width, const Item* item, int n_lanes,
                       int panel, Ahead* ahead) noexcept nogil:
    """Queries or results of one of an item's panels."""
    cdef Py_ssize_t row = item.first_row + panel * n_lanes, lane
    cdef Py_ssize_t query = row // problem.group, member = row % problem.group
    cdef const char* source = row_of(tensor, item.entry.index, item.kv_head * problem.group + member,
                                     item.entry.first_query + query)
    ahead.n_rows = max(0, min(<Py_ssize_t>n_lanes, item.n_rows - row))
    ahead.lines = (row_bytes(tensor, width) + 63) // 64
    for lane in range(ahead.n_rows):
        ahead.row[lane] = source
        member += 1
        source += tensor.head
        if member == problem.group:
            member = 0
            source += tensor.row - problem.group * tensor.head
    complete(ahead)


cdef int look_around(const Problem* problem, const Item* item, const Lanes* lanes, int n_panels, int panel,
                     int n_lanes, Py_ssize_t start, Py_ssize_t end, const Item* coming, Ahead* ahead) noexcept nogil:
    """All that comes nearer while one of an item's panels meets keys [start, end): returns how many of `ahead` there
    are. `coming` is NULL except in the last block of a large call."""
    cdef int following = panel + 1 if panel + 1 < n_panels else 0, n = 0
    if problem.has_bias:            # of the panel that comes next, here or in the next block
        look_ahead(&problem.mask, &item.entry, &lanes[following], start if following else end, end - start, &ahead[0])
        look_ahead(&problem.bias, &item.entry, &lanes[following], start if following else end, end - start, &ahead[1])
        n = 2
    if coming != NULL:
        look_at_rows(problem, &problem.out, problem.value_dim, item, n_lanes, panel, &ahead[n])
        look_at_rows(problem, &problem.q, problem.head_dim, coming, n_lanes, panel, &ahead[n + 1])
        n += 2
    return n
