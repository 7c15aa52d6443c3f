"""Programs judged by the tier below: a run is repeated op by op, and the results are compared.

``TPU_VERIFY`` says which runs; `watch` is called with each new program.
"""

from __future__ import annotations

from tpu_core.verification.watch import watch

__all__ = ["watch"]
