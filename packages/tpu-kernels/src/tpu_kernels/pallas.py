"""Pallas kernels for PyTorch, also found as ``torch.tpu.pallas``."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl

from tpu_core.extend import Platform
from tpu_kernels import decorator
from tpu_kernels.signature import parameter_names

logger = logging.getLogger("tpu_core")

__all__ = ["custom_jax_kernel", "interpret", "jax_op", "pallas_call"]


def interpret() -> bool:
    """Return whether Pallas kernels run by the interpreter: on every platform but ``tpu``.

    Example:
        >>> pl.pallas_call(kernel, out_shape=shape, interpret=tpu_kernels.interpret())
    """
    platform = Platform.resolve().name
    if platform != "tpu":
        _say(platform)
    return platform != "tpu"


@functools.cache
def _say(platform: str) -> None:
    logger.info("Pallas kernels run by the interpreter on platform '%s'", platform)


def pallas_call(kernel: Callable[..., None], out_shape: Any, **options: Any) -> Callable[..., Any]:
    """`jax.experimental.pallas.pallas_call`, by Mosaic on TPU and by the interpreter elsewhere.

    Which of them is decided where a program is lowered, so that a function that calls the kernel
    runs on the CPU and compiles for a TPU without change.

    Args:
        kernel, out_shape, options: As of `jax.experimental.pallas.pallas_call`, without
            ``interpret``. ``compiler_params`` are for Mosaic alone.

    Returns:
        A function of JAX arrays.

    Example:
        >>> def double(x_ref, out_ref):
        ...     out_ref[...] = x_ref[...] * 2
        >>> @tpu_kernels.jax_op("my::double")
        ... def f(x: jax.Array) -> jax.Array:
        ...     shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        ...     return tpu_kernels.pallas_call(double, shape)(x)
    """
    mosaic = pl.pallas_call(kernel, out_shape, **options)
    shared = {k: v for k, v in options.items() if k != "compiler_params"}
    interpreted = pl.pallas_call(kernel, out_shape, interpret=True, **shared)

    def call(*args: jax.Array) -> Any:
        interpret()
        return lax.platform_dependent(*args, tpu=mosaic, default=interpreted)

    return call


def jax_op(
    name: str,
    fn: Callable[..., Any] | None = None,
    *,
    donate_argnums: Sequence[int] | int | None = None,
    mesh: Any = None,
    input_partition_specs: Any = None,
    output_partition_specs: Any = None,
    **options: Any,
) -> Any:
    """`tpu_kernels.jax_op` with further arguments that some programs pass.

    Args:
        name, fn, options: As of `tpu_kernels.jax_op`.
        donate_argnums: Not needed: the memory of a tensor that nothing holds any more is used
            again by itself.
        mesh, input_partition_specs, output_partition_specs: One process drives one device, so only
            None is taken.

    Raises:
        NotImplementedError: A mesh or a partition is asked for.
    """
    if any(v is not None for v in (mesh, input_partition_specs, output_partition_specs)):
        raise NotImplementedError(
            f"{name}: a process drives one device, so an op has no mesh. Use torch.distributed "
            "around it."
        )
    return decorator.jax_op(name, fn, **options)


def custom_jax_kernel(
    fn: Callable[..., Any],
    name: str | None = None,
    static_argnums: Sequence[int] | int = (),
    donate_argnums: Sequence[int] | int = (),
    input_output_aliases: Mapping[int, int] | None = None,
    **options: Any,
) -> decorator.JaxOp:
    """A `jax_op` from the arguments that `jax.jit` and ``pallas_call`` have.

    Args:
        fn: The JAX function.
        name: ``"namespace::name"``, or a name in the namespace ``jax_kernels``; that of the
            function unless given.
        static_argnums: Positions of static parameters.
        donate_argnums, input_output_aliases: Memory of inputs that may be used for results; not
            needed, as for `jax_op`. An argument that shall be *written* is named in ``mutates``.
        options: As of `jax_op`.
    """
    name = name or fn.__name__
    positions = (static_argnums,) if isinstance(static_argnums, int) else tuple(static_argnums)
    parameters = parameter_names(fn)
    static = [parameters[i] for i in positions]
    full = name if "::" in name else f"jax_kernels::{name}"
    made: decorator.JaxOp = jax_op(full, fn, static=static, **options)
    return made
