// Threads that share a kernel's work: the caller is one of them, the others sleep when there is none.
//
// Work is cut into more shares than there are threads, and whoever is free takes the next one: so
// nobody waits for a thread that is still waking up, or that the machine has put aside, but for the
// share that it has in hand.

#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>

namespace orca {

constexpr int64_t kSharesEach = 4;  // of each thread, if all are as fast
constexpr std::chrono::microseconds kAwake{200};  // longer than from one kernel of a layer to the next

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Gets its number, from 0 to one less than that of the shares.
typedef std::function<void(int64_t)> Share;

class Crew {
 public:
  explicit Crew(int64_t num_threads) {
    for (int64_t number = 1; number < num_threads; ++number)
      std::thread([this] { work(); }).detach();  // until the process ends
  }

  // Whether it was free to do it; returns when all shares are done.
  bool run(int64_t num_shares, const Share& share) {
    const std::unique_lock<std::mutex> turn(turn_, std::try_to_lock);
    if (!turn.owns_lock()) return false;
    share_ = &share;
    num_shares_ = num_shares;
    left_.store(static_cast<uint32_t>(num_shares));
    open_.store(static_cast<uint32_t>(num_shares));
    round_.fetch_add(1);
    round_.notify_all();
    take_shares();
    for (uint32_t left = left_.load(); left != 0; left = left_.load()) wait_while(left_, left);
    return true;
  }

 private:
  void work() {
    for (uint32_t seen = 0;;) {
      wait_while(round_, seen);
      seen = round_.load();
      take_shares();
    }
  }

  // Looks for a change for a while, since kernels follow each other closely, and then sleeps.
  static void wait_while(const std::atomic<uint32_t>& value, uint32_t old) {
    const auto until = std::chrono::steady_clock::now() + kAwake;
    while (value.load() == old) {
      if (std::chrono::steady_clock::now() > until) {
        value.wait(old);
        return;
      }
      pause();
    }
  }

  // A round can't end before each share that was taken has: so share_ and num_shares_, which are
  // read after one was taken, are that round's.
  void take_shares() {
    uint32_t open = open_.load();
    while (open != 0)
      if (open_.compare_exchange_weak(open, open - 1)) {
        (*share_)(num_shares_ - open);
        if (left_.fetch_sub(1) == 1) left_.notify_one();
        open = open_.load();
      }
  }

  std::mutex turn_;
  const Share* share_ = nullptr;
  int64_t num_shares_ = 0;
  std::atomic<uint32_t> round_{0};
  std::atomic<uint32_t> open_{0}, left_{0};  // shares that nobody has taken; that aren't done
};

inline Crew& crew_of(int64_t num_threads) {
  static std::mutex lock;
  static auto& crews = *new std::map<int64_t, std::unique_ptr<Crew>>;
  const std::unique_lock<std::mutex> held(lock);
  auto& crew = crews[num_threads];
  if (!crew) crew = std::make_unique<Crew>(num_threads);
  return *crew;
}

// use(begin, end) for ranges of all items, on that many threads; all of it on this one where the
// others work for another caller.
template <class Use>
void deal_out(int64_t num_threads, int64_t num_items, const Use& use) {
  const int64_t num_shares = std::min(num_items, num_threads * kSharesEach);
  const auto share = [&](int64_t number) {
    use(num_items * number / num_shares, num_items * (number + 1) / num_shares);
  };
  if (num_threads == 1 || num_shares < 2 || !crew_of(num_threads).run(num_shares, share))
    use(0, num_items);
}

}  // namespace orca
