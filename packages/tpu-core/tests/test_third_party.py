"""A package of another author that uses `tpu_core.extend` alone, installed beside this one."""

from __future__ import annotations

import ast
from pathlib import Path

from interpreter import clean, path_with

FOLDER = Path(__file__).with_name("third_party")
PACKAGE = FOLDER / "acme_tpu" / "__init__.py"
DOOR = {"tpu_core.extend", "tpu_core.errors", "tpu_core.config"}


def run(code: str, tmp_path: Path, **environment: str) -> list[str]:
    environment = {
        "PYTHONPATH": path_with(FOLDER),
        "TPU_CACHE_DIR": str(tmp_path),
        **environment,
    }
    return clean(code, **environment).splitlines()


def test_it_imports_the_three_public_modules_and_no_other() -> None:
    nodes = list(ast.walk(ast.parse(PACKAGE.read_text())))
    found = {n.module or "" for n in nodes if isinstance(n, ast.ImportFrom)}
    found |= {a.name for n in nodes if isinstance(n, ast.Import) for a in n.names}
    assert {name for name in found if name.startswith("tpu_")} == DOOR


def test_its_op_has_values_and_gradients(tmp_path: Path) -> None:
    code = """
    import torch, acme_tpu
    def reference(x, y, beta): return x * torch.sigmoid(beta * x) * y
    torch.manual_seed(0)
    x, y = torch.randn(2, 3, 5)
    results = []
    for device, f in (("cpu", reference), ("tpu", torch.ops.acme.swiglu)):
        a, b = (t.detach().to(device).requires_grad_() for t in (x, y))
        out = f(a, b, 1.5) + f(a, b, 0.5)
        out.sum().backward()
        results.append([t.detach().cpu() for t in (out, a.grad, b.grad)])
    torch.testing.assert_close(*results)
    print(torch.tpu.metrics()["fallbacks"] if "fallbacks" in torch.tpu.metrics() else 0)
    try:
        torch.ops.acme.swiglu(x.to("tpu"), y[:1].to("tpu"))
    except Exception as error:
        print(type(error).__name__)
    """
    assert run(code, tmp_path) == ["0", "UnsupportedOpError"]


def test_its_kernel_is_taken_where_it_is_named(tmp_path: Path) -> None:
    code = """
    import torch
    import acme_tpu
    from tpu_core.extend import KernelSelection
    x = torch.linspace(-3, 3, 7)
    expected = torch.nn.functional.silu(x)
    for name in ("plain", "tanh"):
        with KernelSelection.using({"acme_silu": name}):
            found = torch.nn.functional.silu(x.to("tpu")).cpu()
        torch.testing.assert_close(found, expected)
    lines = map(str.split, str(torch.tpu.compile_report()).splitlines())
    print([line[:2] for line in lines if "acme_silu" in line])
    """
    assert run(code, tmp_path, TPU_TIERS="compiled") == ["[['acme_silu', 'tanh']]"]


def test_its_mode_cuts_segments(tmp_path: Path) -> None:
    code = """
    import torch, acme_tpu
    x = torch.ones(3, device="tpu")
    for _ in range(10):
        x = x + 1
    print(x.tolist(), max(acme_tpu.SEGMENTS), sum(acme_tpu.SEGMENTS) >= 10)
    """
    environment = {"TPU_EAGER_MODE": "by_fours", "TPU_TIERS": "compiled"}
    assert run(code, tmp_path, **environment) == ["[11.0, 11.0, 11.0] 4 True"]


def test_its_policy_decides_when_a_segment_is_compiled(tmp_path: Path) -> None:
    code = """
    import torch, acme_tpu
    from tpu_core.runtime import runtime
    x = torch.ones(3).to("tpu")
    for _ in range(5):
        before = torch.tpu.metrics()["pieces"]
        y = (((x + 1) * 2) - 3) / 4
        print(y.tolist(), torch.tpu.metrics()["pieces"] - before)
    found = runtime().builder.provider(acme_tpu.OpByOp)
    print(len(found.compiled), found is runtime().builder.provider(acme_tpu.OpByOp))
    """
    environment = {"TPU_EAGER_MODE": "patient", "TPU_TIERS": "compiled"}
    assert run(code, tmp_path, **environment) == [
        *["[0.25, 0.25, 0.25] 4"] * 2,
        *["[0.25, 0.25, 0.25] 0"] * 3,
        "1 True",
    ]


def test_its_command_is_one_of_tpu(tmp_path: Path) -> None:
    code = """
    import sys
    from tpu_core.cli.app import main
    sys.argv = ["tpu", "acme", "acme.swiglu.default"]
    main()
    """
    assert run(code, tmp_path) == [f"acme.swiglu.default __init__ {tmp_path}"]
