// Coverage-guided fuzzing of the tiles: any sizes and numbers, in arrays that end where the memory does, against
// plain loops in long double. `bash tests/fuzz/run tiles SECONDS` builds it with clang's libFuzzer and sanitizers.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

#include <fuzzer/FuzzedDataProvider.h>

#include "softmax.hpp"
// The order matters: these use what the tiles define.
#include "bias.hpp"
#include "rows.hpp"

namespace {

using Source = FuzzedDataProvider;

void require(bool good, const char* what) {
    if (good) return;
    std::fprintf(stderr, "wrong: %s\n", what);
    std::abort();
}

// Numbers from a few bytes: small ones mostly, sometimes extreme, sometimes not finite.
template <typename T>
std::unique_ptr<T[]> numbers(Source& source, std::ptrdiff_t count, bool wild) {
    std::unique_ptr<T[]> made(new T[count > 0 ? count : 1]);
    std::uint32_t state = source.ConsumeIntegral<std::uint16_t>() * 2654435761u + 1;
    for (std::ptrdiff_t i = 0; i < count; ++i) {
        state = state * 1664525u + 1013904223u;
        made[i] = T(int(state >> 16) % 2001 - 1000) / T(500);
    }
    if (wild && count > 0) {
        const T extreme[] = {T(INFINITY), T(-INFINITY), T(NAN), T(3e38), T(-3e38), T(1e-42), T(-0.0)};
        made[source.ConsumeIntegralInRange<std::ptrdiff_t>(0, count - 1)] =
            extreme[source.ConsumeIntegralInRange<int>(0, 6)];
    }
    return made;
}

template <typename T>
bool near(T actual, long double expected, long double size) {
    if (std::isnan(expected)) return std::isnan(actual);
    if (std::isinf(expected) || std::fabs(expected) > std::numeric_limits<T>::max() / 4) return true;
    if (std::isinf(size) || size > std::numeric_limits<T>::max() / 4) return true;
    return std::fabs(actual - expected) <= 64 * std::numeric_limits<T>::epsilon() * size + 1e-37L;
}

template <typename T>
void tiles(Source& source) {
    constexpr std::ptrdiff_t lanes = panel_lanes_of<T>;
    const int vectors = source.ConsumeIntegralInRange<int>(1, 2);
    const int rows = source.ConsumeIntegralInRange<int>(1, tile_rows_for(vectors));
    const std::ptrdiff_t depth = source.ConsumeIntegralInRange<std::ptrdiff_t>(0, 40);
    const std::ptrdiff_t used = vectors * lanes_of<T>;
    const bool wild = source.ConsumeBool();
    // Scores: k (rows, depth), panel (depth, lanes). Values: v (depth, rows), weights (depth, lanes).
    const std::ptrdiff_t k_stride = depth + source.ConsumeIntegralInRange<std::ptrdiff_t>(0, 3);
    const auto k = numbers<T>(source, (rows - 1) * k_stride + depth, wild);
    const auto panel = numbers<T>(source, depth * lanes, wild);
    auto scores = numbers<T>(source, rows * lanes, false), maximum = numbers<T>(source, lanes, false);
    score_tile<T>(product_features, rows, vectors, true, scores.get(), panel.get(), k.get(), k_stride, depth,
                  maximum.get());
    for (int row = 0; row < rows; ++row)
        for (std::ptrdiff_t lane = 0; lane < used; ++lane) {
            long double sum = 0, size = 0;
            for (std::ptrdiff_t d = 0; d < depth; ++d) {
                const long double term = (long double)k[row * k_stride + d] * panel[d * lanes + lane];
                sum += term, size += std::fabs(term);
            }
            require(near(scores[row * lanes + lane], sum, size), "score tile");
            require(!(scores[row * lanes + lane] > maximum[lane]), "maximum of a score tile");
        }
    const std::ptrdiff_t v_stride = rows + source.ConsumeIntegralInRange<std::ptrdiff_t>(0, 3);
    const auto v = numbers<T>(source, depth > 0 ? (depth - 1) * v_stride + rows : 0, wild);
    auto sums = numbers<T>(source, rows * lanes, false), rescale = numbers<T>(source, lanes, false);
    std::vector<T> before(sums.get(), sums.get() + rows * lanes);
    value_tile<T>(rows, vectors, sums.get(), panel.get(), v.get(), v_stride, depth, rescale.get());
    for (int row = 0; row < rows; ++row)
        for (std::ptrdiff_t lane = 0; lane < used; ++lane) {
            long double sum = (long double)before[row * lanes + lane] * rescale[lane], size = std::fabs(sum);
            for (std::ptrdiff_t key = 0; key < depth; ++key) {
                const long double term = (long double)v[key * v_stride + row] * panel[key * lanes + lane];
                sum += term, size += std::fabs(term);
            }
            require(near(sums[row * lanes + lane], sum, size), "value tile");
        }
}

template <typename T>
void softmax(Source& source) {
    constexpr std::ptrdiff_t lanes = panel_lanes_of<T>;
    const int vectors = source.ConsumeIntegralInRange<int>(1, 2);
    const std::ptrdiff_t n_keys = source.ConsumeIntegralInRange<std::ptrdiff_t>(0, 50);
    const T unit = T(source.ConsumeIntegralInRange<int>(1, 4000)) / T(1000);
    auto scores = numbers<T>(source, n_keys * lanes, source.ConsumeBool());
    const std::vector<T> before(scores.get(), scores.get() + n_keys * lanes);
    auto maximum = numbers<T>(source, lanes, false), total = numbers<T>(source, lanes, false);
    auto rescale = numbers<T>(source, lanes, false);
    for (std::ptrdiff_t lane = 0; lane < lanes; ++lane) maximum[lane] = -T(INFINITY), total[lane] = 0;
    const std::vector<T> previous(maximum.get(), maximum.get() + lanes);
    raise_maximum<T>(maximum.get(), scores.get(), n_keys);
    softmax_block<T>(vectors, unit, scores.get(), n_keys, maximum.get(), previous.data(), total.get(), rescale.get());
    for (std::ptrdiff_t lane = 0; lane < vectors * lanes_of<T>; ++lane) {
        if (std::isinf(maximum[lane])) continue;
        long double sum = 0;
        for (std::ptrdiff_t key = 0; key < n_keys; ++key) {
            const long double score = before[key * lanes + lane];
            const long double weight = std::exp2((long double)unit * (score - maximum[lane]));
            const T got = scores[key * lanes + lane];
            require(std::isnan(score) ? std::isnan(got) : std::fabs(got - weight) <= 1e-5L * weight + 1e-37L, "weight");
            sum += weight;
        }
        require(std::isnan(sum) ? std::isnan(total[lane]) : std::fabs(total[lane] - sum) <= 1e-4L * sum, "total");
    }
}

// A row of any kind and stride to the computing type and back is the same row, to the bit but for NaN.
template <typename T>
void rows_of(Source& source) {
    const int kind = source.ConsumeIntegralInRange<int>(0, 3);
    const std::ptrdiff_t size = kind == kind_float32 ? 4 : kind == kind_float64 ? 8 : 2;
    const std::ptrdiff_t count = source.ConsumeIntegralInRange<std::ptrdiff_t>(0, 70);
    const std::ptrdiff_t stride = size + source.ConsumeIntegralInRange<std::ptrdiff_t>(0, 5);
    const std::ptrdiff_t bytes = count > 0 ? (count - 1) * stride + size : 0;
    auto raw = source.ConsumeBytes<char>(bytes);
    raw.resize(bytes);
    std::unique_ptr<char[]> from(new char[bytes + 1 - (bytes > 0)]), back(new char[bytes + 1 - (bytes > 0)]);
    if (bytes > 0) std::memcpy(from.get(), raw.data(), bytes), std::memcpy(back.get(), raw.data(), bytes);
    std::unique_ptr<T[]> row(new T[count + (count == 0)]);
    load_row<T>(row.get(), from.get(), stride, count, kind);
    store_row<T>(back.get(), stride, row.get(), count, kind);
    for (std::ptrdiff_t i = 0; i < count; ++i) {
        const bool narrower = kind == kind_float64 && sizeof(T) == 4;
        if (std::isnan(row[i]) || narrower) continue;
        require(std::memcmp(from.get() + i * stride, back.get() + i * stride, size) == 0, "row there and back");
    }
}

template <typename T>
void panels(Source& source) {
    constexpr std::ptrdiff_t lanes = panel_lanes_of<T>;
    const std::ptrdiff_t columns = source.ConsumeIntegralInRange<std::ptrdiff_t>(0, 40);
    const int n_rows = source.ConsumeIntegralInRange<int>(1, int(lanes));
    const auto given = numbers<T>(source, n_rows * columns, false);
    const T* rows[lanes];
    for (std::ptrdiff_t lane = 0; lane < lanes; ++lane) rows[lane] = given.get() + (lane < n_rows ? lane : 0) * columns;
    std::unique_ptr<T[]> panel(new T[columns * lanes + 1]), back(new T[n_rows * columns + 1]);
    pack_rows<T>(n_rows <= lanes / panel_vectors ? 1 : panel_vectors, panel.get(), rows, columns, T(2));
    std::vector<T> half(lanes, T(0.5)), finite(lanes);
    T* to[lanes] = {};
    for (int row = 0; row < n_rows; ++row) to[row] = back.get() + row * columns;
    require(unpack_rows<T>(to, n_rows, panel.get(), columns, half.data(), finite.data()), "all of a panel finite");
    for (std::ptrdiff_t i = 0; i < n_rows * columns; ++i) require(back[i] == given[i], "panel there and back");
    for (int row = 0; row < n_rows; ++row) require(finite[row] == T(0), "finite panel");
}

// Biases transposed on their way to scores: -inf excludes, a finite sum stays finite.
template <typename T>
void biases(Source& source) {
    constexpr std::ptrdiff_t lanes = panel_lanes_of<T>;
    const std::ptrdiff_t n_keys = source.ConsumeIntegralInRange<std::ptrdiff_t>(1, 50);
    const bool shared = source.ConsumeBool();
    const auto given = numbers<T>(source, shared ? n_keys : lanes * n_keys, source.ConsumeBool());
    const T* rows[lanes];
    for (std::ptrdiff_t lane = 0; lane < lanes; ++lane) rows[lane] = given.get() + (shared ? 0 : lane) * n_keys;
    auto scores = numbers<T>(source, n_keys * lanes, source.ConsumeBool()), maximum = numbers<T>(source, lanes, false);
    const std::vector<T> before(scores.get(), scores.get() + n_keys * lanes);
    const T scale = T(source.ConsumeIntegralInRange<int>(1, 3000)) / T(1000), most = std::numeric_limits<T>::max();
    add_rows<T>(scores.get(), rows, n_keys, scale, maximum.get());
    for (std::ptrdiff_t i = 0; i < n_keys * lanes; ++i) {
        const T bias = rows[i % lanes][i / lanes];
        const long double score = (long double)before[i] * scale, sum = score + bias;
        require(!(scores[i] > maximum[i % lanes]), "maximum of biased scores");
        if (std::isinf(bias) && bias < 0) require(scores[i] == bias, "excluded score");
        else if (std::isfinite(bias) && std::isfinite(before[i]) && std::fabs(score) <= most)
            require(std::isfinite(scores[i]), "finite biased score");
        if (!std::isinf(bias)) require(near(scores[i], sum, std::fabs(score) + std::fabs(bias)), "biased score");
    }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    Source source(data, size);
    switch (source.ConsumeIntegralInRange<int>(0, 9)) {
        case 0: tiles<float>(source); break;
        case 1: tiles<double>(source); break;
        case 2: softmax<float>(source); break;
        case 3: softmax<double>(source); break;
        case 4: rows_of<float>(source); break;
        case 5: rows_of<double>(source); break;
        case 6: panels<float>(source); break;
        case 7: biases<float>(source); break;
        case 8: biases<double>(source); break;
        default: panels<double>(source);
    }
    return 0;
}
