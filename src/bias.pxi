# Everything that is added to scores: bool and float masks, biases, ALiBi. One block of it is built transposed, as
# (key, lane) beside the scores; -inf means excluded. The caller's arrays are read in place, never expanded.

cdef enum BlockContent:
    block_hidden                    # every key of every lane is excluded
    block_open                      # nothing is excluded, nothing is added
    block_masked                    # some are excluded, by bytes
    block_added                     # ordinary numbers are added, nothing is excluded
    block_mixed                     # anything


cdef BlockContent find_rows(const Tensor* tensor, const Entry* entry, const Lanes* lanes, int n_lanes,
                            Py_ssize_t start, Py_ssize_t n_keys, const real** row, real* rows) noexcept nogil:
    """row (n_lanes) = where keys [start, start + n_keys) of each lane lie: in place, or converted into rows (n_lanes,
    n_keys). Whether all of them exclude (block_hidden) or are 0 (block_open), else block_mixed."""
    cdef int lane
    cdef char* source
    cdef char* previous = NULL
    for lane in range(n_lanes):
        source = (row_of(tensor, entry.index, lanes.head[lane], entry.first_query + lanes.query[lane])
                  + start * tensor.column)
        if tensor.direct:
            row[lane] = <const real*>source
        elif source == previous:    # broadcast over queries or heads
            row[lane] = row[lane - 1]
        else:
            load_row(rows + lane * n_keys, source, tensor.column, n_keys, tensor.kind)
            row[lane] = rows + lane * n_keys
        previous = source
    if all_equal(row, n_lanes, n_keys, <real>0):
        return block_open
    if all_equal(row, n_lanes, n_keys, <real>-INFINITY):
        return block_hidden
    return block_mixed


cdef BlockContent transpose_block(const Tensor* tensor, const Entry* entry, const Lanes* lanes, int n_lanes,
                                  Py_ssize_t start, Py_ssize_t n_keys, Py_ssize_t count, real* block,
                                  real* rows) noexcept nogil:
    """block (n_keys, n_lanes), padded to count numbers = keys [start, start + n_keys) of each lane's row; rows
    (n_lanes, n_keys) is scratch. When all of it excludes (block_hidden) or is 0 (block_open), block is left alone."""
    cdef const real* row[max_lanes]
    cdef int lane
    cdef Py_ssize_t key
    cdef BlockContent content = find_rows(tensor, entry, lanes, n_lanes, start, n_keys, <const real**>row, rows)
    if content != block_mixed:
        return content
    if n_lanes == panel_lanes(block):
        pack_rows(n_lanes // vector_lanes(block), block, <const real**>row, n_keys, <real>1)
        return block_mixed
    for lane in range(n_lanes):
        for key in range(n_keys):
            block[key * n_lanes + lane] = row[lane][key]
    for key in range(n_keys * n_lanes, count):
        block[key] = -INFINITY
    return block_mixed


cdef BlockContent build_bias(const Problem* problem, const Entry* entry, const Lanes* lanes, int n_lanes,
                             Py_ssize_t start, Py_ssize_t n_keys, Py_ssize_t count, real* block, real* second,
                             real* rows) noexcept nogil:
    """block = mask + bias + ALiBi of keys [start, start + n_keys), (n_keys, n_lanes) padded to count numbers;
    `second` and rows are scratch."""
    cdef BlockContent content = block_open
    cdef bint begun = False
    cdef real slopes[max_lanes]
    cdef real distance[max_lanes]
    cdef int lane
    if problem.mask.data != NULL:
        content = transpose_block(&problem.mask, entry, lanes, n_lanes, start, n_keys, count, block, rows)
        begun = content == block_mixed
    if problem.bias.data != NULL and content != block_hidden:
        content = transpose_block(&problem.bias, entry, lanes, n_lanes, start, n_keys, count,
                                  second if begun else block, rows)
        if begun and content == block_mixed:
            combine_bias(block, second, count)
        begun |= content == block_mixed
    if content == block_hidden:
        return block_hidden
    if problem.slopes != NULL:
        for lane in range(n_lanes):
            slopes[lane] = narrowed(problem.slopes[entry.index * problem.n_heads + lanes.head[lane]], block)
            distance[lane] = <real>(lanes.query[lane] + entry.offset - start)
        add_slopes(block, not begun, n_keys, n_lanes, <const real*>slopes, <const real*>distance)
        for lane in range(<int>(count - n_keys * n_lanes)):
            block[n_keys * n_lanes + lane] = -INFINITY
    elif not begun:
        return block_open
    return block_added if are_moderate(block, count) else block_mixed


cdef BlockContent find_bias(const Problem* problem, const Entry* entry, const Lanes* lanes, Py_ssize_t start,
                            Py_ssize_t n_keys, const real** row, real* rows) noexcept nogil:
    """As build_bias where mask or bias is all that is added: the panel's rows are left as they lie."""
    return find_rows(&problem.mask if problem.mask.data != NULL else &problem.bias, entry, lanes, panel_lanes(rows),
                     start, n_keys, row, rows)


cdef BlockContent build_mask(const Problem* problem, const Entry* entry, const Lanes* lanes, Py_ssize_t start,
                             Py_ssize_t n_keys, int8_t* hidden, const real* kind) noexcept nogil:
    """Of a mask of bytes: what a panel sees of keys [start, start + n_keys), and unless that is all or nothing hidden
    (n_keys, lanes) = -1 where it does not."""
    cdef const char* row[max_lanes]
    cdef int lane, found
    for lane in range(panel_lanes(kind)):
        row[lane] = row_of(&problem.mask, entry.index, lanes.head[lane],
                           entry.first_query + lanes.query[lane]) + start
    found = look_through(row, panel_lanes(kind), n_keys)
    if found == some_visible | some_hidden:
        transpose_mask(hidden, row, n_keys, kind)
        return block_masked
    return block_open if found == some_visible else block_hidden


cdef bint apply_bias(const Problem* problem, BlockContent content, const real* bias, const real** row,
                     Py_ssize_t n_keys, Py_ssize_t count, real* scores, real* maximum) noexcept nogil:
    """What a block's scores go through before the softmax: scale, cap, and bias, which is a block as they are or, when
    that is NULL, lies in rows. True when maximum, unless it is NULL, has been raised to the largest of them."""
    cdef real scale = narrowed(problem.score_scale, scores)
    if problem.softcap != 0:
        cap_scores(scores, count, scale, narrowed(problem.softcap, scores))
        scale = 1
    if content >= block_added and bias == NULL:
        add_rows(scores, row, n_keys, scale, maximum)
    elif content >= block_added:
        add_bias(content == block_added, scores, bias, count, scale, maximum)
    elif scale != 1:
        scale_scores(scores, count, scale, maximum)
    else:
        return False
    return maximum != NULL


cdef bint sees_any(const Problem* problem, const Entry* entry, const Lanes* lanes, int lane,
                   const real* kind) noexcept nogil:
    """Whether a lane has any key that nothing excludes. Only asked when all its weights are 0."""
    cdef Py_ssize_t key
    cdef real value
    cdef const Tensor* tensor
    cdef const Tensor* tensors[2]
    cdef bint excluded
    cdef int i
    tensors[0], tensors[1] = &problem.mask, &problem.bias
    for key in range(lanes.first[lane], lanes.last[lane]):
        excluded = False
        for i in range(2):
            tensor = tensors[i]
            if tensor.data != NULL:
                load_row(&value, row_of(tensor, entry.index, lanes.head[lane], entry.first_query + lanes.query[lane])
                         + key * tensor.column, tensor.column, 1, tensor.kind)
                excluded = excluded or value == -INFINITY
        if not excluded:
            return True
    return False
