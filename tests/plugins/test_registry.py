import json
from pathlib import Path

import pytest

from plugins_trt import nvrtc
from plugins_trt.registry import Binary, Kernels, KernelsError, binaries, choose, parse_version
from plugins_trt.sources import FOLDER, included, sources


def made(capability, cuda, *, ptx=False):
    return Binary(Path(f"{capability}-{cuda}-{ptx}"), cuda, capability, ptx)


SET_12 = [made((8, minor), (12, 6)) for minor in (0, 6, 7, 9)] + [
    made((9, 0), (12, 6)),
    made((8, 0), (12, 6), ptx=True),
]
SET_13 = [made((8, minor), (13, 0)) for minor in (0, 6, 7, 9)] + [
    made((9, 0), (13, 0)),
    made((12, 0), (13, 0)),
    made((8, 0), (13, 0), ptx=True),
]


@pytest.mark.parametrize(
    ("capability", "driver", "expected"),
    [
        ((8, 7), (12, 6), made((8, 7), (12, 6))),  # Orin with JetPack 6.2 cannot load what CUDA 13 made
        ((8, 7), (13, 2), made((8, 7), (13, 0))),
        ((8, 9), (13, 0), made((8, 9), (13, 0))),
        ((12, 0), (13, 0), made((12, 0), (13, 0))),
        ((12, 1), (13, 0), made((12, 0), (13, 0))),  # a lower minor of the same major
        ((12, 0), (12, 8), made((8, 0), (12, 6), ptx=True)),  # CUDA 12.6 made no cubin for it: PTX
        ((10, 0), (13, 0), made((8, 0), (13, 0), ptx=True)),
        ((7, 5), (13, 0), None),
        ((9, 0), (11, 8), None),
    ],
)
def test_the_kernels_suit_the_device_and_its_driver(capability, driver, expected):
    assert choose(SET_12 + SET_13, capability, driver) == expected


def test_a_set_of_cuda_13_alone_does_not_suit_jetpack_6():
    assert choose(SET_13, (8, 7), (12, 6)) is None


def test_what_was_made_from_other_sources_is_passed_over(tmp_path):
    source = next(each for each in sources() if each.operator == "append")
    entry = {
        "source": source.name,
        "hash": source.hash,
        "file": "append/append.sm_90.cubin",
        "kind": "cubin",
        "capability": "9.0",
    }
    for name, binary in (("cuda-13.0", entry), ("cuda-12.6", {**entry, "hash": "0" * 16})):
        (tmp_path / name).mkdir()
        manifest = {"cuda": name.removeprefix("cuda-"), "binaries": [binary]}
        (tmp_path / name / "manifest.json").write_text(json.dumps(manifest))
    assert [each.cuda for each in binaries(source, tmp_path)] == [(13, 0)]


def test_a_device_without_kernels_is_told_what_was_found_and_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(nvrtc, "libraries", lambda: ())
    source = sources()[0]
    kernels = Kernels((8, 7), (12, 6), multiprocessors=16, shared_bytes=99 << 10, folder=tmp_path)
    with pytest.raises(KernelsError) as caught:
        kernels.image(source)
    message = str(caught.value)
    assert "compute capability 8.7" in message
    assert "driver of CUDA 12.6" in message
    assert "make kernels" in message
    with pytest.raises(KernelsError, match=r"^nothing_of_this_name: no such operator"):
        kernels.operator("nothing_of_this_name")


def test_a_hash_covers_what_a_source_includes():
    def names(operator):
        source = next(each for each in sources() if each.operator == operator)
        return [path.name for path in included(source.path)]

    assert names("argmax") == ["argmax.cu", "common.cuh"]
    assert names("append") == ["append.cu", "stored.cuh", "rows.cuh", "common.cuh"]  # and what those include
    assert len({each.hash for each in sources()}) == len(sources())


def test_sources_for_one_capability_are_left_out_elsewhere():
    only = {each.name: each.only for each in sources() if each.only is not None}
    assert only == {
        "decode_attention/wide_groups": (9, 0),
        "decode_selection/lse_groups": (9, 0),
        "decode_selection/scores_groups": (9, 0),
        "ternary_linear/wide": (9, 0),
        "w4a16_linear/wide": (9, 0),
    }
    wide = next(each for each in sources() if each.name == "w4a16_linear/wide")
    assert [wide.suits(each) for each in ((8, 7), (9, 0), (12, 0))] == [False, True, False]
    assert sources()[0].suits((8, 7))


def test_versions_have_two_numbers():
    assert parse_version("12.6") == (12, 6)
    with pytest.raises(ValueError, match="unpack"):
        parse_version("12")


def test_no_operator_but_a_reference_imports_torch():
    for path in FOLDER.rglob("*.py"):
        if path.name != "reference.py":
            text = path.read_text()
            assert "\nimport torch" not in text, path
            assert "\nfrom torch" not in text, path
