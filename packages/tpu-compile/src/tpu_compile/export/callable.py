"""An exported program as a callable on ``tpu`` tensors."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.utils._pytree import tree_flatten, tree_unflatten, treespec_loads

from tpu_compile.export import with_jax
from tpu_compile.rng import as_scalars
from tpu_core.errors import ExportError
from tpu_core.extend import RandomKey, cast, hide_lines_of, register, to_torch_dtype

_NAME = "tpu_compile.exported.default"
# Programs by key, which is what is recorded; of those that are loaded.
_PROGRAMS: dict[str, jax.export.Exported] = {}


class LoadedProgram:
    """Result of `load`: called as the module that was exported, on tensors on ``tpu``.

    Each call is recorded as one op, so that it runs in one program with the ops around it.

    Attributes:
        manifest: Content of ``manifest.json``.
        weights: Its weights on the device, by name. A buffer that the program writes is updated.
    """

    def __init__(self, folder: Path, device: torch.device) -> None:
        try:
            self.manifest = with_jax.read_manifest(folder)
            bytecode = (folder / with_jax.BYTECODE).read_bytes()
        except (ValueError, OSError) as error:
            raise ExportError(str(error), remedy="Name a folder that save() wrote.") from error
        _define()
        text = (folder / with_jax.MANIFEST).read_bytes()
        self._key = hashlib.sha256(bytecode + text).hexdigest()
        _PROGRAMS[self._key] = with_jax.exported_program(self.manifest, bytecode)
        self.weights = _weights(folder, self.manifest, device)
        self._device = device
        self._in_spec = treespec_loads(self.manifest["torch"]["in"])
        self._out_spec = treespec_loads(self.manifest["torch"]["out"])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the program; inputs that the module writes are written.

        Args:
            *args, **kwargs: Those of the exported module; numbers are as they were exported.

        Returns:
            What the module returned.

        Raises:
            ExportError: The arguments are not structured as the exported ones, or a tensor has
                another shape or dtype than the program takes.
        """
        leaves, spec = tree_flatten((args, kwargs))
        if spec != self._in_spec:
            raise ExportError(
                "The arguments are not structured as those that were exported.",
                values={"exported": self._in_spec, "given": spec},
                remedy="Call it as the module was called in torch.export.export.",
            )
        tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        inputs = [*self.weights.values(), *tensors]
        with torch.no_grad():
            made = list(torch.ops.tpu_compile.exported(inputs, self._state(inputs), self._key))
            results = []
            written = dict(zip((i["name"] for i in self.manifest["inputs"]), tensors))
            for described, tensor in zip(self.manifest["outputs"], made, strict=True):
                writes = described["writes"]
                if writes is None:
                    results.append(tensor)
                elif "input" in writes:
                    written[writes["input"]].copy_(tensor)
                elif writes["buffer"] in self.weights:
                    self.weights[writes["buffer"]].copy_(tensor)
        return tree_unflatten(results, self._out_spec)

    def _state(self, inputs: list[torch.Tensor]) -> list[int]:
        """The words of the generator's state before the program; it advances as in eager."""
        count = self.manifest["draws"]
        if not count:
            return []
        device = inputs[0].device if inputs else self._device
        (seed, offset), *_ = RandomKey.seeds(device.index, count)
        return as_scalars(n >> shift & 0xFFFFFFFF for n in (seed, offset) for shift in (0, 32))


def load(path: str | Path, device: torch.device | str = "tpu") -> LoadedProgram:
    """Load a program that `save` wrote, to be called on tensors on ``tpu``.

    Args:
        path: The folder.
        device: Device of its weights.

    Raises:
        ExportError: The folder was not written by `save`.

    Example:
        >>> run = load("model")
        >>> y = run(x.to("tpu"))
    """
    return LoadedProgram(Path(path), torch.device(device))


def _weights(
    folder: Path, manifest: dict[str, Any], device: torch.device
) -> dict[str, torch.Tensor]:
    if not manifest["weights"]:
        return {}
    from safetensors.torch import load_file

    tensors = {n: t.to(device) for n, t in load_file(folder / with_jax.WEIGHTS).items()}
    return {w["name"]: tensors[w["tensor"]] for w in manifest["weights"]}


@functools.cache
def _define() -> None:
    hide_lines_of(__file__)
    library = torch.library.Library("tpu_compile", "FRAGMENT")
    library.define("exported(Tensor[] inputs, Scalar[] state, str key) -> Tensor[]")
    library.impl("exported", _meta, "Meta")
    _libraries.append(library)
    register(_NAME, _lower)


_libraries: list[torch.library.Library] = []  # an op ends with its library


def _meta(inputs: list[torch.Tensor], state: list[Any], key: str) -> list[torch.Tensor]:
    from tpu_core.extend import to_numpy_dtype

    avals = [jax.ShapeDtypeStruct(tuple(x.shape), to_numpy_dtype(x.dtype)) for x in inputs]
    avals += [jax.ShapeDtypeStruct((4,), np.uint32)] * bool(state)
    try:
        with jax.enable_x64(True):
            made = jax.eval_shape(_PROGRAMS[key].call, *avals)
    except ValueError as error:
        raise ExportError(
            f"The inputs do not fit the exported program: {error}",
            remedy="Pass tensors of the shapes and dtypes in its manifest.",
        ) from error
    return [torch.empty(a.shape, dtype=to_torch_dtype(a.dtype), device="meta") for a in made]


def _lower(inputs: Sequence[jax.Array], state: Sequence[Any], key: str) -> list[jax.Array]:
    words = [jnp.stack([cast(n, np.uint32) for n in state])] if state else []
    return list(_PROGRAMS[key].call(*inputs, *words))
