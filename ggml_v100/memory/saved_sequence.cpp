// A sequence as bytes: header, adapters, tokens, state, positions of checkpoints, their states, pages. In the byte order of the host;
// the identity says that pages and states are read by the code that wrote them.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>

#include "base/error.h"
#include "memory/prefix_memory.h"

namespace v100 {

namespace {

constexpr uint32_t kMagic = 0x564B3156;  // "V1KV"
constexpr uint32_t kVersion = 4;

struct Header {
  uint32_t magic;
  uint32_t version;
  uint64_t checksum;  // of all that follows this field
  uint64_t model, build, positions;
  int32_t type_k, type_v;
  int32_t page_tokens;
  int32_t length;  // tokens
  uint64_t page_bytes;
  uint64_t state_bytes;  // of the state at one place: recurrent state and the window's pages
  uint64_t n_checkpoints;
  uint64_t n_adapters;  // that the tokens were computed with
};
static_assert(sizeof(Header) == 88);
constexpr size_t kChecked = offsetof(Header, checksum) + sizeof(uint64_t);

struct SavedAdapter {
  uint64_t fingerprint;
  float scale;
  uint32_t zero;
};
static_assert(sizeof(SavedAdapter) == 16);

// Finds damage, not forgery.
uint64_t checksum(std::span<const std::byte> data) {
  uint64_t sum = data.size();
  for (size_t i = 0; i < data.size(); i += sizeof(uint64_t)) {
    uint64_t word = 0;
    std::memcpy(&word, data.data() + i, std::min(sizeof word, data.size() - i));
    sum = (sum ^ word) * 0x9E3779B97F4A7C15ull;
    sum ^= sum >> 32;
  }
  return sum;
}

uint64_t page_count(uint64_t length) { return (length + kPageTokens - 1) / kPageTokens; }

// Reads a saved sequence from front to back; its size has been checked.
class Reader {
 public:
  explicit Reader(std::span<const std::byte> data) : rest_(data) {}
  const std::byte* take(size_t bytes) {
    const std::byte* from = rest_.data();
    rest_ = rest_.subspan(bytes);
    return from;
  }
  std::vector<int32_t> numbers(size_t count) {
    std::vector<int32_t> result(count);
    if (count > 0) std::memcpy(result.data(), take(count * sizeof(int32_t)), count * sizeof(int32_t));
    return result;
  }

 private:
  std::span<const std::byte> rest_;
};

Header checked_header(std::span<const std::byte> saved, const StateIdentity& identity, size_t page_bytes,
                      size_t state_bytes) {
  Header header;
  if (saved.size() < sizeof header)
    throw InvalidArgument("sequence state is truncated: " + std::to_string(saved.size()) + " bytes");
  std::memcpy(&header, saved.data(), sizeof header);
  if (header.magic != kMagic) throw InvalidArgument("sequence state does not begin with the expected mark");
  if (header.version != kVersion)
    throw InvalidArgument("sequence state has version " + std::to_string(header.version) + ", this build reads " +
                          std::to_string(kVersion));
  if (header.model != identity.model)
    throw InvalidArgument(
        "sequence state was saved with another model, quantisation, control vector or instruction set");
  if (header.build != identity.build) throw InvalidArgument("sequence state was saved by another build");
  if (header.type_k != identity.type_k || header.type_v != identity.type_v || header.page_tokens != kPageTokens ||
      header.page_bytes != page_bytes || header.state_bytes != state_bytes)
    throw InvalidArgument("sequence state was saved with other KV cache types, or another choice of full-size windows");
  if (header.positions != identity.positions)
    throw InvalidArgument("sequence state was saved with other rope settings");
  if (header.length < 0 || header.n_checkpoints > static_cast<uint64_t>(header.length))
    throw InvalidArgument("sequence state is damaged: " + std::to_string(header.length) + " tokens, " +
                          std::to_string(header.n_checkpoints) + " checkpoints");
  const auto length = static_cast<uint64_t>(header.length);
  const uint64_t n_states = header.n_checkpoints + (length > 0 ? 1 : 0);
  // In f64, in which no size overflows; the files that pass are far smaller than what it holds exactly.
  const double expected = sizeof header + static_cast<double>(header.n_adapters) * sizeof(SavedAdapter) +
                          static_cast<double>(length + header.n_checkpoints) * sizeof(int32_t) +
                          static_cast<double>(n_states) * static_cast<double>(header.state_bytes) +
                          static_cast<double>(page_count(length)) * static_cast<double>(header.page_bytes);
  if (static_cast<double>(saved.size()) != expected)
    throw InvalidArgument("sequence state of " + std::to_string(length) + " tokens and " +
                          std::to_string(header.n_checkpoints) + " checkpoints has " + std::to_string(saved.size()) +
                          " bytes, expected " + std::to_string(static_cast<uint64_t>(expected)));
  if (header.checksum != checksum(saved.subspan(kChecked))) throw InvalidArgument("sequence state is damaged");
  return header;
}

// Scales of the loaded adapters that are those of the saved ones.
AdapterScales scales_of(std::span<const SavedAdapter> saved, std::span<const uint64_t> loaded) {
  AdapterScales scales;
  if (!saved.empty()) scales.resize(loaded.size());
  for (const SavedAdapter& adapter : saved) {
    size_t i = 0;
    while (i < loaded.size() && (loaded[i] != adapter.fingerprint || scales[i] != 0.0f)) ++i;
    if (i == loaded.size()) throw InvalidArgument("sequence state was computed with a LoRA adapter that is not loaded");
    if (!std::isfinite(adapter.scale) || adapter.scale == 0.0f)
      throw InvalidArgument("sequence state is damaged: the scale of an adapter");
    scales[i] = adapter.scale;
  }
  return scales;
}

}  // namespace

std::vector<std::byte> PrefixMemory::save(int32_t sequence, const StateIdentity& identity) {
  const int32_t length = pages_.length(sequence);
  const size_t page_bytes = bytes_.page_bytes(), state_bytes = end_bytes();
  const auto pages = pages_.pages(sequence);
  const std::span<const int32_t> tokens = tokens_[static_cast<size_t>(sequence)];
  std::vector<SavedAdapter> adapters;
  const AdapterScales& scales = scales_[static_cast<size_t>(sequence)];
  for (size_t i = 0; i < scales.size() && length > 0; ++i)
    if (scales[i] != 0.0f) adapters.push_back({identity.adapters[i], scales[i], 0});
  cache_.begin();
  cache_.select(scales);
  std::vector<PrefixCache::Checkpoint> checkpoints = cache_.find(tokens).checkpoints;
  if (!checkpoints.empty() && checkpoints.back().position == length) checkpoints.pop_back();  // the state itself

  Header header{.magic = kMagic,
                .version = kVersion,
                .checksum = 0,
                .model = identity.model,
                .build = identity.build,
                .positions = identity.positions,
                .type_k = identity.type_k,
                .type_v = identity.type_v,
                .page_tokens = kPageTokens,
                .length = length,
                .page_bytes = page_bytes,
                .state_bytes = state_bytes,
                .n_checkpoints = checkpoints.size(),
                .n_adapters = adapters.size()};
  const size_t n_states = checkpoints.size() + (length > 0 ? 1 : 0);
  std::vector<std::byte> saved(sizeof header + adapters.size() * sizeof(SavedAdapter) + tokens.size_bytes() +
                               checkpoints.size() * sizeof(int32_t) + n_states * state_bytes +
                               pages.size() * page_bytes);
  std::byte* to = saved.data();
  const auto put = [&](const void* from, size_t bytes) {
    to = std::copy_n(static_cast<const std::byte*>(from), bytes, to);
  };
  put(&header, sizeof header);
  put(adapters.data(), adapters.size() * sizeof(SavedAdapter));
  put(tokens.data(), tokens.size_bytes());
  if (state_bytes > 0 && length > 0) {
    read_end(sequence, to);
    to += state_bytes;
  }
  for (const PrefixCache::Checkpoint& checkpoint : checkpoints) put(&checkpoint.position, sizeof checkpoint.position);
  for (const PrefixCache::Checkpoint& checkpoint : checkpoints) put(checkpoint.state, state_bytes);
  for (const PageId page : pages) {
    bytes_.read_page(page, to);
    to += page_bytes;
  }
  header.checksum = checksum(std::span<const std::byte>(saved).subspan(kChecked));
  std::memcpy(saved.data(), &header, sizeof header);
  return saved;
}

void PrefixMemory::load(int32_t sequence, std::span<const std::byte> saved, const StateIdentity& identity,
                        int32_t vocab) {
  pages_.length(sequence);  // throws for an unknown one
  clear(sequence);
  const Header header = checked_header(saved, identity, bytes_.page_bytes(), end_bytes());
  Reader reader(saved.subspan(sizeof header));
  std::vector<SavedAdapter> adapters(header.n_adapters);
  for (SavedAdapter& adapter : adapters) std::memcpy(&adapter, reader.take(sizeof adapter), sizeof adapter);
  AdapterScales scales = scales_of(adapters, identity.adapters);
  std::vector<int32_t> tokens = reader.numbers(static_cast<size_t>(header.length));
  for (const int32_t token : tokens)
    if (token < 0 || token >= vocab)
      throw InvalidArgument("token id " + std::to_string(token) + " is outside the vocabulary of " +
                            std::to_string(vocab));
  const std::byte* state = reader.take(tokens.empty() ? 0 : header.state_bytes);
  const std::vector<int32_t> positions = reader.numbers(header.n_checkpoints);
  for (size_t i = 0; i < positions.size(); ++i)
    if (positions[i] <= (i == 0 ? 0 : positions[i - 1]) || positions[i] >= header.length)
      throw InvalidArgument("sequence state is damaged: checkpoint at " + std::to_string(positions[i]));
  const std::byte* states = reader.take(positions.size() * header.state_bytes);

  pages_.append(sequence, header.length);
  try {
    for (const PageId page : pages_.pages(sequence)) bytes_.write_page(page, reader.take(header.page_bytes));
    if (bytes_.state_bytes() > 0 && header.length > 0) {
      bytes_.write_state(states_.begin(sequence), state);
      states_.commit(sequence);
    }
    if (window_pages_ != nullptr) write_window(sequence, header.length, state + bytes_.state_bytes());
    tokens_[static_cast<size_t>(sequence)] = std::move(tokens);
    scales_[static_cast<size_t>(sequence)] = std::move(scales);
    cache_.begin();
    cache_.select(scales_[static_cast<size_t>(sequence)]);
    for (size_t i = 0; i < positions.size(); ++i)
      cache_.keep_state(std::span(tokens_[static_cast<size_t>(sequence)]).first(static_cast<size_t>(positions[i])),
                        [&](std::byte* to) { std::copy_n(states + i * header.state_bytes, header.state_bytes, to); });
  } catch (...) {
    states_.abort(sequence);
    clear(sequence);
    throw;
  }
}

}  // namespace v100
