"""Generates the Python code of the contracts: `python -m protos.generate`.

protoc writes imports relative to the folder of the `.proto` files. The generated code is in a
sub-package, so its imports are rewritten.
"""

import re
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

SOURCES = Path(__file__).parent
GENERATED = SOURCES / "generated"


def generate() -> None:
    """Replaces every file of `protos/generated`; exits with protoc's status when it fails."""
    import grpc_tools  # a development dependency
    from grpc_tools import protoc

    with TemporaryDirectory() as folder:
        outputs = (
            "--python_out=",
            "--grpc_python_out=",
            "--mypy_out=quiet:",
            "--mypy_grpc_out=quiet:",
        )
        sources = sorted(str(path.relative_to(SOURCES.parent)) for path in SOURCES.glob("*.proto"))
        well_known = Path(grpc_tools.__file__).parent / "_proto"  # google/protobuf/*.proto
        includes = [f"-I{SOURCES.parent}", f"-I{well_known}"]
        arguments = ["protoc", *includes, *(out + folder for out in outputs)]
        if status := protoc.main([*arguments, *sources]):
            sys.exit(status)
        for stale in GENERATED.glob("*_pb2*"):
            stale.unlink()
        for path in Path(folder, "protos").iterdir():
            (GENERATED / path.name).write_text(_in_package(path.read_text()))


def _in_package(code: str) -> str:
    code = re.sub(r"^from protos import ", "from protos.generated import ", code, flags=re.M)
    return re.sub(r"\bprotos\.(\w+_pb2)", r"protos.generated.\1", code)


if __name__ == "__main__":
    generate()
