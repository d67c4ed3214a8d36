// Calls of kernels, made one after the other by one call: what a graph's launch is on a GPU.

#include <cstdint>

#include "tape.h"

namespace {

struct Call {
  void (*make)(const orca::Word* words);
  const orca::Word* words;
};

}  // namespace

extern "C" void orca_replay(const void* calls, int64_t num_calls) {
  const Call* const all = static_cast<const Call*>(calls);
  for (int64_t index = 0; index < num_calls; ++index) all[index].make(all[index].words);
}
