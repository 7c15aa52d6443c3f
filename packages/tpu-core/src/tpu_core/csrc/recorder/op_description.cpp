// What the recorder knows of each overload, asked of Python on its first call.
#include "recorder/record.h"
#include "runtime/locks.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>

namespace tpu {
namespace {

using Descriptions = std::unordered_map<std::string, std::unique_ptr<OpDescription>>;
// Never destroyed, as it holds Python objects: static destructors run after the interpreter's end.
auto& g_descriptions = *new Guarded<Descriptions>;

// Descriptions asked for lately, by the address of the overload's name, of which another may take the place:
// the kernel of many overloads asks in each call, and the text of a name takes half a microsecond.
constexpr size_t kLately = 256;
std::array<std::atomic<OpDescription*>, kLately> g_lately{};

bool has_name(const OpDescription& d, const c10::OperatorName& n) {
  const std::string_view full = d.name, overload = n.overload_name;
  if (full.compare(0, n.name.size(), n.name) != 0) return false;
  const auto rest = full.substr(n.name.size());
  return overload.empty() ? rest.empty()
                          : !rest.empty() && rest[0] == '.' && rest.substr(1) == overload;
}

OpDescription* described(const c10::OperatorHandle& op) {
  const auto name = c10::toString(op.operator_name());
  {
    const auto known = g_descriptions.lock();
    const auto it = known->find(name);
    if (it != known->end()) return it->second.get();
  }
  ensure_initialized();
  py::gil_scoped_acquire gil;
  py::dict info = callback("describe")(op.operator_name().name, op.operator_name().overload_name);
  auto d = std::make_unique<OpDescription>(op);
  d->name = name;
  d->is_foreign = name.rfind("aten::", 0) != 0;
  Hasher h;
  h.add_bytes(name);
  d->hash = h.digest();
  for (auto p : info["policies"]) d->policies.push_back(static_cast<Policy>(p.cast<int>()));
  d->takes_lists =
      std::find(d->policies.begin(), d->policies.end(), Policy::TensorList) != d->policies.end();
  for (auto p : info["compiled_in"]) d->compiled_in.push_back(p.cast<bool>());
  for (auto p : info["steady"]) d->steady.push_back(p.cast<bool>());
  for (auto p : info["writes"]) d->writes.push_back(p.cast<bool>());
  d->write_only = info["write_only"].cast<bool>();
  for (auto r : info["returns"]) d->returns.push_back(r.cast<int>());
  d->random = info["random"].cast<bool>();
  d->chance = info["chance"].cast<int>();
  d->scalar_operands = info["scalar_operands"].cast<bool>();
  d->host_operands = info["host_operands"].cast<bool>();
  d->jax_settings = info["jax_settings"].cast<bool>();
  d->precision = info["precision"].cast<bool>();
  d->wide_numbers = info["wide_numbers"].cast<bool>();
  d->divides = info["divides"].cast<bool>();
  d->window = info["window"].cast<bool>();
  d->fills = info["fills"].cast<bool>();
  d->checks = info["checks"].cast<bool>();
  for (auto b : info["bounds"]) {
    auto t = b.cast<py::tuple>();
    d->bounds.push_back(
        {t[0].cast<size_t>(), t[1].cast<double>(), t[2].cast<double>(), t[3].cast<int>()});
  }
  d->python = info["op"];
  d->handler = info["handler"];
  // Where another thread was first, `d` is destroyed without the lock, but with the GIL.
  return g_descriptions.lock()->try_emplace(name, std::move(d)).first->second.get();
}

}  // namespace

OpDescription* describe_op(const c10::OperatorHandle& op) {
  const auto& name = op.operator_name();
  auto& lately = g_lately[(reinterpret_cast<uintptr_t>(&name) >> 6) % kLately];
  auto* d = lately.load(std::memory_order_acquire);
  if (!d || !has_name(*d, name)) {
    d = described(op);
    lately.store(d, std::memory_order_release);
  }
  return d;
}

}  // namespace tpu
