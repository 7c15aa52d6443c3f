// Ops of the host tier that PyTorch has no CPU kernel for; see host_ops.cpp.
#pragma once

#include "execution/threefry.h"
#include "recorder/record.h"

#include <ATen/core/stack.h>

#include <string>

namespace tpu {

// Puts the results of a call in place of its arguments, which are CPU tensors. Random ops draw for the key.
using HostFunction = void (*)(ThreefryKey key, torch::jit::Stack& stack);

// What computes an op that draws nothing, or null where nothing here does.
HostFunction host_function(const std::string& name);
// The same for a call of a random op, or null where programs alone draw for it (host_random.cpp).
HostFunction host_draw(const OpDescription& d, const c10::IValue* args);
// Whether a call of a random op draws anything: dropout of 0 does not.
bool draws(const OpDescription& d, const c10::IValue* args);
// What computes a call, or null where nothing here does; `host_kernel` was asked of its op.
HostFunction function_of_call(const OpDescription& d, const c10::IValue* args);

}  // namespace tpu
