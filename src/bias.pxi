# Everything that is added to scores: bool and float masks, biases, ALiBi. One block of it is built transposed, as
# (key, lane) beside the scores; -inf means excluded. The caller's arrays are read in place, never expanded.

cdef enum BlockContent:
    block_hidden                    # every key of every lane is excluded
    block_open                      # nothing is excluded, nothing is added
    block_masked                    # some are excluded, nothing else is added
    block_mixed


cdef void transpose_block(const Tensor* tensor, const Entry* entry, const Lanes* lanes, int n_lanes,
                          Py_ssize_t start, Py_ssize_t n_keys, Py_ssize_t count, real* block,
                          real* rows) noexcept nogil:
    """block (n_keys, n_lanes), padded to count numbers = keys [start, start + n_keys) of each lane's row; rows
    (n_lanes, n_keys) is scratch."""
    cdef const real* row[max_lanes]
    cdef int lane
    cdef Py_ssize_t key
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
    if n_lanes == panel_lanes(block):
        pack_rows(block, <const real**>row, n_keys, <real>1)
        return
    for lane in range(n_lanes):
        for key in range(n_keys):
            block[key * n_lanes + lane] = row[lane][key]
    for key in range(n_keys * n_lanes, count):
        block[key] = -INFINITY


cdef BlockContent build_bias(const Problem* problem, const Entry* entry, const Lanes* lanes, int n_lanes,
                             Py_ssize_t start, Py_ssize_t n_keys, Py_ssize_t count, real* block, real* second,
                             real* rows) noexcept nogil:
    """block = mask + bias + ALiBi of keys [start, start + n_keys), (n_keys, n_lanes) padded to count numbers;
    `second` and rows are scratch."""
    cdef bint begun = False
    cdef real slopes[max_lanes]
    cdef real distance[max_lanes]
    cdef int lane
    if problem.mask.data != NULL:
        transpose_block(&problem.mask, entry, lanes, n_lanes, start, n_keys, count, block, rows)
        if all_equal(block, count, <real>-INFINITY):
            return block_hidden
        begun = True
    if problem.bias.data != NULL:
        transpose_block(&problem.bias, entry, lanes, n_lanes, start, n_keys, count, second if begun else block, rows)
        if begun:
            combine_bias(block, second, count)
        begun = True
    if problem.slopes != NULL:
        for lane in range(n_lanes):
            slopes[lane] = narrowed(problem.slopes[entry.index * problem.n_heads + lanes.head[lane]], block)
            distance[lane] = <real>(lanes.query[lane] + entry.offset - start)
        add_slopes(block, not begun, n_keys, n_lanes, <const real*>slopes, <const real*>distance)
        for lane in range(<int>(count - n_keys * n_lanes)):
            block[n_keys * n_lanes + lane] = -INFINITY
    elif problem.bias.data == NULL and problem.mask.kind == kind_bool:
        return block_open if all_equal(block, n_keys * n_lanes, <real>0) else block_masked
    return block_mixed


cdef void apply_bias(const Problem* problem, BlockContent content, const real* bias, Py_ssize_t count,
                     real* scores) noexcept nogil:
    """What a block's scores go through before the softmax: scale, cap, bias."""
    if problem.softcap != 0:
        cap_scores(scores, count, narrowed(problem.score_scale, scores), narrowed(problem.softcap, scores))
    if content == block_masked:
        exclude_masked(scores, bias, count)
    elif content == block_mixed:
        add_bias(scores, bias, count, narrowed(1 if problem.softcap != 0 else problem.score_scale, scores))


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
