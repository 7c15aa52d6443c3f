"""OpInfo's entries, whose samples come without a walk of the stack.

Each call of `sample_inputs` looks for a running `unittest.TestCase`, to note its samples there.
With the source lines of all frames that takes 0.2 s a call, most of the time of many entries.
"""

from __future__ import annotations

from torch.testing._internal import common_utils
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo import core

__all__ = ["op_db"]

for module in (common_utils, core):
    module.extract_test_fn = lambda: None
