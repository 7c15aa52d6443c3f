// A c10d backend and its works, each of which asks a Python object.
//
// PyTorch lets Python subclass a whole process group, not the backend of one of its devices; a group
// with gloo for CPU tensors beside ours needs a backend.
#include "module.h"

#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

#include <chrono>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace tpu {
namespace {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<Tensors>;

py::object seconds(std::chrono::milliseconds timeout) {
  if (timeout.count() <= 0) return py::none();  // kNoTimeout, c10d::kUnsetTimeout
  return py::float_(std::chrono::duration<double>(timeout).count());
}

// An argument as Python gets it. Of c10d's options that is what all have: seconds to wait for the other ranks,
// None for the group's, and whether the caller goes on at once; of a reduce op its number, or c10d's object where
// it has a factor. c10d's own classes convert each attribute at every look.
template <typename T>
decltype(auto) argument(T&& x) {
  if constexpr (requires { x.asyncOp; }) {
    return py::make_tuple(seconds(x.timeout), x.asyncOp);
  } else if constexpr (std::is_same_v<std::decay_t<T>, c10d::ReduceOp>) {
    const c10d::ReduceOp::RedOpType type = x;
    return type == c10d::ReduceOp::PREMUL_SUM ? py::cast(x) : py::object(py::int_(int{type}));
  } else {
    return std::forward<T>(x);
  }
}

class PythonWork final : public c10d::Work {
 public:
  explicit PythonWork(py::object object) : impl_(std::move(object)) {}

  bool wait(std::chrono::milliseconds timeout) override {
    py::gil_scoped_acquire gil;
    impl_.call("wait", seconds(timeout));
    return true;
  }
  void synchronize() override { wait(kNoTimeout); }
  void blockCurrentStream() override { wait(kNoTimeout); }
  bool isCompleted() override {
    py::gil_scoped_acquire gil;
    return impl_.call("is_completed").cast<bool>();
  }
  bool isSuccess() const override { return exception() == nullptr; }
  std::exception_ptr exception() const override {
    py::gil_scoped_acquire gil;
    const py::object error = impl_.call("exception");
    if (error.is_none()) return nullptr;
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
    try {
      throw PythonError::current();
    } catch (...) {
      return std::current_exception();
    }
  }
  int sourceRank() const override {
    py::gil_scoped_acquire gil;
    return impl_.call("source_rank").cast<int>();
  }
  Tensors result() override {
    py::gil_scoped_acquire gil;
    return impl_.call("result").cast<Tensors>();
  }
  // Ready as soon as the results can be used by ops that are recorded from now on.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    const WithoutGil no_gil;  // which is asked for under the mutex
    std::lock_guard<std::mutex> lock(future_mutex_);
    if (future_) return future_;
    {
      py::gil_scoped_acquire gil;
      impl_.call("prepare_future");
    }
    auto tensors = result();
    std::vector<c10::Device> devices;
    if (!tensors.empty()) devices.push_back(tensors[0].device());
    auto type = c10::ListType::create(c10::TensorType::get());
    future_ = c10::make_intrusive<c10::ivalue::Future>(std::move(type), std::move(devices));
    future_->markCompleted(c10::IValue(std::move(tensors)));
    return future_;
  }

 private:
  SharedObject impl_;
  std::mutex future_mutex_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

class PythonBackend final : public c10d::Backend {
 public:
  PythonBackend(int rank, int size, std::string name, double timeout, py::object object)
      : Backend(rank, size),
        name_(name),
        options_(
            c10::make_intrusive<Options>(
                std::move(name), std::chrono::milliseconds(static_cast<int64_t>(timeout * 1e3)))),
        impl_(std::move(object)) {}

  const std::string getBackendName() const override { return name_; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  bool supportsCoalescing() const override { return true; }
  bool supportsSplitting() const override { return true; }

  // Null on a rank of this group that is not among those of the new one.
  c10::intrusive_ptr<Backend> split(
      const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
      const c10::intrusive_ptr<Options>& options) override {
    py::gil_scoped_acquire gil;
    const py::object made =
        impl_.call("split", store, ranks, seconds(options->timeout), options->group_name);
    return made.is_none() ? nullptr : made.cast<c10::intrusive_ptr<Backend>>();
  }

  void startCoalescing() override {
    py::gil_scoped_acquire gil;
    impl_.call("start_coalescing");
  }
  WorkPtr endCoalescing() override { return work("end_coalescing"); }

  WorkPtr broadcast(Tensors& t, const c10d::BroadcastOptions& o) override {
    return work("broadcast", t, o.rootRank, o);
  }
  WorkPtr allreduce(Tensors& t, const c10d::AllreduceOptions& o) override {
    return work("all_reduce", t, o.reduceOp, o);
  }
  WorkPtr allreduce_coalesced(Tensors& t, const c10d::AllreduceCoalescedOptions& o) override {
    return work("all_reduce", t, o.reduceOp, o);
  }
  WorkPtr reduce(Tensors& t, const c10d::ReduceOptions& o) override {
    return work("reduce", t, o.reduceOp, o.rootRank, o);
  }
  WorkPtr allgather(TensorLists& out, Tensors& in, const c10d::AllgatherOptions& o) override {
    return work("all_gather", out, in, o);
  }
  WorkPtr allgather_coalesced(
      TensorLists& out, Tensors& in, const c10d::AllgatherOptions& o) override {
    // As gloo has it: a list for each rank, not for each input.
    TensorLists by_input(in.size());
    for (const auto& of_rank : out)
      for (size_t i = 0; i < in.size(); ++i) by_input[i].push_back(of_rank.at(i));
    return work("all_gather", by_input, in, o);
  }
  WorkPtr _allgather_base(
      at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions& o) override {
    return work("all_gather_into_tensor", Tensors{out}, Tensors{in}, o);
  }
  WorkPtr allgather_into_tensor_coalesced(
      Tensors& out, Tensors& in, const c10d::AllgatherOptions& o) override {
    return work("all_gather_into_tensor", out, in, o);
  }
  WorkPtr gather(TensorLists& out, Tensors& in, const c10d::GatherOptions& o) override {
    return work("gather", out, in, o.rootRank, o);
  }
  WorkPtr scatter(Tensors& out, TensorLists& in, const c10d::ScatterOptions& o) override {
    return work("scatter", out, in, o.rootRank, o);
  }
  WorkPtr reduce_scatter(
      Tensors& out, TensorLists& in, const c10d::ReduceScatterOptions& o) override {
    return work("reduce_scatter", out, in, o.reduceOp, o);
  }
  WorkPtr _reduce_scatter_base(
      at::Tensor& out, at::Tensor& in, const c10d::ReduceScatterOptions& o) override {
    return work("reduce_scatter_tensor", Tensors{out}, Tensors{in}, o.reduceOp, o);
  }
  WorkPtr reduce_scatter_tensor_coalesced(
      Tensors& out, Tensors& in, const c10d::ReduceScatterOptions& o) override {
    return work("reduce_scatter_tensor", out, in, o.reduceOp, o);
  }
  WorkPtr alltoall_base(
      at::Tensor& out, at::Tensor& in, std::vector<int64_t>& out_sizes,
      std::vector<int64_t>& in_sizes, const c10d::AllToAllOptions& o) override {
    return work("all_to_all_single", out, in, out_sizes, in_sizes, o);
  }
  WorkPtr alltoall(Tensors& out, Tensors& in, const c10d::AllToAllOptions& o) override {
    return work("all_to_all", out, in, o);
  }
  WorkPtr send(Tensors& t, int to, int tag) override { return work("send", t, to, tag); }
  WorkPtr recv(Tensors& t, int from, int tag) override { return work("recv", t, from, tag); }
  WorkPtr recvAnysource(Tensors& t, int tag) override { return work("recv", t, -1, tag); }
  WorkPtr barrier(const c10d::BarrierOptions& o) override { return work("barrier", o); }
  void monitoredBarrier(const c10d::BarrierOptions& o, bool wait_all) override {
    py::gil_scoped_acquire gil;
    impl_.call("monitored_barrier", argument(o), wait_all);
  }

  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override {
    py::gil_scoped_acquire gil;
    return impl_.call("sequence_number").cast<uint64_t>();
  }
  void setTimeout(std::chrono::milliseconds timeout) override {
    py::gil_scoped_acquire gil;
    options_->timeout = timeout;
    impl_.call("set_timeout", seconds(timeout));
  }
  void abort() override {
    py::gil_scoped_acquire gil;
    impl_.call("abort");
  }
  void shutdown() override {
    py::gil_scoped_acquire gil;
    impl_.call("shutdown");
  }

 private:
  template <typename... Args>
  WorkPtr work(const char* method, Args&&... args) const {
    py::gil_scoped_acquire gil;
    return c10::make_intrusive<PythonWork>(
        impl_.call(method, argument(std::forward<Args>(args))...));
  }

  std::string name_;
  c10::intrusive_ptr<Options> options_;
  SharedObject impl_;
};

c10::intrusive_ptr<c10d::Backend> make_backend(
    int rank, int size, const std::string& name, double timeout, py::object implementation) {
  return c10::make_intrusive<PythonBackend>(rank, size, name, timeout, std::move(implementation));
}

// Times of a step that DistributedDataParallel logs, as of the CPU: when the host issued what they are of.
// Without a timer every rank prints a warning.
class HostTimer final : public c10d::Timer {
 public:
  explicit HostTimer(c10::Device) {}

  std::optional<int64_t> measureDifference(Event start, Event end) override {
    const auto from = getTimestamp(start), to = getTimestamp(end);
    // One of an earlier step has not been recorded in this one.
    return from && to && *from <= *to ? std::optional(*to - *from) : std::nullopt;
  }
};

}  // namespace

}  // namespace tpu

namespace c10d {
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::DeviceType::PrivateUse1, tpu::HostTimer)
}  // namespace c10d

namespace tpu {

void register_process_group(py::module_& m) { m.def("make_backend", &make_backend); }

}  // namespace tpu
