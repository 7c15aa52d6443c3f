#include "bindings/enums.h"

#include "execution/host_kernels.h"
#include "recorder/call.h"
#include "recorder/checks.h"
#include "recorder/record.h"
#include "recorder/trace.h"
#include "values/memory_history.h"

#include <initializer_list>
#include <utility>

namespace tpu {
namespace {

template <typename Enum>
py::dict numbers_of(std::initializer_list<std::pair<const char*, Enum>> members) {
  py::dict numbers;
  for (const auto& [name, member] : members) numbers[name] = static_cast<int>(member);
  return numbers;
}

}  // namespace

void register_enums(py::module_& m) {
  using Kind = Signature::Kind;
  py::dict all;
  all["Argument"] = numbers_of<Policy>(
      {{"TENSOR", Policy::Tensor},
       {"TENSOR_LIST", Policy::TensorList},
       {"NUMBER", Policy::Number},
       {"NUMBER_LIST", Policy::NumberList},
       {"STATIC", Policy::Static},
       {"DROP", Policy::Drop},
       {"GENERATOR", Policy::Generator},
       {"INTEGERS", Policy::Integers}});
  all["Signature"] = numbers_of<Kind>(
      {{"RECORD", Kind::Record}, {"PYTHON", Kind::Python}, {"RESIZE", Kind::Resize}});
  all["Access"] = numbers_of<Form>(
      {{"WHOLE", Form::Whole}, {"SLICE", Form::Slice}, {"GENERAL", Form::General}});
  all["Pack"] = numbers_of<Pack>(
      {{"F32", Pack::F32}, {"F64", Pack::F64}, {"I32", Pack::I32}, {"I64", Pack::I64}});
  all["Tiers"] = numbers_of<Tiers>(
      {{"compiled", Tiers::Compiled}, {"auto", Tiers::Auto}, {"host", Tiers::Host}});
  all["MemoryEvent"] = numbers_of<MemoryEvent>(
      {{"ALLOCATION", MemoryEvent::Allocation},
       {"FREE", MemoryEvent::Free},
       {"DONATION", MemoryEvent::Donation},
       {"TEMPORARIES", MemoryEvent::Temporaries},
       {"TEMPORARIES_END", MemoryEvent::TemporariesEnd},
       {"OUT_OF_MEMORY", MemoryEvent::OutOfMemory},
       {"SNAPSHOT", MemoryEvent::Snapshot}});
  all["Word"] = numbers_of<int>({{"NODE_SHIFT", kNodeShift}});
  m.attr("ENUMS") = all;
}

}  // namespace tpu
