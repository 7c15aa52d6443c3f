"""Programs serve what they were made for: each setting that decides results is in their keys."""

from __future__ import annotations

import ast
import pickle
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import tpu_core.lowering
from interpreter import clean
from tpu_core import _C
from tpu_core.lowering.registry import REGISTRY
from tpu_core.recorder.compute import GraphCompute
from tpu_core.recorder.op_schema import _PRECISION_FAMILIES

Function = Callable[[torch.Tensor], torch.Tensor]

# Of integers, by ops whose results or computations have PyTorch's default dtype.
OF_INTEGERS: dict[str, Function] = {
    "mul": lambda n: n * 0.1,
    "div": lambda n: n / 3,
    "div of tensors": lambda n: n / (n + 1),
    "sin": torch.sin,
    "pow": lambda n: n**-0.5,
    "rpow": lambda n: 2.5**n,
    "compared": lambda n: n * 0.1 == 0.3,
    "clamp": lambda n: n.clamp(0.3),
    "foreach": lambda n: torch._foreach_mul([n], [0.1])[0],
    "complex": lambda n: n * (1 + 0.1j),
}


@pytest.fixture
def float32() -> Iterator[None]:
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", OF_INTEGERS)
def test_the_default_dtype_is_part_of_a_signature(name: str, float32: None) -> None:
    f = OF_INTEGERS[name]
    numbers = torch.arange(1, 5)
    for dtype in (torch.float32, torch.float64, torch.float32, torch.float16):
        torch.set_default_dtype(dtype)
        if name == "complex" and dtype == torch.float16:
            continue  # XLA has no complex32
        expected = f(numbers)
        found = f(numbers.to("tpu")).cpu()
        # A number of 32 bits among those of 64 would be wrong in the eighth digit.
        exact = {"rtol": 1e-13, "atol": 0.0} if dtype == torch.float64 else {}
        torch.testing.assert_close(found, expected, **exact)


def test_processes_of_other_default_dtypes_share_a_cache(tmp_path: Path) -> None:
    program = """
    import torch
    torch.set_default_dtype(torch.{dtype})
    n = torch.arange(1, 5, device="tpu")
    print((n / 3).tolist(), (n * 0.1 == 0.3).tolist())
    """
    for dtype in ("float32", "float64", "bfloat16"):
        code = program.format(dtype=dtype)
        expected = clean(code.replace(', device="tpu"', ""))
        assert clean(code, TPU_CACHE_DIR=str(tmp_path)) == expected


def test_a_decomposition_is_traced_again_with_the_dtype_of_its_recording(float32: None) -> None:
    """As a worker does, whose own default dtype is another."""
    torch.ones(1, device="tpu")  # loads the lowerings
    op = torch.ops.aten.special_ndtr.default
    args = (torch.empty(3, dtype=torch.int64, device="meta"),)
    torch.set_default_dtype(torch.float64)
    recorded = GraphCompute(op, args, ())
    sent = pickle.dumps(recorded)
    torch.set_default_dtype(torch.float32)
    received = pickle.loads(sent)
    assert torch.get_default_dtype() == torch.float32
    assert _dtypes(received) == _dtypes(recorded) == {torch.int64, torch.float64}


def _dtypes(computed: GraphCompute) -> set[torch.dtype]:
    nodes = computed._graph.graph.nodes
    return {n.meta["val"].dtype for n in nodes if "val" in n.meta}


def test_a_block_of_another_precision_ends() -> None:
    a = torch.ones(3, 5).to("tpu")

    def signatures() -> int:
        a @ a.T
        return int(_C.counters()["signatures"])

    with torch.tpu.precision("medium"):
        inside = signatures()
        with torch.tpu.precision("high"):
            nested = signatures()
        assert nested > inside
        assert signatures() == nested
    assert signatures() > nested  # the first product of the usual precision


def test_ops_that_multiply_have_the_precision_in_their_signature() -> None:
    folder = Path(tpu_core.lowering.__file__).parent
    imported: dict[str, set[str]] = {}
    for file in folder.glob("*.py"):
        nodes = ast.walk(ast.parse(file.read_text()))
        modules = [n.module or "" for n in nodes if isinstance(n, ast.ImportFrom)]
        imported[file.stem] = {
            m.rpartition(".")[2] for m in modules if m.startswith("tpu_core.lowering.")
        }
    users, seen = {"precision"}, set[str]()
    while users != seen:  # by way of other files too
        seen = set(users)
        users |= {name for name, modules in imported.items() if modules & users}
    families = users & {entry.family for entry in REGISTRY}
    assert {"matmul", "convolution"} <= families
    assert families <= _PRECISION_FAMILIES


def test_a_lowering_of_another_package_is_known_by_its_source(tmp_path: Path) -> None:
    module = """
    import torch
    from tpu_core import _C
    from tpu_core.lowering.registry import register

    library = torch.library.Library("another", "DEF")
    library.define("scaled(Tensor x) -> Tensor")
    library.impl("scaled", torch.empty_like, "Meta")
    register("another.scaled.default", lambda x: x * {factor})
    torch.ones(1, device="tpu")
    _C.register_overloads(["another::scaled"])
    """
    program = """
    import sys
    sys.path.insert(0, {folder!r})
    import another, torch
    print(torch.ops.another.scaled(torch.ones(2, device="tpu")).tolist())
    """
    code = program.format(folder=str(tmp_path))
    for factor in (2, 3):
        (tmp_path / "another.py").write_text(textwrap.dedent(module.format(factor=factor)))
        assert clean(code, TPU_CACHE_DIR=str(tmp_path / "cache")) == f"[{factor}.0, {factor}.0]\n"
