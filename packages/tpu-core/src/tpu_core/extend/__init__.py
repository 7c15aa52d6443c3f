"""The interface of tpu-core for other packages: ops, lowerings, kernels, modes, programs.

A package that extends the device imports `tpu_core.extend`, `tpu_core.errors` and
`tpu_core.config`, and no other module of `tpu_core`: those may change from one release to the next.
Annotations of arrays are in `tpu_core.array_types`, loading of C++ in `tpu_core.cpp_extension`.
The module that a name comes from is imported with the name, ``from tpu_core.extend import
register``, so that a package that is loaded inside of ``import torch`` pays for what it uses alone.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tpu_core.cache.sources import package_digest as package_digest
    from tpu_core.compiler.collectives import obtain as obtain_program
    from tpu_core.compiler.context import BuildContext as BuildContext
    from tpu_core.compiler.jobs import CompileJob as CompileJob
    from tpu_core.compiler.programs import Program as Program
    from tpu_core.compiler.providers import ProgramProvider as ProgramProvider
    from tpu_core.compiler.providers import ProgramRequest as ProgramRequest
    from tpu_core.compiler.segment import Node as Node
    from tpu_core.compiler.segment import Segment as Segment
    from tpu_core.dtypes import cast as cast
    from tpu_core.dtypes import to_numpy_dtype as to_numpy_dtype
    from tpu_core.extend._graphs import register_graph_op as register_graph_op
    from tpu_core.extend._imports import when_imported as when_imported
    from tpu_core.extend._ops import call_through as call_through
    from tpu_core.extend._ops import find_lowering as find_lowering
    from tpu_core.extend._ops import meta_function as meta_function
    from tpu_core.extend._ops import op_caller as op_caller
    from tpu_core.extend._ops import record_op as record_op
    from tpu_core.extend._ops import to_torch_dtype as to_torch_dtype
    from tpu_core.extend._random import RandomKey as RandomKey
    from tpu_core.extend._runtime import Artifacts as Artifacts
    from tpu_core.extend._runtime import on_synchronize as on_synchronize
    from tpu_core.extend._values import DeviceValue as DeviceValue
    from tpu_core.extend._values import flush as flush
    from tpu_core.extend._values import user_line as user_line
    from tpu_core.extend._worlds import World as World
    from tpu_core.internal_files import hide_lines_of as hide_lines_of
    from tpu_core.interop import from_jax as from_jax
    from tpu_core.lowering import load as load_lowerings
    from tpu_core.lowering.checks import BodyChecks as BodyChecks
    from tpu_core.lowering.evaluate import to_jax as copy_to_jax
    from tpu_core.lowering.implementations import Kernel as Kernel
    from tpu_core.lowering.implementations import KernelSelection as KernelSelection
    from tpu_core.lowering.implementations import Target as Target
    from tpu_core.lowering.kernel_costs import KernelCost as KernelCost
    from tpu_core.lowering.matmul import contract as contract
    from tpu_core.lowering.operand_sharding import OperandSharding as OperandSharding
    from tpu_core.lowering.precision import precision_name as matmul_precision
    from tpu_core.lowering.registry import Lowering as Lowering
    from tpu_core.lowering.registry import register as register
    from tpu_core.modes import Mode as Mode
    from tpu_core.padding.dynamic_counts import run_with_dynamic_counts as run_with_dynamic_counts
    from tpu_core.padding.programs import PaddedPrograms as PaddedPrograms
    from tpu_core.padding.segment_signature import is_tracing as is_tracing
    from tpu_core.padding.synthetic import Dim as Dim
    from tpu_core.padding.synthetic import DynamicSize as DynamicSize
    from tpu_core.pjrt.chips import AbstractChip as AbstractChip
    from tpu_core.pjrt.client import Loaded as Loaded
    from tpu_core.pjrt.handshake import PeerHandshake as PeerHandshake
    from tpu_core.pjrt.inlined import inlined as inlined
    from tpu_core.pjrt.jax_settings import JaxSettings as JaxSettings
    from tpu_core.pjrt.shardings import divided as divided
    from tpu_core.pjrt.topologies import LibtpuTopology as LibtpuTopology
    from tpu_core.platforms import Platform as Platform
    from tpu_core.profiler.spans import work as profile_work
    from tpu_core.recorder.compute import GraphEvaluator as GraphEvaluator
    from tpu_core.recorder.decompose import table as decompositions
    from tpu_core.report.html import template as html_template
    from tpu_core.runtime import runtime as runtime
    from tpu_core.verification.executed_op import ExecutedOp as ExecutedOp

GROUPS: dict[str, dict[str, str]] = {
    "Ops and lowerings": {
        "Lowering": "lowering.registry",
        "register": "lowering.registry",
        "find_lowering": "extend._ops",
        "load_lowerings": "lowering:load",
        "record_op": "extend._ops",
        "op_caller": "extend._ops",
        "call_through": "extend._ops",
        "decompositions": "recorder.decompose:table",
        "meta_function": "extend._ops",
    },
    "Values in lowerings": {
        "cast": "dtypes",
        "to_numpy_dtype": "dtypes",
        "to_torch_dtype": "extend._ops",
        "copy_to_jax": "lowering.evaluate:to_jax",
        "from_jax": "interop",
        "contract": "lowering.matmul",
        "matmul_precision": "lowering.precision:precision_name",
        "RandomKey": "extend._random",
    },
    "Graphs": {
        "GraphEvaluator": "recorder.compute",
        "BodyChecks": "lowering.checks",
        "register_graph_op": "extend._graphs",
        "DynamicSize": "padding.synthetic",
        "Dim": "padding.synthetic",
        "run_with_dynamic_counts": "padding.dynamic_counts",
        "is_tracing": "padding.segment_signature",
    },
    "Kernels": {
        "Kernel": "lowering.implementations",
        "KernelSelection": "lowering.implementations",
        "KernelCost": "lowering.kernel_costs",
        "Target": "lowering.implementations",
        "OperandSharding": "lowering.operand_sharding",
    },
    "Tracing for JAX": {
        "JaxSettings": "pjrt.jax_settings",
        "AbstractChip": "pjrt.chips",
        "divided": "pjrt.shardings",
        "inlined": "pjrt.inlined",
    },
    "Modes": {
        "Mode": "modes",
        "ProgramProvider": "compiler.providers",
        "ProgramRequest": "compiler.providers",
        "BuildContext": "compiler.context",
        "PaddedPrograms": "padding.programs",
        "CompileJob": "compiler.jobs",
        "ExecutedOp": "verification.executed_op",
    },
    "Programs": {
        "Segment": "compiler.segment",
        "Node": "compiler.segment",
        "Program": "compiler.programs",
        "Loaded": "pjrt.client",
        "obtain_program": "compiler.collectives:obtain",
        "package_digest": "cache.sources",
        "Artifacts": "extend._runtime",
        "LibtpuTopology": "pjrt.topologies",
        "html_template": "report.html:template",
    },
    "Values of tensors, and the user's lines": {
        "DeviceValue": "extend._values",
        "flush": "extend._values",
        "user_line": "extend._values",
        "hide_lines_of": "internal_files",
    },
    "The device and worlds of processes": {
        "runtime": "runtime",
        "Platform": "platforms",
        "when_imported": "extend._imports",
        "on_synchronize": "extend._runtime",
        "profile_work": "profiler.spans:work",
        "World": "extend._worlds",
        "PeerHandshake": "pjrt.handshake",
    },
}
"""By concept: the module of ``tpu_core`` that each name is in, and its name there if another."""

_PLACES = {name: place for group in GROUPS.values() for name, place in group.items()}

__all__ = sorted(_PLACES)


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    module, original = origin(name)
    found = getattr(module, original)
    globals()[name] = found
    return found


def origin(name: str) -> tuple[ModuleType, str]:
    """The module that a name comes from, and its name there; for the reference page."""
    module, _, original = _PLACES[name].partition(":")
    return importlib.import_module(f"tpu_core.{module}"), original or name


def __dir__() -> list[str]:
    return __all__
