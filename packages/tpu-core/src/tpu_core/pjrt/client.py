"""Devices, transfers, compiling and running, on jaxlib's private API (as of 0.10 to 0.12).

`smoke_test` runs each private call once and names what broke, should jaxlib change under us.
"""

from __future__ import annotations

import functools
import logging
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import torch
from jax._src import core as jax_core
from jax._src import distributed as jax_distributed
from jax._src import xla_bridge
from jax._src.interpreters import pxla
from jax._src.lax import lax as jax_lax
from jax._src.lib import xla_client
from jax._src.sharding_impls import SingleDeviceSharding

from tpu_core import libtpu_lock
from tpu_core.config import config
from tpu_core.dtypes import TO_TORCH, to_numpy_dtype
from tpu_core.errors import TpuNotAvailableError
from tpu_core.pjrt import known_faults
from tpu_core.pjrt.host import instruction_set, machine
from tpu_core.pjrt.host_memory import keep_freed_memory, limit_free_memory
from tpu_core.platforms import Platform, local_processes, visible_indices

logger = logging.getLogger("tpu_core")

# The dtypes of the arrays that runtime scalars travel in; the extension's enum Pack.
PACK_DTYPES = (np.dtype(np.float32), np.dtype(np.float64), np.dtype(np.int32), np.dtype(np.int64))


@dataclass(frozen=True, slots=True)
class Client:
    """The PJRT client behind the device ``tpu``.

    Attributes:
        platform: The platform and why it was chosen.
        devices: JAX devices of ``tpu:0``, ``tpu:1``, ...; all the same one where each of several
            processes has one device, so that ``tpu:{local_rank}`` is a process' own.
        backend: The PJRT client.
        version: Version of the platform and what it makes code for, part of every cache key.
    """

    platform: Platform
    devices: tuple[Any, ...]
    backend: Any
    version: str

    def device_key(self, index: int) -> int | None:
        """Part of a cache key for the device: nothing where a program serves each of them."""
        # A program for one CPU or GPU is loaded for any other, in any process. Whether libtpu
        # does that is not known.
        return self.devices[index].id if self.platform.name == "tpu" else None

    def has_fault(self, name: str) -> bool:
        """Return whether the installed releases have a known fault on the platform.

        Example:
            >>> runtime().client.has_fault("racing-reduce-scatter")
        """
        return known_faults.present(name, self.platform.name)

    def put(self, array: np.ndarray[Any, Any], device: Any) -> jax.Array:
        """A numpy array on a device. The array's memory must not be written afterwards.

        Args:
            array: Of any dtype that JAX has, those of 64 bits included.
            device: A JAX device.

        Example:
            >>> client = runtime().client
            >>> client.put(np.ones(3, np.float32), client.devices[0])
        """
        return put(array, device)

    def exact(self, array: Any, device: Any) -> Any:
        """An array that a program is given, without the padding that it may have.

        Args:
            array: A `jax.Array`, which is returned as it is, or a padded array.
            device: The JAX device that it is on.

        Example:
            >>> client.exact(arguments[0], client.devices[0]).shape
        """
        from tpu_core.pjrt.padded_array import exact

        return exact(array, device)

    def members(self) -> tuple[Any, ...]:
        """The device of each process of the world, by rank: its first one where it has several.

        Example:
            >>> runtime().client.members()[World.current().rank] in runtime().client.devices
            True
        """
        first: dict[int, Any] = {}
        for device in self.backend.devices():
            first.setdefault(device.process_index, device)
        own = self.devices[0]
        first[own.process_index] = own
        return tuple(first[i] for i in sorted(first))


def start() -> Client:
    """Start the platform's client and pick its devices.

    Raises:
        TpuNotAvailableError: The platform has no device, or its plug-in does not start.
    """
    platform = Platform.resolve()
    fresh = not xla_bridge.backends_are_initialized()
    shares_machine = local_processes() > 1 or jax_distributed.global_state.num_processes > 1
    if platform.name == "cpu" and fresh:
        # Without this jax would start every installed plug-in, libtpu first.
        if not getattr(jax.config, "jax_platforms", None):
            jax.config.update("jax_platforms", "cpu")
        if config().num_devices:
            own = 1 if shares_machine else config().num_devices
            jax.config.update("jax_num_cpu_devices", own)
        if config().keep_memory and keep_freed_memory():
            limit_free_memory()
    try:
        devices = jax.local_devices(backend=platform.name)
    except RuntimeError as error:
        lock = libtpu_lock.explain(str(error))
        raise TpuNotAvailableError(
            f"Platform '{platform.name}' did not start: {error}",
            values={"chosen by": platform.reason, **lock},
            remedy=libtpu_lock.REMEDY if lock else None,
        ) from error
    wanted = config().num_devices
    if shares_machine:
        devices = devices[:1] * max(local_processes(), wanted or 1)
    elif platform.name == "cpu":
        if wanted and wanted > len(devices):
            raise TpuNotAvailableError(
                f"TPU_NUM_DEVICES={wanted}, but jax had already started with {len(devices)} CPU "
                f"devices.",
                remedy="Use the device before jax, or set jax_num_cpu_devices yourself.",
            )
        devices = devices[: wanted or 1]
    picked = tuple(devices[i] for i in visible_indices(len(devices)))
    if not picked:
        raise TpuNotAvailableError(f"Platform '{platform.name}' has no visible device.")
    # jaxlib makes the type of this iterator at its first use. A Python audit hook, as filelock's,
    # lets other threads run meanwhile, which end the process where they use half of a type.
    tuple(xla_client.DeviceList(picked))
    backend = picked[0].client
    version = version_of(platform.name, backend.platform_version, picked[0].device_kind)
    return Client(platform, picked, backend, version)


def version_of(platform: str, platform_version: str, device_kind: str = "") -> str:
    """Version of a platform and of all that decides what code is made for it.

    Args:
        platform: Name of it, as of `Platform`.
        platform_version: As its client gives it. That of libtpu names the chip.
        device_kind: Name of the chip, for other platforms than CPUs and TPUs.
    """
    parts = [platform, platform_version, os.environ.get("XLA_FLAGS", "")]
    if platform not in ("cpu", "tpu"):
        parts.append(device_kind)
    if platform == "cpu":
        parts += [machine(), instruction_set()]
    else:
        parts.append(os.environ.get("LIBTPU_INIT_ARGS", ""))
    parts += [f"{name}={value}" for name, value in known_faults.compile_options(platform)]
    return " ".join(part for part in parts if part)


@functools.cache
def _aval(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    return jax_core.ShapedArray(shape, dtype)


@functools.cache
def _sharding(device: Any) -> Any:
    return SingleDeviceSharding(device)


def put(array: np.ndarray[Any, Any], device: Any) -> jax.Array:
    """A numpy array on a device. The array's memory must not be written afterwards."""
    return xla_client.batched_device_put(
        _aval(array.shape, array.dtype), _sharding(device), [array], [device], True, enable_x64=True
    )


def put_tensor(tensor: torch.Tensor, device: Any) -> jax.Array:
    """A contiguous CPU tensor, given up by its owner, on a device."""
    return put(tensor_to_numpy(tensor), device)


def tensor_to_numpy(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """The memory of a contiguous CPU tensor as a numpy array, 16- and 8-bit floats included."""
    dtype = to_numpy_dtype(tensor.dtype)
    if dtype.isbuiltin == 1:
        return tensor.detach().numpy()
    raw = {1: torch.uint8, 2: torch.int16}[tensor.element_size()]
    return tensor.detach().view(raw).numpy().view(dtype)


def fetch(array: jax.Array) -> torch.Tensor:
    """A device array as a CPU tensor; waits for it. The memory may be the device's: do not
    write.
    """
    host = np.asarray(array)
    dtype = TO_TORCH[host.dtype]
    if not host.flags.c_contiguous:
        host = np.ascontiguousarray(host).reshape(host.shape)
    if host.dtype.isbuiltin != 1:
        raw = {1: np.uint8, 2: np.int16}[host.dtype.itemsize]
        return _from_numpy(host.view(raw)).view(dtype)
    return _from_numpy(host)


_warned = False


def _from_numpy(host: np.ndarray[Any, Any]) -> torch.Tensor:
    # PyTorch warns once, or always, of read-only memory, which our callers only read.
    global _warned
    if _warned and not torch.is_warn_always_enabled():
        return torch.from_numpy(host)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        tensor = torch.from_numpy(host)
    _warned = not host.flags.writeable
    return tensor


@functools.lru_cache(maxsize=4096)
def put_numbers(kind: int, data: bytes, device: Any) -> jax.Array:
    """Runtime scalars as a 1-d array; equal bytes share one array."""
    return put(np.frombuffer(data, PACK_DTYPES[kind]), device)


def move(array: jax.Array, device: Any) -> jax.Array:
    """A copy of ``array`` on another device."""
    return jax.device_put(array, device)


@dataclass(frozen=True, slots=True)
class Loaded:
    """An executable on one device.

    Attributes:
        execute: ``execute(arrays) -> results``; results take `consume_with_handlers(handlers)`.
        handlers: One result handler an output.
        executable: The PJRT executable.
        temporary_bytes: Memory it needs beside arguments and outputs.
        aliased_bytes: Of the outputs, what takes the memory of a donated argument.

    Example:
        >>> (y,) = loaded.execute([x]).consume_with_handlers(loaded.handlers)
    """

    execute: Any
    handlers: tuple[Any, ...]
    executable: Any
    temporary_bytes: int
    aliased_bytes: int = 0


def compile_options(device: Any, client: Client) -> Any:
    """Options of a single-device program."""
    options = xla_client.CompileOptions()
    build = options.executable_build_options
    build.device_assignment = xla_client.DeviceAssignment.create(np.array([[device.id]]))
    build.num_replicas = build.num_partitions = 1
    options.env_option_overrides = list(known_faults.compile_options(client.platform.name))
    return options


def compile_module(module: bytes, device: Any, client: Client) -> Any:
    """Compile StableHLO bytecode for one device."""
    return client.backend.compile_and_load(
        module, xla_client.DeviceList((device,)), compile_options(device, client)
    )


def serialize(executable: Any) -> bytes:
    """An executable as bytes; they hold machine code."""
    return executable.serialize()


def serialized_for_cache(executable: Any) -> bytes | None:
    """As `serialize`; None for a program that has no form on disk, as one that calls into Python.

    Such a program runs, and each process compiles it.
    """
    try:
        return serialize(executable)
    except Exception as error:  # each plug-in has an error of its own for it
        logger.info("A program is not kept in the cache, each process compiles it: %s", error)
        return None


def deserialize(data: bytes, device: Any, client: Client) -> Any:
    """The inverse of `serialize`, on the same platform and version."""
    if b"lapack_" in data:
        # Lowering a factorization starts LAPACK; loading one does not, and its calls would jump
        # to 0.
        from jaxlib import lapack

        lapack._lapack.initialize()
    return client.backend.deserialize_executable(
        data, xla_client.DeviceList((device,)), compile_options(device, client)
    )


def load(
    executable: Any, outputs: Sequence[tuple[tuple[int, ...], np.dtype[Any]]], device: Any
) -> Loaded:
    """Wrap an executable with handlers that make jax.Arrays of its outputs.

    Args:
        executable: From `compile_module` or `deserialize`.
        outputs: Shape and dtype of each output.
        device: Its device.
    """
    handlers = tuple(
        pxla.global_aval_to_result_handler(_aval(shape, dtype), _sharding(device), True)
        for shape, dtype in outputs
    )
    try:
        stats = executable.get_compiled_memory_stats()
        temporary = int(stats.temp_size_in_bytes)
        aliased = int(stats.alias_size_in_bytes)
    except Exception:  # not every plug-in has them; the peak then counts arguments and outputs only
        temporary = aliased = 0
    return Loaded(executable.execute_sharded, handlers, executable, temporary, aliased)


def weak(value: jax.Array) -> jax.Array:
    """A 0-d array as a number: weakly typed, so that it does not widen what it meets."""
    return jax_lax._convert_element_type(value, value.dtype, weak_type=True)


def is_ready(array: jax.Array) -> bool:
    """Return whether the array's computation has ended."""
    return bool(getattr(array, "is_ready")())  # noqa: B009 (not in jax.Array's type)


def module_text(module: bytes) -> str:
    """StableHLO bytecode as text."""
    from jax._src.interpreters import mlir
    from jax._src.lib.mlir import ir

    with mlir.make_ir_context():
        return str(ir.Module.parse(module))


def optimized_text(executable: Any) -> str:
    """Optimized HLO of a program, as text."""
    return "\n\n".join(module.to_string() for module in executable.hlo_modules())


def smoke_test(client: Client) -> None:
    """Compile, run, serialize and reload a tiny program through every private call.

    Raises:
        RuntimeError: Names the call that this jaxlib no longer has.
    """
    device = client.devices[0]
    step = "start"
    try:
        step = "batched_device_put"
        x = put(np.ones(4, np.float32), device)
        step = "lowering"
        lowered = jax.jit(lambda v: v + 1).lower(jax.ShapeDtypeStruct((4,), np.float32))
        module = module_bytes(lowered)
        step = "compile_and_load"
        executable = compile_module(module, device, client)
        step = "serialize"
        data = serialize(executable)
        step = "deserialize_executable"
        executable = deserialize(data, device, client)
        step = "result handlers"
        loaded = load(executable, [((4,), np.dtype(np.float32))], device)
        step = "execute_sharded"
        (y,) = loaded.execute([x]).consume_with_handlers(loaded.handlers)
        step = "fetch"
        assert fetch(y).tolist() == [2.0] * 4
    except Exception as error:
        import jaxlib

        raise RuntimeError(
            f"jaxlib {jaxlib.__version__} does not work with tpu_core: {step} failed: {error}"
        ) from error


def module_bytes(lowered: Any, aliases: Mapping[int, int] | None = None) -> bytes:
    """StableHLO bytecode of a lowered jax function, without locations, so that equal programs are
    equal.

    Args:
        lowered: From ``jax.jit(...).lower``.
        aliases: For arguments whose memory an output takes, the output. jax would pair them by
            shape alone.
    """
    from jax._src.interpreters import mlir

    from tpu_core.pjrt.guards import guard
    from tpu_core.pjrt.instruction_names import write_with_dashes
    from tpu_core.pjrt.padded_constants import hide_padded_constants
    from tpu_core.pjrt.products import fold_transposes, widen_operands

    module = lowered.compiler_ir("stablehlo")
    platforms = lowered._lowering._platforms
    on_cpu = platforms == ("cpu",)
    state = lowered._lowering.compile_args.get("shape_poly_state")
    if state is not None and state.uses_dim_vars:  # it calls a program of symbolic sizes
        module = mlir.refine_polymorphic_shapes(module)
    fold_transposes(module)
    guard(
        module,
        widest=32 if "tpu" in platforms else 64,
        rounds_quotients="cuda" not in platforms,
    )
    if on_cpu:
        widen_operands(module)
        write_with_dashes(module)
    if "tpu" in platforms:
        hide_padded_constants(module)
    if aliases:
        set_aliases(module, aliases)
    return mlir.module_to_bytecode(module)


def set_aliases(module: Any, aliases: Mapping[int, int]) -> None:
    """Let outputs of a StableHLO module take the memory of arguments.

    Args:
        module: Has a function ``main``.
        aliases: For arguments whose memory an output takes, the output.
    """
    from jax._src.interpreters import mlir
    from jax._src.lib.mlir import ir

    with module.context:
        named = (op for op in module.body if getattr(op, "sym_name", None))
        (main,) = (op for op in named if op.sym_name.value == "main")
        attributes = list(main.arg_attrs)
        for argument, output in aliases.items():
            own = {a.name: a.attr for a in attributes[argument]}
            own["tf.aliasing_output"] = mlir.i32_attr(output)
            attributes[argument] = ir.DictAttr.get(own)
        main.arg_attrs = ir.ArrayAttr.get(attributes)
