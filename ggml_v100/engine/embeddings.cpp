// Embeddings: texts run through the model like prompts, with hidden states taken out instead of logits.
#include <algorithm>
#include <cmath>

#include "engine/engine.h"

namespace v100 {

namespace {

// In f64, rounded once.
void softmax(std::span<float> scores) {
  const double largest = *std::max_element(scores.begin(), scores.end());
  double sum = 0;
  for (const float score : scores) sum += std::exp(score - largest);
  for (float& score : scores) score = static_cast<float>(std::exp(score - largest) / sum);
}

}  // namespace

void Engine::check_embedding_work(std::span<const EmbeddingWork> work) const {
  for (size_t item = 0; item < work.size(); ++item) {
    const EmbeddingWork& w = work[item];
    const std::string name = "work item " + std::to_string(item);
    if (w.tokens.empty()) throw InvalidArgument(name + " has no tokens");
    if (w.pool == nullptr) throw InvalidArgument(name + " has no pool");
    for (size_t other = 0; other < item; ++other) {
      if (work[other].sequence == w.sequence)
        throw InvalidArgument("sequence " + std::to_string(w.sequence) + " appears twice in a call");
      if (work[other].pool == w.pool) throw InvalidArgument(name + " has the pool of another item");
    }
    if (w.pool->hidden() != model_->text().hyperparameters().hidden)
      throw InvalidArgument(name + " has a pool for hidden states of " + std::to_string(w.pool->hidden()) +
                            " features, the model has " + std::to_string(model_->text().hyperparameters().hidden));
    if (w.pool->is_complete() || w.pool->n_tokens() != memory_.length(w.sequence))
      throw InvalidArgument(name + " has a pool of " + std::to_string(w.pool->n_tokens()) + " tokens" +
                            (w.pool->is_complete() ? ", a complete text" : "") + "; the sequence holds " +
                            std::to_string(memory_.length(w.sequence)));
    if (w.pool->type() == PoolingType::rank && model_->text().classifier() == nullptr)
      throw InvalidArgument("pooling type rank needs a classification head (cls.output.weight), which this " +
                            model_->text().hyperparameters().architecture + " model does not have");
    for (const int32_t token : w.tokens) check_token(token);
  }
}

void Engine::embed(std::span<const EmbeddingWork> work) {
  const std::lock_guard lock(mutex_);
  ranks_->require_usable();
  check_embedding_work(work);
  std::vector<Row> rows;
  std::vector<size_t> item_of_row;
  for (size_t item = 0; item < work.size(); ++item) {
    const EmbeddingWork& w = work[item];
    forget_behind_window(w.sequence);
    const int32_t first = memory_.length(w.sequence);
    for (size_t i = 0; i < w.tokens.size(); ++i) {
      const int32_t index = first + static_cast<int32_t>(i);
      rows.push_back({w.tokens[i], w.sequence, index, w.pool->wants(index, w.ends && i + 1 == w.tokens.size())});
      item_of_row.push_back(item);
    }
  }

  Ops& ops = ranks_->ops();
  const Classifier* classifier = model_->text().classifier();
  std::vector<float> states, scores;
  bool has_taken = false;
  std::vector<int32_t> ranked;  // rows of `hidden` for the classification head
  const auto take = [&](size_t begin, std::span<const int32_t> outputs, Tensor hidden) {
    const auto pool_of = [&](int32_t output) { return work[item_of_row[begin + static_cast<size_t>(output)]].pool; };
    const auto features = static_cast<size_t>(hidden.features);
    has_taken = true;
    states.resize(static_cast<size_t>(hidden.size()));
    ops.read(hidden, states);
    ranked.clear();
    for (size_t i = 0; i < outputs.size(); ++i) {
      HiddenPool& pool = *pool_of(outputs[i]);
      if (pool.type() == PoolingType::rank)
        ranked.push_back(static_cast<int32_t>(i));
      else
        pool.add(std::span(states).subspan(i * features, features));
    }
    if (ranked.empty()) return;
    ops.narrow(ranked);
    const Tensor labels = classifier->scores(ops, ops.gather_rows(hidden, ranked));  // [ranked, labels]
    const auto n_labels = static_cast<size_t>(labels.features);
    scores.resize(static_cast<size_t>(labels.size()));
    ops.read(labels, scores);
    for (size_t i = 0; i < ranked.size(); ++i) {
      const std::span<float> row = std::span(scores).subspan(i * n_labels, n_labels);
      if (classifier->gives_probabilities) softmax(row);
      pool_of(outputs[static_cast<size_t>(ranked[i])])->add(row);
    }
  };
  try {
    run(work, rows, take);
  } catch (...) {
    if (has_taken)  // some states of this piece, which cannot be told from those of the pieces before
      for (const EmbeddingWork& w : work) w.pool->reset();
    throw;
  }
  for (const EmbeddingWork& w : work) w.pool->advance(static_cast<int32_t>(w.tokens.size()), w.ends);
}

}  // namespace v100
