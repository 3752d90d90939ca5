// Encoding and decoding of blocks on a CPU: one pass over the bytes. wire_formats.py has the layout and the same
// arithmetic in torch, to which this is equal bit by bit.

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("tree-loop-vectorize")  // which TorchInductor switches off for its kernels, vectorized by itself
#endif

#include <cstdint>
#include <cstring>

namespace {

constexpr int64_t kBlock = 128;
constexpr float kTiny = 1.17549435e-38f;
enum Dtype { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };
enum Kind { kInt8 = 0, kInt4 = 1, kFp8 = 2 };

inline uint32_t bits_of(float x) { uint32_t u; std::memcpy(&u, &x, 4); return u; }
inline float float_of(uint32_t u) { float x; std::memcpy(&x, &u, 4); return x; }
// A choice by masks: GCC makes branches of conditional expressions here, and vectorizes no loop that has one.
inline uint32_t either(bool first, uint32_t a, uint32_t b) {
  const uint32_t mask = -uint32_t(first);
  return (a & mask) | (b & ~mask);
}

// Sums and differences of rows of kWidth values that are a power of two of rows apart, the nearest first.
template <int64_t kRows, int64_t kWidth>
inline void butterflies(float* x) {
  for (int64_t half = 1; half < kRows; half *= 2)
    for (int64_t start = 0; start < kRows; start += 2 * half)
      for (int64_t row = start; row < start + half; ++row) {
        float *a = x + row * kWidth, *b = a + half * kWidth;
        for (int64_t i = 0; i < kWidth; ++i) {
          const float sum = a[i] + b[i], difference = a[i] - b[i];
          a[i] = sum;
          b[i] = difference;
        }
      }
}

// The product with Sylvester's matrix, nearest neighbours first, and with the factor that makes the matrix orthogonal.
// Neighbours of less than 16 are added in columns, so that many are added at once.
inline void rotate(float* x) {
  constexpr int64_t kNear = 16, kFar = kBlock / kNear;
  float columns[kBlock];
  for (int64_t i = 0; i < kFar; ++i)
    for (int64_t j = 0; j < kNear; ++j) columns[j * kFar + i] = x[i * kNear + j];
  butterflies<kNear, kFar>(columns);
  for (int64_t i = 0; i < kFar; ++i)
    for (int64_t j = 0; j < kNear; ++j) x[i * kNear + j] = columns[j * kFar + i];
  butterflies<kFar, kNear>(x);
  const float factor = 0.08838834764831845;
  for (int64_t i = 0; i < kBlock; ++i) x[i] *= factor;
}

inline void load(const void* from, int64_t dtype, int64_t offset, int64_t count, float* x) {
  if (dtype == kFloat32) {
    const float* values = static_cast<const float*>(from) + offset;
    for (int64_t i = 0; i < count; ++i) x[i] = values[i];
  } else if (dtype == kBFloat16) {
    const uint16_t* values = static_cast<const uint16_t*>(from) + offset;
    for (int64_t i = 0; i < count; ++i) x[i] = float_of(uint32_t(values[i]) << 16);
  } else {
    const _Float16* values = static_cast<const _Float16*>(from) + offset;
    for (int64_t i = 0; i < count; ++i) x[i] = float(values[i]);
  }
  for (int64_t i = count; i < kBlock; ++i) x[i] = 0.0f;
}

inline void store(const float* x, int64_t dtype, int64_t offset, int64_t count, void* to) {
  if (dtype == kFloat32) {
    std::memcpy(static_cast<float*>(to) + offset, x, 4 * count);
  } else if (dtype == kBFloat16) {
    uint16_t* values = static_cast<uint16_t*>(to) + offset;
    for (int64_t i = 0; i < count; ++i) {
      const uint32_t u = bits_of(x[i]);
      const uint16_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
      values[i] = (u & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded;
    }
  } else {
    _Float16* values = static_cast<_Float16*>(to) + offset;
    for (int64_t i = 0; i < count; ++i) values[i] = _Float16(x[i]);
  }
}

// float8 e4m3 of a magnitude of at most 448, to the nearest, ties to even.
inline uint8_t to_fp8(float x) {
  const uint32_t sign = bits_of(x) & 0x80000000u, magnitude = bits_of(x) ^ sign;
  const uint32_t small = bits_of(float_of(magnitude) + 16384.0f) - bits_of(16384.0f);
  const uint32_t normal = ((magnitude + 0x7ffffu + ((magnitude >> 20) & 1u)) >> 20) - (120u << 3);
  const uint32_t found = either(magnitude < (121u << 23), small, normal);
  return uint8_t(either(magnitude > 0x7f800000u, 0x7fu, found) | (sign >> 24));
}

// Exponents are 120 less than those of a float, also for what is denormal.
inline float from_fp8(uint8_t q) {
  const uint32_t code = q & 0x7fu;
  const float number = float_of(code << 20) * 1.329227995784916e36f;
  return float_of(either(code == 0x7fu, 0x7fc00000u, bits_of(number)) | (uint32_t(q & 0x80u) << 24));
}

// A number of [0, 1) that is a hash of the bits of a value, of its place in its block and of the block's scale.
inline float uniform(float x, uint32_t scale, uint32_t place) {
  uint32_t h = bits_of(x) * 0x9E3779B1u + scale * 0x85EBCA77u + place * 0xC2B2AE3Du;
  h = (h ^ (h >> 16)) * 0x85EBCA6Bu;
  h = (h ^ (h >> 13)) * 0xC2B2AE35u;
  return float(int32_t((h ^ (h >> 16)) >> 8)) * 5.9604644775390625e-08f;
}

inline float quantize(float* x, int64_t kind, bool stochastic, uint8_t* q) {
  const float largest = kind == kFp8 ? 448.0f : kind == kInt8 ? 127.0f : 7.0f;
  const float part = kind == kFp8 ? 1 / 448.0 : kind == kInt8 ? 1 / 127.0 : 1 / 7.0;
  uint32_t most = 0;  // as an integer a NaN is larger than an Inf, and that is larger than any number
  for (int64_t i = 0; i < kBlock; ++i) {
    const uint32_t magnitude = bits_of(x[i]) & 0x7fffffffu;
    most = magnitude > most ? magnitude : most;
  }
  const float scale = float_of(most) * part, inverse = scale < kTiny ? 0.0f : 1.0f / scale;
  for (int64_t i = 0; i < kBlock; ++i) {
    float y = x[i] * inverse;
    y = y < -largest ? -largest : y;
    x[i] = y > largest ? largest : y;
  }
  if (kind == kFp8) {
    for (int64_t i = 0; i < kBlock; ++i) q[i] = to_fp8(x[i]);
    return scale;
  }
  int32_t rounded[kBlock];
  if (stochastic) {
    const int32_t most_of_all = int32_t(largest);
    for (int64_t i = 0; i < kBlock; ++i) {
      const float y = x[i] + uniform(x[i], bits_of(scale), uint32_t(i));
      const int32_t cut = int32_t(y), below = cut - (y < float(cut) ? 1 : 0);
      rounded[i] = below > most_of_all ? most_of_all : below;
    }
  } else {  // adding and taking away 1.5 x 2^23 rounds to the nearest integer, ties to even
    for (int64_t i = 0; i < kBlock; ++i) rounded[i] = int32_t(bits_of(x[i] + 12582912.0f) - bits_of(12582912.0f));
  }
  if (kind == kInt8) {
    for (int64_t i = 0; i < kBlock; ++i) q[i] = uint8_t(rounded[i]);
  } else {
    for (int64_t i = 0; i < kBlock / 2; ++i)
      q[i] = uint8_t((rounded[i] + 8) & 15) | uint8_t((rounded[i + kBlock / 2] + 8) << 4);
  }
  return scale;
}

inline void dequantize(const uint8_t* q, float scale, int64_t kind, float* x) {
  if (kind == kInt8) {
    for (int64_t i = 0; i < kBlock; ++i) x[i] = float(int8_t(q[i])) * scale;
  } else if (kind == kFp8) {
    for (int64_t i = 0; i < kBlock; ++i) x[i] = from_fp8(q[i]) * scale;
  } else {
    for (int64_t i = 0; i < kBlock / 2; ++i) {
      x[i] = float(int32_t(q[i] & 15) - 8) * scale;
      x[i + kBlock / 2] = float(int32_t(q[i] >> 4) - 8) * scale;
    }
  }
}

inline int64_t bytes_of_block(int64_t kind) { return kind == kInt4 ? kBlock / 2 : kBlock; }
inline int64_t fewer(int64_t a, int64_t b) { return a < b ? a : b; }

}  // namespace

// Values are rows of numel neighbours, one row behind the other; encoded rows are row_bytes apart.
extern "C" void encode(const void* values, int64_t dtype, int64_t rows, int64_t numel, uint8_t* out, int64_t row_bytes,
                       int64_t kind, int64_t rotates, int64_t stochastic) {
  const int64_t blocks = (numel + kBlock - 1) / kBlock, size = bytes_of_block(kind);
  for (int64_t row = 0; row < rows; ++row) {
    uint8_t* q = out + row * row_bytes;
    for (int64_t block = 0; block < blocks; ++block) {
      float x[kBlock];
      load(values, dtype, row * numel + block * kBlock, fewer(kBlock, numel - block * kBlock), x);
      if (rotates) rotate(x);
      const float scale = quantize(x, kind, stochastic, q + block * size);
      std::memcpy(q + blocks * size + 4 * block, &scale, 4);
    }
  }
}

extern "C" void decode(const uint8_t* encoded, int64_t row_bytes, int64_t rows, int64_t numel, void* out, int64_t dtype,
                       int64_t kind) {
  const int64_t blocks = (numel + kBlock - 1) / kBlock, size = bytes_of_block(kind);
  for (int64_t row = 0; row < rows; ++row) {
    const uint8_t* q = encoded + row * row_bytes;
    for (int64_t block = 0; block < blocks; ++block) {
      float x[kBlock], scale;
      std::memcpy(&scale, q + blocks * size + 4 * block, 4);
      dequantize(q + block * size, scale, kind, x);
      store(x, dtype, row * numel + block * kBlock, fewer(kBlock, numel - block * kBlock), out);
    }
  }
}

// The sum of the rows in their order, over the divisor; rotated back, if they are rotated.
extern "C" void decode_sum(const uint8_t* encoded, int64_t row_bytes, int64_t rows, int64_t numel, void* out,
                           int64_t dtype, int64_t kind, int64_t rotates, float divisor) {
  const int64_t blocks = (numel + kBlock - 1) / kBlock, size = bytes_of_block(kind);
  for (int64_t block = 0; block < blocks; ++block) {
    float total[kBlock];
    for (int64_t row = 0; row < rows; ++row) {
      const uint8_t* q = encoded + row * row_bytes;
      float x[kBlock], scale;
      std::memcpy(&scale, q + blocks * size + 4 * block, 4);
      dequantize(q + block * size, scale, kind, row ? x : total);
      if (row)
        for (int64_t i = 0; i < kBlock; ++i) total[i] += x[i];
    }
    if (divisor != 1.0f)
      for (int64_t i = 0; i < kBlock; ++i) total[i] /= divisor;
    if (rotates) rotate(total);
    store(total, dtype, block * kBlock, fewer(kBlock, numel - block * kBlock), out);
  }
}
