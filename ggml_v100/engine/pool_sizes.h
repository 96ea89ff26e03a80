// How many pages and states an engine keeps for what it was asked for: the same arithmetic for an engine and for plans
// (engine/memory_needs.h).
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "model/model.h"

namespace v100 {

// Tokens in whole pages; 0 asks for the training length.
int32_t rounded_context(const TextModel& model, int32_t n_ctx);

// Tokens are shared out in pages, so each sequence may waste most of one: the pool has a page more per sequence than n_ctx
// needs.
int32_t pool_pages(int32_t n_ctx, int32_t n_seq_max);

// The window within which pages are kept; 0: all are kept, or no layer has a window. texts: of all ranks.
int32_t kept_window(std::span<const TextModel* const> texts, bool swa_full);

// That hold a window at any place.
int32_t window_pages(int32_t window);

// A window is part of its sequence, so these pages never run out before those of other layers: as many as there are, and
// those of each sequence whose other pages are shared.
int32_t window_pool_pages(int32_t window, int32_t n_pages, int32_t n_seq_max);

// Throws InvalidArgument naming the field for a name that is no tensor type.
QuantType cache_type(const char* field, const std::string& name);

// The caches of a rank with their types. keeps_windows: windowed layers have pages of their own.
std::vector<KvShape> typed_shapes(const TextModel& text, QuantType type_k, QuantType type_v, bool keeps_windows);

}  // namespace v100
