# The C++ tiles as Cython sees them. Shapes stand beside the definitions, in the headers.

from libc.stdint cimport int8_t

cdef extern from "isa.hpp" nogil:
    const char* isa_name
    const int vector_bytes
    const bint has_vector_extension

cdef extern from "products.hpp" nogil:
    const bint has_pair_products
    int product_features, product_pairs, product_split_pairs
    bint any_subnormal_pair[T](const T* rows, Py_ssize_t stride, Py_ssize_t n_rows, Py_ssize_t n_words)

cdef extern from "tiles.hpp" nogil:
    int tile_rows_for(int vectors)
    int panel_lanes[T](const T* kind)
    void score_tile[T](int product, int rows, int vectors, bint keep_maximum, T* scores, const T* panel, const T* k,
                       Py_ssize_t k_stride, Py_ssize_t n_words, T* maximum)
    void value_tile[T](int rows, int vectors, T* sums, const T* weights, const T* v, Py_ssize_t v_stride,
                       Py_ssize_t n_keys, const T* rescale)

cdef extern from "softmax.hpp" nogil:
    void raise_maximum[T](T* maximum, const T* scores, Py_ssize_t n_keys)
    void softmax_block[T](int vectors, T unit, T* scores, Py_ssize_t n_keys, T* maximum, const T* previous,
                          T* total, T* rescale)
    bint reciprocals[T](int vectors, T* factor, const T* total)
    void exclude_outside[T](T* scores, Py_ssize_t from_key, Py_ssize_t to_key, const T* first, const T* last)
    void value_selected[T](T* sums, const T* weights, const T* v, Py_ssize_t v_stride, Py_ssize_t n_keys,
                           Py_ssize_t n_features, const T* rescale, const T* first, const T* last, const T* bias)
    void scale_weights[T](T* weights, Py_ssize_t count, T factor)
    void begin_softmax[T](T* state)

cdef extern from "bias.hpp" nogil:
    void cap_scores[T](T* scores, Py_ssize_t count, T scale, T cap)
    bint are_moderate[T](const T* bias, Py_ssize_t count)
    void add_bias[T](bint moderate, T* scores, const T* bias, Py_ssize_t count, T scale, T* maximum)
    void add_rows[T](T* scores, const T** rows, Py_ssize_t n_keys, T scale, T* maximum)
    void scale_scores[T](T* scores, Py_ssize_t count, T scale, T* maximum)
    void combine_bias[T](T* block, const T* bias, Py_ssize_t count)
    void add_slopes[T](T* bias, bint begin, Py_ssize_t n_keys, int n_lanes, const T* slopes, const T* distance)
    bint all_equal[T](const T** rows, int n_rows, Py_ssize_t n_columns, T value)

cdef extern from "rows.hpp" nogil:
    int kind_float32, kind_float64, kind_float16, kind_bfloat16, kind_bool, kind_int8, kind_bfloat16_pairs
    int kind_of_number[T](const T* number)
    void load_row[T](T* to, const char* source, Py_ssize_t stride, Py_ssize_t count, int kind)
    void dequantize_row[T](T* to, const char* source, Py_ssize_t stride, Py_ssize_t count, T scale)
    void store_row[T](char* to, Py_ssize_t stride, const T* source, Py_ssize_t count, int kind)
    T narrowed[T](double x, const T* kind)
    bint all_finite[T](const T* rows, Py_ssize_t stride, Py_ssize_t n_rows, Py_ssize_t n_columns)
    void pack_rows[T](int vectors, T* panel, const T** rows, Py_ssize_t n_columns, T factor)
    void pack_words[T](int vectors, T* panel, const T** rows, Py_ssize_t n_words)
    bint unpack_rows[T](T** rows, int n_rows, const T* panel, Py_ssize_t n_columns, const T* factor,
                        T* finite)

cdef extern from "mask.hpp" nogil:
    int some_visible, some_hidden
    int look_through(const char** rows, int n_rows, Py_ssize_t n_keys)
    void transpose_mask[T](int8_t* hidden, const char** rows, Py_ssize_t n_keys, const T* kind)
    void exclude_hidden[T](T* scores, const int8_t* hidden, Py_ssize_t n_keys, T* maximum)
    void expand_hidden[T](T* bias, const int8_t* hidden, Py_ssize_t count)

cdef extern from "prefetch.hpp" nogil:
    bint crosswise, either_cache, into_first_level
    enum: rows_nearer
    void prefetch_parts(const char** rows, Py_ssize_t n_rows, Py_ssize_t first, Py_ssize_t last)
    void prefetch_rows[T](const T* rows, Py_ssize_t stride, Py_ssize_t n_rows, Py_ssize_t n_columns)

cdef extern from "decode.hpp" nogil:
    int decode_rows[T](const T* kind)
    int vector_lanes[T](const T* kind)
    cdef struct Run:
        int head
        Py_ssize_t first, n_keys, k_ahead
        const void* k
        const void* v
        const char* later

    void decode_scores[T](int rows, T* scores, Py_ssize_t scores_stride, const T* q, Py_ssize_t q_stride,
                          const Run* runs, int n_runs, int kind, Py_ssize_t k_stride, Py_ssize_t head_dim,
                          Py_ssize_t v_row, Py_ssize_t v_bytes)
    void decode_softmax[T](int rows, T unit, T* scores, Py_ssize_t n_keys, T* maximum, T* total, T* rescale)
    void multiply_scores[T](int rows, T* scores, const T* scales, Py_ssize_t n_keys)
    void multiply_weights[T](int rows, T* weights, const T* scales, Py_ssize_t n_keys)
    void decode_selected[T](int rows, T* sums, const T* weights, const T* v, Py_ssize_t v_stride,
                            Py_ssize_t n_features, const T* rescale, const Py_ssize_t* first, const Py_ssize_t* last,
                            const T* bias)
    bint scale_sums[T](T* sums, Py_ssize_t count, T factor)
    void decode_values[T](int rows, T* sums, const T* weights, const Run* runs, int n_runs, int n_heads, int kind,
                          Py_ssize_t v_stride, Py_ssize_t n_features, Py_ssize_t later_row, Py_ssize_t later_bytes,
                          const T* rescale)

cdef extern from "scratch.hpp" nogil:
    char* take_scratch(size_t size)
    void return_scratch(char* scratch)

cdef extern from "items.hpp" nogil:
    const size_t part_bytes
    cdef cppclass Items:
        void divide(void* memory, int n, Py_ssize_t n_items)
        int part_of(int worker)
        Py_ssize_t take(int own)
        Py_ssize_t take_alone()
        Py_ssize_t taken()
        void stop()
        bint stopped()
        void join()
        void leave()
        bint others_work()

cdef extern from "parallel.hpp" nogil:
    double seconds()
    bint follows_closely()
    void note_call()
    void pause_thread()
    bint enter_python()
    void leave_python()
    void close_python(double patience)
    void forget_other_threads()
    const bint has_openmp
    int openmp_max_threads()
    int startable_threads(int wanted)
