"""The checks of ``tpu doctor``: each looks at one thing and says what is wrong and what to do.

Nothing here imports jax or starts a device, so that the doctor works where those are broken: the
canaries of known faults run in processes of their own.
"""

from __future__ import annotations

import importlib.util
import os
import platform as python_platform
import sys
import warnings
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from tpu_core import platforms
from tpu_core.cache.shared import without_credentials
from tpu_core.cli.cache_checks import check_cache as check_cache
from tpu_core.cli.check import Check as Check
from tpu_core.cli.check import Status as Status
from tpu_core.cli.fault_checks import check_known_faults
from tpu_core.config import config, settings
from tpu_core.config.spelling import misspelt_variables
from tpu_core.cpp_extension import CORE, Extension, minor
from tpu_core.errors import ConfigurationError, TpuNotAvailableError
from tpu_core.versions import installed as installed
from tpu_core.versions import pins_of
from tpu_core.versions import satisfies as satisfies

_REQUIRED = ("torch", "jax", "jaxlib", "numpy", "ml_dtypes")
_OURS = ("tpu-core", "tpu-eager", "tpu-compile", "tpu-distributed", "tpu-kernels")
_RIVALS = ("torch_tpu", "torch_xla", "torch_npu")
_OTHER_VARIABLES = ("JAX_PLATFORMS", "XLA_FLAGS", "TORCH_DEVICE_BACKEND_AUTOLOAD")


def run_checks(quick: bool = False) -> list[Check]:
    """Every check, in the order of the answer.

    Args:
        quick: Leave out those that start the device in another process.
    """
    return [
        *check_versions(),
        *check_environment(),
        *check_platform(),
        *check_registration(),
        *check_cache(),
        *(() if quick else check_known_faults()),
    ]


def check_versions() -> Iterator[Check]:
    """Python, torch, jax and our own packages, and whether they fit together."""
    section = "Versions"
    yield Check(section, "python", python_platform.python_version())
    for name in _REQUIRED:
        version = installed(name)
        if version is None:
            remedy = f"Install it: pip install {name}"
            yield Check(section, name, "not installed", "broken", remedy)
        elif name == "torch":
            yield _check_extension(version)
        elif name in ("jax", "jaxlib"):
            yield _check_pins(name, version, ("tpu-core", "jax"), "broken")
        else:
            yield Check(section, name, version)
    libtpu = installed("libtpu")
    if libtpu is None:
        yield Check(section, "libtpu", "not installed (needed on a TPU only)")
    else:
        yield _check_pins("libtpu", libtpu, ("jax",), "warning")
    for name in _OURS:
        if version := installed(name):
            yield _check_package(name, version)


def _check_extension(torch_version: str) -> Check:
    """Return whether the C++ extension is there and was built for the installed torch."""
    section, name = "Versions", "torch"
    builds = CORE.builds()
    if not builds:
        remedy = (
            "Reinstall tpu-core with a C++ compiler there: pip install --force-reinstall tpu-core"
        )
        python = ".".join(map(str, sys.version_info[:2]))
        value = f"{torch_version}, and the extension of tpu-core is not built for Python {python}"
        return Check(section, name, value, "broken", remedy)
    if minor(torch_version) not in builds:
        value = f"{torch_version}, and tpu-core was built for {', '.join(builds)}"
        remedy = (
            f"Install a torch that it was built for: pip install torch=={list(builds)[-1]}.*, or "
            "rebuild tpu-core: "
            "pip install --force-reinstall --no-deps --no-build-isolation tpu-core"
        )
        return Check(section, name, value, "broken", remedy)
    return Check(section, name, torch_version)


def _check_package(name: str, version: str) -> Check:
    """Return whether the C++ extension of another package, if it has one, can be loaded."""
    found = importlib.util.find_spec(name.replace("-", "_"))
    if name == "tpu-core" or found is None or found.origin is None:
        return Check("Versions", name, version)
    extension = Extension(found.name, Path(found.origin).parent)
    if extension.folder.exists() and (problem := extension.problem()):
        what, remedy = problem
        return Check("Versions", name, f"{version}: {what}", "broken", remedy)
    return Check("Versions", name, version)


def _check_pins(name: str, version: str, askers: tuple[str, ...], status: Status) -> Check:
    for by in askers:
        pins = pins_of(by, name, extra="tpu")
        if pins is not None and not satisfies(version, pins):
            value = f"{version}, and {by} {installed(by)} asks for {pins}"
            return Check(
                "Versions", name, value, status, f'Install that: pip install "{name}{pins}"'
            )
    return Check("Versions", name, version)


def check_environment() -> Iterator[Check]:
    """Variables that are set, ours validated, and misspelt ones."""
    section = "Environment"
    ours = {spec.env for spec in settings()}
    names = sorted(n for n in os.environ if n in ours or n.startswith(("TPU_", "LIBTPU_")))
    for name in [*names, *(n for n in _OTHER_VARIABLES if n in os.environ)]:
        yield Check(section, name, without_credentials(os.environ[name]))
    for name, meant in misspelt_variables(os.environ):
        yield Check(
            section, name, "is read by nothing", "warning", f"Did you mean {meant}? Rename it."
        )
    try:
        config()
    except ConfigurationError as error:
        what, valid = str(error).splitlines()[:2]
        remedy = f"Correct it or unset it ({valid.strip()})."
        yield Check(section, "configuration", what, "broken", remedy)


def check_platform() -> Iterator[Check]:
    """The platform chosen and why, chips and devices."""
    section = "Platform"
    chips = platforms.Platform.find_chips()
    try:
        found = platforms.Platform.resolve()
    except TpuNotAvailableError as error:
        what = str(error).splitlines()[0]
        remedy = str(error).split("What to do: ")[1].splitlines()[0]
        yield Check(section, "platform", what, "broken", remedy)
    except ConfigurationError:
        return  # reported by check_environment
    else:
        yield _check_plugin(found)
        yield Check(section, "devices", str(platforms.device_count()))
        if found.device_kind_hint:
            yield Check(section, "chips", f"{chips.count} x {found.device_kind_hint}")
    yield Check(section, "looked for", chips.describe())


def _check_plugin(found: platforms.Platform) -> Check:
    value = f"{found.name} ({found.reason})"
    if found.name in ("tpu", "cpu"):
        return Check("Platform", "platform", value)
    plugins = sorted(p.name for p in metadata.entry_points(group="jax_plugins"))
    if any(found.name in name for name in plugins):
        return Check("Platform", "platform", value)
    known = ", ".join(plugins) or "none"
    remedy = (
        f"Install a PJRT plug-in for '{found.name}' (jax knows of: {known}), or unset TPU_PLATFORM."
    )
    return Check("Platform", "platform", f"{value}; no such plug-in found", "warning", remedy)


def check_registration() -> Iterator[Check]:
    """Owner of PyTorch's PrivateUse1 slot, and other backends that want it."""
    section = "Device"
    for name in _RIVALS:
        if version := installed(name):
            remedy = (
                f"Uninstall {name}, or use a separate virtual environment: one process has one "
                "device slot."
            )
            yield Check(section, name, f"{version} is installed too", "warning", remedy)
    for point in metadata.entry_points(group="torch.backends"):
        if not point.value.startswith("tpu_") and point.value.split(".")[0] not in _RIVALS:
            remedy = "Uninstall it if it takes the device slot."
            value = f"{point.value} is loaded at import torch too"
            yield Check(section, f"backend {point.name}", value, "warning", remedy)
    yield _check_slot()


def _check_slot() -> Check:
    section, name = "Device", "torch device slot"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what a stand-down warns of is reported right here
            import torch
    except Exception as error:
        value = f"import torch fails: {type(error).__name__}: {error}"
        remedy = "Try TORCH_DEVICE_BACKEND_AUTOLOAD=0; if that helps, uninstall the other backend."
        return Check(section, name, value, "broken", remedy)
    holder = torch._C._get_privateuse1_backend_name()
    module = getattr(getattr(torch, "tpu", None), "__name__", "")
    if holder == "tpu" and (module.startswith("tpu_core") or module == "torch.tpu"):
        return Check(section, name, "held by tpu-core")
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
        value = "free, because TORCH_DEVICE_BACKEND_AUTOLOAD=0"
        return Check(section, name, value, "warning", "Unset it, or `import tpu_core` in programs.")
    if holder == "privateuseone":
        value = "free: tpu-core was not loaded by import torch"
        remedy = "Reinstall tpu-core, so that its entry point is there: pip install tpu-core"
        return Check(section, name, value, "broken", remedy)
    value = f"held by another backend, as '{holder}'"
    remedy = "Uninstall the other backend, or use a separate virtual environment."
    return Check(section, name, value, "broken", remedy)
