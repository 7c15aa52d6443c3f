"""Random numbers: their distributions, their independence of length and shape, and their keys."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from scipy import stats

from tpu_core.dtypes import to_numpy_dtype
from tpu_core.lowering import distributions, random, random_integers
from tpu_core.lowering.evaluate import call_lowering, weak
from tpu_core.lowering.registry import REGISTRY

KEY = np.array([7, 11], np.uint32)
OTHER = np.array([7, 12], np.uint32)
N = 40_000


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


@functools.cache
def compiled(op, shape, dtype, names, static):
    """A jitted op; ``static`` holds its arguments that are no arrays, with None where one goes."""
    out = [jax.ShapeDtypeStruct(shape, dtype)]
    if op.startswith("native_dropout"):
        out.append(jax.ShapeDtypeStruct(shape, np.bool_))

    def run(key, arrays):
        arrays = iter(arrays)
        values = [next(arrays) if a is None else a for a in static]
        count = len(values) - len(names)
        kwargs = dict(zip(names, values[count:]))
        entry = REGISTRY.get(f"aten.{op}")
        return call_lowering(entry, tuple(values[:count]), kwargs, tuple(out), key)[0]

    return jax.jit(run)


def draw(op, *args, shape=(N,), dtype=np.float32, key=KEY, **kwargs):
    """The first result of an op; float arguments are lifted, as the recorder does."""
    values = [weak(a) if isinstance(a, float) else a for a in (*args, *kwargs.values())]
    arrays = [v for v in values if isinstance(v, jax.Array)]
    static = tuple(None if isinstance(v, jax.Array) else v for v in values)
    run = compiled(op, shape, np.dtype(dtype), tuple(kwargs), static)
    return np.asarray(run(jnp.asarray(key), arrays))


def fill(value=0.0, shape=(N,), dtype=np.float32):
    return jnp.full(shape, value, dtype)


def test_threefry_matches_the_reference_vectors():
    """Vectors of Random123's kat_vectors, which JAX's own generator also passes."""
    for counter, key, want in (
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
        ((0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344), (0xC4923A9C, 0x483DF7A0)),
    ):
        words = [jnp.uint32(w) for w in (*key, *counter)]
        got = random.threefry2x32((words[0], words[1]), (words[2], words[3]))
        assert tuple(int(g) for g in got) == want


def test_bits_are_jax_s_own_threefry():
    high, low = random.random_words(jnp.asarray(KEY), (5,))
    key = jax.random.wrap_key_data(KEY, impl="threefry2x32")
    with jax.threefry_partitionable(True):
        assert np.array_equal(high ^ low, jax.random.bits(key, (5,), np.uint32))


def test_keys():
    keys = {
        tuple(np.asarray(random.derive_key(*words)).tolist())
        for words in ((0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1))
    }
    keys |= {tuple(np.asarray(random.fold_in(jnp.asarray(KEY), i)).tolist()) for i in range(5)}
    assert len(keys) == 10
    assert random.derive_key(0, 0, 0, 0).dtype == np.uint32


SAMPLERS = {
    "uniform": ("uniform.default", lambda n: (fill(shape=(n,)), -1.0, 3.0)),
    "normal": ("normal_functional.default", lambda n: (fill(shape=(n,)), 1.0, 2.0)),
    "bernoulli": ("bernoulli.p", lambda n: (fill(shape=(n,)), 0.3)),
    "dropout": ("native_dropout.default", lambda n: (fill(1, shape=(n,)), 0.3, True)),
    "exponential": ("exponential.default", lambda n: (fill(shape=(n,)), 2.0)),
    "geometric": ("geometric.default", lambda n: (fill(shape=(n,)), 0.2)),
    "cauchy": ("cauchy.default", lambda n: (fill(shape=(n,)), 0.0, 1.0)),
    "log_normal": ("log_normal.default", lambda n: (fill(shape=(n,)), 0.0, 1.0)),
    "random": ("random.to", lambda n: (fill(shape=(n,)), 1000)),
    "poisson": ("poisson.default", lambda n: (fill(12, shape=(n,)),)),
    "binomial": ("binomial.default", lambda n: (fill(40, shape=(n,)), fill(0.4, shape=(n,)))),
    "gamma": ("_standard_gamma.default", lambda n: (fill(0.7, shape=(n,)),)),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_elements_depend_on_key_and_index_only(name):
    """A longer draw begins with the shorter one; another key gives unrelated numbers."""
    op, args = SAMPLERS[name]
    long = draw(op, *args(1000), shape=(1000,))
    assert np.array_equal(long[:37], draw(op, *args(37), shape=(37,)))
    other = draw(op, *args(1000), shape=(1000,), key=OTHER)
    assert not np.array_equal(long, other)
    # Ranks, since a Cauchy variable has no moments.
    assert abs(stats.spearmanr(long, other).statistic) < 0.15
    assert abs(stats.spearmanr(long[1:], long[:-1]).statistic) < 0.15


def test_shape_does_not_matter():
    flat = random.random_bits(jnp.asarray(KEY), (24,), 64)
    for shape in ((4, 6), (2, 3, 4), (1, 24, 1)):
        assert np.array_equal(random.random_bits(jnp.asarray(KEY), shape, 64).reshape(-1), flat)
    assert random.random_bits(jnp.asarray(KEY), (0, 3)).shape == (0, 3)
    assert random.random_bits(jnp.asarray(KEY), ()) == flat[()][0] >> np.uint64(32)


CONTINUOUS = {
    "uniform": (stats.uniform(-1, 4), SAMPLERS["uniform"]),
    "normal": (stats.norm(1, 2), SAMPLERS["normal"]),
    "exponential": (stats.expon(scale=0.5), SAMPLERS["exponential"]),
    "cauchy": (stats.cauchy(0, 1), SAMPLERS["cauchy"]),
    "log_normal": (stats.lognorm(1), SAMPLERS["log_normal"]),
    "gamma": (stats.gamma(0.7), SAMPLERS["gamma"]),
    "gamma_large": (
        stats.gamma(30.0),
        ("_standard_gamma.default", lambda n: (fill(30.0, shape=(n,)),)),
    ),
}


@pytest.mark.parametrize("name", CONTINUOUS)
def test_continuous(name):
    law, (op, args) = CONTINUOUS[name]
    values = draw(op, *args(N)).astype(np.float64)
    assert stats.kstest(values, law.cdf).pvalue > 1e-3
    if math.isfinite(law.var()):
        assert abs(values.mean() - law.mean()) < 5 * law.std() / math.sqrt(N)


DISCRETE = {
    "geometric": (stats.geom(0.2), SAMPLERS["geometric"]),
    "poisson": (stats.poisson(12), SAMPLERS["poisson"]),
    "poisson_small": (stats.poisson(0.8), ("poisson.default", lambda n: (fill(0.8),))),
    "poisson_large": (stats.poisson(1e4), ("poisson.default", lambda n: (fill(1e4),))),
    "binomial": (stats.binom(40, 0.4), SAMPLERS["binomial"]),
    "binomial_small": (
        stats.binom(9, 0.9),
        ("binomial.default", lambda n: (fill(9), fill(0.9))),
    ),
    "binomial_large": (
        stats.binom(20_000, 0.75),
        ("binomial.default", lambda n: (fill(20_000), fill(0.75))),
    ),
    "randint": (stats.randint(-3, 9), ("randint.low", lambda n: (-3, 9, (n,)))),
}


@pytest.mark.parametrize("name", DISCRETE)
def test_discrete(name):
    law, (op, args) = DISCRETE[name]
    values = draw(op, *args(N)).astype(np.int64)
    support = np.arange(values.min(), values.max() + 1)
    seen = np.bincount(values - values.min(), minlength=len(support))
    expected = law.pmf(support) * N
    often = expected > 8
    seen = np.append(seen[often], seen[~often].sum())
    expected = np.append(expected[often], N - expected[often].sum())
    if expected[-1] < 1:
        assert seen[-1] <= 8
        seen, expected = seen[:-1], expected[:-1] * seen[:-1].sum() / expected[:-1].sum()
    assert stats.chisquare(seen, expected).pvalue > 1e-3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_uniform_of_each_float(dtype):
    dtype = to_numpy_dtype(dtype)
    values = draw("uniform.default", fill(dtype=dtype), 1.0, 2.0, dtype=dtype).astype(np.float64)
    assert values.min() >= 1
    assert values.max() < 2  # 2 - 2^-24 rounds to 2
    assert abs(values.mean() - 1.5) < 0.01
    normal = draw("normal_functional.default", fill(dtype=dtype), dtype=dtype).astype(np.float64)
    assert abs(normal.std() - 1) < 0.02


def test_normal_has_tails():
    """The map from bits to normal numbers is right far out, where 24 bits would end at 5.4."""
    seen = []

    def bits(key, shape, bits=32):
        seen.append(bits)
        return jnp.array([0, 1, 2 * 20, 2 * 2**10, 2 * 2**30, 2**32 - 2], np.uint32)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(random, "random_bits", bits)
        got = np.asarray(random.standard_normal(jnp.asarray(KEY), (6,), np.float32), np.float64)
    tail = np.array([0, 0, 20, 2**10, 2**30, 2**31 - 1]) + 0.5
    want = -stats.norm.ppf(tail * 2.0**-32) * np.array([1, -1, 1, 1, 1, 1])
    assert seen == [32]
    np.testing.assert_allclose(got, want, rtol=5e-4, atol=1e-6)
    assert got[0] > 6.3


def test_bernoulli_edges():
    assert not draw("bernoulli.p", fill(), 0.0).any()
    assert draw("bernoulli.p", fill(), 1.0).all()
    p = jnp.tile(jnp.array([0.0, 1.0, 0.25, 0.75], np.float32), N // 4)
    for values in (draw("bernoulli.default", p), draw("bernoulli.Tensor", fill(), p)):
        means = values.reshape(-1, 4).mean(0)
        assert means[0] == 0
        assert means[1] == 1
        assert np.abs(means[2:] - [0.25, 0.75]).max() < 0.02
    assert 0.45 < draw("bernoulli.p", fill(dtype=np.int64), 0.5, dtype=np.int64).mean() < 0.55


def test_dropout():
    x = jnp.asarray(np.random.default_rng(0).normal(size=N), jnp.float32)
    entry = REGISTRY.get("aten.native_dropout.default")
    out = (jax.ShapeDtypeStruct((N,), np.float32), jax.ShapeDtypeStruct((N,), np.bool_))
    y, mask = call_lowering(entry, (x, weak(0.2), True), {}, out, jnp.asarray(KEY))
    assert abs(float(mask.mean()) - 0.8) < 0.01
    np.testing.assert_allclose(y, np.where(mask, x / np.float32(0.8), 0), rtol=1e-6)
    back = REGISTRY.get("aten.native_dropout_backward.default")
    (dx,) = call_lowering(back, (x, mask, weak(1.25)), {}, out[:1])
    np.testing.assert_allclose(dx, y, rtol=1e-6)
    assert not draw("native_dropout.default", x, 1.0, True).any()
    assert np.array_equal(draw("native_dropout.default", x, 0.0, True), x)
    assert np.array_equal(draw("native_dropout.default", x, 0.5, False), x)
    half = draw("native_dropout.default", x.astype(jnp.bfloat16), 0.5, True, dtype=jnp.bfloat16)
    assert set(np.unique(half / x.astype(jnp.bfloat16)).astype(float)) == {0, 2}


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float16, torch.complex64])
def test_the_gradient_of_dropout_has_the_values_of_the_cpu(dtype):
    grad = torch.tensor([1, 0, 1, 1]).to(dtype)
    grad = grad * 1j if dtype.is_complex else grad
    mask = torch.tensor([True, True, False, True])
    expected = torch.ops.aten.native_dropout_backward(grad, mask, 2.5)
    found = torch.ops.aten.native_dropout_backward(grad.to("tpu"), mask.to("tpu"), 2.5)
    torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("dtype", "top"),
    [
        (torch.bool, 1), (torch.uint8, 255), (torch.int8, 127), (torch.int32, 2**31 - 1),
        (torch.int64, 2**63 - 1), (torch.float16, 2**11), (torch.bfloat16, 2**8),
        (torch.float32, 2**24), (torch.float64, 2**53),
    ],
)  # fmt: skip
def test_random_without_bounds(dtype, top):
    dtype = to_numpy_dtype(dtype)
    values = draw("random.default", jnp.zeros(N, dtype), dtype=dtype).astype(np.float64)
    assert values.min() >= 0
    assert values.max() <= top
    assert values.max() > 0.99 * top
    assert abs(values.mean() / top - 0.5) < 0.02


@pytest.mark.parametrize(
    ("low", "high"),
    [(-5, 6), (0, 1), (-(2**31), 2**31), (10, 2**40 + 11), (-(2**63), 2**63 - 1), (0, 3 * 2**30)],
)
def test_random_from(low, high):
    x = jnp.zeros(N, np.int64)
    values = draw("random.from", x, low, high, dtype=np.int64)
    assert values.min() >= low
    assert values.max() < high
    quarter = low + (high - low) // 4
    if high - low > 1000:
        assert abs((values < quarter).mean() - 0.25) < 0.01
    named = draw("random.from", x, dtype=np.int64, **{"from": low, "to": high})
    assert np.array_equal(values, named)
    unbounded = draw("random.from", x, low, dtype=np.int64)
    assert unbounded.min() >= low


def test_randint_overloads():
    for op, args in (
        ("randint.default", (5, (N,))),
        ("randint_like.default", (fill(), 5)),
        ("randint_like.low_dtype", (fill(), 0, 5)),
    ):
        values = draw(op, *args, dtype=np.int64)
        assert set(values) == set(range(5))
    assert draw("rand.default", (N,)).max() < 1
    assert draw("rand_like.default", fill()).max() < 1
    assert abs(draw("randn.default", (N,)).std() - 1) < 0.02
    assert abs(draw("normal.float_float", 3.0, 2.0, (N,)).mean() - 3) < 0.05
    means = jnp.tile(jnp.array([-10.0, 10.0], np.float32), N // 2)
    values = draw("normal.Tensor_Tensor", means, fill(0.1))
    assert np.array_equal(np.sign(values), np.sign(means))
    z = draw("randn.default", (N,), dtype=np.complex64)
    assert abs(z.real.var() - 0.5) < 0.02
    assert abs(z.imag.var() - 0.5) < 0.02


def test_randperm():
    for n in (0, 1, 2, 1000):
        order = draw("randperm.default", n, shape=(n,), dtype=np.int64)
        assert np.array_equal(np.sort(order), np.arange(n))
    firsts = [
        draw("randperm.default", 3, shape=(3,), dtype=np.int64, key=np.array([1, k], np.uint32))[0]
        for k in range(60)
    ]
    assert set(firsts) == {0, 1, 2}


@pytest.mark.parametrize("replacement", [False, True])
def test_multinomial(replacement):
    weights = jnp.asarray([[1.0, 0.0, 3.0, 4.0], [0.0, 1.0, 1.0, 0.0]], jnp.float32)
    many = jnp.tile(weights, (10_000, 1))
    count = 3 if replacement else 2
    out = draw(
        "multinomial.default", many, count, replacement, shape=(20_000, count), dtype=np.int64
    )
    for row, law in ((0, [1 / 8, 0, 3 / 8, 4 / 8]), (1, [0, 0.5, 0.5, 0])):
        picks = out[row::2]
        seen = np.bincount(picks[:, 0], minlength=4) / 10_000
        np.testing.assert_allclose(seen, law, atol=0.02)
        assert not np.isin(picks, [i for i, p in enumerate(law) if p == 0]).any()
        if replacement:
            np.testing.assert_allclose(np.bincount(picks[:, 2], minlength=4) / 1e4, law, atol=0.02)
        else:
            assert (picks[:, 0] != picks[:, 1]).all()
    one = draw("multinomial.default", weights[0], 1, replacement, shape=(1,), dtype=np.int64)
    assert one[0] in (0, 2, 3)


def test_dirichlet_and_gamma_gradient():
    alpha = jnp.tile(jnp.asarray([0.5, 1, 2.5], jnp.float32), (N, 1))
    x = draw("_sample_dirichlet.default", alpha, shape=(N, 3))
    np.testing.assert_allclose(x.sum(-1), 1, rtol=1e-5)
    for i, a in enumerate((0.5, 1, 2.5)):
        assert stats.kstest(x[:, i].astype(np.float64), stats.beta(a, 4 - a).cdf).pvalue > 1e-3
    tiny = draw("_standard_gamma.default", fill(1e-3))
    assert (tiny > 0).all()
    a, s = torch.tensor([0.1, 0.5, 1, 3, 20]), torch.tensor([0.02, 0.7, 2.0, 2.0, 25])
    got = distributions.standard_gamma_grad(jnp.asarray(a.numpy()), jnp.asarray(s.numpy()))
    # ATen's own value is a rational approximation, good to about 1e-3.
    np.testing.assert_allclose(got, torch._standard_gamma_grad(a, s), rtol=2e-3)


@pytest.mark.parametrize("name", SAMPLERS)
def test_no_float64_in_float32_programs(name):
    op, args = SAMPLERS[name]
    entry = REGISTRY.get(f"aten.{op}")
    args = args(8)
    tensors = [a for a in args if isinstance(a, jax.Array)]
    numbers = [weak(a) if isinstance(a, float) else a for a in args if not isinstance(a, jax.Array)]
    lifted = [n for n in numbers if isinstance(n, jax.Array)]
    kept = [n for n in numbers if not isinstance(n, jax.Array)]
    text = (
        jax.jit(lambda k, t, n: entry.fn(*t, *n, *kept, key=k, **out(entry)))
        .lower(jnp.asarray(KEY), tensors, lifted)
        .as_text()
    )
    # Lifted numbers arrive as float64 scalars and are converted at once.
    assert not [line for line in text.splitlines() if "xf64>" in line]


def out(entry):
    return {"out": (jax.ShapeDtypeStruct((8,), np.float32),)} if entry.wants_out else {}


def test_rounds_are_outlined_once():
    """Two draws of one shape share the function of the 20 rounds."""

    def two(key):
        first = random.random_bits(key, (16,))
        return first, random.random_bits(random.fold_in(key, 1), (16,))

    text = jax.jit(two).lower(jnp.asarray(KEY)).as_text()
    assert text.count("func.func private @random_words") == 1


def test_randint_of_one_value_needs_no_bits():
    assert not random_integers.random_to(fill(), 1, key=jnp.asarray(KEY)).any()
