// Kernels of the commonest forms of schema, which take the arguments as they are.
//
// A boxed call costs a stack and, for each tensor that Python holds, a new reference and its end, for
// which PyTorch takes the GIL: a quarter of a microsecond in all, as much as hashing the call.
#include "recorder/record.h"

#include <array>
#include <type_traits>
#include <unordered_map>
#include <utility>

namespace tpu {
namespace {

// The arguments of a kernel as the recorder reads them. Tensors are borrowed from the caller: they are made
// without counting a reference, and let go of without ending one. Both ends are in this class, as a tensor
// that is counted on one side alone leaks, or is freed under the caller.
template <typename... Args>
class BorrowedArguments {
 public:
  explicit BorrowedArguments(const std::remove_reference_t<Args>&... args)
      : values_{borrow(args)...} {}
  BorrowedArguments(const BorrowedArguments&) = delete;
  BorrowedArguments& operator=(const BorrowedArguments&) = delete;
  ~BorrowedArguments() {
    for (auto& v : values_)
      if (v.isTensor()) c10::MaybeOwnedTraits<c10::IValue>::destroyBorrow(v);
  }

  const c10::IValue* data() const { return values_.data(); }
  torch::jit::Stack stack() const { return torch::jit::Stack(values_.begin(), values_.end()); }

 private:
  template <typename T>
  static c10::IValue borrow(const T& value) {
    if constexpr (std::is_same_v<T, at::Tensor>) {
      return c10::MaybeOwnedTraits<at::Tensor>::createBorrow(value);
    } else if constexpr (std::is_same_v<T, std::optional<at::Tensor>>) {
      return value ? c10::IValue(c10::MaybeOwnedTraits<at::Tensor>::createBorrow(*value))
                   : c10::IValue();
    } else {
      static_assert(!std::is_constructible_v<at::Tensor, T>, "tensors are borrowed");
      return value;
    }
  }

  std::array<c10::IValue, sizeof...(Args)> values_;
};

template <typename Result, typename... Args>
class Unboxed {
 public:
  explicit Unboxed(const c10::OperatorHandle& op) : op_(op) {}

  Result operator()(Args... args) {
    if (!description_) description_ = describe_op(op_);
    const BorrowedArguments<Args...> arguments(args...);
    if (has_lazy_bits(arguments.data(), sizeof...(Args))) {
      auto stack = arguments.stack();
      record_resolved(*description_, op_, &stack);
      if constexpr (std::is_reference_v<Result>) return std::get<0>(std::tie(args...));
      else return std::move(stack[0]).toTensor();
    }
    auto recorded = record_call(*description_, arguments.data());
    if (recorded.results) {
      if constexpr (!std::is_reference_v<Result>)
        return std::move((*recorded.results)[0]).toTensor();
    } else if (recorded.handler) {
      auto stack = arguments.stack();
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
