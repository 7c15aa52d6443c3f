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
        self._bought: dict[str, int] = {}  # programs of a form

    def add(self, form: str, cost: float) -> float:
        """Count a run; the cost of all runs of its form."""
        total = self._costs.pop(form, 0.0) + cost
        self._costs[form] = total
        if len(self._costs) > _MOST_FORMS:
            self._bought.pop(self._costs.popitem(last=False)[0], None)
        return total

    def pays(self, form: str, cost: float, price: float) -> bool:
        """Count a run; whether all since the last program of the form have cost as much as another.

        Each further program has to be earned by twice as much as the one before: a form may have
        sizes that no program on padded arrays serves.

        Args:
            form: The form.
            cost: Of the run.
            price: Of a program.
        """
        bought = self._bought.get(form, 0)
        if self.add(form, cost) <= price * 2**bought:
            return False
        self._costs[form] = 0.0
        self._bought[form] = bought + 1
        return True
