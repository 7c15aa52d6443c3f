"""Prepare Dynamo for the device when it is imported (entry point group ``torch.backends``).

It runs inside ``import torch`` and imports nothing of Dynamo, which costs two seconds: it waits for
some of its modules.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType


def load() -> None:
    """Have Dynamo find the device's interface and backend, now or when it is imported."""
    import torch

    from tpu_compile import torch_compat
    from tpu_core.extend import when_imported

    # Before TORCH_LOGS is read.
    torch._logging._internal.register_artifact(
        "tpu_graphs", "Graphs that torch.compile hands to device tpu.", visible=True
    )
    if when_imported(_PREPARED) and not torch_compat.HAS_DEFAULT_BACKEND:
        torch_compat.set_default_backend("tpu")


def _set_interface(module: ModuleType) -> None:
    # `init_device_reg` registers the class under this name as the interface of "tpu"; one that was
    # registered before would be overwritten by it.
    from tpu_compile.interface import interface

    if hasattr(module, "TpuInterface"):
        vars(module)["TpuInterface"] = interface()
    else:  # torch 2.11 knows no interface of that name
        module.register_interface_for_device("tpu", interface())


def _set_default(module: ModuleType) -> None:
    from tpu_compile.backend import tpu
    from tpu_compile.torch_compat import HAS_DEFAULT_BACKEND

    # Dynamo loads the entry point at its first use, and two threads that do so at once fail.
    module.register_backend(tpu, name="tpu")
    if HAS_DEFAULT_BACKEND:
        module.set_default_backend("tpu")


def _skip_our_code(module: ModuleType) -> None:
    # What runs below an op is no part of a user's graph.
    for name in ("tpu_core", "tpu_eager", "tpu_compile", "jax"):
        module.add(name)
    from tpu_compile import layer_scan, traced
    from tpu_compile.torch_compat import inline_when_called

    inline_when_called(module, [f for m in (traced, layer_scan) if (f := m.__file__)])
    # AOTAutograd traces it, with the modules' parameters as inputs.
    module._allowed_callable_ids.add(id(layer_scan.run_layers))
    module._nonstrict_trace_callable_ids.add(id(layer_scan.run_layers))


def _admit_device(module: ModuleType) -> None:
    from tpu_compile.traced import admitting_device

    vars(module)["_validate_device"] = admitting_device(module._validate_device)


def _know_optimizers(module: ModuleType) -> None:
    from tpu_compile.optimizers import asking_cudagraphs, setting_capturable

    variable = module.OptimizerVariable
    variable._set_capturable = setting_capturable(variable._set_capturable)
    vars(module)["_is_static_for_cudagraphs"] = asking_cudagraphs(module._is_static_for_cudagraphs)


def _know_geometry(module: ModuleType) -> None:
    from tpu_compile.fake_impls import know_geometry

    know_geometry(module)


_PREPARED: dict[str, Callable[[ModuleType], None]] = {
    "torch._dynamo.device_interface": _set_interface,
    "torch._dynamo.backends.registry": _set_default,
    "torch._dynamo.trace_rules": _skip_our_code,
    "torch._dynamo.variables.optimizer": _know_optimizers,
    "torch.nn.attention.flex_attention": _admit_device,
    "torch._subclasses.fake_impls": _know_geometry,
}
