"""The CUDA sources compile without a GPU: the toolkit's compiler or NVRTC, whichever this machine has."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from plugins_trt import build, nvrtc
from plugins_trt.registry import binaries, choose
from plugins_trt.resources import (
    Resources,
    SpillError,
    column,
    parse_resources,
    read_record,
    refuse_spills,
    write_record,
)
from plugins_trt.sources import FOLDER, sources

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "docs" / "kernels.md"
CACHE = ROOT / ".cache" / "kernels"
"""What one run compiled, the next one finds."""

LOG = """\
ptxas info    : Compiling entry function 'wide_bf16_d128' for 'sm_90'
ptxas info    : Function properties for wide_bf16_d128
    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 8 bytes cumulative stack size, 2048 bytes smem
ptxas info    : Compiling entry function 'choose_blocks' for 'sm_90'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, 380 bytes cmem[0]
"""


CALLED = """\
ptxas info    : Compile time = 1.000 ms
ptxas info    : Function properties for _Z11choose_manyi
    {} bytes stack frame, {} bytes spill stores, 0 bytes spill loads
"""


def test_the_compilers_report_is_read():
    wide, choose_blocks = parse_resources(LOG + CALLED.format(0, 0))
    assert wide == Resources("wide_bf16_d128", 255, 8, 4, 12, 2048)
    assert choose_blocks == Resources("choose_blocks", 40, 0, 0, 0, 0)


def test_a_kernel_that_spills_is_refused():
    source = sources()[0]
    with pytest.raises(SpillError, match="wide_bf16_d128 spills 4 bytes"):
        refuse_spills(source, (9, 0), parse_resources(LOG))
    called = "\n".join(LOG.splitlines()[4:]) + "\n" + CALLED.format(64, 48)
    with pytest.raises(SpillError, match="_Z11choose_manyi spills 48 bytes"):
        refuse_spills(source, (9, 0), parse_resources(called))


def test_a_record_is_read_as_it_was_written(tmp_path):
    orin, rtx = ((12, 6), (8, 7)), ((13, 0), (12, 0))
    kernels = [("a/b", Resources("wide", 255, 8, 0, 0, 0)), ("a/c", Resources("narrow", 90, 0, 0, 0, 0))]
    write_record(tmp_path / "kernels.md", {rtx: kernels[:1], orin: kernels})
    assert read_record(tmp_path / "kernels.md") == {
        "12.6: sm_87": {"wide": "255+8", "narrow": "90"},
        "13.0: sm_120": {"wide": "255+8"},
    }
    assert "by the NVRTC of CUDA 12.6 and 13.0" in (tmp_path / "kernels.md").read_text()


def test_a_compiler_is_given_only_targets_it_knows():
    compiler = build.Nvcc("nvcc", (12, 6), frozenset({(8, 7), (9, 0)}))
    jobs = build.jobs_of(compiler, build.CAPABILITIES, ["append"])
    assert [(job.capability, job.ptx) for job in jobs] == [((8, 7), False), ((9, 0), False), ((8, 0), True)]
    assert jobs[0].file == "append/append.sm_87.cubin"
    assert jobs[2].file == "append/append.compute_80.ptx"


def test_no_compiler_is_said(monkeypatch, capsys):
    monkeypatch.setattr(build, "compilers", lambda _: [])
    assert build.main([]) == 1
    assert "nvidia-cuda-nvrtc-cu12==12.6" in capsys.readouterr().err


def test_a_source_with_a_fault_is_refused_with_the_compilers_words(tmp_path):
    source = tmp_path / "broken.cu"
    source.write_text('extern "C" __global__ void f() { nothing_of_this_name(); }\n')
    for compiler in build.compilers() or pytest.skip("no CUDA compiler here"):
        with pytest.raises(nvrtc.CompileError, match="nothing_of_this_name"):
            compiler.compile(source, (9, 0), include=FOLDER)


class Counting:
    """A compiler that compiles nothing, and counts."""

    version = (12, 6)
    capabilities = frozenset({(8, 7)})

    def __init__(self):
        self.compiled = []

    def compile(self, source, capability, *, include, ptx=False):
        assert include == FOLDER
        self.compiled.append(source.stem)
        log = LOG.splitlines()[4:]
        return nvrtc.Compiled(f"{source.stem} {capability} {ptx}".encode(), "" if ptx else "\n".join(log))


def test_what_a_set_holds_is_not_compiled_again(tmp_path):
    compiler, folder = Counting(), tmp_path / "set"
    jobs = build.jobs_of(compiler, [(8, 7)], ["append", "argmax"])
    first = build.build(compiler, jobs, folder, workers=1)
    assert sorted(compiler.compiled) == ["append", "append", "argmax", "argmax"]  # cubin and PTX
    assert build.build(compiler, jobs, folder, workers=1) == first
    assert len(compiler.compiled) == 4

    build.build(compiler, build.jobs_of(compiler, [(8, 7)], ["commit"]), folder, workers=1)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert {entry["source"] for entry in manifest["binaries"]} == {
        "append/append", "argmax/argmax", "commit/commit",
    }  # fmt: skip

    (folder / first[0]["file"]).write_bytes(b"half an ima")  # a build was killed, or the disk was full
    other = replace(
        jobs[1], source=replace(jobs[1].source, hash="0" * 16)
    )  # another source than the set was made from
    compiler.compiled.clear()
    build.build(compiler, [jobs[0], other, *jobs[2:]], folder, workers=1)
    assert compiler.compiled == [jobs[0].source.path.stem, other.source.path.stem]
    (folder / "manifest.json").write_text("{")
    compiler.compiled.clear()
    build.build(compiler, jobs, folder, workers=1)
    assert len(compiler.compiled) == 4


class Refusing(Counting):
    """Compiles all but one source."""

    def compile(self, source, capability, *, include, ptx=False):
        if source.stem == "argmax":
            raise nvrtc.CompileError("argmax: no")
        return super().compile(source, capability, include=include, ptx=ptx)


def test_what_was_compiled_before_a_fault_is_not_compiled_again(tmp_path):
    compiler, folder = Refusing(), tmp_path / "set"
    jobs = build.jobs_of(compiler, [(8, 7)], ["append", "argmax"])
    with pytest.raises(nvrtc.CompileError):
        build.build(compiler, jobs, folder, workers=1)
    assert "append" in compiler.compiled
    again = Counting()
    build.build(again, jobs, folder, workers=1)
    assert sorted(again.compiled) == ["append", "argmax", "argmax"]  # the PTX stands behind the fault


def compiler_of(version):
    found = [each for each in nvrtc.libraries() if each.version == version]
    if not found:
        pytest.skip(f"no NVRTC of CUDA {version[0]}.{version[1]} here")
    return found[0]


def check_target(version, capability):
    """Every source compiles without spills, to the registers that the record tells; the images suit the device."""
    compiler = compiler_of(version)
    folder = CACHE / f"cuda-{version[0]}.{version[1]}"
    jobs = [job for job in build.jobs_of(compiler, [capability]) if not job.ptx]
    suiting = [source for source in sources() if source.suits(capability)]
    assert {job.source.name for job in jobs} == {source.name for source in suiting}
    entries = build.build(compiler, jobs, folder)
    for source in suiting:
        found = choose(binaries(source, CACHE), capability, version)
        assert found is not None
        assert found.path.read_bytes()[:4] == b"\x7fELF"
    resources = [each for _, each in build.resources_of(entries)]
    assert all(each.registers > 0 and not each.spill_stores and not each.spill_loads for each in resources)
    recorded = read_record(RECORD).get(column((version, capability)), {})
    built = {each.kernel: each.cell for each in resources}
    assert built == recorded, (
        "the kernels changed, or this target is not recorded: python -m plugins_trt.build --compiler nvrtc --record docs/kernels.md"
    )


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("version", "capability"), [((12, 6), (8, 7)), ((13, 0), (12, 0))])
def test_every_operator_compiles_as_recorded(version, capability):
    check_target(version, capability)


@pytest.mark.soak
@pytest.mark.parametrize("version", [(12, 6), (13, 0)])
@pytest.mark.parametrize("capability", build.CAPABILITIES)
def test_every_operator_compiles_as_recorded_for_every_target(version, capability):
    if capability not in compiler_of(version).capabilities:
        assert (version, capability) == ((12, 6), (12, 0)), (
            "CUDA 12.6 does not know it, and nothing else is left out"
        )
        return
    check_target(version, capability)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_the_toolkit_compiles_every_operator_without_spills(tmp_path):
    compiler = build.Nvcc.find() or pytest.skip("no nvcc here")
    build.build(compiler, build.jobs_of(compiler, [(9, 0)]), tmp_path / "set")


def test_ptx_is_made_for_devices_that_no_cubin_suits():
    compiler = compiler_of((12, 6))
    jobs = [job for job in build.jobs_of(compiler, [], ["argmax"]) if job.ptx]
    build.build(compiler, jobs, CACHE / "cuda-12.6")
    found = choose(binaries(jobs[0].source, CACHE), (10, 0), (13, 0))
    assert found is not None
    assert found.ptx
    assert b".target sm_80" in found.path.read_bytes()
