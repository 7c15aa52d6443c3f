// Values that a thread of Python's makes.
//
// A collective is called on one thread and sent to the device by another. Until then its operands are held as
// they are, and its results are values that run without a trace: ops may be recorded on them, and who needs
// what they hold waits, as for another thread's run.
//
// What is held is counted in the Value. Whether a value is donated must not follow from how far the sending
// thread has come: a cut waits until nothing holds its inputs any more.
#include "recorder/async_value.h"

#include "recorder/call.h"
#include "recorder/capture.h"
#include "recorder/checks.h"
#include "recorder/tensors.h"
#include "recorder/trace.h"
#include "values/memory.h"

#include <memory>
#include <optional>
#include <utility>

namespace tpu {
namespace {

// A counted reference to a value.
class Held {
 public:
  // Needs g_mutex.
  explicit Held(ValuePtr value) : value_(std::move(value)) { ++value_->holds; }
  Held(Held&& other) noexcept : value_(std::move(other.value_)), counts_(other.counts_) {}
  Held& operator=(Held&&) = delete;
  ~Held() { drop(); }

  const ValuePtr& value() const {
    TORCH_CHECK(value_, "tpu: the value was released.");
    return value_;
  }
  // From now on nobody waits for the end of it.
  void stop_counting() {
    if (!value_ || !std::exchange(counts_, false)) return;
    Lock lock(g_mutex, std::defer_lock);
    acquire(lock);
    --value_->holds;
    notify_settled();
  }
  void drop() {
    if (!value_) return;
    Lock lock(g_mutex, std::defer_lock);
    acquire(lock);
    stop_counting();
    value_.reset();
  }

 private:
  ValuePtr value_;
  bool counts_ = true;
};

// What a collective reads.
class Operand {
 public:
  // What was recorded to compute the tensor is sent off; what is promised is not waited for.
  explicit Operand(const at::Tensor& t) : held_(settled(whole(t))) {}

  // Whether only collectives that wait for their turn will ever read the value again.
  bool is_last_use() const {
    Lock lock(g_mutex, std::defer_lock);
    acquire(lock);
    const auto& v = held_.value();
    return !v->shared && v.use_count() == v->holds;
  }
  py::object array() const { return array_of_value(held_.value(), "collective"); }
  void release() { held_.drop(); }

 private:
  // The tensor, or a copy whose storage holds just its elements in their order.
  static at::Tensor whole(const at::Tensor& t) {
    ensure_initialized();
    refuse_in_capture(static_cast<int16_t>(t.device().index()), "A collective");
    if (!t.is_conj() && !t.is_neg() && is_whole(t)) return t;
    WithoutGil no_gil;
    const at::NoGradGuard no_grad;
    return own_value(t.resolve_conj().resolve_neg());
  }

  static bool unsettled(const ValuePtr& v) {
    return v->state != State::Uninitialized && v->state != State::Ready && !v->is_promised();
  }

  static Held settled(const at::Tensor& t) {
    {
      Lock lock(g_mutex, std::defer_lock);
      acquire(lock);
      if (!unsettled(cell_of(t)->value)) return Held(cell_of(t)->value);
    }
    WithoutGil no_gil;
    Lock lock(g_mutex);
    ValuePtr v = cell_of(t)->value;
    if (unsettled(v)) settle(v, lock, "collective");
    return Held(std::move(v));
  }

  Held held_;
};

// What a collective will write: from now on the value of a tensor's whole storage.
class Promise {
 public:
  explicit Promise(const at::Tensor& t) : storage_(t.storage().getWeakStorageImpl()) {
    const Layout layout{
        t.scalar_type(), Dims(t.sizes().begin(), t.sizes().end()),
        Dims(t.strides().begin(), t.strides().end())};
    ValuePtr made = make_value(
        layout, t.storage().nbytes(), static_cast<int16_t>(t.device().index()), State::Pending);
    made->state = State::Running;
    Lock lock(g_mutex, std::defer_lock);
    acquire(lock);
    auto& current = cell_of(t)->value;
    former_.emplace(current);
    made_.emplace(made);
    current = std::move(made);
  }

  void keep(py::object array) {
    former_.reset();
    {
      Lock lock(g_mutex, std::defer_lock);
      acquire(lock);
      made_->value()->set_array(array.release().ptr());
      made_->value()->launch = launches();
    }
    made_.reset();
  }

  // Every read raises the error.
  void fail(py::object error) {
    Lock lock(g_mutex, std::defer_lock);
    acquire(lock);
    made_->value()->fail(std::make_shared<const Failure>(error.release().ptr()));
    made_->stop_counting();
    former_->stop_counting();
  }

  // Gives the storage back what it held before, unless it has been written to again; or lets go of that.
  void end(bool take_back) {
    if (made_ && take_back) {
      Lock lock(g_mutex, std::defer_lock);
      acquire(lock);
      if (const auto storage = storage_.lock()) {
        auto& current = cell_of(storage.get())->value;
        if (current == made_->value()) current = former_->value();
      }
    }
    former_.reset();
    made_.reset();
  }

 private:
  c10::weak_intrusive_ptr<c10::StorageImpl> storage_;
  std::optional<Held> made_, former_;
};

// A promise for a tensor that is all of its storage, in order; else null.
std::unique_ptr<Promise> promise(const at::Tensor& t) {
  refuse_in_capture(static_cast<int16_t>(t.device().index()), "A collective");
  const bool all = t.is_contiguous() && !t.is_conj() && !t.is_neg() && t.storage_offset() == 0 &&
      t.nbytes() == t.storage().nbytes();
  return all ? std::make_unique<Promise>(t) : nullptr;
}

}  // namespace

void register_promises(py::module_& m) {
  py::class_<Operand>(m, "Operand")
      .def(py::init<const at::Tensor&>())
      .def("is_last_use", &Operand::is_last_use)
      .def("array", &Operand::array)
      .def("release", &Operand::release);
  py::class_<Promise>(m, "Promise")
      .def("keep", &Promise::keep)
      .def("fail", &Promise::fail)
      .def("end", &Promise::end);
  m.def("promise", &promise);
}

}  // namespace tpu
