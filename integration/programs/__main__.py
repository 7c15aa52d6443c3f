"""Runs programs: ``PYTHONPATH=integration python -m programs vae kmeans --steps 20``."""

from __future__ import annotations

import argparse

import programs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="+", choices=programs.NAMES, metavar="program")
    parser.add_argument("--device", default="tpu")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    for name in options.names:
        steps = programs.start(name, options.device)
        values = [float(next(steps)) for _ in range(options.steps)]
        print(f"{name}: {values[0]:.6g} at first, {values[-1]:.6g} after {options.steps} steps")


if __name__ == "__main__":
    main()
