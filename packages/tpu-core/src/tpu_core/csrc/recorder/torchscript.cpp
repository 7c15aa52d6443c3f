#include "recorder/torchscript.h"

#include "recorder/record.h"

#include <ATen/Context.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <utility>

namespace tpu {
namespace {

namespace tracer = torch::jit::tracer;

// ATen's kernel of `convolution` calls `_convolution`, whose node stands in traces for both.
class Convolution final : public c10::OperatorKernel {
 public:
  void operator()(
      const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    if (C10_LIKELY(!tracer::isTracing())) return recorder_(op, keys, stack);
    static const auto traced =
        c10::Dispatcher::singleton().findSchemaOrThrow("aten::_convolution", "");
    const auto& context = at::globalContext();
    for (const bool flag :
         {context.benchmarkCuDNN(), context.deterministicCuDNN(), context.userEnabledCuDNN(),
          context.allowTF32CuDNN()})
      stack->emplace_back(flag);
    traced.callBoxed(stack);
  }

 private:
  Recorder recorder_;
};

// Ops whose tracer kernel is written by hand run with the key excluded, and the state must not change so.
void set_tracing_state(std::shared_ptr<tracer::TracingState> state) {
  constexpr auto key = c10::DispatchKey::Tracer;
  const bool is_excluded = c10::impl::tls_is_dispatch_key_excluded(key);
  c10::impl::tls_set_dispatch_key_excluded(key, false);
  tracer::setTracingState(std::move(state));
  c10::impl::tls_set_dispatch_key_excluded(key, is_excluded);
}

}  // namespace

NotTraced::NotTraced() : state_(tracer::getTracingState()) {
  if (state_) set_tracing_state(nullptr);
}

NotTraced::~NotTraced() {
  if (state_) set_tracing_state(std::move(state_));
}

void give_lists_their_types(const OpDescription& d, torch::jit::Stack& stack) {
  const size_t first = stack.size() - d.policies.size();
  for (size_t i = 0; i < d.policies.size(); ++i) {
    auto& v = stack[first + i];
    if (d.policies[i] != Policy::TensorList || !v.isList()) continue;
    if (v.isTensorList() || v.isOptionalTensorList()) continue;
    const auto type = d.op.schema().arguments()[i].type()->cast<c10::ListType>();
    const bool is_optional = type && type->getElementType()->kind() == c10::TypeKind::OptionalType;
    if (is_optional) {
      c10::List<std::optional<at::Tensor>> list;
      for (const c10::IValue& t : v.toListRef()) list.push_back(t.toOptional<at::Tensor>());
      v = std::move(list);
    } else {
      c10::List<at::Tensor> list;
      for (const c10::IValue& t : v.toListRef()) list.push_back(t.toTensor());
      v = std::move(list);
    }
  }
}

std::optional<torch::CppFunction> convolution_kernel_of(const c10::OperatorHandle& op) {
  if (op.operator_name().name != "aten::convolution" || !op.operator_name().overload_name.empty())
    return std::nullopt;
  return torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Convolution>());
}

}  // namespace tpu
