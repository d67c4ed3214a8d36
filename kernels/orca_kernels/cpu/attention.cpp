// Attention of a whole mixed batch over paged keys and values, for CPUs.
//
// Each (request, KV head) is worked through in tiles of query rows; a tile holds
// the query heads of that KV head for a few positions, so that keys are read once
// for all of them. Softmax is computed online, span by span of a few blocks:
//   m' = max(m, max_j s_j);  l' = l e^(m-m') + sum_j e^(s_j-m');  o' likewise.
// The order of every sum depends on the position, the block size and the window only,
// never on the batch, the tile, or the thread: a row has the same bits wherever it runs.
//
// Shapes: T rows, N query heads, M KV heads, D head size, B blocks of S slots.

#include <cstdint>
#include <cstring>
#include <vector>

#include "crew.h"
#include "vec.h"

namespace {

using namespace orca;

constexpr int kTile = 8;   // rows that share a load of a key
constexpr int kRows = 32;  // rows that share a span of keys, once it is fetched
constexpr int kSpan = 64;  // slots of a span, in whole blocks, of which it has at least one
constexpr int kAtOnce = 4;  // rows that share a load of a value
constexpr float kMinusInf = -3.0e38f;

constexpr IntVec kLaneNumbers = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

struct Shape {
  int64_t num_heads, num_kv_heads, head_dim, block_size, window;
  float scale;
};

struct Request {
  int64_t first_row, start, length, first_block;
};

// The first position that a row at `position` sees: `window` ones, its own among them; 0: all.
inline int64_t first_seen(const Shape& shape, int64_t position) {
  return shape.window > 0 && position >= shape.window ? position - shape.window + 1 : 0;
}

// How many keys a row of the request is taken to see when work is shared out.
inline double keys_seen(const Shape& shape, const Request& request) {
  const int64_t all = request.start + request.length;
  return static_cast<double>(shape.window > 0 && shape.window < all ? shape.window : all);
}

// Scratch of one thread: a span's keys transposed, and the tile's state.
struct Scratch {
  int64_t num_blocks, size;  // of a span, in blocks and slots
  int padded;                // slots that have room: whole vectors, from any block on
  std::vector<float> keys_DS, values_SD, queries, scores, out, row_max, row_sum, shrink;

  explicit Scratch(const Shape& shape)
      : num_blocks(shape.block_size < kSpan ? kSpan / shape.block_size : 1),
        size(num_blocks * shape.block_size),
        padded(static_cast<int>((size + 2 * kLanes - 1) / kLanes * kLanes)),
        keys_DS(shape.head_dim * padded),
        values_SD(padded * shape.head_dim),
        queries(kRows * shape.head_dim),
        scores(kRows * padded),
        out(kRows * shape.head_dim),
        row_max(kRows),
        row_sum(kRows),
        shrink(kRows) {}
};

inline Vec shuffle(Vec a, Vec b, IntVec from) {  // lane i of the result is lane from[i] of a, b
#if defined(__GNUC__) && !defined(__clang__)
  return __builtin_shuffle(a, b, from);
#else
  Vec v;
  for (int lane = 0; lane < kLanes; ++lane)
    v[lane] = from[lane] < kLanes ? a[from[lane]] : b[from[lane] - kLanes];
  return v;
#endif
}

inline __attribute__((always_inline)) void exchange(Vec* rows, int width, IntVec low, IntVec high) {
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) {
    if (i & width) continue;
    const Vec a = rows[i], b = rows[i + width];
    rows[i] = shuffle(a, b, low);
    rows[i + width] = shuffle(a, b, high);
  }
}

// Sixteen rows of sixteen floats become columns, in four rounds of pairwise exchange.
inline __attribute__((always_inline)) void transpose(Vec* rows) {
  exchange(rows, 8, IntVec{0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23},
           IntVec{8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31});
  exchange(rows, 4, IntVec{0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27},
           IntVec{4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31});
  exchange(rows, 2, IntVec{0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29},
           IntVec{2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31});
  exchange(rows, 1, IntVec{0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30},
           IntVec{1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31});
}

// The first `count` slots of a block, to the span's slots from `at` on: keys transposed to [D, S],
// values as they are.
template <class T>
void fetch_block(const Shape& shape, Scratch& s, const T* keys, const T* values, int count,
                 int64_t at) {
  const int64_t stride = shape.num_kv_heads * shape.head_dim, D = shape.head_dim;
  float* const keys_DS = &s.keys_DS[at];
  float* const values_SD = &s.values_SD[at * D];
  int64_t d = 0;
  for (; d + kLanes <= D; d += kLanes) {
    for (int first = 0; first < count; first += kLanes) {
      Vec rows[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i)
        rows[i] = load(keys + (first + i < count ? first + i : 0) * stride + d);
      transpose(rows);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) store(keys_DS + (d + i) * s.padded + first, rows[i]);
    }
    for (int slot = 0; slot < count; ++slot)
      store(values_SD + slot * D + d, load(values + slot * stride + d));
  }
  for (; d < D; ++d)
    for (int slot = 0; slot < count; ++slot) {
      keys_DS[d * s.padded + slot] = widened(keys[slot * stride + d]);
      values_SD[slot * D + d] = widened(values[slot * stride + d]);
    }
}

// The first `count` slots of the span whose blocks begin at `blocks`, for one KV head.
template <class T>
void fetch_span(const Shape& shape, Scratch& s, const int64_t* blocks, const T* k, const T* v,
                int64_t kv_head, int count) {
  const int64_t S = shape.block_size, D = shape.head_dim;
  for (int64_t at = 0; at < count; at += S) {
    const int64_t base = (blocks[at / S] * S * shape.num_kv_heads + kv_head) * D;
    fetch_block<T>(shape, s, k + base, v + base, static_cast<int>(count - at < S ? count - at : S), at);
  }
}

// scores[row][slot] = (q_row . k_slot) * scale of up to kTile rows, summed over d in order.
void score_rows(const Shape& shape, Scratch& s, int first, int rows, int count) {
  const float* const queries = &s.queries[first * shape.head_dim];
  float* const scores = &s.scores[first * s.padded];
  for (int lane = 0; lane < count; lane += kLanes) {
    Vec sums[kTile];
#pragma GCC unroll 8
    for (int row = 0; row < kTile; ++row) sums[row] = Vec{};
    for (int d = 0; d < shape.head_dim; ++d) {
      const Vec key = load(&s.keys_DS[d * s.padded + lane]);
#pragma GCC unroll 8
      for (int row = 0; row < kTile; ++row)
        sums[row] += key * queries[row * shape.head_dim + d];
    }
#pragma GCC unroll 8
    for (int row = 0; row < rows; ++row) store(scores + row * s.padded + lane, sums[row] * shape.scale);
  }
}

// out = out * shrink + scores . values, slot after slot, for kNum rows with kChunks vectors of D each.
template <int kNum, int kChunks>
inline void add_values(const float* scores, int64_t padded, const float* values, int64_t head_dim,
                       int count, const float* shrink, float* out) {
  Vec acc[kNum][kChunks];
  for (int row = 0; row < kNum; ++row)
    for (int c = 0; c < kChunks; ++c)
      acc[row][c] = load(out + row * head_dim + c * kLanes) * shrink[row];
  for (int slot = 0; slot < count; ++slot)
    for (int c = 0; c < kChunks; ++c) {
      const Vec value = load(values + slot * head_dim + c * kLanes);
      for (int row = 0; row < kNum; ++row) acc[row][c] += value * scores[row * padded + slot];
    }
  for (int row = 0; row < kNum; ++row)
    for (int c = 0; c < kChunks; ++c) store(out + row * head_dim + c * kLanes, acc[row][c]);
}

// Rows [first, first + kNum), which all see slots [begin, end) of the span, take their values in.
template <int kNum>
void add_span(const Shape& shape, Scratch& s, int first, int begin, int end) {
  const int64_t D = shape.head_dim;
  const float* const scores = &s.scores[first * s.padded + begin];
  const float* const values = &s.values_SD[begin * D];
  const float* const shrink = &s.shrink[first];
  float* const out = &s.out[first * D];
  int64_t d = 0;
  for (; d + 4 * kLanes <= D; d += 4 * kLanes)
    add_values<kNum, 4>(scores, s.padded, values + d, D, end - begin, shrink, out + d);
  for (; d + kLanes <= D; d += kLanes)
    add_values<kNum, 1>(scores, s.padded, values + d, D, end - begin, shrink, out + d);
  for (; d < D; ++d)
    for (int row = 0; row < kNum; ++row) {
      float acc = out[row * D + d] * shrink[row];
      for (int slot = 0; slot < end - begin; ++slot)
        acc += values[slot * D + d] * scores[row * s.padded + slot];
      out[row * D + d] = acc;
    }
}

// Which of the 16 slots from `lane` on lie in [begin, end).
inline IntVec seen_lanes(int lane, int begin, int end) {
  const IntVec slots = kLaneNumbers + lane;
  return (slots >= begin) & (slots < end);
}

// One row's online softmax over slots [begin, end) of the span: its scores become weights, and
// `shrink` is what its values so far are to be multiplied by.
void soften_row(Scratch& s, int row, int begin, int end) {
  float* scores = &s.scores[row * s.padded];
  Vec lanes_max = splat(s.row_max[row]);
  for (int lane = 0; lane < end; lane += kLanes) {
    Vec v = load(scores + lane);
    v = seen_lanes(lane, begin, end) ? v : splat(kMinusInf);
    store(scores + lane, v);
    lanes_max = v > lanes_max ? v : lanes_max;
  }
  const float largest = max_lanes(lanes_max);
  const float shrink = exp_negative(splat(s.row_max[row] - largest))[0];
  Vec sums{};
  for (int lane = 0; lane < end; lane += kLanes) {
    Vec p = exp_negative(load(scores + lane) - largest);
    p = seen_lanes(lane, begin, end) ? p : Vec{};
    store(scores + lane, p);
    sums += p;
  }
  const float sum = s.row_sum[row] * shrink + sum_lanes(sums);
  s.row_max[row] = largest;
  s.row_sum[row] = sum;
  s.shrink[row] = shrink;
}

inline int in_span(int64_t slot, int64_t size) {
  return static_cast<int>(slot < 0 ? 0 : slot < size ? slot : size);
}

// Rows [begin, end) of a request's (position, query head of `kv_head`) pairs.
template <class T>
void attend_tile(const Shape& shape, Scratch& s, const Request& request, const int64_t* blocks,
                 int64_t kv_head, int64_t begin, int64_t end, const T* q,
                 const T* k, const T* v, T* out) {
  const int64_t D = shape.head_dim;
  const int64_t group = shape.num_heads / shape.num_kv_heads;
  const int rows = static_cast<int>(end - begin);
  int64_t position[kRows] = {}, offset[kRows] = {};
  for (int row = 0; row < rows; ++row) {
    const int64_t index = (begin + row) / group, head = kv_head * group + (begin + row) % group;
    position[row] = request.start + index;
    offset[row] = ((request.first_row + index) * shape.num_heads + head) * D;
    for (int d = 0; d < D; ++d) s.queries[row * D + d] = widened(q[offset[row] + d]);
    std::memset(&s.out[row * D], 0, D * sizeof(float));
    s.row_max[row] = kMinusInf;
    s.row_sum[row] = 0.0f;
  }
  const int64_t last = position[rows - 1];
  for (int64_t span = first_seen(shape, position[0]) / s.size; span * s.size <= last; ++span) {
    const int count = in_span(last + 1 - span * s.size, s.size);
    fetch_span(shape, s, blocks + request.first_block + span * s.num_blocks, k, v, kv_head, count);
    for (int first = 0; first < rows; first += kTile)
      score_rows(shape, s, first, rows - first < kTile ? rows - first : kTile, count);
    int from[kRows], to[kRows];
    for (int row = 0; row < rows; ++row) {
      from[row] = in_span(first_seen(shape, position[row]) - span * s.size, s.size);
      to[row] = in_span(position[row] + 1 - span * s.size, s.size);
      if (from[row] < to[row]) soften_row(s, row, from[row], to[row]);
    }
    for (int row = 0, next; row < rows; row = next) {
      next = row + kAtOnce;
      const bool is_alike = next <= rows && from[row] == from[next - 1] && to[row] == to[next - 1];
      if (!is_alike) next = row + 1;
      if (from[row] >= to[row]) continue;
      if (is_alike)
        add_span<kAtOnce>(shape, s, row, from[row], to[row]);
      else
        add_span<1>(shape, s, row, from[row], to[row]);
    }
  }
  for (int row = 0; row < rows; ++row)
    for (int d = 0; d < D; ++d)
      out[offset[row] + d] = narrowed<T>(s.out[row * D + d] / s.row_sum[row]);
}

// Tiles are dealt out to threads by their share of the whole cost, rows times keys.
template <class T>
void attend_batch(const Shape& shape, const Request* requests, int64_t num_requests,
                  const int64_t* blocks, const void* q, const void* k, const void* v, void* out,
                  int64_t thread, int64_t num_threads) {
  const int64_t group = shape.num_heads / shape.num_kv_heads;
  double total = 0.0, before = 0.0;
  for (int64_t r = 0; r < num_requests; ++r)
    total += static_cast<double>(requests[r].length) * keys_seen(shape, requests[r]);
  total *= shape.num_heads;
  Scratch scratch(shape);
  for (int64_t r = 0; r < num_requests; ++r) {
    const int64_t rows = requests[r].length * group;
    const double row_cost = keys_seen(shape, requests[r]);
    for (int64_t kv_head = 0; kv_head < shape.num_kv_heads; ++kv_head)
      for (int64_t begin = 0; begin < rows; begin += kRows) {
        const int64_t end = begin + kRows < rows ? begin + kRows : rows;
        const int64_t owner = static_cast<int64_t>(before / total * num_threads);
        before += (end - begin) * row_cost;
        if (owner == thread)
          attend_tile<T>(shape, scratch, requests[r], blocks, kv_head, begin, end,
                         static_cast<const T*>(q), static_cast<const T*>(k),
                         static_cast<const T*>(v), static_cast<T*>(out));
      }
  }
}

}  // namespace

// Tensors are contiguous: q, out [T, N, D]; k, v [B, S, M, D]. `requests` holds
// num_requests rows of (first_row, start, length, first_block); `blocks` all block
// tables back to back. `is_bf16` says what all four tensors hold. A row sees the last
// `window` positions, its own among them, or with 0 all of them.
extern "C" void orca_paged_attention(int64_t is_bf16, const void* q, const void* k, const void* v,
                                     void* out, const int64_t* requests, int64_t num_requests,
                                     const int64_t* blocks, int64_t num_heads,
                                     int64_t num_kv_heads, int64_t head_dim, int64_t block_size,
                                     int64_t window, float scale, int64_t num_threads) {
  const Shape shape{num_heads, num_kv_heads, head_dim, block_size, window, scale};
  const Request* rows = reinterpret_cast<const Request*>(requests);
  run_shares(num_threads, [&](int64_t thread) {
    if (is_bf16)
      attend_batch<uint16_t>(shape, rows, num_requests, blocks, q, k, v, out, thread, num_threads);
    else
      attend_batch<float>(shape, rows, num_requests, blocks, q, k, v, out, thread, num_threads);
  });
}
