"""PyTorch's own OpInfo samples, run on the device and compared with the CPU, gradients included.

The lowerings have tests of their own; this checks the whole path an op takes: dispatch, recording,
views of operands, decompositions and fallbacks.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves, tree_map

SAMPLES = 2

# Drawn from a generator of the device: only shape and dtype can be compared.
RANDOM = frozenset(
    """bernoulli cauchy exponential geometric log_normal multinomial normal normal.in_place
    normal.number_mean uniform rand_like randint randint_like randn randn_like
    nn.functional.alpha_dropout nn.functional.dropout nn.functional.dropout2d
    nn.functional.dropout3d nn.functional.feature_alpha_dropout.with_train
    nn.functional.fractional_max_pool2d nn.functional.fractional_max_pool3d nn.functional.rrelu
    nn.functional.multi_head_attention_forward nn.functional.scaled_dot_product_attention
    svd_lowrank pca_lowrank""".split()
)
# Memory that no op has written.
UNINITIALIZED = frozenset(
    "empty empty_like empty_permuted empty_strided new_empty new_empty_strided".split()
)
# Eigenvectors and singular vectors are unique up to a factor.
UP_TO_A_FACTOR = frozenset("linalg.eigh linalg.eig svd linalg.svd".split())
# What the device does not have, and says so.
UNSUPPORTED = {
    "sparse.sampled_addmm": NotImplementedError,
    "sparse.mm.reduce": NotImplementedError,
    "to_sparse": NotImplementedError,
    "chalf": TypeError,  # complex32 has no counterpart in XLA
}
# Reads memory beyond the sample's own elements, which a device copy of the tensor does not have.
READS_BEYOND = frozenset({"as_strided.partial_views"})
# PyTorch itself wants the indices on the CPU.
CPU_INDICES = frozenset({"tensor_split"})
# Statistics of evaluation mode have shape (0,) on the CPU and (C,) in PyTorch's meta function.
META_DIFFERS = frozenset({"_native_batch_norm_legit"})
# Squarings of a Taylor series, in another order than ATen's.
TOLERANCES = {"matrix_exp": 1e-3, "linalg.matrix_power": 1e-3}

LEFT_OUT = UNINITIALIZED | UP_TO_A_FACTOR | READS_BEYOND | CPU_INDICES | META_DIFFERS


def name_of(op: Any) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


OPS = [
    op
    for op in op_db
    if torch.float32 in op.supported_dtypes("cpu")
    and not op.name.startswith("jiterator")  # compiled by CUDA, raises on the CPU
]
COMPARED = [op for op in OPS if name_of(op) not in LEFT_OUT | UNSUPPORTED.keys()]


def on_device(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return x.detach().to("tpu").requires_grad_(x.requires_grad)
    return "tpu" if x == "cpu" else torch.device("tpu") if x == torch.device("cpu") else x


def call(op: Any, sample: Any, *, device: bool) -> tuple[Any, list[torch.Tensor]]:
    """The op's result and its differentiable inputs."""
    inputs = (sample.input, list(sample.args), dict(sample.kwargs))
    if device:
        inputs = tree_map(on_device, inputs)
    leaves = [x for x in tree_leaves(inputs) if isinstance(x, torch.Tensor) and x.requires_grad]
    return op(inputs[0], *inputs[1], **inputs[2]), leaves


def on_cpu(x: Any) -> Any:
    return x.detach().cpu() if isinstance(x, torch.Tensor) else x


def compare(name: str, got: Any, want: Any) -> None:
    got, want = tree_map(on_cpu, got), tree_map(on_cpu, want)
    if name in RANDOM:
        for g, w in zip(tree_leaves(got), tree_leaves(want), strict=True):
            if isinstance(w, torch.Tensor):
                assert (g.shape, g.dtype) == (w.shape, w.dtype)
        return
    # A whole op in float32: the two libraries sum and round in different orders.
    tolerance = TOLERANCES.get(name, 1e-4)
    torch.testing.assert_close(
        got, want, rtol=tolerance, atol=tolerance, equal_nan=True, check_stride=False
    )


@pytest.mark.parametrize("op", COMPARED, ids=name_of)
def test_forward(op: Any) -> None:
    for _, sample in zip(range(SAMPLES), op.sample_inputs("cpu", torch.float32)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # fallbacks of rare ops; test_fallbacks counts them
            want, _ = call(op, sample, device=False)
            got, _ = call(op, sample, device=True)
        compare(name_of(op), got, want)


@pytest.mark.slow
@pytest.mark.parametrize(
    "op",
    [
        op
        for op in COMPARED
        if op.supports_autograd
        and torch.float32 in op.supported_backward_dtypes("cpu")
        and name_of(op) not in RANDOM
    ],
    ids=name_of,
)
def test_gradient(op: Any) -> None:
    samples = op.sample_inputs("cpu", torch.float32, requires_grad=True)
    for _, sample in zip(range(SAMPLES), samples):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            gradients = []
            for device in (False, True):
                result, leaves = call(op, sample, device=device)
                outputs = [
                    o
                    for o in tree_leaves(result)
                    if isinstance(o, torch.Tensor) and o.requires_grad
                ]
                if not outputs:
                    break
                gradients.append(
                    torch.autograd.grad(
                        outputs, leaves, [torch.ones_like(o) for o in outputs], allow_unused=True
                    )
                )
        if len(gradients) == 2:
            compare(name_of(op), gradients[1], gradients[0])


@pytest.mark.parametrize("name", sorted(UNSUPPORTED))
def test_unsupported(name: str) -> None:
    op = next(op for op in OPS if name_of(op) == name)
    sample = next(iter(op.sample_inputs("cpu", torch.float32)))
    with pytest.raises(UNSUPPORTED[name]):
        call(op, sample, device=True)
