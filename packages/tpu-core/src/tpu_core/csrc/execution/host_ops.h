// Ops of the host tier that PyTorch has no CPU kernel for; see host_ops.cpp.
#pragma once

#include "execution/threefry.h"
#include "recorder/record.h"

#include <ATen/core/stack.h>

#include <string>

namespace tpu {

// Puts the results of a call in place of its arguments, which are CPU tensors. Random ops draw for the key.
using HostFunction = void (*)(ThreefryKey key, torch::jit::Stack& stack);

// What computes a call, or null where nothing here does.
HostFunction host_function(const OpDescription& d);
HostFunction host_function(const std::string& name);
// The same for a random op, or null where programs alone draw for the call (host_random.cpp).
HostFunction host_draw(const OpDescription& d, const c10::IValue* args);

}  // namespace tpu
