// Causal attention that processes one head at a time in a core's cache. causal_attention.py describes the results and
// when the kernel is used.
//
// A head's query, key and value are copied out of the packed tensor, whose rows are n * 3 * d elements apart. Operands
// that a product reads by columns are transposed. For each block of 64 queries, forward multiplies the queries by the
// keys up to the last query, exponentiates the scores while they are in the cache, and multiplies them by the values.
// With documents, the keys start at the document of the first query. Backward recomputes the scores of each block.
//
// Small products of row-major matrices use `brgemm` from torch's oneDNN, and vectors use torch's vector class, so the
// file compiles wherever `torch.compile` works.
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
constexpr int64_t kQueries = 64;  // queries per block
constexpr int64_t kTile = 16;     // row lengths of scores and transposed operands are multiples of kTile
static_assert(kTile % kLanes == 0, "kTile must be a multiple of the vector size");

constexpr int64_t round_up(int64_t count, int64_t multiple) { return (count + multiple - 1) / multiple * multiple; }

// Sizes that all heads share: s positions, n heads over all samples, d elements of a head per position.
struct Sizes {
  int64_t s, n, d;
  float scale;

  int64_t packed_stride() const { return n * 3 * d; }               // distance between rows of `packed`
  int64_t row_length() const { return round_up(s, kTile); }         // of scores and transposed operands
  int64_t operand_numel() const { return s * d; }                   // elements of a head's query
  int64_t transposed_numel() const { return row_length() * d; }     // elements of its transpose
  int64_t scores_numel() const { return kQueries * row_length(); }  // elements of a block's scores
};

int64_t forward_numel(const Sizes& sizes) {
  return 2 * sizes.operand_numel() + sizes.transposed_numel() + sizes.scores_numel() + kQueries * sizes.d;
}

int64_t backward_numel(const Sizes& sizes) {
  return 3 * sizes.operand_numel() + 6 * sizes.transposed_numel() + 2 * sizes.scores_numel();
}

// Scratch memory of one thread.
struct Scratch {
  float* next;
  float* allocate(int64_t numel) { return std::exchange(next, next + numel); }
};

// Copies [rows, columns] to contiguous memory.
void copy(const float* src, int64_t src_stride, float* dst, int64_t rows, int64_t columns) {
  for (int64_t i = 0; i < rows; ++i) std::memcpy(dst + i * columns, src + i * src_stride, columns * sizeof(float));
}

// Transposes [rows, columns] to [columns, rows].
void transpose(const float* src, int64_t src_stride, float* dst, int64_t dst_stride, int64_t rows, int64_t columns) {
  for (int64_t i = 0; i < rows; i += kLanes)
    for (int64_t j = 0; j < columns; j += kLanes)
      at::vec::transpose_mxn<float>(src + i * src_stride + j, src_stride, dst + j * dst_stride + i, dst_stride,
                                    static_cast<int>(std::min(kLanes, rows - i)),
                                    static_cast<int>(std::min(kLanes, columns - j)));
}

float reduce_sum(Vector x) {
  return at::vec::vec_reduce_all<float>([](Vector a, Vector b) { return a + b; }, x);
}

float reduce_max(Vector x) {
  return at::vec::vec_reduce_all<float>([](Vector a, Vector b) { return at::vec::maximum(a, b); }, x);
}

// Returns the first key of the block whose queries start at `block_start`, rounded down to a multiple of kTile.
int64_t first_key(const int32_t* doc_starts, int64_t block_start) {
  return doc_starts ? doc_starts[block_start] / kTile * kTile : 0;
}

// Masks the scores of `query` from `key_start` to the start of the query's document.
void mask_earlier_documents(float* row, const int32_t* doc_starts, int64_t query, int64_t key_start) {
  if (doc_starts) std::fill(row + key_start, row + doc_starts[query], -std::numeric_limits<float>::infinity());
}

// Replaces the scores from `key_start` to `key_end` by exp(scale * (score - max_score)), sets the scores from `key_end`
// to `row_end` to 0, and returns the sum of the row. The maximum is subtracted before scaling, so that its exponential
// is exactly 1 in forward and backward, however large it is.
float exponentiate(float* row, int64_t key_end, int64_t row_end, Vector scale, Vector max_score, int64_t key_start) {
  Vector sum(0.f);
  for (int64_t j = key_start; j < row_end; j += kLanes) {
    Vector exps = ((Vector::loadu(row + j) - max_score) * scale).exp_u20();
    if (j + kLanes > key_end) exps = Vector::set(Vector(0.f), exps, std::max<int64_t>(key_end - j, 0));
    exps.store(row + j);
    sum = sum + exps;
  }
  return reduce_sum(sum);
}

// Returns the maximum of the scores from `key_start` to `key_end`; NaN if one of them is NaN.
float max_of_row(const float* row, int64_t key_end, int64_t key_start) {
  const Vector lowest(-std::numeric_limits<float>::infinity());
  Vector maxima = lowest;
  for (int64_t j = key_start; j < key_end; j += kLanes)
    maxima = at::vec::maximum(maxima, Vector::set(lowest, Vector::loadu(row + j), std::min(kLanes, key_end - j)));
  return reduce_max(maxima);
}

// In the functions of a head, a suffix `_t` marks a transposed operand [d, row_length].

void forward_of_head(const Sizes& sizes, const float* packed, const int32_t* doc_starts, float* context,
                     float* max_scores, float* inverse_sums, Scratch scratch) {
  const int64_t packed_stride = sizes.packed_stride(), row_length = sizes.row_length(), s = sizes.s, d = sizes.d;
  float *query = scratch.allocate(sizes.operand_numel()), *value = scratch.allocate(sizes.operand_numel());
  float *key_t = scratch.allocate(sizes.transposed_numel());
  float *scores = scratch.allocate(sizes.scores_numel()), *product = scratch.allocate(kQueries * d);
  copy(packed, packed_stride, query, s, d);
  transpose(packed + d, packed_stride, key_t, row_length, s, d);
  copy(packed + 2 * d, packed_stride, value, s, d);
  for (int64_t start = 0; start < s; start += kQueries) {
    const int64_t count = std::min(kQueries, s - start), end = start + count, key_start = first_key(doc_starts, start);
    const int64_t num_keys = end - key_start;
    brgemm(count, num_keys, d, d, row_length, row_length, false, query + start * d, key_t + key_start,
           scores + key_start);
    for (int64_t i = 0; i < count; ++i) {
      float* row = scores + i * row_length;
      const int64_t position = start + i, key_end = position + 1, row_end = round_up(end, kTile);
      mask_earlier_documents(row, doc_starts, position, key_start);
      max_scores[position] = max_of_row(row, key_end, key_start);
      inverse_sums[position] =
          1.f / exponentiate(row, key_end, row_end, Vector(sizes.scale), Vector(max_scores[position]), key_start);
    }
    brgemm(count, d, num_keys, row_length, d, d, false, scores + key_start, value + key_start * d, product);
    for (int64_t i = 0; i < count; ++i)
      at::vec::map([&](Vector x) { return x * Vector(inverse_sums[start + i]); }, context + (start + i) * sizes.n * d,
                   product + i * d, d);
  }
}

void backward_of_head(const Sizes& sizes, const float* grad, const float* packed, const int32_t* doc_starts,
                      const float* max_scores, const float* inverse_sums, float* packed_grad, Scratch scratch) {
  const int64_t packed_stride = sizes.packed_stride(), row_length = sizes.row_length(), s = sizes.s, d = sizes.d;
  const int64_t operand_numel = sizes.operand_numel(), transposed_numel = sizes.transposed_numel();
  float *query = scratch.allocate(operand_numel), *key = scratch.allocate(operand_numel);
  float *context_grad = scratch.allocate(operand_numel);
  float *query_t = scratch.allocate(transposed_numel), *key_t = scratch.allocate(transposed_numel);
  float *value_t = scratch.allocate(transposed_numel), *context_grad_t = scratch.allocate(transposed_numel);
  float *key_grad_t = scratch.allocate(transposed_numel), *value_grad_t = scratch.allocate(transposed_numel);
  float *scores = scratch.allocate(sizes.scores_numel()), *score_grads = scratch.allocate(sizes.scores_numel());
  copy(packed, packed_stride, query, s, d);
  copy(packed + d, packed_stride, key, s, d);
  copy(grad, sizes.n * d, context_grad, s, d);
  transpose(query, d, query_t, row_length, s, d);
  transpose(key, d, key_t, row_length, s, d);
  transpose(packed + 2 * d, packed_stride, value_t, row_length, s, d);
  transpose(context_grad, d, context_grad_t, row_length, s, d);
  // Blocks are processed from last to first. Without documents, the last block sees every key, so it initializes the
  // gradients of keys and values, and the other blocks accumulate into them.
  if (doc_starts) {
    std::fill(key_grad_t, key_grad_t + transposed_numel, 0.f);
    std::fill(value_grad_t, value_grad_t + transposed_numel, 0.f);
  }
  for (int64_t start = (s - 1) / kQueries * kQueries; start >= 0; start -= kQueries) {
    const int64_t count = std::min(kQueries, s - start), end = start + count, key_start = first_key(doc_starts, start);
    const int64_t num_keys = end - key_start;
    brgemm(count, num_keys, d, d, row_length, row_length, false, query + start * d, key_t + key_start,
           scores + key_start);
    brgemm(count, num_keys, d, d, row_length, row_length, false, context_grad + start * d, value_t + key_start,
           score_grads + key_start);
    for (int64_t i = 0; i < count; ++i) {
      float *row = scores + i * row_length, *grad_row = score_grads + i * row_length;
      const int64_t position = start + i, key_end = position + 1, row_end = round_up(end, kTile);
      mask_earlier_documents(row, doc_starts, position, key_start);
      exponentiate(row, key_end, row_end, Vector(sizes.scale), Vector(max_scores[position]), key_start);
      std::fill(grad_row + key_end, grad_row + row_end, 0.f);
      const Vector scale(sizes.scale), inverse_sum(inverse_sums[position]);
      Vector sum(0.f);
      for (int64_t j = key_start; j < row_end; j += kLanes) {
        const Vector probability = Vector::loadu(row + j) * inverse_sum;
        probability.store(row + j);
        sum = at::vec::fmadd(probability, Vector::loadu(grad_row + j), sum);
      }
      const Vector mean_grad(reduce_sum(sum));  // weighted by the probabilities
      for (int64_t j = key_start; j < row_end; j += kLanes)
        (Vector::loadu(row + j) * (Vector::loadu(grad_row + j) - mean_grad) * scale).store(grad_row + j);
    }
    const bool accumulates = end < s;
    brgemm(d, num_keys, count, row_length, row_length, row_length, accumulates, context_grad_t + start,
           scores + key_start, value_grad_t + key_start);
    brgemm(d, num_keys, count, row_length, row_length, row_length, accumulates, query_t + start,
           score_grads + key_start, key_grad_t + key_start);
    brgemm(count, d, num_keys, row_length, d, packed_stride, false, score_grads + key_start, key + key_start * d,
           packed_grad + start * packed_stride);
  }
  transpose(key_grad_t, row_length, packed_grad + d, packed_stride, d, s);
  transpose(value_grad_t, row_length, packed_grad + 2 * d, packed_stride, d, s);
}

// Calls `function(head, scratch)` for each head. Only one thread at a time uses a scratch buffer. The number of threads
// may differ from torch's if this library was built with another OpenMP runtime.
template <typename Function>
void for_each_head(int64_t num_heads, float* memory, int64_t num_buffers, int64_t buffer_numel,
                   const Function& function) {
  std::atomic<int64_t> next_head{0};
  at::parallel_for(0, num_buffers, 1, [&](int64_t first, int64_t last) {
    for (int64_t buffer_idx = first; buffer_idx < last; ++buffer_idx)
      for (int64_t head = next_head++; head < num_heads; head = next_head++)
        function(head, Scratch{memory + buffer_idx * buffer_numel});
  });
}

// Calls `function` and returns the message of its exception, valid until this thread's next call; null on success.
template <typename Function>
const char* call_and_catch(const Function& function) {
  static thread_local std::string message;
  try {
    function();
    return nullptr;
  } catch (const std::exception& error) {
    message = error.what();
  } catch (...) {
    message = "unknown error";
  }
  return message.c_str();
}

}  // namespace

extern "C" {

// Returns the vector size in bits for which this library was built; 0 if torch emulates vectors by loops.
int64_t causal_vectors() {
#if defined(CPU_CAPABILITY_AVX512)
  return 512;
#elif defined(CPU_CAPABILITY_AVX2)
  return 256;
#else
  return 0;
#endif
}

// Returns the number of floats of scratch memory per thread.
int64_t causal_numbers(int64_t s, int64_t d, bool is_backward) {
  const Sizes sizes{s, 1, d, 1.f};
  return is_backward ? backward_numel(sizes) : forward_numel(sizes);
}

// Computes the context. Returns an error message, or null on success.
//
// packed:      [s, n, 3, d]
// starts:      [b, s], start of the document of each position, or null
// context:     [s, n, d], output
// queries:     [2, n, s], output: the maximum score of each query, and the inverse of the sum of its exponentials
// memory:      `num_buffers` times `causal_numbers` floats
// num_buffers: at least 1; at most this number of threads is used
// num_heads:   number of heads per sample
const char* causal_forward(const float* packed, const int32_t* starts, float* context, float* queries, float* memory,
                           int64_t num_buffers, int64_t s, int64_t n, int64_t d, int64_t num_heads) {
  const Sizes sizes{s, n, d, 1.f / std::sqrt(static_cast<float>(d))};
  return call_and_catch([&] {
    for_each_head(n, memory, num_buffers, forward_numel(sizes), [&](int64_t head, Scratch scratch) {
      float* max_scores = queries + head * s;
      const int32_t* doc_starts = starts ? starts + head / num_heads * s : nullptr;
      forward_of_head(sizes, packed + head * 3 * d, doc_starts, context + head * d, max_scores, max_scores + n * s,
                      scratch);
    });
  });
}

// Computes `packed_grad`, the gradient of `packed` in its shape, from `grad`, the gradient of the context. `queries` is
// the output of `causal_forward`. Returns an error message, or null on success.
const char* causal_backward(const float* grad, const float* packed, const int32_t* starts, const float* queries,
                            float* packed_grad, float* memory, int64_t num_buffers, int64_t s, int64_t n, int64_t d,
                            int64_t num_heads) {
  const Sizes sizes{s, n, d, 1.f / std::sqrt(static_cast<float>(d))};
  return call_and_catch([&] {
    for_each_head(n, memory, num_buffers, backward_numel(sizes), [&](int64_t head, Scratch scratch) {
      const float* max_scores = queries + head * s;
      const int64_t head_offset = head * 3 * d;
      const int32_t* doc_starts = starts ? starts + head / num_heads * s : nullptr;
      backward_of_head(sizes, grad + head * d, packed + head_offset, doc_starts, max_scores, max_scores + n * s,
                       packed_grad + head_offset, scratch);
    });
  });
}

}  // extern "C"
