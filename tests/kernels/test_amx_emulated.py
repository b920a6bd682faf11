"""The AMX kernels on any CPU with AVX512-BF16: the same source, its tile instructions in C++."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import policy_kernels as pk

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(
    shutil.which("cmake") is None or shutil.which("c++") is None,
    reason="building the emulated kernels needs cmake and a compiler",
)
@pytest.mark.skipif(
    "avx512bf16" not in pk.build_info().present_isas, reason="the emulation needs AVX512-BF16"
)
@pytest.mark.skipif(
    "POLICY_KERNELS_TEST_LIBRARY" in os.environ, reason="another build is being tested"
)
def test_the_amx_kernels_pass_every_test_under_emulation(tmp_path):
    """Their code, tile shapes and decoding; not the instructions themselves, nor their speed."""
    build = [
        ["cmake", "-S", ROOT, "-B", tmp_path, "-DCMAKE_BUILD_TYPE=Release", "-DPK_EMULATE_AMX=ON"],
        ["cmake", "--build", tmp_path, "--parallel", "2"],
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
            *(
                ROOT / "tests" / "kernels",
                "-k",
                "amx and (linear or dtypes or gaps) and not (f8 and 131077)",
            ),
        ],
    ]
    environment = os.environ | {"POLICY_KERNELS_TEST_LIBRARY": str(tmp_path)}
    for command in build:
        done = subprocess.run(
            list(map(str, command)), cwd=ROOT, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
