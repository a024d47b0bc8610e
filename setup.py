"""Compiles protos/ into edged/v1 before the package is built; everything else is in pyproject.toml."""

from __future__ import annotations

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent


def compile_protos(destination: Path) -> None:
    """Write the message classes, their type stubs and the gRPC stubs of every proto under ``protos/``."""
    from importlib.resources import files  # noqa: PLC0415 - only the build has grpcio-tools

    from grpc_tools import protoc  # noqa: PLC0415 - only the build has grpcio-tools

    source = ROOT / "protos"
    names = sorted(str(path.relative_to(source)) for path in source.rglob("*.proto"))
    arguments = [
        "protoc",
        f"-I{source}",
        f"-I{files('grpc_tools') / '_proto'}",
        f"--python_out={destination}",
        f"--pyi_out={destination}",
        f"--grpc_python_out={destination}",
        *names,
    ]
    if protoc.main(arguments) != 0:
        raise RuntimeError(f"protoc could not compile {', '.join(names)}")
    (destination / "edged" / "v1" / "__init__.py").write_text(
        '"""The public API: message classes and stubs made from protos/edged/v1."""\n'
    )


class BuildWithProtos(build_py):
    """Runs protoc into the source tree, so that editable installs and tools find the modules too."""

    def run(self) -> None:
        """Compile, then build as usual."""
        compile_protos(ROOT)
        # A tree that was never built has no such package yet when setuptools looks for them.
        if "edged.v1" not in self.packages:
            self.packages.append("edged.v1")
        super().run()


setup(cmdclass={"build_py": BuildWithProtos})
