"""Calls drawn from the schemas of ATen: an argument of each type, within what its name allows."""

from __future__ import annotations

import functools
import random
import re
from dataclasses import dataclass
from typing import Any

import torch

from . import calls_excluded
from .values import random_layout, tensor

SHAPES = (
    (4, 4), (5, 4, 7), (3, 3, 3), (2, 3), (6,), (1,), (), (4, 1, 4), (8, 8), (2, 1, 3, 1), (3, 5),
    (2, 2, 2, 2), (7,), (1, 5), (3, 1), (2, 3, 4, 5), (4, 4, 4), (1, 1), (2, 2), (3, 4, 2),
)  # fmt: skip
EMPTY = ((0,), (0, 3), (2, 0, 3))
FLOATS = ("float32", "float32", "float32", "float32", "float64", "bfloat16", "float16")
DTYPES = (
    *("float32",) * 8, "float64", "bfloat16", "bfloat16", "float16", "int64", "int64", "int32",
    "int16", "int8", "uint8", "bool", "complex64", "complex128",
)  # fmt: skip
FILLS = ("quarters", "quarters", "quarters", "normal", "positive", "unit", "special")

# Shapes of the tensors of products, by the name of the op; n, k, m, b are sizes.
_PRODUCTS = """
    mm: nk km; bmm: bnk bkm; mv: nk k; dot: k k; vdot: k k; inner: nk mk; outer: n m; ger: n m;
    addmm: nm nk km; baddbmm: bnm bnk bkm; addbmm: nm bnk bkm; addmv: n nk k; addr: nm n m;
    linear: nk mk m; matmul: bnk km; bilinear: bn bk mnk m; kron: nk mb; cross: n3 n3;
    linalg_cross: n3 n3; cdist: nk mk; tensordot: nk km; linalg_vecdot: nk nk; linalg_multi_dot:
    nk km; chain_matmul: nk km; prelu: nk k; addcmul: nk nk k; embedding: nk b; pairwise_distance:
    nk nk; cosine_similarity: nk nk; polar: nk nk; complex: nk nk; dist: nk nk; pdist: nk; trace:
    nm; matrix_exp: nn; linalg_matrix_exp: nn; linalg_matrix_power: nn; matrix_power: nn; det: nn;
    linalg_det: nn; inverse: nn; linalg_inv: nn; slogdet: nn; linalg_slogdet: nn; logdet: nn;
    pixel_shuffle: b4nk; pixel_unshuffle: bn44; channel_shuffle: b4nk; one_hot: nk; bincount: n;
    vander: n; diag_embed: nk; searchsorted: k n; bucketize: n k; trapz: nk; im2col: b4nk;
    max_pool1d: b4n; avg_pool1d: b4n; max_pool2d: b4nk; avg_pool2d: b4nk; adaptive_avg_pool2d:
    b4nk; adaptive_avg_pool1d: b4n; adaptive_max_pool2d: b4nk; adaptive_max_pool1d: b4n; glu: n4;
    max_pool3d: b2nkm; avg_pool3d: b2nkm; max_pool2d_with_indices: b4nk; conv1d: b4n 443 4;
    conv2d: b4nk 4433 4; conv3d: b2nkm 22222 2; conv_transpose1d: b4n 443 4; conv_transpose2d:
    b4nk 4433 4; conv_tbc: nb4 344 4; cholesky: nn; reflection_pad1d: b4n; reflection_pad2d: b4nk;
    replication_pad1d: b4n; replication_pad2d: b4nk; replication_pad3d: b2nkm; reflection_pad3d:
    b2nkm; layer_norm: nk k k; rms_norm: nk k; group_norm: b4nk 4 4; nll_loss: n5 n;
    cross_entropy_loss: n5 n; upsample_nearest1d: b4n; upsample_nearest2d: b4nk;
    upsample_bilinear2d: b4nk; upsample_bicubic2d: b4nk; upsample_linear1d: b4n;
    upsample_trilinear3d: b2nkm; upsample_nearest3d: b2nkm; col2im: b4n;
    scaled_dot_product_attention: bnk4 bnm4 bnm4; triplet_margin_loss: nk nk nk;
    cosine_embedding_loss: nk nk n; margin_ranking_loss: n n n; tril: nk; triu: nk; rot90: nkm;
    hstack: nk nk
"""
PRODUCTS: dict[str, tuple[str, ...]] = {
    name.strip(): tuple(shapes.split())
    for name, shapes in (entry.split(":") for entry in _PRODUCTS.split(";"))
}

STRINGS: dict[str, tuple[str | None, ...]] = {
    "approximate": ("none", "tanh", "none", "tanh", "Tanh"),
    "rounding_mode": (None, "trunc", "floor", "trunc", "floor", "ceil"),
    "reduce": ("sum", "mean", "amax", "amin", "prod", "add", "multiply"),
    "interpolation": ("linear", "lower", "higher", "midpoint", "nearest"),
    "ord": ("fro", "nuc"),
    "UPLO": ("L", "U"),
    "mode": ("reduced", "complete", "r", "constant", "reflect", "replicate", "circular"),
    "side": (None, "left", "right"),
    "indexing": ("ij", "xy"),
    "padding": ("valid", "same"),
    "driver": (None,),
}
DIM_NAMES = re.compile(r"(dim|axis)(\d|_)?.*|(source|destination|start_dim|end_dim|.*_dim)")
INDEX_NAMES = frozenset(("index", "indices", "indexes"))
MASK_NAMES = frozenset(("mask", "condition", "where"))


@dataclass(frozen=True)
class Op:
    """An overload of ATen and its schema."""

    name: str
    overload: str
    schema: Any

    @property
    def path(self) -> str:
        return f"torch.ops.aten.{self.name}.{self.overload or 'default'}"


@functools.cache
def ops() -> dict[str, list[Op]]:
    """Overloads that take or return tensors, by name."""
    found: dict[str, list[Op]] = {}
    for schema in torch._C._jit_get_all_schemas():
        if not schema.name.startswith("aten::"):
            continue
        name, overload = schema.name.removeprefix("aten::"), schema.overload_name
        types = [str(a.real_type) for a in (*schema.arguments, *schema.returns)]
        if not any("Tensor" in t for t in types):
            continue
        if any(
            re.search(r"Dict|Generator$|Storage|Future|RRef|\bt\b|Any|Stream", t) for t in types
        ):
            if not any(t == "Optional[Generator]" for t in types):
                continue
        if "Dimname" in str(schema) or "dimname" in overload:
            continue
        if calls_excluded.reason(name, overload) is None:
            found.setdefault(name, []).append(Op(name, overload, schema))
    return found


class Draw:
    """Arguments of one call, drawn in an order in which later ones may depend on earlier ones."""

    def __init__(self, rng: random.Random, op: Op) -> None:
        self.rng = rng
        self.op = op
        self.dtype = rng.choice(DTYPES)
        if rng.random() < 0.04:
            self.shape: tuple[int, ...] = rng.choice(EMPTY)
        elif rng.random() < 0.3:
            self.shape = tuple(rng.choice((1, 2, 3, 4, 5, 7, 8)) for _ in range(rng.randint(1, 4)))
        else:
            self.shape = rng.choice(SHAPES)
        self.fill = rng.choice(FILLS)
        if op.name in calls_excluded.INDEX_OF_TIES:
            self.fill = "distinct"
        self.dim: int | None = None
        product = PRODUCTS.get(op.name.removesuffix("_"))
        if product:
            letters = {c: rng.choice((1, 2, 3, 4, 5, 7, 8)) for c in "nkmb"}
            self.shapes = [
                tuple(letters[c] if c in letters else int(c) for c in word) for word in product
            ]
            self.shape = self.shapes[0]
            if rng.random() < 0.7:
                self.dtype = rng.choice(FLOATS)
        else:
            self.shapes = []
        if "int" in self.dtype and op.name.startswith(("bitwise", "__")):
            self.dtype = rng.choice(("int64", "int32", "uint8", "bool"))
        self.count = 0  # of tensors drawn

    def call(self) -> dict[str, Any]:
        """Positional and keyword arguments."""
        arguments = self.op.schema.arguments
        values: dict[str, Any] = {}
        late = []
        for a in arguments:
            kind = str(a.real_type)
            if "Tensor" in kind and self.count:
                late.append(a)
            elif not self._left_to_default(a):
                values[a.name] = self.value(a, kind)
        for a in late:
            if not self._left_to_default(a):
                values[a.name] = self.value(a, str(a.real_type))
        args, kwargs, gap = [], {}, False
        for a in arguments:
            if a.name not in values:
                gap = True
            elif a.kwarg_only or gap:
                kwargs[a.name] = values[a.name]
            else:
                args.append(values[a.name])
        return {"fn": self.op.path, "args": args, "kwargs": kwargs}

    def _left_to_default(self, a: Any) -> bool:
        if a.name in ("device",):
            return False
        if not a.has_default_value():
            return False
        return a.name in ("layout", "pin_memory", "generator") or self.rng.random() < 0.4

    def redrawn(self, call: dict[str, Any]) -> dict[str, Any]:
        """The call with other static arguments and the same tensors."""
        args, kwargs = list(call["args"]), dict(call["kwargs"])
        static = [a for a in self.op.schema.arguments if "Tensor" not in str(a.real_type)]
        if not static:
            return call
        for a in self.rng.sample(static, self.rng.randint(1, min(2, len(static)))):
            position = next(i for i, b in enumerate(self.op.schema.arguments) if b.name == a.name)
            if not a.kwarg_only and position < len(args):
                args[position] = self.value(a, str(a.real_type))
            elif a.name in kwargs or self.rng.random() < 0.5:
                if not self._left_to_default(a):
                    kwargs[a.name] = self.value(a, str(a.real_type))
        return {**call, "args": args, "kwargs": kwargs}

    # --- by type ----------------------------------------------------------------------------

    def value(self, a: Any, kind: str) -> Any:
        """A value of an argument's type."""
        rng = self.rng
        if kind.startswith("Optional["):
            if rng.random() < 0.3 and a.name != "device":
                return None
            kind = kind.removeprefix("Optional[").removesuffix("]")
        if kind == "Tensor":
            return self.tensor(a)
        if kind in ("List[Tensor]", "List[Optional[Tensor]]"):
            if a.name in INDEX_NAMES:
                return [self.tensor(a) for _ in range(rng.randint(1, max(1, len(self.shape))))]
            lists = [self.tensor(a) for _ in range(self.listed)]
            return lists
        if kind in ("int", "SymInt"):
            return self.integer(a.name)
        if kind in ("List[int]", "List[SymInt]"):
            return self.integers(a.name, a.N)
        if kind == "bool":
            return rng.random() < 0.5
        if kind.startswith("List[bool]"):
            return [rng.random() < 0.7 for _ in range(3)]
        if kind == "float":
            return rng.choice((0.5, 1.0, 2.0, 0.0, -1.0, 0.25, 1e-5, 3.0, 0.75))
        if kind == "List[float]":
            return [rng.choice((0.5, 1.0, 2.0, 1.5)) for _ in range(a.N or 2)]
        if kind in ("number", "Scalar"):
            return self.scalar()
        if kind in ("List[number]", "List[Scalar]"):
            return [self.scalar() for _ in range(self.listed)]
        if kind == "complex":
            return {"complex": ["1.0", "-0.5"]}
        if kind == "str":
            return rng.choice(STRINGS.get(a.name, ("sum", "mean", "none")))
        if kind == "ScalarType":
            return {"dtype": rng.choice(DTYPES)}
        if kind == "MemoryFormat":
            formats = ("contiguous_format", "preserve_format", "channels_last")
            return {"memory_format": rng.choice(formats)}
        if kind == "Device":
            return {"device": True}
        return None

    @functools.cached_property
    def listed(self) -> int:
        """Length of all lists of tensors and scalars of the call."""
        return self.rng.randint(1, 3)

    def scalar(self) -> Any:
        rng = self.rng
        pick = rng.random()
        if pick < 0.45:
            return rng.choice((0, 1, 2, 3, -1, 4, 5, -2))
        if pick < 0.9:
            return rng.choice((0.5, 1.0, 2.0, -1.0, 1.5, 0.25, 3.0, 0.0, -0.5, 2.5))
        if pick < 0.95:
            return rng.random() < 0.5
        if pick < 0.97:
            return {"float": rng.choice(("inf", "-inf", "nan"))}
        return {"complex": ["1.0", "-0.5"]}

    def integer(self, name: str) -> int:
        rng, nd = self.rng, len(self.shape)
        if DIM_NAMES.fullmatch(name) and name != "dimension_count":
            if rng.random() < 0.03:
                return rng.choice((nd, -nd - 1, nd + 2))
            self.dim = rng.randrange(-nd, nd) if nd else rng.choice((0, -1))
            return self.dim
        size = self.shape[self.dim] if self.dim is not None and -nd <= self.dim < nd else 3
        if name in ("k", "length", "size", "end", "window_length", "steps", "N"):
            return rng.randint(1, max(1, size))
        if name in ("start", "index"):
            return rng.randint(-size, max(size - 1, 0)) if size else 0
        if name in ("step", "chunks", "sections", "split_size", "n", "upscale_factor"):
            return rng.choice((1, 2, 3))
        if name in ("groups", "num_groups", "downscale_factor"):
            return rng.choice((1, 2, 4, 1, 3))
        if name in ("num_classes",):
            return rng.choice((6, 7, 8))
        if name == "reduction":
            return rng.randrange(3)
        if name in ("ignore_index",):
            return rng.choice((-100, 0, 1))
        if name in ("memory_format",):
            return 0
        return rng.choice((0, 1, 2, 3, -1, -2, 4, 5))

    def integers(self, name: str, n: int | None) -> list[int]:
        rng, nd = self.rng, len(self.shape)
        if name in ("dims", "dim", "axes"):
            if self.op.name.startswith(("permute", "transpose")):
                order = list(range(nd))
                rng.shuffle(order)
                return [d - nd if rng.random() < 0.2 else d for d in order]
            if self.op.name == "roll":
                return [self.integer("dim") for _ in range(self.rolls)]
            if self.op.name == "rot90":
                return rng.sample(range(-nd, nd), 2) if nd else [0, 1]
            count = rng.randint(0 if rng.random() < 0.1 else 1, max(nd, 1))
            dims = rng.sample(range(nd), min(count, nd))
            return [d - nd if rng.random() < 0.3 else d for d in dims]
        if name == "shifts":
            return [rng.randint(-5, 5) for _ in range(self.rolls)]
        if name in ("size", "shape", "sizes"):
            return self.sizes()
        if name == "repeats" or (name == "dims" and self.op.name == "tile"):
            return [rng.randint(0, 3) or 1 for _ in range(nd + rng.choice((0, 0, 1)))]
        if name == "pad" or (name == "padding" and "pad" in self.op.name):
            pairs = n // 2 if n else rng.randint(1, max(nd, 1))
            if "pad1d" in self.op.name or "pad2d" in self.op.name or "pad3d" in self.op.name:
                pairs = int(self.op.name[-2]) if self.op.name[-1] == "d" else 1
            return [rng.choice((0, 1, 2, 0, 1, -1)) for _ in range(2 * pairs)]
        if name in ("split_sizes", "split_size"):
            return self.parts()
        if name == "indices":
            return sorted(rng.randint(0, 4) for _ in range(rng.randint(1, 3)))
        if name == "normalized_shape":
            return list(self.shape[-1:])
        length = n if n and n > 0 and n < 5 else rng.randint(1, 3)
        if name in ("kernel_size", "output_size"):
            return [rng.randint(1, 4) for _ in range(length)]
        if name in ("stride", "dilation"):
            return [rng.choice((1, 2, 1, 3)) for _ in range(length)]
        if name in ("padding", "output_padding"):
            return [rng.choice((0, 1, 0, 2)) for _ in range(length)]
        return [rng.choice((0, 1, 2, 3, -1)) for _ in range(length)]

    @functools.cached_property
    def rolls(self) -> int:
        return self.rng.randint(1, 2)

    def sizes(self) -> list[int]:
        """A size: of the same number of elements, of an expansion, or any."""
        rng = self.rng
        n = 1
        for s in self.shape:
            n *= s
        if "expand" in self.op.name or "broadcast" in self.op.name:
            wide = [3 if s == 1 else rng.choice((s, -1)) for s in self.shape]
            if "broadcast" in self.op.name:
                wide = [3 if s == 1 else s for s in self.shape]
            return [rng.randint(1, 3) for _ in range(rng.choice((0, 0, 1)))] + wide
        if self.op.name.startswith(("new_", "full", "zeros", "ones", "rand", "empty")):
            return [rng.choice((1, 2, 3, 4, 0, 7)) for _ in range(rng.randint(0, 3))]
        factors = [k for k in range(1, n + 1) if n % k == 0] or [0]
        first = rng.choice(factors)
        rest = n // first if first else 0
        return rng.choice(([-1], [first, rest], [rest, -1], [1, n], [n, 1, 1], list(self.shape)))

    def parts(self) -> list[int]:
        nd = len(self.shape)
        size = self.shape[self.dim] if self.dim is not None and -nd <= self.dim < nd else 4
        parts = []
        while size > 0:
            part = self.rng.randint(0, size)
            parts.append(part)
            size -= part
        return parts or [0]

    def tensor(self, a: Any) -> dict[str, Any]:
        """A tensor that goes with those before it."""
        rng, name = self.rng, a.name
        first, self.count = self.count == 0, self.count + 1
        seed = rng.randrange(10**6)
        shape = self.shape
        if self.count <= len(self.shapes):
            shape = self.shapes[self.count - 1]
        elif not first and rng.random() < 0.2:
            shape = tuple(1 if rng.random() < 0.5 else s for s in shape)
            shape = shape[rng.randint(0, len(shape)) :]
        nd = len(self.shape)
        size = self.shape[self.dim] if self.dim is not None and -nd <= self.dim < nd else 0
        layout = random_layout(rng)
        written = a.alias_info is not None and a.alias_info.is_write
        if layout == "expanded" and (written or self.fill == "distinct"):
            layout = "transposed"
        if a.is_out:
            out_dtype = self.dtype if rng.random() < 0.9 else rng.choice(DTYPES)
            return tensor([0] if rng.random() < 0.5 else list(self.shape), out_dtype, "zeros", 0)
        if name in INDEX_NAMES and (not first or self.op.name == "embedding"):
            high = size or min(self.shape, default=1)
            if self.op.name.startswith(("index", "take", "put", "embedding")):
                count = rng.randint(1, 4)
                shape = (count,)
                if self.op.name.startswith(("index_add", "index_copy")) and size:
                    shape = (size,)
            else:
                shape = self.shape
            integers = "int64" if rng.random() < 0.9 else "int32"
            return tensor(shape, integers, "indices", seed, high=high)
        if name in MASK_NAMES:
            return tensor(shape, "bool", "quarters", seed, layout=layout)
        if name == "target" and "loss" in self.op.name and len(self.shapes) == 2:
            return tensor(shape, "int64", "indices", seed, high=5)
        dtype = self.dtype if first or rng.random() < 0.9 else rng.choice(DTYPES)
        if name in ("sorted_sequence", "boundaries"):
            return tensor(shape, dtype, "sorted", seed)
        if name == "self" and self.op.name == "one_hot":
            return tensor(shape, "int64", "indices", seed, high=6)
        if name == "self" and self.op.name == "where" and first:
            return tensor(shape, "bool", "quarters", seed)
        return tensor(shape, dtype, self.fill, seed, layout=layout)


@functools.cache
def _weighted() -> tuple[list[str], list[int]]:
    """Names, and how often each is drawn: those with static arguments more often."""
    named = ops()
    plain = ("Tensor", "Optional[Tensor]", "List[Tensor]")

    def weight(overloads: list[Op]) -> int:
        kinds = {str(a.real_type) for op in overloads for a in op.schema.arguments}
        return 1 + 4 * (len(kinds.difference(plain)) > 0)

    names = sorted(named)
    return names, [weight(named[name]) for name in names]


def drawn(rng: random.Random) -> tuple[Draw, dict[str, Any]]:
    """A call of a random op; overloads of a name share its probability."""
    names, weights = _weighted()
    op = rng.choice(ops()[rng.choices(names, weights)[0]])
    draw = Draw(rng, op)
    return draw, draw.call()
