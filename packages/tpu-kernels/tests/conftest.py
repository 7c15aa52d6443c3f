from __future__ import annotations

import array_type_checks

array_type_checks.install()
