// Threads that share a kernel's work: the caller is one of them, the others sleep between two calls.

#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace orca {

// Gets its number, from 0 to one less than that of the threads.
typedef std::function<void(int64_t)> Share;

class Crew {
 public:
  explicit Crew(int64_t num_threads) {
    for (int64_t number = 1; number < num_threads; ++number)
      std::thread([this, number] { work(number); }).detach();  // until the process ends
    num_others_ = static_cast<uint32_t>(num_threads - 1);
  }

  // Whether it was free to do it; returns when all shares are done.
  bool run(const Share& share) {
    const std::unique_lock<std::mutex> turn(turn_, std::try_to_lock);
    if (!turn.owns_lock()) return false;
    share_ = &share;
    left_.store(num_others_);
    round_.fetch_add(1);
    round_.notify_all();
    share(0);
    for (uint32_t left = left_.load(); left != 0; left = left_.load()) left_.wait(left);
    return true;
  }

 private:
  void work(int64_t number) {
    for (uint32_t seen = 0;; ++seen) {
      round_.wait(seen);
      (*share_)(number);
      if (left_.fetch_sub(1) == 1) left_.notify_one();
    }
  }

  std::mutex turn_;
  const Share* share_ = nullptr;
  uint32_t num_others_ = 0;
  std::atomic<uint32_t> round_{0}, left_{0};
};

// share(0) ... share(num_threads - 1), on that many threads; where another caller has them, one after the other.
inline void run_shares(int64_t num_threads, const Share& share) {
  static std::mutex lock;
  static auto& crews = *new std::map<int64_t, std::unique_ptr<Crew>>;
  if (num_threads > 1) {
    std::unique_lock<std::mutex> held(lock);
    auto& crew = crews[num_threads];
    if (!crew) crew = std::make_unique<Crew>(num_threads);
    held.unlock();
    if (crew->run(share)) return;
  }
  for (int64_t number = 0; number < num_threads; ++number) share(number);
}

}  // namespace orca
