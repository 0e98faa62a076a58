"""The delta codec beside other wire forms: bytes a parameter, speed, scaling, memory.

    python -m tests.bench codec [--json] [--slices DIR] [--model BASE_DIR NEW_DIR] [--trained]

`--slices`: a folder of flat bf16 versions NAME_vNN.u16, default the real ones that come with the tests; each name's first version is
the base of the others. `--model`: two Hugging Face directories with bf16 weights. `--trained`: also SmolLM2-135M after 6, 7, 10 and
14 steps of a real run, which is made when it is not there (see `codec_versions`; about five minutes, 3 GB).

GB/s are of model bytes and include BLAKE3 of the blob and of the new shard, as publisher and worker do it; median of
`--repeats`, by CPU time in the table, by CPU time and wall in the JSON. "x 2" is the throughput of two threads over that of one,
MB the peak resident memory above the inputs. "slime / B" says how many times smaller than the slime form of the same run a form is.
"""

from __future__ import annotations

import json as json_module
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from p2p.adapters.snapshot_dir import Snapshot, open_snapshot
from p2p.codec import delta
from p2p.codec.delta import Delta
from p2p.codec.effort import Effort
from p2p.codec.layout import Shard, gather, shards, view
from tests import factories_deltas
from tests.bench.codec_forms import COMPETITORS, PACKAGES, SLIME, Form, Words
from tests.bench.codec_measure import Case, Pair, facts, figures, sizes

EFFORTS: Sequence[Effort] = ("fast", "grouped", "dense")


class Ours:
    """This project's delta encoding at one effort."""

    def __init__(self, effort: Effort) -> None:
        self._delta = Delta(effort)

    def encode(self, base: Words, new: Words) -> bytes:
        shard, held = factories_deltas.shard_of("BF16", base)
        record = self._delta.record(shard, held, new.view(np.uint8))
        return b"".join(view(chunk) for chunk in record.chunks(shard))

    def apply(self, words: Words, blob: bytes) -> None:
        whole, held = factories_deltas.shard_of("BF16", words)
        for place, shard, record in delta.read_records([blob], [whole]):
            delta.apply(shard, record, held, place)


OURS: Mapping[str, Form] = {f"ours, {effort}": Ours(effort) for effort in EFFORTS}


def main(
    json: bool = False,
    slices: str = "",
    model: tuple[str, ...] = (),
    trained: bool = False,
    repeats: int = 3,
    elements: int = 0,
) -> dict[str, Any]:
    """Measure and print; `elements` > 0 takes only the first so many of each slice. Returns the figures by delta and form."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    found = {"machine": _machine(), "deltas": {}}
    for case in _cases(slices, model, trained, elements):
        found["deltas"][case.name] = _show_all(case, repeats, silent=json)
    if trained:
        found["skipped"] = _skipped(silent=json)
    if json:
        print(json_module.dumps(found, indent=2, sort_keys=True))
    return found


def _cases(slices: str, model: Sequence[str], trained: bool, elements: int) -> Iterator[Case]:
    if model:
        if len(model) != 2:
            raise SystemExit(f"--model takes two directories, base and new; {len(model)} were given")
        base, new = model
        yield _model_case(f"{Path(base).name} -> {Path(new).name}", Path(base), Path(new))
        return
    yield from _slice_cases(slices, elements)
    if trained:
        from tests.bench.codec_versions import versions

        of = versions()["w1"]
        yield _model_case("SmolLM2-135M w1 6 -> 7", of[6], of[7])


def _slice_cases(directory: str, elements: int) -> Iterator[Case]:
    """Each name's later versions against its first."""
    first: dict[str, str] = {}
    slices = _slices(directory)
    for stem in sorted(slices):
        name, version = stem.rsplit("_v", 1)
        base = first.setdefault(name, stem)
        if base != stem:
            pair = (slices[base]()[: elements or None], slices[stem]()[: elements or None])
            yield Case(f"slice {name} {int(base.rsplit('_v', 1)[1])} -> {int(version)}", [pair])


def _slices(directory: str) -> Mapping[str, Callable[[], Words]]:
    """Readers by name: of a folder, or of those that come with the tests."""
    if not directory:
        return {name: partial(factories_deltas.version, name) for name in ("w1_v06", *factories_deltas.XOR_WITH)}
    found = {path.stem: partial(_read, path) for path in Path(directory).glob("*_v*.u16")}
    if not found:
        raise SystemExit(f"--slices {directory} holds no files like w1_v06.u16: flat little-endian bf16 bits")
    return found


def _read(path: Path) -> Words:
    return np.frombuffer(path.read_bytes(), np.uint16)


def _model_case(name: str, base: Path, new: Path) -> Case:
    old, young = open_snapshot(base), open_snapshot(new)
    if old.tensors != young.tensors or any(tensor.dtype != "BF16" for tensor in old.tensors):
        raise SystemExit(f"{base} and {new} must hold the same tensors, all BF16: the other wire forms know nothing else")
    return Case(name, [_pair(shard, old, young) for shard in shards(old.tensors)])


def _pair(shard: Shard, old: Snapshot, young: Snapshot) -> Pair:
    """Copies: the shards shall lie in memory, not in files."""
    return tuple(np.array(gather(shard, one.read)).view("<u2") for one in (old, young))  # type: ignore[return-value]


def _show_all(case: Case, repeats: int, *, silent: bool) -> dict[str, Any]:
    """Every form's figures on a delta, also as ratios to the bound and to the slime form."""
    about = facts(case)
    table = _table(f"{case.name}: {about.elements:,} parameters, {about.changed:.2%} changed, bound {about.bound:.5f} B")
    measured: dict[str, dict[str, float]] = {}
    for name, form in _forms().items():
        of = figures(form, case, repeats)
        slime = measured.get(SLIME, of)
        of["of_bound"] = of["bytes_per_param"] / about.bound if about.bound else float("inf")
        of["smaller_than_slime"] = slime["bytes_per_param"] / of["bytes_per_param"]
        for side in ("encode", "apply"):
            of[f"{side}_of_slime"] = of[f"{side}_gb_s_cpu"] / slime[f"{side}_gb_s_cpu"]
        measured[name] = of
        table.add_row(name, *_cells(of))
    if not silent:
        Console(width=140).print(table)
    return {**asdict(about), "forms": measured}


def _forms() -> dict[str, Form]:
    """Everything that can be measured here."""
    missing = {name for name, package in PACKAGES.items() if find_spec(package) is None}
    if missing:
        print(f"not measured: {', '.join(sorted(missing))}; pip install 'echo2[bench]' brings their packages", file=sys.stderr)
    return {name: form for name, form in {**COMPETITORS, **OURS}.items() if name not in missing}


COLUMNS = (
    "B/param",
    "of bf16",
    "of bound",
    "slime / B",
    "enc GB/s",
    "of slime",
    "x 2",
    "MB",
    "apply GB/s",
    "of slime",
    "x 2",
    "MB",
)


def _table(title: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("form", no_wrap=True)
    for column in COLUMNS:
        table.add_column(column, justify="right")
    return table


def _cells(of: Mapping[str, float]) -> Iterator[str]:
    yield f"{of['bytes_per_param']:.5f}"
    yield f"1/{2 / of['bytes_per_param']:.0f}"
    yield f"{of['of_bound']:.3f}"
    yield f"{of['smaller_than_slime']:.2f}"
    for side in ("encode", "apply"):
        yield f"{of[f'{side}_gb_s_cpu']:.2f}"
        yield f"{of[f'{side}_of_slime']:.2f}"
        yield f"{of[f'{side}_two_threads']:.2f}"
        yield f"{of[f'{side}_peak_mb']:.0f}"


def _skipped(*, silent: bool) -> dict[str, dict[str, float]]:
    """Bytes a parameter on the trained model when k versions are skipped."""
    from tests.bench.codec_versions import KEPT, versions

    forms = {SLIME: COMPETITORS[SLIME], **OURS}
    table = Table(title="SmolLM2-135M, bytes a parameter over k versions", title_justify="left")
    for column in ("delta", "changed", "bound", *forms):
        table.add_column(column, justify="left" if column == "delta" else "right")
    found: dict[str, dict[str, float]] = {}
    for variant, of in versions().items():
        for version in KEPT[1:]:
            case = _model_case(f"{variant} k={version - KEPT[0]}", of[KEPT[0]], of[version])
            about = facts(case)
            by_form = {name: sizes(form, case)["bytes_per_param"] for name, form in forms.items()}
            found[case.name] = {"changed": about.changed, "bound": about.bound, **by_form}
            table.add_row(case.name, f"{about.changed:.2%}", f"{about.bound:.5f}", *(f"{size:.5f}" for size in by_form.values()))
    if not silent:
        Console(width=140).print(table)
    return found


def _machine() -> dict[str, Any]:
    return {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count(), "load": os.getloadavg()[0]}
