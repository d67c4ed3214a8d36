// y = x W^T + b of a flat batch, for CPUs. W lies in panels of kPanel outputs: [F / kPanel][K][kPanel].
//
// Every output is one sum over k from 0 up, in fp32, whatever the number of rows and threads: a row
// has the same bits wherever it runs. Weights that bfloat16 holds exactly are kept in it, at half the
// bytes and with not a bit changed. Rows go over a panel in tiles. The first reads it as it lies in
// memory, which is all there is to few rows, whose limit is bandwidth, and leaves it in fp32, in cache,
// for the tiles that follow, whose limit is arithmetic.
//
// Shapes: T rows, K inputs, F outputs.

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "crew.h"
#include "tape.h"
#include "vec.h"

namespace {

using namespace orca;

#if defined(__AVX512F__)
constexpr int kTile = 14;  // rows: their 28 sums, and 2 vectors of weights, are held in registers
#else
constexpr int kTile = 2;
#endif
constexpr int kPanel = 2 * kLanes;
constexpr int64_t kLine = 64;
constexpr int64_t kDepth = 1536;  // inputs of a piece of a panel, which the L2 cache holds in fp32
constexpr int64_t kCachedInputs = 128 * 1024;  // floats of x that a piece of a panel goes over

// Memory that is fetched meanwhile: from `from` on, `step` bytes further for every k.
struct Ahead {
  const char* from;
  int64_t step;
};

// kRows rows of x, `stride` floats apart, against K inputs of a panel; `sums` is [kRows][kPanel].
// kWidens: leaves the panel in `wide`, too.
template <int kRows, bool kWidens, class Weight>
void multiply(const float* x, int64_t stride, int64_t K, const Weight* panel, Ahead ahead, float* wide,
              float* sums) {
  Vec low[kRows], high[kRows];
#pragma GCC unroll 14
  for (int row = 0; row < kRows; ++row) {
    low[row] = load(sums + row * kPanel);
    high[row] = load(sums + row * kPanel + kLanes);
  }
  // Three pointers and four multiples of the stride reach all rows; a pointer each were too many.
  const float *row0 = x, *row5 = row0 + 5 * stride, *row10 = row5 + 5 * stride;
  for (int64_t k = 0; k < K; ++k, ++row0, ++row5, ++row10, panel += kPanel, ahead.from += ahead.step) {
    __builtin_prefetch(ahead.from, 0, 2);
    const Vec a = load(panel), b = load(panel + kLanes);
    if constexpr (kWidens) {
      store(wide, a);
      store(wide + kLanes, b);
      wide += kPanel;
    }
#pragma GCC unroll 14
    for (int row = 0; row < kRows; ++row) {
      const float* const near = row < 5 ? row0 : row < 10 ? row5 : row10;
      const float input = near[row % 5 * stride];
      low[row] += a * input;
      high[row] += b * input;
    }
  }
#pragma GCC unroll 14
  for (int row = 0; row < kRows; ++row) {
    store(sums + row * kPanel, low[row]);
    store(sums + row * kPanel + kLanes, high[row]);
  }
}

template <bool kWidens, class Weight, int... kLess>
auto multiply_of(int64_t rows, std::integer_sequence<int, kLess...>) {
  static constexpr decltype(&multiply<1, kWidens, Weight>) kinds[] = {
      multiply<kLess + 1, kWidens, Weight>...};
  return kinds[rows - 1];
}

template <class In>
struct Product {
  const In* x;        // [T, K]
  const float* bias;  // [F], or null
  In* y;              // [T, F]
  int64_t T, K, F;
};

// Inputs [k, k + depth) of a panel, whose first output is `column`.
template <class Weight>
struct Piece {
  const Weight* weights;
  int64_t column, k, depth;
};

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Rows [begin, end) in tiles as equal as they can be.
template <class Use>
void for_tiles(int64_t begin, int64_t end, Use use) {
  const int64_t rows = end - begin, num_tiles = ceil_div(rows, kTile);
  for (int64_t tile = 0; tile < num_tiles; ++tile)
    use(begin + rows * tile / num_tiles, begin + rows * (tile + 1) / num_tiles);
}

// Has the lines of y that a tile will write, [begin, end) in a panel's columns, fetched.
template <class In>
void fetch_columns(const Product<In>& p, int64_t begin, int64_t end, int64_t column) {
  for (int64_t row = begin; row < end; ++row)
    for (int64_t c = 0; c < kPanel; c += kLine / sizeof(In))
      __builtin_prefetch(p.y + row * p.F + column + c, 1, 2);
}

// Rows [begin, end) of y in a panel's columns, of which `column` is the first.
template <class In>
void write_columns(const Product<In>& p, int64_t begin, int64_t end, int64_t column,
                   const float* sums) {
  const int64_t num_columns = std::min<int64_t>(kPanel, p.F - column);
  float bias[kPanel] = {};
  if (p.bias) std::copy_n(p.bias + column, num_columns, bias);
  for (int64_t row = begin; row < end; ++row, sums += kPanel) {
    In columns[kPanel], *const to = p.y + row * p.F + column;
    In* const out = num_columns == kPanel ? to : columns;
    for (int64_t c = 0; c < kPanel; c += kLanes) store(out + c, load(sums + c) + load(bias + c));
    if (num_columns < kPanel) std::copy_n(columns, num_columns, to);
  }
}

inline const float* in_fp32(const float* from, int64_t, float*) { return from; }
inline const float* in_fp32(const uint16_t* from, int64_t size, float* wide) {
  for (int64_t i = 0; i < size; ++i) wide[i] = widened(from[i]);
  return wide;
}

// Rows [begin, end), the first of which is x, against a piece: one tile, or the first of several,
// which widens it, and then the others.
template <class In, class Weight>
void multiply_piece(const Product<In>& p, const float* x, int64_t begin, int64_t end,
                    const Piece<Weight>& piece, float* wide, float* sums) {
  constexpr bool kIsWide = sizeof(Weight) == sizeof(float);
  constexpr auto kAny = std::make_integer_sequence<int, kTile>();
  constexpr int64_t kBytes = kPanel * sizeof(Weight);
  Ahead ahead{reinterpret_cast<const char*>(piece.weights) + piece.depth * kBytes,
              std::min(kLine, ceil_div(kBytes, ceil_div(end - begin, kTile)))};
  for_tiles(begin, end, [&](int64_t first, int64_t last) {
    float* const tile_sums = sums + (first - begin) * kPanel;
    const float* const tile_x = x + (first - begin) * p.K + piece.k;
    if (piece.k == 0) std::fill_n(tile_sums, (last - first) * kPanel, 0.0f);
    const bool is_last = piece.k + piece.depth == p.K;
    if (is_last) fetch_columns(p, first, last, piece.column);
    const auto use = [&](auto multiply, auto weights) {
      multiply(tile_x, p.K, piece.depth, weights, ahead, wide, tile_sums);
    };
    if (first > begin && !kIsWide)
      use(multiply_of<false, float>(last - first, kAny), wide);
    else if (last < end && !kIsWide)
      use(multiply_of<true, Weight>(last - first, kAny), piece.weights);
    else
      use(multiply_of<false, Weight>(last - first, kAny), piece.weights);
    ahead.from += piece.depth * ahead.step;
    if (is_last) write_columns(p, first, last, piece.column, tile_sums);
  });
}

// Room for at least `size` floats.
inline float* grown(std::vector<Vec>& scratch, int64_t size) {
  scratch.resize(std::max<size_t>(scratch.size(), (size + kLanes - 1) / kLanes));
  return reinterpret_cast<float*>(scratch.data());
}

// Panels [first, last), for rows [begin, end), the first of which is x.
template <class In, class Weight>
void multiply_panels(const Product<In>& p, const float* x, int64_t begin, int64_t end,
                     const Weight* panels, int64_t first, int64_t last) {
  thread_local std::vector<Vec> wide_scratch, sums_scratch;  // of whole cache lines
  float* const wide = grown(wide_scratch, std::min(kDepth, p.K) * kPanel);
  float* const sums = grown(sums_scratch, (end - begin) * kPanel);
  for (int64_t index = first; index < last; ++index)
    for (int64_t k = 0; k < p.K; k += kDepth) {
      const Weight* const weights = panels + (index * p.K + k) * kPanel;
      const Piece<Weight> piece{weights, index * kPanel, k, std::min(kDepth, p.K - k)};
      multiply_piece(p, x, begin, end, piece, wide, sums);
    }
}

template <class In, class Weight>
void linear(const void* x, const void* panels, const float* bias, void* y, int64_t T, int64_t K,
            int64_t F, int64_t num_threads) {
  thread_local std::vector<Vec> x_scratch;
  const Product<In> product{static_cast<const In*>(x), bias, static_cast<In*>(y), T, K, F};
  float* const scratch = grown(x_scratch, sizeof(In) < sizeof(float) ? T * K : 0);
  const float* const inputs = in_fp32(product.x, T * K, scratch);
  const int64_t block = std::max<int64_t>(1, kCachedInputs / std::min(K, kDepth) / kTile) * kTile;
  const int64_t num_panels = ceil_div(F, kPanel);
  // A block of rows goes over one panel after another, and then the next block.
  deal_out(num_threads, ceil_div(T, block) * num_panels, [&](int64_t item, int64_t end) {
    while (item < end) {
      const int64_t row = item / num_panels * block, first = item % num_panels;
      const int64_t last = std::min(num_panels, first + end - item);
      multiply_panels(product, inputs + row * K, row, std::min(row + block, T),
                      static_cast<const Weight*>(panels), first, last);
      item += last - first;
    }
  });
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

extern "C" void orca_linear_by_words(const Word* words) { call(orca_linear, words); }
