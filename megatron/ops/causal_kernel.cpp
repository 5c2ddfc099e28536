// Causal attention, one head at a time in a core's cache. causal_attention.py describes the result and when it is used.
//
// A head's query, key and value are copied out of the layer's product, whose rows are n * 3 * d elements apart.
// Operands that a product reads by columns are transposed. For each block of 64 queries, the kernel computes a product
// with the keys up to the last of these queries, the exponentials of its rows while they are in the cache, and the
// remaining products. With documents, the keys start at the document of the first query. Small products of row-major
// matrices use `brgemm`, from the oneDNN in torch, and vectors use torch's vector class. The file therefore compiles
// wherever `torch.compile` works.
#include <ATen/Parallel.h>
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <ATen/native/CPUBlas.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <exception>
#include <limits>
#include <string>
#include <utility>

namespace {

using Vector = at::vec::Vectorized<float>;
using at::native::cpublas::brgemm;

constexpr int64_t kLanes = Vector::size();
constexpr int64_t kQueries = 64;  // queries of a block
constexpr int64_t kTile = 16;     // rows of scores and of transposed operands start at multiples of kTile
static_assert(kTile % kLanes == 0, "a row of scores must hold whole vectors");

constexpr int64_t whole(int64_t count, int64_t of) { return (count + of - 1) / of * of; }

// Sizes that all heads share: s positions, n heads over all samples, d elements of a head per position.
struct Sizes {
  int64_t s, n, d;
  float scale;

  int64_t apart() const { return n * 3 * d; }           // stride of the rows of `packed`
  int64_t width() const { return whole(s, kTile); }     // row length of scores and of transposed operands
  int64_t rows() const { return s * d; }                // elements of a head's query
  int64_t columns() const { return width() * d; }       // elements of its transpose
  int64_t scores() const { return kQueries * width(); } // elements of a block's scores
};

int64_t numbers_forward(const Sizes& z) { return 2 * z.rows() + z.columns() + z.scores() + kQueries * z.d; }
int64_t numbers_backward(const Sizes& z) { return 3 * z.rows() + 6 * z.columns() + 2 * z.scores(); }

// The scratch memory of one thread; `take` allocates from it.
struct Room {
  float* next;
  float* take(int64_t count) { return std::exchange(next, next + count); }
};

void copy(const float* from, int64_t apart, float* to, int64_t rows, int64_t d) {
  for (int64_t i = 0; i < rows; ++i) std::memcpy(to + i * d, from + i * apart, d * sizeof(float));
}

// Transposes [rows, columns] to [columns, rows].
void transpose(const float* from, int64_t apart, float* to, int64_t apart_to, int64_t rows, int64_t columns) {
  for (int64_t i = 0; i < rows; i += kLanes)
    for (int64_t j = 0; j < columns; j += kLanes)
      at::vec::transpose_mxn<float>(from + i * apart + j, apart, to + j * apart_to + i, apart_to,
                                    static_cast<int>(std::min(kLanes, rows - i)),
                                    static_cast<int>(std::min(kLanes, columns - j)));
}

float sum_of(Vector x) {
  return at::vec::vec_reduce_all<float>([](Vector a, Vector b) { return a + b; }, x);
}

float most_of(Vector x) {
  return at::vec::vec_reduce_all<float>([](Vector a, Vector b) { return at::vec::maximum(a, b); }, x);
}

// Returns the first key of the block of queries that starts at `first`, rounded down to full tiles.
int64_t lowest_key(const int32_t* starts, int64_t first) { return starts ? starts[first] / kTile * kTile : 0; }

// Masks the scores of a query from `low` to the start of its document.
void leave_out(float* row, const int32_t* starts, int64_t query, int64_t low) {
  if (starts) std::fill(row + low, row + starts[query], -std::numeric_limits<float>::infinity());
}

// Replaces the scores from `low` to `seen` by exp(scale * (row - most)), sets the scores after `seen` to 0, and returns
// the sum. The largest score, `most`, is subtracted before scaling, so that its exponential is exactly 1 in forward and
// backward, however large it is.
float exponentials(float* row, int64_t seen, int64_t width, Vector scale, Vector most, int64_t low) {
  Vector sum(0.f);
  for (int64_t j = low; j < width; j += kLanes) {
    Vector made = ((Vector::loadu(row + j) - most) * scale).exp_u20();
    if (j + kLanes > seen) made = Vector::set(Vector(0.f), made, std::max<int64_t>(seen - j, 0));
    made.store(row + j);
    sum = sum + made;
  }
  return sum_of(sum);
}

// Returns the largest of the scores from `low` to `seen`; NaN if one of them is NaN.
float largest(const float* row, int64_t seen, int64_t low) {
  const Vector least(-std::numeric_limits<float>::infinity());
  Vector found = least;
  for (int64_t j = low; j < seen; j += kLanes)
    found = at::vec::maximum(found, Vector::set(least, Vector::loadu(row + j), std::min(kLanes, seen - j)));
  return most_of(found);
}

void forward_of_head(const Sizes& z, const float* packed, const int32_t* starts, float* context, float* most,
                     float* share, Room room) {
  const int64_t apart = z.apart(), width = z.width(), d = z.d;
  float *query = room.take(z.rows()), *value = room.take(z.rows()), *keys = room.take(z.columns());
  float *scores = room.take(z.scores()), *product = room.take(kQueries * d);
  copy(packed, apart, query, z.s, d);
  transpose(packed + d, apart, keys, width, z.s, d);
  copy(packed + 2 * d, apart, value, z.s, d);
  for (int64_t first = 0; first < z.s; first += kQueries) {
    const int64_t count = std::min(kQueries, z.s - first), end = first + count, low = lowest_key(starts, first);
    brgemm(count, end - low, d, d, width, width, false, query + first * d, keys + low, scores + low);
    for (int64_t i = 0; i < count; ++i) {
      float* row = scores + i * width;
      const int64_t seen = first + i + 1;
      leave_out(row, starts, first + i, low);
      most[first + i] = largest(row, seen, low);
      share[first + i] =
          1.f / exponentials(row, seen, whole(end, kTile), Vector(z.scale), Vector(most[first + i]), low);
    }
    brgemm(count, d, end - low, width, d, d, false, scores + low, value + low * d, product);
    for (int64_t i = 0; i < count; ++i)
      at::vec::map([&](Vector x) { return x * Vector(share[first + i]); }, context + (first + i) * z.n * d,
                   product + i * d, d);
  }
}

void backward_of_head(const Sizes& z, const float* grad, const float* packed, const int32_t* starts, const float* most,
                      const float* share, float* found, Room room) {
  const int64_t apart = z.apart(), width = z.width(), d = z.d;
  float *query = room.take(z.rows()), *key = room.take(z.rows()), *given = room.take(z.rows());
  float *queries = room.take(z.columns()), *keys = room.take(z.columns()), *values = room.take(z.columns());
  float *all_given = room.take(z.columns()), *of_key = room.take(z.columns()), *of_value = room.take(z.columns());
  float *scores = room.take(z.scores()), *of_scores = room.take(z.scores());
  copy(packed, apart, query, z.s, d);
  copy(packed + d, apart, key, z.s, d);
  copy(grad, z.n * d, given, z.s, d);
  transpose(query, d, queries, width, z.s, d);
  transpose(key, d, keys, width, z.s, d);
  transpose(packed + 2 * d, apart, values, width, z.s, d);
  transpose(given, d, all_given, width, z.s, d);
  // The last block is processed first. Without documents it sees every key, so it sets the gradients of keys and
  // values, and other blocks add to them.
  if (starts) std::fill(of_key, of_key + z.columns(), 0.f), std::fill(of_value, of_value + z.columns(), 0.f);
  for (int64_t first = (z.s - 1) / kQueries * kQueries; first >= 0; first -= kQueries) {
    const int64_t count = std::min(kQueries, z.s - first), end = first + count, low = lowest_key(starts, first);
    brgemm(count, end - low, d, d, width, width, false, query + first * d, keys + low, scores + low);
    brgemm(count, end - low, d, d, width, width, false, given + first * d, values + low, of_scores + low);
    for (int64_t i = 0; i < count; ++i) {
      float *row = scores + i * width, *of_row = of_scores + i * width;
      const int64_t seen = first + i + 1, rounded = whole(end, kTile);
      leave_out(row, starts, first + i, low);
      exponentials(row, seen, rounded, Vector(z.scale), Vector(most[first + i]), low);
      std::fill(of_row + seen, of_row + rounded, 0.f);
      const Vector scale(z.scale), part(share[first + i]);
      Vector sum(0.f);
      for (int64_t j = low; j < rounded; j += kLanes) {
        const Vector probability = Vector::loadu(row + j) * part;
        probability.store(row + j);
        sum = at::vec::fmadd(probability, Vector::loadu(of_row + j), sum);
      }
      const Vector mean(sum_of(sum));
      for (int64_t j = low; j < rounded; j += kLanes)
        (Vector::loadu(row + j) * (Vector::loadu(of_row + j) - mean) * scale).store(of_row + j);
    }
    const bool adds = end < z.s;
    brgemm(d, end - low, count, width, width, width, adds, all_given + first, scores + low, of_value + low);
    brgemm(d, end - low, count, width, width, width, adds, queries + first, of_scores + low, of_key + low);
    brgemm(count, d, end - low, width, d, apart, false, of_scores + low, key + low * d, found + first * apart);
  }
  transpose(of_key, width, found + d, apart, d, z.s);
  transpose(of_value, width, found + 2 * d, apart, d, z.s);
}

// Calls `work(head, room)` for each head, where `room` is scratch memory that only one thread uses at a time. The
// number of threads may differ from torch's if this library was built with another OpenMP runtime.
template <typename Work>
void for_heads(int64_t n, float* memory, int64_t rooms, int64_t each, const Work& work) {
  std::atomic<int64_t> next{0};
  at::parallel_for(0, rooms, 1, [&](int64_t first, int64_t last) {
    for (int64_t room = first; room < last; ++room)
      for (int64_t head = next++; head < n; head = next++) work(head, Room{memory + room * each});
  });
}

// Returns the message of the exception that `run` threw, valid until this thread's next call; null if it threw none.
template <typename Run>
const char* said(const Run& run) {
  static thread_local std::string words;
  try {
    run();
    return nullptr;
  } catch (const std::exception& error) {
    words = error.what();
  } catch (...) {
    words = "an unknown error";
  }
  return words.c_str();
}

}  // namespace

extern "C" {

// Returns the vector width in bits for which this library was built; 0 if torch emulates vectors by loops.
int64_t causal_vectors() {
#if defined(CPU_CAPABILITY_AVX512)
  return 512;
#elif defined(CPU_CAPABILITY_AVX2)
  return 256;
#else
  return 0;
#endif
}

// Returns the number of floats of memory that a thread needs.
int64_t causal_numbers(int64_t s, int64_t d, bool is_backward) {
  const Sizes z{s, 1, d, 1.f};
  return is_backward ? numbers_backward(z) : numbers_forward(z);
}

// Computes the context.
//
// packed:  [s, n, 3, d]
// starts:  [b, s], start of the document of each position, or null
// context: [s, n, d], output
// queries: [2, n, s], output: the largest score of each query, and the factor of its exponentials
// memory:  `rooms` times `causal_numbers` floats, with `rooms` at least 1; at most `rooms` threads are used
// heads:   number of heads per sample
const char* causal_forward(const float* packed, const int32_t* starts, float* context, float* queries, float* memory,
                           int64_t rooms, int64_t s, int64_t n, int64_t d, int64_t heads) {
  const Sizes z{s, n, d, 1.f / std::sqrt(static_cast<float>(d))};
  return said([&] {
    for_heads(n, memory, rooms, numbers_forward(z), [&](int64_t head, Room room) {
      float* most = queries + head * s;
      const int32_t* own = starts ? starts + head / heads * s : nullptr;
      forward_of_head(z, packed + head * 3 * d, own, context + head * d, most, most + n * s, room);
    });
  });
}

// Computes `found`, the gradient of `packed` in its shape, from `grad`, the gradient of the context.
const char* causal_backward(const float* grad, const float* packed, const int32_t* starts, const float* queries,
                            float* found, float* memory, int64_t rooms, int64_t s, int64_t n, int64_t d,
                            int64_t heads) {
  const Sizes z{s, n, d, 1.f / std::sqrt(static_cast<float>(d))};
  return said([&] {
    for_heads(n, memory, rooms, numbers_backward(z), [&](int64_t head, Room room) {
      const float* most = queries + head * s;
      const int64_t own = head * 3 * d;
      const int32_t* begins = starts ? starts + head / heads * s : nullptr;
      backward_of_head(z, grad + head * d, packed + own, begins, most, most + n * s, found + own, room);
    });
  });
}

}  // extern "C"
