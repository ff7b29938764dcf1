# From one call to its work items, and the items to threads. A worker's scratch is its own; items are drawn from one
# counter, so nothing depends on thread numbers, and no result depends on who did which item.

cdef enum:
    serial_operations = 1000000     # below (some 20 microseconds) waking a second thread costs more than it saves
    small_scratch = 16384           # bytes of scratch that fit on the stack

cdef struct Schedule:
    Py_ssize_t* first_item          # (entries + 1,): an entry's items are [first_item[e], first_item[e + 1])
    Py_ssize_t n_items
    Py_ssize_t panels               # panels of one item


cdef double operations_of(const Problem* problem) noexcept nogil:
    """Multiply-adds of a call that hides nothing; a score's exponential counts as 16."""
    return (<double>problem.n_entries * problem.n_heads * problem.n_queries * problem.n_keys
            * (problem.head_dim + problem.value_dim + 16))


cdef Py_ssize_t items_of(const Problem* problem, const Schedule* schedule, Py_ssize_t index, int n_lanes) noexcept nogil:
    cdef Entry entry = entry_of(problem, index)
    cdef Py_ssize_t rows = entry.n_queries * problem.group, per_item = n_lanes * schedule.panels
    return problem.n_kv_heads * ((rows + per_item - 1) // per_item)


cdef Py_ssize_t count_items(const Problem* problem, const Schedule* schedule, int n_lanes) noexcept nogil:
    cdef Py_ssize_t index, count = 0
    if problem.query_bounds == NULL:    # every entry has as many
        return problem.n_entries * items_of(problem, schedule, 0, n_lanes) if problem.n_entries else 0
    for index in range(problem.n_entries):
        count += items_of(problem, schedule, index, n_lanes)
    return count


cdef void place_items(const Problem* problem, const Schedule* schedule, int n_lanes) noexcept nogil:
    cdef Py_ssize_t index
    schedule.first_item[0] = 0
    for index in range(problem.n_entries):
        schedule.first_item[index + 1] = schedule.first_item[index] + items_of(problem, schedule, index, n_lanes)


cdef void do_item(const Problem* problem, const Schedule* schedule, Py_ssize_t item, real* scratch) noexcept nogil:
    cdef Py_ssize_t low = 0, high = problem.n_entries, middle, groups, group, per_item
    cdef Entry entry
    while high - low > 1:           # the entry whose items include this one
        middle = (low + high) // 2
        if schedule.first_item[middle] <= item:
            low = middle
        else:
            high = middle
    entry = entry_of(problem, low)
    groups = (schedule.first_item[low + 1] - schedule.first_item[low]) // problem.n_kv_heads
    group = groups - 1 - (item - schedule.first_item[low]) % groups     # causal: the longest first
    per_item = schedule.panels * panel_lanes(scratch)
    attend_panels(problem, &entry, (item - schedule.first_item[low]) // groups, group * per_item,
                  min(entry.n_queries * problem.group, (group + 1) * per_item), scratch)


cdef void work(const Problem* problem, const Schedule* schedule, ItemCounter* counter, real* scratch) noexcept nogil:
    cdef Py_ssize_t item = counter.take()
    while item < schedule.n_items:
        do_item(problem, schedule, item, scratch)
        item = counter.take()


cdef void work_in_parallel(const Problem* problem, const Schedule* schedule, int n_workers, char* scratch,
                           size_t scratch_size, const real* kind) noexcept nogil:
    cdef ItemCounter counter
    cdef int worker
    if n_workers == 1:
        work(problem, schedule, &counter, <real*>scratch)
    else:
        for worker in prange(n_workers, num_threads=n_workers, schedule="static", chunksize=1):
            work(problem, schedule, &counter, <real*>(scratch + worker * scratch_size))


cdef int run(Problem* problem, int num_threads, object source, const real* kind) except -1:
    """Do a whole call with at most num_threads threads."""
    cdef Options options
    cdef Schedule schedule
    cdef size_t scratch_size, needed
    cdef char small[small_scratch + 64]
    cdef char* memory
    cdef char* aligned
    cdef int n_workers
    problem.base2 = True
    if source is not None:
        options = Options(source)
        options.apply(problem)
    n_workers = num_threads if operations_of(problem) > serial_operations else 1
    schedule.panels = panels_per_item
    schedule.n_items = count_items(problem, &schedule, panel_lanes(kind))
    while n_workers > 1 and schedule.panels > 1 and schedule.n_items < 4 * n_workers:
        schedule.panels //= 2       # few items: smaller ones, so that every thread has some
        schedule.n_items = count_items(problem, &schedule, panel_lanes(kind))
    n_workers = <int>max(1, min(<Py_ssize_t>n_workers, schedule.n_items))
    scratch_size = (prefill_scratch(problem, kind) + 63) // 64 * 64
    needed = n_workers * scratch_size + (problem.n_entries + 1) * sizeof(Py_ssize_t) + 64
    memory = &small[0]
    if needed > small_scratch:
        memory = <char*>malloc(needed)
    if memory == NULL:
        raise MemoryError(f"no memory for {needed} bytes of scratch")
    with nogil:
        aligned = memory + (64 - <size_t>memory % 64)
        schedule.first_item = <Py_ssize_t*>(aligned + n_workers * scratch_size)
        place_items(problem, &schedule, panel_lanes(kind))
        work_in_parallel(problem, &schedule, n_workers, aligned, scratch_size, kind)
        if memory != &small[0]:
            free(memory)
    return 0
