#include "execution/profiler.h"

#include <c10/util/ApproximateClock.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

namespace tpu {

std::atomic<bool> g_profiling{false};

namespace {

struct HostOp {
  std::string name;
  Line line;
  int64_t start, end;
  uint64_t correlation, thread;
  int16_t device;
};

struct Transfer {
  bool is_to_device;
  int64_t bytes, start, end;
  uint64_t correlation;
  int16_t device;
};

struct ProfiledNode {
  const Signature* signature;  // lives as long as the process
  Line line;
  uint64_t correlation;
};

struct LaunchEvent {
  py::object info;
  std::string cut;
  int64_t start, end;
  uint64_t correlation, thread;
  int16_t device;
  std::vector<ProfiledNode> nodes;
};

struct HostEvents {
  std::vector<HostOp> ops;
  std::vector<Transfer> transfers;
};
auto& g_events = *new Guarded<HostEvents>;
// The GIL's. Never destroyed: static destructors run after the interpreter's end.
auto& g_launches = *new std::vector<LaunchEvent>;
uint64_t g_profile = 0;
thread_local std::vector<uint64_t> t_correlations;

uint64_t system_thread() {
  thread_local const auto id = static_cast<uint64_t>(syscall(SYS_gettid));
  return id;
}

}  // namespace

int64_t profiler_time() { return c10::getTime(); }

uint64_t current_correlation() { return t_correlations.empty() ? 0 : t_correlations.back(); }
void push_correlation(uint64_t id) { t_correlations.push_back(id); }
void pop_correlation() {
  // A profile may begin inside a row.
  if (!t_correlations.empty()) t_correlations.pop_back();
}

void note_host_op(const std::string& name, const Line& line, int16_t device, int64_t start) {
  const int64_t end = profiler_time();
  g_events.lock()->ops.push_back(
      {name, line, start, end, current_correlation(), system_thread(), device});
}

void note_transfer(bool is_to_device, int64_t bytes, int16_t device, int64_t start) {
  if (!start || !is_profiling()) return;
  const int64_t end = profiler_time();
  g_events.lock()->transfers.push_back(
      {is_to_device, bytes, start, end, current_correlation(), device});
}

void note_recorded(Segment& s) {
  if (!is_profiling()) return;
  s.correlations.resize(s.nodes.size(), 0);
  s.correlations.back() = current_correlation();
}

Launch::Launch(const Segment& s, py::handle info) {
  if (!is_profiling()) return;
  LaunchEvent e{
      py::reinterpret_borrow<py::object>(info),
      s.cut,
      0,
      0,
      current_correlation(),
      system_thread(),
      s.device,
      {}};
  e.nodes.reserve(s.nodes.size());
  for (size_t i = 0; i < s.nodes.size(); ++i)
    e.nodes.push_back(
        {s.nodes[i].signature, s.nodes[i].line, i < s.correlations.size() ? s.correlations[i] : 0});
  e.start = e.end = profiler_time();
  index_ = static_cast<int64_t>(g_launches.size());
  profile_ = g_profile;
  g_launches.push_back(std::move(e));
}

Launch::~Launch() {
  if (index_ >= 0 && profile_ == g_profile && index_ < static_cast<int64_t>(g_launches.size()))
    g_launches[static_cast<size_t>(index_)].end = profiler_time();
}

void begin_profile() {
  take_profile();
  g_profiling = true;
}

void end_profile() { g_profiling = false; }

py::dict take_profile() {
  std::map<std::pair<PyCodeObject*, int>, py::object> lines;
  auto line_of = [&](const Line& line) {
    auto& text = lines[{line.code, line.offset}];
    if (!text) text = py::cast(describe(line));
    return text;
  };
  auto [host_ops, transfers] = std::exchange(*g_events.lock(), {});
  auto launches = std::exchange(g_launches, {});
  ++g_profile;
  py::list ops, programs, copies;
  for (const auto& e : transfers)
    copies.append(py::make_tuple(e.is_to_device, e.bytes, e.start, e.end, e.device, e.correlation));
  for (const auto& e : host_ops)
    ops.append(
        py::make_tuple(e.name, line_of(e.line), e.start, e.end, e.device, e.thread, e.correlation));
  for (const auto& e : launches) {
    py::list nodes;
    for (const auto& n : e.nodes) {
      py::object plan = n.signature->plan ? n.signature->plan : py::none();
      nodes.append(py::make_tuple(plan, line_of(n.line), n.correlation));
    }
    programs.append(
        py::make_tuple(e.info, e.cut, e.start, e.end, e.device, e.thread, e.correlation, nodes));
  }
  py::dict d;
  d["host_ops"] = ops;
  d["launches"] = programs;
  d["transfers"] = copies;
  return d;
}

}  // namespace tpu
