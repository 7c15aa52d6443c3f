"""The docs page of the library, made from its table."""

from __future__ import annotations

from tpu_kernels.ops.registry import Implementation, Op
from tpu_kernels.ops.table import KERNELS

_INTRODUCTION = """\
# Kernels

PyTorch's own functions reach most of these ops on device `tpu`: no model has to name them. An op
has several implementations. Where its program is lowered, for the device or ahead of time by
`tpu_compile.aot`, the first is taken that is meant for the platform and whose rules hold; the last
takes everything. A program on padded arrays, which serves several sizes, takes none that is for one
platform alone; attention whose scores fill more than 512 MiB is the exception, and has a program a
size. What a call gives is the same within rounding, forward and backward.

```python
with tpu_kernels.using(attention="plain"):
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
```

`tpu_kernels.using` names an implementation for a block. Arguments that break one of its rules are
then an error that says which ([TPU1026](errors.md#tpu1026)). A kernel that is named on another
platform than its own is run by Pallas' interpreter: slow, and with the same values. This page is
generated from `tpu_kernels.ops`.
"""


def kernels_page() -> str:
    """Markdown of ``docs/reference/kernels.md``."""
    return "\n".join([_INTRODUCTION, *(_section(op) for _, op in sorted(KERNELS.items()))])


def _section(op: Op) -> str:
    lines = [
        f"## {op.name}",
        "",
        "Reached by " + ", ".join(f"`{name}`" for name in op.called) + ".",
        "",
        "| Implementation | Chosen on | Dtypes | What it is |",
        "|---|---|---|---|",
    ]
    for i in op.implementations:
        where = ", ".join(f"`{p}`" for p in i.platforms) or "all platforms"
        dtypes = ", ".join(f"`{d}`" for d in i.dtypes) or "all"
        lines.append(f"| `{i.name}` | {where} | {dtypes} | {i.summary} |")
    return "\n".join([*lines, "", *(_rules(i) for i in op.implementations if i.rules)])


def _rules(implementation: Implementation) -> str:
    rules = [f"* {rule.text}" for rule in implementation.rules]
    return "\n".join([f"Rules of `{implementation.name}`:", "", *rules, ""])
