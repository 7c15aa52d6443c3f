"""Run an exported program by JAX alone: this module imports neither torch nor tpu_core.

What `save` writes is a folder:

* ``manifest.json``: inputs, outputs, weights and how the program is called.
* ``program.stablehlo.bc``: the program as portable StableHLO bytecode, whose arguments are the
  weights in the manifest's order, then the inputs. Where it draws random numbers, ``uint32[4]``
  follows: low and high words of seed and offset. ``program.stablehlo.mlir``: its text.
* ``weights.safetensors``: the weights, unless they are constants of the program.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

FORMAT = 1
MANIFEST = "manifest.json"
BYTECODE = "program.stablehlo.bc"
TEXT = "program.stablehlo.mlir"
WEIGHTS = "weights.safetensors"


@dataclass(frozen=True)
class JaxProgram:
    """An exported program as a function of arrays.

    Attributes:
        manifest: Content of ``manifest.json``.
        weights: The arrays before the inputs, in the manifest's order.
        exported: The program for JAX, to be called in other JAX functions.

    Example:
        >>> program = load("model")
        >>> (y,) = program(x)
    """

    manifest: dict[str, Any]
    weights: list[jax.Array]
    exported: jax.export.Exported
    _call: Callable[..., list[jax.Array]]

    def __call__(self, *inputs: Any, seed: int | None = None, offset: int = 0) -> list[jax.Array]:
        """The program's outputs in the manifest's order.

        Args:
            *inputs: Arrays of the manifest's shapes and dtypes, in its order.
            seed: Of a program that draws random numbers, whose manifest has ``draws``: as of
                ``torch.manual_seed``.
            offset: Of the generator; each draw advances it by 4.

        Raises:
            ValueError: Number, shape or dtype of an input differs, or there is no seed where the
                program draws.
        """
        state = []
        if self.manifest["draws"]:
            if seed is None:
                raise ValueError("The program draws random numbers: call it with seed=.")
            words = [n >> shift & 0xFFFFFFFF for n in (seed, offset) for shift in (0, 32)]
            state = [np.array(words, np.uint32)]
        with jax.enable_x64(True):  # 64-bit inputs keep their width
            return self._call(*self.weights, *inputs, *state)


def load(path: str | Path) -> JaxProgram:
    """Load what `tpu_compile.export.save` wrote.

    Args:
        path: The folder.

    Raises:
        ValueError: It is not such a folder, or of a later format.
        ImportError: safetensors is missing, and the weights lie beside the program.
    """
    folder = Path(path)
    manifest = read_manifest(folder)
    exported = exported_program(manifest, (folder / BYTECODE).read_bytes())
    weights = []
    if manifest["weights"]:
        from safetensors.flax import load_file

        with jax.enable_x64(True):
            tensors = load_file(folder / WEIGHTS)
        weights = [tensors[w["tensor"]] for w in manifest["weights"]]
    return JaxProgram(manifest, weights, exported, jax.jit(exported.call))


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a folder.

    Raises:
        ValueError: There is none, or of a later format.
    """
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
        version = int(manifest["format"])
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{folder} is no exported program: {error}") from error
    if version > FORMAT:
        raise ValueError(
            f"{folder} has format {version}, this tpu_compile reads formats up to {FORMAT}: "
            f"use a later one."
        )
    return manifest


def exported_program(manifest: dict[str, Any], bytecode: bytes) -> jax.export.Exported:
    """The program as JAX holds it, put together from the manifest and the bytecode."""
    scope = jax.export.SymbolicScope(manifest["constraints"])
    arguments = [*manifest["weights"], *manifest["inputs"]]
    if manifest["draws"]:
        arguments.append({"shape": [4], "dtype": "uint32"})
    ins = tuple(_aval(a, scope) for a in arguments)
    outs = tuple(_aval(a, scope) for a in manifest["outputs"])
    call = manifest["call"]
    of_0_10 = "_has_named_shardings" in jax.export.Exported.__dataclass_fields__
    return jax.export.Exported(
        fun_name=manifest["name"],
        in_tree=jax.tree_util.tree_structure(((0,) * len(ins), {})),
        in_avals=ins,
        out_tree=jax.tree_util.tree_structure([0] * len(outs)),
        out_avals=outs,
        **({"_has_named_shardings": False} if of_0_10 else {}),
        _in_named_shardings=(None,) * len(ins),
        _out_named_shardings=(None,) * len(outs),
        in_shardings_hlo=(None,) * len(ins),
        out_shardings_hlo=(None,) * len(outs),
        nr_devices=1,
        platforms=tuple(manifest["platforms"]),
        ordered_effects=(),
        unordered_effects=(),
        disabled_safety_checks=(),
        mlir_module_serialized=bytecode,
        calling_convention_version=call["convention"],
        module_kept_var_idx=tuple(call["kept"]),
        uses_global_constants=call["global_constants"],
        _get_vjp=None,
    )


def _aval(described: dict[str, Any], scope: Any) -> Any:
    text = ", ".join(map(str, described["shape"]))
    with jax.enable_x64(True):
        shape = jax.export.symbolic_shape(text, scope=scope) if text else ()
        return jax.core.ShapedArray(shape, jax.numpy.dtype(described["dtype"]))
