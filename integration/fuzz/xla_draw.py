"""Random programs of the fuzzer ``xla``."""

from __future__ import annotations

import random

import torch

from .xla_ops import DTYPES, OPS, Accept, Tensor, anything
from .xla_program import Node, Program, make_input, pruned
from .xla_reference import DIGITS, Unknown, Value, result

SIZES = (1, 1, 1, 2, 2, 3, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 31, 32, 33, 64, 65, 127, 128, 129)
LONG = (255, 257, 1000, 1023, 4097, 32767, 32769)
BUDGETS = (1, 8, 64, 64, 512, 512, 4096, 4096, 1 << 15, 1 << 18)
COMMON = ("float32",) * 10 + ("bfloat16", "int64", "float64") * 2

# What XLA compiles in ways of its own, and fuses others into: drawn more often.
FUSED = (
    *("product_sum", "squared_distance", "sum", "mean", "var", "amax", "softmax", "cumsum"),
    *("matmul", "einsum", "tensordot", "vmap_squared_rows", "vmap_products", "convolution"),
    *("scatter_add", "gather", "sort_values", "layer_norm"),
)
# Which of equal elements they choose, and so where gradients go, PyTorch leaves open.
TIES = {"sort_values", "topk", "kthvalue", "median", "nanmedian"}


class Drawing:
    """A program while it is drawn: a pool of values."""

    def __init__(self, r: random.Random) -> None:
        self.r = r
        self.nodes: list[Node] = []
        self.values: list[Value] = []
        self.op = next(iter(OPS))
        self.budget = r.choice(BUDGETS)
        self.reals = r.random() < 0.25
        # Small ones leave room for sums; only large ones see digits that a product loses.
        self.top = r.choice([4, 4, 4, 4, 100, 4000])
        self.dtypes = [r.choice(COMMON)] if r.random() < 0.7 else r.choices([*DTYPES], k=2)

    def shape(self) -> list[int]:
        rank = self.r.choice([0, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 5, 6, 7, 8])
        # Of high rank, many small dims rather than some large ones among dims of 1.
        flat = rank > 3 and self.r.random() < 0.6
        left, dims = max(self.budget, 1 << 14) if flat else self.budget, []
        for _ in range(rank):
            fit = [n for n in ((1, 2, 2, 3, 4, 8) if flat else (*SIZES, *LONG)) if n <= left]
            dims.append(self.r.choice(fit))
            left //= dims[-1]
        self.r.shuffle(dims)
        if dims and self.r.random() < 0.02:
            dims[self.r.randrange(rank)] = 0
        return dims

    def pick(self, accept: Accept = anything) -> int | None:
        op = OPS[self.op]

        def fits(i: int) -> bool:
            x = self.values[i]
            if (op.kind == "steps" and not x.same) or not accept(x.v):
                return False
            return op.most == float("inf") or not x.v.numel() or float(x.v.abs().max()) <= op.most

        found = [i for i in range(len(self.values)) if fits(i)]
        if not found:
            return None
        return found[-1] if self.r.random() < 0.5 else self.r.choice(found)

    def value(self, i: int) -> Tensor:
        return self.values[i].v

    def new(self, shape: list[int], dtype: torch.dtype, lo: int = -4, hi: int = 4) -> int:
        if (lo, hi) == (-4, 4):
            top = min(self.top, 100 if dtype in (torch.int8, torch.uint8) else 4000)
            lo, hi = -top, top
        if dtype in (torch.uint8, torch.bool):
            lo, hi = max(lo, 0), min(hi, 1) if dtype == torch.bool else hi
        n: Node = {"input": "ints", "shape": [*shape], "dtype": str(dtype).removeprefix("torch.")}
        if self.reals and dtype.is_floating_point:
            n["input"] = "reals"
        n |= {"lo": lo, "hi": max(lo, hi), "seed": self.r.randrange(1 << 20)}
        if len(shape) > 1 and self.r.random() < 0.15:
            n["swapped"] = True
        self.nodes.append(n)
        self.values.append(Value(make_input(n), True))
        return len(self.nodes) - 1

    def grow(self) -> bool:
        """Add one op; whether it could be added."""
        before = len(self.nodes)
        self.op = self.r.choice(FUSED if self.r.random() < 0.3 else [*OPS])
        try:
            drawn = OPS[self.op].draw(self)
            if drawn is not None:
                of, params = drawn
                value = result(self.op, [self.values[i] for i in of], params, len(self.nodes))
                if self.sane(value):
                    self.nodes.append({"op": self.op, "of": of, "params": params})
                    self.values.append(value)
                    return True
        except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError, Unknown):
            pass
        del self.nodes[before:], self.values[before:]
        return False

    def sane(self, value: Value) -> bool:
        """Whether a value is worth going on with: finite, not all equal, of bounded size."""
        v = value.v
        if v.numel() > 1 << 21 or v.dim() > 8:
            return False
        if v.dtype in DIGITS and v.numel():
            top = float(v.abs().max())
            if not top < min(1e15, torch.finfo(v.dtype).max / 16):
                return False
            if not value.same and not value.tolerance() <= 0.05 * max(top, 1e-3):
                return False
        return True


def draw(r: random.Random) -> Program:
    d = Drawing(r)
    for _ in range(r.choice([1, 1, 2])):
        d.new(d.shape(), DTYPES[r.choice(d.dtypes)])
    wanted = r.choice([1, 2, 3, 4, 5, 6, 8, 10, 14, 20])
    for _ in range(6 * wanted):
        wanted -= d.grow()
        if wanted <= 0:
            break
    used = {k for n in d.nodes for k in n.get("of", ())}
    outputs = [i for i, n in enumerate(d.nodes) if "op" in n and i not in used]
    outputs = outputs or [0]
    if len(d.nodes) > 3 and r.random() < 0.2:  # a value that is used further as well
        outputs.append(r.choice([i for i, n in enumerate(d.nodes) if i not in outputs]))
    data = {
        "nodes": d.nodes,
        "outputs": outputs[-4:],
        "grad": r.random() < 0.15 and not TIES & {n.get("op") for n in d.nodes},
        "how": r.choice(["eager"] * 30 + ["compile", "dynamic"]),
    }
    return pruned(data)
