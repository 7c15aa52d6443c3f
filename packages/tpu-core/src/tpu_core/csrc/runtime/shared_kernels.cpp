#include "runtime/shared_kernels.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/jit/frontend/function_schema_parser.h>
#include <torch/library.h>

#include <memory>

namespace tpu {
namespace {

// A sparse optimizer makes seventy such calls a step: in Python they were most of its time.
struct SharedKernel final : c10::OperatorKernel {
  explicit SharedKernel(c10::DispatchKey source) : source_(source) {}
  void operator()(
      const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) const {
    op.redispatchBoxed(source_, stack);
  }

 private:
  c10::DispatchKeySet source_;
};

}  // namespace

void share_kernels(
    const std::string& key, const std::string& source, const std::vector<std::string>& names) {
  // Never destroyed: the registration ends with the library object.
  auto* library = new torch::Library(
      torch::Library::IMPL, "aten", c10::parseDispatchKey(key), __FILE__, __LINE__);
  const auto from = c10::parseDispatchKey(source);
  for (const auto& name : names)
    if (c10::Dispatcher::singleton().findSchema(torch::jit::parseName("aten::" + name)))
      library->impl(
          name.c_str(),
          torch::CppFunction::makeFromBoxedFunctor(std::make_unique<SharedKernel>(from)));
}

}  // namespace tpu
