// y = x W^T + b of a flat batch, for CPUs. W lies in panels of kPanel outputs: [F / kPanel][K][kPanel].
//
// Every output is one sum over k from 0 up, in fp32, whatever the number of rows and threads: a row
// has the same bits wherever it runs. Few rows read each panel once, as it lies in memory: bandwidth
// is the limit, and weights that bfloat16 holds exactly are kept in it, at half the bytes and with not
// a bit changed. Many rows have a piece of a panel widened to fp32 first, in cache, and arithmetic is
// the limit.
//
// Shapes: T rows, K inputs, F outputs.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "crew.h"
#include "vec.h"

namespace {

using namespace orca;

#if defined(__AVX512F__)
constexpr int kTile = 14;  // rows: their 28 sums, and 2 vectors of weights, are held in registers
#else
constexpr int kTile = 2;
#endif
constexpr int kPanel = 2 * kLanes, kLine = 64;
constexpr int64_t kFewRows = 2 * kTile;  // more are worth widening a panel for
constexpr int64_t kDepth = 192;  // inputs of a widened piece of a panel, which the L1 cache holds
constexpr int64_t kCachedInputs = 224 * 1024;  // floats of x that one panel after another goes over

// kRows rows, their inputs as [K][kRows], against one panel; `sums` is [kRows][kPanel]. Meanwhile
// memory from `ahead` on is fetched, `step` bytes further for every k.
template <int kRows, class Weight>
void multiply(const float* inputs, int64_t K, const Weight* panel, const char* ahead, int64_t step,
              float* sums) {
  Vec low[kRows], high[kRows];
#pragma GCC unroll 14
  for (int row = 0; row < kRows; ++row) {
    low[row] = load(sums + row * kPanel);
    high[row] = load(sums + row * kPanel + kLanes);
  }
  for (int64_t k = 0; k < K; ++k, inputs += kRows, panel += kPanel, ahead += step) {
    __builtin_prefetch(ahead, 0, 2);
    const Vec a = load(panel), b = load(panel + kLanes);
#pragma GCC unroll 14
    for (int row = 0; row < kRows; ++row) {
      low[row] += a * inputs[row];
      high[row] += b * inputs[row];
    }
  }
#pragma GCC unroll 14
  for (int row = 0; row < kRows; ++row) {
    std::memcpy(sums + row * kPanel, &low[row], sizeof(Vec));
    std::memcpy(sums + row * kPanel + kLanes, &high[row], sizeof(Vec));
  }
}

template <class Weight, int... kLess>
auto multiply_of(int64_t rows, std::integer_sequence<int, kLess...>) {
  static constexpr decltype(&multiply<1, Weight>) kinds[] = {multiply<kLess + 1, Weight>...};
  return kinds[rows - 1];
}

template <class In>
struct Product {
  const In* x;        // [T, K]
  const float* bias;  // [F], or null
  In* y;              // [T, F]
  int64_t T, K, F;
};

// Rows [begin, end) in tiles as equal as they can be.
template <class Use>
void for_tiles(int64_t begin, int64_t end, Use use) {
  const int64_t rows = end - begin, num_tiles = (rows + kTile - 1) / kTile;
  for (int64_t tile = 0; tile < num_tiles; ++tile)
    use(begin + rows * tile / num_tiles, begin + rows * (tile + 1) / num_tiles);
}

// Inputs [k, k_end) of those rows in fp32, tile after tile as [K][rows of the tile].
template <class In>
void lay_inputs(const Product<In>& p, int64_t begin, int64_t end, int64_t k, int64_t k_end, float* laid) {
  for_tiles(begin, end, [&](int64_t first, int64_t last) {
    float* tile = laid + (first - begin) * p.K;
    for (int64_t row = first; row < last; ++row)
      for (int64_t i = k; i < k_end; ++i)
        tile[i * (last - first) + row - first] = widened(p.x[row * p.K + i]);
  });
}

// Adds inputs [k, k + depth) of rows [begin, end) to their sums in one panel, of which `weights` are
// those inputs'. The first tiles fetch as many bytes again from `ahead` on: what follows in memory.
template <class In, class Weight>
void add_inputs(const Product<In>& p, const float* laid, int64_t begin, int64_t end, int64_t k,
                int64_t depth, const Weight* weights, const char* ahead, int64_t num_ahead, float* sums) {
  const char* const ahead_end = ahead + num_ahead;
  for_tiles(begin, end, [&](int64_t first, int64_t last) {
    const auto multiply = multiply_of<Weight>(last - first, std::make_integer_sequence<int, kTile>());
    const int64_t step = ahead < ahead_end ? kLine : 0;
    const float* const inputs = laid + (first - begin) * p.K + k * (last - first);
    multiply(inputs, depth, weights, ahead, step, sums + (first - begin) * kPanel);
    ahead += depth * step;
  });
}

// Rows [begin, end) of y in a panel's columns, of which `column` is the first.
template <class In>
void write_columns(const Product<In>& p, int64_t begin, int64_t end, int64_t column,
                   const float* sums) {
  const int64_t num_columns = std::min<int64_t>(kPanel, p.F - column);
  for (int64_t row = begin; row < end; ++row)
    for (int64_t c = 0; c < num_columns; ++c)
      p.y[row * p.F + column + c] = narrowed<In>(
          sums[(row - begin) * kPanel + c] + (p.bias ? p.bias[column + c] : 0.0f));
}

inline const float* in_fp32(const float* panel, int64_t, float*) { return panel; }
inline const float* in_fp32(const uint16_t* panel, int64_t size, float* wide) {
  for (int64_t i = 0; i < size; ++i) wide[i] = widened(panel[i]);
  return wide;
}

// Room for at least `size` floats.
inline float* grown(std::vector<Vec>& scratch, int64_t size) {
  scratch.resize(std::max<size_t>(scratch.size(), (size + kLanes - 1) / kLanes));
  return reinterpret_cast<float*>(scratch.data());
}

// Panels [first, last), for rows [begin, end).
template <class In, class Weight>
void multiply_panels(const Product<In>& p, const float* laid, int64_t begin, int64_t end,
                     const Weight* panels, int64_t first, int64_t last) {
  thread_local std::vector<Vec> wide_scratch, sums_scratch;  // of whole cache lines
  float* const wide = grown(wide_scratch, kDepth * kPanel);
  float* const sums = grown(sums_scratch, (end - begin) * kPanel);
  const bool is_few = end - begin <= kFewRows;
  const int64_t most = is_few ? p.K : kDepth;
  for (int64_t index = first; index < last; ++index) {
    std::fill_n(sums, (end - begin) * kPanel, 0.0f);
    for (int64_t k = 0; k < p.K; k += most) {
      const int64_t depth = std::min(most, p.K - k), size = depth * kPanel;
      const Weight* const weights = panels + (index * p.K + k) * kPanel;
      const auto ahead = reinterpret_cast<const char*>(weights + size);
      const int64_t num_ahead = size * sizeof(Weight);
      if (is_few)
        add_inputs(p, laid, begin, end, k, depth, weights, ahead, num_ahead, sums);
      else
        add_inputs(p, laid, begin, end, k, depth, in_fp32(weights, size, wide), ahead, num_ahead, sums);
    }
    write_columns(p, begin, end, index * kPanel, sums);
  }
}

template <class In, class Weight>
void linear(const void* x, const void* panels, const float* bias, void* y, int64_t T, int64_t K,
            int64_t F, int64_t num_threads) {
  thread_local std::vector<Vec> laid_scratch;
  const Product<In> product{static_cast<const In*>(x), bias, static_cast<In*>(y), T, K, F};
  const int64_t block = std::max<int64_t>(1, kCachedInputs / K / kTile) * kTile;
  float* const laid = grown(laid_scratch, std::min(block, T) * K);
  for (int64_t begin = 0; begin < T; begin += block) {
    const int64_t end = std::min(begin + block, T);
    deal_out(end - begin <= kFewRows ? 1 : num_threads, K, [&](int64_t k, int64_t k_end) {
      lay_inputs(product, begin, end, k, k_end, laid);
    });
    deal_out(num_threads, (F + kPanel - 1) / kPanel, [&](int64_t first, int64_t last) {
      multiply_panels(product, laid, begin, end, static_cast<const Weight*>(panels), first, last);
    });
  }
}

}  // namespace

extern "C" int64_t orca_panel() { return kPanel; }

// x [T, K] and y [T, F] are of one type, both contiguous; `panels` is W, padded with zeros to whole
// panels; bias is fp32 or null.
extern "C" void orca_linear(int64_t is_bf16, int64_t is_weight_bf16, const void* x,
                            const void* panels, const float* bias, void* y, int64_t T, int64_t K,
                            int64_t F, int64_t num_threads) {
  const auto run = is_bf16 ? (is_weight_bf16 ? linear<uint16_t, uint16_t> : linear<uint16_t, float>)
                           : (is_weight_bf16 ? linear<float, uint16_t> : linear<float, float>);
  run(x, panels, bias, y, T, K, F, num_threads);
}
