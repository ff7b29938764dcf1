# Many queries: lanes are queries.
#
#     panel (D, lanes)         keys of a block               scores (keys, lanes)
#     +--------+           ->  K[j, :] . panel       ->      max, exp2, sum, lane by lane
#     | Q^T    |                                                  |
#     +--------+               V[j, :] * weight[j]   ->      sums (E, lanes)  = sums * rescale + block
#
# Per item: up to `panels_per_item` panels of one (entry, key/value head) go through the key blocks together.


cdef inline Py_ssize_t most_block_keys(const real* kind) noexcept nogil:
    """Most keys per block: 256 in float32 and 128 in float64. The value tile walks the block's weights (16 KB with
    16 lanes) and one cache line of each of its values (16 KB), for each tile of features: a first-level cache."""
    return 256 if sizeof(real) == 4 else 128


cdef inline Py_ssize_t block_keys(Py_ssize_t n_keys, const real* kind) noexcept nogil:
    """Keys per block: nearly equal blocks, so that the last is not a stub."""
    cdef Py_ssize_t n_blocks = (n_keys + most_block_keys(kind) - 1) // most_block_keys(kind)
    return (n_keys + n_blocks - 1) // n_blocks if n_blocks > 0 else 1


cdef size_t panel_size(const Problem* problem, const real* kind) noexcept nogil:
    """Numbers of one panel: its queries, its sums and six vectors of state."""
    return panel_lanes(kind) * (problem.head_dim + problem.value_dim + 6)


cdef size_t prefill_scratch(const Problem* problem, const real* kind) noexcept nogil:
    """Numbers of scratch that one worker needs."""
    cdef size_t lanes = panel_lanes(kind), block = most_block_keys(kind)
    cdef size_t numbers = (panels_per_item * panel_size(problem, kind)
                           + block * (lanes + problem.head_dim + problem.value_dim)
                           + lanes * max(problem.head_dim, problem.value_dim))
    if problem.has_bias:
        numbers += 3 * block * lanes
    return numbers


cdef void score_block(const Problem* problem, const Lanes* lanes, int product, const real* panel, const real* k,
                      Py_ssize_t k_stride, Py_ssize_t n_keys, bint keep_maximum, real* scores, real* maximum,
                      const real* v, Py_ssize_t v_stride, const Ahead* ahead, int n_ahead) noexcept nogil:
    """scores (n_keys, lanes) = k (n_keys, D) @ panel (D, lanes), in tiles of nearly equal rows. Unless v is NULL, the
    values are brought nearer meanwhile: the value tile reads them by columns, which no hardware foresees; and so are
    the n_ahead of ahead."""
    cdef Py_ssize_t most = tile_rows_for(lanes.vectors), n_tiles = (n_keys + most - 1) // most
    cdef Py_ssize_t rows = n_keys // n_tiles, longer = n_keys % n_tiles, tile, key = 0
    cdef Py_ssize_t parts, parts_per_tile
    cdef int i
    for tile in range(n_tiles):
        if v != NULL:
            prefetch_rows(v + key * v_stride, v_stride, rows + (tile < longer), problem.value_dim)
        for i in range(n_ahead):
            parts = ahead[i].n_rows // rows_nearer * ahead[i].lines
            parts_per_tile = (parts + n_tiles - 1) // n_tiles
            prefetch_parts(<const char**>ahead[i].row, ahead[i].n_rows, tile * parts_per_tile,
                           min((tile + 1) * parts_per_tile, parts))
        score_tile(product, <int>(rows + (tile < longer)), lanes.vectors, keep_maximum,
                   scores + key * panel_lanes(scores), panel, k + key * k_stride, k_stride, n_words_of(problem),
                   maximum)
        key += rows + (tile < longer)


cdef void value_block(const Problem* problem, const Lanes* lanes, real* sums, const real* weights, const real* v,
                      Py_ssize_t v_stride, Py_ssize_t n_keys, const real* rescale) noexcept nogil:
    """sums (E, lanes) = sums * rescale + v (n_keys, E)^T @ weights (n_keys, lanes), in tiles of features."""
    cdef Py_ssize_t most = tile_rows_for(lanes.vectors), n_tiles = (problem.value_dim + most - 1) // most
    cdef Py_ssize_t rows, longer, tile, feature = 0
    if n_tiles == 0:
        return
    rows, longer = problem.value_dim // n_tiles, problem.value_dim % n_tiles
    for tile in range(n_tiles):
        value_tile(<int>(rows + (tile < longer)), lanes.vectors, sums + feature * panel_lanes(sums), weights,
                   v + feature, v_stride, n_keys, rescale)
        feature += rows + (tile < longer)


cdef struct Block:                  # keys [start, end) and their rows, fetched
    Py_ssize_t start, end, k_stride, v_stride
    const void* k
    const void* v
    bint careful                    # take care of excluded values and of sums beyond the type's range
    bint subnormal                  # some key in pairs holds a subnormal number
    int finite                      # whether all values are finite: 1, 0, or -1 for not looked yet
    bint fetched                    # a panel has been through: the values are in a cache


cdef inline int product_of(const Problem* problem, const Lanes* lanes, const Block* block) noexcept nogil:
    if not problem.pairs:
        return product_features
    return product_split_pairs if lanes.subnormal or block.subnormal else product_pairs


cdef void change_scores_of_block(const Problem* problem, const Lanes* lanes, BlockContent content, Py_ssize_t start,
                                 Py_ssize_t n_keys, real* scores, const real* bias, const real** row,
                                 const int8_t* hidden, real* maximum, real* first, real* last) noexcept nogil:
    """What the options do to a block's scores (n_keys, lanes), keys [start, start + n_keys); maximum is raised, and
    first and last (lanes) become the keys of the block between which each lane sees."""
    cdef Py_ssize_t n_lanes = panel_lanes(scores), lane
    cdef bint all_visible = start >= lanes.highest_first and start + n_keys <= lanes.lowest_last
    cdef bint raised = apply_bias(problem, content, bias, row, n_keys, n_keys * n_lanes, scores,
                                  maximum if all_visible else NULL)
    for lane in range(n_lanes):
        first[lane] = <real>min(max(lanes.first[lane] - start, 0), n_keys)
        last[lane] = <real>min(max(lanes.last[lane] - start, 0), n_keys)
    if not all_visible:
        exclude_outside(scores, 0, min(lanes.highest_first - start, n_keys), first, last)
        exclude_outside(scores, max(lanes.lowest_last - start, 0), n_keys, first, last)
    if content == block_masked:
        exclude_hidden(scores, hidden, n_keys, maximum)
    elif not raised:
        raise_maximum(maximum, scores, n_keys)


cdef void attend_block(const Problem* problem, const Entry* entry, const Lanes* lanes, real* panel, Block* block,
                       bint* begun, real* scores, real* bias, const Ahead* ahead, int n_ahead) noexcept nogil:
    """One panel against one block of keys: scores, softmax, weighted sum. Unless `begun` the panel has no sums yet."""
    cdef Py_ssize_t start = max(block.start, lanes.lowest_first), end = min(block.end, lanes.highest_last)
    cdef Py_ssize_t n_lanes = panel_lanes(panel), n_keys = end - start
    cdef const real* k = <const real*>block.k + (start - block.start) * block.k_stride
    cdef const real* v = <const real*>block.v + (start - block.start) * block.v_stride
    cdef real* sums = panel + problem.head_dim * n_lanes
    cdef real* maximum = sums + problem.value_dim * n_lanes
    cdef real* previous = maximum + n_lanes
    cdef real* total = previous + n_lanes
    cdef real* rescale = total + n_lanes
    cdef real* first = rescale + n_lanes
    cdef real* last = first + n_lanes
    cdef int8_t* hidden = <int8_t*>(bias + n_keys * n_lanes)
    cdef const real* row[max_lanes]
    cdef bint in_rows = problem.single_bias and not block.careful
    cdef BlockContent content = block_open
    cdef bint all_visible = start >= lanes.highest_first and end <= lanes.lowest_last
    cdef const real* fetched = NULL
    cdef int product = product_of(problem, lanes, block)
    if n_keys <= 0:
        return
    if problem.byte_mask:
        content = build_mask(problem, entry, lanes, start, n_keys, hidden, panel)
    elif in_rows:
        content = find_bias(problem, entry, lanes, start, n_keys, <const real**>row, bias)
    elif problem.has_bias:
        content = build_bias(problem, entry, lanes, <int>n_lanes, start, n_keys, n_keys * n_lanes, bias,
                             bias + n_keys * n_lanes, bias + 2 * n_keys * n_lanes)
    if content == block_hidden:
        return
    memcpy(previous, maximum, n_lanes * sizeof(real))
    if not block.fetched:
        fetched = v
        block.fetched = True
    if all_visible and content == block_open and problem.softcap == 0 and problem.score_scale == 1:
        score_block(problem, lanes, product, panel, k, block.k_stride, n_keys, True, scores, maximum, fetched,
                    block.v_stride, ahead, n_ahead)
    else:
        score_block(problem, lanes, product, panel, k, block.k_stride, n_keys, False, scores, maximum, fetched,
                    block.v_stride, ahead, n_ahead)
        change_scores_of_block(problem, lanes, content, start, n_keys, scores, <const real*>NULL if in_rows else bias,
                               <const real**>row, hidden, maximum, first, last)
    softmax_block(lanes.vectors, <real>problem.unit, scores, n_keys, maximum, previous, total, rescale)
    if not block.careful:
        value_block(problem, lanes, sums, scores, v, block.v_stride, n_keys, rescale if begun[0] else NULL)
        begun[0] = True
        return
    scale_weights(scores, n_keys * n_lanes, <real>guard)
    if block.finite < 0:
        block.finite = all_finite(<const real*>block.v, block.v_stride, block.end - block.start, problem.value_dim)
    if block.finite or (all_visible and content == block_open):
        value_block(problem, lanes, sums, scores, v, block.v_stride, n_keys, rescale)
        return
    if content == block_masked:
        expand_hidden(bias, hidden, n_keys * n_lanes)
    value_selected(sums, scores, v, block.v_stride, n_keys, problem.value_dim, rescale, first, last,
                   <real*>NULL if content == block_open else bias)


cdef void clear_sums(const Problem* problem, real* panel) noexcept nogil:
    memset(panel + problem.head_dim * panel_lanes(panel), 0, problem.value_dim * panel_lanes(panel) * sizeof(real))


cdef bint attend_blocks(const Problem* problem, const Item* item, const Lanes* lanes, int n_panels, bint careful,
                        const Item* coming, Watch* watch, real* panels, real* scratch) noexcept nogil:
    """All keys that the panels see, block by block, from an empty state. False when the call stopped meanwhile. Unless
    `coming` is NULL, results and that item's queries are brought nearer."""
    cdef const Entry* entry = &item.entry
    cdef Py_ssize_t kv_head = item.kv_head
    cdef Block block
    cdef Tensor keys = problem.k
    cdef bint begun[panels_per_item]
    cdef Ahead ahead[most_ahead]
    cdef int n_lanes = panel_lanes(scratch), panel, n_ahead
    cdef Py_ssize_t size = panel_size(problem, scratch), block_size = block_keys(entry.n_keys, scratch)
    cdef Py_ssize_t lowest = PY_SSIZE_T_MAX, highest = 0, grid, n_keys
    cdef real* scores = scratch
    cdef real* key_rows = scores + most_block_keys(scratch) * n_lanes
    cdef real* value_rows = key_rows + most_block_keys(scratch) * problem.head_dim
    cdef real* bias = value_rows + most_block_keys(scratch) * problem.value_dim
    if problem.pairs:
        keys.kind = kind_bfloat16_pairs
    block.careful = careful
    for panel in range(n_panels):
        begin_softmax(panels + panel * size + (problem.head_dim + problem.value_dim) * n_lanes)
        begun[panel] = careful
        if careful:
            clear_sums(problem, panels + panel * size)
        lowest, highest = min(lowest, lanes[panel].lowest_first), max(highest, lanes[panel].highest_last)
    grid = lowest - lowest % block_size if highest > 0 else 0   # the same grid of blocks for every item
    while grid < highest:
        block.start, block.end, block.finite = max(grid, lowest), min(grid + block_size, highest), -1
        n_keys = block.end - block.start
        block.k = fetch_rows(problem, &keys, &problem.k_scales, entry, kv_head, block.start, n_keys,
                             problem.head_dim, n_panels == 1 or not is_spread(&keys, problem.head_dim, scratch),
                             key_rows, &block.k_stride)
        block.v = fetch_rows(problem, &problem.v, &problem.v_scales, entry, kv_head, block.start, n_keys,
                             problem.value_dim, n_panels == 1 or not is_spread(&problem.v, problem.value_dim, scratch),
                             value_rows, &block.v_stride)
        block.subnormal = problem.pairs and any_subnormal_pair(<const real*>block.k, block.k_stride, n_keys,
                                                               n_words_of(problem))
        block.fetched = block.v == value_rows
        for panel in range(n_panels):
            n_ahead = look_around(problem, item, lanes, n_panels, panel, n_lanes, block.start, block.end,
                                  coming if block.end == highest else NULL, ahead)
            attend_block(problem, entry, &lanes[panel], panels + panel * size, &block, &begun[panel], scores, bias,
                         <const Ahead*>ahead, n_ahead)
        if not goes_on(watch, n_panels * n_lanes * n_keys * (problem.head_dim + problem.value_dim + 16)):
            return False
        grid += block_size
    for panel in range(n_panels):
        if not begun[panel]:
            clear_sums(problem, panels + panel * size)
    return True


cdef void attend_panels(const Problem* problem, const Item* item, const Item* coming, Watch* watch,
                        real* scratch) noexcept nogil:
    """The panels of one item. The queries of the one that may come next are brought nearer, unless it is NULL."""
    cdef Lanes lanes[panels_per_item]
    cdef bint unusual[max_lanes]
    cdef int n_lanes = panel_lanes(scratch), n_panels = 0, panel
    cdef Py_ssize_t size = panel_size(problem, scratch)
    cdef const Entry* entry = &item.entry
    cdef real* converted = scratch + panels_per_item * size     # (lanes, max(D, E)), queries in, results out
    cdef real* rest = converted + n_lanes * max(problem.head_dim, problem.value_dim)
    cdef real* state
    while n_panels < panels_per_item and item.first_row + n_panels * n_lanes < item.n_rows:
        place_lanes(problem, entry, item.kv_head, item.first_row + n_panels * n_lanes, item.n_rows, n_lanes,
                    &lanes[n_panels])
        pack_queries(problem, entry, &lanes[n_panels], scratch + n_panels * size, converted)
        n_panels += 1
    if not attend_blocks(problem, item, lanes, n_panels, False, coming, watch, scratch, rest):
        return
    for panel in range(n_panels):
        state = scratch + panel * size + problem.head_dim * n_lanes
        if finish_panel(problem, entry, &lanes[panel], state, converted, False, unusual):
            if not attend_blocks(problem, item, &lanes[panel], 1, True, NULL, watch, scratch + panel * size, rest):
                return
            finish_panel(problem, entry, &lanes[panel], state, converted, True, unusual)
