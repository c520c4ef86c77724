"""Generate the protobuf code beside `protos/aerostat/v1/*.proto` (messages, typed stubs, gRPC services).

The output is committed; a test generates it anew into a temporary folder and compares.
"""

import sys
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"


def generate(out: Path) -> None:
    sources = sorted(str(p.relative_to(PROTOS)) for p in PROTOS.glob("aerostat/v1/*.proto"))
    wellknown = Path(protoc.__file__).parent / "_proto"
    outputs = [f"--{kind}={out}" for kind in ("python_out", "grpc_python_out", "mypy_out", "mypy_grpc_out")]
    code = protoc.main(["protoc", f"-I{PROTOS}", f"-I{wellknown}", *outputs, *sources])
    if code:
        raise SystemExit(f"protoc failed with exit code {code}")


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else PROTOS)
