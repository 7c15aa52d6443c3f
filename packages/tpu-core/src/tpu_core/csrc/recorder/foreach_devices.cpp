#include "recorder/foreach_devices.h"

#include "recorder/record.h"

#include <memory>
#include <unordered_set>

namespace tpu {
namespace {

// Copies between devices are made one by one.
class ForeachCopy final : public c10::OperatorKernel {
 public:
  void operator()(
      const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    const auto args = torch::jit::last(*stack, 3);
    const auto self = args[0].toTensorList(), src = args[1].toTensorList();
    bool crosses = false;
    for (size_t i = 0; i < self.size() && i < src.size(); ++i)
      crosses = crosses || self.get(i).device() != src.get(i).device();
    if (!crosses || self.size() != src.size()) return recorder_(op, keys, stack);
    const bool non_blocking = args[2].toBool();
    for (size_t i = 0; i < self.size(); ++i) self.get(i).copy_(src.get(i), non_blocking);
    torch::jit::drop(*stack, 3);
  }

 private:
  Recorder recorder_;
};

// CUDA wants the scalars on the CPU. Here they go to the device, in one transfer.
class ForeachScalars final : public c10::OperatorKernel {
 public:
  void operator()(
      const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    const auto self = torch::jit::last(*stack, 4)[0].toTensorList();
    const auto scalars = stack->back().toTensor();
    if (scalars.is_cpu() && scalars.dim() == 1 && !self.empty() && self.get(0).is_privateuseone())
      stack->back() = scalars.to(self.get(0).device());
    recorder_(op, keys, stack);
  }

 private:
  Recorder recorder_;
};

const std::unordered_set<std::string> kWithScalars{
    "aten::_foreach_addcdiv", "aten::_foreach_addcdiv_", "aten::_foreach_addcmul",
    "aten::_foreach_addcmul_"};

}  // namespace

std::optional<torch::CppFunction> foreach_kernel_of(const c10::OperatorHandle& op) {
  const auto& name = op.operator_name();
  if (name.name == "aten::_foreach_copy_" && name.overload_name.empty())
    return torch::CppFunction::makeFromBoxedFunctor(std::make_unique<ForeachCopy>());
  if (kWithScalars.count(name.name) && name.overload_name == "Tensor")
    return torch::CppFunction::makeFromBoxedFunctor(std::make_unique<ForeachScalars>());
  return std::nullopt;
}

}  // namespace tpu
