// What is done to each row of the flat batch alone, for CPUs: norms, the MLP's gate, rotation and
// KV write.
//
// Computed in fp32 and rounded where the torch reference rounds. A row's bits depend on the row only.
// Shapes: T rows, H hidden, N query heads, M KV heads, D head size, F outputs of up.

// A product is rounded before it is added to, as in torch: so rows come out as they do there.
#if defined(__clang__)
#pragma clang fp contract(off)
#else
#pragma GCC optimize("fp-contract=off")
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "crew.h"
#include "tape.h"
#include "vec.h"

namespace {

using namespace orca;

template <class T>
inline float rounded(float x) { return widened(narrowed<T>(x)); }

template <class T>
inline Vec rounded(Vec v) {
  T values[kLanes];
  store(values, v);
  return load(values);
}

inline Half load_half(const float* from) {
  Half v;
  std::memcpy(&v, from, sizeof v);
  return v;
}
inline Half load_half(const uint16_t* from) {
  float values[8];
  for (int i = 0; i < 8; ++i) values[i] = widened(from[i]);
  return load_half(values);
}

// The sum of x^2, in the order in which torch sums a row: lines of 4 times 8 lanes; 16 lines make a
// block, 16 blocks a larger one, and so on, each summed up before it is added to those before it.
template <class T>
float sum_of_squares(const T* x, int64_t H) {
  constexpr int kLevels = 4, kLine = 32, kBlock = 16;
  Half sums[kLevels][4] = {};
  const int64_t lines = H / kLine;
  for (int64_t line = 0; line < lines; ++line) {
    for (int part = 0; part < 4; ++part) {
      const Half v = load_half(x + line * kLine + part * 8);
      sums[0][part] += v * v;
    }
    int64_t done = line + 1;
    for (int level = 1; level < kLevels && done % kBlock == 0; ++level, done /= kBlock)
      for (int part = 0; part < 4; ++part) {
        sums[level][part] += sums[level - 1][part];
        sums[level - 1][part] = Half{};
      }
  }
  for (int level = 1; level < kLevels; ++level)
    for (int part = 0; part < 4; ++part) sums[0][part] += sums[level][part];
  int64_t h = lines * kLine;
  for (; h + 8 <= H; h += 8) sums[0][0] += load_half(x + h) * load_half(x + h);
  for (int part = 1; part < 4; ++part) sums[0][0] += sums[0][part];
  float sum = 0.0f;
  for (; h < H; ++h) sum += widened(x[h]) * widened(x[h]);
  for (int lane = 0; lane < 8; ++lane) sum += sums[0][0][lane];
  return sum;
}

// How a norm is weighted.
struct Weighting {
  bool rounds_late;  // else it is rounded before the weight, too
  float added;       // to the weight
};

// x / sqrt(mean(x^2) + eps) * (weight + added).
template <class T>
void norm_row(const T* x, const T* weight, T* y, int64_t H, float eps, Weighting by) {
  const float sum = sum_of_squares(x, H);
  const float factor = 1.0f / std::sqrt(sum / static_cast<float>(H) + eps);
  int64_t h = 0;
  for (; h + kLanes <= H; h += kLanes) {
    const Vec normed = load(x + h) * factor;
    store(y + h, (by.rounds_late ? normed : rounded<T>(normed)) * (load(weight + h) + by.added));
  }
  for (; h < H; ++h) {
    const float normed = widened(x[h]) * factor;
    y[h] = narrowed<T>((by.rounds_late ? normed : rounded<T>(normed)) * (widened(weight[h]) + by.added));
  }
}

// x + y, rounded.
template <class T>
void add_row(const T* x, const T* y, T* sum, int64_t H) {
  int64_t h = 0;
  for (; h + kLanes <= H; h += kLanes) store(sum + h, load(x + h) + load(y + h));
  for (; h < H; ++h) sum[h] = narrowed<T>(widened(x[h]) + widened(y[h]));
}

// g / (1 + e^-z); e is taken of -|z|, which can't overflow.
inline Vec times_sigmoid(Vec g, Vec z) {
  const Vec e = exp_negative(z < 0.0f ? z : -z);
  return (z < 0.0f ? g * e : g) / (e + 1.0f);
}

// What a gate goes through.
struct Silu {
  static Vec of(Vec g) { return times_sigmoid(g, g); }
};

// g / 2 * (1 + tanh(z / 2)), which is g * sigmoid(z).
struct GeluTanh {
  static Vec of(Vec g) { return times_sigmoid(g, (g + g * g * g * 0.044715f) * 1.59576912f); }
};

// activation(gate) * up; the last few as a whole vector, too.
template <class T, class Activation>
void gate_row(const T* gate, const T* up, T* y, int64_t F) {
  int64_t f = 0;
  for (; f + kLanes <= F; f += kLanes)
    store(y + f, rounded<T>(Activation::of(load(gate + f))) * load(up + f));
  T gates[kLanes] = {}, ups[kLanes] = {}, last[kLanes];
  std::copy(gate + f, gate + F, gates);
  std::copy(up + f, up + F, ups);
  store(last, rounded<T>(Activation::of(load(gates))) * load(ups));
  std::copy(last, last + (F - f), y + f);
}

// Pairs (i, i + D / 2) of a head turn by their angles; without cos it is copied.
template <class T, class Table>
void rotate_head(const T* x, const Table* cos, const Table* sin, T* y, int64_t D) {
  if (cos == nullptr) {
    std::copy(x, x + D, y);
    return;
  }
  const int64_t half = D / 2;
  for (int64_t i = 0; i < half; ++i) {
    const float left = widened(x[i]), right = widened(x[half + i]);
    y[i] = narrowed<T>(left * widened(cos[i]) - right * widened(sin[i]));
    y[half + i] = narrowed<T>(right * widened(cos[half + i]) + left * widened(sin[half + i]));
  }
}

struct Rotation {
  const void *q, *k, *v, *cos, *sin;
  int64_t q_stride, k_stride, v_stride;  // from row to row
  const int64_t* slots;
  void *q_out, *k_cache, *v_cache;
  int64_t T, N, M, D, S;

  // Where a slot's keys or values of a head begin, in the block's part of the cache.
  int64_t block_at(int64_t slot, int64_t head) const { return (slot / S * M + head) * D * S; }
};

template <class T, class Table>
void rotate_rows(const Rotation& r, int64_t begin, int64_t end) {
  const auto at = [](const void* from, int64_t offset) { return static_cast<const T*>(from) + offset; };
  const auto table = [&](const void* from, int64_t row) {
    return from ? static_cast<const Table*>(from) + row * r.D : nullptr;
  };
  std::vector<T> turned(r.D);
  for (int64_t row = begin; row < end; ++row) {
    const Table *cos = table(r.cos, row), *sin = table(r.sin, row);
    T* const q_out = static_cast<T*>(r.q_out) + row * r.N * r.D;
    for (int64_t head = 0; head < r.N; ++head)
      rotate_head(at(r.q, row * r.q_stride + head * r.D), cos, sin, q_out + head * r.D, r.D);
    const int64_t slot = r.slots[row], offset = slot % r.S;
    for (int64_t head = 0; head < r.M; ++head) {
      T* const k_slot = static_cast<T*>(r.k_cache) + r.block_at(slot, head) + offset;
      T* const v_slot = static_cast<T*>(r.v_cache) + r.block_at(slot, head) + offset * r.D;
      rotate_head(at(r.k, row * r.k_stride + head * r.D), cos, sin, turned.data(), r.D);
      for (int64_t d = 0; d < r.D; ++d) k_slot[d * r.S] = turned[d];
      std::copy_n(at(r.v, row * r.v_stride + head * r.D), r.D, v_slot);
    }
  }
}

template <class T>
void norm_rows(const void* x, const void* weight, void* y, int64_t rows, int64_t H, float eps, Weighting by,
               int64_t num_threads) {
  deal_out(num_threads, rows, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      norm_row(static_cast<const T*>(x) + row * H, static_cast<const T*>(weight),
               static_cast<T*>(y) + row * H, H, eps, by);
  });
}

template <class T>
void add_norm_rows(const void* x, const void* y, const void* weight, void* sum, void* normed,
                   int64_t rows, int64_t H, float eps, Weighting by, int64_t num_threads) {
  deal_out(num_threads, rows, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      T* const sum_row = static_cast<T*>(sum) + row * H;
      add_row(static_cast<const T*>(x) + row * H, static_cast<const T*>(y) + row * H, sum_row, H);
      norm_row(sum_row, static_cast<const T*>(weight), static_cast<T*>(normed) + row * H, H, eps, by);
    }
  });
}

template <class T, class Activation>
void gate_rows(const void* gate_up, void* y, int64_t rows, int64_t F, int64_t num_threads) {
  deal_out(num_threads, rows, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const T* gate = static_cast<const T*>(gate_up) + row * 2 * F;
      gate_row<T, Activation>(gate, gate + F, static_cast<T*>(y) + row * F, F);
    }
  });
}

}  // namespace

extern "C" void orca_rms_norm(int64_t is_bf16, const void* x, const void* weight, void* y, int64_t rows,
                              int64_t H, float eps, int64_t rounds_late, float added,
                              int64_t num_threads) {
  const auto run = is_bf16 ? norm_rows<uint16_t> : norm_rows<float>;
  run(x, weight, y, rows, H, eps, {rounds_late != 0, added}, num_threads);
}

extern "C" void orca_add_rms_norm(int64_t is_bf16, const void* x, const void* y, const void* weight,
                                  void* sum, void* normed, int64_t rows, int64_t H, float eps,
                                  int64_t rounds_late, float added, int64_t num_threads) {
  const auto run = is_bf16 ? add_norm_rows<uint16_t> : add_norm_rows<float>;
  run(x, y, weight, sum, normed, rows, H, eps, {rounds_late != 0, added}, num_threads);
}

// gate_up [rows, 2 F], gate first; y [rows, F]. The gate goes through SiLU, or GELU's tanh form.
extern "C" void orca_gate_mul(int64_t is_bf16, int64_t is_gelu, const void* gate_up, void* y, int64_t rows,
                              int64_t F, int64_t num_threads) {
  const auto run = is_bf16 ? (is_gelu ? gate_rows<uint16_t, GeluTanh> : gate_rows<uint16_t, Silu>)
                           : (is_gelu ? gate_rows<float, GeluTanh> : gate_rows<float, Silu>);
  run(gate_up, y, rows, F, num_threads);
}

// q [T, N, D], k and v [T, M, D] with strides from row to row; cos and sin [T, D], or null; k and v
// go to their slots of the caches, [B, M, D, S] and [B, M, S, D], q to q_out [T, N, D].
extern "C" void orca_rotate_and_write(int64_t is_bf16, int64_t is_table_bf16, const void* q,
                                      const void* k, const void* v, int64_t q_stride, int64_t k_stride,
                                      int64_t v_stride, const void* cos, const void* sin,
                                      const int64_t* slots, void* q_out, void* k_cache, void* v_cache,
                                      int64_t T, int64_t N, int64_t M, int64_t D, int64_t S,
                                      int64_t num_threads) {
  const Rotation rotation{q, k, v, cos, sin, q_stride, k_stride, v_stride, slots, q_out,
                          k_cache, v_cache, T, N, M, D, S};
  const auto run = is_bf16 ? (is_table_bf16 ? rotate_rows<uint16_t, uint16_t> : rotate_rows<uint16_t, float>)
                           : (is_table_bf16 ? rotate_rows<float, uint16_t> : rotate_rows<float, float>);
  deal_out(num_threads, T, [&](int64_t begin, int64_t end) { run(rotation, begin, end); });
}

extern "C" void orca_rms_norm_by_words(const Word* words) { call(orca_rms_norm, words); }
extern "C" void orca_add_rms_norm_by_words(const Word* words) { call(orca_add_rms_norm, words); }
extern "C" void orca_gate_mul_by_words(const Word* words) { call(orca_gate_mul, words); }
extern "C" void orca_rotate_and_write_by_words(const Word* words) { call(orca_rotate_and_write, words); }
