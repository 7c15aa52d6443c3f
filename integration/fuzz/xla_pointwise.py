"""Ops of the fuzzer ``xla`` with one result an element."""

from __future__ import annotations

import torch

from .xla_ops import (
    DTYPES,
    anything,
    choice,
    floating,
    integer,
    integral,
    masked,
    number,
    one,
    op,
    real,
    two,
)

for name in ("neg", "abs", "relu", "positive", "conj_physical"):
    op(name, "moves", f"torch.{name}(a)", one(real if name in ("relu", "abs") else number))
for name in ("sign", "floor", "ceil", "trunc", "round", "isnan", "signbit"):
    op(name, "steps", f"torch.{name}(a)", one(real))
op("logical_not", "steps", "torch.logical_not(a)", one(anything))
op("bitwise_not", "steps", "torch.bitwise_not(a)", one(integral))
op("square", "sums", "torch.square(a)", one())
op("contiguous", "moves", "a.clone(memory_format=torch.contiguous_format)", one(anything))

for name in ("tanh", "sigmoid", "sin", "cos", "erf", "atan", "asinh", "erfc"):
    op(name, "smooth", f"torch.{name}(a)", one(floating), most=100.0)
for name in ("exp", "expm1", "exp2", "sinh", "cosh"):
    op(name, "smooth", f"torch.{name}(a)", one(floating), most=8.0)
for name in ("sqrt", "rsqrt", "log", "log2", "log10", "reciprocal", "lgamma"):
    op(name, "smooth", f"(a.abs() + 1).{name}()", one(floating), most=1e3)
# The CPU computes its derivative in float64 with 10 digits: trigamma(2) is 0.6449340668482264.
op(
    "digamma",
    "smooth",
    "(a.abs() + 1).digamma()",
    one(lambda x: floating(x) and x.dtype != torch.float64),
    most=1e3,
)
op("log1p", "smooth", "a.abs().log1p()", one(floating), most=1e4)
for name in ("silu", "softplus", "elu", "mish", "gelu", "selu", "hardswish", "logsigmoid"):
    op(name, "smooth", f"F.{name}(a)", one(floating), most=100.0)
op("gelu_tanh", "smooth", "F.gelu(a, approximate='tanh')", one(floating), most=100.0)
op("complex_exp", "smooth", "torch.exp(a)", one(torch.is_complex), most=4.0)
op("complex_abs", "smooth", "torch.abs(a)", one(torch.is_complex))
op("angle", "smooth", "torch.angle(a + 3)", one(torch.is_complex), most=2.0)
op("real", "moves", "torch.real(a) * 1", one(torch.is_complex))
op("imag", "moves", "torch.imag(a) * 1", one(torch.is_complex))
op(
    "complex",
    "moves",
    "torch.complex(a, -a)",
    one(lambda x: x.dtype in (torch.float32, torch.float64)),
)
op("to", "to", "a.to(getattr(torch, dtype))", one(anything, dtype=choice(*DTYPES)))

op(
    "pow_number",
    "sums",
    "a ** n",
    one(lambda x: number(x) and not x.is_complex(), n=choice(0, 1, 2, 3, 4, 5)),
)
# The CPU takes logarithms: (-1) ** 4 is 1 - 2.4e-16i.
op("pow_complex", "smooth", "a ** n", one(torch.is_complex, n=choice(0, 1, 2, 3, 4, 5)), most=30.0)
op(
    "pow_real",
    "smooth",
    "(a.abs() + 0.5) ** n",
    one(floating, n=choice(0.5, 1.5, -1, 2.5, -2)),
    most=30.0,
)
op(
    "add_number",
    "sums",
    "torch.add(a, n, alpha=m)",
    one(n=choice(-3, -1, 0, 1, 2), m=choice(1, 1, 2, -1)),
    bound="a + abs(n * m)",
)
op("mul_number", "sums", "a * n", one(n=choice(-2, -1, 0, 1, 2, 3)), bound="a * abs(n)")
op("rsub_number", "sums", "n - a", one(n=choice(-2, 0, 1, 3)), bound="a + abs(n)")
op("div_number", "smooth", "a / n", one(n=choice(2, 3, 7, -5)))
op("clamp", "moves", "a.clamp(lo, hi)", one(real, lo=choice(None, 0, 1), hi=choice(1, 2, 3)))
for name in ("lt", "le", "gt", "ge", "eq", "ne"):
    op(f"{name}_number", "steps", f"torch.{name}(a, n)", one(real, n=choice(-1, 0, 1, 2)))

op("add", "sums", "torch.add(a, b)", two(anything))
op("add_alpha", "sums", "torch.add(a, b, alpha=n)", two(n=choice(2, 3)))
op("sub", "sums", "torch.sub(a, b)", two(), bound="torch.add(a, b)")
op("mul", "sums", "torch.mul(a, b)", two(anything))
op("addcmul", "sums", "torch.addcmul(a, a, b, value=n)", two(n=choice(1, 2)))
op("multiply_add", "sums", "a * b + a", two())
op("squared_difference", "sums", "(a - b) ** 2", two(), bound="(a + b) ** 2")
for name in ("maximum", "minimum"):
    op(name, "moves", f"torch.{name}(a, b)", two(real))
for name in ("lt", "le", "gt", "ge"):
    op(name, "steps", f"torch.{name}(a, b)", two(real))
for name in ("eq", "ne", "logical_and", "logical_or", "logical_xor"):
    op(name, "steps", f"torch.{name}(a, b)", two(anything))
for name in ("bitwise_and", "bitwise_or", "bitwise_xor"):
    op(name, "steps", f"torch.{name}(a, b)", two(integral))
op("shift_left", "steps", "a << (b & 7)", two(integer))
op("shift_right", "steps", "a >> (b & 7)", two(integer))
for name in ("floor_divide", "remainder", "fmod"):
    op(name, "steps", f"torch.{name}(a, torch.where(b == 0, 1, b))", two(real))
op("gcd", "steps", "torch.gcd(a, b)", two(integer))
op("div", "smooth", "a / (b.abs() + 1)", two(floating))
op("atan2", "smooth", "torch.atan2(a, b.abs() + 1)", two(floating))
op("hypot", "smooth", "torch.hypot(a, b)", two(floating), most=100.0)
op("logaddexp", "smooth", "torch.logaddexp(a, b)", two(floating), most=50.0)
op("lerp", "smooth", "torch.lerp(a, b.to(a.dtype), n)", two(floating, n=choice(0.25, 0.5, 0.75)))

op("where", "moves", "torch.where(a, b, c)", masked, raw="a")
op("masked_fill", "sums", "(b + c).masked_fill(a, 2)", masked, raw="a")
op("where_less", "steps", "torch.where(a < b, a, -b)", two(real))
