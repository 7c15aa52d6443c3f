// Kernels of the commonest forms of schema, which take the arguments as they are.
//
// A boxed call costs a stack and, for each tensor that Python holds, a new reference and its end, for
// which PyTorch takes the GIL: a quarter of a microsecond in all, as much as hashing the call.
#include "recorder/record.h"

#include "execution/direct_call.h"
#include "recorder/foreach_devices.h"
#include "recorder/torchscript.h"

#include <array>
#include <tuple>
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
  explicit Unboxed(const c10::OperatorHandle& op) : op_(op), kernel_(op.typed<Result(Args...)>()) {}

  Result operator()(Args... args) {
    const auto& d = description_.of(op_);
    const BorrowedArguments<Args...> arguments(args...);
    {
      DirectCall call(d, arguments.data());
      if constexpr (std::is_reference_v<Result>) {
        SmallResults none;
        if (call && call.run([&] {
              if (!call.compute_small(arguments.data(), none)) call_kernel(call, args...);
            }))
          return std::get<0>(std::tie(args...));
      } else {
        SmallResults made;
        if (call && call.run([&] {
              if (!call.compute_small(arguments.data(), made))
                made.push_back(call_kernel(call, args...));
            }))
          return call.result(std::move(made[0]));
      }
    }
    if (has_lazy_bits(arguments.data(), sizeof...(Args))) {
      auto stack = arguments.stack();
      record_resolved(d, op_, &stack);
      if constexpr (std::is_reference_v<Result>) return std::get<0>(std::tie(args...));
      else return std::move(stack[0]).toTensor();
    }
    auto recorded = record_call(d, arguments.data());
    if (recorded.results) {
      if constexpr (!std::is_reference_v<Result>)
        return std::move((*recorded.results)[0]).toTensor();
    } else if (recorded.handler) {
      auto stack = arguments.stack();
      call_python(recorded.handler, d, op_, &stack);
      if constexpr (!std::is_reference_v<Result>) return std::move(stack[0]).toTensor();
    } else if constexpr (!std::is_reference_v<Result>) {
      return std::move(recorded.fresh[0]);
    }
    if constexpr (std::is_reference_v<Result>) return std::get<0>(std::tie(args...));
  }

 private:
  // An argument of the CPU's kernel.
  template <typename T>
  static decltype(auto) on_host(const T& v, DirectCall& call, size_t& next) {
    if constexpr (std::is_same_v<T, at::Tensor>) {
      const bool is_here = v.defined() && v.is_privateuseone();
      return is_here ? call.operand(next++) : const_cast<at::Tensor&>(v);
    } else if constexpr (std::is_same_v<T, std::optional<at::Tensor>>) {
      return v ? std::optional<at::Tensor>(on_host(*v, call, next)) : std::nullopt;
    } else {
      return static_cast<const T&>(v);
    }
  }

  // NOLINTNEXTLINE(performance-unnecessary-value-param): the types of the schema.
  Result call_kernel(DirectCall& call, Args... args) {
    size_t next = 0;
    // Braces: the first argument first.
    std::tuple<decltype(on_host(args, call, next))...> given{on_host(args, call, next)...};
    return std::apply(
        [&](auto&... a) -> Result {
          return kernel_.redispatch(c10::DispatchKeySet(c10::DispatchKey::CPU), a...);
        },
        given);
  }

  c10::OperatorHandle op_;
  c10::TypedOperatorHandle<Result(Args...)> kernel_;
  KnownDescription description_;
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
using MaybeInt = std::optional<int64_t>;
using MaybeDims = at::OptionalIntArrayRef;
using MaybeDtype = std::optional<at::ScalarType>;

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
    {"Tensor, Tensor, Tensor, Scalar -> Tensor", &unboxed<at::Tensor, T, T, T, Number>},
    {"Tensor, Scalar, Scalar -> Tensor", &unboxed<at::Tensor, T, Number, Number>},
    {"Tensor, int, bool -> Tensor", &unboxed<at::Tensor, T, int64_t, bool>},
    {"Tensor, int?, bool -> Tensor", &unboxed<at::Tensor, T, MaybeInt, bool>},
    {"Tensor, int[], bool -> Tensor", &unboxed<at::Tensor, T, at::IntArrayRef, bool>},
    {"Tensor, ScalarType? -> Tensor", &unboxed<at::Tensor, T, MaybeDtype>},
    {"Tensor, int, ScalarType? -> Tensor", &unboxed<at::Tensor, T, int64_t, MaybeDtype>},
    {"Tensor, int[]?, bool, ScalarType? -> Tensor",
     &unboxed<at::Tensor, T, MaybeDims, bool, MaybeDtype>},
    {"Tensor, int[]?, Scalar?, bool -> Tensor",
     &unboxed<at::Tensor, T, MaybeDims, MaybeNumber, bool>},
    {"Tensor, Scalar, int[]?, bool, ScalarType? -> Tensor",
     &unboxed<at::Tensor, T, Number, MaybeDims, bool, MaybeDtype>},
    {"Tensor, int, Tensor -> Tensor", &unboxed<at::Tensor, T, int64_t, T>},
    {"Tensor, int, Tensor, bool -> Tensor", &unboxed<at::Tensor, T, int64_t, T, bool>},
    {"Tensor, Tensor, int -> Tensor", &unboxed<at::Tensor, T, T, int64_t>},
    {"Tensor, Tensor, Tensor, int -> Tensor", &unboxed<at::Tensor, T, T, T, int64_t>},
    {"Tensor, Tensor, int, ScalarType -> Tensor",
     &unboxed<at::Tensor, T, T, int64_t, at::ScalarType>},
    {"Tensor, Tensor, SymInt, bool, bool -> Tensor",
     &unboxed<at::Tensor, T, T, c10::SymInt, bool, bool>},
    {"Tensor, str -> Tensor", &unboxed<at::Tensor, T, std::string_view>},
    {"Tensor, Tensor, str -> Tensor", &unboxed<at::Tensor, T, T, std::string_view>},
    {"Tensor! -> Tensor!", &unboxed<Written, Written>},
    {"Tensor!, Tensor -> Tensor!", &unboxed<Written, Written, T>},
    {"Tensor!, Scalar -> Tensor!", &unboxed<Written, Written, Number>},
    {"Tensor!, Scalar?, Scalar? -> Tensor!", &unboxed<Written, Written, MaybeNumber, MaybeNumber>},
    {"Tensor!, Tensor, Scalar -> Tensor!", &unboxed<Written, Written, T, Number>},
    {"Tensor!, Tensor, Tensor, Scalar -> Tensor!", &unboxed<Written, Written, T, T, Number>},
    {"Tensor!, int, Tensor, Tensor -> Tensor!", &unboxed<Written, Written, int64_t, T, T>},
    {"Tensor!, int, Tensor, Tensor, Scalar -> Tensor!",
     &unboxed<Written, Written, int64_t, T, T, Number>},
};

// "Tensor!, Tensor, Scalar -> Tensor!"; a view's "Tensor(a)" is no form of ours.
std::string form_of(const c10::FunctionSchema& schema) {
  auto text = [](const std::vector<c10::Argument>& arguments) {
    std::string s;
    for (const auto& a : arguments) {
      if (!s.empty()) s += ", ";
      s += a.real_type()->str();
      if (const auto* alias = a.alias_info()) s += alias->isWrite() ? "!" : "(a)";
    }
    return s;
  };
  return text(schema.arguments()) + " -> " + text(schema.returns());
}

}  // namespace

void record_copy(const at::Tensor& self, const at::Tensor& src, bool non_blocking) {
  static Unboxed<Written, Written, T, bool> kernel(
      c10::Dispatcher::singleton().findSchemaOrThrow("aten::copy_", ""));
  kernel(const_cast<at::Tensor&>(self), src, non_blocking);
}

torch::CppFunction kernel_of(const c10::OperatorHandle& op) {
  if (auto kernel = foreach_kernel_of(op)) return std::move(*kernel);
  if (auto kernel = convolution_kernel_of(op)) return std::move(*kernel);
  const auto form = kForms.find(form_of(op.schema()));
  if (form == kForms.end())
    return torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Recorder>());
  return form->second(op);
}

}  // namespace tpu
