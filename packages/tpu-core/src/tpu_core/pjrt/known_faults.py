"""Known faults of the platforms: which releases have them, what avoids them, how to see them.

Imports neither jax nor torch, so that ``tpu doctor`` and the documentation read the table where
those are broken. Each fault has a *canary* where a small program shows it
(`tpu_core.pjrt.canaries`).
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass

from tpu_core.versions import installed, satisfies

Option = tuple[str, str | bool]

# Dots and convolutions as they are, without the reductions and elementwise ops around them.
_YNN = "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT,LIBRARY_FUSION_TYPE_INDIVIDUAL_CONVOLUTION"
_INDIVIDUAL: Option = ("xla_cpu_experimental_ynn_fusion_type", _YNN)


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of a platform.

    Attributes:
        name: Short name, also that of its canary.
        what: The fault, in one sentence.
        package: The distribution that has it, ``"jaxlib"`` or ``"libtpu"``.
        versions: The releases that have it, as pins.
        platforms: The platforms that show it.
        avoided_by: The option that avoids it, or None where nothing does.
        issues: Upstream reports, as ``"owner/repository#number"``.
        options: Compile options that avoid it.
        has_canary: Whether a small program shows it.
    """

    name: str
    what: str
    package: str
    versions: str
    platforms: tuple[str, ...]
    avoided_by: str | None
    issues: tuple[str, ...] = ()
    options: tuple[Option, ...] = ()
    has_canary: bool = True

    def applies(self, platform: str) -> bool:
        """Return whether the installed release has it on a platform."""
        version = installed(self.package)
        return (
            platform in self.platforms and version is not None and satisfies(version, self.versions)
        )


_OPTION = "Compile option: YNNPACK gets single products and convolutions only."

FAULTS = (
    Fault(
        "reduction-of-many-dims",
        "A product of two float32 tensors of 7 or more dims, summed over one of them, ends the "
        "process (SIGSEGV) or never ends.",
        "jaxlib",
        ">=0.10.2,<0.11.1",
        ("cpu",),
        _OPTION,
        ("jax-ml/jax#39257", "jax-ml/jax#40412"),
        (_INDIVIDUAL,),
    ),
    Fault(
        "reduction-of-many-rows",
        "A batched matrix-vector product followed by a reduction is wrong in its last rows where "
        "there are more than 32,768 (float32) or 16,384 (float64).",
        "jaxlib",
        ">=0.10.2,<0.11.1",
        ("cpu",),
        _OPTION,
        ("jax-ml/jax#39103",),
        (_INDIVIDUAL,),
    ),
    Fault(
        "transposed-bfloat16-product",
        "A product of bfloat16 operands one of which XLA transposes late fails when it "
        "runs (`Unsupported element type for DotThunk::Execute: BF16 x BF16 = F32`).",
        "jaxlib",
        ">=0.10,<0.11",
        ("cpu",),
        "Lowering: operands of 16 and 8 bits are widened to float32 first, which is exact.",
    ),
    Fault(
        "signed-and-of-narrowed",
        "`and` and `or` of two signed integers that were both narrowed end the process.",
        "jaxlib",
        ">=0.10,<0.11",
        ("cpu",),
        "Lowering: the bits are combined as unsigned integers.",
    ),
    Fault(
        "squares-are-never-negative",
        "The square or the absolute value of an integer is taken for non-negative, so that "
        "`x * x < 0` is False where the product wraps.",
        "jaxlib",
        ">=0.10",
        ("cpu",),
        "Lowering: integers are multiplied as unsigned ones.",
        ("openxla/xla#41784", "openxla/xla#46628"),
    ),
    Fault(
        "division-by-reciprocal",
        "A tensor is multiplied by the reciprocal of a number, or of what is broadcast, and not "
        "divided by it, so that `x / 41` is not 1 where `x` is 41.",
        "jaxlib",
        ">=0.10",
        ("cpu",),
        "Lowering: XLA does not see that the divisor is broadcast.",
    ),
    Fault(
        "quotients-are-not-rounded",
        "A quotient of float32 is off by up to 2 units in the last place, so that `x / x` is not "
        "always 1.",
        "jaxlib",
        ">=0.10",
        ("cuda",),
        "Lowering: a product with a reciprocal of float64, rounded to float32.",
    ),
    Fault(
        "conversions-are-combined",
        "An integer of 32 bits is rounded to bfloat16 once, which PyTorch rounds to float32 first.",
        "jaxlib",
        ">=0.10",
        ("cuda",),
        None,
    ),
    Fault(
        "convolutions-of-integers",
        "A convolution of integers does not compile (`Unsupported datatype`): cuDNN has none.",
        "jaxlib",
        ">=0.10",
        ("cuda",),
        "Lowering: a sum of matrix products over the positions of the kernel.",
    ),
    Fault(
        "products-are-tuned-for-minutes",
        "Each product of float32 at full precision is compiled in tens of ways by Triton, and each "
        "fusion in several, before one is chosen: minutes for a small transformer.",
        "jaxlib",
        ">=0.10",
        ("cuda",),
        "Compile option: products are those of cuBLAS, fusions those of XLA.",
        (),
        (
            ("xla_gpu_enable_triton_gemm", False),
            ("xla_gpu_experimental_enable_fusion_autotuner", False),
        ),
        has_canary=False,  # it costs time, not a value
    ),
    Fault(
        "inverse-functions-are-folded",
        "`log(exp(x))` is taken for `x` and `sqrt(x * x)` for `abs(x)`, also where the value "
        "between overflows.",
        "jaxlib",
        ">=0.10",
        ("cpu",),
        "Lowering: XLA does not see both functions at once.",
        ("openxla/xla#42732", "jax-ml/jax#37919", "jax-ml/jax#38099"),
    ),
    Fault(
        "products-with-booleans-are-choices",
        "A product with a boolean that became a float or a complex number is a choice between the "
        "other factor and 0: `x * mask` is 0 where `x` is NaN or infinite, and never -0.0.",
        "jaxlib",
        ">=0.10",
        ("cpu", "cuda", "tpu"),
        "Lowering: a boolean becomes a float by a choice between 1 and 0.",
    ),
    Fault(
        "roundings-are-elided",
        "A bfloat16 result that another op of the same program widens again is not rounded.",
        "jaxlib",
        ">=0.10",
        ("cpu", "cuda"),
        "Compile option: excess precision is not allowed.",
        ("jax-ml/jax#23007",),
        (("xla_allow_excess_precision", False),),
    ),
    Fault(
        "products-of-halves-are-fused",
        "On CPUs with AVX512-FP16 a float16 product and the sum that takes it are rounded once in "
        "compiled programs. CPU kernels, the default there, round both.",
        "jaxlib",
        ">=0.10",
        ("cpu",),
        None,
        has_canary=False,  # few CPUs have it
    ),
    Fault(
        "barriers-are-stripped",
        "Optimization barriers are removed before fusion, which undoes activation checkpointing.",
        "jaxlib",
        ">=0.10",
        ("cpu",),
        "Compile option: the pass that removes them is off.",
        (),
        (("xla_disable_hlo_passes", "cse_barrier_expander"),),
        has_canary=False,  # it costs memory, not a value
    ),
    Fault(
        "racing-reduce-scatter",
        "A reduce-scatter over gloo sometimes gives the first rank wrong numbers: its input is "
        "overwritten while it is sent.",
        "jaxlib",
        ">=0.10",
        ("cpu",),
        "Lowering: an all-to-all, and a sum of what arrived.",
        ("jax-ml/jax#40830",),
        has_canary=False,  # it takes several processes, and luck
    ),
    Fault(
        "names-are-confused",
        "Two instructions of one fusion whose names differ in `_` and `-` alone share a function: "
        "an update by index of every second element, beside other updates, is lost.",
        "jaxlib",
        ">=0.10",
        ("cpu",),
        "Lowering: instructions have names with dashes, which XLA numbers.",
    ),
    Fault(
        "denormals-are-zero",
        "Arithmetic takes denormal operands for zero and returns zero for denormal results.",
        "jaxlib",
        ">=0.10",
        ("cpu",),
        None,
        ("openxla/xla#22858", "jax-ml/jax#16200", "jax-ml/jax#37762"),
    ),
    Fault(
        "products-are-contracted",
        "A product and a sum of one program round once (FMA), so that `x * y - y * x` is not 0.",
        "jaxlib",
        ">=0.10",
        ("cpu",),
        None,
        ("jax-ml/jax#26147", "jax-ml/jax#38602"),
    ),
    Fault(
        "sum-with-zero-is-dropped",
        "`x + 0` is `x`, so that -0 stays -0.",
        "jaxlib",
        ">=0.10",
        ("cpu", "cuda"),
        None,
    ),
    Fault(
        "products-of-padded-constants",
        "A product whose left operand is a constant that is padded behind, as the gradient of a "
        "sum over a slice, does not compile (`RET_CHECK failure` in `hlo_verifier.cc`) or ends the "
        "process.",
        "libtpu",
        ">=0.0.40",
        ("tpu",),
        "Lowering: a barrier between the constant and its padding.",
    ),
    Fault(
        "async-updates-are-not-read",
        "jaxlib 0.10 cannot read a divided program for tpu7x that a newer libtpu has compiled "
        "(`async-update instruction should have 1 operands but sees 2`): it can be neither "
        "planned nor saved.",
        "libtpu",
        ">=0.0.46",
        ("tpu",),
        "The libtpu that the installed jax names: 0.0.42 for jax 0.10.",
        has_canary=False,  # it takes a slice of several chips
    ),
)


@functools.cache
def applying(platform: str) -> tuple[Fault, ...]:
    """The faults that the installed releases have on a platform."""
    return tuple(fault for fault in FAULTS if fault.applies(platform))


def present(name: str, platform: str) -> bool:
    """Return whether the installed releases have a fault on a platform."""
    return any(fault.name == name for fault in applying(platform))


def compile_options(platform: str) -> tuple[Option, ...]:
    """Compile options that avoid the faults of a platform, each once.

    An option that ``XLA_FLAGS`` names is left to the user.
    """
    flags = {flag.lstrip("-").split("=")[0] for flag in os.environ.get("XLA_FLAGS", "").split()}
    options = {option: None for fault in applying(platform) for option in fault.options}
    return tuple(option for option in options if option[0] not in flags)


def faults_page() -> str:
    """Markdown of ``docs/reference/known-faults.md``."""
    out = [
        "# Known faults of platforms",
        "",
        "Known wrong results of XLA and the libraries under it, and the workarounds of the device.",
        " Where a small program shows a fault, that program is its",
        "*canary*: `tpu doctor` runs the canaries of the platform, each in a process that it may",
        "end, and so do the tests. Compile options are part of every key of the cache; an option",
        "that `XLA_FLAGS` names is left to you.",
        "",
        "The options and lowerings hold for every program that the device compiles, in whatever",
        "mode, in background processes and over several ranks. An exported program that JAX runs",
        "by itself (`tpu_compile.export.with_jax`) and your own `jax.jit` have JAX's options: set",
        "`XLA_FLAGS` for them.",
        "",
        "| Fault | Releases | What avoids it | Canary | Reports |",
        "|---|---|---|---|---|",
    ]
    for fault in FAULTS:
        reports = ", ".join(
            f"[{issue}](https://github.com/{issue.replace('#', '/issues/')})"
            for issue in fault.issues
        )
        versions = fault.versions.replace(",", ", ")
        platforms = ", ".join(f"`{platform}`" for platform in fault.platforms)
        cells = (
            f"**{fault.name}**: {fault.what}",
            f"{fault.package} {versions}, {platforms}",
            fault.avoided_by or "Nothing.",
            "yes" if fault.has_canary else "no",
            reports,
        )
        out.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    out += ["", "## Options", "", "| Platform | Option | Value |", "|---|---|---|"]
    options = {(p, *option): None for f in FAULTS for p in f.platforms for option in f.options}
    out += [f"| `{platform}` | `{name}` | `{value}` |" for platform, name, value in options]
    return "\n".join(out) + "\n"
