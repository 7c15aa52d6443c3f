"""Cost of runs by CPU kernels, counted by form: a form is compiled once they have cost as much.

The rule of renting or buying: without knowing how often a form comes, the whole takes at most twice
as long as it would with that knowledge.
"""

from __future__ import annotations

from collections import OrderedDict

_MOST_FORMS = 4_096


class HostRuns:
    """Costs of the forms that ran latest.

    Example:
        >>> runs = HostRuns()
        >>> runs.add("a", 2.0), runs.add("a", 3.0)
        (2.0, 5.0)
    """

    def __init__(self) -> None:
        self._costs: OrderedDict[str, float] = OrderedDict()

    def add(self, form: str, cost: float) -> float:
        """Count a run; the cost of all runs of its form."""
        total = self._costs.pop(form, 0.0) + cost
        self._costs[form] = total
        if len(self._costs) > _MOST_FORMS:
            self._costs.popitem(last=False)
        return total
