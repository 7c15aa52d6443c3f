"""Recipes that lower one recorded node: read the operands, call the lowering, write the results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from tpu_core.dtypes import cast, default_dtype_of
from tpu_core.lowering import checks, views
from tpu_core.lowering.implementations import Choices, as_recorded
from tpu_core.lowering.precision import precision
from tpu_core.lowering.random import derive_key
from tpu_core.lowering.views import Access
from tpu_core.pjrt import jax_settings
from tpu_core.pjrt.jax_settings import JaxSettings
from tpu_core.recorder.compute import Compute


class Operand:
    """The place of a device tensor in an argument template."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


class Number:
    """The place of a runtime scalar; ``dtype`` is set where it stands for a 0-d CPU tensor."""

    __slots__ = ("dtype",)

    def __init__(self, dtype: np.dtype[Any] | None = None) -> None:
        self.dtype = dtype


class Repeated:
    """The place of a list that holds one runtime scalar ``count`` times."""

    __slots__ = ("count",)

    def __init__(self, count: int) -> None:
        self.count = count


class Blank:
    """The place of an overwritten tensor, whose old value is not read."""

    __slots__ = ("aval",)

    def __init__(self, aval: jax.ShapeDtypeStruct) -> None:
        self.aval = aval


class NodePlan:
    """Recipe that lowers the nodes of one signature.

    Args:
        op: The overload as the user's program called it, for names and messages.
        template: Flat list of the functional overload's arguments as (name, keyword-only, value),
            where a value holds `Operand`, `Number`, `Repeated` and `Blank` in place of tensors and
            numbers.
        reads: Access of each operand.
        writes: Access and dtype of each written tensor.
        compute: Functional computation over (positional, keywords, key).
        order: For each node output (new tensors, then writes) the index of its flattened result.
        random: Whether the last four numbers are the seed and offset words.
        precision: Name of the float32 matmul precision in force when the node was recorded.
        choices: Implementations that the user had chosen then.
        sizes: Names of the arguments that are sizes: in another recording of the same program they
            may differ. Any other is part of what the program is keyed by.
        identity: Text that says what is computed where op and arguments do not.
        default_dtype: PyTorch's default dtype when the node was recorded.
        jax_settings: JAX's settings then, where the op computes a JAX function of the user's.
        checks: The level at which its values are checked (`tpu_core.lowering.checks`). Unless it is
            0, the node has an output more, a word, behind the new tensors.
    """

    __slots__ = (
        *("checks", "choices", "compute", "default_dtype", "identity", "jax_settings", "op"),
        *("order", "precision", "random", "reads", "sizes", "template", "writes"),
    )

    def __init__(
        self,
        op: str,
        template: list[tuple[str, bool, Any]],
        reads: list[Access],
        writes: list[Access],
        compute: Compute,
        order: list[int],
        random: bool,
        precision: str,
        choices: Choices = (),
        sizes: frozenset[str] = frozenset(),
        identity: str = "",
        default_dtype: torch.dtype = torch.float32,
        jax_settings: JaxSettings | None = None,
        checks: int = 0,
    ) -> None:
        self.op = op
        self.template = template
        self.reads = reads
        self.writes = writes
        self.compute = compute
        self.order = order
        self.random = random
        self.precision = precision
        self.choices = choices
        self.sizes = sizes
        self.identity = identity
        self.default_dtype = default_dtype
        self.jax_settings = jax_settings
        self.checks = checks

    def lower(self, operands: Sequence[jax.Array], numbers: Iterator[Any]) -> list[jax.Array]:
        """The node's outputs: new tensors, a word, the new values of written storages.

        Args:
            operands: Values of the storages read, then of those partly overwritten.
            numbers: The node's runtime scalars in the order in which the extension found them.
        """
        if self.checks:
            return self.checked(operands, numbers, self.checks)[0]
        return self._lower(operands, numbers, list)

    def checked(
        self, operands: Sequence[jax.Array], numbers: Iterator[Any], level: int
    ) -> tuple[list[jax.Array], checks.Findings]:
        """`lower` with a word, and what that is made of.

        Args:
            operands, numbers: As of `lower`.
            level: At which level to check.
        """
        with checks.checking(level) as findings:
            return self._lower(operands, numbers, lambda: [findings.word()]), findings

    def _lower(
        self,
        operands: Sequence[jax.Array],
        numbers: Iterator[Any],
        word: Callable[[], list[jax.Array]],
    ) -> list[jax.Array]:
        positional, keywords, write_starts = self.arguments(
            operands, numbers, views.read, cast, jnp.zeros
        )
        key = (
            derive_key(*(cast(next(numbers), np.uint32) for _ in range(4))) if self.random else None
        )
        with (
            precision(self.precision),
            as_recorded(self.choices),
            default_dtype_of(self.default_dtype),
            jax_settings.as_recorded(self.jax_settings),
        ):
            results = self.compute(positional, keywords, key)
        outputs = [results[i] for i in self.order]
        fresh = len(outputs) - len(self.writes)
        written: list[jax.Array] = []
        bases = iter(operands[len(self.reads) :])
        for access, value, starts in zip(self.writes, outputs[fresh:], write_starts):
            value = cast(value, access.dtype)
            if access.overwrites:
                written.append(value)
                continue
            base = written[access.chained] if access.chained >= 0 else next(bases)
            written.append(views.write(base, access, value, starts))
        return outputs[:fresh] + word() + written

    def overwritten(self, operands: Sequence[int]) -> list[int | None]:
        """For each write, which of ``operands`` the storage held before; None: it is not read."""
        found: list[int | None] = []
        bases = iter(operands[len(self.reads) :])
        for access, place in zip(self.writes, _places(self.template)):
            if not access.overwrites:
                found.append(found[access.chained] if access.chained >= 0 else next(bases))
            elif isinstance(place.read, Operand):
                found.append(operands[place.read.index])
            else:
                found.append(None)
        return found

    def resized(
        self,
        template: list[tuple[str, bool, Any]],
        reads: list[Access],
        writes: list[Access],
        compute: Compute,
    ) -> NodePlan:
        """The same plan for other sizes."""
        return NodePlan(
            *(self.op, template, reads, writes, compute, self.order, self.random, self.precision),
            *(self.choices, self.sizes, self.identity, self.default_dtype, self.jax_settings),
            self.checks,
        )

    def argument(self, name: str) -> Any:
        """Template entry of an argument."""
        return next(value for n, _, value in self.template if n == name)

    def positional_names(self) -> list[str]:
        """Names of the positional arguments that `arguments` gives."""
        return [n for n, keyword, _ in self.template if not keyword and not n.startswith(_HIDDEN)]

    def arguments(
        self,
        operands: Sequence[Any],
        numbers: Iterator[Any],
        read: Callable[[Any, Access, Sequence[Any]], Any],
        convert: Callable[[Any, np.dtype[Any]], Any],
        blank: Callable[[tuple[int, ...], np.dtype[Any]], Any],
    ) -> tuple[list[Any], dict[str, Any], list[list[Any]]]:
        """The functional overload's arguments, in whatever kind of value the functions make.

        Args:
            operands, numbers: As of `lower`.
            read: A tensor from its storage's value, its geometry and its starts.
            convert: A number that stands for a 0-d tensor, in that tensor's dtype.
            blank: A tensor whose old value is not read, from shape and dtype.

        Returns:
            Positional arguments, keyword arguments, and the starts of each write.
        """
        # The walk over the template meets tensors and numbers in the extension's own order.
        reads = iter(zip(self.reads, operands))
        write_starts: list[list[Any]] = []
        writes = iter(self.writes)

        def resolve(value: Any) -> Any:
            if isinstance(value, _Written):
                result = resolve(value.read)
                write_starts.append([next(numbers) for _ in next(writes).starts()])
                return result
            if isinstance(value, Operand):
                access, base = next(reads)
                return read(base, access, [next(numbers) for _ in access.starts()])
            if isinstance(value, Number):
                number = next(numbers)
                return convert(number, value.dtype) if value.dtype is not None else number
            if isinstance(value, Repeated):
                return [next(numbers)] * value.count
            if isinstance(value, Blank):
                return blank(value.aval.shape, value.aval.dtype)
            if isinstance(value, list):
                return [resolve(v) for v in value]
            return value

        positional: list[Any] = []
        keywords: dict[str, Any] = {}
        for name, keyword, value in self.template:
            resolved = resolve(value)
            if name.startswith(_HIDDEN):
                continue
            if keyword:
                keywords[name] = resolved
            else:
                positional.append(resolved)
        return positional, keywords, write_starts


# Prefix of template entries that are walked for their numbers but passed to no lowering.
_HIDDEN = "$"


class _Written:
    """The place of a tensor that is written: its read, if any, and then its write."""

    __slots__ = ("read",)

    def __init__(self, read: Any) -> None:
        self.read = read


# What stands in a template in place of tensors and run-time numbers.
PLACES = (Operand, Number, Blank, _Written)


def _places(template: list[tuple[str, bool, Any]]) -> Iterator[_Written]:
    """The written tensors of a template, in order."""
    for _, _, value in template:
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, _Written):
                yield item


def written(read: Any) -> _Written:
    """Mark a template value as written; ``read`` is an `Operand` or a `Blank`."""
    return _Written(read)


def hidden(name: str) -> str:
    """Template name of an ``out=`` argument: written, but no argument of the functional
    overload.
    """
    return _HIDDEN + name
