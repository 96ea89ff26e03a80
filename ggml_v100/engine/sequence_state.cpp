// Saving and loading of one sequence: header, tokens, recurrent state, pages. Little-endian hosts only read their own files back; the
// header's fingerprint covers model, backend and KV types, so a page is only ever read by code of the same layout.
#include <algorithm>
#include <cstring>

#include "engine/engine.h"

namespace v100 {

namespace {

constexpr uint32_t kMagic = 0x564B3156;  // "V1KV"
constexpr uint32_t kVersion = 2;

struct StateHeader {
  uint32_t magic;
  uint32_t version;
  uint64_t fingerprint;
  int32_t type_k, type_v;
  int32_t page_tokens;
  int32_t length;  // tokens
  uint64_t page_bytes;
  uint64_t state_bytes;  // recurrent, 0 for models that only attend
};
static_assert(sizeof(StateHeader) == 48);

size_t page_count(int32_t length) { return static_cast<size_t>((length + kPageTokens - 1) / kPageTokens); }

}  // namespace

std::vector<std::byte> Engine::save_sequence(int32_t sequence) const {
  const std::lock_guard lock(mutex_);
  const size_t page_bytes = ranks_->page_bytes(), state_bytes = ranks_->state_bytes();
  const int32_t slot = states_.slot(sequence);
  const StateHeader header{kMagic,
                           kVersion,
                           model_->fingerprint(),
                           static_cast<int32_t>(type_k_),
                           static_cast<int32_t>(type_v_),
                           kPageTokens,
                           memory_.length(sequence),
                           page_bytes,
                           state_bytes};
  const auto pages = memory_.pages(sequence);
  const std::span<const int32_t> tokens = tokens_[static_cast<size_t>(sequence)];
  std::vector<std::byte> state(sizeof header + tokens.size_bytes() + state_bytes + pages.size() * page_bytes);
  std::byte* to = state.data();
  const auto put = [&](const void* from, size_t bytes) {
    to = std::copy_n(static_cast<const std::byte*>(from), bytes, to);
  };
  put(&header, sizeof header);
  put(tokens.data(), tokens.size_bytes());
  if (slot >= 0) ranks_->read_state(slot, to);
  to += state_bytes;
  for (const PageId page : pages) {
    ranks_->read_page(page, to);
    to += page_bytes;
  }
  return state;
}

void Engine::load_sequence(int32_t sequence, std::span<const std::byte> state) {
  const std::lock_guard lock(mutex_);
  ranks_->require_usable();
  const size_t page_bytes = ranks_->page_bytes(), state_bytes = ranks_->state_bytes();
  cut(sequence, 0);
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
  if (header.type_k != static_cast<int32_t>(type_k_) ||
      header.type_v != static_cast<int32_t>(type_v_) || header.page_tokens != kPageTokens ||
      header.page_bytes != page_bytes || header.state_bytes != state_bytes)
    throw InvalidArgument("sequence state was saved with other KV cache types");
  const auto n_tokens = static_cast<size_t>(std::max(header.length, 0));
  const size_t expected =
      sizeof header + n_tokens * sizeof(int32_t) + state_bytes + page_count(std::max(header.length, 0)) * page_bytes;
  if (header.length < 0 || state.size() != expected)
    throw InvalidArgument("sequence state of " + std::to_string(header.length) + " tokens has " +
                          std::to_string(state.size()) + " bytes, expected " + std::to_string(expected));
  const std::byte* from = state.data() + sizeof header;
  std::vector<int32_t> tokens(n_tokens);
  std::memcpy(tokens.data(), from, n_tokens * sizeof(int32_t));
  for (const int32_t token : tokens) check_token(token);
  from += n_tokens * sizeof(int32_t);
  memory_.append(sequence, header.length);
  tokens_[static_cast<size_t>(sequence)] = std::move(tokens);
  if (state_bytes > 0 && header.length > 0) {
    ranks_->write_state(states_.begin(sequence), from);
    states_.commit(sequence);
  }
  from += state_bytes;
  for (const PageId page : memory_.pages(sequence)) {
    ranks_->write_page(page, from);
    from += page_bytes;
  }
}

}  // namespace v100
