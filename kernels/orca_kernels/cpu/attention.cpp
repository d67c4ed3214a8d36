// Attention of a whole mixed batch over paged keys and values, for CPUs.
//
// Each (request, KV head) is worked through in tiles of query rows; a tile holds
// the query heads of that KV head for a few positions, so that keys are read once
// for all of them. Softmax is computed online, span by span of a few blocks:
//   m' = max(m, max_j s_j);  l' = l e^(m-m') + sum_j e^(s_j-m');  o' likewise.
// Where there is a softcap, a score s counts as softcap * tanh(s / softcap). Scores, and the
// softcap, are multiplied by log2(e) from the beginning, so that e^s is 2 to the power of them.
// The order of every sum depends on the position, the block size and the window only,
// never on the batch, the tile, or the thread: a row has the same bits wherever it runs.
//
// In the cache a block's keys of one KV head lie as [D, S] and its values as [S, D]: both are
// read as they lie, but for blocks of no whole number of vectors, and bfloat16 that many rows
// share. Those are widened to fp32 first.
//
// Shapes: T rows, N query heads, M KV heads, D head size, B blocks of S slots.

#include <algorithm>
#include <cstdint>
#include <memory>
#include <type_traits>
#include <vector>

#include "crew.h"
#include "tape.h"
#include "vec.h"

namespace {

using namespace orca;

#if defined(__AVX512F__)
constexpr int kAtOnce = 6;   // rows that share what is loaded: their sums,
constexpr int kVectors = 4;  // of so many vectors each, are held in registers
#else
constexpr int kAtOnce = 2;
constexpr int kVectors = 2;
#endif
constexpr int kRows = 8 * kAtOnce;  // of a tile
constexpr int kRoom = (kRows + kLanes - 1) / kLanes * kLanes;  // for a number of each row
constexpr int kManyRows = 2 * kAtOnce;  // are worth widening keys and values for; fewer wait for memory
constexpr int64_t kSpan = 128;  // slots of a span, in whole blocks, of which it has at least one
constexpr double kMinThreadedCost = 200'000;  // rows times keys: less isn't worth waking a thread for
constexpr float kMinusInf = -3.0e38f;

constexpr IntVec kLaneNumbers = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

struct Shape {
  int64_t num_heads, num_kv_heads, head_dim, block_size, window;
  float scale, softcap;  // softcap 0: none

  int64_t group() const { return num_heads / num_kv_heads; }
  int64_t blocks_of_span() const { return std::max<int64_t>(1, kSpan / block_size); }
  int64_t span() const { return blocks_of_span() * block_size; }  // in slots
  int64_t parts_of_block() const { return (block_size + kLanes - 1) / kLanes; }
  int64_t parts_of_span() const { return blocks_of_span() * parts_of_block(); }
};

struct Request {
  int64_t first_row, start, length, first_block;
};

// The first position that a row at `position` sees: `window` ones, its own among them; 0: all.
inline int64_t first_seen(const Shape& shape, int64_t position) {
  return shape.window > 0 && position >= shape.window ? position - shape.window + 1 : 0;
}

// Up to kLanes slots of a block, for one KV head: `slot` is the first one's number in the span.
template <class Element>
struct Part {
  const Element *keys, *values;  // [D, key_stride] and [count, D]
  int slot, count;
};

// Parts in the order of their slots; `num` of them hold slots that somebody sees.
template <class Element>
struct Span {
  std::vector<Part<Element>> parts;
  int64_t num = 0, key_stride;

  Span(const Shape& shape, int64_t stride) : parts(shape.parts_of_span()), key_stride(stride) {}

  // Adds the parts of a block whose first slot is `first`, up to slot `end`.
  void add_block(const Shape& shape, int64_t first, int64_t end, const Element* keys, const Element* values) {
    for (int64_t slot = 0; slot < std::min(shape.block_size, end - first); slot += kLanes)
      parts[num++] = {keys + slot, values + slot * shape.head_dim, static_cast<int>(first + slot),
                      static_cast<int>(std::min<int64_t>(kLanes, shape.block_size - slot))};
  }
};

typedef std::unique_ptr<float[]> Floats;
inline Floats room(int64_t size) { return std::make_unique_for_overwrite<float[]>(size); }

// A tile's rows while it goes over the keys. `from`, `to`: the slots of the span that each sees.
// A row's sum of weights is that of the kLanes of `row_sum`.
struct Tile {
  int64_t num_rows = 0, num_lanes;
  Floats queries, scores, out;
  float row_max[kRoom], row_sum[kRows * kLanes];
  int64_t position[kRows];
  int from[kRows], to[kRows];

  explicit Tile(const Shape& shape)
      : num_lanes(shape.parts_of_span() * kLanes),
        queries(room(kRows * shape.head_dim)),
        scores(room(kRows * num_lanes)),
        out(room(kRows * shape.head_dim)) {}

  bool has_many() const { return num_rows >= kManyRows; }

  // The span of `size` slots whose first one is at position `at` comes next.
  void look_at(const Shape& shape, int64_t at, int64_t size) {
    for (int64_t row = 0; row < num_rows; ++row) {
      from[row] = static_cast<int>(std::clamp<int64_t>(first_seen(shape, position[row]) - at, 0, size));
      to[row] = static_cast<int>(std::clamp<int64_t>(position[row] + 1 - at, 0, size));
    }
  }
};

// use(an integral constant that equals number), for 1 <= number <= kMost.
template <int kMost, class Use>
inline void with_constant(int64_t number, Use use) {
  if constexpr (kMost > 1)
    if (number < kMost) return with_constant<kMost - 1>(number, use);
  use(std::integral_constant<int, kMost>());
}

// use(first row, how many), in groups as equal as they can be.
template <class Use>
inline void for_groups(int64_t rows, Use use) {
  const int64_t groups = (rows + kAtOnce - 1) / kAtOnce;
  for (int64_t group = 0, first = 0; group < groups; ++group) {
    const int64_t end = rows * (group + 1) / groups;
    use(first, end - first);
    first = end;
  }
}

// scores = (q . k) * scale of kNum rows and kParts parts, summed over d in order. For few rows, their
// values are fetched meanwhile.
template <int kNum, int kParts, class Element>
void score(const Shape& shape, Tile& tile, const Span<Element>& span, int64_t first, int64_t first_part) {
  const Part<Element>* const parts = &span.parts[first_part];
  const float* const queries = &tile.queries[first * shape.head_dim];
  float* const scores = &tile.scores[first * tile.num_lanes + first_part * kLanes];
  const bool fetches = !tile.has_many();
  Vec sums[kNum][kParts] = {};
  for (int64_t d = 0; d < shape.head_dim; ++d) {
    Vec keys[kParts];
#pragma GCC unroll 4
    for (int part = 0; part < kParts; ++part) {
      if (fetches) __builtin_prefetch(parts[part].values + d * kLanes, 0, 2);
      keys[part] = load(parts[part].keys + d * span.key_stride);
    }
#pragma GCC unroll 6
    for (int row = 0; row < kNum; ++row)
#pragma GCC unroll 4
      for (int part = 0; part < kParts; ++part)
        sums[row][part] += keys[part] * queries[row * shape.head_dim + d];
  }
#pragma GCC unroll 6
  for (int row = 0; row < kNum; ++row)
#pragma GCC unroll 4
    for (int part = 0; part < kParts; ++part)
      store(scores + row * tile.num_lanes + part * kLanes, sums[row][part] * shape.scale);
}

template <class Element>
void score_rows(const Shape& shape, Tile& tile, const Span<Element>& span) {
  for_groups(tile.num_rows, [&](int64_t first, int64_t num) {
    with_constant<kAtOnce>(num, [&](auto rows) {
      for (int64_t part = 0; part < span.num; part += kVectors)
        with_constant<kVectors>(span.num - part, [&](auto parts) {
          score<rows(), parts()>(shape, tile, span, first, part);
        });
    });
  });
}

// Scores become softcap * tanh(score / softcap).
inline void cap_scores(const Shape& shape, Tile& tile, int64_t num_parts) {
  const float inverse = 1.0f / shape.softcap;
  for (int64_t row = 0; row < tile.num_rows; ++row) {
    float* const scores = &tile.scores[row * tile.num_lanes];
    for (int64_t part = 0; part < num_parts; ++part)
      store(scores + part * kLanes, tanh_of(load(scores + part * kLanes) * inverse) * shape.softcap);
  }
}

template <class Element>
inline int begin_in(const Part<Element>& part, int slot) { return std::clamp(slot - part.slot, 0, part.count); }

// Whether a row sees every lane of the span's parts.
template <class Element>
inline bool sees_whole(const Shape& shape, const Tile& tile, const Span<Element>& span, int64_t row) {
  const Part<Element>& last = span.parts[span.num - 1];
  return tile.from[row] == 0 && tile.to[row] >= last.slot + last.count && shape.block_size % kLanes == 0;
}

// Scores of slots that a row doesn't see become those of nobody.
template <class Element>
void hide_unseen(Tile& tile, const Span<Element>& span, int64_t row) {
  float* const scores = &tile.scores[row * tile.num_lanes];
  for (int64_t index = 0; index < span.num; ++index) {
    const Part<Element>& part = span.parts[index];
    const int from = begin_in(part, tile.from[row]), to = begin_in(part, tile.to[row]);
    const IntVec seen = (kLaneNumbers >= from) & (kLaneNumbers < to);
    store(scores + index * kLanes, seen ? load(scores + index * kLanes) : splat(kMinusInf));
  }
}

// A row's largest score so far.
inline float largest_score(const Tile& tile, int64_t row, int64_t num_parts) {
  const float* const scores = &tile.scores[row * tile.num_lanes];
  Vec largest = splat(tile.row_max[row]);
  for (int64_t part = 0; part < num_parts; ++part) {
    const Vec v = load(scores + part * kLanes);
    largest = v > largest ? v : largest;
  }
  return max_lanes(largest);
}

// Numbers times a factor, as T.
template <class T>
inline void scale_row(const float* from, int64_t count, float factor, T* to) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(to + i, load(from + i) * factor);
  for (; i < count; ++i) to[i] = narrowed<T>(from[i] * factor);
}

// Scores become weights, and are added to the row's sum, which shrinks by a factor before.
inline void weigh_row(Tile& tile, int64_t row, int64_t num_parts, float factor) {
  float* const scores = &tile.scores[row * tile.num_lanes];
  Vec sum = load(&tile.row_sum[row * kLanes]) * factor;
  for (int64_t part = 0; part < num_parts; ++part) {
    const Vec p = exp2_negative(load(scores + part * kLanes) - tile.row_max[row]);
    store(scores + part * kLanes, p);
    sum += p;
  }
  store(&tile.row_sum[row * kLanes], sum);
}

// Online softmax of every row that sees any slot of the span: what it has so far shrinks by as much as
// its largest score grows.
template <class Element>
void soften(const Shape& shape, Tile& tile, const Span<Element>& span) {
  float factors[kRoom];
  std::copy_n(tile.row_max, kRoom, factors);
  const auto for_seeing = [&](auto use) {
    for (int64_t row = 0; row < tile.num_rows; ++row)
      if (tile.from[row] < tile.to[row]) use(row);
  };
  for_seeing([&](int64_t row) {
    if (!sees_whole(shape, tile, span, row)) hide_unseen(tile, span, row);
    tile.row_max[row] = largest_score(tile, row, span.num);
  });
  for (int64_t row = 0; row < tile.num_rows; row += kLanes)
    store(factors + row, exp2_negative(load(factors + row) - load(tile.row_max + row)));
  for_seeing([&](int64_t row) {
    float* const out = &tile.out[row * shape.head_dim];
    scale_row(out, shape.head_dim, factors[row], out);
    weigh_row(tile, row, span.num, factors[row]);
  });
}

// out += weights . values of slots [from, to), slot after slot, for kNum rows and kChunks vectors of
// D from d on. For few rows, the keys of the parts in `next` are fetched meanwhile.
template <int kNum, int kChunks, class Element>
void add_chunks(const Shape& shape, Tile& tile, const Span<Element>& span, const Span<Element>& next,
                int64_t first, int64_t d, int from, int to) {
  float* const out = &tile.out[first * shape.head_dim + d];
  const bool fetches = !tile.has_many();
  Vec acc[kNum][kChunks];
#pragma GCC unroll 6
  for (int row = 0; row < kNum; ++row)
#pragma GCC unroll 4
    for (int c = 0; c < kChunks; ++c) acc[row][c] = load(out + row * shape.head_dim + c * kLanes);
  for (int64_t index = 0; index < span.num; ++index) {
    const Part<Element>& part = span.parts[index];
    const Element* const ahead = index < next.num ? next.parts[index].keys : part.keys;
    const float* const weights = &tile.scores[first * tile.num_lanes + index * kLanes];
    for (int slot = begin_in(part, from); slot < begin_in(part, to); ++slot) {
      Vec values[kChunks];
#pragma GCC unroll 4
      for (int c = 0; c < kChunks; ++c) {
        const int64_t at = slot * shape.head_dim + d + c * kLanes;
        if (fetches) __builtin_prefetch(ahead + at, 0, 2);
        values[c] = load(part.values + at);
      }
#pragma GCC unroll 6
      for (int row = 0; row < kNum; ++row)
#pragma GCC unroll 4
        for (int c = 0; c < kChunks; ++c) acc[row][c] += values[c] * weights[row * tile.num_lanes + slot];
    }
  }
#pragma GCC unroll 6
  for (int row = 0; row < kNum; ++row)
#pragma GCC unroll 4
    for (int c = 0; c < kChunks; ++c) store(out + row * shape.head_dim + c * kLanes, acc[row][c]);
}

// The columns that are left over when D is no whole number of vectors.
template <class Element>
void add_columns(const Shape& shape, Tile& tile, const Span<Element>& span, int64_t row, int64_t d, int from,
                 int to) {
  for (; d < shape.head_dim; ++d)
    for (int64_t index = 0; index < span.num; ++index) {
      const Part<Element>& part = span.parts[index];
      for (int slot = begin_in(part, from); slot < begin_in(part, to); ++slot)
        tile.out[row * shape.head_dim + d] += widened(part.values[slot * shape.head_dim + d]) *
                                              tile.scores[row * tile.num_lanes + index * kLanes + slot];
    }
}

// Rows [first, first + kNum), which all see slots [from, to) of the span, take their values in.
template <int kNum, class Element>
void add_values(const Shape& shape, Tile& tile, const Span<Element>& span, const Span<Element>& next,
                int64_t first, int from, int to) {
  if (from >= to) return;
  int64_t d = 0;
  for (; d + kVectors * kLanes <= shape.head_dim; d += kVectors * kLanes)
    add_chunks<kNum, kVectors>(shape, tile, span, next, first, d, from, to);
  for (; d + kLanes <= shape.head_dim; d += kLanes)
    add_chunks<kNum, 1>(shape, tile, span, next, first, d, from, to);
  for (int64_t row = first; d < shape.head_dim && row < first + kNum; ++row)
    add_columns(shape, tile, span, row, d, from, to);
}

// Slots that all rows of a group see are taken in by all at once, those before and after by each alone.
template <class Element>
void add_rows(const Shape& shape, Tile& tile, const Span<Element>& span, const Span<Element>& next) {
  for_groups(tile.num_rows, [&](int64_t first, int64_t num) {
    const int from = *std::max_element(&tile.from[first], &tile.from[first] + num);
    const int to = std::max(from, *std::min_element(&tile.to[first], &tile.to[first] + num));
    for (int64_t row = first; row < first + num; ++row)
      add_values<1>(shape, tile, span, next, row, tile.from[row], std::min(from, tile.to[row]));
    with_constant<kAtOnce>(num, [&](auto rows) { add_values<rows()>(shape, tile, span, next, first, from, to); });
    for (int64_t row = first; row < first + num; ++row)
      add_values<1>(shape, tile, span, next, row, std::max(to, tile.from[row]), tile.to[row]);
  });
}

template <class Element>
void take_in(const Shape& shape, Tile& tile, const Span<Element>& span, const Span<Element>& next) {
  score_rows(shape, tile, span);
  if (shape.softcap > 0.0f) cap_scores(shape, tile, span.num);
  soften(shape, tile, span);
  add_rows(shape, tile, span, next);
}

// One KV head of the cache: where its blocks lie.
template <class T>
struct Cache {
  const T *k, *v;
  int64_t num_kv_heads, kv_head, size;  // of a block's keys or values

  const T* keys(int64_t block) const { return k + (block * num_kv_heads + kv_head) * size; }
  const T* values(int64_t block) const { return v + (block * num_kv_heads + kv_head) * size; }
};

// What one thread works with.
template <class T>
struct Scratch {
  Tile tile;
  Span<T> span, next;
  Span<float> wide;
  Floats keys, values;

  explicit Scratch(const Shape& shape)
      : tile(shape),
        span(shape, shape.block_size),
        next(shape, shape.block_size),
        wide(shape, shape.parts_of_block() * kLanes),
        keys(room(shape.blocks_of_span() * shape.head_dim * wide.key_stride)),
        values(room(shape.blocks_of_span() * shape.head_dim * shape.block_size)) {}
};

// The span whose blocks begin at `blocks`, as it lies in the cache: blocks that hold any of slots [begin, end).
template <class T>
void find(const Shape& shape, const Cache<T>& cache, const int64_t* blocks, int64_t begin, int64_t end,
          Span<T>& span) {
  span.num = 0;
  for (int64_t first = 0; first < std::min(end, shape.span()); first += shape.block_size, ++blocks)
    if (first + shape.block_size > begin)
      span.add_block(shape, first, end, cache.keys(*blocks), cache.values(*blocks));
}

template <class T>
inline void widen_row(const T* from, int64_t count, float* to) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(to + i, load(from + i));
  for (; i < count; ++i) to[i] = widened(from[i]);
}

// The same in fp32, and a block's keys with room to whole vectors.
template <class T>
void widen(const Shape& shape, const Cache<T>& cache, const int64_t* blocks, int64_t begin, int64_t end,
           Scratch<T>& s) {
  s.wide.num = 0;
  const int64_t stride = s.wide.key_stride;
  float *keys = s.keys.get(), *values = s.values.get();
  for (int64_t first = 0; first < std::min(end, shape.span()); first += shape.block_size, ++blocks) {
    if (first + shape.block_size <= begin) continue;
    const T *k = cache.keys(*blocks), *v = cache.values(*blocks);
    for (int64_t d = 0; d < shape.head_dim; ++d)
      widen_row(k + d * shape.block_size, shape.block_size, keys + d * stride);
    widen_row(v, cache.size, values);
    s.wide.add_block(shape, first, end, keys, values);
    keys += shape.head_dim * stride;
    values += cache.size;
  }
}

// Rows [begin, end) of a request's (position, query head of the KV head) pairs.
template <class T>
void attend_tile(const Shape& shape, Scratch<T>& s, const Request& request, const int64_t* blocks,
                 const Cache<T>& cache, int64_t begin, int64_t end, const T* q, T* out) {
  const int64_t D = shape.head_dim, size = shape.span();
  Tile& tile = s.tile;
  tile.num_rows = end - begin;
  int64_t offset[kRows] = {};
  for (int64_t row = 0; row < tile.num_rows; ++row) {
    const int64_t index = (begin + row) / shape.group();
    const int64_t head = cache.kv_head * shape.group() + (begin + row) % shape.group();
    tile.position[row] = request.start + index;
    offset[row] = ((request.first_row + index) * shape.num_heads + head) * D;
    for (int64_t d = 0; d < D; d += kLanes) __builtin_prefetch(out + offset[row] + d, 1, 2);
    widen_row(q + offset[row], D, &tile.queries[row * D]);
    std::fill_n(&tile.out[row * D], D, 0.0f);
    std::fill_n(&tile.row_sum[row * kLanes], kLanes, 0.0f);
  }
  std::fill_n(tile.row_max, kRoom, kMinusInf);
  const bool is_wide = shape.block_size % kLanes != 0 || (sizeof(T) < sizeof(float) && tile.has_many());
  const int64_t num_seen = tile.position[tile.num_rows - 1] + 1;
  const int64_t first = first_seen(shape, tile.position[0]);
  int64_t at = first / size * size;  // the span's first position
  const auto blocks_at = [&](int64_t from) { return blocks + request.first_block + from / shape.block_size; };
  if (!is_wide) find(shape, cache, blocks_at(at), first - at, num_seen - at, s.span);
  for (; at < num_seen; at += size) {
    tile.look_at(shape, at, size);
    if (is_wide) {
      widen(shape, cache, blocks_at(at), first - at, num_seen - at, s);
      take_in(shape, tile, s.wide, s.wide);
      continue;
    }
    find(shape, cache, blocks_at(at + size), 0, num_seen - at - size, s.next);
    take_in(shape, tile, s.span, s.next);
    std::swap(s.span, s.next);
  }
  for (int64_t row = 0; row < tile.num_rows; ++row)
    scale_row(&tile.out[row * D], D, 1.0f / sum_lanes(load(&tile.row_sum[row * kLanes])), out + offset[row]);
}

// use(request, KV head, first row, end of the rows, cost) for each tile. It costs its rows times the
// keys that the last of them sees.
template <class Use>
void for_tiles(const Shape& shape, const Request* requests, int64_t num_requests, Use use) {
  for (int64_t r = 0; r < num_requests; ++r) {
    const int64_t rows = requests[r].length * shape.group();
    for (int64_t kv_head = 0; kv_head < shape.num_kv_heads; ++kv_head)
      for (int64_t begin = 0; begin < rows; begin += kRows) {
        const int64_t end = std::min(begin + kRows, rows);
        const int64_t position = requests[r].start + (end - 1) / shape.group();
        use(requests[r], kv_head, begin, end, (end - begin) * (position + 1 - first_seen(shape, position)));
      }
  }
}

// The tiles that begin in `num_shares` equal shares of the whole cost: of those shares [first, last).
template <class T>
void attend_batch(const Shape& shape, const Request* requests, int64_t num_requests, double whole_cost,
                  const int64_t* blocks, const void* q, const void* k, const void* v, void* out,
                  int64_t first, int64_t last, int64_t num_shares) {
  Scratch<T> scratch(shape);
  double before = 0.0;
  for_tiles(shape, requests, num_requests,
            [&](const Request& request, int64_t kv_head, int64_t begin, int64_t end, int64_t cost) {
              const int64_t share = static_cast<int64_t>(before / whole_cost * num_shares);
              before += cost;
              if (share < first || share >= last) return;
              const Cache<T> cache{static_cast<const T*>(k), static_cast<const T*>(v), shape.num_kv_heads,
                                   kv_head, shape.block_size * shape.head_dim};
              attend_tile<T>(shape, scratch, request, blocks, cache, begin, end, static_cast<const T*>(q),
                             static_cast<T*>(out));
            });
}

}  // namespace

// q and out are [T, N, D], k [B, M, D, S], v [B, M, S, D], all contiguous. `requests` holds
// num_requests rows of (first_row, start, length, first_block); `blocks` all block
// tables back to back. `is_bf16` says what all four tensors hold. A row sees the last
// `window` positions, its own among them, or with 0 all of them. A `softcap` of 0 is none.
extern "C" void orca_paged_attention(int64_t is_bf16, const void* q, const void* k, const void* v,
                                     void* out, const int64_t* requests, int64_t num_requests,
                                     const int64_t* blocks, int64_t num_heads,
                                     int64_t num_kv_heads, int64_t head_dim, int64_t block_size,
                                     int64_t window, float scale, float softcap,
                                     int64_t num_threads) {
  const float log2_e = 1.44269504f;
  const Shape shape{num_heads, num_kv_heads, head_dim, block_size, window, scale * log2_e, softcap * log2_e};
  const Request* rows = reinterpret_cast<const Request*>(requests);
  const auto run = is_bf16 ? attend_batch<uint16_t> : attend_batch<float>;
  double cost = 0.0;
  for_tiles(shape, rows, num_requests,
            [&](const Request&, int64_t, int64_t, int64_t, int64_t of_tile) { cost += of_tile; });
  if (cost < kMinThreadedCost) num_threads = 1;
  const int64_t num_shares = num_threads * kSharesEach;
  deal_out(num_threads, num_shares, [&](int64_t first, int64_t last) {
    run(shape, rows, num_requests, cost, blocks, q, k, v, out, first, last, num_shares);
  });
}

extern "C" void orca_paged_attention_by_words(const Word* words) { call(orca_paged_attention, words); }
