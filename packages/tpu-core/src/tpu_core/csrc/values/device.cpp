#include "values/device.h"

#include "recorder/capture.h"
#include "runtime/locks.h"
#include "runtime/python.h"
#include "values/memory.h"

#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/Functions.h>
#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceCapability.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <array>
#include <cstring>
#include <map>
#include <utility>

namespace tpu {
namespace {

thread_local int16_t t_device = 0;
constexpr size_t kMostDevices = 128;
thread_local std::array<int64_t, kMostDevices> t_streams{};  // current stream by device
std::atomic<int64_t> g_next_stream{1};

c10::Stream make_stream(int16_t device, int64_t id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::kPrivateUse1, device), id);
}

struct RandomState final : c10::intrusive_ptr_target {
  uint64_t seed = c10::default_rng_seed_val;
  uint64_t offset = 0;
};

// Seed and offset, 16 bytes, the state that DTensor slices (Philox' layout on CUDA). The device's bits
// are a function of (seed, offset, element index).
class TpuGenerator final : public c10::GeneratorImpl {
 public:
  explicit TpuGenerator(
      c10::DeviceIndex device,
      c10::intrusive_ptr<RandomState> state = c10::make_intrusive<RandomState>())
      : GeneratorImpl(
            c10::Device(c10::kPrivateUse1, device),
            c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        state_(std::move(state)) {}

  static c10::DeviceType device_type() { return c10::kPrivateUse1; }

  void set_current_seed(uint64_t seed) override {
    refuse_seeding();
    state_->seed = seed;
    state_->offset = 0;
  }
  void set_offset(uint64_t offset) override {
    refuse_seeding();
    state_->offset = offset;
  }
  uint64_t get_offset() const override { return state_->offset; }
  uint64_t current_seed() const override { return state_->seed; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return state_->seed;
  }
  void set_state(const c10::TensorImpl& state) override {
    refuse_seeding();
    TORCH_CHECK(
        state.device().is_cpu() && state.dtype().Match<uint8_t>() && state.is_contiguous(),
        "RNG state must be a contiguous torch.ByteTensor on the CPU.");
    TORCH_CHECK(
        state.numel() == 16, "RNG state of device 'tpu' has 16 bytes (seed, offset), not ",
        state.numel(), ".");
    const auto* bytes = static_cast<const uint8_t*>(state.data());
    std::memcpy(&state_->seed, bytes, 8);
    std::memcpy(&state_->offset, bytes + 8, 8);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    // Past the dispatcher, as of CUDA: within `torch.func.grad` it would make a wrapper without memory.
    at::Tensor t = at::detail::empty_cpu({16}, at::kByte);
    std::memcpy(t.data_ptr<uint8_t>(), &state_->seed, 8);
    std::memcpy(t.data_ptr<uint8_t>() + 8, &state_->offset, 8);
    return t.getIntrusivePtr();
  }
  // As on CUDA, the "graph-safe" state is shared, not copied.
  void graphsafe_set_state(const c10::intrusive_ptr<c10::GeneratorImpl>& state) override {
    refuse_seeding();
    auto* other = dynamic_cast<TpuGenerator*>(state.get());
    TORCH_CHECK(other, "graphsafe_set_state: expected a generator on device 'tpu'.");
    state_ = other->state_;
  }
  c10::intrusive_ptr<c10::GeneratorImpl> graphsafe_get_state() const override {
    return c10::make_intrusive<TpuGenerator>(device().index(), state_);
  }

  std::pair<uint64_t, uint64_t> next() {
    std::lock_guard<std::mutex> lock(mutex_);
    const std::pair<uint64_t, uint64_t> now{state_->seed, state_->offset};
    state_->offset += kDraw;
    return now;
  }

 private:
  TpuGenerator* clone_impl() const override {
    auto copy = c10::make_intrusive<RandomState>();
    copy->seed = state_->seed;
    copy->offset = state_->offset;
    return new TpuGenerator(device().index(), std::move(copy));
  }
  // A replay goes on where the generator is.
  void refuse_seeding() const {
    refuse_in_capture(device().index(), "Setting the state of a generator");
  }
  c10::intrusive_ptr<RandomState> state_;
};

at::Generator make_generator(c10::DeviceIndex device) {
  return at::make_generator<TpuGenerator>(device < 0 ? current_device() : device);
}

// What the guard does without the device's runtime; a hook must never start it by itself.
struct TpuHooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return is_initialized(); }
  void init() const override { ensure_initialized(); }
  c10::DeviceIndex deviceCount() const override {
    return static_cast<c10::DeviceIndex>(device_count());
  }
  void setCurrentDevice(c10::DeviceIndex d) const override { set_current_device(d); }
  c10::DeviceIndex getCurrentDevice() const override {
    return static_cast<c10::DeviceIndex>(current_device());
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex d) const override {
    const auto old = current_device();
    set_current_device(d);
    return static_cast<c10::DeviceIndex>(old);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex d) const override {
    return d < 0 ? getCurrentDevice() : exchangeDevice(d);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex d) const override {
    return default_generator(d);
  }
  at::Generator getNewGenerator(c10::DeviceIndex d) const override { return make_generator(d); }
  at::Device getDeviceFromPtr(void* p) const override {
    const auto d = device_of_address(p);
    TORCH_CHECK(d >= 0, "tpu: this address does not belong to a tpu tensor.");
    return at::Device(at::kPrivateUse1, static_cast<c10::DeviceIndex>(d));
  }
  // Beside a CUDA device PyTorch's pinned memory is CUDA's.
  bool isPinnedPtr(const void* p) const override {
    return is_pinned(p) || (at::hasCUDA() && at::detail::getCUDAHooks().isPinnedPtr(p));
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    resize_storage(storage.unsafeGetStorageImpl(), nbytes);
  }
};

struct Event {
  PyObject* marker = nullptr;  // tpu_core.runtime.Marker
};

py::object marker_of(void* event) {
  TORCH_CHECK(event && static_cast<Event*>(event)->marker, "tpu: the event was not recorded yet.");
  return py::reinterpret_borrow<py::object>(static_cast<Event*>(event)->marker);
}

struct TpuGuard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = c10::DeviceType::PrivateUse1;
  c10::DeviceType type() const override { return static_type; }
  c10::Device exchangeDevice(c10::Device d) const override {
    auto old = getDevice();
    set_current_device(d.index());
    return old;
  }
  c10::Device getDevice() const override {
    return c10::Device(static_type, static_cast<c10::DeviceIndex>(t_device));
  }
  void setDevice(c10::Device d) const override {
    if (d.has_index()) set_current_device(d.index());
  }
  void uncheckedSetDevice(c10::Device d) const noexcept override {
    if (d.has_index()) t_device = d.index();
  }
  c10::Stream getStream(c10::Device d) const override {
    const auto device = d.has_index() ? d.index() : t_device;
    return make_stream(device, t_streams.at(device));
  }
  c10::Stream getDefaultStream(c10::Device d) const override {
    return make_stream(d.has_index() ? d.index() : t_device, 0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool) const override {
    return getNewStream(d, 0);
  }
  c10::Stream getNewStream(c10::Device d, int) const override {
    return make_stream(d.has_index() ? d.index() : t_device, g_next_stream++);
  }
  c10::Stream exchangeStream(c10::Stream s) const override {
    auto& current = t_streams.at(s.device_index());
    return make_stream(s.device_index(), std::exchange(current, s.id()));
  }
  // Streams share the device's one ordered queue, so waiting between them is free.
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    if (!event) return;
    release_reference(static_cast<Event*>(event)->marker);
    delete static_cast<Event*>(event);
  }
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag flag)
      const override {
    ensure_initialized();
    py::gil_scoped_acquire gil;
    if (!*event) *event = new Event();
    auto* e = static_cast<Event*>(*event);
    // Flag 1 is the backends' "with timing" default of torch.Event(enable_timing=True).
    py::object marker = callback("event_record")(
        static_cast<int>(stream.device_index()), flag == c10::EventFlag::BACKEND_DEFAULT);
    release_reference(e->marker);
    e->marker = marker.release().ptr();
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void* event) const override {
    if (!event) return true;
    py::gil_scoped_acquire gil;
    return callback("event_query")(marker_of(event)).cast<bool>();
  }
  void synchronizeEvent(void* event) const override {
    if (!event) return;
    py::gil_scoped_acquire gil;
    callback("event_synchronize")(marker_of(event));
  }
  double elapsedTime(void* a, void* b, c10::DeviceIndex) const override {
    py::gil_scoped_acquire gil;
    return callback("event_elapsed")(marker_of(a), marker_of(b)).cast<double>();
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    try {
      return static_cast<c10::DeviceIndex>(device_count());
    } catch (...) {
      return 0;
    }
  }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override {
    c10::DeviceCapability capability;  // every dtype that XLA has
    return capability;
  }
  bool queryStream(const c10::Stream& stream) const override {
    if (!is_initialized()) return true;
    py::gil_scoped_acquire gil;
    return callback("query")(static_cast<int>(stream.device_index())).cast<bool>();
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    synchronizeDevice(stream.device_index());
  }
  void synchronizeDevice(c10::DeviceIndex d) const override {
    if (!is_initialized()) return;
    py::gil_scoped_acquire gil;
    callback("synchronize")(static_cast<int>(d < 0 ? current_device() : d));
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, TpuGuard);

// Never destroyed: other threads may still run when static destructors do, and a call of a destroyed
// object is one of a pure virtual function, which aborts.
auto& g_hooks = *new TpuHooks;
bool g_registered = false;
auto& g_generators = *new Guarded<std::map<int16_t, at::Generator>>;

}  // namespace

int16_t current_device() { return t_device; }

void set_current_device(int16_t device) {
  if (device_count() == 0) ensure_initialized();  // raises, and says why there is none
  TORCH_CHECK(
      device >= 0 && device < device_count(), "tpu: invalid device index ", device, "; there are ",
      device_count(), " devices.");
  t_device = device;
}

const at::Generator& default_generator(int16_t device) {
  if (device < 0) device = current_device();
  const auto generators = g_generators.lock();
  auto it = generators->find(device);
  if (it == generators->end())
    it = generators->emplace(device, make_generator(static_cast<c10::DeviceIndex>(device))).first;
  return it->second;
}

std::pair<uint64_t, uint64_t> next_seed(const at::Generator& generator, int16_t device) {
  const auto& g = generator.defined() ? generator : default_generator(device);
  auto* impl = dynamic_cast<TpuGenerator*>(g.unsafeGetGeneratorImpl());
  TORCH_CHECK(
      impl, "Expected a 'tpu' device type for generator but found '", g.device().type(), "'");
  return impl->next();
}

void register_device() {
  if (g_registered) return;
  at::RegisterPrivateUse1HooksInterface(&g_hooks);
  register_allocators();
  g_registered = true;
}

}  // namespace tpu
