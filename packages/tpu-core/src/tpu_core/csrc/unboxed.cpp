// Kernels of the commonest forms of schema, which take the arguments as they are.
//
// A boxed call costs a stack and, for each tensor that Python holds, a new reference and its end, for
// which PyTorch takes the GIL: a quarter of a microsecond in all, as much as hashing the call.
#include "record.h"

#include <array>
#include <unordered_map>
#include <utility>

namespace tpu {
namespace {

// An argument of a kernel as the recorder reads it; tensors are borrowed from the caller.
template <typename T>
c10::IValue argument(const T& value) {
  return value;
}
c10::IValue argument(const at::Tensor& t) {
  return c10::MaybeOwnedTraits<at::Tensor>::createBorrow(t);
}

template <size_t n>
struct Arguments {
  std::array<c10::IValue, n> values;

  ~Arguments() {
    for (auto& v : values)
      if (v.isTensor()) c10::MaybeOwnedTraits<c10::IValue>::destroyBorrow(v);
  }
};

template <typename Result, typename... Args>
class Unboxed {
 public:
  explicit Unboxed(const c10::OperatorHandle& op) : op_(op) {}

  Result operator()(Args... args) {
    if (!description_) description_ = describe_op(op_);
    const Arguments<sizeof...(Args)> arguments{{argument(args)...}};
    if (has_lazy_bits(arguments.values.data(), sizeof...(Args))) {
      torch::jit::Stack stack(arguments.values.begin(), arguments.values.end());
      record_resolved(*description_, op_, &stack);
      if constexpr (std::is_reference_v<Result>) return std::get<0>(std::tie(args...));
      else return std::move(stack[0]).toTensor();
    }
    auto recorded = record_call(*description_, arguments.values.data());
    if (recorded.results) {
      if constexpr (!std::is_reference_v<Result>) return std::move((*recorded.results)[0]).toTensor();
    } else if (recorded.handler) {
      torch::jit::Stack stack(arguments.values.begin(), arguments.values.end());
      call_python(recorded.handler, *description_, op_, &stack);
      if constexpr (!std::is_reference_v<Result>) return std::move(stack[0]).toTensor();
    } else if constexpr (!std::is_reference_v<Result>) {
      return std::move(recorded.fresh[0]);
    }
    if constexpr (std::is_reference_v<Result>) return std::get<0>(std::tie(args...));
  }

 private:
  c10::OperatorHandle op_;
  OpDescription* description_ = nullptr;
};

template <typename Result, typename... Args>
torch::CppFunction unboxed(const c10::OperatorHandle& op) {
  return torch::CppFunction(Unboxed<Result, Args...>(op));
}

using T = const at::Tensor&;
using Written = at::Tensor&;
using Number = const at::Scalar&;
using MaybeNumber = const std::optional<at::Scalar>&;
using MaybeTensor = const std::optional<at::Tensor>&;

const std::unordered_map<std::string, torch::CppFunction (*)(const c10::OperatorHandle&)> kForms{
    {"Tensor -> Tensor", &unboxed<at::Tensor, T>},
    {"Tensor, Tensor -> Tensor", &unboxed<at::Tensor, T, T>},
    {"Tensor, Tensor, Tensor -> Tensor", &unboxed<at::Tensor, T, T, T>},
    {"Tensor, Tensor, Scalar -> Tensor", &unboxed<at::Tensor, T, T, Number>},
    {"Tensor, Scalar -> Tensor", &unboxed<at::Tensor, T, Number>},
    {"Tensor, Scalar? -> Tensor", &unboxed<at::Tensor, T, MaybeNumber>},
    {"Tensor, Scalar?, Scalar? -> Tensor", &unboxed<at::Tensor, T, MaybeNumber, MaybeNumber>},
    {"Tensor, Tensor, Tensor? -> Tensor", &unboxed<at::Tensor, T, T, MaybeTensor>},
    {"Tensor, Tensor, Tensor, Scalar, Scalar -> Tensor",
     &unboxed<at::Tensor, T, T, T, Number, Number>},
    {"Tensor, int, bool -> Tensor", &unboxed<at::Tensor, T, int64_t, bool>},
    {"Tensor! -> Tensor!", &unboxed<Written, Written>},
    {"Tensor!, Tensor -> Tensor!", &unboxed<Written, Written, T>},
    {"Tensor!, Scalar -> Tensor!", &unboxed<Written, Written, Number>},
    {"Tensor!, Tensor, Scalar -> Tensor!", &unboxed<Written, Written, T, Number>},
};

// "Tensor!, Tensor, Scalar -> Tensor!"; a view's "Tensor(a)" is no form of ours.
std::string form_of(const c10::FunctionSchema& schema) {
  auto text = [](const std::vector<c10::Argument>& arguments) {
    std::string s;
    for (const auto& a : arguments) {
      if (!s.empty()) s += ", ";
      s += a.type()->str();
      if (const auto* alias = a.alias_info()) s += alias->isWrite() ? "!" : "(a)";
    }
    return s;
  };
  return text(schema.arguments()) + " -> " + text(schema.returns());
}

}  // namespace

torch::CppFunction kernel_of(const c10::OperatorHandle& op) {
  const auto form = kForms.find(form_of(op.schema()));
  if (form == kForms.end())
    return torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Recorder>());
  return form->second(op);
}

}  // namespace tpu
