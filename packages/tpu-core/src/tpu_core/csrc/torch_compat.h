// What differs between the supported releases of torch. Each branch names the release that needs it.
#pragma once

#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>

#include <memory>
#include <type_traits>
#include <utility>

namespace tpu {

// torch 2.11 shares nodes of autograd by std::shared_ptr, later ones by c10::intrusive_ptr.
inline constexpr bool kNodesAreIntrusive = !std::is_same_v<
    decltype(torch::autograd::Edge::function),
    std::shared_ptr<torch::autograd::Node>>;

template <typename T>
using NodePtr = std::conditional_t<kNodesAreIntrusive, c10::intrusive_ptr<T>, std::shared_ptr<T>>;

template <typename T, typename... Args>
NodePtr<T> make_node(Args&&... args) {
  using Made = NodePtr<T>;
  if constexpr (std::is_same_v<Made, std::shared_ptr<T>>)
    return Made(new T(std::forward<Args>(args)...), torch::autograd::deleteNode);
  else
    return Made::make(std::forward<Args>(args)...);
}

}  // namespace tpu
