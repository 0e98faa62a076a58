"""Draw the paper's figures and write their page: `python -m simulator.figures [--out docs/figures]`, or `make figures`.

One core, some minutes; the same numbers every time.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from simulator.figures import cost, spread, staleness
from simulator.figures.page import page


def main() -> None:
    """Compute, draw, write."""
    parser = argparse.ArgumentParser(prog="python -m simulator.figures", description="The paper's figures, redrawn.")
    parser.add_argument("--out", type=Path, default=Path("docs/figures"), help="folder for the PNGs; the page goes beside it")
    out: Path = parser.parse_args().out
    try:
        from simulator.figures import draw
    except ImportError:
        raise SystemExit("the figures need matplotlib: pip install 'echo2[report]'") from None
    out.mkdir(parents=True, exist_ok=True)
    print("utilisation and cost against S", flush=True)
    a = staleness.points()
    draw.staleness_figure(a, out / "staleness.png")
    print("dissemination against the number of workers", flush=True)
    b = spread.points()
    draw.spread_figure(b, out / "dissemination.png")
    print("cost of a step", flush=True)
    c = cost.points()
    draw.cost_figure(c, out / "cost.png")
    text = out.with_suffix(".md")
    text.write_text(page(a, b, c, out.name))
    print(f"{out}/*.png and {text}")


if __name__ == "__main__":
    main()
