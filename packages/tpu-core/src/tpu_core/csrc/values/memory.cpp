#include "values/memory.h"

#include "execution/profiler.h"
#include "recorder/capture.h"
#include "recorder/tensors.h"
#include "recorder/threads.h"
#include "recorder/trace.h"
#include "runtime/python.h"
#include "values/memory_history.h"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/flat_hash_map.h>
#include <sys/mman.h>

#include <array>
#include <atomic>
#include <map>
#include <unordered_set>

namespace tpu {
namespace {

constexpr size_t kDevices = 128;
// Per device; reserved, never touched.
#ifdef __SANITIZE_THREAD__
constexpr size_t kSpace = size_t{1} << 37;  // of the 1.5 TiB that the sanitizer leaves a program
#else
constexpr size_t kSpace = size_t{1} << 41;
#endif
constexpr size_t kAlign = 512;

// Distinct storages need distinct, non-overlapping addresses (safetensors and transformers compare
// them), although no byte there is ever read or written. A range and its Cell stay together for good:
// the latest one that was given up is taken next.
class AddressSpace {
 public:
  Cell* take(size_t nbytes, int16_t device) {
    TORCH_CHECK(
        nbytes <= kSpace, "tpu: a storage of ", nbytes, " bytes exceeds the address space.");
    const auto size_class = class_of(nbytes);
    if (auto* cell = free_[size_class]) {
      free_[size_class] = cell->next_free;
      return cell;
    }
    if (!base_) {
      void* p =
          mmap(nullptr, kSpace, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      TORCH_CHECK(p != MAP_FAILED, "tpu: cannot reserve ", kSpace, " bytes of address space.");
      base_ = static_cast<char*>(p);
    }
    const auto reserved = bytes_of_class(size_class);
    TORCH_CHECK(
        used_ + reserved <= kSpace, "tpu: a storage of ", nbytes,
        " bytes exceeds the address space.");
    auto* cell = new Cell;
    cell->address = base_ + used_;
    cell->size_class = size_class;
    cell->device = device;
    cells_.emplace(cell->address, cell);
    used_ += reserved;
    return cell;
  }
  void give_back(Cell* cell) {
    cell->next_free = free_[cell->size_class];
    free_[cell->size_class] = cell;
  }
  // The cell whose range starts there, in use or not, or null.
  Cell* find(const void* p) const {
    const auto it = cells_.find(p);
    return it == cells_.end() ? nullptr : it->second;
  }
  bool contains(const void* p) const { return base_ && p >= base_ && p < base_ + kSpace; }
  void add_cells(std::vector<std::pair<const Cell*, ValuePtr>>& cells) const {
    for (const auto& [address, cell] : cells_)
      if (cell->in_use) cells.emplace_back(cell, cell->value);
  }
  void add_values(std::vector<ValuePtr>& values) const {
    for (const auto& [address, cell] : cells_)
      if (cell->in_use) values.push_back(cell->value);
  }

 private:
  // Eight classes a power of two, so that ranges of similar sizes are reused: the first are of 1 to 8
  // units of kAlign.
  static uint8_t class_of(size_t nbytes) {
    const size_t units = std::max<size_t>(1, (nbytes + kAlign - 1) / kAlign);
    if (units <= 8) return static_cast<uint8_t>(units - 1);
    const int shift = 60 - __builtin_clzll(units - 1);  // (units - 1) >> shift is in [8, 16)
    return static_cast<uint8_t>(size_t{8} * shift + ((units - 1) >> shift));
  }
  static size_t bytes_of_class(uint8_t size_class) {
    if (size_class < 8) return (size_t{size_class} + 1) * kAlign;
    const int shift = size_class / 8 - 1;
    return (static_cast<size_t>(size_class % 8 + 9) << shift) * kAlign;
  }
  char* base_ = nullptr;
  size_t used_ = 0;
  std::array<Cell*, 256> free_{};
  ska::flat_hash_map<const void*, Cell*> cells_;  // by address
};

struct Storages {
  std::array<AddressSpace, kDevices> spaces;
  std::unordered_set<Cell*> empty;  // of storages without a byte, which have no address
};
auto& g_storages = *new Guarded<Storages>;

// What is allocated is the difference of two counters, so that each allocation and each end of one changes
// two of them.
struct Stats {
  std::atomic<int64_t> in{0}, out{0}, count_in{0}, count_out{0}, peak{0}, count_peak{0}, ooms{0};
  // The same at the last reset of what is accumulated.
  std::atomic<int64_t> in_before{0}, out_before{0}, count_in_before{0}, count_out_before{0};
  int64_t current() const { return in - out; }
  int64_t count() const { return count_in - count_out; }
};
std::array<Stats, kDevices> g_stats;
std::atomic<bool> g_memory_checked{false};

void raise_to(std::atomic<int64_t>& peak, int64_t value) {
  int64_t seen = peak.load();
  while (seen < value && !peak.compare_exchange_weak(seen, value)) {
  }
}

using c10::CachingAllocator::Stat;

Stat stat(int64_t current, int64_t peak, int64_t in, int64_t out) {
  Stat s;
  s.current = current;
  s.peak = peak;
  s.allocated = in;
  s.freed = out;
  return s;
}

struct TpuAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t nbytes) override {
    Layout bytes{at::kByte, {static_cast<int64_t>(nbytes)}, {1}, true};
    return tpu::allocate(nbytes, current_device(), bytes);
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void*, const void*, size_t) const override {
    TORCH_CHECK(false, "tpu: device memory cannot be copied by address.");
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {
    pybind11::gil_scoped_acquire gil;
    drain_references();
  }
  void recordStream(const c10::DataPtr&, c10::Stream) override {}  // one ordered queue a device
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    auto& s = g_stats.at(device);
    const int64_t pending = pending_bytes(device);
    const int64_t now = s.current() + pending;
    c10::CachingDeviceAllocator::DeviceStats d;
    constexpr auto all = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    auto bytes = stat(
        now, std::max<int64_t>(s.peak, now), s.in - s.in_before + pending, s.out - s.out_before);
    auto count = stat(
        s.count(), s.count_peak, s.count_in - s.count_in_before, s.count_out - s.count_out_before);
    d.allocated_bytes[all] = d.active_bytes[all] = d.requested_bytes[all] = bytes;
    d.reserved_bytes[all] = bytes;
    d.allocation[all] = d.active[all] = d.segment[all] = count;
    d.num_ooms = s.ooms;
    return d;
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    auto& s = g_stats.at(device);
    s.in_before = s.in.load();
    s.out_before = s.out.load();
    s.count_in_before = s.count_in.load();
    s.count_out_before = s.count_out.load();
    s.ooms = 0;
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    auto& s = g_stats.at(device);
    s.peak = s.current();
    s.count_peak = s.count();
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    pybind11::gil_scoped_acquire gil;
    auto info = callback("memory_info")(device).cast<std::pair<size_t, size_t>>();
    return info;
  }
};

// Never destroyed: other threads may still run when static destructors do, and a call of a destroyed
// object is one of a pure virtual function, which aborts.
auto& g_allocator = *new TpuAllocator;

auto& g_pinned = *new Guarded<std::map<const char*, size_t>>;  // bytes by address

// Host memory that transfers may read in place. It keeps no cache: freed memory goes back at once.
struct PinnedAllocator final : at::HostAllocator {
  static void release(void* p) {
    g_pinned.lock()->erase(static_cast<const char*>(p));
    std::free(p);
  }
  c10::DataPtr allocate(size_t nbytes) override {
    if (nbytes == 0) return {nullptr, nullptr, &release, at::kCPU};
    // XLA imports host memory without a copy where it is aligned to 64 bytes.
    void* p = std::aligned_alloc(64, (nbytes + 63) / 64 * 64);
    TORCH_CHECK(p, "tpu: cannot allocate ", nbytes, " bytes of pinned host memory.");
    g_pinned.lock()->emplace(static_cast<const char*>(p), nbytes);
    return {p, p, &release, at::kCPU};
  }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override {
    at::HostStats stats;
    const auto pinned = g_pinned.lock();
    for (const auto& [p, nbytes] : *pinned) stats.allocated_bytes.increase(nbytes);
    return stats;
  }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* dst, const void* src, size_t n) const override {
    default_copy_data(dst, src, n);
  }
};
auto& g_pinned_allocator = *new PinnedAllocator;

}  // namespace

void free_cell(void* context) {
  auto* cell = static_cast<Cell*>(context);
  if (!cell->address) {
    g_storages.lock()->empty.erase(cell);
    delete cell;
    return;
  }
  ValuePtr dropped;  // without the lock
  const auto storages = g_storages.lock();
  dropped = std::move(cell->value);
  cell->in_use = false;
  storages->spaces[cell->device].give_back(cell);
}

c10::DataPtr allocate(ValuePtr value) {
  ensure_initialized();
  const auto device = value->device;
  Cell* cell;
  if (value->nbytes) {
    const auto storages = g_storages.lock();
    cell = storages->spaces.at(device).take(value->nbytes, device);
    cell->in_use = true;
    ++cell->generation;
    cell->value = std::move(value);  // `live_values` sees cells that are in use
  } else {
    cell = new Cell;
    cell->device = device;
    cell->value = std::move(value);
    g_storages.lock()->empty.insert(cell);
  }
  note_allocated(cell);
  return {cell->address, cell, &free_cell, c10::Device(c10::kPrivateUse1, device)};
}

c10::DataPtr allocate(size_t nbytes, int16_t device, const Layout& layout) {
  return allocate(make_value(layout, nbytes, device, State::Uninitialized));
}

c10::Allocator* device_allocator() { return &g_allocator; }
c10::Allocator* pinned_allocator() { return &g_pinned_allocator; }

bool is_pinned(const void* ptr) {
  const auto pinned = g_pinned.lock();
  auto it = pinned->upper_bound(static_cast<const char*>(ptr));
  if (it == pinned->begin()) return false;
  --it;
  return static_cast<const char*>(ptr) < it->first + it->second;
}

int16_t device_of_address(const void* ptr) {
  const auto storages = g_storages.lock();
  for (size_t d = 0; d < kDevices; ++d)
    if (storages->spaces[d].contains(ptr)) return static_cast<int16_t>(d);
  return -1;
}

Cell* cell_of_address(const void* ptr) {
  const auto storages = g_storages.lock();
  for (const auto& space : storages->spaces)
    if (space.contains(ptr)) {
      Cell* cell = space.find(ptr);
      return cell && cell->in_use ? cell : nullptr;
    }
  return nullptr;
}

std::vector<ValuePtr> live_values() {
  std::vector<ValuePtr> values;
  const auto storages = g_storages.lock();
  for (const auto& space : storages->spaces) space.add_values(values);
  for (const auto* cell : storages->empty) values.push_back(cell->value);
  return values;
}

std::vector<std::pair<const Cell*, ValuePtr>> live_cells(int16_t device) {
  std::vector<std::pair<const Cell*, ValuePtr>> cells;
  const auto storages = g_storages.lock();
  storages->spaces.at(device).add_cells(cells);
  return cells;
}

void account(int16_t device, int64_t bytes, const void* value) {
  if (bytes == 0) return;  // a storage without a byte, whose end would be its second beginning
  auto& s = g_stats[device];
  if (bytes > 0) {
    raise_to(s.peak, (s.in += bytes) - s.out);
    raise_to(s.count_peak, ++s.count_in - s.count_out);
  } else {
    s.out -= bytes;
    ++s.count_out;
  }
  if (!is_profiling()) return;
  const auto now = static_cast<size_t>(s.current());
  c10::reportMemoryUsageToProfiler(
      const_cast<void*>(value), bytes, now, now,
      {c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(device)});
}

void note_peak(int16_t device, int64_t bytes) { raise_to(g_stats[device].peak, bytes); }

bool is_of(const Cell* cell, uint32_t generation) {
  const auto storages = g_storages.lock();
  return cell->in_use && cell->generation == generation;
}

bool put_value(Cell* cell, uint32_t generation, const Value* current, ValuePtr& value) {
  const auto storages = g_storages.lock();
  if (!cell->in_use || cell->generation != generation || cell->value.get() != current) return false;
  std::swap(cell->value, value);
  return true;
}

void set_memory_checked(bool is_checked) { g_memory_checked = is_checked; }
bool memory_is_checked() { return g_memory_checked; }

void require_memory(int16_t device, int64_t nbytes) {
  if (!g_memory_checked || nbytes == 0 || !is_initialized() || in_bad_fork()) return;
  auto check = [&](bool raises) {
    py::gil_scoped_acquire gil;
    return callback("check_allocation")(device, nbytes, allocated_bytes(device), raises)
        .cast<bool>();
  };
  if (check(false)) return;
  flush_current("memory is short");  // what it read may be free then
  check(true);
}

int64_t allocated_bytes(int16_t device) { return g_stats[device].current(); }

void note_out_of_memory(int16_t device, int64_t needed, int64_t free_bytes) {
  ++g_stats[device].ooms;
  if (records_memory()) record_out_of_memory(device, needed, free_bytes);
}

namespace {
size_t bytes_of(const Layout& l) {
  return static_cast<size_t>(numel_of(l.sizes)) * c10::elementSize(l.dtype);
}
}  // namespace

void resize_storage(c10::StorageImpl* storage, size_t nbytes) {
  Cell* cell = cell_of(storage);
  const size_t old = storage->nbytes();
  if (nbytes == old) return;
  const auto device = cell->device;
  if (is_capturing(device) && old && !is_made_in_capture(cell))
    refuse_in_capture(device, "resize_ of a storage that is older than the graph");
  Layout bytes{at::kByte, {static_cast<int64_t>(nbytes)}, {1}, true};
  // A storage that is emptied and restored, as FSDP frees parameters, keeps its type: the programs
  // that use it stay the same.
  const auto& before = cell->value->layout;
  const bool typed = !before.untyped && (nbytes == 0 || (old == 0 && nbytes == bytes_of(before)));
  if (typed) bytes = before;
  ValuePtr kept;
  if (old && nbytes && cell->value->state != State::Uninitialized) {
    if (nbytes < old) {
      kept = cell->value;  // a value may be larger than its storage
    } else {
      auto contents = at::zeros({static_cast<int64_t>(nbytes)}, at::kByte);
      contents.narrow(0, 0, static_cast<int64_t>(old))
          .copy_(read_bytes(cell->value, "resize_").narrow(0, 0, static_cast<int64_t>(old)));
      kept = make_value(bytes, nbytes, device, State::Host);
      kept->host = std::move(contents);
    }
  }
  auto fresh = allocate(nbytes, device, bytes);
  if (kept) {
    auto* made = static_cast<Cell*>(fresh.get_context());
    put_value(made, made->generation, made->value.get(), kept);
  }
  storage->set_data_ptr_noswap(std::move(fresh));
  storage->set_nbytes(nbytes);
}

void register_allocators() {
  c10::SetAllocator(c10::kPrivateUse1, &g_allocator);
  at::setHostAllocator(c10::kPrivateUse1, &g_pinned_allocator);
}

}  // namespace tpu
