"""Write a program of `torch.export` as a folder with StableHLO, weights and a manifest."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.utils._pytree import tree_flatten, treespec_dumps

from tpu_compile._version import __version__
from tpu_compile.export.evaluation import as_function, decomposed, dimension, draws
from tpu_compile.export.with_jax import BYTECODE, FORMAT, MANIFEST, TEXT, WEIGHTS
from tpu_core.errors import ExportError
from tpu_core.extend import Target, copy_to_jax, to_numpy_dtype


def save(
    program: ExportedProgram,
    path: str | Path,
    *,
    weights: str = "beside",
    platforms: Sequence[str] = ("cpu", "tpu"),
) -> None:
    """Write a program so that JAX runs it without PyTorch.

    Args:
        program: From ``torch.export.export``, on any device. Dimensions that are dynamic there are
            symbolic in the program.
        path: The folder, made if it is not there.
        weights: ``"beside"`` the program in a safetensors file, or ``"inside"`` as its constants.
        platforms: JAX platforms that it shall run on.

    Raises:
        ExportError: An op has no lowering, or a size is computed in a way that JAX's symbolic
            shapes cannot express.

    Example:
        >>> save(torch.export.export(model, (x,)), "model")
    """
    if weights not in ("beside", "inside"):
        raise ValueError(f"weights is 'beside' or 'inside', not {weights!r}.")
    program = decomposed(program)
    constraints = _constraints(program)
    scope = jax.export.SymbolicScope(constraints)
    tensors = _weights(program)
    inputs = _inputs(program)

    given: list[dict[str, Any]] = [_describe(n, t, scope) for n, t in tensors.items()]
    given += [_describe(n, t, scope) for n, t in inputs.items()]
    count = draws(program.graph_module)
    given += [{"name": "state", "shape": [4], "dtype": "uint32"}] * bool(count)
    function = as_function(program.graph_module, scope)
    if weights == "inside":
        constants = [copy_to_jax(t) for t in tensors.values()]
        given = given[len(tensors) :]
        whole = function

        def function(*arrays: jax.Array) -> list[jax.Array]:
            return whole(*constants, *arrays)

    # One program for all platforms has no kernel of one of them.
    with Target("portable").applied(), jax.enable_x64(True):
        arguments = [_argument(d, scope) for d in given]
        lowered = jax.export.export(jax.jit(function), platforms=list(platforms))(*arguments)

    beside = weights == "beside"
    kept = len(tensors) if beside else 0
    stored = _distinct(tensors) if beside else {}
    manifest = {
        "format": FORMAT,
        "name": lowered.fun_name,
        "inputs": given[kept : -1 if count else None],
        "draws": count,
        "outputs": [
            {**o, "shape": [_json(d) for d in a.shape], "dtype": str(a.dtype)}
            for o, a in zip(_outputs(program), lowered.out_avals, strict=True)
        ],
        "weights": [{**d, "tensor": stored[d["name"]]} for d in given[:kept]],
        "constraints": constraints,
        "platforms": list(lowered.platforms),
        "call": {
            "convention": lowered.calling_convention_version,
            "kept": list(lowered.module_kept_var_idx),
            "global_constants": lowered.uses_global_constants,
        },
        "torch": {
            "in": treespec_dumps(program.call_spec.in_spec),
            "out": treespec_dumps(program.call_spec.out_spec),
        },
        "versions": {
            "tpu-compile": __version__,
            "torch": torch.__version__,
            "jax": version("jax"),
        },
    }
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / BYTECODE).write_bytes(lowered.mlir_module_serialized)
    (folder / TEXT).write_text(str(lowered.mlir_module()))
    if beside and tensors:
        _write_weights(folder / WEIGHTS, {n: tensors[n] for n in set(stored.values())})
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


def _constraints(program: ExportedProgram) -> list[str]:
    """Bounds of the symbolic sizes, in JAX's language."""
    found = []
    for symbol, bounds in program.range_constraints.items():
        found.append(f"{symbol} >= {max(int(bounds.lower), 1)}")
        if bounds.upper.is_finite:
            found.append(f"{symbol} <= {int(bounds.upper)}")
    # JAX does not see of each size that it is one, such as of b * (s - 1).
    scope = jax.export.SymbolicScope(found)
    sizes = (n for node in program.graph.nodes for n in _sizes(node.meta.get("val")))
    unclear = dict.fromkeys(f"{n} >= 0" for n in _expressible(sizes, scope) if not _is_natural(n))
    return [*found, *unclear]


def _expressible(sizes: Iterator[torch.SymInt], scope: Any) -> Iterator[Any]:
    for size in sizes:
        with contextlib.suppress(ValueError):  # raised where an op needs it
            yield dimension(size, scope)


def _is_natural(size: Any) -> bool:
    try:
        return bool(size >= 0)
    except jax.errors.InconclusiveDimensionOperation:
        return False


def _sizes(value: Any) -> Iterator[torch.SymInt]:
    tensors = (v for v in tree_flatten(value)[0] if isinstance(v, torch.Tensor))
    sizes: Iterator[Any] = (n for t in tensors for n in t.shape)
    yield from (n for n in sizes if isinstance(n, torch.SymInt))


def _weights(program: ExportedProgram) -> dict[str, torch.Tensor]:
    """Parameters, buffers and constants in the order of the program's arguments."""
    found: dict[str, torch.Tensor] = {}
    for spec in program.graph_signature.input_specs:
        target = spec.target
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR):
            assert target is not None
            held = program.state_dict.get(target)
            value = program.constants[target] if held is None else held
            assert isinstance(value, torch.Tensor)
            found[target] = value.detach()
        elif spec.kind is not InputKind.USER_INPUT:
            raise ExportError(f"Input {target!r} of kind {spec.kind.name} cannot be exported.")
    return found


def _inputs(program: ExportedProgram) -> dict[str, torch.Tensor]:
    """The inputs that are tensors, as fake ones; numbers are compiled in."""
    names = {
        s.arg.name
        for s in program.graph_signature.input_specs
        if s.kind is InputKind.USER_INPUT and hasattr(s.arg, "name")
    }
    return {
        n.name: n.meta["val"]
        for n in program.graph.nodes
        if n.op == "placeholder" and n.name in names and isinstance(n.meta["val"], torch.Tensor)
    }


def _describe(name: str, t: torch.Tensor, scope: Any) -> dict[str, Any]:
    shape = [_json(dimension(n, scope)) for n in t.shape]
    return {"name": name, "shape": shape, "dtype": str(to_numpy_dtype(t.dtype))}


def _argument(described: dict[str, Any], scope: Any) -> jax.ShapeDtypeStruct:
    text = ", ".join(map(str, described["shape"]))
    shape = jax.export.symbolic_shape(text, scope=scope) if text else ()
    return jax.ShapeDtypeStruct(shape, jax.numpy.dtype(described["dtype"]))


def _json(dimension: Any) -> int | str:
    return dimension if isinstance(dimension, int) else str(dimension)


def _outputs(program: ExportedProgram) -> list[dict[str, Any]]:
    """Name of each output, and what it is the new value of: ``{"buffer": name}``, or an input."""
    kinds = {OutputKind.BUFFER_MUTATION: "buffer", OutputKind.USER_INPUT_MUTATION: "input"}
    return [
        {"name": s.arg.name, "writes": {kinds[s.kind]: s.target} if s.kind in kinds else None}
        for s in program.graph_signature.output_specs
        if hasattr(s.arg, "name")
    ]


def _distinct(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """For each name the one that its tensor is stored under: tied weights are stored once."""
    first: dict[tuple[Any, ...], str] = {}
    places = {n: (t.data_ptr() or n, t.shape, t.stride(), t.dtype) for n, t in tensors.items()}
    return {n: first.setdefault(place, n) for n, place in places.items()}


def _write_weights(file: Path, tensors: dict[str, torch.Tensor]) -> None:
    from safetensors.torch import save_file

    save_file({n: t.cpu().contiguous().clone() for n, t in tensors.items()}, file)
