"""An earlier commit of this repository, which plays the last release: none has been made yet."""

from __future__ import annotations

import subprocess
import sysconfig
import venv
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parent.parent.parent
RELEASED: Final = "94acf18ee8b60db467bdae6d30126eeabd8c3a10"
"""The commit; `protos/released.binpb` is of it, too."""


def python_of_the_release(folder: Path) -> Path:
    """Return a Python that imports the code of the release, and what else is installed here.

    It is one of its own, and not a variable of the environment, since workers keep theirs from what they start.
    """
    archive = ["git", "-C", str(ROOT), "archive", RELEASED, "fxlib", "service", "workers"]
    got = subprocess.run(archive, check=False, capture_output=True)
    if got.returncode:
        pytest.skip(
            f"the history of this checkout has no commit {RELEASED[:8]} (it is a shallow one, or no repository)"
        )
    code = folder / "code"
    code.mkdir()
    subprocess.run(["tar", "-x", "-C", str(code)], input=got.stdout, check=True)
    venv.create(folder / "venv", symlinks=True)
    [packages] = (folder / "venv" / "lib").glob("python*/site-packages")
    here = sysconfig.get_paths()["purelib"]  # as a plain folder, in which no .pth file is read
    (packages / "released.pth").write_text(f"{code}\n{code / 'service'}\n{code / 'workers'}\n{here}\n")
    return folder / "venv" / "bin" / "python"
