# From one call to its work items, and the items to threads. A worker's scratch is its own, and no result depends on who
# did which item.

cdef enum:
    brief_operations = 20000        # below (a microsecond or two) to let go of the GIL is not worth its time
    serial_operations = 600000      # below (some 15 microseconds) a second thread costs more than it saves
    waking_operations = 4000000     # below (some 100 microseconds) it does unless it is awake
    small_scratch = 16384           # bytes of scratch that fit on the stack
    item_operations = 4000          # of an item, beside those with keys

cdef Py_ssize_t shared_keys = 1 << 20       # bytes of a head's keys and values: more than a worker's own cache keeps
cdef Py_ssize_t largest_states = 8 << 20    # bytes per thread of the states of chunks
cdef Py_ssize_t largest_axis = <Py_ssize_t>1 << 40  # sizes of scratch are computed without overflow up to here

cdef struct Schedule:
    Py_ssize_t* first_item          # (entries + 1,): an entry's items are [first_item[e], first_item[e + 1])
    Py_ssize_t n_items
    Py_ssize_t panels               # panels of one item
    int heads                       # key/value heads of a team, see decode.pxi
    bint split                      # decoding is divided by chunks of keys as well
    int n_parts                     # 1: workers draw from all items in turn, else each has a part of its own
    Py_ssize_t step                 # from an item to the one that its worker probably does next
    bint ahead                      # whose queries come nearer
    void* states                    # then: (items, heads, state_size), merged when all are there


cdef double operations_of(const Problem* problem) noexcept nogil:
    """Multiply-adds of a call that hides nothing; a score's exponential counts as 16, no keys as one."""
    return (<double>problem.n_entries * problem.n_heads * problem.n_queries * max(problem.n_keys, 1)
            * (problem.head_dim + problem.value_dim + 16))


cdef inline Py_ssize_t teams_of(const Problem* problem, const Schedule* schedule) noexcept nogil:
    return (problem.n_kv_heads + schedule.heads - 1) // schedule.heads


cdef Py_ssize_t items_of(const Problem* problem, const Schedule* schedule, Py_ssize_t index,
                         const real* kind) noexcept nogil:
    cdef Entry entry = entry_of(problem, index)
    cdef Py_ssize_t rows = entry.n_queries * problem.group, per_item = panel_lanes(kind) * schedule.panels
    if is_decode(problem, &entry, kind):
        return teams_of(problem, schedule) * (n_chunks_of(&entry) if schedule.split else 1)
    return problem.n_kv_heads * ((rows + per_item - 1) // per_item)


cdef Py_ssize_t count_items(const Problem* problem, const Schedule* schedule, const real* kind) noexcept nogil:
    cdef Py_ssize_t index, count = 0
    if problem.query_bounds == NULL and problem.lengths == NULL:    # every entry has as many
        return problem.n_entries * items_of(problem, schedule, 0, kind) if problem.n_entries else 0
    for index in range(problem.n_entries):
        count += items_of(problem, schedule, index, kind)
    return count


cdef void place_items(const Problem* problem, const Schedule* schedule, const real* kind) noexcept nogil:
    cdef Py_ssize_t index
    schedule.first_item[0] = 0
    for index in range(problem.n_entries):
        schedule.first_item[index + 1] = schedule.first_item[index] + items_of(problem, schedule, index, kind)


cdef Item item_of(const Problem* problem, const Schedule* schedule, Py_ssize_t index, Py_ssize_t number,
                  const real* kind) noexcept nogil:
    """A numbered item of the entry `index`, which has many queries."""
    cdef Item item
    cdef Py_ssize_t groups = (schedule.first_item[index + 1] - schedule.first_item[index]) // problem.n_kv_heads
    cdef Py_ssize_t group = groups - 1 - (number - schedule.first_item[index]) % groups     # causal: the longest first
    cdef Py_ssize_t per_item = schedule.panels * panel_lanes(kind)
    item.entry = entry_of(problem, index)
    item.kv_head = (number - schedule.first_item[index]) // groups
    item.first_row = group * per_item
    item.n_rows = min(item.entry.n_queries * problem.group, (group + 1) * per_item)
    return item


cdef bint look_for_item(const Problem* problem, const Schedule* schedule, Py_ssize_t index, Py_ssize_t number,
                        Item* item, const real* kind) noexcept nogil:
    """Whether there is an item of that number, of the entry `index` or a later one, and it has many queries."""
    cdef Entry entry
    if number >= schedule.n_items:
        return False
    while schedule.first_item[index + 1] <= number:
        index += 1
    entry = entry_of(problem, index)
    if is_decode(problem, &entry, kind):
        return False
    item[0] = item_of(problem, schedule, index, number, kind)
    return True


cdef void do_item(const Problem* problem, const Schedule* schedule, Py_ssize_t number, Watch* watch,
                  real* scratch) noexcept nogil:
    cdef Py_ssize_t low = 0, high = problem.n_entries, middle, groups, group
    cdef Entry entry
    cdef Item item, coming
    cdef bint ahead
    cdef int n_heads
    while high - low > 1:           # the entry whose items include this one
        middle = (low + high) // 2
        if schedule.first_item[middle] <= number:
            low = middle
        else:
            high = middle
    entry = entry_of(problem, low)
    if is_decode(problem, &entry, scratch):
        groups = n_chunks_of(&entry) if schedule.split else 1
        group = (number - schedule.first_item[low]) // groups * schedule.heads
        n_heads = <int>min(<Py_ssize_t>schedule.heads, problem.n_kv_heads - group)
        if schedule.split:
            decode_part(problem, &entry, group, n_heads, (number - schedule.first_item[low]) % groups,
                        <real*>schedule.states + number * schedule.heads * state_size(problem, scratch), scratch)
        else:
            decode_all(problem, &entry, group, n_heads, watch, scratch)
        return
    item = item_of(problem, schedule, low, number, scratch)
    ahead = schedule.ahead and look_for_item(problem, schedule, low, number + schedule.step, &coming, scratch)
    attend_panels(problem, &item, &coming if ahead else NULL, watch, scratch)


cdef inline Py_ssize_t next_item(Watch* watch, bint alone) noexcept nogil:
    return watch.items.take_alone() if alone else watch.items.take(watch.part)


cdef void work(const Problem* problem, const Schedule* schedule, Watch* watch, real* scratch) noexcept nogil:
    cdef bint alone = watch.n_workers == 1 and schedule.n_parts == 1
    cdef Py_ssize_t item = next_item(watch, alone)
    while item >= 0:
        do_item(problem, schedule, item, watch, scratch)
        goes_on(watch, item_operations)
        item = next_item(watch, alone)


cdef void help(const Problem* problem, const Schedule* schedule, Items* items, int worker,
               real* scratch) noexcept nogil:
    cdef Watch watch = watch_over(items)
    watch.part = items.part_of(worker)
    items.join()
    work(problem, schedule, &watch, scratch)
    items.leave()


cdef void work_in_parallel(const Problem* problem, const Schedule* schedule, Watch* watch, char* scratch,
                           size_t scratch_size, const real* kind) noexcept nogil:
    cdef int worker
    if watch.n_workers > 1:
        watch.n_workers = startable_threads(watch.n_workers)
    if watch.n_workers == 1:
        work(problem, schedule, watch, <real*>scratch)
        return
    for worker in prange(watch.n_workers, num_threads=watch.n_workers, schedule="static", chunksize=1):
        if worker == 0:             # the thread that called
            work(problem, schedule, watch, <real*>scratch)
            await_others(watch)
        else:
            help(problem, schedule, watch.items, worker, <real*>(scratch + worker * scratch_size))


cdef void merge_all_parts(const Problem* problem, const Schedule* schedule, Watch* watch,
                          real* scratch) noexcept nogil:
    cdef Py_ssize_t index, kv_head, place, size = state_size(problem, scratch)
    cdef Entry entry
    for index in range(problem.n_entries):
        entry = entry_of(problem, index)
        if is_decode(problem, &entry, scratch):
            for kv_head in range(problem.n_kv_heads):
                place = schedule.first_item[index] + kv_head // schedule.heads * n_chunks_of(&entry)
                place = place * schedule.heads + kv_head % schedule.heads
                merge_parts(problem, &entry, kv_head, <real*>schedule.states + place * size, schedule.heads * size,
                            watch, scratch)


cdef bint go_through_keys_together(const Problem* problem, const real* kind) noexcept nogil:
    """Whether one head's items are best done at the same time by all workers: each reads all of its keys."""
    return (problem.n_queries * problem.group > decode_rows(kind)
            and <double>problem.n_keys * (row_bytes(&problem.k, problem.head_dim)
                                          + row_bytes(&problem.v, problem.value_dim)) > shared_keys)


cdef int plan(const Problem* problem, Schedule* schedule, int num_threads, const real* kind) noexcept nogil:
    """How the call is divided; returns the number of workers."""
    cdef double operations = operations_of(problem)
    cdef int n_workers = 1
    if operations > waking_operations or (operations > serial_operations and follows_closely()):
        n_workers = num_threads
    schedule.panels, schedule.heads, schedule.split = panels_per_item, heads_together(problem), False
    schedule.ahead = is_large(problem)
    schedule.n_items = count_items(problem, schedule, kind)
    if n_workers > 1 and schedule.n_items < 8 * n_workers:  # few items: smaller ones, so that every thread has some
        schedule.split = True
        schedule.n_items = count_items(problem, schedule, kind)
        if (schedule.n_items * schedule.heads * state_size(problem, kind)
                > n_workers * largest_states // <Py_ssize_t>sizeof(real)):
            schedule.split = False      # so many keys that their chunks' states would take memory of their own
            schedule.n_items = count_items(problem, schedule, kind)
    while n_workers > 1 and schedule.panels * schedule.heads > 1 and schedule.n_items < 8 * n_workers:
        schedule.panels = max(1, schedule.panels // 2)
        schedule.heads = max(1, schedule.heads // 2)
        schedule.n_items = count_items(problem, schedule, kind)
    n_workers = <int>max(1, min(<Py_ssize_t>n_workers, schedule.n_items))
    schedule.n_parts, schedule.step = n_workers, 1
    if go_through_keys_together(problem, kind):
        schedule.n_parts, schedule.step = 1, n_workers
    return n_workers


cdef void do_all(const Problem* problem, const Schedule* schedule, Watch* watch, char* scratch, size_t scratch_size,
                 const real* kind) noexcept nogil:
    place_items(problem, schedule, kind)
    work_in_parallel(problem, schedule, watch, scratch, scratch_size, kind)
    if schedule.split and not watch.items.stopped():
        merge_all_parts(problem, schedule, watch, <real*>scratch)
    if operations_of(problem) > serial_operations:
        note_call()


cdef int run(Problem* problem, int num_threads, object source, const real* kind) except -1:
    """Do a whole call with at most num_threads threads."""
    cdef Options options
    cdef Schedule schedule
    cdef Items items
    cdef Watch watch
    cdef size_t scratch_size, states_size, needed
    cdef char small[small_scratch + 64]
    cdef char* memory
    cdef char* aligned
    cdef int n_workers
    cdef double operations
    progress = None
    if source is not None:
        options = Options(source)
        options.apply(problem)
        progress = source.progress
    if problem.n_entries == 0 or problem.n_heads == 0 or problem.n_queries == 0:
        return 0
    if max(problem.head_dim, problem.value_dim, problem.n_entries) > largest_axis:
        raise MemoryError(f"no memory for scratch of {max(problem.head_dim, problem.value_dim)} features "
                          f"and {problem.n_entries} batch entries")
    operations = operations_of(problem)
    n_workers = plan(problem, &schedule, num_threads, kind)
    scratch_size = max(prefill_scratch(problem, kind), decode_scratch(problem, schedule.heads, kind)) * sizeof(real)
    scratch_size = (scratch_size + 63) // 64 * 64
    states_size = schedule.n_items * schedule.heads * state_size(problem, kind) * sizeof(real) if schedule.split else 0
    needed = (n_workers * scratch_size + schedule.n_parts * part_bytes + states_size
              + (problem.n_entries + 1) * sizeof(Py_ssize_t) + 128)
    memory = &small[0]
    if needed > small_scratch:
        memory = take_scratch(needed)
    if memory == NULL:
        raise MemoryError(f"no memory for {needed} bytes of scratch")
    watch = watch_over(&items)
    watch.n_workers, watch.n_items = n_workers, schedule.n_items
    if operations > watched_operations:
        begin_to_look(&watch, progress)
    aligned = memory + (64 - <size_t>memory % 64)
    items.divide(aligned + n_workers * scratch_size, schedule.n_parts, schedule.n_items)
    schedule.states = aligned + n_workers * scratch_size + schedule.n_parts * part_bytes
    schedule.first_item = <Py_ssize_t*>(<char*>schedule.states + (states_size + 7) // 8 * 8)
    if operations > brief_operations:
        with nogil:
            do_all(problem, &schedule, &watch, aligned, scratch_size, kind)
    else:
        do_all(problem, &schedule, &watch, aligned, scratch_size, kind)
    if memory != &small[0]:
        return_scratch(memory)
    return raise_error(&watch)
