"""The interface of tpu-core for other packages: ops, lowerings, kernels, modes, programs.

A package that extends the device imports `tpu_core.extend`, `tpu_core.errors` and
`tpu_core.config`, and no other module of `tpu_core`: those may change from one release to the next.
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
    from tpu_core.compiler.collectives import obtain_segment as obtain_segment
    from tpu_core.compiler.context import BuildContext as BuildContext
    from tpu_core.compiler.jobs import CompileJob as CompileJob
    from tpu_core.compiler.programs import Program as Program
    from tpu_core.compiler.providers import ProgramProvider as ProgramProvider
    from tpu_core.compiler.providers import ProgramRequest as ProgramRequest
    from tpu_core.compiler.segment import Node as Node
    from tpu_core.compiler.segment import Segment as Segment
    from tpu_core.compiler.spanning import register_spanning as register_spanning
    from tpu_core.device.settings import implementations as using_implementations
    from tpu_core.extend._graphs import register_checked_op as register_checked_op
    from tpu_core.extend._graphs import register_graph_op as register_graph_op
    from tpu_core.extend._imports import when_imported as when_imported
    from tpu_core.extend._ops import call_through as call_through
    from tpu_core.extend._ops import find_lowering as find_lowering
    from tpu_core.extend._ops import list_caller as list_caller
    from tpu_core.extend._ops import meta_function as meta_function
    from tpu_core.extend._ops import op_caller as op_caller
    from tpu_core.extend._ops import record_op as record_op
    from tpu_core.extend._ops import to_torch_dtype as to_torch_dtype
    from tpu_core.extend._runtime import Artifacts as Artifacts
    from tpu_core.extend._runtime import defer_events as defer_events
    from tpu_core.extend._runtime import join_world as join_world
    from tpu_core.extend._runtime import note_kernel as note_kernel
    from tpu_core.extend._runtime import on_synchronize as on_synchronize
    from tpu_core.extend._values import DeviceValue as DeviceValue
    from tpu_core.extend._values import draw_seeds as draw_seeds
    from tpu_core.extend._values import flush as flush
    from tpu_core.extend._values import user_line as user_line
    from tpu_core.interop import from_jax as from_jax
    from tpu_core.lowering import load as load_lowerings
    from tpu_core.lowering.checks import BodyChecks as BodyChecks
    from tpu_core.lowering.dtypes import cast as cast
    from tpu_core.lowering.dtypes import to_numpy_dtype as to_numpy_dtype
    from tpu_core.lowering.evaluate import DROPPED_ARGUMENTS as DROPPED_ARGUMENTS
    from tpu_core.lowering.evaluate import to_jax as copy_to_jax
    from tpu_core.lowering.implementations import Kernel as Kernel
    from tpu_core.lowering.implementations import KernelSelection as KernelSelection
    from tpu_core.lowering.implementations import Target as Target
    from tpu_core.lowering.implementations import choices as chosen_implementations
    from tpu_core.lowering.implementations import lowering_for as lowering_for
    from tpu_core.lowering.implementations import target as target
    from tpu_core.lowering.implementations import tuned_folder as tuned_folder
    from tpu_core.lowering.kernel_costs import SCOPE as KERNEL_SCOPE
    from tpu_core.lowering.kernel_costs import scope_name as kernel_scope
    from tpu_core.lowering.kernel_errors import kernel_error_of as kernel_error_of
    from tpu_core.lowering.kernel_errors import raising_kernel_errors as raising_kernel_errors
    from tpu_core.lowering.matmul import contract as contract
    from tpu_core.lowering.operand_sharding import OperandSharding as OperandSharding
    from tpu_core.lowering.precision import precision_name as matmul_precision
    from tpu_core.lowering.random import derive_key as derive_key
    from tpu_core.lowering.random import fold_in as fold_in
    from tpu_core.lowering.registry import Lowering as Lowering
    from tpu_core.lowering.registry import register as register
    from tpu_core.modes import Mode as Mode
    from tpu_core.padding.dynamic_counts import run_with_dynamic_counts as run_with_dynamic_counts
    from tpu_core.padding.programs import PaddedPrograms as PaddedPrograms
    from tpu_core.padding.segment_signature import is_tracing as is_tracing
    from tpu_core.padding.sizes import NotPaddableError as NotPaddableError
    from tpu_core.padding.synthetic import Dim as Dim
    from tpu_core.padding.synthetic import DynamicSize as DynamicSize
    from tpu_core.pjrt.chips import abstract_mesh as abstract_mesh
    from tpu_core.pjrt.chips import chip_named as chip_named
    from tpu_core.pjrt.chips import traced_for as traced_for
    from tpu_core.pjrt.chips import tracing_for as tracing_for
    from tpu_core.pjrt.client import Loaded as Loaded
    from tpu_core.pjrt.client import address as address
    from tpu_core.pjrt.client import put as put
    from tpu_core.pjrt.client import weak as weak
    from tpu_core.pjrt.distributed import World as World
    from tpu_core.pjrt.handshake import PeerListener as PeerListener
    from tpu_core.pjrt.handshake import RefusedError as PeerRefusedError
    from tpu_core.pjrt.handshake import connect as connect_peer
    from tpu_core.pjrt.handshake import listen as listen_for_peers
    from tpu_core.pjrt.inlined import inlined as inlined
    from tpu_core.pjrt.jax_settings import JaxSettings as JaxSettings
    from tpu_core.pjrt.padded_array import exact as exact_array
    from tpu_core.pjrt.shardings import divided as divided
    from tpu_core.pjrt.topologies import ENVIRONMENT as TOPOLOGY_ENVIRONMENT
    from tpu_core.pjrt.topologies import load_executable as load_executable
    from tpu_core.pjrt.topologies import located_bytes as located_bytes
    from tpu_core.pjrt.topologies import one_device as topology_device
    from tpu_core.pjrt.topologies import ordered as ordered_mesh
    from tpu_core.platforms import find_chips as find_chips
    from tpu_core.platforms import resolve as resolve_platform
    from tpu_core.profiler.spans import work as profile_work
    from tpu_core.recorder.compute import GraphEvaluator as GraphEvaluator
    from tpu_core.recorder.compute import avals as avals
    from tpu_core.recorder.compute import run_graph as run_graph
    from tpu_core.recorder.decompose import table as decompositions
    from tpu_core.recorder.functional_variants import overload_name as overload_name
    from tpu_core.report.html import template as html_template
    from tpu_core.runtime import hide_lines_of as hide_lines_of
    from tpu_core.runtime import runtime as runtime
    from tpu_core.verification.finite import check_finite as check_finite
    from tpu_core.verification.last_call import call_of_last as call_of_last
    from tpu_core.xla_status import map_xla_error as map_xla_error

GROUPS: dict[str, dict[str, str]] = {
    "Ops and lowerings": {
        "Lowering": "lowering.registry",
        "register": "lowering.registry",
        "find_lowering": "extend._ops",
        "load_lowerings": "lowering:load",
        "record_op": "extend._ops",
        "op_caller": "extend._ops",
        "list_caller": "extend._ops",
        "call_through": "extend._ops",
        "overload_name": "recorder.functional_variants",
        "decompositions": "recorder.decompose:table",
        "DROPPED_ARGUMENTS": "lowering.evaluate",
        "meta_function": "extend._ops",
    },
    "Values in lowerings": {
        "cast": "lowering.dtypes",
        "to_numpy_dtype": "lowering.dtypes",
        "to_torch_dtype": "extend._ops",
        "copy_to_jax": "lowering.evaluate:to_jax",
        "from_jax": "interop",
        "weak": "pjrt.client",
        "contract": "lowering.matmul",
        "matmul_precision": "lowering.precision:precision_name",
        "derive_key": "lowering.random",
        "fold_in": "lowering.random",
    },
    "Graphs": {
        "GraphEvaluator": "recorder.compute",
        "run_graph": "recorder.compute",
        "avals": "recorder.compute",
        "BodyChecks": "lowering.checks",
        "register_checked_op": "extend._graphs",
        "register_graph_op": "extend._graphs",
        "DynamicSize": "padding.synthetic",
        "Dim": "padding.synthetic",
        "run_with_dynamic_counts": "padding.dynamic_counts",
        "NotPaddableError": "padding.sizes",
        "is_tracing": "padding.segment_signature",
    },
    "Kernels": {
        "Kernel": "lowering.implementations",
        "Target": "lowering.implementations",
        "target": "lowering.implementations",
        "lowering_for": "lowering.implementations",
        "KernelSelection": "lowering.implementations",
        "note_kernel": "extend._runtime",
        "chosen_implementations": "lowering.implementations:choices",
        "using_implementations": "device.settings:implementations",
        "tuned_folder": "lowering.implementations:tuned_folder",
        "OperandSharding": "lowering.operand_sharding",
        "kernel_scope": "lowering.kernel_costs:scope_name",
        "KERNEL_SCOPE": "lowering.kernel_costs:SCOPE",
        "raising_kernel_errors": "lowering.kernel_errors:raising_kernel_errors",
        "kernel_error_of": "lowering.kernel_errors:kernel_error_of",
    },
    "Tracing for JAX": {
        "JaxSettings": "pjrt.jax_settings",
        "abstract_mesh": "pjrt.chips",
        "chip_named": "pjrt.chips",
        "traced_for": "pjrt.chips",
        "tracing_for": "pjrt.chips",
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
        "call_of_last": "verification.last_call",
        "check_finite": "verification.finite",
    },
    "Programs": {
        "Segment": "compiler.segment",
        "Node": "compiler.segment",
        "Program": "compiler.programs",
        "Loaded": "pjrt.client",
        "register_spanning": "compiler.spanning",
        "obtain_program": "compiler.collectives:obtain",
        "obtain_segment": "compiler.collectives",
        "package_digest": "cache.sources",
        "map_xla_error": "xla_status",
        "Artifacts": "extend._runtime",
    },
    "Arrays and values": {
        "DeviceValue": "extend._values",
        "exact_array": "pjrt.padded_array:exact",
        "put": "pjrt.client",
        "address": "pjrt.client",
        "flush": "extend._values",
        "draw_seeds": "extend._values",
        "user_line": "extend._values",
        "hide_lines_of": "runtime",
    },
    "The device and worlds of processes": {
        "runtime": "runtime",
        "resolve_platform": "platforms:resolve",
        "find_chips": "platforms",
        "when_imported": "extend._imports",
        "on_synchronize": "extend._runtime",
        "profile_work": "profiler.spans:work",
        "defer_events": "extend._runtime",
        "World": "pjrt.distributed",
        "join_world": "extend._runtime",
        "PeerListener": "pjrt.handshake:PeerListener",
        "connect_peer": "pjrt.handshake:connect",
        "listen_for_peers": "pjrt.handshake:listen",
        "PeerRefusedError": "pjrt.handshake:RefusedError",
    },
    "Ahead of time": {
        "TOPOLOGY_ENVIRONMENT": "pjrt.topologies:ENVIRONMENT",
        "topology_device": "pjrt.topologies:one_device",
        "ordered_mesh": "pjrt.topologies:ordered",
        "located_bytes": "pjrt.topologies",
        "load_executable": "pjrt.topologies",
        "html_template": "report.html:template",
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
