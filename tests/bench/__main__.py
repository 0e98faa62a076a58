"""`python -m tests.bench [NAME [--option value ...]]`: each benchmark is a module with a `main` whose parameters are its options.

A module with an underscore in its name is part of another benchmark, but for those in NAMED, which take long and run only when
they are named. Without a name all others run, one after the other, with their defaults.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
NAMED = ("engine_overhead",)


def main() -> None:
    """Run one benchmark, or all."""
    here = Path(__file__).parent
    names = sorted(path.stem for path in here.glob("*.py") if "_" not in path.stem or path.stem in NAMED)
    parser = argparse.ArgumentParser(prog="python -m tests.bench")
    commands = parser.add_subparsers(dest="name")
    runs = {}
    for name in names:
        module = importlib.import_module(f"tests.bench.{name}")
        command = commands.add_parser(name, help=(module.__doc__ or "").splitlines()[0])
        for option in inspect.signature(module.main).parameters.values():
            flag = f"--{option.name.replace('_', '-')}"
            if isinstance(option.default, bool):
                command.add_argument(flag, action="store_true")
            elif isinstance(option.default, tuple):
                command.add_argument(flag, nargs="*", default=option.default)
            else:
                command.add_argument(flag, type=type(option.default), default=option.default)
        runs[name] = module.main
    options = vars(parser.parse_args())
    name = options.pop("name")
    if name is not None:
        runs[name](**options)
        return
    for title, run in runs.items():
        if title in NAMED:
            continue
        print(f"== {title}", flush=True)
        run()


if __name__ == "__main__":
    main()
