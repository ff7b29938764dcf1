# From one call to its work items, and the items to threads. A worker's scratch is its own; items are drawn from one
# counter, so nothing depends on thread numbers, and no result depends on who did which item.

cdef enum:
    serial_operations = 1000000     # below (some 20 microseconds) waking a second thread costs more than it saves

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


cdef void plan_items(const Problem* problem, Schedule* schedule, int n_lanes) noexcept nogil:
    cdef Py_ssize_t index
    schedule.first_item[0] = 0
    for index in range(problem.n_entries):
        schedule.first_item[index + 1] = schedule.first_item[index] + items_of(problem, schedule, index, n_lanes)
    schedule.n_items = schedule.first_item[problem.n_entries]


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


cdef int run(Problem* problem, int num_threads, object source, const real* kind) except -1:
    """Do a whole call with at most num_threads threads."""
    cdef Options options
    cdef Schedule schedule
    cdef ItemCounter counter
    cdef size_t scratch_size
    cdef char* memory
    cdef int worker, n_workers
    problem.base2 = True
    if source is not None:
        options = Options(source)
        options.apply(problem)
    n_workers = num_threads if operations_of(problem) > serial_operations else 1
    schedule.panels = panels_per_item
    schedule.first_item = <Py_ssize_t*>allocate_scratch((problem.n_entries + 1) * sizeof(Py_ssize_t))
    if schedule.first_item == NULL:
        raise MemoryError(f"no memory for the work items of {problem.n_entries} batch entries")
    plan_items(problem, &schedule, panel_lanes(kind))
    while n_workers > 1 and schedule.panels > 1 and schedule.n_items < 4 * n_workers:
        schedule.panels //= 2       # few items: smaller ones, so that every thread has some
        plan_items(problem, &schedule, panel_lanes(kind))
    n_workers = <int>max(1, min(<Py_ssize_t>n_workers, schedule.n_items))
    scratch_size = (prefill_scratch(problem, kind) + 63) // 64 * 64
    memory = <char*>allocate_scratch(n_workers * scratch_size)
    if memory == NULL:
        free_scratch(schedule.first_item)
        raise MemoryError(f"no memory for {n_workers * scratch_size} bytes of scratch")
    with nogil:
        if n_workers == 1:
            work(problem, &schedule, &counter, <real*>memory)
        else:
            for worker in prange(n_workers, num_threads=n_workers, schedule="static", chunksize=1):
                work(problem, &schedule, &counter, <real*>(memory + worker * scratch_size))
        free_scratch(memory)
        free_scratch(schedule.first_item)
    return 0
