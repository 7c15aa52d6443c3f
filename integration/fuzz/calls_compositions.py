"""Calls of small functions of one tensor, as users write them: indexing, operators, methods.

Each entry draws a function of ``x`` as Python source, from a generator and a shape. Arguments are
within what the shape allows, so that most calls are right, and most of them static.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

from .values import random_layout, tensor

Shape = tuple[int, ...]
Make = Callable[[random.Random, Shape], str]

SIZES = (1, 2, 3, 3, 4, 4, 5, 7, 8)


def shape(rng: random.Random) -> Shape:
    n = rng.randint(1, 5)
    if rng.random() < 0.5:
        return (rng.choice((2, 3, 4, 5)),) * n
    return tuple(rng.choice(SIZES) for _ in range(n))


def _dim(r: random.Random, s: Shape) -> int:
    return r.randrange(-len(s), len(s))


def _dims(r: random.Random, s: Shape) -> list[int]:
    return sorted(r.sample(range(len(s)), r.randint(1, len(s))))


def _over_dim(name: str, *, keeps: bool = True, first: bool = False) -> Make:
    def make(r: random.Random, s: Shape) -> str:
        keep = f", keepdim={r.random() < 0.5}" if keeps else ""
        return f"x.{name}(dim={_dim(r, s)}{keep}){'[0]' if first else ''}"

    return make


def _over_dims(name: str) -> Make:
    return lambda r, s: f"x.{name}(dim={_dims(r, s)})"


def _method(name: str) -> Make:
    return lambda r, s: f"x.{name}()"


def _formatted(text: str, **choices: Callable[[random.Random, Shape], Any]) -> Make:
    return lambda r, s: text.format(**{k: choose(r, s) for k, choose in choices.items()})


def _of(*values: Any) -> Callable[[random.Random, Shape], Any]:
    return lambda r, s: r.choice(values)


def _index_add(r: random.Random, s: Shape) -> str:
    d = _dim(r, s)
    i = [r.randrange(s[d]) for _ in range(s[d])]
    return f"x.index_add({d}, torch.tensor({i}, device=x.device), x)"


def _narrow(r: random.Random, s: Shape) -> str:
    d = _dim(r, s)
    a = r.randrange(s[d])
    return f"x.narrow({d}, {a}, {r.randint(1, s[d] - a)}) * 2"


def _written(r: random.Random, s: Shape) -> str:
    d = _dim(r, s)
    a = r.randrange(s[d])
    n = r.randint(1, s[d] - a)
    v = r.choice((2.0, 0.5, -1.0, 3.0))
    return f"(y := x.clone(), y.narrow({d}, {a}, {n}).mul_({v}))[0]"


def _item(r: random.Random, s: Shape) -> str:
    index = []
    for n in s[: r.randint(1, len(s))]:
        kind = r.random()
        if kind < 0.4:
            index.append(str(r.randrange(-n, n)))
        elif kind < 0.6:
            index.append(f"{r.randrange(n)}:")
        elif kind < 0.8:
            index.append(f":{r.randint(1, n)}:{r.randint(1, 3)}")
        elif kind < 0.9:
            index.append("None")
        else:
            index.append("...") if "..." not in index else index.append(":")
    return f"x[{', '.join(index)}] + 0"


def _assigned(r: random.Random, s: Shape) -> str:
    d = r.randrange(len(s))
    a = r.randrange(s[d])
    part = r.choice((f"{a}", f"slice({a}, None)", f"slice(None, None, {r.randint(1, 3)})"))
    index = f"({'slice(None), ' * d}{part},)"
    return f"(y := x.clone(), y.__setitem__({index}, {r.choice((7.0, 0.5, -1))}))[0]"


def _conv(r: random.Random, s: Shape) -> str:
    k, g = r.choice((1, 2, 3)), r.choice((1, 2, 3, 6))
    n = math.prod(s) // 6
    if n < 4:
        return "x + 1"
    stride, padding = r.randint(1, 2), r.randint(0, 2)
    return (
        f"F.conv1d(x.reshape(-1)[:{6 * n}].reshape(1, 6, {n}), torch.linspace(-1, 1, "
        f"{36 // g * k}, device=x.device).reshape(6, {6 // g}, {k}).to(x.dtype), None, {stride}, "
        f"{padding}, 1, {g})"
    )


def _pad(r: random.Random, s: Shape) -> str:
    mode = r.choice(("constant", "replicate", "circular"))
    p = [min(r.randint(0, 3), s[-1]) for _ in range(2)]
    return f"F.pad(x.reshape(1, -1, {s[-1]}), {p}, '{mode}')"


def _permuted(r: random.Random, s: Shape) -> str:
    p = r.sample(range(len(s)), len(s))
    return f"x.permute({p}).reshape(-1) + 1"


def _unfolded(r: random.Random, s: Shape) -> str:
    d = _dim(r, s)
    return f"x.unfold({d}, {r.randint(1, s[d])}, {r.randint(1, 3)}).sum(-1)"


def _topk(r: random.Random, s: Shape) -> str:
    d = _dim(r, s)
    return f"x.topk({r.randint(1, s[d])}, {d}, {r.random() < 0.5})[0]"


def _split(r: random.Random, s: Shape) -> str:
    d = _dim(r, s)
    return f"[p * i for i, p in enumerate(x.split({r.randint(1, s[d])}, {d}))]"


def _gradient(r: random.Random, s: Shape) -> str:
    d, n = _dim(r, s), r.choice((2, 3))
    what = r.choice(
        (
            f"((y.cumsum({d}) ** {n}).mean({d}) * 2).sum()",
            f"(y.flip({d}).cumsum({d}) * y).sum()",
            f"(y.softmax({d}) * y).amax({d}).sum()",
            f"(y.roll({n}, {d}) ** {n}).sum()",
            f"y.std({d}, unbiased=False).sum()" if s[d] > 1 else "y.exp().sum()",
        )
    )
    return f"(lambda y: torch.autograd.grad({what}, y)[0])(x.detach().requires_grad_())"


# Numbers of one value each, no ties: their order is defined.
DISTINCT = frozenset(("topk", "median", "mode", "kthvalue", "argsort", "sort"))

MAKES: dict[str, Make] = {
    **{n: _over_dim(n) for n in "sum mean prod amax amin argmax argmin nansum any all".split()},
    **{n: _over_dim(n, keeps=False) for n in "cumsum cumprod softmax log_softmax".split()},
    **{n: _over_dim(n, keeps=False) for n in "logcumsumexp unbind argsort".split()},
    **{n: _over_dim(n, first=True) for n in "max min median aminmax".split()},
    **{n: _over_dim(n, keeps=False, first=True) for n in "sort cummax cummin".split()},
    "count_nonzero": _over_dim("count_nonzero", keeps=False),
    **{f"{n} of dims": _over_dims(n) for n in "sum mean amax std var logsumexp".split()},
    **{n: _method(n) for n in "exp tanh sigmoid relu neg abs sign floor sqrt erf sum mean".split()},
    "flip": lambda r, s: f"x.flip({_dims(r, s)})",
    "roll": lambda r, s: f"x.roll({r.randint(-5, 5)}, {_dim(r, s)})",
    "rot90": lambda r, s: (
        f"x.rot90({r.randint(-1, 4)}, {r.sample(range(len(s)), 2)})" if len(s) > 1 else "x.flip(0)"
    ),
    "power": _formatted("(x.abs() + 0.5) ** {n}", n=_of(0, 1, 2, 3, 4, 5, -1, 0.5, 2.5)),
    "power_": _formatted("x.abs().add(0.5).pow_({n})", n=_of(0, 1, 2, 3, 4, -2, 0.5)),
    "power of a number": _formatted("{n} ** x.clamp(-3, 3)", n=_of(2, 3, 0.5, 1)),
    "add": _formatted(
        "torch.add(x, {n}, alpha={a}) * 2", n=_of(0, 1, 2, -3, 1.5), a=_of(1, 2, 3, -1, 0.5)
    ),
    "clamp": _formatted("x.clamp({lo}, {hi})", lo=_of(-2, -1.5, 0, 0.5), hi=_of(0.5, 1, 1.25, 3)),
    "topk": _topk,
    "gather": lambda r, s: (lambda d: f"x.gather({d}, x.argsort({d}, stable=True))")(_dim(r, s)),
    "scatter": lambda r, s: (
        lambda d: f"torch.zeros_like(x).scatter_add({d}, x.argsort({d}, stable=True), x)"
    )(_dim(r, s)),
    "index_add": _index_add,
    "index_select": lambda r, s: (
        lambda d: (
            f"x.index_select({d}, torch.tensor({[r.randrange(s[d]) for _ in range(3)]}, "
            "device=x.device))"
        )
    )(_dim(r, s)),
    "narrow": _narrow,
    "write a part": _written,
    "item": _item,
    "assign": _assigned,
    "tri": _formatted(
        "torch.tri{ul}(x if x.dim() > 1 else x[None], {k})",
        ul=_of("u", "l"),
        k=_of(-2, -1, 0, 1, 3),
    ),
    "diagonal": _formatted("(x if x.dim() > 1 else x[None]).diagonal({k}) * 2", k=_of(-1, 0, 1)),
    "transpose": lambda r, s: f"(x.transpose({_dim(r, s)}, {_dim(r, s)}) * 1.0).contiguous()",
    "permute": _permuted,
    "cat": lambda r, s: f"torch.cat([x * i for i in range({r.randint(2, 4)})], {_dim(r, s)})",
    "stack": lambda r, s: f"torch.stack([x, x + 1], {r.randint(0, len(s))})",
    "repeat": lambda r, s: f"x.repeat({[r.randint(1, 2) for _ in s]})",
    "repeat_interleave": lambda r, s: f"x.repeat_interleave({r.randint(1, 3)}, {_dim(r, s)})",
    "pad": _pad,
    "pool": lambda r, s: (
        f"F.{r.choice(('avg_pool1d', 'max_pool1d'))}(x.reshape(1, -1, {s[-1]}), "
        f"{r.randint(1, min(4, s[-1]))}, {r.randint(1, 3)})"
    ),
    "conv": _conv,
    "norm": lambda r, s: (
        f"torch.linalg.vector_norm(x, {r.choice(('1', '2', '3', 'torch.inf', '0.5', '0'))}, "
        f"{_dim(r, s)})"
    ),
    "renorm": lambda r, s: (
        f"x.renorm({r.choice((1, 2))}, {_dim(r, s)}, {r.choice((0.5, 1.0))})"
        if len(s) > 1
        else "x * 3"
    ),
    "one_hot": _formatted("F.one_hot((x > 0).long() + 2, {n})", n=_of(4, 5, 6, 7, 8)),
    "quantile": lambda r, s: f"x.quantile({r.choice((0.1, 0.5, 0.9))}, {_dim(r, s)})",
    "kthvalue": lambda r, s: (lambda d: f"x.kthvalue({r.randint(1, s[d])}, {d})[0]")(_dim(r, s)),
    "unfold": _unfolded,
    "split": _split,
    "masked": _formatted("x[x > {t}].sum() + (x > {t}).sum()", t=_of(-0.75, 0.0, 0.5)),
    "where": _formatted("torch.where(x > {t}, x, {v})", t=_of(-0.5, 0.0, 1), v=_of(0, 1, -2.5)),
    "masked_fill": _formatted("x.masked_fill(x > {t}, {v})", t=_of(-0.5, 0.5), v=_of(0, 3, -2.5)),
    "tensordot": lambda r, s: (
        (lambda d: f"torch.tensordot(x, x.flip(0), ([{d}], [{d}]))")(_dim(r, s))
        if math.prod(s) < 300
        else "x @ x.mT"
    ),
    "softened": lambda r, s: f"(x / {r.choice((0.5, 1, 2))}).softmax({_dim(r, s)})",
    "diff": lambda r, s: f"x.diff(n={r.randint(1, 2)}, dim={_dim(r, s)}).sum()",
    "round": _formatted("x.round(decimals={n})", n=_of(0, 1, 2, 3)),
    "shift": _formatted("(x.abs() * 9).long() << {n}", n=_of(0, 1, 2, 5)),
    "vmap": lambda r, s: f"torch.vmap(lambda y: (y * y).sum(), in_dims={_dim(r, s)})(x)",
    "vmap of a reduction": lambda r, s: (
        f"torch.vmap(lambda y: y.cumsum(0).sum(0), in_dims={_dim(r, s)})(x)"
        if len(s) > 1
        else "x.cumsum(0)"
    ),
    "arange": lambda r, s: f"x + torch.arange({s[-1]}, device=x.device)",
    "layer_norm": lambda r, s: (lambda n: f"F.layer_norm(x, {list(s[-n:])})")(r.randint(1, len(s))),
    "interpolate": lambda r, s: (
        (
            f"F.interpolate(x.reshape(1, -1, {s[-1]}), scale_factor={r.choice((2, 0.5, 1.5, 3))}, "
            f"mode='{r.choice(('nearest', 'linear'))}')"
        )
        if s[-1] > 1
        else "x + 1"
    ),
    "glu": lambda r, s: "F.glu(torch.cat([x, x + 1], 0), 0)",
    "gelu": _formatted("F.gelu(x, approximate='{a}')", a=_of("none", "tanh")),
    "gradient": _gradient,
    # Programs of the same ops that differ in what is read of them.
    "one of three": _formatted("(a := x * 2, b := a + 1, b * a)[{i}]", i=_of(0, 1, 2)),
    "two of three": _formatted(
        "[(a := x - 2, b := a * a, b + x)[i] for i in {i}]", i=_of((0, 1), (0, 2), (1, 2), (2, 1))
    ),
    "statistics": lambda r, s: f"torch.var_mean(x, {_dim(r, s)}, unbiased=False)[{r.randrange(2)}]",
}


# Each stands for a whole class of programs.
MORE_OFTEN = ("one of three", "two of three", "statistics", "write a part", "assign", "gradient")


def drawn(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """A function's name and its call."""
    name = rng.choice(MORE_OFTEN) if rng.random() < 0.12 else rng.choice(sorted(MAKES))
    return name, call_of(rng, name, shape(rng), rng.choice(("float32",) * 6 + ("float64",)))


def call_of(rng: random.Random, name: str, s: Shape, dtype: str) -> dict[str, Any]:
    """The named function on a tensor of a shape, with arguments drawn."""
    fill = "distinct" if name in DISTINCT else rng.choice(("quarters", "normal"))
    seed, layout = rng.randrange(10**6), random_layout(rng)
    # Rows are equal: ties, and the gradient of a deviation of 0.
    if layout == "expanded" and (fill == "distinct" or name == "gradient"):
        layout = "dense"
    x = tensor(list(s), dtype, fill, seed, layout=layout)
    return {"fn": f"lambda x: {MAKES[name](rng, s)}", "args": [x], "kwargs": {}}
