# A long call looks up from its work now and then: whether a signal has come, and to say how far it is.
#
# Only the thread that called looks up, because only there may Python code run and signals be handled. Every worker
# counts what it does, and asks the clock or the shared items each time that much is done that asking costs nothing.

cdef enum:
    watched_operations = 10000000   # multiply-adds of a call that never looks up: a few milliseconds at the slowest
    counted_operations = 4000000    # multiply-adds from one question to the next: 0.1 to 2 milliseconds

cdef double look_interval = 0.1     # seconds

cdef struct Watch:                  # one worker's
    Items* items                    # of the call; to stop it is to leave no items
    Py_ssize_t counted              # multiply-adds since the last question
    double due                      # when to look up next; infinity: never
    Py_ssize_t n_items
    int n_workers
    int part                        # of the items, to begin with
    PyObject* progress              # the caller's callable, borrowed; NULL: none
    PyObject* error                 # what ended the call, owned; NULL: nothing


cdef Watch watch_over(Items* items) noexcept nogil:
    """The watch of a worker that never looks up, but stops with the others."""
    cdef Watch watch
    memset(&watch, 0, sizeof(Watch))
    watch.items, watch.due = items, INFINITY
    return watch


cdef int begin_to_look(Watch* watch, object progress) except -1:
    """Make it the watch of the calling thread. Signals come to the main thread alone; others need not look for them."""
    if progress is not None:
        watch.progress = <PyObject*>progress
    elif get_ident() != main_thread().ident:
        return 0
    watch.due = seconds() + look_interval
    return 0


cdef void run_python(Watch* watch) noexcept with gil:
    """Handle signals and report progress; what they raise stops the call."""
    try:
        PyErr_CheckSignals()
        if watch.progress != NULL:
            (<object>watch.progress)(max(0, watch.items.taken() - watch.n_workers) / <double>watch.n_items)
    except BaseException as error:
        Py_INCREF(error)
        watch.error = <PyObject*>error
        watch.items.stop()


cdef void look_up(Watch* watch) noexcept nogil:
    """A function without Python objects of its own: it would take the GIL once more to release them."""
    watch.due = INFINITY
    if enter_python():              # else the interpreter ends
        run_python(watch)
        leave_python()
        if watch.error == NULL:
            watch.due = seconds() + look_interval


cdef bint ask(Watch* watch) noexcept nogil:
    watch.counted = 0
    if watch.due < INFINITY and seconds() >= watch.due:
        look_up(watch)
    return not watch.items.stopped()


cdef inline bint goes_on(Watch* watch, Py_ssize_t operations) noexcept nogil:
    """Whether the call goes on, after so many more multiply-adds of this worker."""
    watch.counted += operations
    return watch.counted < counted_operations or ask(watch)


cdef void await_others(Watch* watch) noexcept nogil:
    """Look up while others finish their last items, which may be long."""
    while watch.due < INFINITY and watch.items.others_work():
        pause_thread()
        ask(watch)


def _end_looking():
    """Let no thread look up any more, and wait for those that do, unless what they run takes too long."""
    with nogil:
        close_python(2)


def _after_fork():
    """Forget the threads that the child of a fork has not."""
    forget_other_threads()


cdef int raise_error(Watch* watch) except -1:
    """Raise what ended the call, if anything did."""
    if watch.error != NULL:
        error = <object>watch.error
        Py_DECREF(error)
        raise error
    return 0


atexit.register(_end_looking)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
