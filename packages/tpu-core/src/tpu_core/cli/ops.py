"""``tpu ops``: list supported and unsupported ops."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

# Layouts and libraries that the device does not have, and ops that test PyTorch's dispatcher.
_ELSEWHERE = re.compile(
    r"mkldnn|fbgemm|sparse|nested|jagged|quantized|quint|int4pack|dyn_quant|_for_cpu|"
    r"_test_|_foobar|_symint$"
)


def ops(
    family: Annotated[str | None, typer.Option(help="Only this family.")] = None,
    missing: Annotated[
        bool, typer.Option("--missing", help="List the ops that would run on the CPU instead.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the ops that have a lowering, by family, or those that have none."""
    if missing:
        names = missing_ops()
        if as_json:
            print(json.dumps(names, indent=2))
        else:
            print("\n".join(names))
            print(f"{len(names)} overloads have neither a lowering nor a decomposition.")
        return
    rows = registered_ops()
    families = sorted({row["family"] for row in rows})
    if family is not None:
        if family not in families:
            raise typer.BadParameter(
                f"There is no family {family!r}; there are: {', '.join(families)}."
            )
        rows = [row for row in rows if row["family"] == family]
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    table = Table()
    # The name is what is searched for and copied: it is never cut, however narrow the terminal.
    table.add_column("op", min_width=max((len(row["op"]) for row in rows), default=0))
    for column in ("family", "notes", "defined at"):
        table.add_column(column)
    for row in rows:
        notes = ["random"] if row["random"] else []
        notes += [f"compiled in: {', '.join(row['static'])}"] if row["static"] else []
        table.add_row(
            row["op"], row["family"], Text("; ".join(notes)), Text(row["location"], "dim")
        )
    console = Console(soft_wrap=True)
    console.print(table)
    console.print(f"{len(rows)} overloads in {len({row['family'] for row in rows})} families")


def registered_ops() -> list[dict[str, Any]]:
    """Every entry of the registry as JSON values, sorted by op."""
    from tpu_core import lowering
    from tpu_core.lowering.registry import REGISTRY

    lowering.load()
    folder = Path(lowering.__file__).parent
    return [
        {
            "op": entry.op,
            "family": entry.family,
            "static": sorted(entry.static),
            "random": entry.random,
            "location": _relative(entry.location, folder),
        }
        for entry in REGISTRY
    ]


def _relative(location: str, folder: Path) -> str:
    path, _, line = location.rpartition(":")
    inside = path.startswith(f"{folder}/")
    return f"{Path(path).relative_to(folder) if inside else Path(path).name}:{line}"


def is_registered(name: str) -> bool:
    """Return whether an overload is a view, has a kernel in the extension, or has a lowering.

    Args:
        name: An overload of any variant, ``aten.add_.Tensor``.
    """
    from tpu_core import lowering
    from tpu_core.recorder.functional_variants import has_own_kernel, lowering_of, overload_of

    lowering.load()
    try:
        op = overload_of(name)
    except AttributeError:  # defined in Python where it is first used
        return False
    return op.is_view or has_own_kernel(op) or lowering_of(op) is not None


def missing_ops() -> list[str]:
    """Functional ATen overloads that reach a backend and have no lowering, sorted.

    Left out are views (metadata only), in-place and ``out=`` overloads (derived from the functional
    one), what PyTorch decomposes, and what only other devices or layouts have.
    """
    return [op for op, kind in _unregistered() if kind == "fallback"]


def decomposed_ops() -> list[str]:
    """Functional ATen overloads that reach a backend and run by PyTorch's decomposition, sorted.

    A decomposition that ends in an op without a lowering, for some arguments, runs on the CPU.
    """
    return [op for op, kind in _unregistered() if kind == "decomposed"]


def _unregistered() -> list[tuple[str, str]]:
    """Overloads without a lowering and how they run, sorted."""
    import torch
    from torch._decomp import decomposition_table

    from tpu_core import lowering
    from tpu_core.lowering.registry import REGISTRY

    lowering.load()
    found = []
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = name.partition("::")
        base, _, overload = rest.partition(".")
        if namespace != "aten" or _ELSEWHERE.search(base):
            continue
        packet = getattr(torch.ops.aten, base, None)
        op = getattr(packet, overload or "default", None)
        if op is None or str(op) in REGISTRY or not _functional(op._schema):
            continue
        if _reaches_backend(name):
            found.append((str(op), "decomposed" if op in decomposition_table else "fallback"))
    return sorted(found)


def _reaches_backend(name: str) -> bool:
    import torch

    def has(key: str) -> bool:
        return torch._C._dispatch_has_kernel_for_dispatch_key(name, key)

    if has("CompositeImplicitAutograd") or has("CompositeExplicitAutograd"):
        return False
    return has("CPU") or has("CompositeExplicitAutogradNonFunctional")


def _functional(schema: Any) -> bool:
    """Return whether nothing is written to, and nothing of an input is handed out as a view."""
    touched = [a for a in (*schema.arguments, *schema.returns) if a.alias_info is not None]
    return not touched and bool(schema.returns)
