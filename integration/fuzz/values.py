"""Arguments of a call as JSON values, made into tensors on any device and into Python source.

Numbers, strings, None and lists stand for themselves; everything else is a dict with one tag:
``{"t": shape, ...}`` a tensor, ``{"dtype": name}``, ``{"complex": [re, im]}``,
``{"float": "nan"}``, ``{"memory_format": name}``, ``{"device": True}``, ``{"dict": {...}}``.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch

# How a tensor lies in its storage; each is made by views of a dense tensor on its device.
LAYOUTS = ("dense", "transposed", "strided", "offset", "expanded", "flipped_order")
SPECIALS = (math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0, 0.5, 65504.0, -1e-3)


def tensor(
    shape: list[int], dtype: str = "float32", fill: str = "quarters", seed: int = 0, **more: Any
) -> dict[str, Any]:
    """A tensor's description; ``more``: layout, high and low of integers, explicit values."""
    return {"t": list(shape), "dtype": dtype, "fill": fill, "seed": seed, **more}


def is_tensor(value: Any) -> bool:
    return isinstance(value, dict) and "t" in value


def dtype_of(name: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, name)
    return found


def contents(spec: dict[str, Any]) -> torch.Tensor:
    """The values of a described tensor, dense, on the CPU."""
    shape, dtype = spec["t"], dtype_of(spec["dtype"])
    n = math.prod(shape)
    if "values" in spec:
        flat = [_number(v) for v in spec["values"]]
        flat = [flat[i % len(flat)] for i in range(n)] if flat else [0] * n
        return torch.tensor(flat, dtype=dtype).reshape(shape)
    g = torch.Generator().manual_seed(spec["seed"])
    fill = spec["fill"]
    if fill == "indices":
        low, high = spec.get("low", 0), spec.get("high", 1)
        return torch.randint(low, max(high, low + 1), shape, generator=g).to(dtype)
    if fill == "distinct":
        # Steps of a quarter are exact in bfloat16 up to 64.
        order = torch.randperm(n, generator=g).reshape(shape)
        if dtype.is_floating_point:
            return ((order - n // 2) / 4).to(dtype)
        return order.to(dtype)
    if fill == "sorted":
        return (torch.randn(shape, generator=g).mul(4).round().div(4).sort(-1)[0]).to(dtype)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=g).bool()
    if not (dtype.is_floating_point or dtype.is_complex):
        low = 0 if not dtype.is_signed else -5
        if fill == "positive":
            low = 1
        return torch.randint(low, 6, shape, generator=g).to(dtype)
    if dtype.is_complex:
        real = torch.randn([*shape, 2], generator=g).mul(4).round().div(4)
        return torch.view_as_complex(real).to(dtype)
    x = torch.randn(shape, generator=g)
    if fill == "normal":
        return x.to(dtype)
    x = x.mul(4).round().div(4)
    if fill == "positive":
        return (x.abs() + 0.25).to(dtype)
    if fill == "unit":
        return (x.abs().clamp(0, 3.5) / 4 + 0.0625).to(dtype)
    if fill == "special":
        which = torch.randint(0, 3 * len(SPECIALS), shape, generator=g)
        for i, v in enumerate(SPECIALS):
            x = torch.where(which == i, v, x)
    return x.to(dtype)


def _number(v: Any) -> Any:
    if isinstance(v, dict):
        return complex(*map(float, v["complex"])) if "complex" in v else float(v["float"])
    return v


def laid_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    """A tensor with the values of ``x`` and another geometry, made by views on its device."""
    if layout == "dense" or x.dim() == 0:
        return x
    if layout == "transposed":
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "flipped_order":
        order = list(reversed(range(x.dim())))
        return x.permute(order).contiguous().permute(order)
    if layout == "strided":
        return torch.stack([x, x], -1).select(-1, 1)
    if layout == "offset":
        return torch.cat([x[:1], x], 0)[1:] if x.numel() else x
    if layout == "expanded":
        return x[:1].expand(x.shape) if x.shape[0] else x
    raise ValueError(layout)


def made(spec: dict[str, Any], device: str) -> torch.Tensor:
    """The described tensor on a device."""
    return laid_out(contents(spec).to(device), spec.get("layout", "dense"))


def decoded(value: Any, device: str, make: Callable[[dict[str, Any]], torch.Tensor]) -> Any:
    """The argument that a JSON value stands for."""
    if isinstance(value, list):
        return [decoded(v, device, make) for v in value]
    if not isinstance(value, dict):
        return value
    if "t" in value:
        return make(value)
    if "dtype" in value:
        return dtype_of(value["dtype"])
    if "memory_format" in value:
        return getattr(torch, value["memory_format"])
    if "device" in value:
        return torch.device(device)
    if "dict" in value:
        return {k: decoded(v, device, make) for k, v in value["dict"].items()}
    if "tuple" in value:
        return tuple(decoded(v, device, make) for v in value["tuple"])
    return _number(value)


class Unencodable(Exception):
    """An argument that JSON values do not stand for."""


def encoded(value: Any) -> Any:
    """A JSON value for an argument; tensors with all their values.

    Raises:
        Unencodable: There is none.
    """
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, complex):
        return {"complex": [repr(value.real), repr(value.imag)]}
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided or value.numel() > 600 or value.dtype.itemsize > 16:
            raise Unencodable
        flat = value.detach().resolve_conj().resolve_neg().reshape(-1).tolist()
        name = str(value.dtype).removeprefix("torch.")
        return {"t": list(value.shape), "dtype": name, "values": [encoded(v) for v in flat]}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.memory_format):
        return {"memory_format": str(value).removeprefix("torch.")}
    if isinstance(value, torch.Size):
        return [int(v) for v in value]
    if type(value) is tuple:
        return {"tuple": [encoded(v) for v in value]}
    if isinstance(value, list):
        return [encoded(v) for v in value]
    if isinstance(value, dict) and all(isinstance(k, str) for k in value):
        return {"dict": {k: encoded(v) for k, v in value.items()}}
    raise Unencodable(type(value).__name__)


def tensors(value: Any) -> Iterator[dict[str, Any]]:
    """Descriptions of the tensors in an argument."""
    if is_tensor(value):
        yield value
    elif isinstance(value, dict):
        for v in value.values():
            yield from tensors(v)
    elif isinstance(value, list):
        for v in value:
            yield from tensors(v)


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """The JSON value with ``change`` applied to each tensor and each leaf."""
    if is_tensor(value):
        return change(value)
    if isinstance(value, dict):
        return {k: mapped(v, change) for k, v in value.items()}
    if isinstance(value, list):
        return [mapped(v, change) for v in value]
    return change(value)


def resized(spec: dict[str, Any], sizes: dict[int, int]) -> dict[str, Any]:
    """A tensor's description with each size replaced; indices stay in the smaller range."""
    new = {**spec, "t": [sizes.get(n, n) for n in spec["t"]]}
    if "high" in spec:
        new["high"] = sizes.get(spec["high"], spec["high"])
    if "values" in spec and "int" in spec["dtype"]:
        least = min(sizes.values(), default=1) or 1
        new["values"] = [v % least if abs(v) >= least else v for v in spec["values"]]
    return new


def source(value: Any) -> str:
    """A Python expression for a value; tensors on the device ``d``."""
    if isinstance(value, list):
        return f"[{', '.join(map(source, value))}]"
    if not isinstance(value, dict):
        return repr(value)
    if "t" in value:
        return _tensor_source(value)
    if "dtype" in value:
        return f"torch.{value['dtype']}"
    if "memory_format" in value:
        return f"torch.{value['memory_format']}"
    if "device" in value:
        return "d"
    if "dict" in value:
        return "{" + ", ".join(f"{k!r}: {source(v)}" for k, v in value["dict"].items()) + "}"
    if "tuple" in value:
        inner = "".join(source(v) + ", " for v in value["tuple"])
        return f"({inner})"
    if "complex" in value:
        re, im = value["complex"]
        return f"complex({_float(re)}, {_float(im)})"
    return _float(value["float"])


def _float(text: str | float) -> str:
    v = float(text)
    return repr(v) if math.isfinite(v) else f"float('{v}')"


def _tensor_source(spec: dict[str, Any]) -> str:
    values = contents(spec)
    dtype = f"torch.{spec['dtype']}"
    flat = [encoded(v) for v in values.reshape(-1).tolist()]
    if flat and all(v == flat[0] for v in flat):
        text = f"torch.full({spec['t']}, {source(flat[0])}, dtype={dtype})"
    elif flat == list(range(len(flat))):
        text = f"torch.arange({len(flat)}, dtype={dtype}).reshape({spec['t']})"
    else:
        text = f"torch.tensor({source(flat)}, dtype={dtype}).reshape({spec['t']})"
    text += ".to(d)"
    layout = spec.get("layout", "dense")
    if layout != "dense" and spec["t"]:
        text = {
            "transposed": f"{text}.transpose(0, -1).contiguous().transpose(0, -1)",
            "flipped_order": f"reversed_order({text})",
            "strided": f"torch.stack([{text}] * 2, -1).select(-1, 1)",
            "offset": f"torch.cat([{text}[:1], {text}])[1:]",
            "expanded": f"{text}[:1].expand({spec['t']})",
        }[layout]
        if layout == "flipped_order":
            order = list(reversed(range(len(spec["t"]))))
            text = text.removeprefix("reversed_order(")[:-1]
            text = f"{text}.permute({order}).contiguous().permute({order})"
    return text


def smaller_tensors(spec: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Simpler tensors of the same shape."""
    if spec.get("layout", "dense") != "dense":
        yield {**spec, "layout": "dense"}
    n = math.prod(spec["t"])
    if n and spec["dtype"] != "bool" and spec.get("values") != list(range(n)):
        if spec.get("fill") != "indices":
            plain = {k: v for k, v in spec.items() if k not in ("fill", "seed")}
            yield {**plain, "values": list(range(n))}


def random_layout(rng: random.Random) -> str:
    return rng.choice(LAYOUTS) if rng.random() < 0.3 else "dense"


def text_of(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
