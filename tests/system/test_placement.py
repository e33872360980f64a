"""Where the packed graph's nodes run and what they launch, by onnxruntime's own CUDA provider on a fake of CUDA's runtime.

Needs onnxruntime-gpu, g++ and CUDA's headers, but no GPU. What kernels compute it does not show. `make test-gpu` runs it.
"""

import json
import sys
import sysconfig
from pathlib import Path

import onnxruntime as ort
import pytest

from cloze.model_store import Store
from tests.fake_cuda.build import build
from tests.support.command import call

pytestmark = pytest.mark.gpu

PACKAGES = sysconfig.get_paths()["purelib"]
FOLDERS = ("nvidia/cu13/include", "triton/backends/nvidia/include", "/usr/local/cuda/include")
HEADERS = [Path(PACKAGES, folder) for folder in FOLDERS]
"""Those of NVIDIA's packages, those that torch's builds for CUDA bring along, or a toolkit's."""


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    provider = Path(ort.__file__).parent / "capi" / "libonnxruntime_providers_cuda.so"
    if not provider.is_file():
        pytest.skip("no onnxruntime-gpu")
    cuda = ort.cuda_version.partition(".")[0]  # functions have other names in another one
    version = f"#define CUDART_VERSION  {cuda}0"  # 13000 is 13.0
    for headers in HEADERS:
        file = headers / "cuda_runtime_api.h"
        if (headers / "crt/host_defines.h").is_file() and version in file.read_text():
            break
    else:
        pytest.skip(f"no headers of CUDA {cuda}'s runtime in {' or '.join(map(str, HEADERS))}")
    folder = tmp_path_factory.mktemp("fake-cuda")
    build(folder, provider, headers)
    return folder


@pytest.mark.parametrize("name", ["bert", "bert-qa"])
def test_every_node_is_cudas_and_every_launch_is_possible(
    name: str, packed_store: Path, libraries: Path
) -> None:
    command = [sys.executable, "-m", "tests.fake_cuda.run", str(libraries), str(packed_store), name]
    done = call(*command, timeout=170)
    found = json.loads(done.stdout)
    layers = Store(packed_store).open(name).manifest.architecture.layers
    assert {placed.split()[0] for placed in found["placed"]} == {"CUDAExecutionProvider"}
    assert not [placed for placed in found["placed"] if "Memcpy" in placed], (
        "nothing goes between host and device within a run"
    )
    for asked, batch in found["batches"].items():
        assert not batch["impossible"], f"{asked or 'nothing'} asked: zero rows launch nothing"
        assert batch["to device"] == 1, "all inputs go over in one copy"
        assert batch["to host"] == len(batch["shapes"]), "each output comes back in one"
        flash = sum(
            count for kernel, count in batch["launches"].items() if "flash_fwd_kernel" in kernel
        )
        assert flash == layers, "attention of unlike lengths is the flash kernel's"
    assert found["grown"] < 0.05 * found["held"], (
        "after a start, batches of other shapes ask for next to no memory"
    )
    everything, nothing = (found["batches"][key] for key in (max(found["batches"], key=len), ""))
    rows = {
        "top_ids": [2, 3],
        "target_logits": [2],
        "pair_logits": [3, 2],
        "embeddings": [3, 64],
        "span_logits": [42, 2],
    }
    assert (
        everything["shapes"].items()
        >= {output: rows[output] for output in everything["shapes"] if output in rows}.items()
    )
    assert all(
        shape[0] == 0 for output, shape in nothing["shapes"].items() if output != "span_logits"
    )
