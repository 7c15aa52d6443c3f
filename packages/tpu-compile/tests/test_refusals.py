"""Calls of compiled graphs that PyTorch's kernels refuse, whatever its meta functions let pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tpu_core.errors import ExportError, GraphSplitWarning

pytestmark = pytest.mark.filterwarnings("ignore::tpu_core.errors.GraphSplitWarning")

INTS, FLOATS, DOUBLES = torch.arange(6).view(2, 3), torch.ones(2, 3), torch.ones(2, 3).double()
COMPLEX, ROW = torch.ones(2, 3) + 1j, torch.ones(3).double()
IMAGE = torch.ones(1, 1, 4, 4)
Call = tuple[Callable[..., Tensor], tuple[Any, ...]]


def rows(x: Tensor) -> Tensor:
    return torch.arange(2, device=x.device)


def put(x: Tensor, y: Tensor) -> Tensor:
    x = x.clone()
    x[rows(x)] = y
    return x


REFUSED: dict[str, Call] = {
    "mm": (lambda x, y: x @ y, (INTS.int(), torch.ones(3, 2))),
    "linear": (F.linear, (FLOATS, torch.ones(4, 3).bfloat16(), torch.ones(4).bfloat16())),
    "mv": (torch.mv, (FLOATS, ROW)),
    "addmm": (torch.addmm, (torch.ones(2), FLOATS, DOUBLES.t())),
    "layer_norm": (lambda x, w: F.layer_norm(x, (3,), w, w), (FLOATS, ROW)),
    "batch_norm": (lambda x, w: F.batch_norm(x, w, w, w, w), (FLOATS, ROW)),
    "index_put": (put, (INTS, FLOATS)),
    "index_add": (lambda x, y: x.index_add(0, rows(x), y), (INTS.int(), FLOATS)),
    "index_copy": (lambda x, y: x.index_copy(0, rows(x), y), (INTS.int(), FLOATS)),
    "index_select": (lambda x, i: x.index_select(0, i), (FLOATS, torch.ones(2))),
    "binary_cross_entropy": (F.binary_cross_entropy, (FLOATS, DOUBLES)),
    "cdist": (torch.cdist, (FLOATS, DOUBLES)),
    "complex": (torch.complex, (FLOATS, DOUBLES)),
    "std of integers": (torch.std, (INTS,)),
    "gelu of integers": (F.gelu, (INTS,)),
    "softmax of integers": (lambda x: x.softmax(0), (INTS,)),
    "pooling of integers": (lambda x: F.avg_pool2d(x, 2), (IMAGE.int(),)),
    "pooling of booleans": (lambda x: F.max_pool2d(x, 2), (IMAGE.bool(),)),
    "bits of floats": (lambda x: x & x, (FLOATS,)),
    "sign of complex": (torch.sign, (COMPLEX,)),
    "order of complex": (lambda x: x.sort()[0], (COMPLEX,)),
    "comparison of complex": (lambda x: x < x, (COMPLEX,)),
}


def error_of(function: Callable[..., Tensor], args: tuple[Any, ...], device: str) -> Exception:
    with pytest.raises((RuntimeError, TypeError)) as error:  # a TypeError in torch 2.15
        function(*[x.to(device) for x in args])
    return error.value


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", REFUSED)
def test_errors_are_those_of_eager(name: str, dynamic: bool) -> None:
    function, args = REFUSED[name]
    of_cpu, of_eager = (error_of(function, args, d) for d in ("cpu", "tpu"))
    found = error_of(torch.compile(function, dynamic=dynamic), args, "tpu")
    assert type(found) is type(of_eager) is type(of_cpu)
    assert str(found).split("\n")[0] == str(of_eager).split("\n")[0]


TAKEN: dict[str, Call] = {
    "norm of narrow floats": (
        lambda x, w: F.layer_norm(x, (3,), w, w),
        (FLOATS.bfloat16(), torch.ones(3).bfloat16()),
    ),
    "softmax in another dtype": (lambda x: x.softmax(1, dtype=torch.float32), (FLOATS.half(),)),
    "numbers": (lambda x: x + 2 * x.sum() + (x > 0), (FLOATS,)),
    "integers and floats": (lambda x, y: torch.where(x > 2, x * y, y), (INTS, FLOATS)),
    "products": (lambda x, y: (x.half() @ y.half().t()).float(), (FLOATS, FLOATS)),
}


@pytest.mark.parametrize("name", TAKEN)
def test_right_calls_are_compiled_whole(name: str, recwarn: pytest.WarningsRecorder) -> None:
    function, args = TAKEN[name]
    found = torch.compile(function)(*[x.to("tpu") for x in args])
    torch.testing.assert_close(found.cpu(), function(*args))
    assert not [w for w in recwarn if issubclass(w.category, GraphSplitWarning)]


def test_exported_graphs_are_refused() -> None:
    from tpu_compile import export

    class Product(torch.nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x @ y

    program = torch.export.export(Product(), (INTS.int(), torch.ones(3, 2)))
    with pytest.raises(ExportError, match="PyTorch refuses these arguments"):
        export.save(program, "never")
