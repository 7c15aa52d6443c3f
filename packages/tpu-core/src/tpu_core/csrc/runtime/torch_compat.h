// What differs between the supported releases of torch. Each branch names the release that needs it.
#pragma once

#if __has_include(<ATen/core/GraphImplInterface.h>)
#include <ATen/core/GraphImplInterface.h>
#endif
#include <torch/csrc/autograd/function.h>
#include <torch/version.h>

#include <memory>
#include <utility>

namespace tpu {

#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 13  // torch 2.11 shares nodes of autograd

template <typename T>
using NodePtr = std::shared_ptr<T>;

template <typename T, typename... Args>
NodePtr<T> make_node(Args&&... args) {
  return NodePtr<T>(new T(std::forward<Args>(args)...), torch::autograd::deleteNode);
}

#else

template <typename T>
using NodePtr = c10::intrusive_ptr<T>;

template <typename T, typename... Args>
NodePtr<T> make_node(Args&&... args) {
  return c10::make_intrusive<T>(std::forward<Args>(args)...);
}

#endif

// `torch.accelerator.Graph`: from torch 2.13 on.
#if __has_include(<ATen/core/GraphImplInterface.h>)
#define TPU_HAS_GRAPHS
#endif

// Whether the length of a range of int64 follows from the numbers that are given, if any is a float,
// and not from them as integers: from torch 2.14 on.
constexpr bool kRangesHaveLengthsAsGiven = TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 14;

}  // namespace tpu
