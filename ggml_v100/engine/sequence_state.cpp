// Saving and loading of one sequence: header, then its pages. Little-endian hosts only read their own files back; the
// header's fingerprint covers model, backend and KV types, so a page is only ever read by code of the same layout.
#include <bit>
#include <cstring>

#include "engine/engine.h"

namespace v100 {

namespace {

constexpr uint32_t kMagic = 0x564B3156;  // "V1KV"
constexpr uint32_t kVersion = 1;

struct StateHeader {
  uint32_t magic;
  uint32_t version;
  uint64_t fingerprint;
  int32_t type_k, type_v;
  int32_t page_tokens;
  int32_t length;  // tokens
  uint64_t page_bytes;
};
static_assert(sizeof(StateHeader) == 40);

size_t page_count(int32_t length) { return static_cast<size_t>((length + kPageTokens - 1) / kPageTokens); }

}  // namespace

std::vector<std::byte> Engine::save_sequence(int32_t sequence) const {
  const std::lock_guard lock(mutex_);
  const StateHeader header{kMagic,
                           kVersion,
                           model_->fingerprint(),
                           static_cast<int32_t>(kv_shapes_[0].type_k),
                           static_cast<int32_t>(kv_shapes_[0].type_v),
                           kPageTokens,
                           memory_.length(sequence),
                           page_bytes_};
  const auto pages = memory_.pages(sequence);
  std::vector<std::byte> state(sizeof header + pages.size() * page_bytes_);
  std::memcpy(state.data(), &header, sizeof header);
  for (size_t i = 0; i < pages.size(); ++i)
    std::memcpy(state.data() + sizeof header + i * page_bytes_,
                kv_.data() + static_cast<size_t>(pages[i]) * page_bytes_, page_bytes_);
  return state;
}

void Engine::load_sequence(int32_t sequence, std::span<const std::byte> state) {
  const std::lock_guard lock(mutex_);
  memory_.clear(sequence);
  StateHeader header;
  if (state.size() < sizeof header)
    throw InvalidArgument("sequence state is truncated: " + std::to_string(state.size()) + " bytes");
  std::memcpy(&header, state.data(), sizeof header);
  if (header.magic != kMagic) throw InvalidArgument("sequence state does not begin with the expected mark");
  if (header.version != kVersion)
    throw InvalidArgument("sequence state has version " + std::to_string(header.version) + ", this build reads " +
                          std::to_string(kVersion));
  if (header.fingerprint != model_->fingerprint())
    throw InvalidArgument("sequence state was saved with another model, quantisation or instruction set");
  if (header.type_k != static_cast<int32_t>(kv_shapes_[0].type_k) ||
      header.type_v != static_cast<int32_t>(kv_shapes_[0].type_v) || header.page_tokens != kPageTokens ||
      header.page_bytes != page_bytes_)
    throw InvalidArgument("sequence state was saved with other KV cache types");
  if (header.length < 0 || state.size() != sizeof header + page_count(header.length) * page_bytes_)
    throw InvalidArgument(
        "sequence state of " + std::to_string(header.length) + " tokens has " + std::to_string(state.size()) +
        " bytes, expected " +
        std::to_string(sizeof header + page_count(header.length < 0 ? 0 : header.length) * page_bytes_));
  memory_.append(sequence, header.length);
  const auto pages = memory_.pages(sequence);
  for (size_t i = 0; i < pages.size(); ++i)
    std::memcpy(kv_.data() + static_cast<size_t>(pages[i]) * page_bytes_,
                state.data() + sizeof header + i * page_bytes_, page_bytes_);
}

}  // namespace v100
