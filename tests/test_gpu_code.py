"""What the compiler makes of the GPU kernels for sm_90: no more instructions per score than they were designed for.

Compiling takes no GPU, but a process in which Triton doesn't interpret.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from continuous_attention.kernels import triton

pytestmark = pytest.mark.skipif(bool(triton.reason), reason=triton.reason)

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def count(name: str) -> dict[str, Any]:
    """benchmarks/gpu_code.py's figures for one kernel."""
    code = "import json, sys, gpu_code; print(json.dumps(gpu_code.count(90, sys.argv[1])._asdict()))"
    run = subprocess.run(
        [sys.executable, "-c", code, name],
        env={key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
        | {"PYTHONPATH": str(BENCHMARKS)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.parametrize(("name", "most"), [("forward, D 64", 18.0), ("forward, D 128", 19.0)])
def test_forward(name: str, most: float) -> None:
    found = count(name)
    assert found["total"] <= most
    assert found["of"]["MUFU"] <= 2.2
    assert not any(found["of"][kind] for kind in ("LDL", "STL", "LDS", "STS"))
    assert found["conversions"] == 0


def test_backward() -> None:
    found = count("backward, D 128")
    assert found["total"] <= 35.0
    assert found["of"]["LDL"] == found["of"]["STL"] == 0
