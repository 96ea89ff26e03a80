// The adapting decorator of Ops.
#include "ops/adapted.h"

#include <span>
#include <utility>

#include "base/error.h"
#include "ops/forwarding.h"

namespace v100 {

namespace {

class AdaptedOps final : public ForwardingOps {
 public:
  AdaptedOps(std::unique_ptr<Ops> inner, std::vector<const LowRankParts*> adapters) : ForwardingOps(std::move(inner)) {
    for (const LowRankParts* parts : adapters) adapters_.push_back({parts, {}, {}});
  }

  void enter(const Rows& rows) override {
    rows_ = rows.count();
    for (size_t i = 0; i < adapters_.size(); ++i) {
      Adapter& adapter = adapters_[i];
      adapter.scales.assign(static_cast<size_t>(rows_), 0.0f);
      for (const SequenceRows& sequence : rows.sequences)
        for (int32_t r = sequence.rows.begin; r < sequence.rows.end && !sequence.adapters.empty(); ++r)
          adapter.scales[static_cast<size_t>(r)] = sequence.adapters[i];
      adapter.find_rows();
    }
    inner().enter(rows);
  }

  void narrow(std::span<const int32_t> rows) override {
    rows_ = static_cast<int32_t>(rows.size());
    for (Adapter& adapter : adapters_) {
      std::vector<float> scales;
      for (const int32_t r : rows) scales.push_back(adapter.scales[static_cast<size_t>(r)]);
      adapter.scales = std::move(scales);
      adapter.find_rows();
    }
    inner().narrow(rows);
  }

  Tensor embed(std::span<const int32_t> tokens, const EmbeddingTable& table) override {
    const Tensor y = inner().embed(tokens, table);
    for (const Adapter& adapter : adapters_) {
      const LowRank* part = adapter.part_of(table.origin.get());
      if (part == nullptr) continue;
      std::vector<int32_t> mine;
      for (const int32_t r : adapter.rows) mine.push_back(tokens[static_cast<size_t>(r)]);
      const Scope scope(*this);
      const Tensor d = inner().linear(inner().embed(mine, part->table), part->b);
      inner().add_scaled_rows(y, d, adapter.rows, factors(adapter, *part, 1));
    }
    return y;
  }

  Tensor linear(Tensor x, const Linear& w) override {
    const Tensor y = inner().linear(x, w);
    add_to(y, x, w);
    return y;
  }

  void multi_linear(Tensor x, std::span<const Linear* const> weights, std::span<Tensor> outputs) override {
    inner().multi_linear(x, weights, outputs);
    for (size_t i = 0; i < weights.size(); ++i) add_to(outputs[i], x, *weights[i]);
  }

  Tensor gated_linear(Tensor x, const Linear& gate, const Linear& up, Activation activation) override {
    if (!touches(gate.origin.get()) && !touches(up.origin.get())) return inner().gated_linear(x, gate, up, activation);
    const Tensor y = linear(x, gate);
    const Scope scope(*this);
    inner().activate(y, linear(x, up), activation);
    return y;
  }

  Tensor expert_linear(Tensor x, const Routing& routing, const ExpertLinear& w) override {
    const Tensor y = inner().expert_linear(x, routing, w);
    for (const Adapter& adapter : adapters_) {
      const LowRank* part = adapter.part_of(w.origin.get());
      if (part == nullptr) continue;
      require_rows(routing.rows);
      std::vector<int32_t> slots;
      for (const int32_t r : adapter.rows)
        for (int32_t j = 0; j < routing.used; ++j) slots.push_back(r * routing.used + j);
      const Scope scope(*this);
      const Tensor d = inner().expert_linear(inner().expert_linear(x, routing, part->experts_a), routing,
                                             part->experts_b);  // of all slots
      inner().add_scaled_rows(y, slots.size() == static_cast<size_t>(y.rows) ? d : inner().gather_rows(d, slots), slots,
                              factors(adapter, *part, routing.used));
    }
    return y;
  }

  Tensor gated_expert_linear(Tensor x, const Routing& routing, const ExpertLinear& gate, const ExpertLinear& up,
                             Activation activation) override {
    if (!touches(gate.origin.get()) && !touches(up.origin.get()))
      return inner().gated_expert_linear(x, routing, gate, up, activation);
    std::vector<int32_t> row_of_slot;
    for (int32_t slot = 0; slot < routing.slots(); ++slot) row_of_slot.push_back(slot / routing.used);
    const Tensor inputs = inner().gather_rows(x, row_of_slot);  // [slots, in]
    const Tensor y = expert_linear(inputs, routing, gate);
    const Scope scope(*this);
    inner().activate(y, expert_linear(inputs, routing, up), activation);
    return y;
  }

 private:
  struct Adapter {
    const LowRankParts* parts;
    std::vector<float> scales;  // of all rows
    std::vector<int32_t> rows;  // whose scale is not 0

    void find_rows() {
      rows.clear();
      for (size_t r = 0; r < scales.size(); ++r)
        if (scales[r] != 0.0f) rows.push_back(static_cast<int32_t>(r));
    }
    // What it changes in a matrix for any of the rows; nullptr: nothing.
    const LowRank* part_of(const WeightOrigin* origin) const {
      if (rows.empty()) return nullptr;
      const auto part = parts->find(origin);
      return part == parts->end() ? nullptr : &part->second;
    }
  };

  bool touches(const WeightOrigin* origin) const {
    for (const Adapter& adapter : adapters_)
      if (adapter.part_of(origin) != nullptr) return true;
    return false;
  }

  // Of the adapter's rows in turn, each `times` times.
  std::vector<float> factors(const Adapter& adapter, const LowRank& part, int32_t times) const {
    std::vector<float> factors;
    for (const int32_t r : adapter.rows) {
      const float scale = adapter.scales[static_cast<size_t>(r)];
      factors.insert(factors.end(), static_cast<size_t>(times),
                     part.alpha != 0.0f ? scale * part.alpha / static_cast<float>(part.rank) : scale);
    }
    return factors;
  }

  // y += what the adapters make of x at this matrix.
  void add_to(Tensor y, Tensor x, const Linear& w) {
    for (const Adapter& adapter : adapters_) {
      const LowRank* part = adapter.part_of(w.origin.get());
      if (part == nullptr) continue;
      require_rows(x.rows);
      const Scope scope(*this);
      const Tensor mine = adapter.rows.size() == static_cast<size_t>(x.rows) ? x : inner().gather_rows(x, adapter.rows);
      const Tensor d = inner().linear(inner().linear(mine, part->a), part->b);
      inner().add_scaled_rows(y, d, adapter.rows, factors(adapter, *part, 1));
    }
  }

  // A forward pass that computes other rows than it said would mix up the sequences' scales.
  void require_rows(int32_t rows) const {
    if (rows != rows_)
      throw ModelError("this architecture cannot be adapted here: " + std::to_string(rows) + " rows where there are " +
                       std::to_string(rows_));
  }

  std::vector<Adapter> adapters_;
  int32_t rows_ = 0;
};

}  // namespace

std::unique_ptr<Ops> adapt(std::unique_ptr<Ops> inner, std::vector<const LowRankParts*> adapters) {
  return std::make_unique<AdaptedOps>(std::move(inner), std::move(adapters));
}

}  // namespace v100
