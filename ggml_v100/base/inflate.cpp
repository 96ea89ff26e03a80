#include "base/inflate.h"

#include <array>
#include <cstdint>

#include "base/error.h"

namespace v100 {

namespace {

[[noreturn]] void damaged(const char* what) { throw InvalidArgument(std::string("deflated data: ") + what); }

// Bits of the data, the lowest of each byte first.
class BitReader {
 public:
  explicit BitReader(std::span<const std::byte> data) : data_(data) {}

  uint32_t bits(int count) {
    while (held_ < count) {
      if (at_ == data_.size()) damaged("ends early");
      buffer_ |= static_cast<uint32_t>(data_[at_++]) << held_;
      held_ += 8;
    }
    const uint32_t value = buffer_ & ((1u << count) - 1);
    buffer_ >>= count;
    held_ -= count;
    return value;
  }

  // The rest of the byte that was begun is left out.
  std::span<const std::byte> bytes(size_t count) {
    buffer_ = 0, held_ = 0;  // bits() never holds a whole byte
    if (data_.size() - at_ < count) damaged("ends early");
    at_ += count;
    return data_.subspan(at_ - count, count);
  }

 private:
  std::span<const std::byte> data_;
  size_t at_ = 0;
  uint32_t buffer_ = 0;
  int held_ = 0;
};

constexpr int kLongestCode = 15;

// A canonical Huffman code: codes of one length are consecutive numbers, in the order of their symbols.
class HuffmanCode {
 public:
  explicit HuffmanCode(std::span<const uint8_t> lengths) : symbols_(lengths.size()) {
    for (const uint8_t length : lengths) ++count_[length];
    count_[0] = 0;
    int left = 1;  // codes that are still free
    std::array<uint16_t, kLongestCode + 2> start{};
    for (int length = 1; length <= kLongestCode; ++length) {
      left = 2 * left - count_[static_cast<size_t>(length)];
      if (left < 0) damaged("too many codes of one length");
      start[static_cast<size_t>(length) + 1] =
          static_cast<uint16_t>(start[static_cast<size_t>(length)] + count_[static_cast<size_t>(length)]);
    }
    for (size_t symbol = 0; symbol < lengths.size(); ++symbol)
      if (lengths[symbol] != 0) symbols_[start[lengths[symbol]]++] = static_cast<uint16_t>(symbol);
  }

  int read(BitReader& in) const {
    int code = 0, first = 0, index = 0;
    for (size_t length = 1; length <= kLongestCode; ++length) {
      code |= static_cast<int>(in.bits(1));
      const int count = count_[length];
      if (code - first < count) return symbols_[static_cast<size_t>(index + code - first)];
      index += count;
      first = (first + count) << 1;
      code <<= 1;
    }
    damaged("no such code");
  }

 private:
  std::array<uint16_t, kLongestCode + 1> count_{};
  std::vector<uint16_t> symbols_;  // by length, then value
};

// Lengths and distances: a base and how many bits are added to it.
constexpr std::array<uint16_t, 29> kLengthBase{3,  4,  5,  6,  7,  8,  9,  10, 11,  13,  15,  17,  19,  23, 27,
                                               31, 35, 43, 51, 59, 67, 83, 99, 115, 131, 163, 195, 227, 258};
constexpr std::array<uint8_t, 29> kLengthBits{0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2,
                                              2, 3, 3, 3, 3, 4, 4, 4, 4, 5, 5, 5, 5, 0};
constexpr std::array<uint16_t, 30> kDistanceBase{1,    2,    3,    4,    5,    7,    9,    13,    17,    25,
                                                 33,   49,   65,   97,   129,  193,  257,  385,   513,   769,
                                                 1025, 1537, 2049, 3073, 4097, 6145, 8193, 12289, 16385, 24577};
constexpr std::array<uint8_t, 30> kDistanceBits{0, 0, 0, 0, 1, 1, 2, 2,  3,  3,  4,  4,  5,  5,  6,
                                                6, 7, 7, 8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13};
constexpr int kEndOfBlock = 256;

struct Codes {
  HuffmanCode literals, distances;
};

Codes fixed_codes() {
  std::array<uint8_t, 288> literals{};
  for (size_t i = 0; i < literals.size(); ++i)
    literals[i] = static_cast<uint8_t>(i < 144 ? 8 : i < 256 ? 9 : i < 280 ? 7 : 8);
  std::array<uint8_t, 30> distances{};
  distances.fill(5);
  return {HuffmanCode(literals), HuffmanCode(distances)};
}

Codes read_codes(BitReader& in) {
  constexpr std::array<uint8_t, 19> kOrder{16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15};
  const size_t n_literals = in.bits(5) + 257, n_distances = in.bits(5) + 1, n_lengths = in.bits(4) + 4;
  if (n_literals > 286 || n_distances > 30) damaged("too many symbols");
  std::array<uint8_t, 19> code_lengths{};
  for (size_t i = 0; i < n_lengths; ++i) code_lengths[kOrder[i]] = static_cast<uint8_t>(in.bits(3));
  const HuffmanCode length_code(code_lengths);
  std::array<uint8_t, 286 + 30> lengths{};
  for (size_t i = 0; i < n_literals + n_distances;) {
    const int symbol = length_code.read(in);
    if (symbol < 16) {
      lengths[i++] = static_cast<uint8_t>(symbol);
      continue;
    }
    if (symbol == 16 && i == 0) damaged("repeats a length before the first");
    const uint8_t repeated = symbol == 16 ? lengths[i - 1] : uint8_t{0};
    size_t times = symbol == 16 ? 3 + in.bits(2) : symbol == 17 ? 3 + in.bits(3) : 11 + in.bits(7);
    if (i + times > n_literals + n_distances) damaged("too many lengths");
    while (times-- > 0) lengths[i++] = repeated;
  }
  const std::span<const uint8_t> all(lengths);
  return {HuffmanCode(all.first(n_literals)), HuffmanCode(all.subspan(n_literals, n_distances))};
}

void read_block(BitReader& in, const Codes& codes, std::vector<std::byte>& out, size_t size) {
  while (true) {
    const int symbol = codes.literals.read(in);
    if (symbol == kEndOfBlock) return;
    if (symbol < kEndOfBlock) {
      if (out.size() == size) damaged("longer than stated");
      out.push_back(static_cast<std::byte>(symbol));
      continue;
    }
    const size_t l = static_cast<size_t>(symbol) - 257;
    if (l >= kLengthBase.size()) damaged("no such length");
    const size_t length = kLengthBase[l] + in.bits(kLengthBits[l]);
    const auto d = static_cast<size_t>(codes.distances.read(in));
    if (d >= kDistanceBase.size()) damaged("no such distance");
    const size_t distance = kDistanceBase[d] + in.bits(kDistanceBits[d]);
    if (distance > out.size()) damaged("reaches before its beginning");
    if (length > size - out.size()) damaged("longer than stated");
    for (size_t i = 0; i < length; ++i) out.push_back(out[out.size() - distance]);
  }
}

}  // namespace

std::vector<std::byte> inflate(std::span<const std::byte> packed, size_t size) {
  if (size / 1032 > packed.size()) damaged("longer than its bytes can stand for");  // 258 bytes from 2 bits at best
  std::vector<std::byte> out;
  out.reserve(size);
  BitReader in(packed);
  for (bool is_last = false; !is_last;) {
    is_last = in.bits(1) == 1;
    const uint32_t kind = in.bits(2);
    if (kind == 0) {
      const std::span<const std::byte> head = in.bytes(4);
      const size_t length = static_cast<size_t>(head[0]) | static_cast<size_t>(head[1]) << 8;
      const size_t check = static_cast<size_t>(head[2]) | static_cast<size_t>(head[3]) << 8;
      if (length + check != 0xFFFF) damaged("a stored length is not confirmed");
      if (length > size - out.size()) damaged("longer than stated");
      const std::span<const std::byte> stored = in.bytes(length);
      out.insert(out.end(), stored.begin(), stored.end());
    } else if (kind == 1) {
      static const Codes fixed = fixed_codes();
      read_block(in, fixed, out, size);
    } else if (kind == 2) {
      read_block(in, read_codes(in), out, size);
    } else {
      damaged("unknown kind of block");
    }
  }
  if (out.size() != size) damaged("shorter than stated");
  return out;
}

}  // namespace v100
