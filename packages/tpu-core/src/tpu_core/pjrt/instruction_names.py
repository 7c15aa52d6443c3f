"""Names that XLA gives to the instructions of a module.

XLA names an instruction by the last part of its location, so that JAX's primitives give names such
as ``dynamic_update_slice.4``, and XLA's own passes ``dynamic-update-slice.4``. Its code generator
writes both as ``dynamic_update_slice_4``: where a fusion has both, one function serves for the two,
and a write is lost. Names with dashes are told apart, since XLA numbers equal ones.
"""

from __future__ import annotations

from typing import Any

from jax._src.lib.mlir import ir

from tpu_core.pjrt.guards import walk


def write_with_dashes(module: ir.Module) -> None:
    """Write the names of a module's instructions as XLA writes its opcodes, in place.

    Args:
        module: StableHLO. The paths before the names, which hold ops and lines, stay.
    """
    walk(module, _rename)


def _rename(op: Any) -> None:
    location = op.location
    if not isinstance(location, ir.NameLoc):
        return
    path, slash, name = location.name_str.rpartition("/")
    if "_" in name:
        new = path + slash + name.replace("_", "-")
        op.location = ir.Location.name(new, childLoc=location.child_loc)
