"""Names in a job lead to an upload or inside a listed root, and nowhere else: one test for each way out."""

from __future__ import annotations

import os

import pytest

from coordinator.service.files import resolve_name
from coordinator.service.operator_errors import RequestRefused

DIGEST = "a" * 64


@pytest.fixture
def place(tmp_path):
    root, outside, uploads = tmp_path / "root", tmp_path / "outside", tmp_path / "data" / "uploads"
    for directory in (root / "sets", outside, uploads / DIGEST):
        directory.mkdir(parents=True)
    (root / "sets" / "train.jsonl").write_text("{}")
    (outside / "secret.jsonl").write_text("{}")
    (uploads / DIGEST / "up.jsonl").write_text("{}")
    return tmp_path


def resolve(place, name, *, directory=False, roots=None):
    roots = [place / "root"] if roots is None else roots
    return resolve_name(name, field="train", roots=roots, uploads=place / "data" / "uploads", directory=directory)


def test_a_relative_name_and_an_absolute_one_inside_a_root(place):
    inside = (place / "root" / "sets" / "train.jsonl").resolve()
    assert resolve(place, "sets/train.jsonl") == inside
    assert resolve(place, str(inside)) == inside
    assert resolve(place, "sets", directory=True) == inside.parent


def test_the_first_root_that_has_it_wins(place):
    (place / "outside" / "sets").mkdir()
    (place / "outside" / "sets" / "train.jsonl").write_text("other")
    found = resolve(place, "sets/train.jsonl", roots=[place / "absent", place / "outside", place / "root"])
    assert found.read_text() == "other"


def test_an_upload(place):
    assert resolve(place, f"upload:{DIGEST}") == place / "data" / "uploads" / DIGEST / "up.jsonl"


def test_a_link_that_stays_inside_is_followed(place):
    (place / "root" / "link.jsonl").symlink_to(place / "root" / "sets" / "train.jsonl")
    assert resolve(place, "link.jsonl").name == "train.jsonl"


@pytest.mark.parametrize(
    "name",
    [
        "../outside/secret.jsonl",
        "sets/../../outside/secret.jsonl",
        "sets/../sets/train.jsonl",
        "OUTSIDE/secret.jsonl",
        "/etc/passwd",
        "link-out/secret.jsonl",
        "secret-link.jsonl",
        "loop",
        "sets",
        "absent.jsonl",
        "",
        ".",
        "~/x.jsonl",
        "a\x00b",
        "a\nb",
        "\ud800",
        "x" * 300,
        "x/" * 600,
        "file:///etc/passwd",
        "http://example.com/x.jsonl",
        "upload:",
        f"upload:{'b' * 64}",
        f"upload:{DIGEST.upper()}",
        f"upload:{DIGEST}/up.jsonl",
        f"upload:{DIGEST}\n",
        "upload:../../outside",
    ],
)
def test_ways_out_are_refused(place, name):
    root = place / "root"
    (root / "link-out").symlink_to(place / "outside")
    (root / "secret-link.jsonl").symlink_to(place / "outside" / "secret.jsonl")
    (root / "loop").symlink_to(root / "loop")
    name = name.replace("OUTSIDE", str(place / "outside"))
    with pytest.raises(RequestRefused) as refused:
        resolve(place, name)
    assert (refused.value.code, refused.value.field) == ("name_not_allowed", "train")
    assert refused.value.fix


def test_no_roots_no_paths(place):
    with pytest.raises(RequestRefused):
        resolve(place, str(place / "root" / "sets" / "train.jsonl"), roots=[])


def test_devices_and_pipes_are_no_files(place):
    os.mkfifo(place / "root" / "pipe.jsonl")
    with pytest.raises(RequestRefused):
        resolve(place, "pipe.jsonl")


def test_a_model_is_no_file_and_a_file_is_no_model(place):
    with pytest.raises(RequestRefused):
        resolve(place, f"upload:{DIGEST}", directory=True)
    (place / "data" / "uploads" / DIGEST / "config.json").write_text("{}")
    assert resolve(place, f"upload:{DIGEST}", directory=True).name == DIGEST
    with pytest.raises(RequestRefused):
        resolve(place, f"upload:{DIGEST}")
