"""The wheel that is built from the sdist holds real files in place of the links, and works outside the repository."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and the wheel made from it."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return folder


def sources() -> set[str]:
    """Every module as it must lie in the wheel."""
    tracked = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    names = [name for name in tracked.splitlines() if (ROOT / name).exists()]
    return {
        name if name.startswith("trimegatron/") else f"trimegatron/{name}"
        for name in names
        if not name.startswith("tests/")
    }


def test_every_module_is_in_both_as_a_file(built: Path):
    (wheel,), (sdist,) = built.glob("*.whl"), built.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        files = {
            info.filename for info in archive.infolist() if info.file_size or info.filename.endswith("__init__.py")
        }
        assert sources() <= files
        assert not [
            name for name in files if name.startswith(("kernels/", "preprocess/", "convert/", "bench/", "tests/"))
        ]
        assert any(name.endswith("licenses/LICENSE") for name in files)
    with tarfile.open(sdist) as archive:
        inside = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    assert sources() <= inside


def test_the_wheel_works_outside_the_repository(built: Path, tmp_path: Path):
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    code = (
        "import trimegatron, trimegatron.kernels.functional as f, trimegatron.convert.gpt2 as g, torch\n"
        "x = f.bias_gelu(torch.zeros(2, 4), torch.zeros(4))\n"
        "print(trimegatron.__file__, g.__file__, x.sum().item())\n"
        "from trimegatron.cli import main; main(['--version'])"
    )
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-c", code], cwd="/", env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    package, convert, value = result.stdout.splitlines()[0].split()
    assert Path(package).is_relative_to(tmp_path) and Path(convert).is_relative_to(tmp_path)
    assert value == "0.0"
    assert result.stdout.splitlines()[1].startswith("trimegatron ")
