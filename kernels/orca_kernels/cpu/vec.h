// Sixteen floats at once, in the compiler's own vector types, and what all kernels do with them.

#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace orca {

constexpr int kLanes = 16;

typedef float Vec __attribute__((vector_size(kLanes * sizeof(float))));
typedef int32_t IntVec __attribute__((vector_size(kLanes * sizeof(int32_t))));
typedef uint16_t Shorts __attribute__((vector_size(kLanes * sizeof(uint16_t))));

// bfloat16 is the upper half of a float, and lies in memory as a uint16_t.
inline float widened(float x) { return x; }
inline float widened(uint16_t x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

template <class T>
T narrowed(float x);
template <>
inline float narrowed<float>(float x) { return x; }
template <>
inline uint16_t narrowed<uint16_t>(float x) {  // to nearest, ties to even; NaN stays one
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return static_cast<uint16_t>((bits + (x == x ? 0x7fff + ((bits >> 16) & 1) : 0)) >> 16);
}

inline Vec splat(float x) { return Vec{} + x; }

inline Vec load(const float* from) {
  Vec v;
  std::memcpy(&v, from, sizeof v);
  return v;
}
inline Vec load(const uint16_t* from) {
  Shorts shorts;
  std::memcpy(&shorts, from, sizeof shorts);
#if defined(__AVX512F__)  // GCC 12 makes six instructions of the conversion
  const IntVec bits = (IntVec)_mm512_cvtepu16_epi32((__m256i)shorts) << 16;
#else
  const IntVec bits = __builtin_convertvector(shorts, IntVec) << 16;
#endif
  Vec v;
  std::memcpy(&v, &bits, sizeof v);
  return v;
}
inline void store(float* to, Vec v) { std::memcpy(to, &v, sizeof v); }
inline void store(uint16_t* to, Vec v) {  // as narrowed() does it
  IntVec bits;
  std::memcpy(&bits, &v, sizeof v);
  bits += v == v ? 0x7fff + ((bits >> 16) & 1) : IntVec{};
  const Shorts shorts = __builtin_convertvector(bits >> 16, Shorts);
  std::memcpy(to, &shorts, sizeof shorts);
}

template <class Wide, class Narrow>
inline void halves(const Wide& wide, Narrow& low, Narrow& high) {
  std::memcpy(&low, &wide, sizeof low);
  std::memcpy(&high, reinterpret_cast<const char*>(&wide) + sizeof low, sizeof high);
}

typedef float Half __attribute__((vector_size(8 * sizeof(float))));
typedef float Quarter __attribute__((vector_size(4 * sizeof(float))));

// The sum of the lanes, always in the same tree.
inline float sum_lanes(Vec v) {
  Half a, b;
  halves(v, a, b);
  a += b;
  Quarter c, d;
  halves(a, c, d);
  c += d;
  return (c[0] + c[2]) + (c[1] + c[3]);
}

inline float max_lanes(Vec v) {
  Half a, b;
  halves(v, a, b);
  a = a > b ? a : b;
  Quarter c, d;
  halves(a, c, d);
  c = c > d ? c : d;
  d = Quarter{c[2], c[3], c[0], c[1]};
  c = c > d ? c : d;
  d = Quarter{c[1], c[0], c[3], c[2]};
  c = c > d ? c : d;
  return c[0];
}

// e^x for x <= 0 (NaN stays NaN): 2^n times a polynomial of e^r on |r| <= ln(2) / 2 (Cephes' coefficients).
inline Vec exp_negative(Vec x) {
  x = x < -87.0f ? splat(-87.0f) : x;
  Vec scaled = x * 1.44269504f;
  IntVec n = __builtin_convertvector(scaled - 0.5f, IntVec);  // towards zero: nearest, for x <= 0
  Vec whole = __builtin_convertvector(n, Vec);
  Vec r = x - whole * 0.693359375f + whole * 2.12194440e-4f;
  Vec p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  IntVec power = (n + 127) << 23;
  Vec factor;
  std::memcpy(&factor, &power, sizeof factor);
  return p * factor;
}

// 2^x for x <= 0 (NaN stays NaN), within 2e-7 of it: 2^n times a minimax polynomial of the rest on [-1/2, 1/2].
// What is smaller than the normal numbers is 0.
inline Vec exp2_negative(Vec x) {
  const float shift = 12583039.0f;  // 1.5 * 2^23 + 127: in a sum with it the lowest bits are n + 127
  const Vec shifted = x + shift;
  IntVec power;
  std::memcpy(&power, &shifted, sizeof power);
  power <<= 23;
  Vec factor;
  std::memcpy(&factor, &power, sizeof factor);
  const Vec r = x - (shifted - shift);
  Vec p = splat(1.32647273e-3f);
  p = p * r + 9.67151299e-3f;
  p = p * r + 5.55073358e-2f;
  p = p * r + 2.40222424e-1f;
  p = p * r + 6.93147004e-1f;
  p = p * r + 1.0f;
  return x < -126.0f ? Vec{} : p * factor;
}

// tanh(x) (NaN stays NaN): near 0 x times a polynomial of x^2 (Cephes' coefficients), elsewhere by e^-2|x|.
inline Vec tanh_of(Vec x) {
  const Vec size = x < 0.0f ? -x : x;
  const Vec e = exp_negative(size * -2.0f);
  const Vec large = (1.0f - e) / (e + 1.0f);
  const Vec square = x * x;
  Vec p = splat(-5.70498872745e-3f);
  p = p * square + 2.06390887954e-2f;
  p = p * square - 5.37397155531e-2f;
  p = p * square + 1.33314422036e-1f;
  p = p * square - 3.33332819422e-1f;
  return size < 0.625f ? p * square * x + x : (x < 0.0f ? -large : large);
}

}  // namespace orca
