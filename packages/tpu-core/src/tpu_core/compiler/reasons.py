"""Why a program had to be compiled: which op or argument was new, and against what."""

from __future__ import annotations

from tpu_core.compiler.segment import Node, Segment


class Reasons:
    """Remembers what was compiled, to say what is new about a segment."""

    def __init__(self) -> None:
        self._forms: dict[str, dict[tuple[str, ...], None]] = {}
        self._keys: dict[str, Segment] = {}
        self._sequences: dict[tuple[str, ...], list[str]] = {}

    def explain(self, s: Segment) -> str:
        """One line, such as ``"aten.mm: float32[8, 128] -> float32[8, 131]"``; remembers ``s``."""
        previous = self._keys.get(s.key)
        self._keys[s.key] = s
        new = self._first_new_form(s)
        if previous is not None:
            return self._changed_number(s, previous)
        if new:
            return new
        return f"known ops in a new order ({len(s.nodes)} ops, cut at: {s.cut})"

    def _first_new_form(self, s: Segment) -> str | None:
        first = None
        for node in s.nodes:
            form = _form(s, node)
            known = self._forms.setdefault(node.name, {})
            if form not in known:
                if first is None:
                    shown = ", ".join(form) or "no operands"
                    if known:
                        first = f"{node.name}: ({', '.join(next(reversed(known)))}) -> ({shown})"
                    else:
                        first = f"{node.name}: first use, with ({shown})"
                known[form] = None
        return first

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


def _form(s: Segment, node: Node) -> tuple[str, ...]:
    if node.plan is None:
        return ()
    reads = [f"{a.dtype}{list(a.sizes)}" for a in node.plan.reads]
    writes = [f"-> {a.dtype}{list(a.sizes)}" for a in node.plan.writes]
    return (*reads, *writes)
