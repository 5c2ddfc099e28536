// Causal attention of one head after another in a core's cache: see causal_kernel.py for what it computes and when.
//
// A head's query, key and value are copied out of the layer's product (its rows lie n * 3 * d numbers apart), those that
// a product reads by columns transposed. Then 64 queries at a time: a product with the keys up to their own end, the
// exponentials of its rows while they are in the cache, and the products that follow. oneDNN's small products come with
// torch (`brgemm`, of row-major matrices); vectors are torch's own, so this compiles wherever `torch.compile` does.
#include <ATen/Parallel.h>
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <ATen/native/CPUBlas.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>

namespace {

using Vector = at::vec::Vectorized<float>;
using at::native::cpublas::brgemm;

constexpr int64_t kLanes = Vector::size();
constexpr int64_t kQueries = 64;  // of a block
constexpr int64_t kTile = 16;     // of a transposition; rows of scores begin at multiples of it

constexpr int64_t whole(int64_t count, int64_t of) { return (count + of - 1) / of * of; }

// What all heads share. Numbers: s positions, n heads of all samples, d of a head.
struct Sizes {
  int64_t s, n, d;
  float scale;

  int64_t apart() const { return n * 3 * d; }           // rows of `packed`
  int64_t width() const { return whole(s, kTile); }     // rows of scores, and of what lies transposed
  int64_t rows() const { return s * d; }                // numbers of a head's query
  int64_t columns() const { return width() * d; }       // the same, transposed
  int64_t scores() const { return kQueries * width(); } // of a block
};

int64_t numbers_forward(const Sizes& z) { return 2 * z.rows() + z.columns() + z.scores() + kQueries * (z.d + 1); }
int64_t numbers_backward(const Sizes& z) { return 3 * z.rows() + 6 * z.columns() + 2 * z.scores(); }

// Hands out parts of a thread's memory.
struct Room {
  float* next;
  float* take(int64_t count) { return std::exchange(next, next + count); }
};

void copy(const float* from, int64_t apart, float* to, int64_t rows, int64_t d) {
  for (int64_t i = 0; i < rows; ++i) std::memcpy(to + i * d, from + i * apart, d * sizeof(float));
}

// [rows, columns] to [columns, rows].
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

// Put exp(scale * row - shift) in the place of `seen` scores, 0 behind them, and return what they add up to.
float exponentials(float* row, int64_t seen, int64_t width, Vector scale, Vector shift) {
  Vector sum(0.f);
  for (int64_t j = 0; j < width; j += kLanes) {
    Vector made = at::vec::fmadd(Vector::loadu(row + j), scale, shift).exp_u20();
    if (j + kLanes > seen) made = Vector::set(Vector(0.f), made, std::max<int64_t>(seen - j, 0));
    made.store(row + j);
    sum = sum + made;
  }
  return sum_of(sum);
}

// The largest of `seen` scores; NaN where one is.
float largest(const float* row, int64_t seen) {
  const Vector least(-std::numeric_limits<float>::infinity());
  Vector found = least;
  for (int64_t j = 0; j < seen; j += kLanes)
    found = at::vec::maximum(found, Vector::set(least, Vector::loadu(row + j), std::min(kLanes, seen - j)));
  return most_of(found);
}

void forward_of_head(const Sizes& z, const float* packed, float* context, float* sums, Room room) {
  const int64_t apart = z.apart(), width = z.width(), d = z.d;
  float *query = room.take(z.rows()), *value = room.take(z.rows()), *keys = room.take(z.columns());
  float *scores = room.take(z.scores()), *product = room.take(kQueries * d), *shares = room.take(kQueries);
  copy(packed, apart, query, z.s, d);
  transpose(packed + d, apart, keys, width, z.s, d);
  copy(packed + 2 * d, apart, value, z.s, d);
  for (int64_t first = 0; first < z.s; first += kQueries) {
    const int64_t count = std::min(kQueries, z.s - first), end = first + count;
    brgemm(count, end, d, d, width, width, false, query + first * d, keys, scores);
    for (int64_t i = 0; i < count; ++i) {
      float* row = scores + i * width;
      const int64_t seen = first + i + 1;
      const float most = largest(row, seen) * z.scale;
      const float sum = exponentials(row, seen, whole(end, kTile), Vector(z.scale), Vector(-most));
      sums[first + i] = most + std::log(sum);
      shares[i] = 1.f / sum;
    }
    brgemm(count, d, end, width, d, d, false, scores, value, product);
    for (int64_t i = 0; i < count; ++i)
      at::vec::map([&](Vector x) { return x * Vector(shares[i]); }, context + (first + i) * z.n * d, product + i * d, d);
  }
}

void backward_of_head(const Sizes& z, const float* grad, const float* packed, const float* sums, float* found, Room room) {
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
  // The last block first: it sees every key, so its gradients are set and those of the others added.
  for (int64_t first = (z.s - 1) / kQueries * kQueries; first >= 0; first -= kQueries) {
    const int64_t count = std::min(kQueries, z.s - first), end = first + count;
    brgemm(count, end, d, d, width, width, false, query + first * d, keys, scores);
    brgemm(count, end, d, d, width, width, false, given + first * d, values, of_scores);
    for (int64_t i = 0; i < count; ++i) {
      float *row = scores + i * width, *of_row = of_scores + i * width;
      const int64_t seen = first + i + 1, rounded = whole(end, kTile);
      exponentials(row, seen, rounded, Vector(z.scale), Vector(-sums[first + i]));
      std::fill(of_row + seen, of_row + rounded, 0.f);
      Vector sum(0.f);
      for (int64_t j = 0; j < rounded; j += kLanes)
        sum = at::vec::fmadd(Vector::loadu(row + j), Vector::loadu(of_row + j), sum);
      const Vector mean(sum_of(sum)), scale(z.scale);
      for (int64_t j = 0; j < rounded; j += kLanes)
        (Vector::loadu(row + j) * (Vector::loadu(of_row + j) - mean) * scale).store(of_row + j);
    }
    const bool adds = end < z.s;
    brgemm(d, end, count, width, width, width, adds, all_given + first, scores, of_value);
    brgemm(d, end, count, width, width, width, adds, queries + first, of_scores, of_key);
    brgemm(count, d, end, width, d, apart, false, of_scores, key, found + first * apart);
  }
  transpose(of_key, width, found + d, apart, d, z.s);
  transpose(of_value, width, found + 2 * d, apart, d, z.s);
}

// Calls `work(head, room)` for each head; `memory` has `each` numbers for each thread.
template <typename Work>
void for_heads(int64_t n, float* memory, int64_t each, const Work& work) {
  at::parallel_for(0, n, 1, [&](int64_t first, int64_t last) {
    for (int64_t head = first; head < last; ++head) work(head, Room{memory + at::get_thread_num() * each});
    at::native::cpublas::brgemm_release(false);
  });
}

}  // namespace

extern "C" {

// Numbers of memory that a thread works in.
int64_t causal_numbers(int64_t s, int64_t d, bool is_backward) {
  const Sizes z{s, 1, d, 1.f};
  return is_backward ? numbers_backward(z) : numbers_forward(z);
}

// packed [s, n, 3, d], context [s, n, d], sums [n, s]
void causal_forward(const float* packed, float* context, float* sums, float* memory, int64_t s, int64_t n, int64_t d) {
  const Sizes z{s, n, d, 1.f / std::sqrt(static_cast<float>(d))};
  for_heads(n, memory, numbers_forward(z), [&](int64_t head, Room room) {
    forward_of_head(z, packed + head * 3 * d, context + head * d, sums + head * s, room);
  });
}

// grad like context, found like packed
void causal_backward(const float* grad, const float* packed, const float* sums, float* found, float* memory, int64_t s,
                     int64_t n, int64_t d) {
  const Sizes z{s, n, d, 1.f / std::sqrt(static_cast<float>(d))};
  for_heads(n, memory, numbers_backward(z), [&](int64_t head, Room room) {
    backward_of_head(z, grad + head * d, packed + head * 3 * d, sums + head * s, found + head * 3 * d, room);
  });
}

}  // extern "C"
