"""Environment variables whose names are misspelt."""

from __future__ import annotations

from collections.abc import Mapping

from tpu_core.config import settings

# Read by libtpu, JAX or a TPU VM's own tools; not ours, and not typos of ours.
_LIBTPU_VARIABLES = frozenset(
    f"TPU_{name}"
    for name in (
        "ACCELERATOR_TYPE CHIPS_PER_HOST_BOUNDS CHIPS_PER_PROCESS_BOUNDS HOST_BOUNDS HOST_ID "
        "INIT_ARGS LIBRARY_PATH LOAD_LIBRARY LOG_DIR MAX_LOG_SIZE_MB MEGACORE MIN_LOG_LEVEL "
        "ML_PLATFORM ML_PLATFORM_VERSION NAME PREMAPPED_BUFFER_SIZE "
        "PREMAPPED_BUFFER_TRANSFER_THRESHOLD_BYTES PROCESS_ADDRESSES PROCESS_BOUNDS PROCESS_PORT "
        "RUNTIME_METRICS_PORTS SKIP_MDS_QUERY STDERR_LOG_LEVEL TASK_ID TOPOLOGY TOPOLOGY_ALT "
        "TOPOLOGY_WRAP VISIBLE_CHIPS VMODULE WORKER_HOSTNAMES WORKER_ID ZONE"
    ).split()
)


def misspelt_variables(environ: Mapping[str, str]) -> list[tuple[str, str]]:
    """``TPU_*`` variables that nothing reads and that look like one of ours, each with that one.

    Example:
        >>> misspelt_variables({"TPU_FALBACK": "error"})
        [('TPU_FALBACK', 'TPU_FALLBACK')]
    """
    import difflib  # for the doctor alone

    ours = [spec.env for spec in settings()]
    found = []
    for name in sorted(environ):
        upper = name.upper()
        if not upper.startswith("TPU") or name in ours or name in _LIBTPU_VARIABLES:
            continue
        if close := difflib.get_close_matches(upper, ours, n=1, cutoff=0.8):
            found.append((name, close[0]))
    return found
