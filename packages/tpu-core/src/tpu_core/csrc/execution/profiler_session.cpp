// Kineto's side of the profiler: hands the rows of `tpu_core.profiler` to torch.profiler.
#include "execution/profiler.h"
#include "runtime/python.h"
#include "runtime/torch_compat.h"

#ifndef USE_KINETO
#define USE_KINETO  // as PyTorch's own builds have it
#endif
#include <IActivityProfiler.h>
#include <libkineto.h>
#include <output_base.h>

#if __has_include(<torch/csrc/profiler/standalone/privateuse1_profiler.h>)
#include <torch/csrc/profiler/standalone/privateuse1_profiler.h>
#define TPU_HAS_PROFILER_REGISTRY 1
#endif

#include <array>
#include <memory>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace tpu {
namespace {

using libkineto::ActivityType;

// By `tpu_core.profiler.rows.Kind`. PRIVATEUSE1_RUNTIME is 23 in torch 2.11, and 24 from 2.13 on.
constexpr std::array kRowTypes{
    ActivityType::GPU_USER_ANNOTATION, ActivityType::GPU_MEMCPY, ActivityType::CONCURRENT_KERNEL,
    ActivityType::PRIVATEUSE1_RUNTIME};

const std::set<ActivityType>& row_types() {
  static const std::set<ActivityType> types(kRowTypes.begin(), kRowTypes.end());
  return types;
}

py::module_ rows_module() { return py::module_::import("tpu_core.profiler.collection"); }

// Calls a function of Python's; an error becomes a row of the profile's log, never one of the program's.
template <typename F>
void guarded(std::vector<std::string>& errors, F f) {
  py::gil_scoped_acquire gil;
  try {
    f();
  } catch (py::error_already_set& error) {
    errors.emplace_back(error.what());
    py::module_::import("warnings")
        .attr("warn")(std::string("torch.profiler has no rows of device 'tpu': ") + error.what());
  }
}

class Session final : public libkineto::IActivityProfilerSession {
 public:
  ~Session() override {
    if (is_running_) stop();
  }

  void start() override {
    guarded(errors_, [] {
      begin_profile();
      rows_module().attr("start")();
    });
    is_running_ = true;
    status_ = libkineto::TraceStatus::RECORDING;
  }

  void stop() override {
    if (!std::exchange(is_running_, false)) return;
    guarded(errors_, [] { rows_module().attr("stop")(); });
    end_profile();
    status_ = libkineto::TraceStatus::PROCESSING;
  }

  std::vector<std::string> errors() override { return errors_; }

  void processTrace(libkineto::ActivityLogger& logger) override {
    processTrace(logger, [](int32_t) { return nullptr; }, 0, 0);
  }

  void processTrace(
      libkineto::ActivityLogger& logger, libkineto::getLinkedActivityCallback linked, int64_t start,
      int64_t end) override {
    buffer_ = std::make_unique<libkineto::CpuTraceBuffer>();
    buffer_->span = libkineto::TraceSpan(start, end, "tpu");
    buffer_->gpuOpCount = 0;
    guarded(errors_, [&] {
      py::dict rows = rows_module().attr("rows")();
      for (auto d : rows["devices"]) devices_.push_back(d.cast<std::pair<int64_t, std::string>>());
      for (const auto& [id, name] : devices_)
        logger.handleDeviceInfo({id, libkineto::kExceedMaxPid + id, name, name}, start);
      for (auto r : rows["resources"]) {
        auto [device, id, name] = r.cast<std::tuple<int64_t, int64_t, std::string>>();
        logger.handleResourceInfo({id, id, device, name}, start);
      }
      for (auto r : rows["rows"]) add(r.cast<py::tuple>(), linked);
    });
    for (const auto& activity : buffer_->activities) activity->log(logger);
  }

  // Asked for last, so that it stands against the name that Kineto gives to each GPU.
  std::unique_ptr<libkineto::DeviceInfo> getDeviceInfo() override {
    if (devices_.empty()) return {};
    const auto& [id, name] = devices_.front();
    return std::make_unique<libkineto::DeviceInfo>(
        libkineto::DeviceInfo{id, libkineto::kExceedMaxPid + id, name, name});
  }
  std::vector<libkineto::ResourceInfo> getResourceInfos() override { return {}; }
  std::unique_ptr<libkineto::CpuTraceBuffer> getTraceBuffer() override {
    return std::move(buffer_);
  }

  void pushCorrelationId(uint64_t id) override { push_correlation(id); }
  void popCorrelationId() override { pop_correlation(); }

 private:
  // (kind, name, start, end, device, resource, correlation, flow, starts the flow, [(key, value)]), texts as in JSON. A row of
  // the host's that has a correlation lies at the start of the row that it is correlated with.
  void add(const py::tuple& r, const libkineto::getLinkedActivityCallback& linked) {
    const auto type = kRowTypes.at(r[0].cast<size_t>());
    const auto correlation = r[6].cast<int64_t>();
    const auto* host = correlation ? linked(static_cast<int32_t>(correlation)) : nullptr;
    const bool is_marker = type == ActivityType::PRIVATEUSE1_RUNTIME && correlation;
    if (is_marker && !host) return;
    buffer_->emplace_activity(buffer_->span, type, r[1].cast<std::string>());
    auto& a = *buffer_->activities.back();
    a.startTime = r[2].cast<int64_t>();
    a.endTime = r[3].cast<int64_t>();
    a.device = r[4].cast<int32_t>();
    a.resource = r[5].cast<int32_t>();
    a.id = static_cast<int32_t>(correlation);
    a.linked = host;
    if (is_marker) {
      a.startTime = a.endTime = host->timestamp();
      a.device = static_cast<int32_t>(host->deviceId());
      a.resource = static_cast<int32_t>(host->resourceId());
    }
    if (const auto flow = r[7].cast<uint32_t>()) {
      a.flow.id = flow;
      a.flow.type = libkineto::kLinkAsyncCpuGpu;
      a.flow.start = r[8].cast<bool>();
    }
    for (auto m : r[9]) {
      auto [key, value] = m.cast<std::pair<std::string, std::string>>();
      a.addMetadataQuoted(key, value);  // `addMetadata` needs a library fmt
    }
  }

  bool is_running_ = false;
  std::vector<std::pair<int64_t, std::string>> devices_;
  std::vector<std::string> errors_;
  std::unique_ptr<libkineto::CpuTraceBuffer> buffer_;
};

class Profiler final : public libkineto::IActivityProfiler {
 public:
  const std::string& name() const override {
    static const std::string name = "tpu";
    return name;
  }
  const std::set<ActivityType>& availableActivities() const override { return row_types(); }
  std::unique_ptr<libkineto::IActivityProfilerSession> configure(
      const std::set<ActivityType>& types, const libkineto::Config&) override {
    // Of the host alone: nothing is recorded.
    if (!types.count(ActivityType::CONCURRENT_KERNEL)) return {};
    return std::make_unique<Session>();
  }
  std::unique_ptr<libkineto::IActivityProfilerSession> configure(
      int64_t, int64_t, const std::set<ActivityType>& types, const libkineto::Config& c) override {
    return configure(types, c);
  }
};

std::unique_ptr<libkineto::IActivityProfiler> make_profiler() {
  return std::make_unique<Profiler>();
}

}  // namespace

void register_profiler(py::module_& m) {
#ifdef TPU_HAS_PROFILER_REGISTRY
  torch::profiler::impl::PrivateUse1ProfilerRegistry::instance().registerFactory(make_profiler);
#else
  libkineto::api().registerProfilerFactory(make_profiler);  // torch 2.11
#endif
  m.def("take_profile", &take_profile);
}

}  // namespace tpu
