"""The CUDA sources compile without a GPU: the toolkit's compiler or NVRTC, whichever this machine has."""

import json

import pytest

from plugins_trt import build, nvrtc
from plugins_trt.registry import binaries, choose
from plugins_trt.sources import FOLDER, sources

LOG = """\
ptxas info    : Compiling entry function 'wide_bf16_d128' for 'sm_90'
ptxas info    : Function properties for wide_bf16_d128
    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 8 bytes cumulative stack size, 2048 bytes smem
ptxas info    : Compiling entry function 'choose_blocks' for 'sm_90'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, 380 bytes cmem[0]
"""


def test_the_compilers_report_is_read():
    wide, choose_blocks = build.parse_resources(LOG)
    assert wide == build.Resources("wide_bf16_d128", 255, 8, 4, 12, 2048)
    assert choose_blocks == build.Resources("choose_blocks", 40, 0, 0, 0, 0)


def test_a_kernel_that_spills_is_refused():
    source = sources()[0]
    with pytest.raises(build.SpillError, match="wide_bf16_d128 spills 4 bytes"):
        build.refuse_spills(source, (9, 0), build.parse_resources(LOG))


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


@pytest.mark.timeout(600)
@pytest.mark.parametrize("capability", [(8, 7), (9, 0)])
def test_every_operator_compiles_without_spills(capability, tmp_path):
    compilers = [each for each in build.compilers() if capability in each.capabilities]
    if not compilers:
        pytest.skip("no CUDA compiler here")
    compiler = compilers[0]
    jobs = [job for job in build.jobs_of(compiler, [capability]) if not job.ptx]
    assert {job.source.name for job in jobs} == {source.name for source in sources()}
    build.build(compiler, jobs, tmp_path / "set")
    manifest = json.loads((tmp_path / "set" / "manifest.json").read_text())
    for entry in manifest["binaries"]:
        assert entry["kernels"]
        assert all(
            kernel["registers"] > 0 and not kernel["spill_stores"] for kernel in entry["kernels"].values()
        )
    for source in sources():
        found = choose(binaries(source, tmp_path), capability, compiler.version)
        assert found is not None
        assert found.path.read_bytes()[:4] == b"\x7fELF"
