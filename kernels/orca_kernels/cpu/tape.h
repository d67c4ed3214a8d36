// A kernel's call as a tape keeps it (tape.cpp): what it is given, a word each.

#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

namespace orca {

typedef uint64_t Word;  // an integer, an address, or the bits of a float

template <class T>
inline T of_word(Word word) {
  if constexpr (sizeof(T) == sizeof(Word)) {
    T value;
    std::memcpy(&value, &word, sizeof value);
    return value;
  } else {
    const uint32_t bits = static_cast<uint32_t>(word);
    T value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
  }
}

template <class... Given, size_t... kIndex>
inline void call(void (*kernel)(Given...), const Word* words, std::index_sequence<kIndex...>) {
  kernel(of_word<Given>(words[kIndex])...);
}

template <class... Given>
inline void call(void (*kernel)(Given...), const Word* words) {
  call(kernel, words, std::index_sequence_for<Given...>());
}

}  // namespace orca
