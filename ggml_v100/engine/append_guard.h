// A step in the making: sequences that have been made longer for it, and are so again as they were if it fails.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "engine/engine.h"

namespace v100 {

// Remembers the sequences' lengths, and restores them and their states unless the work was completed.
class Engine::AppendGuard {
 public:
  explicit AppendGuard(Engine& engine) : engine_(engine) {}
  AppendGuard(const AppendGuard&) = delete;
  AppendGuard& operator=(const AppendGuard&) = delete;
  ~AppendGuard() {
    if (completed_) return;
    for (const auto& [sequence, length] : lengths_) {
      engine_.cut(sequence, length);
      engine_.states_.abort(sequence);
    }
  }
  // Room for n_tokens more; their ids follow in the engine's list.
  void append(int32_t sequence, std::span<const int32_t> tokens) {
    const int32_t length = engine_.memory_.length(sequence);
    std::vector<int32_t>& all = engine_.tokens_[static_cast<size_t>(sequence)];
    all.reserve(all.size() + tokens.size());
    lengths_.reserve(lengths_.size() + 1);
    engine_.memory_.append(sequence, static_cast<int32_t>(tokens.size()));
    if (engine_.window_memory_ != nullptr) try {
        engine_.window_memory_->append(sequence, static_cast<int32_t>(tokens.size()));
      } catch (...) {
        engine_.memory_.truncate(sequence, length);
        throw;
      }
    all.insert(all.end(), tokens.begin(), tokens.end());
    lengths_.emplace_back(sequence, length);
    engine_.states_.begin(sequence);
  }
  void complete() {
    for (const auto& [sequence, length] : lengths_) engine_.states_.commit(sequence);
    completed_ = true;
  }

 private:
  Engine& engine_;
  std::vector<std::pair<int32_t, int32_t>> lengths_;
  bool completed_ = false;
};

}  // namespace v100
