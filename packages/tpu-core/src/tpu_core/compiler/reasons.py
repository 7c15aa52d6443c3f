"""Why a program had to be compiled: which op or argument was new, and against what."""

from __future__ import annotations

from collections.abc import Collection

from tpu_core.compiler.segment import Node, Segment


class Reasons:
    """Remembers what was compiled, to say what is new about a segment."""

    def __init__(self) -> None:
        self._forms: dict[str, dict[tuple[str, ...], None]] = {}
        self._keys: dict[str, Segment] = {}
        self._contents: dict[str, Segment] = {}

    def explain(self, s: Segment) -> str:
        """One line, such as ``"aten.mm: float32[8, 128] -> float32[8, 131]"``."""
        previous = self._keys.get(s.key)
        if previous is not None:
            return self._changed_number(s, previous)
        alike = self._contents.get(s.content)
        if alike is not None:
            return (
                f"the same {len(s.nodes)} ops, other values alive: "
                f"{len(alike.live)} -> {len(s.live)} results, "
                f"{len(alike.donated)} -> {len(s.donated)} inputs whose memory is free"
            )
        for node in s.nodes:
            form, known = _form(s, node), self._forms.get(node.name, {})
            if form in known:
                continue
            shown = ", ".join(form) or "no operands"
            if known:
                return f"{node.name}: ({', '.join(_closest(form, known))}) -> ({shown})"
            return f"{node.name}: first use, with ({shown})"
        return f"known ops in a new order ({len(s.nodes)} ops, cut at: {s.cut})"

    def remember(self, s: Segment) -> None:
        """Count ``s`` among what was compiled."""
        self._keys[s.key] = s
        self._contents[s.content] = s
        for node in s.nodes:
            self._forms.setdefault(node.name, {})[_form(s, node)] = None

    @staticmethod
    def _changed_number(s: Segment, previous: Segment) -> str:
        for i, (now, before) in enumerate(zip(s.numbers, previous.numbers)):
            if now.value != before.value and not now.compiled_in and before.compiled_in:
                node = next(n for n in reversed(s.nodes) if n.numbers <= i)
                return (
                    f"{node.name}: a number that was constant varies, "
                    f"{before.value} -> {now.value}; it is a run-time input from now on"
                )
        return "numbers compiled in differ"


def _closest(form: tuple[str, ...], known: Collection[tuple[str, ...]]) -> tuple[str, ...]:
    """The known form that differs from ``form`` in the fewest operands; of several, the latest."""
    likeness = [
        (len(k) == len(form), sum(a == b for a, b in zip(k, form)), i) for i, k in enumerate(known)
    ]
    return list(known)[max(likeness)[-1]]


def _form(s: Segment, node: Node) -> tuple[str, ...]:
    if node.plan is None:
        return ()
    reads = [f"{a.dtype}{list(a.sizes)}" for a in node.plan.reads]
    writes = [f"-> {a.dtype}{list(a.sizes)}" for a in node.plan.writes]
    return (*reads, *writes)
