// How an operand lies in its storage's value: all of it, a window, or anything else.
#include "recorder/call.h"
#include "recorder/capture.h"
#include "recorder/threads.h"
#include "recorder/tier_key.h"

#include <cstdint>

namespace tpu {
namespace {

bool same_ignoring_ones(at::IntArrayRef sizes, at::IntArrayRef a, const Dims& b) {
  for (size_t i = 0; i < sizes.size(); ++i)
    if (sizes[i] != 1 && a[i] != b[i]) return false;
  return true;
}

bool covers(const at::Tensor& t, const Layout& l) {
  return t.storage_offset() == 0 && t.scalar_type() == l.dtype &&
      t.sizes() == at::IntArrayRef(l.sizes) &&
      same_ignoring_ones(t.sizes(), t.strides(), l.strides);
}

// Where a window begins in each dim of its base.
using Starts = c10::SmallVector<int64_t, 6>;

// Is the tensor a rectangular window of the base, with its dims in any order? `dims` says for each dim of
// the base the tensor's dim, or -1.
bool match_window(
    const at::Tensor& t, const Layout& l, c10::SmallVector<int8_t, 6>& dims, Starts& starts) {
  if (t.scalar_type() != l.dtype || t.numel() == 0) return false;
  const auto n = l.sizes.size();
  if (n > 8) return false;
  dims.assign(n, -1);
  for (int64_t i = 0; i < t.dim(); ++i) {
    const auto size = t.size(i), stride = t.stride(i);
    if (size == 1 || stride == 0) continue;
    size_t j = 0;
    for (; j < n; ++j)
      if (l.strides[j] == stride && l.sizes[j] > 1 && l.sizes[j] >= size && dims[j] < 0) break;
    if (j == n) return false;
    dims[j] = static_cast<int8_t>(i);
  }
  // Dims of size 1 as if they were larger: the same view of another size is then of the same form.
  for (int64_t i = 0; i < t.dim(); ++i) {
    if (t.size(i) != 1) continue;
    for (size_t j = 0; j < n; ++j) {
      if (dims[j] >= 0 || l.strides[j] != t.stride(i) || l.strides[j] == 0) continue;
      dims[j] = static_cast<int8_t>(i);
      break;
    }
  }
  starts.assign(n, 0);
  c10::SmallVector<uint8_t, 6> done(n, 0);
  int64_t rest = t.storage_offset();
  for (size_t k = 0; k < n; ++k) {
    size_t best = n;
    for (size_t j = 0; j < n; ++j)
      if (!done[j] && (best == n || l.strides[j] > l.strides[best])) best = j;
    done[best] = 1;
    if (l.sizes[best] == 1 || l.strides[best] == 0) continue;
    starts[best] = rest / l.strides[best];
    rest %= l.strides[best];
    const auto extent = dims[best] < 0 ? 1 : t.size(dims[best]);
    if (starts[best] + extent > l.sizes[best]) return false;
  }
  return rest == 0;
}

// Then its offset becomes one start a dim, which may change from call to call without a compile.
bool match_slice(Call& c, Access& a) {
  const auto& t = *a.tensor;
  const auto& l = a.value->layout;
  Starts starts;
  if (!match_window(t, l, a.dims, starts)) return false;
  a.form = Form::Slice;
  for (size_t j = 0; j < l.sizes.size(); ++j) {
    const auto extent = a.dims[j] < 0 ? 1 : t.size(a.dims[j]);
    if (extent < l.sizes[j])
      add_number(c, static_cast<uint64_t>(starts[j]), Pack::I32, extent != 1);
  }
  return true;
}

void hash_geometry(Hasher& h, const at::Tensor& t) {
  h.add((static_cast<uint64_t>(t.scalar_type()) << 32) | static_cast<uint64_t>(t.dim()));
  for (auto s : t.sizes()) h.add(static_cast<uint64_t>(s));
  if (t.is_contiguous()) {
    h.add(1);
  } else {
    for (auto s : t.strides()) h.add(static_cast<uint64_t>(s));
  }
}

}  // namespace

void hash_layout(Hasher& h, const Layout& l) {
  h.add((static_cast<uint64_t>(l.dtype) << 32) | l.sizes.size());
  for (auto s : l.sizes) h.add(static_cast<uint64_t>(s));
  for (auto s : l.strides) h.add(static_cast<uint64_t>(s));
}

void resolve_access(Call& c, Access& a) {
  TPU_ASSERT_LOCKED();
  const auto& t = *a.tensor;
  a.cell = cell_of(t);
  if (any_captures())
    if (auto& capture = current_trace(a.cell->device)->capture) capture->touch(a.cell, t);
  a.value = a.cell->value;
  settle_type(*a.value, t);
  hash_geometry(c.hasher, t);
  if (covers(t, a.value->layout)) {
    a.form = Form::Whole;
    c.hasher.add(11);
    return;
  }
  hash_layout(c.hasher, a.value->layout);
  if (match_slice(c, a)) {
    c.hasher.add(12);
    c.hasher.add_range(a.dims);
  } else {
    a.form = Form::General;
    c.hasher.add(13);
    c.hasher.add(static_cast<uint64_t>(t.storage_offset()));
  }
}

void TierKey::add_operand(const at::Tensor& t, const Layout& l) {
  add_geometry(t);
  if (covers(t, l)) return;
  add((static_cast<uint64_t>(l.dtype) << 32) | l.sizes.size());
  for (const auto s : l.sizes) add(static_cast<uint64_t>(s));
  for (const auto s : l.strides) add(static_cast<uint64_t>(s));
  // Where a window begins is no part of a signature.
  const auto offset = t.storage_offset();
  if (offset == 0) return;
  c10::SmallVector<int8_t, 6> dims;
  Starts starts;
  if (!match_window(t, l, dims, starts)) add(static_cast<uint64_t>(offset));
}

}  // namespace tpu
