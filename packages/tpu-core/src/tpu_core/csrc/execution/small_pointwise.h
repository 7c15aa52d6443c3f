// Pointwise ops of small float32 tensors, those of lists too, in a loop: ATen makes a TensorIterator for each,
// which takes four fifths of the time of such an op. Results are ATen's, to the bit where it has AVX2.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <string>

namespace tpu {

struct SmallPointwise;

// The loops of an overload ("aten::add.Tensor"), or null where there are none, or none for this processor.
const SmallPointwise* small_pointwise(const std::string& name);

using SmallResults = c10::SmallVector<at::Tensor, 4>;
// Computes a call on CPU tensors, of which there is one for each argument on the device, those of lists in
// order; `made` gets its new tensors. False, with nothing done, where ATen is to compute it.
bool compute(
    const SmallPointwise& op, const c10::IValue* args, c10::ArrayRef<at::Tensor> operands,
    SmallResults& made);

}  // namespace tpu
