"""Which instruction-set levels this processor and operating system can run. Compiled without any flags, so that
importing it is safe everywhere."""

cdef extern from "cpu.hpp" nogil:
    int cpu_level()


def supported_levels():
    """The names of the levels this machine runs, lowest first."""
    return ("baseline", "avx2", "avx512", "avx512_bf16")[:cpu_level() + 1]
