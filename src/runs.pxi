# The keys of one decode block as runs of rows that lie one after another: of each head of a team the whole block, or
# what a page holds of it, in the order of memory: page by page, in each head by head. The tiles read them where they
# lie, in any element type, and a run brings the rows nearer that come later.

cdef enum:
    most_decode_block = 128         # keys, see decode_block
    most_heads_together = 8
    run_of_view = 8                 # keys of a run where heads lie between one another without pages

cdef Py_ssize_t team_distance = 8192        # bytes of keys of a team
cdef Py_ssize_t large_block = (512 if crosswise else 256) << 10     # bytes: half a usual second-level cache
cdef Py_ssize_t long_run = 16 << 10         # bytes of keys that are read at full speed by themselves

cdef struct DecodeBlock:
    Py_ssize_t size                 # keys of a block,
    Py_ssize_t whole_pages, more_rows   # and what that is in pages
    int team                        # heads that walk together
    int n_heads                     # some of them, whose keys are read before any values are summed
    int first_head                  # of these, counted in the team
    bint careful                    # take care of excluded values and of sums beyond the type's range
    bint k_in_place, v_in_place
    bint k_scaled, v_scaled         # int8 codes, each key with its factor
    int k_kind, v_kind              # element kinds of the rows
    Py_ssize_t k_stride, v_stride   # elements from row to row
    Py_ssize_t v_row, v_bytes       # bytes from row to row and of one row to bring nearer while the keys are read
    Py_ssize_t later_row, later_bytes   # and while values are summed
    Py_ssize_t ahead                # runs from one to that which it brings nearer, 0: rows beyond its own end
    Py_ssize_t places_ahead[most_heads_together]    # the same for each head: pages or pieces of a view,
    Py_ssize_t heads_ahead[most_heads_together]     # and heads
    Py_ssize_t start, end           # keys
    int n_runs
    Run runs[most_decode_block * most_heads_together]
    const char* later[most_decode_block * most_heads_together]   # of each run's head: rows to bring nearer


cdef inline int item_bits(int kind) noexcept nogil:
    """The binary logarithm of an element's size."""
    return 3 if kind == kind_float64 else 2 if kind == kind_float32 else 0 if kind == kind_int8 else 1


cdef inline Py_ssize_t row_bytes(const Tensor* tensor, Py_ssize_t n_elements) noexcept nogil:
    return n_elements << item_bits(tensor.kind)


cdef inline Py_ssize_t decode_block(const Problem* problem) noexcept nogil:
    """Keys per softmax: their values are in a cache when they are summed. Short rows need more keys before memory is
    as busy as it can be, where it is kept busy at all."""
    return 128 if crosswise and row_bytes(&problem.k, problem.head_dim) <= 128 else 64


cdef inline Py_ssize_t prefetch_distance(int kind) noexcept nogil:
    """Bytes of keys that lie side by side."""
    return 4096 if crosswise else 1024 if item_bits(kind) >= 2 else 1536


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


cdef inline Py_ssize_t run_length(const Problem* problem, const Place* place, int n_heads) noexcept nogil:
    """Keys from one on that follow each other before it is the next head's turn."""
    if problem.pages != NULL:
        return problem.page_size - place.row
    return run_of_view if n_heads > 1 else most_decode_block


cdef inline Place next_block(const Problem* problem, const DecodeBlock* block, const Place* place) noexcept nogil:
    """The key that comes a block later."""
    cdef Place later
    later.key, later.page, later.row = place.key + block.size, 0, 0
    if problem.pages != NULL:
        later.page, later.row = place.page + block.whole_pages, place.row + block.more_rows
        if later.row >= problem.page_size:
            later.page, later.row = later.page + 1, later.row - problem.page_size
    return later


cdef inline const void* later_rows(const Problem* problem, const Entry* entry, Py_ssize_t kv_head,
                                   const DecodeBlock* block, const Run* run, const Place* place,
                                   const Place* later) noexcept nogil:
    """What to bring nearer while a run's values are summed: its head's keys a block later, or in int8 without these the
    values of the next head, after the last head those of the first one a block later. Where nothing follows, its own
    values."""
    cdef int head = block.first_head + run.head
    if block.later_bytes == 0:
        return run.v
    if not crosswise and head + 1 < block.team:
        return row_at(problem, &problem.v, entry, kv_head + run.head + 1, place)
    if later.key >= entry.n_keys:
        return run.v
    if crosswise:
        return row_at(problem, &problem.k, entry, kv_head + run.head, later)
    return row_at(problem, &problem.v, entry, kv_head - block.first_head, later)


cdef void hand_out_later(DecodeBlock* block) noexcept nogil:
    """Which run brings which rows nearer. Values are summed head by head, but the next keys of all heads come nearer in
    the order of memory."""
    cdef int head, run, turn = 0
    for head in range(block.n_heads):
        run = head
        while run < block.n_runs:
            block.runs[run].later = block.later[turn if crosswise else run]
            turn += 1
            run += block.n_heads


cdef inline Py_ssize_t bytes_ahead(const Problem* problem, const Tensor* tensor, const Entry* entry,
                                   const DecodeBlock* block, const Place* place, int head) noexcept nogil:
    """From a row of keys to the one to bring nearer: a little further on, or in a team at the same place of the run
    that comes block.ahead later."""
    cdef Py_ssize_t places, heads
    cdef const int64_t* page
    if block.team > block.n_heads:
        return prefetch_distance(tensor.kind) // 2  # beyond a page's rows lie those of the head that comes next
    if block.ahead == 0:
        return prefetch_distance(tensor.kind)
    places, heads = block.places_ahead[head], block.heads_ahead[head]
    if problem.pages == NULL:
        return places * run_of_view * tensor.row + heads * tensor.head
    if (place.page + places) * problem.page_size + place.row >= entry.n_keys:
        return 0
    page = problem.pages + entry.index * problem.pages_per_entry + place.page
    return (page[places] - page[0]) * tensor.entry + heads * tensor.head


cdef inline void fetch_scales(const Problem* problem, const Tensor* tensor, const Entry* entry, Py_ssize_t kv_head,
                              const Place* place, const Place* later, const Run* run,
                              real* scales) noexcept nogil:
    """Factors of a run's int8 rows. Those a block later are brought nearer: they are less than the hardware would fetch
    ahead by itself."""
    load_row(scales + run.first, row_at(problem, tensor, entry, kv_head + run.head, place), tensor.row, run.n_keys,
             kind_float32)
    if later.key < entry.n_keys:
        prefetch_rows(<const float*>row_at(problem, tensor, entry, kv_head + run.head, later), 0, 1, run.n_keys)


cdef inline Py_ssize_t scales_size(const real* kind) noexcept nogil:
    """Numbers of one head's factors of keys, and again of values."""
    return most_decode_block + vector_lanes(kind)


cdef inline void pad_scales(real* scales, Py_ssize_t n_keys) noexcept nogil:
    """Up to a whole vector."""
    cdef int lane
    for lane in range(vector_lanes(scales)):
        scales[n_keys + lane] = 0


cdef int heads_at_once(const Problem* problem, int team) noexcept nogil:
    """Heads of a team whose keys are read before any of their values are summed: all of them, but in pages no more than
    make a long run, unless something comes nearer while values are summed, as it does crosswise and in int8."""
    cdef Py_ssize_t most
    if problem.pages == NULL:
        return team
    most = large_block // max(1, row_bytes(&problem.k, decode_block(problem) * problem.head_dim)
                              + row_bytes(&problem.v, decode_block(problem) * problem.value_dim))
    if not crosswise and problem.v.kind != kind_int8:
        most = min(most, long_run // max(1, row_bytes(&problem.k, problem.page_size * problem.head_dim)))
    return <int>max(1, min(team, most))


cdef void begin_blocks(const Problem* problem, int team, int at_once, bint careful, DecodeBlock* block,
                       const real* kind) noexcept nogil:
    """What all blocks of a team have in common."""
    cdef Py_ssize_t keys = max(1, problem.page_size) if problem.pages != NULL else run_of_view  # pages may be empty
    cdef int head
    block.size, block.whole_pages, block.more_rows = decode_block(problem), 0, 0
    if problem.pages != NULL:
        block.whole_pages, block.more_rows = block.size // keys, block.size % keys
    block.team, block.n_heads, block.careful = team, at_once, careful
    block.k_in_place, block.v_in_place = problem.k.packed and not careful, problem.v.packed and not careful
    block.k_scaled = block.k_in_place and problem.k.kind == kind_int8
    block.v_scaled = block.v_in_place and problem.v.kind == kind_int8
    block.k_kind = problem.k.kind if block.k_in_place else kind_of_number(kind)
    block.v_kind = problem.v.kind if block.v_in_place else kind_of_number(kind)
    block.k_stride = problem.k.row >> item_bits(problem.k.kind)
    block.v_stride = problem.v.row >> item_bits(problem.v.kind)
    block.v_row, block.v_bytes = problem.v.row, 0
    block.later_row, block.later_bytes = problem.v.row, 0
    # Values come nearer while their keys are read. In int8, where converting keys takes longer than reading them, a
    # team brings each head's nearer while it sums those of the head before.
    if block.v_in_place and (crosswise or team == 1 or not block.v_scaled):
        block.v_bytes = row_bytes(&problem.v, problem.value_dim)
    elif block.v_in_place:
        block.later_bytes = row_bytes(&problem.v, problem.value_dim)
    if crosswise and block.k_in_place and block.v_in_place:
        block.later_row, block.later_bytes = problem.k.row, row_bytes(&problem.k, problem.head_dim)
    block.ahead = 0
    if problem.pages != NULL or team > 1:
        block.ahead = team_distance // max(1, row_bytes(&problem.k, keys * problem.head_dim)) + 1
        for head in range(team):
            block.places_ahead[head] = (head + block.ahead) // team
            block.heads_ahead[head] = block.ahead - block.places_ahead[head] * team


cdef void fetch_runs(const Problem* problem, const Entry* entry, Py_ssize_t kv_head, DecodeBlock* block,
                     real* key_rows, real* value_rows, real* scales) noexcept nogil:
    """The block's runs of the heads from kv_head on. Rows that cannot be read where they lie, for which there is one
    head, are converted into key_rows (keys, D) and value_rows (keys, E). scales (heads, 2, scales_size) takes the
    codes'."""
    cdef Py_ssize_t end, n_keys = block.end - block.start
    cdef Place place = place_of(problem, block.start), later
    cdef const real* k = NULL
    cdef const real* v = NULL
    cdef real* factors
    cdef Run* run
    cdef int head
    if not block.k_in_place:
        k = fetch_rows(problem, &problem.k, &problem.k_scales, entry, kv_head, place.key, n_keys, problem.head_dim,
                       True, key_rows, &block.k_stride)
    if not block.v_in_place:
        v = fetch_rows(problem, &problem.v, &problem.v_scales, entry, kv_head, place.key, n_keys, problem.value_dim,
                       True, value_rows, &block.v_stride)
    block.n_runs = 0
    while place.key < block.end:
        end = block.end
        if block.k_in_place or block.v_in_place:
            end = min(end, place.key + run_length(problem, &place, block.n_heads))
        later = next_block(problem, block, &place)
        for head in range(block.n_heads):
            run = &block.runs[block.n_runs]
            run.head, run.first, run.n_keys = head, place.key - block.start, end - place.key
            run.k_ahead = 0
            factors = scales + 2 * head * scales_size(scales)
            if block.k_in_place:
                run.k = row_at(problem, &problem.k, entry, kv_head + head, &place)
                run.k_ahead = bytes_ahead(problem, &problem.k, entry, block, &place, head)
            else:
                run.k = k + run.first * block.k_stride
            if block.v_in_place:
                run.v = row_at(problem, &problem.v, entry, kv_head + head, &place)
            else:
                run.v = v + run.first * block.v_stride
            block.later[block.n_runs] = <const char*>later_rows(problem, entry, kv_head, block, run, &place, &later)
            if block.k_scaled:
                fetch_scales(problem, &problem.k_scales, entry, kv_head, &place, &later, run, factors)
            if block.v_scaled:
                fetch_scales(problem, &problem.v_scales, entry, kv_head, &place, &later, run,
                             factors + scales_size(scales))
            block.n_runs += 1
        place.key, place.page, place.row = end, place.page + 1, 0
    hand_out_later(block)
    if block.k_scaled or block.v_scaled:
        for head in range(2 * block.n_heads):
            pad_scales(scales + head * scales_size(scales), n_keys)
