// Recorded work that is replayed with one launch, and a bounded store of such records.
#pragma once

#include <cstddef>
#include <functional>
#include <list>
#include <memory>
#include <string>

#include "cuda/stream.h"

namespace v100::cuda {

class Graph {
 public:
  // Records what `work` puts into the stream; nothing of it runs. Whatever `work` throws ends the recording and is passed on.
  static std::unique_ptr<Graph> capture(const Stream& stream, const std::function<void()>& work);
  ~Graph();
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  void launch(const Stream& stream) const;
  size_t nodes() const { return nodes_; }  // kernels and copies of one replay

 private:
  explicit Graph(const Device& device) : device_(device) {}

  const Device& device_;
  CUgraphExec exec_ = nullptr;
  size_t nodes_ = 0;
};

// Everything that a recorded kernel was given: addresses, sizes, counts. Two keys are equal where all of it is.
class GraphKey {
 public:
  template <class Value>
  GraphKey& add(const Value& value) {
    static_assert(std::is_trivially_copyable_v<Value> && std::has_unique_object_representations_v<Value>,
                  "padding would make equal keys differ");
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof value);
    return *this;
  }
  GraphKey& append(const void* data, size_t size) {
    bytes_.append(static_cast<const char*>(data), size);
    return *this;
  }
  bool operator==(const GraphKey&) const = default;
  const std::string& bytes() const { return bytes_; }
  bool is_empty() const { return bytes_.empty(); }
  // Forgets all but the first `size` bytes.
  void cut(size_t size) { bytes_.resize(size); }

 private:
  std::string bytes_;
};

// The most recently used graphs, at most `capacity`.
class GraphCache {
 public:
  explicit GraphCache(size_t capacity) : capacity_(capacity) {}

  // The graph of the key, recorded now if it is not there; the least recently used one makes room. It must not be running
  // elsewhere: replays of one stream are in order, so dropping one after its launch is the driver's care.
  const Graph& find(const GraphKey& key, const Stream& stream, const std::function<void()>& work);
  // The graph of the key if it is there.
  const Graph* find(const GraphKey& key);
  size_t size() const { return entries_.size(); }
  void clear() { entries_.clear(); }

 private:
  struct Entry {
    GraphKey key;
    std::unique_ptr<Graph> graph;
  };
  size_t capacity_;
  std::list<Entry> entries_;  // newest first; few enough for a walk
};

}  // namespace v100::cuda
