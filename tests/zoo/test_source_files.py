"""What a model was made from is noted by whatever function it was opened, and in the state in which it was read."""

from pathlib import Path

import pytest

from tests.shared.forked import printed

pytestmark = pytest.mark.slow

BEGIN = """
import contextlib, os, sqlite3, subprocess, sys
from pathlib import Path
import safetensors.torch, torch
from fxlib.zoo.source_files import Observer, environment

folder = Path.cwd() / "files"
folder.mkdir()
def edit(name, text="edited"):  # as an editor does, which is another process
    subprocess.run(["sh", "-c", f"printf {text} > {folder / name}"], check=True)
"""
END = """
found = observer.found()
names = sorted(Path(each).name for each in found.files if each.startswith(str(folder)))
print(*names, found.complete, found.unchanged({}, environment()))
"""


def noted(folder: Path, before: str, making: str) -> str:
    """The files noted while a model was made, whether these are all, and whether they are unchanged."""
    return printed(f"{BEGIN}\n{before}\nobserver = Observer()\n{making}\n{END}", folder).strip()


def test_a_database_is_seen(tmp_path: Path) -> None:
    making = 'sqlite3.connect(folder / "a.db"); sqlite3.connect(":memory:")'
    assert noted(tmp_path, 'edit("a.db", "0")', making) == "a.db True True"


def test_a_database_that_a_uri_names_may_be_any_file(tmp_path: Path) -> None:
    assert noted(tmp_path, "", 'sqlite3.connect("file:a.db?mode=memory", uri=True)').startswith("False False")


def test_a_file_is_noted_by_the_folder_in_which_it_was_opened(tmp_path: Path) -> None:
    making = 'with contextlib.chdir(folder): open("a.txt").read(); open(b"b.txt").read()'
    assert noted(tmp_path, 'edit("a.txt"); edit("b.txt")', making) == "a.txt b.txt True True"


def test_a_file_that_was_edited_after_it_was_read_has_changed(tmp_path: Path) -> None:
    making = 'open(folder / "a.txt").read(); edit("a.txt", "other")'
    assert noted(tmp_path, 'edit("a.txt")', making) == "a.txt True False"


def test_a_file_that_was_deleted_after_it_was_read_has_changed(tmp_path: Path) -> None:
    before = 'import tempfile; tempfile.tempdir = "/elsewhere"; edit("a.txt")'
    assert noted(tmp_path, before, 'open(folder / "a.txt").read(); os.remove(folder / "a.txt")') == "a.txt True False"


def test_a_temporary_file_is_not_noted_and_what_is_made_and_kept_is(tmp_path: Path) -> None:
    making = """
import tempfile
with tempfile.NamedTemporaryFile("w+") as file:
    open(file.name).read()
with contextlib.suppress(FileNotFoundError):
    open(folder / "cached")
edit("cached")
open(folder / "cached").read()
"""
    assert noted(tmp_path, "", making) == "cached True True"


def test_a_module_is_noted_by_its_source_and_not_by_what_python_compiles_it_to(tmp_path: Path) -> None:
    before = """
sys.dont_write_bytecode = False
sys.path.insert(0, str(folder))
edit("amodule.py", "a=1")
import amodule
del sys.modules["amodule"]
edit("amodule.py", "a=123")  # so that its bytecode is stale
"""
    assert noted(tmp_path, before, "import amodule") == "amodule.py True True"


def test_a_module_that_was_edited_after_it_was_imported_has_changed(tmp_path: Path) -> None:
    before = 'sys.path.insert(0, str(folder)); edit("amodule.py", "a=1")'
    assert noted(tmp_path, before, 'import amodule; edit("amodule.py", "a=123")') == "amodule.py True False"


def test_weights_are_seen_that_libraries_open_without_python(tmp_path: Path) -> None:
    before = """
weights = {"w": torch.ones(3)}
safetensors.torch.save_file(weights, folder / "a.safetensors")
safetensors.torch.save_file(weights, folder / "b.safetensors")
torch.save(weights, folder / "c.pt")
edit("d.pt2")
edit("e.ts")
torch.export.load = torch.jit.load = str  # the real ones take seconds
"""
    making = """
safetensors.torch.load_file(folder / "a.safetensors")
with safetensors.safe_open(filename=folder / "b.safetensors", framework="pt") as file:
    file.get_tensor("w")
torch.load(folder / "c.pt", mmap=True)
torch.export.load(folder / "d.pt2")
torch.jit.load(folder / "e.ts")
"""
    assert noted(tmp_path, before, making) == "a.safetensors b.safetensors c.pt d.pt2 e.ts True True"


LOOKING = """
import tempfile
tempfile.tempdir = "/elsewhere"
with contextlib.suppress(FileNotFoundError): open(folder / "a.txt")
"""


def test_a_file_that_is_not_there_is_noted(tmp_path: Path) -> None:
    assert noted(tmp_path, "", LOOKING) == "a.txt True True"


def test_a_file_that_has_appeared_where_there_was_none_has_changed(tmp_path: Path) -> None:
    end = 'found = observer.found(); edit("a.txt"); print(found.unchanged({}, environment())); sys.exit()'
    assert noted(tmp_path, "", f"{LOOKING}\n{end}") == "False"
